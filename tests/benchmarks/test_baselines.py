"""One-shot scores, against their definitions written out; of routed experts on what a hook saw of the stock model."""

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, LlamaConfig, Phi3Config, Qwen2MoeConfig, Qwen2MoeForCausalLM

from baselines import ExpertUse, block_influence, magnitude, measure_experts, taylor_and_fisher
from ddp_prune.gates import GatedModel
from ddp_vllm.families import dimensions_of, family_of

LAYERS, EXPERTS, CHANNELS, IDLE = 2, 4, 6, 3
BLOCKS = torch.randint(1, 50, (3, 12), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def gated() -> GatedModel:
    """Expert 3 of the last layer is never chosen: its router row opposes what the others have in common."""
    torch.manual_seed(0)
    config = Qwen2MoeConfig(
        vocab_size=50, hidden_size=16, intermediate_size=8, moe_intermediate_size=CHANNELS, num_experts=EXPERTS,
        num_experts_per_tok=2, shared_expert_intermediate_size=8, num_hidden_layers=LAYERS, num_attention_heads=2,
        num_key_value_heads=2, initializer_range=0.3, pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = Qwen2MoeForCausalLM(config).eval()
    model.requires_grad_(False)
    gate = model.model.layers[1].mlp.gate.weight
    gate[:IDLE], gate[IDLE] = gate[:IDLE].abs(), 0.0
    model.model.layers[1].post_attention_layernorm.register_forward_hook(lambda _module, _args, output: output.abs())
    return GatedModel(model, family_of(config.to_dict()), dimensions_of(config.to_dict()), "auto")


@pytest.fixture(scope="module")
def use(gated: GatedModel) -> ExpertUse:
    return measure_experts(gated, BLOCKS.split(1))


def test_statistics_are_their_definitions(gated: GatedModel, use: ExpertUse) -> None:
    """From the input, routing and output gradient of each block of experts in the stock implementation."""
    model: Any = gated.model
    seen: list[list[Any]] = [[] for _ in range(LAYERS)]

    def note(row: int, args: Any, output: torch.Tensor) -> None:
        seen[row].append([*args, None])
        output.register_hook(lambda gradient, entry=seen[row][-1]: entry.__setitem__(-1, gradient))

    modules = [model.model.layers[row].mlp.experts for row in range(LAYERS)]
    hooks = [
        module.register_forward_hook(lambda _module, args, output, row=row: note(row, args, output))
        for row, module in enumerate(modules)
    ]
    model.set_experts_implementation("eager")
    for tokens in BLOCKS.split(1):
        embedded = model.get_input_embeddings()(tokens).requires_grad_()
        logits = model(inputs_embeds=embedded, use_cache=False).logits[0, :-1]
        F.cross_entropy(logits, tokens[0, 1:]).backward()
    model.set_experts_implementation("ddp")
    for hook in hooks:
        hook.remove()
    expected = {name: torch.zeros_like(value) for name, value in vars(use).items()}
    for row, module in enumerate(modules):
        expected["norms"][row] = module.down_proj.square().sum(1)
        for x_TH, ids_TK, weights_TK, gradient_TH in seen[row]:
            for token, slot in torch.cartesian_prod(torch.arange(len(x_TH)), torch.arange(2)).tolist():
                expert, weight = int(ids_TK[token, slot]), weights_TK[token, slot]
                gate, up = (module.gate_up_proj[expert] @ x_TH[token]).chunk(2)
                h, down = F.silu(gate) * up, module.down_proj[expert]
                expected["energy"][row, expert] += (weight * h).square()
                expected["peak"][row, expert] = torch.maximum(expected["peak"][row, expert], (weight * h).square())
                expected["squares"][row, expert] += h.square()
                expected["slopes"][row, expert] += (weight * gradient_TH[token] @ down).square()
                expected["counts"][row, expert] += 1
                expected["output"][row, expert] += weight * (down @ h).norm()
    assert expected["slopes"].any() and expected["counts"][1, IDLE] == 0
    for name, value in vars(use).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-9, msg=name)


def test_scores_follow_their_formulas(use: ExpertUse) -> None:
    layer, expert, channel = 0, int(use.counts[0].argmax()), 2
    entry = (layer, expert, channel)
    energy, peak, norm = use.energy[entry], use.peak[entry], use.norms[entry]
    torch.testing.assert_close(use.camera()[entry], norm * (0.1 * energy + 0.9 * peak))
    torch.testing.assert_close(use.channel_energy()[entry], norm * energy)
    count = use.counts[layer, expert]
    torch.testing.assert_close(use.heapr()[entry], use.squares[entry] / count * (use.slopes[entry] / count))
    assert not use.heapr()[1, IDLE].any() and use.heapr().isfinite().all()


def test_whole_experts_go_one_by_one(use: ExpertUse) -> None:
    score = use.whole_experts()
    for row in range(LAYERS):
        order = use.output[row].argsort()
        for worse, better in pairwise(order.tolist()):
            assert score[row, worse].max() < score[row, better].min()
    assert int(score[1].amax(-1).argmin()) == IDLE
    assert torch.equal(score.argsort(dim=-1), use.channel_energy().argsort(dim=-1, stable=True))


def test_measuring_leaves_the_model_as_it_was(gated: GatedModel) -> None:
    model: Any = gated.model
    before = model(BLOCKS).logits
    measure_experts(gated, BLOCKS[:1].split(1))
    assert torch.equal(model(BLOCKS).logits, before)
    assert not any(hasattr(layer.mlp.experts, "ddp_use") for layer in model.model.layers)


def test_one_shot_scores_are_those_of_the_gates(gated: GatedModel) -> None:
    """Taylor and Fisher by the gates' gradients; magnitude by hand for one channel."""
    scores = magnitude(gated)["experts"]
    experts: Any = gated.model.get_submodule("model.layers.1.mlp.experts")
    gate, up = experts.gate_up_proj[2].chunk(2)
    expected = gate[4].square().sum() + up[4].square().sum() + experts.down_proj[2, :, 4].square().sum()
    assert scores.shape == (LAYERS, EXPERTS, CHANNELS)
    torch.testing.assert_close(scores[1, 2, 4], expected)
    first, second = taylor_and_fisher(gated, BLOCKS.split(1))
    assert first["experts"].shape == second["experts"].shape == scores.shape
    assert not first["experts"][1, IDLE].any() and (second["experts"] >= 0).all() and second["experts"].any()


@pytest.mark.parametrize("family", [LlamaConfig, Phi3Config])  # Phi-3 has its queries, keys and values in one matrix
@pytest.mark.parametrize("head_unit", ["kv-group", "query-head"])
def test_magnitude_counts_all_that_goes_with_a_unit(family: type[Any], head_unit: str) -> None:
    """Group 1 of 2 has query heads 2 and 3 of size 4; as a unit of its own, head 3 has half of their KV head."""
    torch.manual_seed(0)
    config = family(
        vocab_size=50, hidden_size=16, intermediate_size=12, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    model.requires_grad_(False)
    gated = GatedModel(model, family_of(config.to_dict()), dimensions_of(config.to_dict()), head_unit)
    attention, mlp = model.model.layers[0].self_attn, model.model.layers[0].mlp
    if family is Phi3Config:
        query, key, value = attention.qkv_proj.weight.split([16, 8, 8])
        gate, up = mlp.gate_up_proj.weight.chunk(2)
    else:
        query, key, value = (getattr(attention, f"{name}_proj").weight for name in "qkv")
        gate, up = mlp.gate_proj.weight, mlp.up_proj.weight
    shared = key[4:8].square().sum() + value[4:8].square().sum()
    first = 8 if head_unit == "kv-group" else 12
    own = query[first:].square().sum() + attention.o_proj.weight[:, first:].square().sum()
    scores = magnitude(gated)
    torch.testing.assert_close(scores["attn"][0, -1], own + (shared if head_unit == "kv-group" else shared / 2))
    expected = gate[7].square().sum() + up[7].square().sum() + mlp.down_proj.weight[:, 7].square().sum()
    torch.testing.assert_close(scores["mlp"][0, 7], expected)


def test_influence_is_how_far_a_layer_turns_its_input(gated: GatedModel) -> None:
    """By the hidden states that the stock model returns; the same for all units of a layer."""
    model: Any = gated.model
    expected = torch.zeros(LAYERS)
    for tokens in BLOCKS.split(1):
        states = model.model(tokens, output_hidden_states=True, use_cache=False).hidden_states
        expected[0] += 1 - F.cosine_similarity(states[0], states[1], dim=-1).mean()
    scores = block_influence(gated, BLOCKS.split(1))["experts"]
    assert scores.shape == gated.shapes["experts"] and scores.unique().numel() == LAYERS
    torch.testing.assert_close(scores[0, 0, 0], expected[0])
