"""vLLM's own classes serve narrower MLPs and experts of any family as transformers computes the dense model with zeros.

The reference of a family that vLLM 0.32 computes otherwise on a CPU, dense as well, is vLLM on the model with zeros.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from any_families import OPTIONS, WITHOUT_TRANSFORMERS, WRAPPERS, load
from any_models import ALONE, MODELS
from safetensors.torch import load_file
from serving import UPDATES, Serve, assert_same, assert_same_outputs, job
from tiny_models import PROMPTS, edit_config, edit_weights, generate

from ddp_vllm.checkpoint import read_config
from ddp_vllm.families import code_of, pruned_config, register_pruned
from ddp_vllm.remote_code.configuration_ddp_widths import register_widths
from ddp_vllm.remote_code.files import WidthsError
from ddp_vllm.remote_code.widths import Widths

pytestmark = pytest.mark.slow

# fused on disk; the Transformers backend; no gate; experts; a forward that uses the dense width
FAST = ("glm4", "olmo2", "starcoder2", "glm4_moe", "falcon_h1")
TEXT_ONLY = {"limit_mm_per_prompt": {"image": 0, "video": 0}}
BFLOAT16_TOLERANCE = 0.05


def nightly(name: str, is_long: bool) -> Any:
    return pytest.param(name, marks=pytest.mark.nightly if is_long else [])


def cases(families: Any = MODELS) -> list[Any]:
    return [nightly(name, name not in FAST) for name in families]


def options(family: str) -> dict[str, Any]:
    return (TEXT_ONLY if family in WRAPPERS else {}) | WITHOUT_TRANSFORMERS.get(family, {}) | OPTIONS.get(family, {})


@pytest.mark.parametrize("family", cases())
def test_transformers_computes_the_same(family: str, made: Callable[[str], Path], answers: Any) -> None:
    register_pruned(read_config(made(family) / "narrow"))
    assert_same(answers(family, "narrow"), answers(family, "zeroed"))


TRAINED = """
half = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.bfloat16)
exact = half._keep_in_fp32_modules_strict or ()  # newer versions keep the router so
other = {name for name, parameter in half.named_parameters() if parameter.dtype != torch.bfloat16}
assert all(any(kept in name for kept in exact) for name in other)
model.train()(tokens, labels=tokens).loss.backward()
assert all(parameter.grad is not None for name, parameter in model.named_parameters() if ".experts." in name)
"""


def test_transformers_without_our_package(made: Callable[[str], Path], tmp_path: Path) -> None:
    """The stock class loads by the code in the folder, is saved with its widths, and can be trained."""
    family = "glm4_moe"
    folder = shutil.copytree(made(family) / "narrow", tmp_path / "folder")
    config = read_config(folder)
    for file in code_of(config):
        shutil.copy(file, folder)
    (folder / "config.json").write_text(json.dumps(pruned_config(config, Widths.of(config))))
    command = [sys.executable, "-c", ALONE + TRAINED, folder, tmp_path / "saved"]
    environment = {"HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = torch.load(tmp_path / "saved" / "logits.pt")
    assert result["class"].startswith("transformers.models.")
    with torch.no_grad():
        expected = load(made(family) / "zeroed")(torch.arange(5, 37)[None]).logits
    torch.testing.assert_close(result["logits"], expected, atol=1e-5, rtol=0)
    stated, saved = (json.loads((place / "config.json").read_text()) for place in (folder, tmp_path / "saved"))
    assert saved["quantization_config"] == stated["quantization_config"] and "auto_map" not in saved
    before, after = (load_file(place / "model.safetensors") for place in (folder, tmp_path / "saved"))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("name", ["widths of another checkpoint", "a missing tensor", "quantized weights"])
def test_transformers_refuses_what_vllm_refuses(name: str, made: Callable[[str], Path], tmp_path: Path) -> None:
    register_widths()
    family, break_it, _, words = BROKEN[name]
    folder = shutil.copytree(made(family) / "narrow", tmp_path / "folder")
    break_it(folder)
    with pytest.raises(WidthsError, match=words):
        load(folder)


WAYS: dict[str, tuple[str, dict[str, Any]]] = {  # how else a family is served
    "two ranks, with biases": ("starcoder2", {"tensor_parallel_size": 2}),
    # vLLM 0.32 on CPU makes the tensors between the stages in a warm-up that it skips in eager mode; mode 1 has it
    "two pipeline stages": (
        "glm4_moe",
        {"pipeline_parallel_size": 2, "enforce_eager": False, "compilation_config": {"mode": 1}},
    ),
    "traced": ("glm4_moe", {"enforce_eager": False, "compilation_config": {"mode": 2, "backend": "eager"}}),
    "channels in blocks of 16": ("glm4", {"hf_overrides": {"ddp_pad_channels_to": 16}}),
    "the Transformers backend": ("glm4_moe", {"model_impl": "transformers"}),
}
FAST_WAYS = ("two ranks, with biases", "traced", "channels in blocks of 16")
ADAPTED = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
ADAPTERS = {  # family -> modules of the adapter, modules that vLLM is told to adapt
    "gemma4_text": (["q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"], ADAPTED),
    "olmo2": (["q_proj", "gate_proj", "up_proj", "down_proj"], ["q_proj", "gate_proj", "up_proj", "down_proj"]),
}
LAYER = "model.layers.2.mlp"
BROKEN: dict[str, tuple[str, Any, dict[str, Any], str]] = {  # family, how to break it, options, what the user reads
    "widths of another checkpoint": (
        "glm4",
        lambda folder: edit_config(folder, lambda config: config["quantization_config"]["layers"][0].update(W65)),
        {},
        r"tensor model.layers.0.mlp.\w+.weight has shape .* require (65|130) along .*different checkpoints",
    ),
    "a missing tensor": (
        "glm4",
        lambda folder: edit_weights(folder, lambda weights: weights.pop(f"{LAYER}.down_proj.weight")),
        {},
        r"layer 2 lacks the tensors of mlp.down_proj \(1 modules in all\)",
    ),
    "a missing tensor of attention": (  # which vLLM looks for in unquantized models alone, if not told
        "glm4",
        lambda folder: edit_weights(folder, lambda weights: weights.pop("model.layers.1.self_attn.o_proj.weight")),
        {"model_loader_extra_config": {"enable_weights_track": True}},
        r"not initialized from checkpoint: \{'model.layers.1.self_attn.o_proj.weight'\}",
    ),
    "quantized weights": (
        "glm4",
        lambda folder: edit_weights(folder, quantize),
        {},
        rf"tensor {LAYER}.down_proj.weight is 'F8_E4M3': .*unquantized",
    ),
    "a format that no kernel multiplies": (
        "glm4_moe",
        lambda folder: None,
        {"quantization": "int8_per_channel_weight_only", "dtype": "bfloat16"},
        r"experts quantized as int8_per_channel_static: .* --quantization fp8_per_channel or fp8_per_tensor",
    ),
    "a format of checkpoints": (
        "glm4",
        lambda folder: None,
        {"quantization": "fp8"},
        r"--quantization fp8 requires a checkpoint in that format; .*fp8_per_channel",
    ),
    "adapters of experts": (
        "glm4_moe",
        lambda folder: None,
        {"enable_lora": True},
        r"LoRA adapters .* on routed experts .*--lora-target-modules",
    ),
}
W65 = {"intermediate_size": 65}


def add_further_layer(family: Path, folder: Path) -> Path:
    """Copy a narrow model and add a dense layer that predicts further tokens, as DeepSeek and GLM name it."""
    shutil.copytree(family / "narrow", folder)
    dense = load_file(family / "dense" / "model.safetensors")
    further = {name.replace("layers.2.", "layers.3."): dense[name] for name in dense if "layers.2." in name}
    edit_weights(folder, lambda weights: weights.update(further))
    edit_config(folder, lambda config: config.update(num_nextn_predict_layers=1))
    return folder


def quantize(weights: dict[str, torch.Tensor]) -> None:
    name = f"{LAYER}.down_proj.weight"
    weights[name] = weights[name].to(torch.float8_e4m3fn)


@pytest.fixture(scope="session")
def adapters(root: Path, made: Callable[[str], Path]) -> Callable[[str, str], tuple[Path, dict[str, Any]]]:
    """Return a function that gives the folder of an adapter, and what transformers and peft generate with it."""
    known: dict[tuple[str, str], tuple[Path, dict[str, Any]]] = {}

    def make(family: str, kind: str) -> tuple[Path, dict[str, Any]]:
        """kind: `narrow`, or `dense` for an adapter of the dense model."""
        from peft import LoraConfig, get_peft_model

        if (family, kind) not in known:
            register_widths()
            torch.manual_seed(1)
            config = LoraConfig(target_modules=ADAPTERS[family][0], r=4, lora_alpha=8, init_lora_weights=False)
            model, folder = get_peft_model(load(made(family) / kind), config).eval(), root / f"{kind} {family}"
            model.save_pretrained(folder)
            known[family, kind] = folder, {"outputs": [generate(model, prompt) for prompt in PROMPTS]}
        return known[family, kind]

    return make


@pytest.fixture(scope="session")
def other_ways(serve: Serve, made: Callable[[str], Path], adapters: Any, root: Path) -> Callable[[str], dict[str, Any]]:
    """Return a function that gives what vLLM did in another way than its defaults, or with a broken folder."""
    known: dict[str, dict[str, Any]] = {}

    def prepare(name: str) -> dict[str, Any]:
        family, _, way = name.partition(": ")
        if name in WAYS:
            family, more = WAYS[name]
            return job(made(family) / "narrow", **more) | ({"compiled": True} if name == "traced" else {})
        if name in BROKEN:
            family, break_it, more, _ = BROKEN[name]
            folder = shutil.copytree(made(family) / "narrow", root / "broken" / name)
            break_it(folder)
            return job(folder, **more)
        if way == "adapters":
            lora = {"enable_lora": True, "max_lora_rank": 8, "lora_target_modules": ADAPTERS[family][1]}
            folders = [str(adapters(family, kind)[0]) for kind in ("narrow", "dense")]
            return job(made(family) / "narrow", **lora) | {"adapters": folders}
        if way == "further":
            return job(add_further_layer(made(family), root / "further"))
        return job(made(family) / "narrow") | {"updates": UPDATES}

    def ask(name: str) -> dict[str, Any]:
        if name not in known:
            known[name] = serve({name: prepare(name)})[name]
        return known[name]

    return ask


@pytest.mark.vllm
@pytest.mark.parametrize("way", [nightly(way, way not in FAST_WAYS) for way in WAYS])
def test_other_ways_compute_the_same(way: str, other_ways: Any, answers: Any) -> None:
    assert_same(other_ways(way), answers(WAYS[way][0], "zeroed"))


@pytest.mark.vllm
def test_a_layer_that_predicts_further_tokens_stays_whole(other_ways: Any, answers: Any) -> None:
    assert_same(other_ways("glm4_moe: further"), answers("glm4_moe", "zeroed"))


@pytest.mark.vllm
@pytest.mark.parametrize("update", UPDATES)
def test_updated_weights_are_those_of_the_checkpoint(update: str, other_ways: Any, answers: Any) -> None:
    result = other_ways("glm4: updates")
    assert "error" not in result, result
    assert_same_outputs(result["updated"][update], answers("glm4", "zeroed")["outputs"])


@pytest.mark.vllm
@pytest.mark.parametrize("family", [nightly(family, family != "gemma4_text") for family in ADAPTERS])
def test_an_adapter_answers_as_in_peft(family: str, other_ways: Any, adapters: Any, answers: Any) -> None:
    result = other_ways(f"{family}: adapters")
    assert_same(result, answers(family, "zeroed"))
    assert_same(result["adapted"][0], adapters(family, "narrow")[1])


@pytest.mark.vllm
def test_an_adapter_of_other_widths_is_refused(other_ways: Any) -> None:
    words = r"model.layers.0.mlp.down_proj is for 96 inputs and 64 outputs, and this layer requires 33 and 64; .*train"
    assert re.search(words, other_ways("gemma4_text: adapters")["adapted"][1]["error"])


@pytest.mark.vllm
@pytest.mark.parametrize("name", BROKEN)
def test_what_cannot_work_stops_the_start_and_names_the_place(name: str, other_ways: Any) -> None:
    assert re.search(BROKEN[name][3], other_ways(name)["error"]), other_ways(name)


@pytest.fixture(scope="session")
def served(request: pytest.FixtureRequest, serve: Serve, made: Callable[[str], Path]) -> dict[str, Any]:
    """Return what vLLM did with the folders of all selected families, in one process."""
    selected = {item.callspec.params.get("family") for item in request.session.items if hasattr(item, "callspec")}
    jobs = {}
    for family in filter(selected.__contains__, MODELS):
        if family in WRAPPERS and find_spec("torchvision") is None:
            continue
        reference = "zeroed" if family in WITHOUT_TRANSFORMERS else "dense"
        # vLLM's own kernel takes no experts of 48 inputs
        for kind in ("narrow",) if family in (*FAST, "mixtral") else ("narrow", reference):
            jobs[f"{family} {kind}"] = job(made(family) / kind, **options(family))
    return serve(jobs)


@pytest.mark.vllm
@pytest.mark.parametrize("family", cases())
def test_vllm_computes_the_same(family: str, served: Any, answers: Any) -> None:
    if f"{family} narrow" not in served:
        pytest.skip("vLLM requires torchvision for this family")
    result, reference = served[f"{family} narrow"], answers(family, "zeroed")
    if family in WITHOUT_TRANSFORMERS:
        assert "error" not in result, result
        reference = served[f"{family} zeroed"]
        tolerance = BFLOAT16_TOLERANCE if "dtype" in options(family) else 1e-5
        for got, zeroed in zip(result["outputs"], reference["outputs"], strict=True):
            assert got["tokens"][0] == zeroed["tokens"][0]
            assert got["logprobs"][0] == pytest.approx(zeroed["logprobs"][0], abs=tolerance)
    else:
        assert_same(result, reference)
    row = [difference(result, reference)]
    if f"{family} dense" in served:
        assert_same(served[f"{family} dense"], answers(family, "dense"))
        row.insert(0, difference(served[f"{family} dense"], answers(family, "dense")))
    print(f"| {family} | {' | '.join(f'{value:.1e}' for value in row)} |")


def difference(result: dict[str, Any], reference: dict[str, Any]) -> float:
    """Return the largest difference of log-probabilities; in bfloat16 the first tokens alone are the same."""
    pairs = [
        (got["logprobs"], expected["logprobs"])
        for got, expected in zip(result["outputs"], reference["outputs"], strict=True)
    ]
    same = all(a["tokens"] == b["tokens"] for a, b in zip(result["outputs"], reference["outputs"], strict=True))
    return max(
        abs(a - b) for got, expected in pairs for a, b in zip(got[: None if same else 1], expected, strict=False)
    )
