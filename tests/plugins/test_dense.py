"""Real vLLM serves what plain transformers computes, for tiny random pruned models in fp32: every family, alone and
with adapters, ranks, drafts, cached prefixes and updated weights. One process runs all engines.
"""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from commands import cases
from serving import PROMPTS, UPDATES, Serve, assert_same, assert_same_outputs, job, selected
from tiny_models import NOTHING_LAST, PROJECTIONS, RAGGED_LAYERS, generate, load_model, make_adapter, make_checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

pytestmark = pytest.mark.vllm

SOME_WINDOWS = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 3}
GEMMA3_WINDOWS = ["sliding_attention" if index % 3 else "full_attention" for index in range(len(RAGGED_LAYERS))]
GEMMA2_SCALES = {"query_pre_attn_scalar": 32, "attn_logit_softcapping": None}
GRANITE_SCALES = {"attention_multiplier": 0.2, "embedding_multiplier": 3.0, "logits_scaling": 2.0}
AT_NIGHT = {  # the same code as another, or slow
    "mistral", "qwen3", "gemma3", "smollm3", "seed_oss", "compiled", "two ranks, fused", "fused in blocks", "ModelOpt"
}  # fmt: skip
ALSO_SERVED_OTHERWISE = {"short", "even"}  # by day only so, traced and with adapters
EVEN_LAYERS = [  # which split over two ranks without padding, as adapters require; of unequal widths all the same
    {"query_heads_per_kv_head": [3, 3, 3, 3], "intermediate_size": 64},
    {"query_heads_per_kv_head": [2, 2], "intermediate_size": 18},
    {"query_heads_per_kv_head": [], "intermediate_size": 50},
    {"query_heads_per_kv_head": [1, 1], "intermediate_size": 0},
]
CHECKPOINTS: dict[str, dict[str, Any]] = {
    # every ragged case at once; biases, so that padded rows and removed blocks could leak one
    "ragged": {"family": "Llama", "layers": RAGGED_LAYERS, "attention_bias": True, "mlp_bias": True},
    # one of each kind of layer: to compile more takes long
    "short": {"family": "Llama", "layers": [RAGGED_LAYERS[index] for index in (0, 1, 3, 6)]},
    # one tensor is embedding and head; KV heads = query heads (MHA)
    "tied": {"family": "Llama", "layers": NOTHING_LAST, "tie_word_embeddings": True, "num_key_value_heads": 12},
    # no KV cache anywhere
    "no attention": {"family": "Llama", "layers": [NOTHING_LAST[0], NOTHING_LAST[2]]},
    # a window shorter than the longest prompt, in all layers, and heads of another size than hidden / heads
    "mistral": {"family": "Mistral", "layers": RAGGED_LAYERS, "sliding_window": 64},
    # q, k and v have a bias and o has none; windows in some layers only, the removed ones among them
    "qwen2": {"family": "Qwen2", "layers": RAGGED_LAYERS, **SOME_WINDOWS},
    "qwen3": {"family": "Qwen3", "layers": RAGGED_LAYERS},  # a norm on each query and key head
    # norms before and after each block, a cap on the logits, alternating windows; no cap on attention scores, as
    # there vLLM's CPU kernel rounds: dense Gemma-2 is 4e-3 off transformers, and 2e-6 without the cap
    "gemma2": {"family": "Gemma2", "layers": RAGGED_LAYERS, "sliding_window": 64, **GEMMA2_SCALES},
    "gemma3": {"family": "Gemma3", "layers": RAGGED_LAYERS, "sliding_window": 64, "layer_types": GEMMA3_WINDOWS},
    # what a block adds is scaled, which a removed block must survive
    "granite": {"family": "Granite", "layers": RAGGED_LAYERS, "residual_multiplier": 0.5, **GRANITE_SCALES},
    "smollm3": {"family": "SmolLM3", "layers": RAGGED_LAYERS, "no_rope_layer_interval": 2},  # layers without positions
    "seed_oss": {"family": "SeedOss", "layers": RAGGED_LAYERS, "mlp_bias": True},  # no bias on o_proj
    "phi3": {"family": "Phi3", "layers": RAGGED_LAYERS},  # q, k, v in one tensor; gate and up in one
    "even": {"family": "Llama", "layers": EVEN_LAYERS},
}
WAYS: dict[str, tuple[str, dict[str, Any]]] = {  # how else a model is served, which must not change its answers
    "traced": (
        "short", {"enforce_eager": False, "compilation_config": {"mode": 2, "backend": "eager"}, "compiled": True}
    ),
    # by inductor, which takes longer than all else here
    "compiled": ("short", {"enforce_eager": False, "hf_overrides": {"ddp_pad_channels_to": 8}, "compiled": True}),
    # vLLM 0.32 on CPU makes the tensors between the stages in a warm-up that it skips in eager mode; mode 1 has it
    "two stages": ("ragged", {"pipeline_parallel_size": 2, "enforce_eager": False, "compilation_config": {"mode": 1}}),
    "two ranks": ("ragged", {"tensor_parallel_size": 2}),
    "two ranks, fused": ("phi3", {"tensor_parallel_size": 2}),
    # biases of the added channels too are zero, and removed blocks stay removed
    "in blocks": ("ragged", {"hf_overrides": {"ddp_pad_channels_to": 16}}),
    "fused in blocks": ("phi3", {"hf_overrides": {"ddp_pad_channels_to": 16}}),
}  # fmt: skip
SCALES = {  # of an FP8 KV cache, by their names on disk
    "llm-compressor": {"q_scale": 0.25, "k_scale": 0.5, "v_scale": 0.125},
    "ModelOpt": {"k_proj.k_scale": 0.5, "v_proj.v_scale": 0.125},
}
UPDATED = ("ragged", "tied", "phi3")  # uneven heads; one tensor twice; fused rows
ADAPTED = {"ragged": PROJECTIONS, "even": PROJECTIONS, "phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]}
NUM_LONGER = 25  # one token after the prompt, then 6 steps of 3 drafted tokens and one of the target's
REFUSED: dict[str, str] = {  # what cannot be served, and what the user reads before any worker starts
    "five ranks": (
        r"SettingError.*size 5 does not divide the 12 query heads .*; valid sizes: 1, 2, 3, 4, 6, 12; "
        "choose one of them"
    ),
    "adapters on two ranks": (
        r"SettingError.*size 2 does not split layer 1 .*; valid sizes: 1; .* LoRA adapters cannot be padded"
    ),
    "int4 of odd widths": (
        r"SettingError.*runs compressed-tensors weights of model.layers.1 \(4 query heads, 2 KV heads, "
        r"intermediate_size 17\): .*multiples of 32; prune again with --align"
    ),
    "no block": "ddp_pad_channels_to is 0",
    # vLLM alone would serve noise: q and v already count as the fused qkv_proj. More are in test_checkpoint.py
    "missing weight": r"tensor model.layers.4.self_attn.k_proj.weight is missing",
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dense")


@pytest.fixture(scope="module")
def models(request: pytest.FixtureRequest, root: Path) -> dict[str, tuple[Path, dict[str, Any]]]:
    """Each checkpoint's folder, and what transformers makes of it; those of the night only if they are selected."""
    return {
        name: (root / name, make_checkpoint(root / name, **settings))
        for name, settings in CHECKPOINTS.items()
        if name not in AT_NIGHT or name in selected(request, "name", __file__)
    }


@pytest.fixture(scope="module")
def adapted(models: Any, root: Path) -> dict[str, dict[str, Any]]:
    """What transformers and peft generate with each model's adapter, which is written too."""
    return {
        name: make_adapter(root / f"adapter {name}", load_model(models[name][0]), modules)
        for name, modules in ADAPTED.items()
    }


@pytest.fixture(scope="module")
def drafted(root: Path) -> dict[str, Any]:
    """What transformers generates with a dense model, whose seed lets the ragged model, its draft, agree at times."""
    config = LlamaConfig(**tiny_models.SIZES, num_hidden_layers=len(RAGGED_LAYERS))
    model = tiny_models.save_random(root / "dense", LlamaForCausalLM, config, seed=10)
    return {"outputs": [generate(model, prompt, NUM_LONGER) for prompt in PROMPTS]}


@pytest.fixture(scope="module")
def served(
    serve: Serve, models: dict[str, Any], adapted: Any, drafted: Any, root: Path, request: pytest.FixtureRequest
) -> dict[str, Any]:
    """Return what vLLM did with every checkpoint, the good and the broken."""
    folders = {name: folder for name, (folder, _) in models.items()}
    adapters = {name: root / f"adapter {name}" for name in adapted}
    jobs = {
        name: job(folder, updates=UPDATES * (name in UPDATED))
        for name, folder in folders.items()
        if name not in ALSO_SERVED_OTHERWISE or name in selected(request, "name", __file__)
    }
    jobs |= {
        way: job(folders[name], **options)
        for way, (name, options) in WAYS.items()
        if way not in AT_NIGHT or way in selected(request, "name", __file__)
    }
    jobs["dummy"] = job(folders["ragged"], load_format="dummy", updates=UPDATES[1:])
    for tool, names in SCALES.items():
        if tool in AT_NIGHT and tool not in selected(request, "tool", __file__):
            continue
        folder = shutil.copytree(folders["ragged"], root / tool)
        tiny_models.add_cache_scales(folder, names)
        jobs[tool] = job(folder, dtype="bfloat16", kv_cache_dtype="bfloat16", updates=UPDATES)
    make_checkpoint(root / "another", "Llama", [RAGGED_LAYERS[1], *RAGGED_LAYERS[1:]])
    make_adapter(root / "adapter another", load_model(root / "another"))
    jobs["adapted ragged"] = job(
        folders["ragged"], (adapters["ragged"], None, root / "adapter another", adapters["ragged"]),
        hf_overrides={"ddp_pad_channels_to": 16},  # to be set aside for adapters
        enable_prefix_caching=True, enable_chunked_prefill=True, max_num_batched_tokens=64, max_num_seqs=3,
        disable_log_stats=False,
    )  # fmt: skip
    jobs["adapted phi3"] = job(folders["phi3"], (adapters["phi3"],))
    jobs["adapted even"] = job(folders["even"], (adapters["even"],), tensor_parallel_size=2)
    draft = {"model": str(folders["ragged"]), "num_speculative_tokens": 3, "method": "draft_model"}
    jobs["drafted"] = job(root / "dense", num_tokens=NUM_LONGER, speculative_config=draft, disable_log_stats=False)
    jobs["five ranks"] = job(folders["ragged"], tensor_parallel_size=5)
    jobs["adapters on two ranks"] = job(folders["ragged"], (adapters["ragged"],), tensor_parallel_size=2)
    make_checkpoint(root / "int4", "Llama", RAGGED_LAYERS, hidden_size=96)
    tiny_models.state_quantization(root / "int4", tiny_models.GROUPS_OF_INT4)
    jobs["int4 of odd widths"] = job(root / "int4", dtype="bfloat16")
    jobs["no block"] = job(folders["ragged"], hf_overrides={"ddp_pad_channels_to": 0})
    broken = shutil.copytree(folders["ragged"], root / "missing weight")
    tiny_models.edit_weights(broken, lambda weights: weights.pop("model.layers.4.self_attn.k_proj.weight"))
    jobs["missing weight"] = job(broken)
    return serve(jobs)


@pytest.mark.parametrize("name", cases((*CHECKPOINTS, *WAYS), {*CHECKPOINTS, *WAYS} - AT_NIGHT - ALSO_SERVED_OTHERWISE))
def test_served_model_computes_what_transformers_computes(name: str, served: Any, models: Any) -> None:
    assert_same(served[name], models[WAYS.get(name, (name,))[0]][1])


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("name", UPDATED)
def test_updated_weights_are_those_of_the_checkpoint(name: str, update: str, served: Any, models: Any) -> None:
    """Memory that vLLM allocates for them is poisoned with NaN; the masks among the pieces are left out."""
    assert_same_outputs(served[name]["updated"][update], models[name][1]["outputs"])
    if name == "ragged" and update == "pieces":  # as trainers start vLLM, with --load-format dummy
        assert_same_outputs(served["dummy"]["updated"][update], models[name][1]["outputs"])


def test_channels_are_kept_as_they_are_or_in_whole_blocks(served: Any) -> None:
    kept = [layer["intermediate_size"] for layer in RAGGED_LAYERS if layer["intermediate_size"]]
    assert served["ragged"]["mlp_widths"] == served["adapted ragged"]["mlp_widths"] == kept == [17, 64, 1, 33]
    assert served["in blocks"]["mlp_widths"] == [32, 64, 16, 48]


def test_removed_attention_keeps_no_kv_cache(served: Any) -> None:
    kept = [index for index, layer in enumerate(RAGGED_LAYERS) if layer["query_heads_per_kv_head"]]
    assert served["ragged"]["attention_layers"] == [f"model.layers.{index}.self_attn.attn" for index in kept]


@pytest.mark.parametrize("tool", cases(SCALES, {*SCALES} - AT_NIGHT))
def test_calibrated_scales_of_the_kv_cache_reach_every_layer(tool: str, served: Any) -> None:
    """Layers of uneven groups too, and after an update, where vLLM finds the attention and its scales by name."""
    kept = [index for index, layer in enumerate(RAGGED_LAYERS) if layer["query_heads_per_kv_head"]]
    query = SCALES[tool].get("q_scale", 1.0)
    expected = {f"model.layers.{index}.self_attn.attn": [query, 0.5, 0.125] for index in kept}
    assert served[tool].get("cache_scales") == expected, served[tool]


def test_an_adapter_answers_as_in_peft_and_the_model_alone_as_before(served: Any, models: Any, adapted: Any) -> None:
    ragged = served["adapted ragged"]
    assert_same(ragged, models["ragged"][1])  # 140 tokens of a prompt in steps of at most 64
    first, alone, foreign, again = ragged["adapted"]
    assert_same(first, adapted["ragged"])
    assert_same(alone, models["ragged"][1])
    assert re.search(r"the adapter changes model.layers.0.mlp.\w+_proj, .* its block was pruned away", foreign["error"])
    assert_same(again, adapted["ragged"])  # the refused one left nothing behind
    # a block of 128 tokens is found again by the round without and by the second with the adapter, by no other
    assert ragged["counters"]["vllm:prefix_cache_hits"] == 2 * 128
    for name in ("phi3", "even"):
        assert_same(served[f"adapted {name}"]["adapted"][0], adapted[name])
        assert models[name][1]["outputs"][1]["tokens"] != adapted[name]["outputs"][1]["tokens"]


def test_drafts_of_a_pruned_model_leave_the_dense_models_greedy_tokens_as_they_are(served: Any, drafted: Any) -> None:
    assert_same(served["drafted"], drafted)
    counters = served["drafted"]["counters"]
    assert 0 < counters["vllm:spec_decode_num_accepted_tokens"] < counters["vllm:spec_decode_num_draft_tokens"]


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_refused_with_the_place_and_a_remedy(name: str, served: Any) -> None:
    assert re.search(REFUSED[name], served[name]["error"]), served[name]
