"""The paper's search: its equations as properties, and what it proves on problems whose answer is known.

Section 3 and appendix of arXiv:2603.08065.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ddp_prune.core.alm import AugmentedLagrangian, gate, retention_score, sharpness_at

UNITS = 20
COST = torch.linspace(0.0015, 0.03, UNITS)[torch.randperm(UNITS, generator=torch.Generator().manual_seed(1))]


@given(st.floats(0.01, 1.0), st.integers(0, 2**31))
def test_the_gradient_of_the_score_passes_its_clamp(mu: float, seed: int) -> None:
    """Inside (0, 2μ) it is the true derivative; outside, where the true one is 0, it still pulls."""
    generator = torch.Generator().manual_seed(seed)
    z = torch.rand(32, generator=generator, dtype=torch.float64) * 4 * mu - mu
    leaf = z.clone().requires_grad_()
    retention_score(leaf, mu).sum().backward()
    assert leaf.grad is not None and (leaf.grad > 0).all()
    inside = (z > 0.05 * mu) & (z < 1.95 * mu)
    difference = 1e-5 * mu
    numeric = (retention_score(z + difference, mu) - retention_score(z - difference, mu)) / (2 * difference)
    torch.testing.assert_close(leaf.grad[inside], numeric[inside], rtol=1e-5, atol=0)


@given(st.floats(1e-3, 1.0), st.floats(0.01, 0.5), st.integers(0, 2**31))
def test_with_a_margin_the_relaxed_budget_is_the_count(margin: float, share: float, seed: int) -> None:
    """Lemma of the exact-budget theorem: |z| ≥ δ and μ ≤ δ/2 make Σs equal the number of open gates."""
    generator = torch.Generator().manual_seed(seed)
    sign = torch.where(torch.rand(3, 7, generator=generator) < 0.5, -1.0, 1.0).double()
    z = sign * (margin + torch.rand(3, 7, generator=generator).double())
    count = int((gate(z) > 0).sum())
    assert retention_score(z, share * margin).sum().item() == pytest.approx(count, abs=1e-9)
    blurred = retention_score(torch.full((3, 7), margin, dtype=torch.float64), 2 * margin)
    assert (blurred < 1).all()  # without it, the same gates do not fill the budget


def _solve(kept: int) -> tuple[torch.Tensor, float]:
    """Minimize Σ c_k (m_k − 1)² under the paper's penalty, rates and 1,000 steps; return final z and Σs."""
    z = nn.Parameter(torch.ones(1, UNITS))
    alm = AugmentedLagrangian({"mlp": kept / UNITS})
    rates = [(z, 2e-2, False), (alm.lambda1["mlp"], 2e-2, True), (alm.lambda2["mlp"], 4e-1, True)]
    rates.append((alm.lambda3["mlp"], 2e-2, True))
    optimizer = torch.optim.AdamW(
        [{"params": [values], "lr": rate, "maximize": up} for values, rate, up in rates], weight_decay=0.0
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
    mu = 0.5
    for step in range(1000):
        mu = sharpness_at((step + 1) / 1000, 0.5, 0.05)
        optimizer.zero_grad()
        loss = (COST * (gate(z) - 1).square()).sum() + alm(
            {"mlp": retention_score(z, mu)}, {"mlp": torch.ones(1, UNITS)}
        )
        loss.backward()
        optimizer.step()
        schedule.step()
        z.data.clamp_(min=0.0)
    return z.detach()[0], retention_score(z.detach(), mu).sum().item()


@pytest.mark.parametrize("kept", [5, 15])
def test_the_papers_multipliers_recover_the_exact_budget_and_the_best_support(kept: int) -> None:
    """The best answer keeps the dearest P at scale 1; the theorem's hypotheses, margin and binarisation, are met."""
    z, score = _solve(kept)
    alive = gate(z) > 0
    assert int(alive.sum()) == kept and score == pytest.approx(kept, abs=1e-3)
    assert COST[alive].min() > COST[~alive].max()
    assert z[alive].min() >= 2 * 0.05  # the margin at which s is exactly 1
    regret = (COST * (gate(z) - 1).square()).sum() / COST[~alive].sum()
    assert regret.item() == pytest.approx(1.0, abs=2e-3)


def test_multipliers_ascend_by_what_is_kept_too_much_weighed_by_its_cost() -> None:
    alm = AugmentedLagrangian({"params": 0.5})
    alm({"params": torch.tensor([[1.0, 0.5]])}, {"params": torch.tensor([[1.0, 3.0]])}).backward()
    assert alm.lambda1["params"].grad == pytest.approx(2.5 / 4 - 0.5)
    assert alm.lambda2["params"].grad == pytest.approx((2.5 / 4 - 0.5) ** 2)
    assert alm.lambda3["params"].grad == pytest.approx(0.75 / 4)
