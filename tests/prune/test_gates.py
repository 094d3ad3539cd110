"""Gates attached to a stock model."""

import gc
import weakref
from pathlib import Path

import pytest
import torch

from ddp_models.loading import load_model
from ddp_models.source import open_source
from ddp_prune.gates import GatedModel, _Scale


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_a_gated_model_is_freed_with_its_last_reference(kind: str, tiny_model: Path, tiny_experts: Path) -> None:
    """No hook makes a cycle, which would hold the weights until a collection, maybe after the next model is loaded."""
    source = open_source(str(tiny_model if kind == "dense" else tiny_experts))
    model = load_model(source, "float32")
    gated = GatedModel(model, source.family, source.sizes, "auto" if kind == "experts" else "query-head")
    with gated.masks({name: torch.ones(shape) for name, shape in gated.shapes.items()}):
        model(torch.ones(1, 4, dtype=torch.int64))
    freed = [weakref.ref(parameter) for parameter in model.parameters()]
    gc.collect()
    gc.disable()
    try:
        del gated, model
        assert [reference() for reference in freed if reference() is not None] == []
    finally:
        gc.enable()


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
