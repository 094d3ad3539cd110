"""Real vLLM serves a pruned MoE model as transformers does the dense one with zeros for what was removed, in fp32."""

import json
import re
import shutil
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from serving import UPDATES, VLLM, Serve, assert_same, assert_same_outputs, job
from tiny_experts import FAMILIES, SIZES, make_expert_checkpoint, ragged_layers
from tiny_models import NUM_NEW_TOKENS, PROMPTS, edit_config, edit_weights

from ddp_benchmarks.engine import Server
from ddp_plugins import moe_cpu_rows

pytestmark = pytest.mark.vllm
ROUTERS = "model_executor/layers/fused_moe/router"
HAS_CPU_ROUTER = VLLM is not None and (Path(str(VLLM.origin)).parent / ROUTERS / "cpu_router.py").exists()
served = pytest.mark.skipif(not HAS_CPU_ROUTER, reason="this vLLM runs no experts but its own on a CPU")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, Any]]]:
    """Each family's folder, and what transformers makes of the dense model with zeros."""
    root = tmp_path_factory.mktemp("experts")
    return {family: (root / family, make_expert_checkpoint(root / family, family)) for family in FAMILIES}


def widen(config: dict[str, Any]) -> None:
    config["ddp_layers"][0]["expert_intermediate_sizes"][4] = 18


