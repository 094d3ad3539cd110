"""What `benchmarks/upcycle.py` promises, on a tiny random Llama."""

import dataclasses
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from upcycle import Plan, choose_channels, membership, overlap, split_mlp, upcycle

HIDDEN, CHANNELS, LAYERS = 32, 44, 2
PLAN = Plan(num_experts=4, expert_size=16, shared_size=20, num_chosen=2)  # of 24 channels an expert has 16
BLOCKS = torch.randint(1, 90, (8, 32), generator=torch.Generator().manual_seed(0))
UNSEEN = torch.randint(1, 90, (8, 32), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def parent() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=90, hidden_size=HIDDEN, intermediate_size=CHANNELS, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.2, rms_norm_eps=1e-5, tie_word_embeddings=True,
        max_position_embeddings=64, pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@torch.no_grad()
def _difference(parent: Any, plan: Plan) -> float:
    """Largest difference of logits on text that was not calibrated on."""
    return float((upcycle(parent, BLOCKS, plan)(UNSEEN).logits - parent(UNSEEN).logits).abs().max())


def test_where_experts_lose_no_channel_the_mixture_is_its_parent(parent: Any) -> None:
    """Whatever the router says: routing weights of a token add up to 1."""
    whole = dataclasses.replace(PLAN, expert_size=24)
    assert _difference(parent, whole) < 1e-4
    assert overlap(upcycle(parent, BLOCKS, whole)) == 1.0
    assert _difference(parent, PLAN) > 1e-2


@torch.no_grad()
def test_a_block_is_the_parents_mlp_with_channels_weighted_by_routing(parent: Any) -> None:
    x = torch.randn(50, HIDDEN, generator=torch.Generator().manual_seed(2))
    model, mlp = upcycle(parent, BLOCKS, PLAN), parent.model.layers[0].mlp
    inputs: list[torch.Tensor] = []
    hook = mlp.register_forward_pre_hook(lambda _module, args: inputs.append(args[0].flatten(0, -2)))
    parent(BLOCKS)
    hook.remove()
    split = split_mlp(mlp, inputs[0], PLAN)
    assert 0.5 <= overlap(model) < 1.0  # two choices of 16 among 24 have at least 8 in common
    weights, chosen = (x @ split.router.T).softmax(-1).topk(PLAN.num_chosen, dim=-1)
    weights = weights / weights.sum(1, keepdim=True)
    share = torch.zeros(50, CHANNELS)
    share[:, split.shared] = 1.0
    for token in range(50):
        for weight, expert in zip(weights[token], chosen[token], strict=True):
            share[token, split.experts[expert]] += weight
    assert share.max() <= 1 + 1e-6 and share.min() == 0  # no channel counts twice, some are lost
    expected = mlp.down_proj(mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x) * share)
    torch.testing.assert_close(model.model.layers[0].mlp(x[None])[0], expected, atol=1e-4, rtol=1e-4)


def test_the_same_seed_gives_the_same_model(parent: Any) -> None:
    first, second = (upcycle(parent, BLOCKS, PLAN).state_dict() for _ in range(2))
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    other = upcycle(parent, BLOCKS, dataclasses.replace(PLAN, seed=1)).state_dict()
    assert not all(torch.equal(value, other[name]) for name, value in first.items())


def test_experts_find_the_channels_that_work_together() -> None:
    """Two kinds of tokens, each with half of the channels: an expert of each kind, and tokens lose nothing."""
    kinds = torch.randint(0, 2, (200,), generator=torch.Generator().manual_seed(0))
    noise = torch.rand(200, 12, generator=torch.Generator().manual_seed(1))
    shares = (1.0 + noise) * (torch.arange(12)[None] // 6 == kinds[:, None])
    plan = Plan(num_experts=4, expert_size=6, num_chosen=1)
    chosen = choose_channels(shares / shares.sum(1, keepdim=True), plan)
    halves = {tuple(sorted(row)) for row in chosen.tolist()}
    assert halves == {tuple(range(6)), tuple(range(6, 12))}
    assert membership(chosen, 12).sum(1).tolist() == [6.0] * 4
