"""Gates attached to a stock model."""

import pytest
import torch

from ddp_prune.gates import _Scale


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
