"""Which units stay: one greedy selection under a budget, while searching and to round.

Units leave a list (the channels of a layer, of an expert; the heads of a layer, of a KV head) worst first, in blocks,
so a list keeps some number of its first blocks. The selection chooses that number.
Legend: G places where a budget holds (the model, its layers or its experts), M blocks of such a place; R lists, U units
of a list, B blocks of a list.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy
import scipy.optimize
import scipy.sparse
import torch

from ddp_vllm.errors import SettingError, TrainingError

INFEASIBLE = 2  # scipy's status of a problem without a solution; 1 is a time limit


def greedy(
    worth_GM: torch.Tensor, cost_GM: torch.Tensor, budget_G: torch.Tensor, leads_GM: torch.Tensor | None = None
) -> torch.Tensor:
    """Return which blocks stay, bool [G, M], at a cost of at most `budget_G` a place; ties go to the lower index.

    Blocks are taken by worth for their cost until one does not fit, then those of the rest that do. With equal costs
    that is the best choice there is; with others it misses the best of a place by less than the worth of one block.
    What the places leave over together goes to those whose next block is worth most for its cost, one block each.
    `leads_GM`, int64: the block that has to be taken before this one.
    """
    cost_GM, ratio_GM = cost_GM.double(), torch.where(cost_GM > 0, worth_GM.double() / cost_GM, torch.inf)
    order_GM = ratio_GM.argsort(dim=-1, descending=True, stable=True)
    cost_GM, ratio_GM = cost_GM.gather(-1, order_GM), ratio_GM.gather(-1, order_GM)  # from here on, in this order
    budget_G = budget_G.double() * (1.0 + 1e-9)  # a share is seldom exact in binary
    taken_GM = cost_GM.cumsum(-1) <= budget_G[:, None]
    if leads_GM is not None:
        leads_GM = order_GM.argsort(-1).gather(-1, leads_GM.gather(-1, order_GM))

    def left_over() -> torch.Tensor:
        return budget_G[:, None] - torch.where(taken_GM, cost_GM, 0.0).sum(-1, keepdim=True)

    def fitting(left: torch.Tensor) -> torch.Tensor:
        possible = ~taken_GM & (cost_GM <= left)
        if leads_GM is None:
            return possible
        own = leads_GM == torch.arange(leads_GM.shape[1], device=leads_GM.device)
        return possible & (own | taken_GM.gather(-1, leads_GM))

    while (more_GM := fitting(left_over())).any():
        taken_GM |= more_GM & (torch.where(more_GM, cost_GM, 0.0).cumsum(-1) <= left_over())
    wants_G = torch.full_like(budget_G, len(budget_G) > 1, dtype=torch.bool)  # a block of what the others left
    while True:
        left = left_over().sum()
        if not (more_GM := fitting(left) & wants_G[:, None]).any():
            break
        first_G1, has_G = more_GM.int().argmax(-1, keepdim=True), more_GM.any(-1)
        next_ratio_G = torch.where(has_G, ratio_GM.gather(-1, first_G1)[:, 0], -1.0)
        next_cost_G = torch.where(has_G, cost_GM.gather(-1, first_G1)[:, 0], 0.0)
        order_G = next_ratio_G.argsort(descending=True, stable=True)
        gets_G = torch.zeros_like(has_G).scatter(0, order_G, next_cost_G[order_G].cumsum(0) <= left) & has_G
        taken_GM.scatter_(-1, first_G1, taken_GM.gather(-1, first_G1) | gets_G[:, None])
        wants_G &= has_G & ~gets_G
    return torch.zeros_like(taken_GM).scatter(-1, order_GM, taken_GM)


def exact_support(worth: torch.Tensor, kept: int) -> torch.Tensor:
    """Return the bool mask of the `kept` units of highest worth, of any shape; ties go to the lower index."""
    flat = worth.reshape(1, -1)
    return greedy(flat, torch.ones_like(flat), flat.new_tensor([kept])).view(worth.shape)


@dataclass(frozen=True, kw_only=True)
class Lists:
    """The units of one module type in lists, the first to stay first, cut into blocks."""

    order: torch.Tensor
    """int64 [R, U]: the units of a list."""
    units: torch.Tensor
    """int64 [R, B]: how many units a block has; 0: none, the block before has them."""
    worth: torch.Tensor
    """float64 [R, B]."""
    cost: torch.Tensor
    """float64 [R, B]; infinite where it has no units."""

    def support(self, taken_RB: torch.Tensor) -> torch.Tensor:
        """Return the bool mask [R, U] of the units in the taken blocks."""
        counts_R1 = (self.units * taken_RB).sum(1, keepdim=True)
        first_RU = torch.arange(self.order.shape[1]) < counts_R1
        return torch.zeros_like(first_RU).scatter(1, self.order, first_RU)


def best_first(worth_RU: torch.Tensor) -> torch.Tensor:
    """Return the units of each list by falling worth; ties go to the lower index."""
    return worth_RU.argsort(dim=1, descending=True, stable=True)


def evenly(worth_RU: torch.Tensor, queries_per_kv: int) -> torch.Tensor:
    """Return the query heads of each layer so that all KV heads lose their worst, then all their second worst, ..."""
    worth_RKQ = worth_RU.unflatten(1, (-1, queries_per_kv))
    order_RKQ = worth_RKQ.argsort(dim=2, descending=True, stable=True)
    first_K1 = torch.arange(worth_RKQ.shape[1])[:, None] * queries_per_kv
    return (order_RKQ + first_K1).transpose(1, 2).flatten(1)


def cut_lists(
    worth_RU: torch.Tensor,
    order_RU: torch.Tensor,
    cost_R: torch.Tensor,
    *,
    block: int = 1,
    opening_R: torch.Tensor | None = None,
) -> Lists:
    """Cut lists into blocks of `block` units; units past the last whole block go.

    cost_R: of a unit. opening_R: what a list costs as soon as it keeps anything, as the KV head that query heads share.
    Its first blocks are then joined into the one that is worth most for its cost, so that worth falls again.
    """
    num_blocks = worth_RU.shape[1] // block
    ranked = worth_RU.double().gather(1, order_RU)[:, : num_blocks * block]
    worth_RB = ranked.unflatten(1, (num_blocks, block)).sum(-1)
    cost_RB = (cost_R.double()[:, None] * block).expand_as(worth_RB).clone()
    units_RB = torch.full_like(worth_RB, block, dtype=torch.int64)
    if opening_R is not None:
        total_RB = cost_RB.cumsum(1) + opening_R.double()[:, None]
        ratio_RB = worth_RB.cumsum(1) / total_RB
        joined_R1 = num_blocks - 1 - ratio_RB.flip(1).argmax(1, keepdim=True)  # the longest of the best
        inside = torch.arange(num_blocks) <= joined_R1
        sums = [values.cumsum(1).gather(1, joined_R1) for values in (worth_RB, units_RB)]
        worth_RB, units_RB = worth_RB.masked_fill(inside, 0.0), units_RB.masked_fill(inside, 0)
        cost_RB = cost_RB.masked_fill(inside, torch.inf)
        worth_RB[:, :1], units_RB[:, :1], cost_RB[:, :1] = *sums, total_RB.gather(1, joined_R1)
    return Lists(order=order_RU, units=units_RB, worth=worth_RB, cost=cost_RB)


def best_support(lists: Sequence[Lists], budget_G: torch.Tensor) -> list[torch.Tensor]:
    """Return for each module type the bool mask [R, U] of what stays; each has its lists place after place."""
    num_places = len(budget_G)
    worth_GM, cost_GM = (
        torch.cat([getattr(part, name).reshape(num_places, -1) for part in lists], 1) for name in ("worth", "cost")
    )
    leads, start = [], 0
    for part in lists:
        num_lists, num_blocks = part.cost.shape
        firsts = start + num_blocks * torch.arange(num_lists // num_places)
        leads.append(firsts.repeat_interleave(num_blocks))
        start += num_lists // num_places * num_blocks
    taken_GM = greedy(worth_GM, cost_GM, budget_G, torch.cat(leads).expand_as(worth_GM))
    parts = taken_GM.split([part.cost.numel() // num_places for part in lists], dim=1)
    return [part.support(mine.reshape(part.cost.shape)) for part, mine in zip(lists, parts, strict=True)]


def exact_choice(
    worth_RB: Sequence[torch.Tensor], cost_RB: Sequence[torch.Tensor], budget: float, time_limit: float = 300.0
) -> list[torch.Tensor]:
    """Return how many blocks each list keeps, int64 [R] a module type: the most worth that `budget` can pay for.

    worth_RB, cost_RB: float64 [R, B + 1] a module type, what keeping the first 0, 1, … blocks is worth and costs;
    costs need not grow evenly. A choice of one number per list, by branch and bound (HiGHS), within 0.01 % of the best:
    proving the last of it takes minutes instead of a second. Raises: SettingError if nothing can be paid for,
    TrainingError if nothing was found within `time_limit` seconds; what was found by then is taken.
    """
    worth, cost = (torch.cat([part.flatten() for part in parts]).numpy() for parts in (worth_RB, cost_RB))
    sizes = [len(row) for part in worth_RB for row in part]
    rows = numpy.repeat(numpy.arange(len(sizes)), sizes)
    one_each = scipy.sparse.csr_array((numpy.ones(len(rows)), (rows, numpy.arange(len(rows)))))
    found = scipy.optimize.milp(
        -worth / max(worth.max(), 1e-300),
        integrality=numpy.ones(len(worth)),
        bounds=(0, 1),
        constraints=[(one_each, 1, 1), (cost[None] / budget, -numpy.inf, 1.0)],
        options={"mip_rel_gap": 1e-4, "time_limit": time_limit},
    )
    if found.x is None and found.status == INFEASIBLE:
        raise SettingError("nothing that can be kept meets the budget; remove less")
    if found.x is None:
        raise TrainingError(
            f"no choice of widths was found in {time_limit:g} seconds; run the same command again on a machine that is "
            "less busy, and it resumes here"
        )
    chosen = torch.from_numpy(found.x > 0.5).split([part.numel() for part in worth_RB])
    return [mine.view_as(part).int().argmax(1) for mine, part in zip(chosen, worth_RB, strict=True)]


def keeping_worth(saliency: torch.Tensor, alive: torch.Tensor) -> torch.Tensor:
    """Return the saliency, scaled down for closed gates until every open one is worth more; float64, same shape.

    What the search has closed comes back only where too little is open, or in place of gates without any saliency.
    """
    worth = saliency.double()  # in float32 saliencies that differ by more than 1e7 leave no room below them
    open_worth, closed_worth = worth[alive & (worth > 0)], worth[~alive]
    if len(open_worth) and len(closed_worth):
        scale = 0.5 * open_worth.min() / closed_worth.max().clamp_min(open_worth.min())
        worth = torch.where(alive, worth, worth * scale)
    return worth


def realign(gates: torch.Tensor, saliency: torch.Tensor, align: int) -> torch.Tensor:
    """Return learned gates [..., U] with a multiple of `align` open in every list, as many in all as that allows.

    Whole blocks move between lists by saliency, as if rounded so before the polish; what comes back has scale 1. It
    costs no perplexity on SmolLM2 (log 15).
    """
    alive = gates > 0
    worth_RU = keeping_worth(saliency, alive).flatten(0, -2)
    lists = cut_lists(worth_RU, best_first(worth_RU), torch.ones(len(worth_RU)), block=align)
    (support,) = best_support([lists], alive.sum()[None])
    return torch.where(alive, gates, 1.0) * support.view_as(gates)
