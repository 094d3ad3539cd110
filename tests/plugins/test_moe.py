"""Real vLLM serves a pruned MoE model as transformers does the dense one with zeros for what was removed, in fp32."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Serve
from tiny_experts import FAMILIES, SIZES, make_expert_checkpoint, ragged_layers
from tiny_models import edit_config, edit_weights

pytestmark = pytest.mark.vllm

LOGPROB_TOLERANCE = 1e-4
BYTES_PER_ROW = 3 * SIZES["hidden_size"] * 4  # gate, up and down in fp32


def job(folder: Path, **options: Any) -> dict[str, Any]:
    return {"folder": str(folder), "options": options}


def assert_same(result: dict[str, Any], reference: dict[str, Any]) -> None:
    assert "error" not in result, result
    for got, expected in zip(result["outputs"], reference["outputs"], strict=True):
        assert got["tokens"] == expected["tokens"]
        if got["logprobs"] is not None:
            assert got["logprobs"] == pytest.approx(expected["logprobs"], abs=LOGPROB_TOLERANCE)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, Any]]]:
    """Each family's folder, and what transformers makes of the dense model with zeros."""
    root = tmp_path_factory.mktemp("experts")
    return {family: (root / family, make_expert_checkpoint(root / family, family)) for family in FAMILIES}


def widen(config: dict[str, Any]) -> None:
    config["ddp_layers"][0]["expert_intermediate_sizes"][4] = 18


def remove_expert(config: dict[str, Any]) -> None:
    config["ddp_layers"][0]["expert_intermediate_sizes"][4] = 0


EXPERT = "model.layers.0.mlp.experts.4"
QUANTISED = {"quant_method": "compressed-tensors", "config_groups": {}, "format": "int-quantized", "ignore": []}
BROKEN: dict[str, tuple[Any, dict[str, Any], str]] = {  # how to break a checkpoint, options, what the user reads
    "other width": (
        lambda folder: edit_config(folder, widen),
        {},
        rf"tensor {EXPERT}.\w+.weight has shape \[.*17.*\], but ddp_layers asks for 18 along axis",
    ),
    "removed expert": (
        lambda folder: edit_config(folder, remove_expert),
        {},
        rf"tensor {EXPERT}.\w+.weight belongs to .* that ddp_layers says is gone",
    ),
    "other hidden size": (
        lambda folder: edit_weights(folder, lambda w: w.update({f"{EXPERT}.up_proj.weight": torch.ones(17, 63)})),
        {},
        r"expert 4 has a tensor of shape \[17, 63\], but it has 17 channels and the model hidden size 64",
    ),
    "missing expert": (
        lambda folder: edit_weights(folder, lambda w: [w.pop(name) for name in [*w] if EXPERT in name]),
        {},
        rf"tensor {EXPERT}.gate_proj.weight is missing",
    ),
    "missing part of an expert": (
        lambda folder: edit_weights(folder, lambda w: w.pop(f"{EXPERT}.up_proj.weight")),
        {},
        rf"tensor {EXPERT}.up_proj.weight is missing",
    ),
    "missing part of a fused weight": (  # vLLM alone would serve noise
        lambda folder: edit_weights(folder, lambda w: w.pop("model.layers.1.self_attn.k_proj.weight")),
        {},
        r"tensor model.layers.1.self_attn.k_proj.weight is missing",
    ),
    "missing router": (  # vLLM alone would serve noise here as well
        lambda folder: edit_weights(folder, lambda w: w.pop("model.layers.0.mlp.gate.weight")),
        {},
        r"tensor model.layers.0.mlp.gate.weight is missing",
    ),
    "no widths": (
        lambda folder: edit_config(folder, lambda c: c["ddp_layers"][0].pop("expert_intermediate_sizes")),
        {},
        r"ddp_layers\[0\].* expert_intermediate_sizes",
    ),
    "quantised": (
        lambda folder: edit_config(folder, lambda c: c.update(quantization_config=QUANTISED)),
        {},
        r"mixture of experts is quantised; .* supported in bfloat16, float16 and float32",
    ),
    "quantised while it is loaded": (
        lambda folder: None,
        {"quantization": "fp8", "dtype": "bfloat16"},
        r"quantization=.*: experts of different widths are served in bfloat16, float16 or float32 only",
    ),
    "adapters": (
        lambda folder: None,
        {"enable_lora": True},
        r"LoRA adapters on routed experts .*--lora-target-modules",
    ),
}


@pytest.fixture(scope="session")
def one_process(serve: Serve, models: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Serve every checkpoint, the good and the broken, one after the other; importing vLLM takes longest."""
    jobs = {name: job(folder) for name, (folder, _) in models.items()}
    root = tmp_path_factory.mktemp("broken_experts")
    for name, (break_it, options, _) in BROKEN.items():
        folder = shutil.copytree(models["qwen3_moe"][0], root / name)
        break_it(folder)
        jobs[name] = job(folder, **options)
    return dict(zip(jobs, serve(list(jobs.values())), strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_served_model_computes_what_transformers_computes(
    family: str, one_process: dict[str, Any], models: dict[str, Any]
) -> None:
    assert_same(one_process[family], models[family][1])


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_are_loaded_as_kept_plus_their_alignment(
    family: str, one_process: dict[str, Any], models: dict[str, Any]
) -> None:
    padding = sum(-width % 16 for widths in ragged_layers(family) for width in widths or ()) * BYTES_PER_ROW
    assert one_process[family]["expert_bytes"] == [models[family][1]["expert_bytes"] + padding]


@pytest.mark.parametrize("name", BROKEN)
def test_what_cannot_work_stops_the_start_and_names_the_place(name: str, one_process: dict[str, Any]) -> None:
    assert re.search(BROKEN[name][2], one_process[name]["error"]), one_process[name]


def test_compiled(serve: Serve, models: dict[str, Any]) -> None:
    folder, reference = models["qwen3_moe"]
    (result,) = serve([job(folder, enforce_eager=False)], TORCH_COMPILE_DISABLE="0")
    assert_same(result, reference)


@pytest.mark.parametrize("experts", ["split", "placed"])
def test_two_ranks(experts: str, serve: Serve, models: dict[str, Any]) -> None:
    """Tensor parallel: each rank has a part of every expert; expert parallel: half of the experts."""
    folder, reference = models["qwen2_moe"]
    options = {"tensor_parallel_size": 2, "enable_expert_parallel": experts == "placed"}
    (result,) = serve([job(folder, **options)], VLLM_ENABLE_V1_MULTIPROCESSING="1")
    assert_same(result, reference)
    rows = sum(-(-width // 16) * 16 for widths in ragged_layers("qwen2_moe") for width in widths or ())
    assert sum(result["expert_bytes"]) == rows * BYTES_PER_ROW


def test_two_pipeline_stages(serve: Serve, models: dict[str, Any]) -> None:
    folder, reference = models["deepseek_v2"]
    # traced, not eager: vLLM 0.32 on CPU makes the tensors between the stages in a warm-up that eager skips
    options = {"pipeline_parallel_size": 2, "enforce_eager": False, "compilation_config": {"backend": "eager"}}
    (result,) = serve(
        [{**job(folder, **options), "logprobs": None}], VLLM_ENABLE_V1_MULTIPROCESSING="1", TORCH_COMPILE_DISABLE="0"
    )
    assert_same(result, reference)
