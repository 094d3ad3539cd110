"""Budgets in measured time: met to the resolution of the profile, by whole blocks or by units, or refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import invoke, passed
from latency_profiles import CONFIG, MIXTURE, written
from runs import SMALL

from ddp_prune.core.budget import Pool, keep_schedule
from ddp_prune.core.gates import Masks
from ddp_prune.core.selection import choose_counts
from ddp_prune.pools import make_pools
from ddp_prune.recipe import Recipe
from ddp_vllm.checkpoint import read_checkpoint
from ddp_vllm.errors import SettingError
from ddp_vllm.families import dense_layers, dimensions_of
from ddp_vllm.latency import read_profile
from ddp_vllm.remote_code.widths import LayerWidths


def recipe(profile: Path, **changes: Any) -> Recipe:
    values: dict[str, Any] = {"speedup": 1.3, "context_length": 256, "budget": "latency", "profile": str(profile)}
    return Recipe(model="m", **values | changes)


def pool_of(profile: Path, config: dict[str, Any] = CONFIG, **changes: Any) -> Pool:
    asked = recipe(profile, **changes)
    (pool,) = make_pools(config, {}, dimensions_of(config), "kv-group", asked, read_profile(profile))
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
    assert "µs per step of attn, mlp" in pool.describe()


@pytest.mark.parametrize("kernel", [0.9, 1.0, 1.2])
@pytest.mark.parametrize("speedup", [1.1, 1.3, 2.0])
def test_the_speedup_of_a_mixture_is_met_by_its_packed_widths(speedup: float, kernel: float, tmp_path: Path) -> None:
    """Removed experts do not save the fixed cost of their layer, and the dense model runs another kernel."""
    path = written(tmp_path, MIXTURE, kernel=kernel)
    pool = pool_of(path, MIXTURE, speedup=speedup)
    support = pool.choose(saliency(pool, 0), all_open(pool))["experts"]
    layers = [
        replace(layer, expert_intermediate_sizes=tuple(map(int, counts)))
        for layer, counts in zip(dense_layers(MIXTURE), support.sum(2), strict=True)
    ]
    assert all(width % 16 == 0 for layer in layers for width in layer.expert_intermediate_sizes or ())
    predicted, _, _ = read_profile(path).speedup(layers, recipe(path).workload)
    assert speedup <= predicted < speedup * 1.01
    closed = pool.close(saliency(pool, 0), all_open(pool), pool.keep_ratio)["experts"]  # and already during the search
    assert float(closed.float().mean()) == pytest.approx(float(support.float().mean()), abs=0.02)


def test_widths_without_a_multiple_are_cut_into_blocks(tmp_path: Path) -> None:
    """A table has at most MOST_BLOCKS entries per layer."""
    config = CONFIG | {"num_hidden_layers": 28, "intermediate_size": 18944}
    path = written(tmp_path, config, multiple=1)
    pool = pool_of(path, config, speedup=1.3, tp=2)
    assert pool.tables["mlp"].shape == (28, 149) and pool.blocks["mlp"] == 128
    widths = widths_of(pool.choose(saliency(pool, 0), all_open(pool)))
    predicted, _, _ = read_profile(path).speedup(widths, recipe(path).workload)
    assert 1.3 <= predicted < 1.31


def test_a_block_is_removed_as_a_whole_where_it_does_not_pay_its_fixed_cost(tmp_path: Path) -> None:
    """Removing single units would leave a narrow MLP that still has its fixed cost."""
    pool = pool_of(written(tmp_path), speedup=1.2)
    importance = {kind: values + 0.5 for kind, values in saliency(pool, 0).items()}
    importance["attn"] *= 256  # a head is as important as the channels that take as long
    importance["mlp"][2] *= 1e-3
    importance["attn"][1] *= 1e-3
    support = pool.choose(importance, all_open(pool))
    assert not support["mlp"][2].any() and not support["attn"][1].any()
    stays = all_open(pool)
    for keep_ratio in (0.95, 0.85, pool.keep_ratio):  # and already during the search
        closed = pool.close(importance, stays, keep_ratio)
        assert all((closed[kind] <= stays[kind]).all() for kind in closed)
        stays = closed
    assert not stays["mlp"][2].any() and not stays["attn"][1].any()


@pytest.mark.parametrize(("most_choices", "least", "mean"), [(1 << 16, 1.0, 1.0), (1, 0.85, 0.98)])
def test_counts_are_chosen_as_well_as_by_trying_all(
    most_choices: int, least: float, mean: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On rows of different lengths whose costs do not grow evenly; an impossible budget is refused."""
    monkeypatch.setattr("ddp_prune.core.selection.MOST_CHOICES", most_choices)
    generator, shares = torch.Generator().manual_seed(0), []
    for _ in range(50):
        importance = torch.rand(4, 6, generator=generator).double().cumsum(1)
        cost = torch.rand(4, 6, generator=generator).double().cumsum(1)
        importance[0, 4:], cost[0, 4:] = -torch.inf, torch.inf
        columns = torch.cartesian_prod(*[torch.arange(6)] * 4).T
        values, costs = (rows.gather(1, columns).sum(0) for rows in (importance, cost))
        budget = float(cost[:, 0].sum()) + 2.0
        chosen = choose_counts(importance, cost, budget)
        assert cost.gather(1, chosen[:, None]).sum() <= budget
        shares.append(float(importance.gather(1, chosen[:, None]).sum() / values[costs <= budget].max()))
    assert min(shares) >= least and sum(shares) / len(shares) >= mean
    with pytest.raises(SettingError, match="no selection of units meets the budget"):
        choose_counts(importance, cost, float(cost[:, 0].sum()) - 0.01)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"speedup": 3.0}, "2.78 is the most"),
        ({"speedup": 2.7}, "where the least that can be kept is"),
        ({"speedup": 1.3, "sparsity": 0.2}, "both state how much to remove"),
        ({"speedup": 0.9}, "above 1"),
        ({"scope": "layer"}, "leave scope out"),
    ],
)
def test_impossible_speedups_are_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=said):
        pool_of(written(tmp_path), **changes)


