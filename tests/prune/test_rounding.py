"""Exact counts, aligned widths, and costs of different sizes, against every choice there is."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp_prune.budget import Rows, best_first, best_support, cut_rows, evenly, exact_support, keeping_worth


def _aligned(worth: torch.Tensor, kept: int, block: int, groups: int = 1) -> torch.Tensor:
    """Round one module type whose units all cost 1."""
    rows = len(worth)
    group = torch.arange(rows) * groups // rows
    cut = cut_rows(worth, best_first(worth), torch.ones(rows), group, block=block)
    return best_support([cut], kept, [1 / groups] * groups)[0]


@given(st.integers(1, 40), st.integers(0, 2**31))
def test_support_has_exactly_the_count_even_with_ties(kept: int, seed: int) -> None:
    worth = torch.randint(0, 3, (5, 8), generator=torch.Generator().manual_seed(seed)).float()
    support = exact_support(worth, kept)
    assert int(support.sum()) == kept
    if kept < 40:
        assert worth[support].min() >= worth[~support].max()
    assert torch.equal(_aligned(worth, kept, 1), support)  # the general rule, where every unit costs 1


def test_support_per_layer_is_even() -> None:
    assert _aligned(torch.ones(5, 8), 22, 1, groups=5).sum(1).tolist() == [5, 5, 4, 4, 4]


@pytest.mark.parametrize("seed", range(5))
def test_what_is_left_over_goes_to_the_layers_where_it_is_worth_most(seed: int) -> None:
    worth = torch.rand(5, 8, generator=torch.Generator().manual_seed(seed))
    counts = _aligned(worth, 22, 1, groups=5).sum(1)
    fifth = worth.sort(1, descending=True).values[:, 4]
    assert counts.sum() == 22 and counts.min() == 4
    assert set(fifth.topk(2).indices.tolist()) == set((counts == 5).nonzero().flatten().tolist())


@given(st.data())
def test_aligned_support_has_multiples_only_and_the_highest_worth(data: st.DataObject) -> None:
    """`align` often does not divide the units of a row."""
    rows, units = data.draw(st.integers(1, 3)), data.draw(st.integers(2, 7))
    align, kept = data.draw(st.integers(1, units)), data.draw(st.integers(1, rows * units))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    worth = torch.randint(0, 6, (rows, units), generator=generator).float()  # ties too
    possible = [
        choice
        for choice in itertools.product(range(0, units + 1, align), repeat=rows)
        if sum(choice) == min(kept // align, rows * (units // align)) * align
    ]
    support = _aligned(worth, kept, align)
    assert tuple(support.sum(1).tolist()) in possible and support.dtype == torch.bool
    ranked = worth.sort(1, descending=True).values
    best = max(sum(float(row[:n].sum()) for row, n in zip(ranked, choice, strict=True)) for choice in possible)
    assert float(worth[support].sum()) == best
    for row, keep in zip(worth, support, strict=True):  # in a row the best ones stay
        assert not keep.any() or keep.all() or row[keep].min() >= row[~keep].max()


def test_experts_are_rows_and_layers_of_experts_are_groups() -> None:
    worth = torch.rand(2, 3, 8, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 10.0])[:, None, None]
    rows = worth.flatten(0, 1)
    assert _aligned(rows, 24, 4).sum(-1).tolist() == [0, 0, 0, 8, 8, 8]
    by_layer = _aligned(rows, 24, 4, groups=2).sum(-1)
    assert by_layer.view(2, 3).sum(1).tolist() == [12, 12] and not (by_layer % 4).any()
    assert (_aligned(rows, 24, 4, groups=6).sum(-1) == 4).all()


HEADS, CHANNELS, HEAD_COST, CHANNEL_COST = 3, 4, 7.0, 2.0


def _costs_of_choices(rows: list[Rows]) -> list[tuple[float, float]]:
    """Return (cost, worth) of every choice of a number of blocks in every row."""
    totals = []
    for part in rows:
        for units, worth, cost in zip(part.units, part.worth, part.cost, strict=True):
            real = units > 0
            steps = zip(worth[real].cumsum(0).tolist(), cost[real].cumsum(0).tolist(), strict=True)
            totals.append([(0.0, 0.0), *((c, w) for w, c in steps)])
    return [(sum(c for c, _ in choice), sum(w for _, w in choice)) for choice in itertools.product(*totals)]


@settings(max_examples=50)
@given(st.integers(0, 60), st.integers(0, 2**31))
def test_costs_of_different_sizes_share_one_budget(budget: int, seed: int) -> None:
    """Never above it, nothing left out that fits, and at most one unit's worth below the best of all choices."""
    generator = torch.Generator().manual_seed(seed)
    heads = torch.randint(0, 50, (2, HEADS), generator=generator).double()
    channels = torch.randint(0, 20, (2, CHANNELS), generator=generator).double()
    group = torch.zeros(2, dtype=torch.int64)
    rows = [
        cut_rows(values, best_first(values), torch.full((2,), cost), group)
        for values, cost in ((heads, HEAD_COST), (channels, CHANNEL_COST))
    ]
    kept = best_support(rows, budget)
    spent = HEAD_COST * int(kept[0].sum()) + CHANNEL_COST * int(kept[1].sum())
    worth = float(heads[kept[0]].sum() + channels[kept[1]].sum())
    best = max(worth for cost, worth in _costs_of_choices(rows) if cost <= budget)
    assert spent <= budget and worth > best - max(float(heads.max()), float(channels.max()), 1e-9)
    assert spent + HEAD_COST > budget or kept[0].all()
    assert spent + CHANNEL_COST > budget or kept[1].all()


