"""Experts of different widths on a CPU: a kernel of our own, or vLLM's, or a loop.

With AVX-512 BF16 `moe_cpu_rows` runs them, in one call over the packed rows. Elsewhere pairs are sorted by expert, and
`moe_cpu_buckets` hands them to vLLM's kernel. Where that is missing or the shape is not its own, a loop over experts
multiplies the packed rows as they are.

Letters: T tokens, H hidden size, K experts a token, P = T·K (token, slot) pairs. A place is an expert's position in
`ExpertLayout.order`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from ddp_plugins import moe_cpu_buckets, moe_cpu_rows
from ddp_plugins.huge_pages import empty_on_huge_pages

Array = np.ndarray[Any, np.dtype[Any]]


def finish_weights(
    widths: Sequence[int], offsets: Sequence[int], w13: torch.Tensor, w2: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights as the fastest way to run them wants them, `[2, S, H]` and `[S, H]` or in buckets, flattened.

    `ragged_moe` tells them apart by their shapes. widths, offsets: rows and first row of the expert at each place.
    """
    if moe_cpu_rows.serves(w2):
        new13, new2 = (empty_on_huge_pages(matrix.numel(), matrix) for matrix in (w13, w2))
        return new13.view_as(w13).copy_(w13), new2.view_as(w2).copy_(w2)
    if moe_cpu_buckets.serves(w2):
        return moe_cpu_buckets.finish_weights(widths, offsets, w13, w2)
    return w13, w2


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
    if w13.ndim == 3 and moe_cpu_rows.serves(w2):
        return moe_cpu_rows.ragged_moe(x_TH, w13, w2, layout_3E, topk_weights_TK, topk_ids_TK, expert_map)
    num_tokens, num_slots = topk_ids_TK.shape
    table = layout_3E.numpy()
    ids_P = topk_ids_TK.flatten().numpy()
    places_P, order_P = sort_pairs(table[0], ids_P, None if expert_map is None else expert_map.numpy())
    weights_P = torch.from_numpy(topk_weights_TK.flatten().numpy()[order_P])
    bucketed = w13.ndim == 1
    if bucketed and num_tokens == 1:
        return moe_cpu_buckets.run_one_token(x_TH, w13, w2, table[2], weights_P, places_P)
    x_PH = x_TH[torch.from_numpy(order_P // num_slots)]
    terms_PH = torch.empty_like(x_PH)
    terms_PH[: places_P.searchsorted(0)] = 0  # pairs without an expert here
    if bucketed:
        moe_cpu_buckets.run(terms_PH, x_PH, w13, w2, table[2], weights_P, places_P)
    else:
        _run_loop(terms_PH, x_PH, w13, w2, table, weights_P, places_P)
    back_P = np.empty_like(order_P)
    back_P[order_P] = np.arange(len(order_P))
    # bfloat16 and float16 are summed in float32 here and rounded once
    return terms_PH[torch.from_numpy(back_P)].view(num_tokens, num_slots, x_TH.shape[1]).sum(1)


def sort_pairs(places_E: Array, ids_P: Array, expert_map: Array | None) -> tuple[Array, Array]:
    """Group the pairs by expert, in NumPy: torch's operators cost ten times as much on so few numbers.

    places_E: the place of each expert id, -1 for none.
    Returns the place of each pair in sorted order, and the pairs' numbers t·K + k in that order. Pairs without an
    expert here come first, with place -1.
    """
    if expert_map is not None:
        ids_P = np.where(ids_P >= 0, expert_map[ids_P], -1)
    places_P = np.where(ids_P >= 0, places_E[ids_P], np.int32(-1))
    order_P = places_P.argsort(kind="stable")
    return places_P[order_P], order_P


def _run_loop(
    terms_PH: torch.Tensor,
    x_PH: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    table: Array,
    weights_P: torch.Tensor,
    places_P: Array,
) -> None:
    _, offsets, widths = table.tolist()
    starts = places_P.searchsorted(np.arange(len(widths) + 1)).tolist()
    for place, (offset, width) in enumerate(zip(offsets, widths, strict=True)):
        pairs, rows = slice(starts[place], starts[place + 1]), slice(offset, offset + width)
        if pairs.start < pairs.stop:
            gate, up = x_PH[pairs] @ w13[0, rows].t(), x_PH[pairs] @ w13[1, rows].t()
            terms_PH[pairs] = (F.silu(gate) * up @ w2[rows]).float() * weights_P[pairs, None]
