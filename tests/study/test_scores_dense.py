"""Scores of heads and MLP channels, on a model of one layer whose answers are worked out unit by unit."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, LlamaConfig

from activation_scores import exempt_lowest, flap, lorap, slimllm, tyr, wanda_sp
from ddp_prune.core.gates import GatedModel
from ddp_vllm.families import dimensions_of, family_of
from gradient_scores import llm_pruner, of_gates
from scores import magnitude

BLOCKS = torch.randint(1, 50, (3, 12), generator=torch.Generator().manual_seed(1))
HEADS, SIZE, CHANNELS = 2, 8, 12  # KV groups of two query heads of 4


def make(family: type[Any], head_unit: str, num_layers: int = 1) -> GatedModel:
    torch.manual_seed(0)
    config = family(
        vocab_size=50, hidden_size=16, intermediate_size=CHANNELS, num_hidden_layers=num_layers, num_attention_heads=4,
        num_key_value_heads=HEADS, initializer_range=0.3, pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    model.requires_grad_(False)
    return GatedModel(model, family_of(config.to_dict()), dimensions_of(config.to_dict()), head_unit)


@pytest.fixture(scope="module")
def gated() -> GatedModel:
    return make(LlamaConfig, "kv-group")


class Seen:
    """Inputs of the projections of the one layer on all text, [tokens, inputs], and its weights."""

    def __init__(self, gated: GatedModel) -> None:
        layer: Any = gated.layers[0]
        self.attention, self.mlp, self.x = layer.self_attn, layer.mlp, dict[str, torch.Tensor]()
        modules = {"o": self.attention.o_proj, "up": self.mlp.up_proj, "down": self.mlp.down_proj}
        for name, module in modules.items():
            module.register_forward_pre_hook(
                lambda _m, args, name=name: self.x.__setitem__(name, args[0].flatten(0, 1))
            )
        model: Any = gated.model
        model(BLOCKS)


@pytest.fixture(scope="module")
def seen() -> Seen:
    return Seen(make(LlamaConfig, "kv-group"))


@pytest.mark.parametrize("head_unit", ["kv-group", "query-head"])
def test_magnitude_counts_all_that_goes_with_a_unit(head_unit: str) -> None:
    """Group 1 of 2 has query heads 2 and 3 of size 4; as a unit of its own, head 3 has half of their KV head."""
    gated = make(LlamaConfig, head_unit)
    layer: Any = gated.layers[0]
    attention, mlp = layer.self_attn, layer.mlp
    shared = attention.k_proj.weight[4:8].square().sum() + attention.v_proj.weight[4:8].square().sum()
    first = 8 if head_unit == "kv-group" else 12
    own = attention.q_proj.weight[first:].square().sum() + attention.o_proj.weight[:, first:].square().sum()
    scores = magnitude(gated, BLOCKS)
    torch.testing.assert_close(scores["attn"][0, -1], own + (shared if head_unit == "kv-group" else shared / 2))
    channel = (mlp.gate_proj.weight[7], mlp.up_proj.weight[7], mlp.down_proj.weight[:, 7])
    torch.testing.assert_close(scores["mlp"][0, 7], torch.cat(channel).square().sum())


def test_wanda_sp(gated: GatedModel, seen: Seen) -> None:
    def expected(x_TI: torch.Tensor, w_OI: torch.Tensor) -> torch.Tensor:
        return torch.stack([w_OI[:, i].abs().sum() * x_TI[:, i].square().mean().sqrt() for i in range(w_OI.shape[1])])

    scores = wanda_sp(gated, BLOCKS)
    torch.testing.assert_close(scores["mlp"][0], expected(seen.x["down"], seen.mlp.down_proj.weight))
    heads = expected(seen.x["o"], seen.attention.o_proj.weight)
    torch.testing.assert_close(scores["attn"][0], torch.stack([heads[:SIZE].sum(), heads[SIZE:].sum()]))


def test_flap(gated: GatedModel, seen: Seen) -> None:
    """A channel that is always the same fluctuates by nothing, however large it is."""

    def expected(x_TI: torch.Tensor, w_OI: torch.Tensor) -> torch.Tensor:
        value = x_TI.var(0, correction=0) * w_OI.square().sum(0)
        return (value - value.mean()) / value.std()

    scores = flap(gated, BLOCKS)
    torch.testing.assert_close(scores["mlp"][0], expected(seen.x["down"], seen.mlp.down_proj.weight))
    heads = expected(seen.x["o"], seen.attention.o_proj.weight)
    torch.testing.assert_close(scores["attn"][0], heads.view(HEADS, SIZE).sum(1), rtol=1e-4, atol=1e-5)


def weight_gradients(gated: GatedModel, name: str, blocks: torch.Tensor = BLOCKS) -> torch.Tensor:
    """Return the mean over blocks of a weight's gradient, by the stock loss."""
    model: Any = gated.model
    weight = model.get_submodule(f"model.layers.0.{name}").weight.requires_grad_()
    found = [
        torch.autograd.grad(F.cross_entropy(model(tokens).logits[0, :-1], tokens[0, 1:]), weight)[0]
        for tokens in blocks.split(1)
    ]
    weight.requires_grad_(False)
    return torch.stack(found).mean(0)


