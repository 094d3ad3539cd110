"""Prices compared with real models: their parameters, the operations that torch counts, the cache they fill."""

import math
from typing import Any

import pytest
import torch
from family_cases import CASES, SIZES
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, MistralConfig, MixtralConfig, Qwen2Config

from ddp_vllm.costs import attended, prices, whole_model
from ddp_vllm.families import dense_layers

CONTEXT = 9  # tokens attended to, the newest among them; longer than the windows of 6
MODELS = {
    **{name: CASES[name] for name in ("llama", "qwen2", "granite", "phi3", "gemma2", "gemma3_text")},
    "tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
}


def _model(name: str) -> tuple[Any, dict[str, Any], dict[str, list[int]]]:
    model = AutoModelForCausalLM.from_config(MODELS[name], attn_implementation="eager").eval()
    return model, MODELS[name].to_dict(), {key: list(value.shape) for key, value in model.named_parameters()}


def _totals(name: str, budget: str) -> float:
    _, config, shapes = _model(name)
    return whole_model(budget, config, dense_layers(config), shapes, CONTEXT)


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_those_of_the_model(name: str) -> None:
    assert _totals(name, "params") == _model(name)[0].num_parameters()


@pytest.mark.parametrize("name", ["llama", "tied", "qwen2", "granite", "phi3", "gemma2", "gemma3_text"])
def test_flops_and_kv_bytes_are_those_of_one_more_token(name: str) -> None:
    """Operations as torch counts them in matrix products; the cache in float32 is twice as large as at 16 bits."""
    model, config, _shapes = _model(name)
    cache = DynamicCache(config=None)  # keeps every token, as the prices of a KV cache assume
    tokens = torch.randint(1, 96, (1, CONTEXT))
    with torch.no_grad():
        model(tokens[:, :-1], past_key_values=cache)
        with FlopCounterMode(display=False) as counter:
            model(tokens[:, -1:], past_key_values=cache)
    unseen = 0.0  # eager attention masks what is outside a window, but multiplies it all the same
    for seen in attended(config, CONTEXT):
        unseen += 4.0 * config["num_attention_heads"] * model.model.layers[0].self_attn.head_dim * (CONTEXT - seen)
    positions = 2 * model.model.rotary_emb.inv_freq.numel() if hasattr(model.model.rotary_emb, "inv_freq") else 0
    counted = counter.get_total_flops() - unseen
    assert _totals(name, "flops") == pytest.approx(counted, abs=max(200, 8 * positions))
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers) / CONTEXT
    assert 2 * _totals(name, "kv-bytes") == held


def test_sliding_windows_limit_the_attended_tokens() -> None:
    assert attended(CASES["gemma2"].to_dict(), 9) == [6, 9, 6, 9]
    plain = {key: value for key, value in CASES["gemma2"].to_dict().items() if key != "layer_types"}
    assert attended(plain, 9) == [6, 9, 6, 9]  # as the class has it, when the file does not say
    assert attended(plain | {"model_type": "ddp_gemma2", "ddp_layers": None}, 4) == [4, 4, 4, 4]
    assert attended(MistralConfig(**SIZES, sliding_window=6).to_dict(), 9) == [6] * 4
    assert attended(Qwen2Config(**SIZES, sliding_window=6).to_dict(), 9) == [9] * 4


def test_a_token_costs_only_the_experts_it_is_routed_to() -> None:
    _, config, shapes = _model("mixtral")
    matrices = sum(math.prod(shape) for shape in shapes.values() if len(shape) > 1)
    experts, attention, embedding = 4 * 4 * 3 * 64 * 72, 4 * CONTEXT * 64 * 4, 96 * 64
    assert _totals("mixtral", "flops") == 2 * (matrices - embedding - experts / 2) + attention
    assert prices("flops", config, shapes, CONTEXT)[0].expert_channel == 6 * 64 / 2
