"""Fused norms, rotary embeddings and activations compute what eager mode computes, gates and gradients included."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from any_models import random_model
from runs import BLOCKS
from torch import nn
from transformers.activations import ClippedGELUActivation
from transformers.models.bitnet.modeling_bitnet import BitNetMLP
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4MLP
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1MLP
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nTextMLP
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextMLP
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.step3p7.modeling_step3p7 import Step3p7MLP

from ddp_prune.core.fusion import ROTARY, fuse_elementwise
from ddp_prune.core.gates import GatedModel
from ddp_prune.core.loss import final_hidden
from ddp_prune.models.loading import load_model
from ddp_prune.models.source import open_source


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


def config(**settings: Any) -> Any:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "mlp_bias": False, "hidden_act": "silu", "rms_norm_eps": 1e-6}
    return SimpleNamespace(**sizes | settings)


def clipped(*bounds: float) -> nn.Module:
    """Return MLPs whose activations are of one class, with other bounds."""
    mlps = [LlamaMLP(config()) for _ in bounds]
    for mlp, bound in zip(mlps, bounds, strict=True):
        mlp.act_fn = ClippedGELUActivation(-bound, bound)
    return nn.Sequential(*mlps)


MLPS: dict[str, tuple[Callable[[], nn.Module], int]] = {  # how to make it -> how many of its forwards are replaced
    "plain": (lambda: LlamaMLP(config()), 1),
    "activations of one class": (lambda: clipped(10.0, 1000.0), 2),
    "multipliers": (lambda: FalconH1MLP(config(mlp_multipliers=[0.5, 2.0])), 0),
    "multipliers of 1": (lambda: FalconH1MLP(config(mlp_multipliers=[1.0, 1.0])), 1),
    "a clamp before the activation": (lambda: DeepseekV4MLP(config(swiglu_limit=10.0)), 0),
    "the same in GLM-5": (lambda: Glm5NextTextMLP(config(swiglu_limit=1000.0)), 0),
    "a clamp behind the activation": (lambda: Step3p7MLP(config(swiglu_limits_shared=[16]), 0), 0),
    "no clamp": (lambda: Step3p7MLP(config(swiglu_limits_shared=[0]), 0), 1),
    "the largest of all channels": (
        lambda: Gemma3nTextMLP(
            config(intermediate_size=[64], activation_sparsity_pattern=[0.95], hidden_activation="silu")
        ),
        0,
    ),
    "a norm inside": (lambda: BitNetMLP(config()), 1),  # of the norm itself
}


@torch.no_grad()
@pytest.mark.parametrize("name", MLPS)
def test_an_mlp_is_replaced_only_by_what_it_computes(name: str) -> None:
    """Whatever its projections are called. The inputs reach every clamp."""
    torch.manual_seed(0)
    make, number = MLPS[name]
    mlp = make()
    x = torch.randn(32, 64) * torch.logspace(-2, 4, 32)[:, None]
    expected = mlp(x)
    assert fuse_elementwise(mlp, "eager") == number
    torch.testing.assert_close(mlp(x), expected, atol=0, rtol=1e-6)


def test_a_fused_model_with_multipliers(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model("falcon_h1")
    modeling = sys.modules[type(model).__module__]
    monkeypatch.setattr(modeling, ROTARY, getattr(modeling, ROTARY))
    tokens = torch.arange(5, 37)[None]
    with torch.no_grad():
        expected = model(tokens).logits
        assert fuse_elementwise(model, "eager") == 2 * 3 + 1 + 1  # the norms and the rotary embedding
        torch.testing.assert_close(model(tokens).logits, expected, atol=1e-6, rtol=0)