def test_llm_pruner(gated: GatedModel) -> None:
    """Channel 5 of the MLP and KV group 1, weight by weight."""
    scores = llm_pruner(gated, BLOCKS)

    def value(name: str) -> torch.Tensor:
        weight = gated.model.get_submodule(f"model.layers.0.{name}").weight
        return (weight * weight_gradients(gated, name)).abs()

    channel = value("mlp.gate_proj")[5].sum() + value("mlp.up_proj")[5].sum() + value("mlp.down_proj")[:, 5].sum()
    torch.testing.assert_close(scores["mlp"][0, 5], channel, rtol=1e-4, atol=1e-7)
    group = value("self_attn.q_proj")[SIZE:].sum() + value("self_attn.o_proj")[:, SIZE:].sum()
    group = group + value("self_attn.k_proj")[4:].sum() + value("self_attn.v_proj")[4:].sum()
    torch.testing.assert_close(scores["attn"][0, 1], group, rtol=1e-4, atol=1e-7)
    assert not any(p.requires_grad or p.grad is not None for p in gated.model.parameters())


def lorap_norms(seen: Seen) -> torch.Tensor:
    norm = seen.x["up"].square().mean(0).sqrt()
    return (seen.mlp.gate_proj.weight * norm).norm(dim=1) + (seen.mlp.up_proj.weight * norm).norm(dim=1)


def test_lorap(gated: GatedModel, seen: Seen) -> None:
    activation = seen.x["down"].square().mean(0).sqrt()
    scores = lorap(gated, BLOCKS)
    expected = lorap_norms(seen) + activation * seen.mlp.down_proj.weight.norm(dim=0)
    torch.testing.assert_close(scores["mlp"][0], expected)
    assert torch.equal(scores["attn"], wanda_sp(gated, BLOCKS)["attn"])
    kept = exempt_lowest(torch.arange(400.0).view(2, 200).flip(1))  # the lowest hundredth of a layer stays
    assert kept[:, -2:].isinf().all() and kept[:, :-2].isfinite().all()


def test_slimllm(gated: GatedModel, seen: Seen) -> None:
    """Correlations by torch's own, over tokens, of each output of attention; principal components by an SVD."""
    scores = slimllm(gated, BLOCKS)
    weight = seen.attention.o_proj.weight
    parts = [seen.x["o"][:, g * SIZE : (g + 1) * SIZE] @ weight[:, g * SIZE : (g + 1) * SIZE].T for g in range(HEADS)]
    whole = parts[0] + parts[1]
    for group in range(HEADS):
        rest = whole - parts[group]
        each = [torch.corrcoef(torch.stack([rest[:, o], whole[:, o]]))[0, 1].abs() for o in range(16)]
        torch.testing.assert_close(scores["attn"][0, group], -torch.stack(each).sum(), rtol=1e-4, atol=1e-4)
    down, h = seen.mlp.down_proj.weight, seen.x["down"]
    written = h @ down.T
    _, singular, right = torch.linalg.svd((written - written.mean(0)).double(), full_matrices=True)
    spread = F.pad(singular.square() / len(h), (0, 16 - len(singular)))
    weights = (spread / spread.mean()).sigmoid()
    last = h.square().mean(0).sqrt() * ((down.T.double() @ right.T) * weights).norm(dim=1).float()
    torch.testing.assert_close(scores["mlp"][0], lorap_norms(seen) + last, rtol=1e-4, atol=1e-4)


def test_tyr(gated: GatedModel, seen: Seen) -> None:
    """By the definition, a group at a time."""
    scores = tyr(gated, BLOCKS)
    for block, x, w_OI, size in (
        ("attn", seen.x["o"], seen.attention.o_proj.weight, SIZE),
        ("mlp", seen.x["down"], seen.mlp.down_proj.weight, 1),
    ):
        hessian, w_IO = (x.T @ x / len(x)).double(), w_OI.T.double()
        hessian = hessian + 0.01 * hessian.diagonal().mean() * torch.eye(len(hessian))
        inverse = hessian.inverse()
        for unit in range(len(hessian) // size):
            g = slice(unit * size, (unit + 1) * size)
            expected = (w_IO[g] * (0.5 * inverse[g, g].inverse() @ w_IO[g] + (hessian @ w_IO)[g])).sum()
            torch.testing.assert_close(scores[block][0, unit].double(), expected, rtol=1e-4, atol=1e-5)


def test_gradients_of_gates(gated: GatedModel) -> None:
    """By the stock model with channel 3 scaled by hand: a difference quotient; squares are those of single tokens."""
    first, second = of_gates(gated, BLOCKS)
    down: Any = gated.model.get_submodule("model.layers.0.mlp.down_proj")

    def loss(scale: float) -> torch.Tensor:
        handle = down.register_forward_pre_hook(
            lambda _m, args: args[0] * torch.ones(CHANNELS).index_fill(0, torch.tensor(3), scale)
        )
        model: Any = gated.model
        found = [F.cross_entropy(model(t).logits[0, :-1].double(), t[0, 1:]) for t in BLOCKS.split(1)]
        handle.remove()
        return torch.stack(found).sum()

    slope = (loss(1.01) - loss(0.99)) / 0.02
    torch.testing.assert_close(first["mlp"][0, 3].double(), slope.abs(), rtol=2e-2, atol=1e-4)
    assert (second["mlp"] * len(BLOCKS) * BLOCKS.shape[1] >= first["mlp"].square() - 1e-6).all()  # Cauchy-Schwarz
