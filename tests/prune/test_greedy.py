"""The greedy selection, compared with all possible choices: exact counts, aligned widths, costs of different sizes."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp_prune.core.selection import best_support, cut_rows, exact_support, greedy, rank_evenly_per_kv_head


def _whole(budget: float) -> torch.Tensor:
    """One budget for all."""
    return torch.tensor([budget], dtype=torch.float64)


def _aligned(importance: torch.Tensor, kept: int, block: int) -> torch.Tensor:
    """Round one module type whose units all cost 1."""
    return best_support([cut_rows(importance, block=block)], _whole(kept))[0]


@given(st.integers(1, 40), st.integers(0, 2**31))
def test_support_has_exactly_the_count_even_with_ties(kept: int, seed: int) -> None:
    importance = torch.randint(0, 3, (5, 8), generator=torch.Generator().manual_seed(seed)).float()
    support = exact_support(importance, kept)
    assert int(support.sum()) == kept
    if kept < 40:
        assert importance[support].min() >= importance[~support].max()
    assert torch.equal(_aligned(importance, kept, 1), support)  # the general rule, where every unit costs 1


@given(st.data())
def test_aligned_support_has_only_multiples_and_the_highest_importance(data: st.DataObject) -> None:
    """`align` often does not divide the units of a row."""
    rows, units = data.draw(st.integers(1, 3)), data.draw(st.integers(2, 7))
    align, kept = data.draw(st.integers(1, units)), data.draw(st.integers(1, rows * units))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    importance = torch.randint(0, 6, (rows, units), generator=generator).float()  # ties too
    possible = [
        choice
        for choice in itertools.product(range(0, units + 1, align), repeat=rows)
        if sum(choice) == min(kept // align, rows * (units // align)) * align
    ]
    support = _aligned(importance, kept, align)
    assert tuple(support.sum(1).tolist()) in possible and support.dtype == torch.bool
    ranked = importance.sort(1, descending=True).values
    best = max(sum(float(row[:n].sum()) for row, n in zip(ranked, choice, strict=True)) for choice in possible)
    assert float(importance[support].sum()) == best
    for row, keep in zip(importance, support, strict=True):  # a row keeps its best units
        assert not keep.any() or keep.all() or row[keep].min() >= row[~keep].max()


@settings(max_examples=50)
@given(st.integers(0, 50), st.integers(0, 2**31))
def test_query_heads_pay_for_the_kv_head_they_share_once(budget: int, seed: int) -> None:
    """Four KV heads with three query heads each: against every number of query heads for every KV head."""
    generator = torch.Generator().manual_seed(seed)
    importance = torch.randint(0, 20, (4, 3), generator=generator).double()
    own, shared = torch.full((4,), 2.0), torch.full((4,), 5.0)
    rows = cut_rows(importance, cost_R=own, fixed_R=shared)
    (kept,) = best_support([rows], _whole(budget))
    spent = 2.0 * int(kept.sum()) + 5.0 * int(kept.any(1).sum())
    ranked = importance.sort(1, descending=True).values
    best = max(
        sum(float(row[:n].sum()) for row, n in zip(ranked, choice, strict=True))
        for choice in itertools.product(range(4), repeat=4)
        if 2.0 * sum(choice) + 5.0 * sum(n > 0 for n in choice) <= budget
    )
    assert spent <= budget
    assert float(importance[kept].sum()) >= best - float(importance.sum(1).max())


def test_rows_without_cost_are_kept() -> None:
    importance = torch.rand(2, 3)
    priced, free = (cut_rows(importance, cost_R=torch.full((2,), cost)) for cost in (4.0, 0.0))
    heads, channels = best_support([priced, free], _whole(9.0))
    assert channels.all() and int(heads.sum()) == 2
    shared = cut_rows(importance, cost_R=torch.zeros(2), fixed_R=torch.ones(2))
    assert best_support([shared], _whole(1.0))[0].sum(1).sort().values.tolist() == [0, 3]  # whole groups
    kept = greedy(torch.tensor([[0.0, 1.0, 5.0, 2.0]]), torch.tensor([[0.0, 1.0, 10.0, 1.0]]), _whole(2.0))
    assert kept.tolist() == [[True, True, False, True]]


@pytest.mark.parametrize("queries_per_kv", [1, 2, 4])
def test_query_heads_removed_evenly_leave_every_kv_head_equally_many(queries_per_kv: int) -> None:
    importance = torch.rand(3, 8, generator=torch.Generator().manual_seed(0))
    order, kv_heads = rank_evenly_per_kv_head(importance, queries_per_kv), 8 // queries_per_kv
    rows = cut_rows(importance, order_RU=order, block=kv_heads)
    (kept,) = best_support([rows], _whole(13))
    counts = kept.unflatten(1, (kv_heads, queries_per_kv)).sum(-1)
    assert (counts == counts[:, :1]).all() and int(kept.sum()) == 13 // kv_heads * kv_heads
    for heads, keep in zip(importance.view(-1, queries_per_kv), kept.view(-1, queries_per_kv), strict=True):
        assert not keep.any() or keep.all() or heads[keep].min() >= heads[~keep].max()


@given(st.integers(1, 6), st.integers(1, 5), st.floats(0.0, 1.0), st.booleans(), st.integers(0, 2**31))
def test_groups_share_the_remaining_budget(groups: int, units: int, keep_ratio: float, priced: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    importance = torch.randint(0, 5, (groups, units), generator=generator).float()  # ties too
    cost = torch.where(torch.rand(groups, units, generator=generator) < 0.3, 7.0, 1.0) if priced else torch.ones(1)
    cost = cost.expand(groups, units)
    budget = keep_ratio * cost.double().sum(1)
    own = torch.cat([greedy(importance[i : i + 1], cost[i : i + 1], budget[i : i + 1]) for i in range(groups)])
    kept = greedy(importance, cost, budget)
    more = kept & ~own
    assert (kept >= own).all() and (more.sum(1) <= 1).all()
    assert float((cost * kept).sum()) <= float(budget.sum()) + 1e-6
    if not priced:
        assert int(kept.sum()) == int((keep_ratio + 1e-9) * groups * units)
        passed = importance.masked_fill(own, -1.0).amax(1)[~more.any(1)]
        assert not more.any() or not len(passed) or importance[more].min() >= passed.max()


def test_many_groups_together_stay_within_the_budget() -> None:
    """6,144 experts of 768 channels: a tolerance per group would add up."""
    importance = torch.rand(6144, 768, generator=torch.Generator().manual_seed(0))
    budget = torch.full((6144,), 0.8 * 768, dtype=torch.float64)
    assert int(greedy(importance, torch.ones(1).expand_as(importance), budget).sum()) == int(0.8 * 768 * 6144)


def test_a_group_can_use_the_budget_that_another_cannot() -> None:
    """Three groups with 3 each: two have only blocks that cost 10, the third has blocks that cost 7 and 2."""
    cost = torch.tensor([[10.0, 10.0], [10.0, 10.0], [2.0, 7.0]])
    importance = torch.tensor([[50.0, 40.0], [60.0, 30.0], [4.0, 7.0]])
    kept = greedy(importance, cost, torch.tensor([3.0, 3.0, 3.0], dtype=torch.float64))
    assert kept.tolist() == [[False, False], [False, False], [True, True]]