@settings(max_examples=50)
@given(st.integers(0, 50), st.integers(0, 2**31))
def test_query_heads_pay_for_the_kv_head_they_share_once(budget: int, seed: int) -> None:
    """Four KV heads with three query heads each: against every number of query heads for every KV head."""
    generator = torch.Generator().manual_seed(seed)
    worth = torch.randint(0, 20, (4, 3), generator=generator).double()
    own, shared = torch.full((4,), 2.0), torch.full((4,), 5.0)
    rows = cut_rows(worth, best_first(worth), own, torch.zeros(4, dtype=torch.int64), opening_R=shared)
    (kept,) = best_support([rows], budget)
    spent = 2.0 * int(kept.sum()) + 5.0 * int(kept.any(1).sum())
    ranked = worth.sort(1, descending=True).values
    best = max(
        sum(float(row[:n].sum()) for row, n in zip(ranked, choice, strict=True))
        for choice in itertools.product(range(4), repeat=4)
        if 2.0 * sum(choice) + 5.0 * sum(n > 0 for n in choice) <= budget
    )
    assert spent <= budget
    assert float(worth[kept].sum()) >= best - float(worth.sum(1).max())


def test_units_that_cost_nothing_stay() -> None:
    worth, group = torch.rand(2, 3), torch.zeros(2, dtype=torch.int64)
    priced, free = (cut_rows(worth, best_first(worth), torch.full((2,), cost), group) for cost in (4.0, 0.0))
    heads, channels = best_support([priced, free], 9.0)
    assert channels.all() and int(heads.sum()) == 2
    shared = cut_rows(worth, best_first(worth), torch.zeros(2), group, opening_R=torch.ones(2))
    assert best_support([shared], 1.0)[0].sum(1).sort().values.tolist() == [0, 3]  # a KV head alone costs: whole groups


@pytest.mark.parametrize("group_size", [1, 2, 4])
def test_heads_that_leave_evenly_leave_every_kv_head_as_many(group_size: int) -> None:
    worth = torch.rand(3, 8, generator=torch.Generator().manual_seed(0))
    order, kv_heads = evenly(worth, group_size), 8 // group_size
    rows = cut_rows(worth, order, torch.ones(3), torch.zeros(3, dtype=torch.int64), block=kv_heads)
    (kept,) = best_support([rows], 13)
    counts = kept.unflatten(1, (kv_heads, group_size)).sum(-1)
    assert (counts == counts[:, :1]).all() and int(kept.sum()) == 13 // kv_heads * kv_heads
    for heads, keep in zip(worth.view(-1, group_size), kept.view(-1, group_size), strict=True):
        assert not keep.any() or keep.all() or heads[keep].min() >= heads[~keep].max()


@given(st.integers(0, 2**31))
def test_open_gates_are_worth_more_than_closed_ones_in_the_order_of_saliency(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    saliency = torch.rand(40, generator=generator).clamp_min(0.1).pow(12)  # over more than float32 can add up
    alive = torch.rand(40, generator=generator) < 0.5
    worth = keeping_worth(saliency, alive)
    for part in (alive, ~alive):
        assert torch.equal(worth[part].argsort(stable=True), saliency[part].argsort(stable=True))
    if alive.any() and not alive.all():
        assert worth[alive].min() > worth[~alive].max()


def test_a_layer_worth_little_goes() -> None:
    worth = torch.cat([torch.ones(2, 8), torch.full((1, 8), 0.1)])
    assert _aligned(worth, 17, 4).sum(1).tolist() == [8, 8, 0]
