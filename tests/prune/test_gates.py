"""The paper's equations as properties, and gates attached to a stock model."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ddp_prune.alm import gate, retention_score, sharpness_at
from ddp_prune.gates import _Scale

mus = st.floats(0.01, 1.0)


@given(mus)
def test_score_is_0_at_0_and_1_at_twice_mu(mu: float) -> None:
    z = torch.tensor([0.0, 2 * mu, 3 * mu, -1.0], dtype=torch.float64)
    torch.testing.assert_close(retention_score(z, mu), torch.tensor([0.0, 1.0, 1.0, 0.0], dtype=torch.float64))


def test_score_tends_to_the_step_function() -> None:
    z = torch.tensor([-0.1, -0.01, 0.01, 0.1], dtype=torch.float64)
    distance = [(retention_score(z, mu) - (z > 0).double()).abs().max().item() for mu in (0.1, 0.01, 0.001)]
    assert distance[0] > distance[1] and distance[2] == 0.0


def test_gate_is_relu_with_a_straight_through_gradient() -> None:
    z = torch.tensor([-0.5, 0.0, 0.7], requires_grad=True)
    m = gate(z)
    m.backward(torch.tensor([1.0, 2.0, 3.0]))
    assert m.tolist() == pytest.approx([0.0, 0.0, 0.7])
    assert z.grad is not None and z.grad.tolist() == [1.0, 2.0, 3.0]  # a dead gate still hears the loss


def test_score_gradient_passes_the_clamp() -> None:
    z = torch.tensor([-0.2, 0.3, 2.0], dtype=torch.float64, requires_grad=True)
    retention_score(z, 0.5).sum().backward()
    v = torch.sigmoid((z.detach() - 0.5) * torch.log(torch.tensor(11.0, dtype=torch.float64)) / 0.5)
    expected = 1.2 * v * (1 - v) * torch.log(torch.tensor(11.0, dtype=torch.float64)) / 0.5
    assert z.grad is not None
    torch.testing.assert_close(z.grad, expected)


def test_annealing_starts_and_ends_where_the_paper_says() -> None:
    assert sharpness_at(0.0, 0.5, 0.05) == 0.5
    assert sharpness_at(1.0, 0.5, 0.05) == pytest.approx(0.05)
    assert sharpness_at(0.25, 0.5, 0.05) == pytest.approx(0.275)


@pytest.mark.parametrize("columns", [1, 3])
def test_scaling_sums_each_token_and_squares_it(columns: int) -> None:
    """Against autograd, with a mask of its own for every token."""
    generator = torch.Generator().manual_seed(0)
    x, slope = torch.randn(2, 2, 5, 4 * columns, generator=generator, dtype=torch.float64)
    mask = torch.rand(4, generator=generator, dtype=torch.float64)
    each = mask.expand(2, 5, 4).clone().requires_grad_()
    (x * each.repeat_interleave(columns, -1) * slope).sum().backward()
    leaf, inputs, squares = mask.clone().requires_grad_(), x.clone().requires_grad_(), torch.zeros(4).double()
    (_Scale.apply(inputs, leaf, columns, squares, None) * slope).sum().backward()
    assert each.grad is not None and leaf.grad is not None
    torch.testing.assert_close(leaf.grad, each.grad.sum((0, 1)))
    torch.testing.assert_close(squares, each.grad.square().sum((0, 1)))
    torch.testing.assert_close(inputs.grad, slope * mask.repeat_interleave(columns))
