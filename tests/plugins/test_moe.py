"""Real vLLM serves a pruned MoE model as transformers does the dense one with zeros for what was removed, in fp32."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized import ROWS_OF_INT8, state_quantization
from serving import UPDATES, VLLM, Serve, assert_same, assert_same_outputs, job
from tiny_experts import FAMILIES, NUM_EXPERTS, SIZES, make_expert_checkpoint, ragged_layers
from tiny_models import PROMPTS, edit_config, edit_weights, load_model, make_adapter, score

from ddp_plugins import moe_cpu_rows
from ddp_plugins.moe_reference import round_to_fp8

pytestmark = pytest.mark.vllm
ROUTERS = "model_executor/layers/fused_moe/router"
HAS_CPU_ROUTER = VLLM is not None and (Path(str(VLLM.origin)).parent / ROUTERS / "cpu_router.py").exists()
served = pytest.mark.skipif(not HAS_CPU_ROUTER, reason="this vLLM runs no experts but its own on a CPU")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, Any]]]:
    """Each family's folder, and what transformers makes of the dense model with zeros."""
    root = tmp_path_factory.mktemp("experts")
    made = {family: (root / family, make_expert_checkpoint(root / family, family)) for family in FAMILIES}
    folder = made["olmoe"][0]  # with code of its own, which stays unused: the plugin brings the classes
    code = {"auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}}
    edit_config(folder, lambda config: config.update(code))
    (folder / "evil.py").write_text("import pathlib; pathlib.Path(__file__).with_name('ran').touch()\n")
    return made


# how else one model is served; on several ranks each has a part of every expert, or some of the experts
WAYS: dict[str, dict[str, Any]] = {
    "two tensor-parallel ranks": {"tensor_parallel_size": 2},
    "two expert-parallel ranks": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    # vLLM 0.32 on CPU makes the tensors between the stages in a warm-up that it skips in eager mode; mode 1 has it
    "two pipeline stages": {"pipeline_parallel_size": 2, "enforce_eager": False, "compilation_config": {"mode": 1}},
    "traced": {"enforce_eager": False, "compilation_config": {"mode": 2, "backend": "eager"}},
}
UPDATED = ("qwen3_moe", "mixtral")  # which names its experts otherwise, and ties embedding and head
FP8 = {  # vLLM's FP8 for linear layers rounds activations too; on CPUs without AMX it has no kernel per tensor
    "a scale per matrix": {
        "dtype": "float16",
        "quantization": "online",
        "quantization_config": {"moe": "fp8_per_tensor"},
    },
    "a scale per output": {
        "dtype": "float16",
        "quantization": "online",
        "quantization_config": {"moe": "fp8_per_channel"},
    },
    "linear layers too": {"dtype": "bfloat16", "quantization": "fp8_per_channel"},
}
BFLOAT16 = "qwen3_moe in bfloat16"  # the CPU's own kernel, where it suits the processor
# adapters of qwen2_moe, the modules that vLLM is told to adapt, and what the user reads if others are among them
ADAPTED = r".*(self_attn|shared_expert)\.\w+_proj"
ADAPTERS: dict[str, tuple[str, list[str], str]] = {
    "beside the experts": (ADAPTED, ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"], ""),
    "routed experts": (
        r".*\.\w+_proj",
        ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
        r"the adapter changes model.layers.\d.mlp.experts.\d.\w+_proj, to which no LoRA is applied here: .*expert",
    ),
    "a shared expert left out": (
        ADAPTED,
        ["qkv_proj", "o_proj"],
        r"changes model.layers.\d.mlp.shared_expert.\w+_proj",
    ),
}
EXPERT = "model.layers.0.mlp.experts.4"
BROKEN: dict[str, tuple[Any, dict[str, Any], str]] = {  # how to break a checkpoint, options, what the user reads
    "missing expert": (  # vLLM alone would serve noise here and in the next
        lambda folder: edit_weights(folder, lambda w: [w.pop(name) for name in [*w] if EXPERT in name]),
        {},
        rf"tensor {EXPERT}.gate_proj.weight is missing",
    ),
    "quantized to 8-bit integers": (
        lambda folder: None,
        {"quantization": "int8_per_channel_weight_only", "dtype": "bfloat16"},
        r"experts quantized as int8_per_channel_static: .* --quantization fp8_per_channel or fp8_per_tensor",
    ),
    "quantized before it is loaded": (
        lambda folder: state_quantization(folder, ROWS_OF_INT8),
        {"dtype": "bfloat16"},
        r"the mixture of experts is quantized; .* --quantization fp8_per_channel",
    ),
    "adapters": (
        lambda folder: None,
        {"enable_lora": True},
        r"LoRA adapters .* on routed experts .*--lora-target-modules",
    ),
}


@pytest.fixture(scope="session")
def adapters(models: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    """Each adapter's folder, and what transformers and peft generate with it."""
    root = tmp_path_factory.mktemp("adapters")
    return {
        name: (root / name, make_adapter(root / name, models["qwen2_moe"][0], modules))
        for name, (modules, _, _) in ADAPTERS.items()
    }


@pytest.fixture(scope="session")
def one_process(
    serve: Serve, models: dict[str, Any], adapters: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """Return what vLLM did with every checkpoint, the good and the broken, in one process."""
    jobs = {name: job(folder) for name, (folder, _) in models.items()}
    for name in UPDATED:
        jobs[name]["updates"] = UPDATES
    jobs[BFLOAT16] = {**job(models["qwen3_moe"][0], dtype="bfloat16"), "updates": UPDATES}
    for name, options in FP8.items():
        jobs[name] = {**job(models["qwen3_moe"][0], **options), "updates": UPDATES}
    jobs |= {name: job(models["mixtral"][0], **options) for name, options in WAYS.items()}
    for name, (_, targets, _) in ADAPTERS.items():
        options = {"enable_lora": True, "max_lora_rank": 8, "lora_target_modules": targets}
        jobs[name] = job(models["qwen2_moe"][0], **options) | {"adapters": [str(adapters[name][0])]}
    root = tmp_path_factory.mktemp("broken_experts")
    for name, (break_it, options, _) in BROKEN.items():
        folder = shutil.copytree(models["qwen3_moe"][0], root / name)
        break_it(folder)
        jobs[name] = job(folder, **options)
    jobs["traced"]["compiled"] = True
    return serve(jobs)


@served
@pytest.mark.parametrize("family", FAMILIES)
def test_served_model_computes_what_transformers_computes(family: str, one_process: Any, models: Any) -> None:
    assert_same(one_process[family], models[family][1])
    assert not (models[family][0] / "ran").exists()


@served
@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("name", UPDATED)
def test_updated_weights_are_those_of_the_checkpoint(name: str, update: str, one_process: Any, models: Any) -> None:
    """Memory that vLLM allocates for them is poisoned with NaN; the masks among the pieces are left out."""
    assert_same_outputs(one_process[name]["updated"][update], models[name][1]["outputs"])


@served
def test_bfloat16_is_near_and_stays_the_same_when_updated(one_process: Any, models: Any) -> None:
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
@pytest.mark.parametrize("name", FP8)
def test_fp8_experts_compute_what_their_rounded_weights_compute(name: str, one_process: Any, models: Any) -> None:
    """The same after an update. The folder stays unquantized."""
    result, folder = one_process[name], models["qwen3_moe"][0]
    assert "error" not in result, result
    for update in UPDATES:
        assert_same_outputs(result["updated"][update], result["outputs"])
    rows = sum(-(-width // 16) * 16 for widths in ragged_layers("qwen3_moe") for width in widths or ())
    scales = 2 * rows + 2 * NUM_EXPERTS * SIZES["hidden_size"]  # of two layers with experts
    assert result["expert_bytes"] == [rows * 3 * SIZES["hidden_size"] + 4 * scales]
    if name == "linear layers too":
        return
    model = load_model(folder)
    for module_name, module in model.named_modules():
        if ".experts." in module_name and isinstance(module, torch.nn.Linear):
            weight = module.weight.data.half()
            module.weight.data = round_to_fp8(weight, per_tensor=name == "a scale per matrix").float()
    for prompt, output in zip(PROMPTS, result["outputs"], strict=True):
        assert output["logprobs"] == pytest.approx(score(model, prompt, output["tokens"]), abs=0.05)


@served
@pytest.mark.parametrize("name", BROKEN)
def test_what_cannot_work_stops_the_start_and_names_the_place(name: str, one_process: Any) -> None:
    assert re.search(BROKEN[name][2], one_process[name]["error"]), one_process[name]


@served
@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_answers_as_in_peft_or_is_refused(name: str, one_process: Any, adapters: Any) -> None:
    (result,) = one_process[name]["adapted"]
    if reason := ADAPTERS[name][2]:
        assert re.search(reason, result["error"]), result
    else:
        assert_same_outputs(result["outputs"], adapters[name][1])


@served
@pytest.mark.parametrize("way", WAYS)
def test_other_ways_compute_the_same(way: str, one_process: Any, models: Any) -> None:
    assert_same(one_process[way], models["mixtral"][1])


@served
@pytest.mark.parametrize("way", ["one rank", *WAYS])
def test_experts_are_loaded_as_kept_plus_their_alignment(way: str, one_process: Any, models: Any) -> None:
    """All ranks together hold no more than one does."""
    bytes_per_row = 3 * FAMILIES["mixtral"]["hidden_size"] * 4  # gate, up and down in fp32
    padding = sum(-width % 16 for widths in ragged_layers("mixtral") for width in widths or ()) * bytes_per_row
    result = one_process["mixtral" if way == "one rank" else way]
    assert sum(result["expert_bytes"]) == models["mixtral"][1]["expert_bytes"] + padding
