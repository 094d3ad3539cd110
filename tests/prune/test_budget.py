"""The three ways to hold a budget, and the exact-budget theorem on a known problem."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ddp_prune.alm import AugmentedLagrangian, gate, retention_score, sharpness_at
from ddp_prune.budget import highest_worth, hold_budget, keep_schedule, kept_share, share_leftover


@given(st.floats(0.1, 0.95), st.floats(0.05, 0.5), st.booleans(), st.booleans(), st.integers(0, 2**31))
def test_feedback_hits_the_budget(keep_ratio: float, mu: float, per_layer: bool, priced: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = (4, 200) if per_layer else (1, 800)
    z, curvature = torch.rand(rows, generator=generator) * 1.2, torch.rand(rows, generator=generator)
    cost = torch.where(torch.rand(rows, generator=generator) < 0.1, 50.0, 1.0) if priced else torch.ones(rows)
    moved = hold_budget(z, curvature, cost, mu, keep_ratio, floor=0.0)
    shares = kept_share(retention_score(moved, mu), cost)
    torch.testing.assert_close(shares, torch.full((rows[0],), keep_ratio), atol=2e-3, rtol=0)


@given(st.floats(0.1, 0.95), st.floats(0.05, 0.5), st.booleans(), st.integers(0, 2**31))
def test_counting_closes_gates_until_the_open_ones_fit(keep_ratio: float, mu: float, priced: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    z, curvature = torch.rand(3, 300, generator=generator) * 1.2 - 0.2, torch.rand(3, 300, generator=generator) + 0.01
    z = z.clamp_min(0.0)
    cost = torch.where(torch.rand(3, 300, generator=generator) < 0.1, 5.0, 1.0) if priced else torch.ones(3, 300)
    moved = hold_budget(z, curvature, cost, mu, keep_ratio, floor=0.0, count_open=True)
    before, after = kept_share((z > 0).float(), cost), kept_share((moved > 0).float(), cost)
    assert not ((moved > 0) & (z == 0)).any()
    for index in range(3):
        if before[index] <= keep_ratio:
            assert torch.equal(moved[index], z[index])
        else:
            assert keep_ratio - 5.0 / 300 <= after[index] <= keep_ratio + 2e-6


@given(st.floats(0.05, 1.0), st.booleans(), st.integers(0, 2**31))
def test_the_highest_worth_for_its_cost_stays_within_the_budget(keep_ratio: float, priced: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    worth = torch.rand(3, 200, generator=generator).pow(8)
    cost = torch.where(torch.rand(3, 200, generator=generator) < 0.1, 7.0, 1.0) if priced else torch.ones(3, 200)
    kept = highest_worth(worth, cost, keep_ratio)
    spent = (cost * kept).sum(1)
    assert (spent <= keep_ratio * cost.sum(1) + 1e-3).all()
    assert (spent + cost.max() > keep_ratio * cost.sum(1) - 1e-3).all()
    ratio = worth / cost
    for row in range(3):
        if kept[row].any() and not kept[row].all():
            assert ratio[row][kept[row]].min() >= ratio[row][~kept[row]].max()


def test_what_costs_nothing_stays() -> None:
    kept = highest_worth(torch.tensor([[0.0, 1.0, 5.0, 2.0]]), torch.tensor([[0.0, 1.0, 10.0, 1.0]]), 2 / 12)
    assert kept.tolist() == [[True, True, False, True]]


@given(st.integers(1, 6), st.integers(1, 5), st.floats(0.0, 1.0), st.booleans(), st.integers(0, 2**31))
def test_rows_share_what_is_left_over(rows: int, units: int, keep_ratio: float, priced: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    worth = torch.randint(0, 5, (rows, units), generator=generator).float()  # ties too
    cost = torch.where(torch.rand(rows, units, generator=generator) < 0.3, 7.0, 1.0) if priced else torch.ones(1)
    cost = cost.expand(rows, units)
    own = highest_worth(worth, cost, keep_ratio)
    kept = share_leftover(own, worth, cost, keep_ratio)
    more = kept & ~own
    assert (kept >= own).all() and (more.sum(1) <= 1).all()
    assert float((cost * kept).sum()) <= keep_ratio * float(cost.sum()) + 1e-6
    if rows == 1:
        assert torch.equal(kept, own)
    if not priced:
        assert int(kept.sum()) == int((keep_ratio + 1e-9) * rows * units)
        passed = (worth / cost).masked_fill(own, -1.0).amax(1)[~more.any(1)]
        assert not more.any() or not len(passed) or worth[more].min() >= passed.max()


def test_feedback_moves_the_unimportant_first() -> None:
    z, curvature = torch.full((1, 4), 0.5), torch.tensor([[100.0, 1.0, 100.0, 1.0]])
    moved = hold_budget(z, curvature, torch.ones(1, 4), 0.25, 0.7, floor=0.0)[0]
    assert moved[1] < moved[0] and moved[3] < moved[2]


def test_feedback_moves_what_costs_much_first_and_what_costs_nothing_never() -> None:
    cost = torch.tensor([[1.0, 10.0, 0.0]])
    moved = hold_budget(torch.full((1, 3), 0.5), torch.ones(1, 3), cost, 0.25, 0.7, floor=0.0)[0]
    assert moved[1] < moved[0] < 0.5 and moved[2] == 0.5


def test_keep_schedule_falls_from_1_to_the_ratio() -> None:
    values = [keep_schedule(t / 100, 0.6) for t in range(101)]
    assert values[0] == 1.0 and values[-1] == pytest.approx(0.6)
    assert all(a >= b for a, b in itertools.pairwise(values))


def test_multipliers_ascend_while_too_much_is_kept() -> None:
    alm = AugmentedLagrangian({"mlp": 0.5})
    alm({"mlp": torch.full((1, 8), 0.8)}, {"mlp": torch.ones(1, 8)}).backward()
    assert alm.lambda1["mlp"].grad == pytest.approx(0.3)
    assert alm.lambda2["mlp"].grad == pytest.approx(0.09)
    assert alm.lambda3["mlp"].grad == pytest.approx(0.16)


def test_multipliers_weigh_what_is_kept_by_its_cost() -> None:
    alm = AugmentedLagrangian({"params": 0.5})
    alm({"params": torch.tensor([[1.0, 0.5]])}, {"params": torch.tensor([[1.0, 3.0]])}).backward()
    assert alm.lambda1["params"].grad == pytest.approx(2.5 / 4 - 0.5)
    assert alm.lambda3["params"].grad == pytest.approx(0.75 / 4)


@pytest.mark.parametrize("kept", [3, 10, 17])
def test_annealing_recovers_the_exact_budget_of_a_separable_problem(kept: int) -> None:
    """min Σ c_k (m_k − 1)²: the best P units are the P dearest, each at scale 1 (theorem "exact budget recovery")."""
    cost = torch.linspace(1.0, 20.0, 20)[torch.randperm(20, generator=torch.Generator().manual_seed(1))]
    z = torch.ones(1, 20, requires_grad=True)
    optimizer = torch.optim.AdamW([z], lr=2e-2, weight_decay=0.0)
    for step in range(300):
        progress = (step + 1) / 300
        optimizer.zero_grad()
        (cost * (gate(z) - 1).square()).sum().backward()
        optimizer.step()
        mu = sharpness_at(progress, 0.5, 0.05)
        curvature = cost.square()[None]
        target = keep_schedule(progress, kept / 20)
        z.data.copy_(hold_budget(z.detach(), curvature, torch.ones(1, 20), mu, target, floor=0.0))
    alive = z.detach()[0] > 0.05
    assert int(alive.sum()) == kept
    assert cost[alive].min() > cost[~alive].max()
