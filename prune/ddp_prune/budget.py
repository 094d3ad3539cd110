"""Budgets: which units share one, and what each of them costs.

`units` is the paper's: one pool a module type, each unit costs 1. The other budgets are one pool over all module types.
Legend: L layers, U units of a layer, E experts, C channels; G places where a budget holds (the model, its layers or its
experts), N units of such a place.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ddp_prune.gates import Masks
from ddp_prune.recipe import Recipe
from ddp_prune.selection import (
    Lists,
    best_first,
    best_support,
    cut_lists,
    evenly,
    exact_choice,
    greedy,
    keeping_worth,
)
from ddp_vllm.costs import prices, whole_model
from ddp_vllm.errors import SettingError
from ddp_vllm.families import Dimensions, dense_layers, fewer_experts, unit_shapes
from ddp_vllm.latency import EXPERT_BLOCK, Profile
from ddp_vllm.remote_code.widths import LayerWidths
from ddp_vllm.tensor_parallel import check_tensor_parallel

MOST_BLOCKS = 256  # of a layer in the exact choice; more take its solver minutes


def keep_schedule(progress: float, keep_ratio: float, start: float = 1.0) -> float:
    """Return the keep ratio asked for at `progress` in [0, 1]: `start` at 0, ρ from 0.85 on, quadratic between.

    As in gradual pruning (arXiv:1710.01878): much while the rest can still adapt, little near the end. Its cubic closes
    too much before the first tokens have told what matters.
    """
    left = max(0.0, 1.0 - progress / 0.85)
    return keep_ratio + (start - keep_ratio) * left**2


def kept_share(score_GN: torch.Tensor, cost_GN: torch.Tensor) -> torch.Tensor:
    """Return Σ c·s / Σ c of each place, [G]; the plain mean (Eq. 6) where all costs are equal."""
    return (score_GN * cost_GN).sum(-1) / cost_GN.sum(-1)


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Units under one constraint: Σ cost·s is at most `kept`."""

    name: str
    """The module type, or the budget if several share it."""
    shapes: Mapping[str, tuple[int, ...]]
    """[L, U], or [L, E, C] of experts, a module type."""
    costs: Mapping[str, torch.Tensor]
    """float64 [L]: what a unit of each layer costs by itself."""
    opening: Mapping[str, torch.Tensor]
    """float64 [L] a module type: what a list of units costs until its last unit goes, where lists have such a cost."""
    tables: Mapping[str, torch.Tensor]
    """float64 [L, B + 1] per module type: the measured cost of a layer that keeps 0, 1, … blocks (of routed experts, 0,
    1, … blocks per expert on average); empty: costs are those of single units."""
    shares_kv: bool
    """A list of heads is those that share a KV head, not those of a layer."""
    blocks: Mapping[str, int]
    """Units that stay or go together, a module type."""
    scope: str
    whole_experts: bool
    """All channels of an expert stay or go."""
    queries_per_kv: int
    even_heads: bool
    """Every KV head of a layer serves equally many query heads, as tensor parallelism asks."""
    kept: float
    """The most that what stays may cost."""

    @property
    def total(self) -> float:
        """What all units cost together."""
        return sum(float(self.unit_costs(kind).sum()) for kind in self.shapes)

    @property
    def keep_ratio(self) -> float:
        return self.kept / self.total

    def unit_costs(self, kind: str) -> torch.Tensor:
        """Return the cost of every unit in the shape of its masks, with its part of what it shares."""
        shape, cost_L = self.shapes[kind], self.costs[kind]
        if kind in self.opening:
            cost_L = cost_L + self.opening[kind] / self._list_length(kind)
        return cost_L.view(-1, *[1] * (len(shape) - 1)).expand(shape)

    def _list_length(self, kind: str) -> int:
        """Return how many units share an opening cost."""
        return self.queries_per_kv if self.shares_kv and kind == "attn" else self.shapes[kind][-1]

    def join(self, values: Masks) -> torch.Tensor:
        """Return values of all units, a tensor a module type, as [G, N]."""
        if self.scope == "global":
            return torch.cat([values[kind].flatten() for kind in self.shapes])[None]
        if self.scope == "expert":
            return values["experts"].flatten(0, -2)
        return torch.cat([values[kind].flatten(1) for kind in self.shapes], dim=1)

    def part(self, values_GN: torch.Tensor) -> Masks:
        """Undo `join`."""
        parts = values_GN.split([math.prod(shape) // len(values_GN) for shape in self.shapes.values()], dim=1)
        return {kind: part.reshape(shape) for part, (kind, shape) in zip(parts, self.shapes.items(), strict=True)}

    def close(self, worth: Masks, is_open: Masks, keep_ratio: float) -> Masks:
        """Return which open units (bool) stay while searching, where all may keep `keep_ratio` of what they cost."""
        # whole blocks compete with units, or nothing but whole experts goes
        if (self.tables and self.opening) or self.whole_experts:
            blocks = self.blocks if self.whole_experts else {}
            now = replace(self, blocks=blocks, tables={}, kept=keep_ratio * self.total)
            return {kind: stays & is_open[kind] for kind, stays in now.choose(worth, is_open).items()}
        cost_GN = self.join({kind: self.unit_costs(kind).to(worth[kind].device) for kind in self.shapes})
        budget_G = keep_ratio * cost_GN.sum(-1)
        open_GN = self.join(is_open)
        stays_GN = greedy(self.join(worth), cost_GN.masked_fill(~open_GN, torch.inf), budget_G)
        return self.part(stays_GN & open_GN)

    def choose(self, saliency: Masks, alive: Masks) -> Masks:
        """Return the support (bool, the shapes of the masks) of highest saliency for its cost that meets the budget.

        What the search left open stays before what it closed.
        """
        cost = {kind: self.unit_costs(kind) for kind in self.shapes}
        scale = {kind: torch.where(values > 0, values, 1.0) for kind, values in cost.items()}
        ratio = torch.cat([(saliency[kind].cpu().double() / scale[kind]).flatten() for kind in self.shapes])
        open_first = keeping_worth(ratio, torch.cat([alive[kind].cpu().flatten() for kind in self.shapes]))
        parts = open_first.split([math.prod(shape) for shape in self.shapes.values()])
        worth = {
            kind: part.view(shape) * scale[kind] for part, (kind, shape) in zip(parts, self.shapes.items(), strict=True)
        }
        cost_G = self.join(cost).sum(1)
        if self.tables:
            supports = self._choose_measured(worth)
        else:
            lists = [self._cut(kind, values) for kind, values in worth.items()]
            supports = best_support(lists, self.kept * cost_G / cost_G.sum())
        return {
            kind: support.reshape(shape).to(saliency[kind].device)
            for support, (kind, shape) in zip(supports, self.shapes.items(), strict=True)
        }

    def _choose_measured(self, worth: Masks) -> list[torch.Tensor]:
        """Return the support of every module type that is worth most at the measured cost of whole blocks.

        All experts of a layer share its row of the table, so their blocks are ranked together.
        """
        worth_LB, ranks, orders = [], [], []
        for kind, values in worth.items():
            values_RU, num_blocks = values.flatten(0, -2), self.tables[kind].shape[1] - 1
            orders.append(order_RU := best_first(values_RU))
            room = num_blocks * self.blocks[kind] - values_RU.shape[1]  # the last block may lack some, or some units go
            ranked_RU = torch.nn.functional.pad(values_RU.gather(1, order_RU), (0, room))
            blocks_LM = ranked_RU.unflatten(1, (num_blocks, -1)).sum(-1).view(len(values), -1)
            ranks.append(rank_LM := best_first(blocks_LM))
            sums_LB = blocks_LM.gather(1, rank_LM).unflatten(1, (num_blocks, -1)).sum(-1).cumsum(1)
            worth_LB.append(torch.nn.functional.pad(sums_LB, (1, 0)))
        counts_L = exact_choice(worth_LB, list(self.tables.values()), self.kept)
        supports = []
        for kind, rank_LM, order_RU, counts in zip(worth, ranks, orders, counts_L, strict=True):
            per_step = rank_LM.shape[1] // (self.tables[kind].shape[1] - 1)
            first_LM = torch.arange(rank_LM.shape[1]) < (counts * per_step)[:, None]
            taken_LM = torch.zeros_like(first_LM).scatter(1, rank_LM, first_LM)
            units_R1 = taken_LM.view(len(order_RU), -1).sum(1, keepdim=True) * self.blocks[kind]
            first_RU = torch.arange(order_RU.shape[1]) < units_R1
            supports.append(torch.zeros_like(first_RU).scatter(1, order_RU, first_RU))
        return supports

    def _cut(self, kind: str, worth: torch.Tensor) -> Lists:
        """Cut one module type into lists: layers or experts, or KV heads where query heads share one that costs."""
        worth_RU, opening = worth.flatten(0, -2), self.opening.get(kind)
        if kind == "attn" and self.even_heads:
            order_RU = evenly(worth_RU, self.queries_per_kv)
            opening = None if opening is None else opening * (worth_RU.shape[1] // self.queries_per_kv)
        else:
            if opening is not None and kind == "attn" and self.shares_kv:
                worth_RU = worth_RU.reshape(-1, self.queries_per_kv)
            order_RU = best_first(worth_RU)
        lists_a_layer = len(worth_RU) // worth.shape[0]
        return cut_lists(
            worth_RU,
            order_RU,
            self.costs[kind].repeat_interleave(lists_a_layer),
            block=self.blocks.get(kind, 1),
            opening_R=None if opening is None else opening.repeat_interleave(lists_a_layer),
        )

    def check(self, align: int) -> None:
        """Refuse a budget that keeps nothing or everything, and blocks that do not fit. Raises: SettingError."""
        units = sum(map(math.prod, self.shapes.values()))
        if self.name in self.shapes and not 0 < self.kept < units:
            raise SettingError(
                f"sparsity keeps {self.kept:.0f} of {units} {self.name} units; choose one that keeps some and removes "
                "some"
            )
        if self.kept >= self.total:
            raise SettingError(
                f"{self.kept:,.0f} {self.name} may stay, but all that can be pruned costs {self.total:,.0f}: nothing "
                "would be removed; remove more"
            )
        cheapest = min(float((cost_L + self.opening.get(kind, 0.0)).min()) for kind, cost_L in self.costs.items())
        if self.tables:
            cheapest = min(float(table_LB[:, 1:].amin()) for table_LB in self.tables.values() if table_LB.shape[1] > 1)
        if self.kept < cheapest:
            raise SettingError(
                f"{self.kept:,.0f} {self.name} of what can be pruned may stay, less than any unit costs "
                f"({cheapest:,.0f}); remove less"
            )
        for kind, block in self.blocks.items():
            shape = self.shapes[kind]
            if kind in self.tables:
                fits = self.tables[kind].shape[1] > 1
            else:
                fits = block <= shape[-1] and block * float(self.costs[kind].min()) <= self.kept
            if not fits:
                raise SettingError(
                    f"align is {align}, but {self.kept:,.0f} {self.name if self.name != kind else 'units'} of "
                    f"{math.prod(shape[:-1])} × {shape[-1]:,} {kind} units are kept, in blocks of {block:,}; choose a "
                    "smaller one"
                )


def make_pools(
    config: Mapping[str, Any],
    shapes: Mapping[str, Sequence[int]],
    sizes: Dimensions,
    head_unit: str,
    recipe: Recipe,
    profile: Profile | None = None,
) -> list[Pool]:
    """Return the constraints that a recipe puts on a dense model, given by its config and the shapes of its tensors.

    profile: the latency profile that the budget `latency` requires, checked by `ddp_vllm.speed.find_profile`.
    Raises: SettingError for a budget, a target or a tensor-parallel size that this model cannot meet.
    """
    units = unit_shapes(sizes, head_unit)
    shares_kv = "attn" in units and head_unit == "query-head" and sizes.queries_per_kv > 1
    common: dict[str, Any] = {
        "scope": "layer" if recipe.whole_experts else recipe.scope,
        "whole_experts": recipe.whole_experts,
        "queries_per_kv": sizes.queries_per_kv,
        "even_heads": shares_kv and recipe.tp > 1,
        "shares_kv": shares_kv,
        "tables": {},
    }
    blocks = _blocks(units, sizes, config, recipe, shares_kv=shares_kv)
    if recipe.attention_sparsity and "attn" not in units:
        raise SettingError("attention_sparsity is set, but no attention is pruned in this model; leave it out")
    if recipe.budget == "units":
        pools = [
            Pool(
                name=kind,
                shapes={kind: shape},
                costs={kind: torch.ones(shape[0], dtype=torch.float64)},
                opening={},
                blocks={kind: blocks[kind]} if kind in blocks else {},
                kept=round((1.0 - recipe.removed(kind)) * math.prod(shape)),
                **common,
            )
            for kind, shape in units.items()
        ]
    elif recipe.budget == "latency":
        if shares_kv:
            raise SettingError("a query head without its KV head saves no time worth a budget; leave head_unit out")
        assert profile
        pools = [_measured_pool(units, blocks, profile, recipe, common)]
    else:
        layers = prices(recipe.budget, config, shapes, recipe.context_length)
        queries = sizes.queries_per_kv if head_unit == "kv-group" else 1
        costs = {
            "attn": [queries * price.query_head + (0.0 if shares_kv else price.kv_head) for price in layers],
            "mlp": [price.channel for price in layers],
            "experts": [layers[index].expert_channel for index in sizes.routed_layers],
        }
        pool = Pool(
            name=recipe.budget,
            shapes=units,
            costs={kind: torch.tensor(costs[kind], dtype=torch.float64) for kind in units},
            opening={"attn": torch.tensor([price.kv_head for price in layers], dtype=torch.float64)}
            if shares_kv
            else {},
            blocks=blocks,
            kept=0.0,
            **common,
        )
        pools = [_with_kept(pool, config, shapes, recipe)]
    if recipe.whole_experts:
        (pool,) = pools
        kept = math.floor(sizes.num_experts * (pool.kept + 1) / pool.total)  # itself rounded to a unit, maybe down
        fewer_experts(config, kept)
        pools = [replace(pool, kept=pool.total * kept / sizes.num_experts)]
    for pool in pools:
        if pool.name != "attn" or recipe.removed("attn"):
            pool.check(recipe.align)
    return pools


def _measured_pool(
    units: Mapping[str, tuple[int, ...]],
    blocks: Mapping[str, int],
    profile: Profile,
    recipe: Recipe,
    common: dict[str, Any],
) -> Pool:
    """Return the pool of a budget in measured time, in microseconds. Raises: SettingError if it cannot be met."""
    times = profile.times(recipe.workload)
    curves = {"attn": times.attention, "mlp": times.mlp, "experts": times.experts}
    costs, opening, tables, steps = {}, {}, {}, {}
    for kind, shape in units.items():
        curve, align = curves[kind], blocks.get(kind, 1)
        assert curve is not None
        rows = torch.ones(shape[0], dtype=torch.float64)
        costs[kind] = rows * 1e6 * curve.unit / math.prod(shape[1:-1])  # an expert has a share in its layer
        lasting = 0.0
        if kind == "experts":
            lasting = curve.fixed
        else:
            opening[kind] = rows * 1e6 * curve.fixed
        step = math.lcm(align, EXPERT_BLOCK if kind == "experts" else curve.multiple)
        while step * MOST_BLOCKS < shape[-1]:
            step *= 2
        num_blocks = -(-shape[-1] // step) if shape[-1] % align == 0 else shape[-1] // step
        seconds = [max(0.0, curve.seconds(min(block * step, shape[-1])) - lasting) for block in range(num_blocks + 1)]
        steps[kind], tables[kind] = step, rows[:, None] * 1e6 * torch.tensor(seconds, dtype=torch.float64)
    removable = times.prunable - times.lasting
    saved = times.dense * (1.0 - 1.0 / recipe.speedup) if recipe.speedup else recipe.sparsity * removable
    if saved >= removable:
        raise SettingError(
            f"speedup is {recipe.speedup:g}, but {times.most:.2f} is the most for {recipe.workload}: "
            f"{1 - removable / times.dense:.0%} of a step is spent outside of what can be pruned"
        )
    return Pool(
        name="latency",
        shapes=units,
        costs=costs,
        opening=opening,
        blocks=steps,
        kept=1e6 * (removable - saved),
        **common | {"tables": tables},
    )


def describe(pool: Pool) -> str:
    """Return in one line what a pool keeps, and what its blocks make of that."""
    if pool.whole_experts:
        num_experts = pool.shapes["experts"][1]
        return f"budget: {round(num_experts * pool.keep_ratio)} of {num_experts} experts of each layer stay, whole"
    if pool.name not in pool.shapes:
        share = f"{pool.kept / pool.total:.1%} of what can be pruned"
        if pool.name == "latency":
            return f"budget: {pool.kept:,.0f} µs of a step in {', '.join(pool.shapes)} stay, {share}"
        return f"budget: {pool.kept:,.0f} {pool.name} of {', '.join(pool.shapes)} stay, {share}"
    line = f"budget: {pool.kept:,.0f} of {pool.total:,.0f} {pool.name} units stay"
    block, shape = pool.blocks.get(pool.name, 1), pool.shapes[pool.name]
    most = min(int(pool.kept) // block, math.prod(shape[:-1]) * (shape[-1] // block)) * block
    return line if most == pool.kept else f"{line}, rounded down to {most:,} in blocks of {block}"


def _with_kept(pool: Pool, config: Mapping[str, Any], shapes: Mapping[str, Sequence[int]], recipe: Recipe) -> Pool:
    """Set what the pool keeps: a share of what can be pruned, or what a target for the whole model leaves of it."""
    if pool.total == 0:
        raise SettingError(f"budget is {pool.name!r}, which does not depend on what is pruned here; choose another")
    if not recipe.target:
        return replace(pool, kept=math.floor((1.0 - recipe.sparsity) * pool.total))
    whole = whole_model(pool.name, config, dense_layers(config), shapes, recipe.context_length)
    fixed = whole - pool.total
    if not fixed < recipe.target < whole:
        raise SettingError(
            f"target is {recipe.target:,.0f} {pool.name}, but the dense model has {whole:,.0f}, of which {fixed:,.0f} "
            "cannot be pruned; choose a target between them"
        )
    return replace(pool, kept=recipe.target - fixed)


def _blocks(
    units: Mapping[str, Any], sizes: Dimensions, config: Mapping[str, Any], recipe: Recipe, *, shares_kv: bool
) -> dict[str, int]:
    """Return the blocks that `align` and `tp` ask for; module types without one are cut unit by unit.

    Raises: SettingError for a tensor-parallel size over which no layer could split.
    """
    align = sizes.expert_intermediate_size if recipe.whole_experts else recipe.align
    blocks = {"experts": align} if "experts" in units else {"mlp": recipe.align * recipe.tp}
    if recipe.tp > 1:

        def could_split(num_ranks: int) -> list[LayerWidths]:
            every = shares_kv or "attn" not in units  # KV head of a layer stays, or all of them go
            heads = sizes.num_kv_heads if every else min(num_ranks, sizes.num_kv_heads)
            return [LayerWidths(query_heads_per_kv_head=(sizes.queries_per_kv,) * heads, intermediate_size=0)]

        check_tensor_parallel(recipe.tp, config, could_split)
        if "attn" in units:
            copies = max(1, recipe.tp // sizes.num_kv_heads)  # ranks that hold the same KV head share its query heads
            blocks["attn"] = sizes.num_kv_heads * copies if shares_kv else min(recipe.tp, sizes.num_kv_heads)
    return {kind: block for kind, block in blocks.items() if block > 1}
