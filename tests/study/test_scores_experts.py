"""Scores of routed experts, against their definitions written out, on what a hook saw of the stock model."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

import expert_scores
from ddp_prune.core.gates import GatedModel
from ddp_vllm.families import dimensions_of, family_of
from expert_scores import ExpertUse, measure_experts, nearest_layer

LAYERS, EXPERTS, CHANNELS, IDLE = 2, 4, 6, 3
BLOCKS = torch.randint(1, 50, (3, 12), generator=torch.Generator().manual_seed(1))


def make(num_experts: int, head_unit: str = "auto", **changes: Any) -> GatedModel:
    torch.manual_seed(0)
    config = Qwen2MoeConfig(
        vocab_size=50, hidden_size=16, intermediate_size=8, moe_intermediate_size=CHANNELS, num_experts=num_experts,
        num_experts_per_tok=2, shared_expert_intermediate_size=8, num_hidden_layers=LAYERS, num_attention_heads=2,
        num_key_value_heads=2, initializer_range=0.3, pad_token_id=None, bos_token_id=None, eos_token_id=None,
        **changes,
    )  # fmt: skip
    model = Qwen2MoeForCausalLM(config).eval()
    model.requires_grad_(False)
    return GatedModel(model, family_of(config.to_dict()), dimensions_of(config.to_dict()), head_unit)


@pytest.fixture(scope="module")
def gated() -> GatedModel:
    """Expert 3 of the last layer is never chosen: its router row opposes what the others have in common."""
    gated = make(EXPERTS)
    layer: Any = gated.layers[1]
    gate = layer.mlp.gate.weight
    gate[:IDLE], gate[IDLE] = gate[:IDLE].abs(), 0.0
    layer.post_attention_layernorm.register_forward_hook(lambda _module, _args, output: output.abs())
    return gated


@pytest.fixture(scope="module")
def use(gated: GatedModel) -> ExpertUse:
    return measure_experts(gated, BLOCKS)


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
    torch.testing.assert_close(expert_scores.camera(use)[entry], norm * (0.1 * energy + 0.9 * peak))
    torch.testing.assert_close(expert_scores.energy(use)[entry], norm * energy)
    count = use.counts[layer, expert]
    torch.testing.assert_close(
        expert_scores.heapr(use)[entry], use.squares[entry] / count * (use.slopes[entry] / count)
    )
    chosen = use.counts > 0  # REAP is a mean over the tokens of an expert, however many they are
    torch.testing.assert_close(expert_scores.reap(use)[chosen], (use.output / use.counts)[chosen])
    assert torch.equal(expert_scores.frequency(use), use.counts)
    assert not expert_scores.heapr(use)[1, IDLE].any() and expert_scores.heapr(use).isfinite().all()


@pytest.mark.parametrize("score_of", [expert_scores.frequency, expert_scores.reap, expert_scores.sum_of_outputs])
def test_whole_experts_go_one_by_one(score_of: Callable[[ExpertUse], torch.Tensor], use: ExpertUse) -> None:
    score = expert_scores.one_by_one(use, score_of(use))
    for row in range(LAYERS):
        order = score_of(use)[row].argsort()
        for worse, better in pairwise(order.tolist()):
            assert score[row, worse].max() < score[row, better].min()
    assert int(score[1].amax(-1).argmin()) == IDLE
    assert torch.equal(score.argsort(dim=-1), expert_scores.energy(use).argsort(dim=-1, stable=True))


def _nearest_by_trial(gated: GatedModel, row: int, num_experts: int, removed: int) -> list[int]:
    """Remove experts of one layer, always the one without which the layer, as the study evaluates it, is nearest."""
    block, inputs = gated.layers[gated.sizes.routed_layers[row]].get_submodule("mlp"), list[torch.Tensor]()
    hook = block.register_forward_pre_hook(lambda _module, args: inputs.append(args[0]))
    gated.model(BLOCKS)
    hook.remove()
    dense, gone = block(*inputs), list[int]()

    def distance(expert: int) -> float:
        gates = torch.ones(gated.shapes["experts"])
        gates[row, [*gone, expert]] = 0.0
        with gated.masks({"experts": gates}):
            return float((block(*inputs) - dense).square().sum())

    for _ in range(removed):
        gone.append(min((each for each in range(num_experts) if each not in gone), key=distance))
    return gone


@pytest.mark.parametrize("norm_topk_prob", [True, False])
def test_naee_scores_a_layer_as_it_is_evaluated(norm_topk_prob: bool) -> None:
    """With whole experts tokens are routed anew, which changes the order of removal; without them they are not."""
    orders = {}
    for head_unit in ("auto", "expert"):
        gated = make(num_experts=6, head_unit=head_unit, norm_topk_prob=norm_topk_prob)
        places = nearest_layer(gated, BLOCKS)
        orders[head_unit] = [row.argsort().tolist()[:4] for row in places]
        assert orders[head_unit] == [_nearest_by_trial(gated, row, 6, 4) for row in range(LAYERS)]
        assert places.sort(dim=1).values.tolist() == [[0, 1, 2, 3, 4, 5]] * LAYERS
    assert orders["auto"] != orders["expert"]
