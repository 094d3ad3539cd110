"""Fused norms, rotary embeddings and activations compute what eager mode computes, gates and gradients included."""

import sys
from pathlib import Path

import pytest
import torch
from runs import BLOCKS

from ddp_models.loading import load_model
from ddp_models.source import open_source
from ddp_prune.gates import GatedModel
from ddp_training.fusion import ROTARY, fuse_elementwise
from ddp_training.loss import final_hidden


@pytest.mark.filterwarnings("default")  # of torch's compiler
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.nightly)])
def test_fused_parts_compute_the_same(backend: str, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, results = open_source(str(tiny_model)), []
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for is_fused in (False, True):
        model = load_model(source, "float32")
        gated = GatedModel(model, source.family, source.sizes, "kv-group")
        if is_fused:
            modeling = sys.modules[type(model).__module__]
            monkeypatch.setattr(modeling, ROTARY, getattr(modeling, ROTARY))  # restored after the test
            layers = source.sizes.num_layers
            assert (
                fuse_elementwise(model, backend) == 3 * layers + 1 + 1
            )  # two norms and an MLP a layer, the last norm, RoPE
        leaves = {kind: torch.full(shape, 0.9).requires_grad_() for kind, shape in gated.shapes.items()}
        squares = {kind: torch.zeros(shape) for kind, shape in gated.shapes.items()}
        with gated.masks(leaves, squares):
            states = final_hidden(model, BLOCKS[:2])
            states.square().mean().backward()
        results.append((states.detach(), {kind: leaf.grad for kind, leaf in leaves.items()}, squares))
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs <= 8, "layers are compiled one by one"
    eager, fused = results
    torch.testing.assert_close(fused[0], eager[0], atol=1e-5, rtol=1e-4)
    for kind in eager[1]:
        torch.testing.assert_close(fused[1][kind], eager[1][kind], atol=1e-5, rtol=1e-3)
        torch.testing.assert_close(fused[2][kind], eager[2][kind], atol=1e-6, rtol=1e-2)