# how else one model is served; on several ranks each has a part of every expert, or some of the experts
WAYS: dict[str, dict[str, Any]] = {
    "two tensor-parallel ranks": {"tensor_parallel_size": 2},
    "two expert-parallel ranks": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    # vLLM 0.32 on CPU makes the tensors between the stages in a warm-up that it skips in eager mode; mode 1 has it
    "two pipeline stages": {"pipeline_parallel_size": 2, "enforce_eager": False, "compilation_config": {"mode": 1}},
    "traced": {"enforce_eager": False, "compilation_config": {"backend": "eager"}},
}
UPDATED = ("qwen3_moe", "mixtral")  # which names its experts otherwise, and ties embedding and head
BFLOAT16 = "qwen3_moe in bfloat16"  # the CPU's own kernel, where it suits the processor
EXPERT = "model.layers.0.mlp.experts.4"
QUANTISED = {"quant_method": "compressed-tensors", "config_groups": {}, "format": "int-quantized", "ignore": []}
BROKEN: dict[str, tuple[Any, dict[str, Any], str]] = {  # how to break a checkpoint, options, what the user reads
    "other width": (
        lambda folder: edit_config(folder, widen),
        {},
        rf"tensor {EXPERT}.\w+.weight has shape \[.*17.*\], but ddp_layers requires 18 along axis",
    ),
    "other hidden size": (
        lambda folder: edit_weights(folder, lambda w: w.update({f"{EXPERT}.up_proj.weight": torch.ones(17, 63)})),
        {},
        r"experts.4.up_proj.weight has shape \[17, 63\], but config.json requires \[17, 64\]",
    ),
    "missing expert": (
        lambda folder: edit_weights(folder, lambda w: [w.pop(name) for name in [*w] if EXPERT in name]),
        {},
        rf"tensor {EXPERT}.gate_proj.weight is missing",
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
    "projection the table forgot": (
        lambda folder: None,
        {},
        r"AssertionError: model.layers.0.mlp.experts.1.up_proj is not in the family's table",
    ),
    "quantised": (
        lambda folder: edit_config(folder, lambda c: c.update(quantization_config=QUANTISED)),
        {},
        r"mixture of experts is quantized; .* supported in bfloat16, float16 and float32",
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
    for name in UPDATED:
        jobs[name]["updates"] = UPDATES
    jobs[BFLOAT16] = {**job(models["qwen3_moe"][0], dtype="bfloat16"), "updates": UPDATES}
    jobs |= {name: job(models["mixtral"][0], **options) for name, options in WAYS.items()}
    root = tmp_path_factory.mktemp("broken_experts")
    for name, (break_it, options, _) in BROKEN.items():
        folder = shutil.copytree(models["qwen3_moe"][0], root / name)
        break_it(folder)
        jobs[name] = job(folder, **options)
    jobs["traced"]["compiled"] = True
    jobs["projection the table forgot"]["forgotten"] = "mlp.experts.{}.up_proj"
    return dict(zip(jobs, serve(list(jobs.values())), strict=True))


@served
@pytest.mark.parametrize("family", FAMILIES)
def test_served_model_computes_what_transformers_computes(
    family: str, one_process: dict[str, Any], models: dict[str, Any]
) -> None:
    assert_same(one_process[family], models[family][1])


@served
@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("name", UPDATED)
def test_updated_weights_are_those_of_the_checkpoint(
    name: str, update: str, one_process: dict[str, Any], models: dict[str, Any]
) -> None:
    """Memory that vLLM allocates for them is poisoned with NaN; the masks among the pieces are left out."""
    assert_same_outputs(one_process[name]["updated"][update], models[name][1]["outputs"])


@served
def test_bfloat16_is_near_and_stays_the_same_when_updated(one_process: dict[str, Any], models: dict[str, Any]) -> None:
    result = one_process[BFLOAT16]
    for got, expected in zip(result["outputs"], models["qwen3_moe"][1]["outputs"], strict=True):
        assert got["tokens"][0] == expected["tokens"][0]
        assert got["logprobs"][0] == pytest.approx(expected["logprobs"][0], abs=0.05)
    for update in UPDATES:
        assert_same_outputs(result["updated"][update], result["outputs"])
    if moe_cpu_rows.kernel():
        padded = sum(-(-width // 16) * 16 for widths in ragged_layers("qwen3_moe") for width in widths or ())
        assert result["expert_bytes"] == [padded * 3 * SIZES["hidden_size"] * 2]


@served
@pytest.mark.parametrize("name", BROKEN)
def test_what_cannot_work_stops_the_start_and_names_the_place(name: str, one_process: dict[str, Any]) -> None:
    assert re.search(BROKEN[name][2], one_process[name]["error"]), one_process[name]


@served
@pytest.mark.parametrize("way", WAYS)
def test_other_ways_compute_the_same(way: str, one_process: dict[str, Any], models: dict[str, Any]) -> None:
    assert_same(one_process[way], models["mixtral"][1])


@served
@pytest.mark.parametrize("way", ["one rank", *WAYS])
def test_experts_are_loaded_as_kept_plus_their_alignment(
    way: str, one_process: dict[str, Any], models: dict[str, Any]
) -> None:
    """All ranks together hold no more than one does."""
    bytes_per_row = 3 * FAMILIES["mixtral"]["hidden_size"] * 4  # gate, up and down in fp32
    padding = sum(-width % 16 for widths in ragged_layers("mixtral") for width in widths or ()) * bytes_per_row
    result = one_process["mixtral" if way == "one rank" else way]
    assert sum(result["expert_bytes"]) == models["mixtral"][1]["expert_bytes"] + padding


@served
def test_over_http(models: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `--trust-remote-code`: the plugin brings the classes, and code in the folder stays unused."""
    folder, reference = models["olmoe"]
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    folder = Path(shutil.copytree(folder, tmp_path / "model"))
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    options = "--skip-tokenizer-init --dtype float32 --enforce-eager --max-model-len 192"
    memory = "--num-gpu-blocks-override 16 --gpu-memory-utilization 0.3"
    with Server(str(folder), arguments=[*options.split(), *memory.split()], log=tmp_path / "log.txt") as server:
        for prompt, expected in zip(PROMPTS, reference["outputs"], strict=True):
            body = {"model": str(folder), "prompt": prompt, "max_tokens": NUM_NEW_TOKENS, "temperature": 0}
            body |= {"ignore_eos": True, "detokenize": False, "return_token_ids": True}
            request = urllib.request.Request(
                f"{server.address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request) as response:
                assert json.load(response)["choices"][0]["token_ids"] == expected["tokens"]
    assert not (tmp_path / "ran").exists()


@pytest.mark.skipif(HAS_CPU_ROUTER, reason="for vLLM 0.27, see benchmarks/vllm_versions.py")
def test_an_older_vllm_on_a_cpu_is_refused(serve: Serve, tmp_path: Path) -> None:
    make_expert_checkpoint(tmp_path, "mixtral")
    (result,) = serve([job(tmp_path)])
    assert re.search(r"vLLM \S+ runs routed experts of one width only on a CPU; install", result["error"]), result
