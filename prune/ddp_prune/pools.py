"""The constraints of a run: which units share a budget, what each of them costs, and how they round.

`units` is the paper's: one pool a module type, each unit costs 1. The other budgets are one pool over all module
types. Legend: L layers, U units of a layer, E experts, C channels; G rows on each of which a budget holds (the model,
its layers or its experts), N units of such a row.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ddp_prune.costs import dense_layers, prices, whole_model
from ddp_prune.families import Dimensions
from ddp_prune.gates import Masks, unit_shapes
from ddp_prune.recipe import Recipe
from ddp_prune.rounding import Rows, best_first, best_support, cut_rows, evenly, keeping_worth
from ddp_vllm.errors import SettingError


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Units under one constraint: Σ cost·s is at most `kept`."""

    name: str
    """The module type, or the budget if several share it."""
    shapes: Mapping[str, tuple[int, ...]]
    """[L, U], or [L, E, C] of experts, a module type."""
    costs: Mapping[str, torch.Tensor]
    """float64 [L]: what a unit of each layer costs by itself."""
    opening: torch.Tensor | None
    """float64 [L]: what a KV head costs until the last query head that shares it goes; None: nothing is shared."""
    blocks: Mapping[str, int]
    """Units that stay or go together, a module type."""
    group: str
    group_size: int
    """Query heads that share a KV head."""
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
        if kind == "attn" and self.opening is not None:
            cost_L = cost_L + self.opening / self.group_size
        return cost_L.view(-1, *[1] * (len(shape) - 1)).expand(shape)

    def rows(self, values: Masks) -> torch.Tensor:
        """Return values of all units, a tensor a module type, as [G, N]."""
        if self.group == "global":
            return torch.cat([values[kind].flatten() for kind in self.shapes])[None]
        if self.group == "expert":
            return values["experts"].flatten(0, -2)
        return torch.cat([values[kind].flatten(1) for kind in self.shapes], dim=1)

    def unrows(self, rows_GN: torch.Tensor) -> Masks:
        """Undo `rows`."""
        parts = rows_GN.split([math.prod(shape) // len(rows_GN) for shape in self.shapes.values()], dim=1)
        return {kind: part.reshape(shape) for part, (kind, shape) in zip(parts, self.shapes.items(), strict=True)}

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
        shares_G = self.rows(cost).sum(1)
        rows = [self._cut(kind, values) for kind, values in worth.items()]
        supports = best_support(rows, self.kept, (shares_G / shares_G.sum()).tolist())
        return {
            kind: support.reshape(shape).to(saliency[kind].device)
            for support, (kind, shape) in zip(supports, self.shapes.items(), strict=True)
        }

    def _cut(self, kind: str, worth: torch.Tensor) -> Rows:
        """Cut one module type into rows: layers or experts, or KV heads where query heads share one that costs."""
        layers, opening, block = torch.arange(worth.shape[0]), None, self.blocks.get(kind, 1)
        worth_RU, cost_R = worth.flatten(0, -2), self.costs[kind]
        if kind == "attn" and self.even_heads:
            order_RU, opening = evenly(worth_RU, self.group_size), self.opening
            opening = None if opening is None else opening * (worth_RU.shape[1] // self.group_size)
        else:
            if kind == "attn" and self.opening is not None:
                worth_RU, opening = worth_RU.reshape(-1, self.group_size), self.opening
            order_RU = best_first(worth_RU)
        repeat = len(worth_RU) // len(layers)
        layers, cost_R = layers.repeat_interleave(repeat), cost_R.repeat_interleave(repeat)
        opening = opening if opening is None else opening.repeat_interleave(repeat)
        groups = {"global": torch.zeros_like(layers), "layer": layers, "expert": torch.arange(len(worth_RU))}
        return cut_rows(worth_RU, order_RU, cost_R, groups[self.group], block=block, opening_R=opening)

    def check(self, align: int) -> None:
        """Refuse a budget that keeps nothing or removes nothing, and blocks that do not fit. Raises: SettingError."""
        units = sum(map(math.prod, self.shapes.values()))
        if self.name in self.shapes and not 0 < self.kept < units:
            raise SettingError(
                f"sparsity keeps {self.kept:.0f} of {units} units; choose one that keeps some and removes some"
            )
        shared = {"attn": 0.0 if self.opening is None else self.opening}
        cheapest = min(float((cost_L + shared.get(kind, 0.0)).min()) for kind, cost_L in self.costs.items())
        if self.kept < cheapest:
            raise SettingError(
                f"{self.kept:,.0f} {self.name} of what can be pruned may stay, less than any unit costs "
                f"({cheapest:,.0f}); remove less"
            )
        for kind, block in self.blocks.items():
            shape = self.shapes[kind]
            if block > shape[-1] or block * float(self.costs[kind].min()) > self.kept:
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
) -> list[Pool]:
    """Return the constraints that a recipe puts on a dense model, given by its config and the shapes of its tensors.

    Raises: SettingError for a budget, a target or a tensor-parallel size that this model cannot meet.
    """
    units = unit_shapes(sizes, head_unit)
    shares_kv = "attn" in units and head_unit == "query-head" and sizes.group_size > 1
    common: dict[str, Any] = {
        "group": recipe.group,
        "group_size": sizes.group_size,
        "even_heads": shares_kv and recipe.tp > 1,
    }
    blocks = _blocks(units, sizes, head_unit, recipe)
    if recipe.budget == "units":
        pools = [
            Pool(
                name=kind,
                shapes={kind: shape},
                costs={kind: torch.ones(shape[0], dtype=torch.float64)},
                opening=None,
                blocks={kind: blocks[kind]} if kind in blocks else {},
                kept=round((1.0 - recipe.sparsity) * math.prod(shape)),
                **common,
            )
            for kind, shape in units.items()
        ]
    else:
        layers = prices(recipe.budget, config, shapes, recipe.context_length)
        group = sizes.group_size if head_unit == "kv-group" else 1
        kv_shared = torch.tensor([price.kv_head for price in layers], dtype=torch.float64)
        costs = {
            "attn": [group * price.query_head + (0.0 if shares_kv else price.kv_head) for price in layers],
            "mlp": [price.channel for price in layers],
            "experts": [layers[index].expert_channel for index in sizes.routed_layers],
        }
        pool = Pool(
            name=recipe.budget,
            shapes=units,
            costs={kind: torch.tensor(costs[kind], dtype=torch.float64) for kind in units},
            opening=kv_shared if shares_kv else None,
            blocks=blocks,
            kept=0.0,
            **common,
        )
        pools = [_with_kept(pool, config, shapes, recipe)]
    for pool in pools:
        pool.check(recipe.align)
    return pools


def describe(pool: Pool) -> str:
    """Return in one line what a pool keeps, and what its blocks make of that."""
    if pool.name not in pool.shapes:
        share = f"{pool.kept / pool.total:.1%} of what can be pruned"
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


def _blocks(units: Mapping[str, Any], sizes: Dimensions, head_unit: str, recipe: Recipe) -> dict[str, int]:
    """Return the blocks that `align` and `tp` ask for; kinds without one are cut unit by unit."""
    blocks = {"experts": recipe.align} if "experts" in units else {"mlp": recipe.align * recipe.tp}
    if recipe.tp > 1:
        even = "attn" in units and head_unit == "query-head" and sizes.group_size > 1
        check_tensor_parallel(sizes, recipe.tp, all_kv_heads=even or "attn" not in units)
        if "attn" in units:
            copies = max(1, recipe.tp // sizes.num_kv_heads)  # ranks that hold the same KV head share its query heads
            blocks["attn"] = sizes.num_kv_heads * copies if even else min(recipe.tp, sizes.num_kv_heads)
    return {kind: block for kind, block in blocks.items() if block > 1}


def check_tensor_parallel(sizes: Dimensions, num_ranks: int, *, all_kv_heads: bool) -> None:
    """Refuse a number of ranks over which no layer of this model would split, or with `all_kv_heads` no whole one.

    Raises: SettingError, naming the numbers that work.
    """
    heads, kv_heads = sizes.num_query_heads, sizes.num_kv_heads

    def works(ranks: int) -> bool:
        if heads % ranks or sizes.expert_intermediate_size % ranks:
            return False
        if ranks > kv_heads:  # several ranks hold the same KV head and share its query heads
            return ranks % kv_heads == 0 and sizes.group_size % (ranks // kv_heads) == 0
        return not all_kv_heads or kv_heads % ranks == 0

    if not works(num_ranks):
        valid = ", ".join(str(ranks) for ranks in range(1, heads + 1) if works(ranks))
        raise SettingError(
            f"tp is {num_ranks}, but layer 0 and all others have {heads} query heads for {kv_heads} KV heads, which do "
            f"not split over {num_ranks} devices; valid sizes: {valid}"
        )