def test_a_share_of_the_time_is_a_budget_too_and_a_faster_kernel_alone_meets_none(tmp_path: Path) -> None:
    assert pool_of(written(tmp_path), speedup=0.0, sparsity=0.25).keep_ratio == pytest.approx(0.75)
    with pytest.raises(SettingError, match="and removes some"):
        pool_of(written(tmp_path, MIXTURE, kernel=0.9), MIXTURE, speedup=1.05)


@pytest.mark.usefixtures("cache", "no_pictures")
def test_a_mixture_is_pruned_to_the_speedup_that_its_checkpoint_states(
    tiny_experts: Path, tiny_text: Path, tmp_path: Path
) -> None:
    profile = written(tmp_path, json.loads((tiny_experts / "config.json").read_text()), 1)
    options = ["--speedup", "1.01", "--profile", profile, "--other-machine", "--context-length", "256", *SMALL]
    passed(invoke("prune", tiny_experts, *options, "--data", tiny_text, "-o", tmp_path / "out"))
    layers = read_checkpoint(tmp_path / "out").layers
    predicted = read_checkpoint(tmp_path / "out").provenance["latency"]["speedup"]
    assert 1.01 <= predicted == pytest.approx(read_profile(profile).speedup(layers, recipe(profile).workload)[0])
    assert all(width % 16 == 0 for layer in layers for width in layer.expert_intermediate_sizes or ())


def test_the_search_closes_what_the_final_selection_removes(tmp_path: Path) -> None:
    """Single channels of a block save no time: closed in the search, they would be reopened at the end."""
    pool = pool_of(written(tmp_path), speedup=1.2)
    stays, importance = all_open(pool), saliency(pool, 0)
    for keep_ratio in (0.95, 0.9, pool.keep_ratio):
        stays = pool.close(importance, stays, keep_ratio)
    widths = widths_of(stays)
    assert all(layer.intermediate_size % pool.blocks["mlp"] == 0 for layer in widths)
    final = pool.choose(importance, stays)
    assert all(torch.equal(final[kind], stays[kind]) for kind in final)


@pytest.mark.parametrize("speedup", [1.1, 1.25, 1.5])
def test_what_closes_before_an_attention_block_fits_is_not_reopened(speedup: float, tmp_path: Path) -> None:
    """Along the whole schedule, with attention of very different importance: 19 of 60 such searches reopened blocks."""
    config = CONFIG | {"num_hidden_layers": 8}
    pool = pool_of(written(tmp_path, config), config, speedup=speedup)
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        importance, is_open = saliency(pool, seed), all_open(pool)
        importance["attn"] *= 400 * torch.rand(1, generator=generator) * torch.rand(8, 1, generator=generator) ** 2
        for step in range(40):
            is_open = pool.close(importance, is_open, keep_schedule((step + 1) / 40, pool.keep_ratio))
        final = pool.choose(importance, is_open)
        assert all(torch.equal(final[kind], is_open[kind]) for kind in final)
