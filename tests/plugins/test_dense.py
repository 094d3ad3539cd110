"""Real vLLM serves what plain transformers computes, for tiny random pruned models in fp32."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from quantized import add_cache_scales
from serving import UPDATES, Serve, assert_same, assert_same_outputs, job
from tiny_models import NOTHING_LAST, RAGGED_LAYERS, edit_weights, make_checkpoint

pytestmark = pytest.mark.vllm

SOME_WINDOWS = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 3}
GEMMA3_WINDOWS = ["sliding_attention" if index % 3 else "full_attention" for index in range(len(RAGGED_LAYERS))]
GEMMA2_SCALES = {"query_pre_attn_scalar": 32, "attn_logit_softcapping": None}
GRANITE_SCALES = {"attention_multiplier": 0.2, "embedding_multiplier": 3.0, "logits_scaling": 2.0}
AT_NIGHT = ("mistral", "qwen3", "gemma3", "smollm3", "seed_oss")  # the same code as another family
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
}


@pytest.fixture(scope="session")
def models(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, dict[str, Any]]]:
    """Each checkpoint's folder, and what transformers makes of it; those of the night only if they are selected."""
    cases = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    chosen = {case["name"] for case in cases if isinstance(case.get("name"), str)}
    root = tmp_path_factory.mktemp("models")
    return {
        name: (root / name, make_checkpoint(root / name, **settings))
        for name, settings in CHECKPOINTS.items()
        if name not in AT_NIGHT or name in chosen
    }


WAYS: dict[str, tuple[str, dict[str, Any]]] = {  # how else a model is served, which must not change its answers
    "traced": ("short", {"enforce_eager": False, "compilation_config": {"mode": 2, "backend": "eager"}}),
    # vLLM 0.32 on CPU makes the tensors between the stages in a warm-up that it skips in eager mode; mode 1 has it
    "two pipeline stages": (
        "ragged",
        {"pipeline_parallel_size": 2, "enforce_eager": False, "compilation_config": {"mode": 1}},
    ),
}
SCALES = {  # of an FP8 KV cache, by their names on disk
    "llm-compressor": {"q_scale": 0.25, "k_scale": 0.5, "v_scale": 0.125},
    "ModelOpt": {"k_proj.k_scale": 0.5, "v_proj.v_scale": 0.125},
}
UPDATED = ("ragged", "tied", "phi3")  # uneven heads; one tensor twice; fused rows


@pytest.fixture(scope="session")
def served(serve: Serve, models: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what vLLM did with every checkpoint, the good and the broken, in one process."""
    jobs = {name: job(folder) for name, (folder, _) in models.items()}
    for name in UPDATED:
        jobs[name]["updates"] = UPDATES
    jobs["in blocks"] = job(models["ragged"][0], hf_overrides={"ddp_pad_channels_to": 16})
    jobs["fused in blocks"] = job(models["phi3"][0], hf_overrides={"ddp_pad_channels_to": 16})
    jobs["dummy"] = job(models["ragged"][0], load_format="dummy") | {"updates": UPDATES[1:]}
    jobs["no block"] = job(models["ragged"][0], hf_overrides={"ddp_pad_channels_to": 0})
    jobs |= {way: job(models[name][0], **options) for way, (name, options) in WAYS.items()}
    for tool, names in SCALES.items():
        folder = shutil.copytree(models["ragged"][0], tmp_path_factory.mktemp("scales") / tool)
        add_cache_scales(folder, names)
        jobs[tool] = job(folder, dtype="bfloat16", kv_cache_dtype="bfloat16") | {"updates": UPDATES}
    broken = shutil.copytree(models["ragged"][0], tmp_path_factory.mktemp("broken") / "missing weight")
    edit_weights(broken, lambda weights: weights.pop("model.layers.4.self_attn.k_proj.weight"))
    jobs["missing weight"] = job(broken)
    jobs["traced"]["compiled"] = True
    return serve(jobs)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] * (name in AT_NIGHT)) for name in CHECKPOINTS]
)
def test_served_model_computes_what_transformers_computes(name: str, served: Any, models: Any) -> None:
    assert_same(served[name], models[name][1])


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("name", UPDATED)
def test_updated_weights_are_those_of_the_checkpoint(name: str, update: str, served: Any, models: Any) -> None:
    """Memory that vLLM allocates for them is poisoned with NaN; the masks among the pieces are left out."""
    assert_same_outputs(served[name]["updated"][update], models[name][1]["outputs"])
    if name == "ragged" and update == "pieces":  # as trainers start vLLM, with --load-format dummy
        assert_same_outputs(served["dummy"]["updated"][update], models[name][1]["outputs"])


def test_channels_in_whole_blocks_change_nothing(served: Any, models: Any) -> None:
    """Biases of the added channels too are zero, and removed blocks stay removed."""
    assert_same(served["in blocks"], models["ragged"][1])
    assert_same(served["fused in blocks"], models["phi3"][1])
    kept = [layer["intermediate_size"] for layer in RAGGED_LAYERS if layer["intermediate_size"]]
    assert served["ragged"]["mlp_widths"] == kept == [17, 64, 1, 33]
    assert served["in blocks"]["mlp_widths"] == [32, 64, 16, 48]
    assert "ddp_pad_channels_to is 0" in served["no block"]["error"]


def test_removed_attention_keeps_no_kv_cache(served: Any) -> None:
    kept = [index for index, layer in enumerate(RAGGED_LAYERS) if layer["query_heads_per_kv_head"]]
    assert served["ragged"]["attention_layers"] == [f"model.layers.{index}.self_attn.attn" for index in kept]


@pytest.mark.parametrize("tool", SCALES)
def test_calibrated_scales_of_the_kv_cache_reach_every_layer(tool: str, served: Any) -> None:
    """Layers of uneven groups too, and after an update, where vLLM finds the attention and its scales by name."""
    kept = [index for index, layer in enumerate(RAGGED_LAYERS) if layer["query_heads_per_kv_head"]]
    query = SCALES[tool].get("q_scale", 1.0)
    expected = {f"model.layers.{index}.self_attn.attn": [query, 0.5, 0.125] for index in kept}
    assert served[tool].get("cache_scales") == expected, served[tool]


def test_a_missing_weight_stops_the_start_and_is_named(served: Any) -> None:
    """vLLM alone would serve noise: q and v already count as the fused qkv_proj. More are in test_checkpoint.py."""
    message = r"tensor model.layers.4.self_attn.k_proj.weight is missing"
    assert re.search(message, served["missing weight"]["error"]), served["missing weight"]


@pytest.mark.parametrize("way", WAYS)
def test_other_ways_compute_the_same(way: str, served: Any, models: Any) -> None:
    assert_same(served[way], models[WAYS[way][0]][1])


@pytest.mark.nightly
def test_a_compiled_model_computes_the_same(serve: Serve, models: Any) -> None:
    """By inductor, which takes longer than all else here."""
    folder, expected = models["short"]
    compiled = job(folder, enforce_eager=False, hf_overrides={"ddp_pad_channels_to": 8}) | {"compiled": True}
    assert_same(serve({"compiled": compiled})["compiled"], expected)
