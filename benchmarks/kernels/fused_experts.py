"""Calls vLLM's own fused experts, the baseline of `kernel_speed.py`, as its model layers do."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ddp_vllm.huge_pages import on_huge_pages
from expert_layers import Expert, Run

CPU_ALIGNMENT = 32  # vLLM pads the intermediate size to it and refuses other hidden sizes
GPU_ALIGNMENT = 64  # in favor of the baseline: odd widths would be read two bytes at a time


@dataclass(frozen=True, kw_only=True)
class FusedExperts:
    """vLLM's kernel over some experts, and what vLLM chose to run them."""

    run: Run
    choice: dict[str, Any]
    """`backend`, `experts` (the class) and `tuned`: the file of tile sizes for this GPU and layer,
    or None."""
    tiles_of: Callable[[int], dict[str, Any]]
    """Return the tile sizes for a number of tokens; {} where vLLM has none to choose."""

    def __call__(self, x_TH: torch.Tensor, weights_TK: torch.Tensor, ids_TK: torch.Tensor) -> torch.Tensor:
        return self.run(x_TH, weights_TK, ids_TK)

    def __str__(self) -> str:
        tuned = f"tile sizes of {self.choice['tuned']}" if self.choice["tuned"] else "no tile sizes tuned for it"
        return f"{self.choice['backend']} ({self.choice['experts']}), {tuned}"


def build_vllm(experts: Sequence[Expert], num_slots: int) -> FusedExperts:
    """Return vLLM's kernel over experts that are zero-padded to the widest one. num_slots: K."""
    like = experts[0][0]
    on_cpu = like.device.type == "cpu"
    step, hidden = (CPU_ALIGNMENT if on_cpu else GPU_ALIGNMENT), like.shape[1]
    width = max(1, max(-(-len(gate) // step) for gate, _, _ in experts)) * step
    w13, w2 = like.new_zeros(len(experts), 2 * width, hidden), like.new_zeros(len(experts), hidden, width)
    for i, (gate, up, down) in enumerate(experts):
        w13[i, : len(gate)], w13[i, width : width + len(up)], w2[i, :, : len(gate)] = gate, up, down
    return _on_cpu(w13, w2) if on_cpu else by_oracle(w13, w2, num_slots)


def _on_cpu(w13: torch.Tensor, w2: torch.Tensor) -> FusedExperts:
    from vllm._custom_ops import cpu_fused_moe, cpu_prepack_moe_weight

    isa = "amx" if w13.dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported() else "vec"
    # as ours are
    w13, w2 = (on_huge_pages(cpu_prepack_moe_weight(weight, isa)) for weight in (w13, w2))

    def run(x_TH: torch.Tensor, weights_TK: torch.Tensor, ids_TK: torch.Tensor) -> torch.Tensor:
        y_TH = torch.empty_like(x_TH)
        cpu_fused_moe(y_TH, x_TH, w13, w2, None, None, weights_TK, ids_TK, "silu", isa)
        return y_TH

    choice = {"backend": "CPU", "experts": f"cpu_fused_moe, {isa}", "tuned": None}
    return FusedExperts(run=run, choice=choice, tiles_of=lambda num_tokens: {})


def by_oracle(w13: torch.Tensor, w2: torch.Tensor, num_slots: int) -> FusedExperts:
    """Return the kernel that vLLM's own oracle chooses on this GPU, with weights in its
    format.

    w13: `[E, 2w, H]`, gate then up. w2: `[E, H, w]`.
    """
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import (
        FUSED_MOE_UNQUANTIZED_CONFIG,
        FusedMoEConfig,
        FusedMoEParallelConfig,
        RoutingMethodType,
    )
    from vllm.model_executor.layers.fused_moe.fused_moe import try_get_optimal_moe_config
    from vllm.model_executor.layers.fused_moe.oracle import unquantized as oracle

    num_experts, hidden, width = w2.shape
    with set_current_vllm_config(VllmConfig()):
        config = FusedMoEConfig(
            num_experts=num_experts, num_local_experts=num_experts, num_logical_experts=num_experts,
            experts_per_token=num_slots, hidden_dim=hidden, intermediate_size=width, in_dtype=w13.dtype,
            activation=MoEActivation.SILU, device=w13.device, routing_method=RoutingMethodType.Renormalize,
            moe_parallel_config=FusedMoEParallelConfig.make_no_parallel(),
        )  # fmt: skip
        backend, chosen = oracle.select_unquantized_moe_backend(config)
        # the same routing for every variant requires a kernel that is given the routing
        taking_ids = [kind for kind in oracle.backend_to_kernel_cls(backend) if not kind.is_monolithic()]
        experts = chosen if chosen in taking_ids else next(iter(taking_ids), None)
        if experts is None:
            raise SystemExit(f"vLLM chooses {backend.value}, whose kernel routes tokens itself; use another GPU")
        layer = torch.nn.Module()  # whose weights some kernels store in another format
        converted = oracle.convert_to_unquantized_kernel_format(backend, config, w13, w2)
        layer.w13_weight, layer.w2_weight = (torch.nn.Parameter(w, requires_grad=False) for w in converted)
        kernel = oracle.make_unquantized_moe_kernel(FUSED_MOE_UNQUANTIZED_CONFIG, config, backend, experts)
        kernel.fused_experts.process_weights_after_loading(layer)
    _make_workspace(w13.device)

    def run(x_TH: torch.Tensor, weights_TK: torch.Tensor, ids_TK: torch.Tensor) -> torch.Tensor:
        return kernel.apply(
            hidden_states=x_TH, w1=layer.w13_weight, w2=layer.w2_weight, topk_weights=weights_TK, topk_ids=ids_TK,
            activation=MoEActivation.SILU, global_num_experts=num_experts, expert_map=None,
            apply_router_weight_on_input=False,
        )  # fmt: skip

    def tiles_of(num_tokens: int) -> dict[str, Any]:
        if not is_triton:
            return {}
        return dict(try_get_optimal_moe_config(w13.shape, w2.shape, num_slots, None, num_tokens))

    is_triton = "TRITON" in backend.value
    tuned = _tuned_file(num_experts, width) if is_triton else None
    choice = {"backend": backend.value, "experts": experts.__name__, "tuned": tuned}
    return FusedExperts(run=run, choice=choice, tiles_of=tiles_of)


def _tuned_file(num_experts: int, width: int) -> str | None:
    """Return the name of vLLM's file of tile sizes for this GPU and layer, if it has one."""
    from vllm.model_executor.layers.fused_moe.fused_moe import get_config_file_name, get_moe_configs

    return get_config_file_name(num_experts, width, None) if get_moe_configs(num_experts, width, None) else None


def _make_workspace(device: torch.device) -> None:
    """Create the buffers that vLLM's kernels share; a worker of vLLM does this when it starts."""
    from vllm.v1.worker.workspace import init_workspace_manager, is_workspace_manager_initialized

    if not is_workspace_manager_initialized():
        init_workspace_manager(device)
