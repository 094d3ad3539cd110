"""Runs experts of different widths on a CPU: with our C++ kernel, or in a PyTorch loop over the
experts.

With AVX-512 BF16, `moe_cpu_rows` runs bfloat16 experts in one call over the packed rows. The loop
serves every other processor and dtype.

Letters: T tokens, H hidden size, K experts per token. A position is an expert's index in
    `ExpertLayout.order`.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from ddp_plugins import moe_cpu_rows
from ddp_vllm.huge_pages import on_huge_pages


def finish_weights(w13: torch.Tensor, w2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights in huge pages; compile the kernel now, or log why the loop runs
    instead."""
    moe_cpu_rows.serves(w2)
    return on_huge_pages(w13), on_huge_pages(w2)


def choose(w2: torch.Tensor) -> Callable[..., torch.Tensor]:
    """Return the implementation for experts with these rows, `[S, H]`."""
    return moe_cpu_rows.ragged_moe if moe_cpu_rows.serves(w2) else loop_over_experts


def loop_over_experts(
    x_TH: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    layout_3E: torch.Tensor,
    topk_weights_TK: torch.Tensor,
    topk_ids_TK: torch.Tensor,
    expert_map: torch.Tensor | None,
    limit: float | None = None,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Return `y_TH`; arguments as in `moe_experts.ragged_moe`. The sum over K is float32, rounded
    once.

    FP8 weights are dequantized to float32, expert by expert, at every call.
    """
    ids_TK = topk_ids_TK if expert_map is None else torch.where(topk_ids_TK < 0, -1, expert_map[topk_ids_TK])
    # reading at -1 is harmless: the result is masked
    positions_TK = torch.where(ids_TK < 0, -1, layout_3E[0, ids_TK])
    _, offsets, widths = layout_3E.tolist()
    y_TH = torch.zeros(x_TH.shape, dtype=torch.float32)
    for position in positions_TK.unique().tolist():
        if position < 0:  # not an expert of this rank, or one without rows
            continue
        rows = slice(offsets[position], offsets[position] + widths[position])
        tokens, slots = (positions_TK == position).nonzero(as_tuple=True)
        x, gate, up, down = x_TH[tokens], w13[0, rows], w13[1, rows], w2[rows]
        if scales is not None:
            gate_scale, up_scale = scales[0][:, rows, None]
            x, gate, up = x.float(), gate.float() * gate_scale, up.float() * up_scale
            down = down.float() * scales[1][position]
        gates, ups = x @ gate.t(), x @ up.t()
        if limit is not None:
            gates, ups = gates.clamp_(max=limit), ups.clamp_(-limit, limit)
        hidden = F.silu(gates) * ups
        y_TH.index_add_(0, tokens, (hidden @ down) * topk_weights_TK[tokens, slots, None])
    return y_TH.to(x_TH.dtype)
