"""Budgets: a pool is a set of units under one constraint on their cost, and chooses the kept ones.

The paper's budget, `units`, has one `Pool` per module type, in which each unit costs 1. Every other
budget has one pool over all module types: in `params`, `flops` and `kv-bytes` units have prices, in
`latency` measured times (`LatencyPool`). Whole experts have a pool of their own
(`WholeExpertPool`).

Legend: L layers, U units of a layer, E experts, C channels; G budget groups (the model, its layers
or its experts), N units of a group; R rows of U units, B blocks of a row.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from ddp_prune.core.gates import Masks
from ddp_prune.core.selection import (
    Rows,
    best_support,
    choose_counts,
    cut_rows,
    greedy,
    rank_evenly_per_kv_head,
    rank_open_first,
)
from ddp_vllm.errors import SettingError

CLOSED_BY = 0.85  # of the search: gates close until then
NOTICEABLE = 1e-3  # of a budget, of which tenths of a percent are printed


def keep_schedule(progress: float, keep_ratio: float, start: float = 1.0) -> float:
    """Return the keep ratio at `progress` in [0, 1]: `start` at 0, ρ from CLOSED_BY on, quadratic
    in between.

    As in gradual pruning (arXiv:1710.01878), most gates close early, while the remaining ones can
    still adapt. The cubic schedule of that paper closes too many before enough tokens have shown
    which gates matter.
    """
    left = max(0.0, 1.0 - progress / CLOSED_BY)
    return keep_ratio + (start - keep_ratio) * left**2


def kept_share(score_GN: Tensor, cost_GN: Tensor) -> Tensor:
    """Return Σ c·s / Σ c of each budget group, [G]; the plain mean (Eq. 6) where all costs are
    equal."""
    return (score_GN * cost_GN).sum(-1) / cost_GN.sum(-1)


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Units under one constraint: the kept ones cost at most `kept`."""

    name: str
    """The module type, or the budget if several module types share it."""
    currency: str
    """The unit of the costs, for messages."""
    shapes: Mapping[str, tuple[int, ...]]
    """[L, U], or [L, E, C] of experts, per module type."""
    costs: Mapping[str, Tensor]
    """float64 [L] per module type: the cost of one unit of each layer."""
    fixed: Mapping[str, Tensor] = field(default_factory=dict)
    """float64 [L] per module type with a fixed cost, which a row of units has as long as any of
    them is kept."""
    kept: float
    """The budget: the highest cost of the kept units."""
    scope: str = "global"
    """Whether the budget holds for the whole model (`global`), for each `layer` or for each
    `expert`."""
    blocks: Mapping[str, int] = field(default_factory=dict)
    """How many units the final selection keeps or removes together, per module type; 1 if it is not
    listed."""
    queries_per_kv: int = 1
    """How many attention units share a KV head; 1 if each unit is a whole KV head."""

    def unit_costs(self, kind: str) -> Tensor:
        """Return the cost of every unit in the shape of the masks, including its share of the fixed
        cost of its row."""
        shape, cost_L = self.shapes[kind], self.costs[kind]
        if kind in self.fixed:
            shares_kv = kind == "attn" and self.queries_per_kv > 1
            cost_L = cost_L + self.fixed[kind] / (self.queries_per_kv if shares_kv else shape[-1])
        return cost_L.view(-1, *[1] * (len(shape) - 1)).expand(shape)

    @cached_property
    def _costs_by_device(self) -> dict[torch.device, Tensor]:
        return {}

    def joined_costs(self, device: torch.device | str = "cpu") -> Tensor:
        """Return the cost of every unit, float64 [G, N]; it stays on the device, because every step
        asks for it."""
        costs, device = self._costs_by_device, torch.device(device)
        if device not in costs:
            costs[device] = self.join({kind: self.unit_costs(kind).to(device) for kind in self.shapes})
        return costs[device]

    @property
    def total(self) -> float:
        """The cost of all units."""
        return sum(float(self.unit_costs(kind).sum()) for kind in self.shapes)

    @property
    def keep_ratio(self) -> float:
        return self.kept / self.total

    def removed_share(self, is_open: Masks) -> float:
        """Return the share of the cost of all units that the closed ones have, the mean over the
        budget groups. is_open: bool, shaped as the masks."""
        open_GN = self.join({kind: mask.float() for kind, mask in is_open.items()})
        return 1.0 - float(kept_share(open_GN, self.joined_costs(open_GN.device)).mean())

    def join(self, values: Masks) -> Tensor:
        """Return the values of all units, one tensor per module type, as [G, N]."""
        if self.scope == "global":
            return torch.cat([values[kind].flatten() for kind in self.shapes])[None]
        if self.scope == "expert":
            return values["experts"].flatten(0, -2)
        return torch.cat([values[kind].flatten(1) for kind in self.shapes], dim=1)

    def split(self, values_GN: Tensor) -> Masks:
        """Undo `join`."""
        parts = values_GN.split([math.prod(shape) // len(values_GN) for shape in self.shapes.values()], dim=1)
        return {kind: part.reshape(shape) for part, (kind, shape) in zip(parts, self.shapes.items(), strict=True)}

    def close(self, importance: Masks, is_open: Masks, keep_ratio: float) -> Masks:
        """Return which open units (bool) the search keeps open, for at most `keep_ratio` of the
        cost of all units."""
        open_GN = self.join(is_open)
        cost_GN = self.joined_costs(open_GN.device)
        budget_G = keep_ratio * cost_GN.sum(-1)
        kept_GN = greedy(self.join(importance), cost_GN.masked_fill(~open_GN, torch.inf), budget_G)
        return self.split(kept_GN & open_GN)

    def choose(self, importance: Masks, is_open: Masks) -> Masks:
        """Return the units to keep at the end (bool, shaped as the masks): most important per cost,
        in whole blocks.

        Units that the search left open rank before those that it closed.
        """
        ranked = self._ranked(importance, is_open)
        rows = [self._rows(kind, values, self.blocks.get(kind, 1)) for kind, values in ranked.items()]
        return self._shaped(best_support(rows, self.keep_ratio * self.joined_costs().sum(-1)), importance)

    def _ranked(self, importance: Masks, is_open: Masks) -> Masks:
        """Return the importance, float64 on the CPU, such that per cost every open unit ranks
        before closed ones."""
        cost_GN = self.joined_costs()
        scale_GN = torch.where(cost_GN > 0, cost_GN, 1.0)
        ratio_GN = rank_open_first(self.join(importance).cpu().double() / scale_GN, self.join(is_open).cpu())
        return self.split(ratio_GN * scale_GN)

    def _rows(self, kind: str, importance: Tensor, block: int) -> Rows:
        """Cut the units of a module type into rows: one per layer or expert, or per KV head if it
        has a fixed cost."""
        importance_RU, order_RU, fixed_L = importance.flatten(0, -2), None, self.fixed.get(kind)
        if kind == "attn" and self.queries_per_kv > 1:
            # tensor parallelism requires that every KV head of a layer keeps equally many query
            # heads
            if block > 1:
                order_RU = rank_evenly_per_kv_head(importance_RU, self.queries_per_kv)
                fixed_L = None if fixed_L is None else fixed_L * (importance_RU.shape[1] // self.queries_per_kv)
            elif fixed_L is not None:
                importance_RU = importance.reshape(-1, self.queries_per_kv)
        rows_per_layer = len(importance_RU) // len(importance)
        return cut_rows(
            importance_RU,
            block=block,
            order_RU=order_RU,
            cost_R=self.costs[kind].repeat_interleave(rows_per_layer),
            fixed_R=None if fixed_L is None else fixed_L.repeat_interleave(rows_per_layer),
        )

    def _shaped(self, supports: Sequence[Tensor], like: Masks) -> Masks:
        """Return the supports, one per module type, in the shapes of the masks and on the device of
        `like`."""
        pairs = zip(self.shapes.items(), supports, strict=True)
        return {kind: support.reshape(shape).to(like[kind].device) for (kind, shape), support in pairs}

    def check(self, align: int, tp: int) -> None:
        """Refuse a budget that keeps everything or nothing, and blocks that do not fit.
        Raises: SettingError."""
        for kind, block in self.blocks.items():
            if not self._can_keep(kind, block):
                shape, limits = self.shapes[kind], {"align": 1 if kind == "attn" else align, "tp": tp}
                remedies = [f"{name} below {value}" for name, value in limits.items() if value > 1]
                raise SettingError(
                    f"a budget of {self.kept:,.0f} {self.currency} keeps no block of {block:,} of the "
                    f"{math.prod(shape[:-1])} × {shape[-1]:,} {kind} units; choose "
                    f"{' or '.join([*remedies, 'a budget that keeps more'])}"
                )
        if not self._least() <= self.kept < self.total:
            raise SettingError(
                f"the budget keeps {self.kept:,.0f} of {self.total:,.0f} {self.currency}, where the least that can be "
                f"kept is {self._least():,.0f}; choose one that keeps some units and removes some"
            )

    def _can_keep(self, kind: str, block: int) -> bool:
        return block <= self.shapes[kind][-1] and block * float(self.costs[kind].min()) <= self.kept

    def _least(self) -> float:
        """Return the lowest cost of a selection that keeps anything."""
        return min(float((cost_L + self.fixed.get(kind, 0.0)).min()) for kind, cost_L in self.costs.items())

    @property
    def is_limit(self) -> bool:
        """Whether noticeably less may be kept than `kept`, because whole blocks or units are."""
        least = min(filter(None, (float(self.unit_costs(kind).min()) for kind in self.shapes)))
        return bool(self.blocks) or self.kept % least > NOTICEABLE * self.total

    def describe(self) -> str:
        """Return a line that states the budget and its blocks."""
        blocks = "".join(f", {kind} in blocks of {block:,}" for kind, block in self.blocks.items())
        kept = f"{'at most ' * self.is_limit}{self.kept:,.0f}"
        return f"budget: keep {kept} of {self.total:,.0f} {self.currency} ({self.keep_ratio:.1%}){blocks}"


class WholeExpertPool(Pool):
    """Whole experts, equally many of every layer; the units are their channels, which are kept or
    removed together."""

    @property
    def is_limit(self) -> bool:
        return False

    def close(self, importance: Masks, is_open: Masks, keep_ratio: float) -> Masks:
        return self._choose_experts(importance["experts"].double(), is_open["experts"], keep_ratio)

    def choose(self, importance: Masks, is_open: Masks) -> Masks:
        ranked = rank_open_first(importance["experts"], is_open["experts"])
        return self._choose_experts(ranked, torch.ones_like(is_open["experts"]), self.keep_ratio)

    def _choose_experts(self, importance_LEC: Tensor, allowed_LEC: Tensor, keep_ratio: float) -> Masks:
        importance_LE = importance_LEC.sum(-1)
        budget_L = torch.full_like(importance_LE[:, 0], keep_ratio * importance_LE.shape[1])
        cost_LE = torch.ones_like(importance_LE).masked_fill(~allowed_LEC.any(-1), torch.inf)
        kept_LE = greedy(importance_LE, cost_LE, budget_L)
        return {"experts": kept_LE[..., None] & allowed_LEC}

    def describe(self) -> str:
        num_experts = self.shapes["experts"][1]
        return f"budget: keep {round(num_experts * self.keep_ratio)} of {num_experts} whole experts of each layer"


@dataclass(frozen=True, kw_only=True)
class LatencyPool(Pool):
    """A budget in measured time, in microseconds per step; attention blocks and MLPs have a fixed
    cost."""

    tables: Mapping[str, Tensor]
    """float64 [L, B + 1] per module type: the measured cost of a layer that keeps 0, 1, … blocks of
    units (of routed experts, 0, 1, … blocks per expert on average)."""
    mixture: float = 0.0
    """The cost of each further number of attention units that layers have. Where it costs anything,
    layers have as few numbers as pay (`_allowed_counts`)."""

    def close(self, importance: Masks, is_open: Masks, keep_ratio: float) -> Masks:
        """Keep open whole blocks, and what the final selection would keep, before all others.

        Single channels of a block save no time, so that selection would reopen them. It would also
        reopen channels that were closed only because a block of another layer, such as a whole
        attention block, did not fit yet.
        """
        final = self._choose_blocks(importance, is_open, self.kept)
        importance = {kind: values * is_open[kind] for kind, values in importance.items()}
        kept = self._choose_blocks(importance, final, keep_ratio * self.total)
        return {kind: kept[kind] & is_open[kind] for kind in kept}

    def choose(self, importance: Masks, is_open: Masks) -> Masks:
        return self._choose_blocks(importance, is_open, self.kept)

    def removed_share(self, is_open: Masks) -> float:
        """Return the share of the budget's time that the closed units save, by the tables."""
        kept = 0.0
        for kind, table_LB in self.tables.items():
            open_L, units = is_open[kind].flatten(1).sum(1).cpu(), self.shapes[kind][1:]
            # a block takes its time as soon as a unit of it is open
            count_L = -(-open_L // (self.blocks[kind] * math.prod(units[:-1])))
            kept += float(table_LB.gather(1, count_L.clamp_max(table_LB.shape[1] - 1)[:, None]).sum())
            if kind == "attn":
                kept += self.mixture * max(0, len(set(count_L.tolist()) - {0}) - 1)
        return 1.0 - kept / self.total

    def _choose_blocks(self, importance: Masks, is_open: Masks, budget: float) -> Masks:
        """Return the kept units of most importance at the measured cost of whole blocks
        (`choose_counts`).

        The experts of a layer share its row of the table, so their blocks are ranked together.
        """
        blocks, steps = [], []
        for kind, values in self._ranked(importance, is_open).items():
            num_blocks = self.tables[kind].shape[1] - 1
            blocks.append(cut_rows(values.flatten(0, -2), block=self.blocks[kind], num_blocks=num_blocks))
            # one block per step, or one of each expert
            blocks_LM = blocks[-1].importance.view(len(values), -1)
            steps.append(cut_rows(blocks_LM, block=blocks_LM.shape[1] // num_blocks))
        sums_LB = [torch.nn.functional.pad(rows.importance.cumsum(1), (1, 0)) for rows in steps]
        most = max(sums.shape[1] for sums in sums_LB)
        importance_RB, cost_RB = (
            torch.cat([torch.nn.functional.pad(part, (0, most - part.shape[1]), value=missing) for part in parts])
            for parts, missing in ((sums_LB, -torch.inf), (self.tables.values(), torch.inf))
        )
        counts_R = self._counts(importance_RB, cost_RB, budget)
        counts_L = counts_R.split([len(sums) for sums in sums_LB])
        supports = []
        for block, step, count_L in zip(blocks, steps, counts_L, strict=True):
            taken_LM = step.support(torch.arange(step.cost.shape[1]) < count_L[:, None])
            supports.append(block.support(taken_LM.view_as(block.cost)))
        return self._shaped(supports, importance)

    def _counts(self, importance_RB: Tensor, cost_RB: Tensor, budget: float) -> Tensor:
        """Return how many blocks each row keeps, int64 [R], as `choose_counts` does, within a budget
        that pays for every number of attention units that layers may have."""
        if not self.mixture or "attn" not in self.tables:
            return choose_counts(importance_RB, cost_RB, budget)
        first = sum(len(table) for table in list(self.tables.values())[: list(self.tables).index("attn")])
        attention = slice(first, first + len(self.tables["attn"]))
        chosen = list[tuple[float, Tensor]]()
        for allowed in _allowed_counts(self.tables["attn"].shape[1] - 1):
            costs = cost_RB.clone()
            refused = [count for count in range(1, self.tables["attn"].shape[1]) if count not in allowed]
            costs[attention, refused] = torch.inf
            left = budget - self.mixture * (len(allowed) - 1)
            if chosen and left <= self._least():
                continue
            counts_R = choose_counts(importance_RB, costs, left)
            total = importance_RB.gather(1, counts_R[:, None]).sum()
            chosen.append((float(total), counts_R))
        return max(chosen, key=lambda pair: pair[0])[1]

    def _can_keep(self, kind: str, block: int) -> bool:
        return self.tables[kind].shape[1] > 1

    def _least(self) -> float:
        return min(float(table_LB[:, 1:].amin()) for table_LB in self.tables.values())


def _allowed_counts(most: int) -> list[set[int]]:
    """Return sets of counts that layers may have besides 0, from `most` alone to all of them: each
    has twice as many as the one before."""
    steps = [1]
    while steps[-1] < most:
        steps.append(min(most, 2 * steps[-1]))
    return [set(range(most, 0, -step)) for step in reversed(steps)]
