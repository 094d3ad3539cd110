"""Exact counts, the feedback controller, the paper's multipliers, and the exact-budget theorem on a known problem."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp_prune.budget import (
    AugmentedLagrangian,
    aligned_budget,
    aligned_support,
    exact_support,
    hold_budget,
    keep_schedule,
    keeping_worth,
    kept_units,
)
from ddp_prune.gates import gate, retention_score, sharpness_at
from ddp_vllm.errors import SettingError


def test_kept_units_refuses_budgets_that_remove_all_or_nothing() -> None:
    assert kept_units(90, 0.2) == 72 and kept_units(46_080, 0.5) == 23_040
    for sparsity in (0.001, 0.999):
        with pytest.raises(SettingError, match="units"):
            kept_units(90, sparsity)


@given(st.integers(1, 40), st.integers(0, 2**31))
def test_support_has_exactly_the_count_even_with_ties(kept: int, seed: int) -> None:
    saliency = torch.randint(0, 3, (5, 8), generator=torch.Generator().manual_seed(seed)).float()
    support = exact_support(saliency, kept, per_layer=False)
    assert int(support.sum()) == kept
    if 0 < kept < 40:
        assert saliency[support].min() >= saliency[~support].max()


def test_support_per_layer_is_even() -> None:
    support = exact_support(torch.rand(5, 8), 22, per_layer=True)
    assert support.sum(1).tolist() == [5, 5, 4, 4, 4]


@given(st.data())
def test_aligned_support_has_multiples_only_and_the_highest_worth(data: st.DataObject) -> None:
    """Against every choice of widths; `align` often does not divide the units of a row."""
    rows, units = data.draw(st.integers(1, 3)), data.draw(st.integers(2, 7))
    align, kept = data.draw(st.integers(1, units)), data.draw(st.integers(1, rows * units))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    worth = torch.randint(0, 6, (rows, units), generator=generator).float()  # ties too
    possible = [
        choice
        for choice in itertools.product(range(0, units + 1, align), repeat=rows)
        if sum(choice) == min(kept // align, rows * (units // align)) * align
    ]
    if kept < align:
        with pytest.raises(SettingError, match=f"align is {align}"):
            aligned_support(worth, kept, align)
        return
    support = aligned_support(worth, kept, align)
    assert tuple(support.sum(1).tolist()) in possible and support.dtype == torch.bool
    ranked = worth.sort(1, descending=True).values
    best = max(sum(float(row[:n].sum()) for row, n in zip(ranked, choice, strict=True)) for choice in possible)
    assert float(worth[support].sum()) == best
    for row, keep in zip(worth, support, strict=True):  # in a row the best ones stay
        assert not keep.any() or keep.all() or row[keep].min() >= row[~keep].max()


@pytest.mark.parametrize(
    ("kept", "align", "expected"),
    [
        (22, 1, 22),
        (22, 2, 22),  # an exact multiple stays
        (22, 4, 20),  # the largest multiple below
        (39, 3, 30),  # a row of 8 holds two blocks of 3
        (40, 8, 40),
    ],
)
def test_aligned_budget_is_the_largest_multiple_that_fits(kept: int, align: int, expected: int) -> None:
    assert aligned_budget(kept, 5, 8, align) == expected
    for groups in (1, 5):
        counts = aligned_support(torch.rand(5, 8), kept, align, groups=groups).sum(1)
        assert int(counts.sum()) == expected and not (counts % align).any()
        assert groups == 1 or int(counts.max() - counts.min()) <= align


def test_experts_are_rows_and_layers_of_experts_are_groups() -> None:
    worth = torch.rand(2, 3, 8, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 10.0])[:, None, None]
    everywhere = aligned_support(worth, 24, 4).sum(-1)
    assert everywhere.tolist() == [[0, 0, 0], [8, 8, 8]]
    by_layer = aligned_support(worth, 24, 4, groups=2).sum(-1)
    assert by_layer.sum(1).tolist() == [12, 12] and not (by_layer % 4).any()
    assert (aligned_support(worth, 24, 4, groups=6).sum(-1) == 4).all()


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
    assert aligned_support(worth, 17, 4).sum(1).tolist() == [8, 8, 0]


def test_align_1_is_the_exact_support() -> None:
    worth = torch.rand(4, 9, generator=torch.Generator().manual_seed(0))
    assert torch.equal(aligned_support(worth, 13, 1), exact_support(worth, 13, per_layer=False))


@settings(deadline=None)
@given(st.floats(0.1, 0.95), st.floats(0.05, 0.5), st.booleans(), st.integers(0, 2**31))
def test_feedback_hits_the_budget(keep_ratio: float, mu: float, per_layer: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    z = torch.rand(4, 200, generator=generator) * 1.2
    moved = hold_budget(z, torch.rand(4, 200, generator=generator), mu, keep_ratio, floor=0.0, per_layer=per_layer)
    means = retention_score(moved, mu).mean(-1)
    torch.testing.assert_close(means.mean(), torch.tensor(keep_ratio), atol=2e-3, rtol=0)
    if per_layer:
        torch.testing.assert_close(means, torch.full((4,), keep_ratio), atol=2e-3, rtol=0)


def test_feedback_moves_the_unimportant_first() -> None:
    z, curvature = torch.full((1, 4), 0.5), torch.tensor([[100.0, 1.0, 100.0, 1.0]])
    moved = hold_budget(z, curvature, 0.25, 0.7, floor=0.0, per_layer=False)[0]
    assert moved[1] < moved[0] and moved[3] < moved[2]


def test_keep_schedule_falls_from_1_to_the_ratio() -> None:
    values = [keep_schedule(t / 100, 0.6) for t in range(101)]
    assert values[0] == 1.0 and values[-1] == pytest.approx(0.6)
    assert all(a >= b for a, b in itertools.pairwise(values))


def test_multipliers_ascend_while_too_much_is_kept() -> None:
    alm = AugmentedLagrangian(["mlp"], {"mlp": 0.5}, per_layer=False)
    alm({"mlp": torch.full((2, 4), 0.8)}).backward()
    assert alm.lambda1["mlp"].grad == pytest.approx(0.3)
    assert alm.lambda2["mlp"].grad == pytest.approx(0.09)
    assert alm.lambda3["mlp"].grad == pytest.approx(0.16)


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
        z.data.copy_(
            hold_budget(z.detach(), curvature, mu, keep_schedule(progress, kept / 20), floor=0.0, per_layer=False)
        )
    alive = z.detach()[0] > 0.05
    assert int(alive.sum()) == kept
    assert cost[alive].min() > cost[~alive].max()
