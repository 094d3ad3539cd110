"""What `benchmarks/lab/upcycle.py` promises, on a tiny random Llama."""

import dataclasses
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import upcycle
from upcycle import Plan, deal_channels, moved_on, split, to_qwen2_moe, train

pytestmark = pytest.mark.nightly

HIDDEN, CHANNELS, LAYERS = 32, 52, 2
PLAN = Plan(num_experts=4, num_chosen=2, shared_size=20, steps=60, learning_rate=3e-3)  # 8 channels an expert
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
def _difference(one: Any, other: Any) -> float:
    """Largest difference of logits on text that was not learned on."""
    return float((one(UNSEEN).logits - other(UNSEEN).logits).abs().max())


@torch.no_grad()
def _divergence(model: Any, parent: Any) -> float:
    """Mean KL(parent‖model) in nats a token, on the text that is learned on."""
    wanted, made = (one(BLOCKS).logits.log_softmax(-1).flatten(0, 1) for one in (parent, model))
    return float(torch.nn.functional.kl_div(made, wanted, log_target=True, reduction="batchmean"))


def test_a_mixture_of_one_expert_is_its_parent(parent: Any) -> None:
    whole = dataclasses.replace(PLAN, num_experts=1, num_chosen=1)
    assert _difference(to_qwen2_moe(split(parent, BLOCKS, whole), whole), parent) < 1e-4
    assert _difference(to_qwen2_moe(split(parent, BLOCKS, PLAN), PLAN), parent) > 1e-2


@torch.no_grad()
def test_a_block_is_the_parents_mlp_with_channels_weighted_by_routing(parent: Any) -> None:
    x = torch.randn(50, HIDDEN, generator=torch.Generator().manual_seed(2))
    model = split(parent, BLOCKS, PLAN)
    routed, mlp = model.model.layers[0].mlp, parent.model.layers[0].mlp
    order = (routed.mlp.gate_proj.weight[:, None] == mlp.gate_proj.weight[None]).all(-1).float().argmax(1)
    assert sorted(order.tolist()) == list(range(CHANNELS))  # every channel once
    best, chosen = (x @ routed.router.weight.T).softmax(-1).topk(2, dim=-1)
    share = torch.ones(50, CHANNELS)
    for token in range(50):
        for expert in range(4):
            weight = 2 * best[token][chosen[token] == expert].sum() / best[token].sum()  # 0 if not chosen
            share[token, order[20 + 8 * expert : 28 + 8 * expert]] = weight
    expected = mlp.down_proj(mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x) * share)
    torch.testing.assert_close(routed(x), expected, atol=1e-4, rtol=1e-4)
    block = to_qwen2_moe(model, PLAN).model.layers[0].mlp
    torch.testing.assert_close(block(x[None])[0], expected, atol=1e-4, rtol=1e-4)


def test_the_same_seed_gives_the_same_model(parent: Any) -> None:
    first, second = (split(parent, BLOCKS, PLAN).state_dict() for _ in range(2))
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    other = split(parent, BLOCKS, dataclasses.replace(PLAN, seed=1)).state_dict()
    assert not all(torch.equal(value, other[name]) for name, value in first.items())


def test_experts_get_the_channels_that_work_together() -> None:
    """Two kinds of tokens, each with half of the channels, dealt out at random: an expert of each kind."""
    kinds = torch.randint(0, 2, (200,), generator=torch.Generator().manual_seed(0))
    noise = torch.rand(200, 40, generator=torch.Generator().manual_seed(1))
    members = torch.randperm(40, generator=torch.Generator().manual_seed(2)).view(2, 20)
    shares = (1.0 + noise) * (torch.zeros(2, 40).scatter(1, members, 1.0)[kinds])
    dealt = deal_channels(shares / shares.sum(1, keepdim=True), Plan(num_experts=2, num_chosen=1))
    assert {tuple(sorted(row)) for row in dealt.tolist()} == {tuple(sorted(row)) for row in members.tolist()}


def test_channels_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="12 channels cannot be shared out evenly among 5 experts"):
        deal_channels(torch.ones(3, 12), Plan(num_experts=5, num_chosen=1))


def test_mlps_and_routers_learn_from_the_parent_and_nothing_else_changes(
    parent: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upcycle, "DISTILLATION", 100.0)  # random text teaches nothing itself
    model = split(parent, BLOCKS, PLAN)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    far = _divergence(model, parent)
    train(model, parent, BLOCKS, PLAN)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {name for name in before if ".mlp." in name}
    assert _divergence(model, parent) < 0.5 * far


def test_experts_moved_on_come_back(parent: Any) -> None:
    mixture = to_qwen2_moe(split(parent, BLOCKS, PLAN), PLAN)
    logits = mixture(UNSEEN).logits
    with moved_on(mixture):
        assert not torch.allclose(mixture(UNSEEN).logits, logits, atol=1e-2)
    assert torch.equal(mixture(UNSEEN).logits, logits)
