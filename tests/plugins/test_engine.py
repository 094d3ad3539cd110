"""What else vLLM does with a model, done with pruned ones: adapters, ranks, drafts, quantization, cached prefixes.

Tiny random models; each engine checks several facts, and one process runs them all.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized import GROUPS_OF_INT4, state_quantization
from serving import Serve, assert_same, assert_same_outputs
from tiny_models import NUM_NEW_TOKENS, PROMPTS, RAGGED_LAYERS, generate, make_adapter, make_checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

pytestmark = pytest.mark.vllm

FUSED = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
EVEN_LAYERS = [  # which split over two ranks without padding, as adapters ask; of unequal widths all the same
    {"query_heads_per_kv_head": [3, 3, 3, 3], "intermediate_size": 64},
    {"query_heads_per_kv_head": [2, 2], "intermediate_size": 18},
    {"query_heads_per_kv_head": [], "intermediate_size": 50},
    {"query_heads_per_kv_head": [1, 1], "intermediate_size": 0},
]
NUM_LONGER = 25  # one token after the prompt, then 6 steps of 3 drafted tokens and one of the target's
REFUSED = {  # what cannot be served, and what the user reads before any worker starts
    "five ranks": r"size 5 does not divide the 12 query heads .*; valid sizes: 1, 2, 3, 4, 6, 12; choose one of them",
    "adapters on two ranks": r"size 2 does not split layer 1 .*; valid sizes: 1; .* LoRA adapters cannot be padded",
    "int4 of odd widths": (
        r"runs compressed-tensors weights of model.layers.1 \(4 query heads, 2 KV heads, intermediate_size 17\): .*"
        r"multiples of 32; prune again with --align"
    ),
}
FOREIGN = {  # adapters that were trained on another model
    "another block": r"the adapter changes model.layers.0.mlp.\w+_proj, .* its block was pruned away",
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engine")


@pytest.fixture(scope="module")
def made(root: Path) -> dict[str, Any]:
    """Write the models and adapters; return what transformers makes of them, or the model itself."""
    sizes = {"num_hidden_layers": len(RAGGED_LAYERS), "vocab_size": 128, "hidden_size": 48, "intermediate_size": 64}
    heads = {"num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 32, "initializer_range": 0.15}
    torch.manual_seed(10)  # one at which it and the ragged model, its draft, agree now and then
    dense = LlamaForCausalLM(LlamaConfig(**sizes, **heads, max_position_embeddings=256)).eval()
    dense.save_pretrained(root / "dense")
    ragged = make_checkpoint(root / "ragged", "Llama", RAGGED_LAYERS)["outputs"]
    make_checkpoint(root / "phi3", "Phi3", RAGGED_LAYERS)
    make_checkpoint(root / "even", "Llama", EVEN_LAYERS)
    biased = make_checkpoint(root / "biased", "Llama", RAGGED_LAYERS, attention_bias=True, mlp_bias=True)
    make_checkpoint(root / "int4", "Llama", RAGGED_LAYERS, hidden_size=96)
    state_quantization(root / "int4", GROUPS_OF_INT4)  # to be refused before it is loaded
    make_checkpoint(root / "another block", "Llama", [RAGGED_LAYERS[1], *RAGGED_LAYERS[1:]])
    for name in FOREIGN:
        make_adapter(root / f"adapter {name}", root / name)
    return {
        "ragged": ragged,
        "biased": biased,
        "adapted": make_adapter(root / "adapter", root / "ragged"),
        "adapted even": make_adapter(root / "adapter even", root / "even"),
        "adapted phi3": make_adapter(root / "adapter phi3", root / "phi3", FUSED),
        "dense": [generate(dense, prompt, NUM_LONGER) for prompt in PROMPTS],
    }


@pytest.fixture(scope="module")
def served(root: Path, made: dict[str, Any], serve: Serve) -> dict[str, Any]:
    """What vLLM did with each, in one process."""

    def job(
        folder: str, adapters: tuple[str | None, ...] = (), num_tokens: int = NUM_NEW_TOKENS, **options: Any
    ) -> dict[str, Any]:
        lora = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1} if any(adapters) else {}
        paths = [adapter and str(root / adapter) for adapter in adapters]
        more = {"adapters": paths, "num_tokens": num_tokens}
        return {"folder": str(root / folder), "options": lora | options, **more}

    draft = {"model": str(root / "ragged"), "num_speculative_tokens": 3, "method": "draft_model"}
    wide = {"hf_overrides": {"ddp_pad_channels_to": 16}}  # to be set aside for adapters
    short_steps = wide | {"enable_prefix_caching": True, "enable_chunked_prefill": True, "max_num_batched_tokens": 64}
    foreign = tuple(f"adapter {name}" for name in FOREIGN)
    jobs = {
        "ragged": job(
            "ragged", ("adapter", None, *foreign, "adapter"), **short_steps, max_num_seqs=3, disable_log_stats=False
        ),
        "phi3": job("phi3", ("adapter phi3",)),
        "drafted": job("dense", num_tokens=NUM_LONGER, speculative_config=draft, disable_log_stats=False),
        "int4 of odd widths": job("int4", dtype="bfloat16"),
        "two ranks": job("biased", tensor_parallel_size=2),
        "adapter on two ranks": job("even", ("adapter even",), tensor_parallel_size=2),
        "five ranks": job("ragged", tensor_parallel_size=5),
        "adapters on two ranks": job("ragged", ("adapter",), tensor_parallel_size=2),
        "adapter of other modules": job("even", ("adapter even",), lora_target_modules=["qkv_proj", "o_proj"]),
    }
    return serve(jobs)


def test_an_adapter_answers_as_in_peft_and_the_model_alone_as_before(served: Any, made: Any) -> None:
    first, alone, *_, again = served["ragged"]["adapted"]
    assert_same_outputs(first["outputs"], made["adapted"])
    assert_same_outputs(alone["outputs"], made["ragged"])
    assert_same_outputs(again["outputs"], made["adapted"])  # the refused ones left nothing behind
    assert made["adapted"][1]["tokens"] != made["ragged"][1]["tokens"]
    assert served["ragged"]["mlp_widths"] == [17, 64, 1, 33]
    assert_same_outputs(served["phi3"]["adapted"][0]["outputs"], made["adapted phi3"])  # q, k, v in one tensor


def test_two_tensor_parallel_ranks(served: Any, made: Any) -> None:
    """Ragged widths with biases, padded; and even ones with an adapter."""
    assert_same(served["two ranks"], made["biased"])
    even = served["adapter on two ranks"]
    assert "error" not in even, even
    assert_same_outputs(even["adapted"][0]["outputs"], made["adapted even"])
    assert even["outputs"][1]["tokens"] != made["adapted even"][1]["tokens"]


def test_an_adapter_is_refused_that_changes_modules_without_lora(served: Any) -> None:
    """vLLM alone would answer as if the adapter had been trained on attention only."""
    (result,) = served["adapter of other modules"]["adapted"]
    message = r"the adapter changes model.layers.\d.mlp.\w+, to which no LoRA is applied here: --lora-target-modules"
    assert re.search(message, result["error"]), result


@pytest.mark.parametrize("name", FOREIGN)
def test_an_adapter_made_for_other_widths_is_refused(name: str, served: Any) -> None:
    result = served["ragged"]["adapted"][2 + list(FOREIGN).index(name)]
    assert re.search(FOREIGN[name], result["error"]), result


def test_chunked_prefill_and_cached_prefixes_change_nothing(served: Any, made: Any) -> None:
    assert_same_outputs(served["ragged"]["outputs"], made["ragged"])  # 140 tokens of a prompt in steps of at most 64
    # a block of 128 tokens is found again by the round without and by the second with the adapter, by no other
    assert served["ragged"]["counters"]["vllm:prefix_cache_hits"] == 2 * 128


def test_drafts_of_a_pruned_model_leave_the_dense_models_greedy_tokens_as_they_are(served: Any, made: Any) -> None:
    assert_same_outputs(served["drafted"]["outputs"], made["dense"])
    counters = served["drafted"]["counters"]
    assert 0 < counters["vllm:spec_decode_num_accepted_tokens"] < counters["vllm:spec_decode_num_draft_tokens"]


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_refused_with_the_place_and_a_remedy(name: str, served: Any) -> None:
    assert "SettingError" in served[name]["error"] and re.search(REFUSED[name], served[name]["error"]), served[name]
