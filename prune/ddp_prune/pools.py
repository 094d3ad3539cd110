"""Makes the budget pools of a recipe for a model: what units cost, and how much of it is kept."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from ddp_prune.core.budget import LatencyPool, Pool, WholeExpertPool
from ddp_prune.models.source import Source, check_index, open_source
from ddp_prune.recipe import Recipe, check_suits
from ddp_vllm.checkpoint import read_stock_config
from ddp_vllm.costs import prices, whole_model
from ddp_vllm.dimensions import (
    BLOCK_NAMES,
    WHOLE_EXPERT,
    Dimensions,
    choose_head_unit,
    dimensions_of,
    text_config,
    unit_shapes,
    widths_of,
)
from ddp_vllm.errors import SettingError
from ddp_vllm.families import KNOWN, fewer_experts
from ddp_vllm.latency import Measure, Profile, find_profile
from ddp_vllm.remote_code.tensors import Shapes
from ddp_vllm.remote_code.widths import LayerWidths
from ddp_vllm.tensor_parallel import EXPERT_BLOCK, check_tensor_parallel

MOST_BLOCKS = 256  # per layer in the table of measured costs


def pools_of_sizes(recipes: Sequence[Recipe], source: Source, profile: Profile | None) -> list[Sequence[Pool]]:
    """Return the budget pools of each size. Raises: SettingError as `make_checked_pools`, and if two
    sizes would be the same model."""
    pools = [make_checked_pools(recipe, source, source.shapes, profile) for recipe in recipes]
    for (first, kept), (second, others) in pairwise(zip(recipes, pools, strict=True)):
        if [pool.kept for pool in kept] == [pool.kept for pool in others]:
            raise SettingError(
                second.size_name,
                f"has {first.size:g} and {second.size:g}, which are the same model: {kept[0].describe()}; leave one "
                "of them out",
            )
    return pools


def make_checked_pools(
    recipe: Recipe, source: Source, shapes: Mapping[str, list[int]], profile: Profile | None = None
) -> Sequence[Pool]:
    """Return the budget pools. Raises: SettingError if recipe and model do not suit each other."""
    check_suits(recipe, source)
    return make_pools(source.config, shapes, source.sizes, head_unit_of(recipe, source), recipe, profile)


def head_unit_of(recipe: Recipe, source: Source) -> str:
    """Return the attention unit of a recipe for this model, with `auto` resolved."""
    return WHOLE_EXPERT if recipe.whole_experts else choose_head_unit(recipe.head_unit, source.sizes)


def make_pools(
    config: Mapping[str, Any],
    shapes: Shapes,
    sizes: Dimensions,
    head_unit: str,
    recipe: Recipe,
    profile: Profile | None = None,
) -> Sequence[Pool]:
    """Return the pools of a recipe for a dense model, given by its config and the shapes of its
    tensors.

    profile: the latency profile that the budget `latency` requires, checked by
        `ddp_vllm.latency.find_profile`.

    Raises: SettingError for a budget, a target or a tensor-parallel size that this model cannot
        meet.
    """
    units = unit_shapes(sizes, head_unit)
    queries_per_kv = sizes.queries_per_kv if "attn" in units and head_unit == "query-head" else 1
    blocks = _blocks(units, sizes, config, recipe, queries_per_kv)
    layout: dict[str, Any] = {
        "shapes": units,
        "scope": recipe.scope,
        "blocks": blocks,
        "queries_per_kv": queries_per_kv,
    }
    pools: Sequence[Pool]
    if recipe.budget == "units":
        kept = {kind: round((1.0 - recipe.sparsity) * math.prod(shape)) for kind, shape in units.items()}
        pools = [_unit_pool(Pool, kind, kept[kind], layout) for kind in units]
    elif recipe.budget == "latency":
        assert profile
        pools = [_latency_pool(profile, recipe, layout)]
    else:
        pools = [_priced_pool(config, shapes, sizes, recipe, layout)]
    # as many as the budget allows; + 1 undoes its rounding down to a channel
    if recipe.whole_experts:
        num_kept = math.floor(sizes.num_experts * (pools[0].kept + 1) / pools[0].total)
        fewer_experts(config, num_kept)
        num_channels = num_kept * sizes.expert_intermediate_size * len(sizes.routed_layers)
        pools = [_unit_pool(WholeExpertPool, "experts", num_channels, layout | {"scope": "layer"})]
    for pool in pools:
        pool.check(recipe.align, recipe.tp)
    return pools


def _unit_pool(make: type[Pool], kind: str, kept: int, layout: dict[str, Any]) -> Pool:
    shape, block = layout["shapes"][kind], layout["blocks"].get(kind)
    return make(
        name=kind,
        currency=f"{kind} units",
        costs={kind: torch.ones(shape[0], dtype=torch.float64)},
        kept=kept,
        **layout | {"shapes": {kind: shape}, "blocks": {kind: block} if block else {}},
    )


def _priced_pool(
    config: Mapping[str, Any],
    shapes: Shapes,
    sizes: Dimensions,
    recipe: Recipe,
    layout: dict[str, Any],
) -> Pool:
    """Return the pool of the budget params, flops or kv-bytes; it may spend a share of the prunable
    cost, or the target without the cost that cannot be pruned."""
    layers, budget = prices(recipe.budget, config, shapes, recipe.context_length), recipe.budget
    shares_kv = layout["queries_per_kv"] > 1
    heads_per_unit = 1 if shares_kv else sizes.queries_per_kv
    costs = {
        "attn": [heads_per_unit * price.query_head + (0.0 if shares_kv else price.kv_head) for price in layers],
        "mlp": [layers[index].channel for index in sizes.mlp_layers],
        "experts": [layers[index].expert_channel for index in sizes.routed_layers],
    }
    pool = Pool(
        name=budget,
        currency=f"{budget} of {', '.join(layout['shapes'])}",
        costs={kind: torch.tensor(costs[kind], dtype=torch.float64) for kind in layout["shapes"]},
        fixed={"attn": torch.tensor([price.kv_head for price in layers], dtype=torch.float64)} if shares_kv else {},
        kept=0.0,
        **layout,
    )
    if pool.total == 0:
        raise SettingError("budget", f"is {budget!r}, which does not depend on what is pruned here; choose another")
    if not recipe.target:
        return replace(pool, kept=math.floor((1.0 - recipe.sparsity) * pool.total))
    model_cost = whole_model(budget, config, widths_of(config).dense_layers, shapes, recipe.context_length)
    unprunable = model_cost - pool.total
    if not unprunable < recipe.target < model_cost:
        raise SettingError(
            f"target is {recipe.target:,.0f} {budget}, but the dense model has {model_cost:,.0f}, of which "
            f"{unprunable:,.0f} cannot be pruned; choose a target between them"
        )
    return replace(pool, kept=recipe.target - unprunable)


def _latency_pool(profile: Profile, recipe: Recipe, layout: dict[str, Any]) -> LatencyPool:
    """Return the pool of a budget in measured time, in microseconds. Raises: SettingError if it
    cannot be met."""
    if layout["queries_per_kv"] > 1:
        raise SettingError("removing single query heads saves no measurable time; leave head_unit out")
    times = profile.times(recipe.workload)
    costs, fixed, tables, steps = {}, {}, {}, {}
    for kind, shape in layout["shapes"].items():
        curve, align, is_routed = times.curves[BLOCK_NAMES[kind]], layout["blocks"].get(kind, 1), kind == "experts"
        per_layer = torch.full((shape[0],), 1e6, dtype=torch.float64)
        # an expert has a share in its layer
        costs[kind] = per_layer * curve.unit / math.prod(shape[1:-1])
        if not is_routed:  # removing routed experts never saves their fixed cost
            fixed[kind] = per_layer * curve.fixed
        steps[kind], widths = _table_widths(shape[-1], align, EXPERT_BLOCK if is_routed else curve.multiple)
        seconds = [max(0.0, curve.seconds(width) - curve.fixed * is_routed) for width in widths]
        tables[kind] = per_layer[:, None] * torch.tensor(seconds, dtype=torch.float64)
    pruned = [BLOCK_NAMES[kind] for kind in layout["shapes"]]
    removable = times.removable(pruned)
    saved = times.dense * (1.0 - 1.0 / recipe.speedup) if recipe.speedup else recipe.sparsity * removable
    if saved >= removable:
        raise SettingError(
            "speedup",
            f"is {recipe.speedup:g}, but {times.max_speedup(pruned):.2f} is the most for {recipe.workload}: "
            f"{1 - removable / times.dense:.0%} of a step is spent outside of {', '.join(pruned)}",
        )
    return LatencyPool(
        name="latency",
        currency=f"µs per step of {', '.join(layout['shapes'])}",
        costs=costs,
        fixed=fixed,
        tables=tables,
        mixture=1e6 * times.mixture if "attn" in tables else 0.0,
        kept=1e6 * (removable - saved - (times.mixture if "experts" in tables else 0.0)),
        **layout | {"blocks": steps},
    )


def _table_widths(units: int, align: int, multiple: int) -> tuple[int, list[int]]:
    """Return the number of units per block of a latency table, and the width of each of its
    entries, 0, 1, … blocks."""
    step = math.lcm(align, multiple)
    while step * MOST_BLOCKS < units:
        step *= 2
    num_blocks = -(-units // step) if units % align == 0 else units // step
    return step, [min(block * step, units) for block in range(num_blocks + 1)]


def _blocks(
    units: Mapping[str, Any], sizes: Dimensions, config: Mapping[str, Any], recipe: Recipe, queries_per_kv: int
) -> dict[str, int]:
    """Return the block sizes that `align` and `tp` require; module types that are not listed are
    cut unit by unit.

    Raises: SettingError for a tensor-parallel size over which no layer could split.
    """
    align = sizes.expert_intermediate_size if recipe.whole_experts else recipe.align
    blocks = {kind: size for kind, size in (("experts", align), ("mlp", recipe.align * recipe.tp)) if kind in units}
    if recipe.tp > 1 and "num_attention_heads" in text_config(config):

        def could_split(num_ranks: int) -> list[LayerWidths]:
            # a layer keeps all KV heads, or none
            is_whole = queries_per_kv > 1 or "attn" not in units
            heads = sizes.num_kv_heads if is_whole else min(num_ranks, sizes.num_kv_heads)
            return [LayerWidths(query_heads_per_kv_head=(sizes.queries_per_kv,) * heads, intermediate_size=0)]

        check_tensor_parallel(recipe.tp, config, could_split)
        if "attn" in units:
            # ranks with the same KV head share its query heads
            copies = max(1, recipe.tp // sizes.num_kv_heads)
            blocks["attn"] = sizes.num_kv_heads * copies if queries_per_kv > 1 else min(recipe.tp, sizes.num_kv_heads)
    return {kind: block for kind, block in blocks.items() if block > 1}


def find_model(recipe: Recipe, *, load: bool = True) -> Source:
    """Return the dense model, to be loaded or only looked at."""
    source = open_source(recipe.model, load=load).with_blocks(recipe.blocks)
    if load:
        check_index(source.folder)
    return source


def latency_profile(recipe: Recipe, source: Source, measure: Measure) -> Profile | None:
    """Return the latency profile that the budget of a recipe requires, or None if it requires
    none."""
    if recipe.budget != "latency":
        return None
    stock = read_stock_config(source.folder)
    has_times = stock["model_type"] in KNOWN
    if not has_times or not {*source.sizes.blocks} <= {*dimensions_of(stock).blocks}:
        raise SettingError(
            "a speedup requires times by heads and channels, which ddp-vllm profile measures of models with a row in "
            "docs/models.md, or by expert channels of their mixtures; give a sparsity or a target"
        )
    return find_profile(
        recipe.profile, source.folder, stock, recipe.workload, measure, other_machine=recipe.other_machine
    )
