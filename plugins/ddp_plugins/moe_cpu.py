"""Experts of different widths on a CPU.

Letters: T tokens, H hidden size, K experts a token, E experts, S rows of all experts, P (token, slot) pairs.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F


def finish_weights(
    padded_widths: Sequence[int], w13: torch.Tensor, w2: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights as `ragged_moe` reads them."""
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
    """Return `y_TH`, expert by expert; arguments as in `moe_experts.ragged_moe`."""
    order, starts, counts = sort_pairs(layout_3E[0], topk_ids_TK, expert_map)
    num_slots = topk_ids_TK.shape[1]
    y_TH = torch.zeros(x_TH.shape, dtype=torch.float32)
    weights_P = topk_weights_TK.flatten()
    for place, count in enumerate(counts):
        if not count:
            continue
        pairs = order[starts[place] : starts[place] + count]
        tokens = pairs // num_slots
        rows = slice(int(layout_3E[1, place]), int(layout_3E[1, place] + layout_3E[2, place]))
        x = x_TH[tokens]
        hidden = F.silu(x @ w13[0, rows].t()) * (x @ w13[1, rows].t())
        y_TH.index_add_(0, tokens, (hidden @ w2[rows]).float() * weights_P[pairs, None])
    return y_TH.to(x_TH.dtype)


def sort_pairs(
    places_E: torch.Tensor, topk_ids_TK: torch.Tensor, expert_map: torch.Tensor | None
) -> tuple[torch.Tensor, list[int], list[int]]:
    """Group the (token, slot) pairs by expert.

    Returns the pairs' numbers t·K + k, sorted by the place of their expert, and for each place where its pairs start
    and how many they are. Pairs without an expert here come first and belong to no place.
    """
    ids_P = topk_ids_TK.flatten().long()
    if expert_map is not None:
        ids_P = torch.where(ids_P >= 0, expert_map.long()[ids_P], -1)
    places_P = torch.where(ids_P >= 0, places_E.long()[ids_P], -1)
    counts = torch.bincount(places_P + 1, minlength=places_E.numel() + 1)
    starts = counts.cumsum(0)
    return places_P.argsort(stable=True), starts.tolist()[:-1], counts.tolist()[1:]
