"""Budgets in measured time: met to the profile's resolution, whole blocks against units, refused if impossible."""

from pathlib import Path
from typing import Any

import pytest
import torch
from latency_profiles import CONFIG, written

from ddp_prune.budget import Pool, describe, make_pools
from ddp_prune.gates import Masks
from ddp_prune.recipe import Recipe
from ddp_prune.selection import exact_choice
from ddp_vllm.errors import SettingError
from ddp_vllm.families import dimensions_of
from ddp_vllm.latency import read_profile
from ddp_vllm.remote_code.widths import LayerWidths


def recipe(profile: Path, **changes: Any) -> Recipe:
    values: dict[str, Any] = {"speedup": 1.3, "context_length": 256, "budget": "latency", "profile": str(profile)}
    return Recipe(model="m", **values | changes)


def pool_of(profile: Path, **changes: Any) -> Pool:
    (pool,) = make_pools(CONFIG, {}, dimensions_of(CONFIG), "kv-group", recipe(profile, **changes))
    return pool


def widths_of(support: Masks) -> list[LayerWidths]:
    pairs = zip(support["attn"], support["mlp"], strict=True)
    return [
        LayerWidths(query_heads_per_kv_head=(2,) * int(heads.sum()), intermediate_size=int(channels.sum()))
        for heads, channels in pairs
    ]


def saliency(pool: Pool, seed: int) -> Masks:
    generator = torch.Generator().manual_seed(seed)
    return {kind: torch.rand(shape, generator=generator).pow(3) for kind, shape in pool.shapes.items()}


def all_open(pool: Pool) -> Masks:
    return {kind: torch.ones(shape, dtype=torch.bool) for kind, shape in pool.shapes.items()}


@pytest.mark.parametrize("speedup", [1.05, 1.3, 1.6, 1.9])
@pytest.mark.parametrize("align", [1, 96])
def test_the_speedup_is_met_within_a_step_of_the_staircase(speedup: float, align: int, tmp_path: Path) -> None:
    path = written(tmp_path)
    pool = pool_of(path, speedup=speedup, align=align)
    for seed in range(4):
        support = pool.choose(saliency(pool, seed), all_open(pool))
        widths = widths_of(support)
        predicted, _, _ = read_profile(path).speedup(widths, recipe(path).workload)
        assert speedup <= predicted < speedup * (1.04 if align == 1 else 1.08)
        assert all(layer.intermediate_size % 128 == 0 and layer.intermediate_size % align == 0 for layer in widths)
    assert "µs of a step" in describe(pool)


def test_a_block_goes_whole_when_little_of_it_is_worth_its_fixed_cost(tmp_path: Path) -> None:
    """A layer whose MLP says little loses it all; units alone would leave a stub that still costs its fixed part."""
    pool = pool_of(written(tmp_path), speedup=1.2)
    worth = {kind: values + 0.5 for kind, values in saliency(pool, 0).items()}
    worth["attn"] *= 256  # a head is worth as much as the channels of its time
    worth["mlp"][2] *= 1e-3
    worth["attn"][1] *= 1e-3
    support = pool.choose(worth, all_open(pool))
    assert not support["mlp"][2].any() and not support["attn"][1].any()
    stays = all_open(pool)
    for keep_ratio in (0.95, 0.85, pool.keep_ratio):  # and already while searching
        closed = pool.close(worth, stays, keep_ratio)
        assert all((closed[kind] <= stays[kind]).all() for kind in closed)
        stays = closed
    assert not stays["mlp"][2].any() and not stays["attn"][1].any()


def test_the_exact_choice_is_the_best_of_all() -> None:
    """Against every combination of three lists of four numbers."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        worth = torch.rand(3, 3, generator=generator).cumsum(1).double()
        cost = torch.rand(3, 3, generator=generator).add(0.05).cumsum(1).double()
        worth, cost = (torch.cat([torch.zeros(3, 1).double(), each], 1) for each in (worth, cost))
        numbers = torch.cartesian_prod(*[torch.arange(4)] * 3)
        totals = [each[torch.arange(3), numbers].sum(1) for each in (worth, cost)]
        best = totals[0][totals[1] <= 2.0].max()
        (chosen,) = exact_choice([worth], [cost], 2.0)
        assert float(cost[torch.arange(3), chosen].sum()) <= 2.0
        assert float(worth[torch.arange(3), chosen].sum()) == pytest.approx(float(best))


def test_a_share_of_the_time_is_a_budget_too(tmp_path: Path) -> None:
    pool = pool_of(written(tmp_path), speedup=0.0, sparsity=0.25)
    assert pool.keep_ratio == pytest.approx(0.75)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"speedup": 3.0}, "2.78 is the most"),
        ({"speedup": 1.3, "sparsity": 0.2}, "no sparsity or target"),
        ({"speedup": 0.9}, "above 1"),
        ({"scope": "layer"}, "whole model"),
        ({"concurrency": 64}, "batch of 1 to 8, not 64"),
        ({"phase": "dream"}, "must be one of"),
    ],
)
def test_what_cannot_be_met_is_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=said):
        pool_of(written(tmp_path), **changes)
