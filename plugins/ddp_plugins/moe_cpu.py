"""Experts of different widths on a CPU: a kernel of our own, or a loop over the experts.

With AVX-512 BF16 `moe_cpu_rows` runs bfloat16 experts, in one call over the packed rows. Everything else goes through
the loop, which multiplies the rows of one expert after the other.

Letters: T tokens, H hidden size, K experts a token. A place is an expert's position in `ExpertLayout.order`.
"""

import torch
import torch.nn.functional as F

from ddp_plugins import moe_cpu_rows
from ddp_plugins.huge_pages import on_huge_pages


def finish_weights(w13: torch.Tensor, w2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the same weights where they are read fastest; compile the kernel now, or log why the loop runs them."""
    moe_cpu_rows.serves(w2)
    return on_huge_pages(w13), on_huge_pages(w2)


def ragged_moe(
    x_TH: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    layout_3E: torch.Tensor,
    topk_weights_TK: torch.Tensor,
    topk_ids_TK: torch.Tensor,
    expert_map: torch.Tensor | None,
) -> torch.Tensor:
    """Return `y_TH`; arguments as in `moe_experts.ragged_moe`."""
    run = moe_cpu_rows.ragged_moe if moe_cpu_rows.serves(w2) else loop_over_experts
    return run(x_TH, w13, w2, layout_3E, topk_weights_TK, topk_ids_TK, expert_map)


def loop_over_experts(
    x_TH: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    layout_3E: torch.Tensor,
    topk_weights_TK: torch.Tensor,
    topk_ids_TK: torch.Tensor,
    expert_map: torch.Tensor | None,
) -> torch.Tensor:
    """Return `y_TH`; arguments as in `moe_experts.ragged_moe`. The sum over K is float32, rounded once."""
    ids_TK = topk_ids_TK if expert_map is None else torch.where(topk_ids_TK < 0, -1, expert_map[topk_ids_TK])
    places_TK = torch.where(ids_TK < 0, -1, layout_3E[0, ids_TK])  # an index of -1 reads the last, to no effect
    _, offsets, widths = layout_3E.tolist()
    y_TH = torch.zeros(x_TH.shape, dtype=torch.float32)
    for place in places_TK.unique().tolist():
        if place < 0:  # no expert of this rank
            continue
        rows = slice(offsets[place], offsets[place] + widths[place])
        tokens, slots = (places_TK == place).nonzero(as_tuple=True)
        x = x_TH[tokens]
        hidden = F.silu(x @ w13[0, rows].t()) * (x @ w13[1, rows].t())
        y_TH.index_add_(0, tokens, (hidden @ w2[rows]) * topk_weights_TK[tokens, slots, None])
    return y_TH.to(x_TH.dtype)
