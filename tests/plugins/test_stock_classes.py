"""vLLM's own classes serve narrower MLPs and experts of any family as transformers computes the dense model with zeros.

The reference of a family that vLLM 0.32 computes otherwise on a CPU, dense as well, is vLLM on the model with zeros.
"""

import re
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from any_families import FAMILIES, WITHOUT_TRANSFORMERS, load, make_dense, narrow
from serving import UPDATES, Serve, assert_same, assert_same_outputs, job
from tiny_models import PROMPTS, edit_config, edit_weights, generate

from ddp_vllm.remote_code.configuration_ddp_widths import register_widths

FAST = ("glm4", "olmo2", "starcoder2", "glm4_moe")  # fused on disk; the Transformers backend; no gate; experts
TEXT_ONLY = {"limit_mm_per_prompt": {"image": 0, "video": 0}}
BFLOAT16_TOLERANCE = 0.02
pytestmark = pytest.mark.vllm


def cases(families: Any = FAMILIES) -> list[Any]:
    return [pytest.param(name, marks=[] if name in FAST else pytest.mark.nightly) for name in families]


def options(family: str) -> dict[str, Any]:
    return (TEXT_ONLY if "vision_config" in FAMILIES[family][1] else {}) | WITHOUT_TRANSFORMERS.get(family, {})


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("any")


@pytest.fixture(scope="session")
def made(root: Path) -> Callable[[str], Path]:
    """Return a function that makes the folders `dense`, `narrow` and `zeroed` of a family, once."""

    def make(family: str) -> Path:
        if not (root / family).exists():
            make_dense(root / family / "dense", family)
            narrow(*(root / family / name for name in ("dense", "narrow", "zeroed")))
        return root / family

    return make


@pytest.fixture(scope="session")
def answers(made: Callable[[str], Path]) -> Callable[[str, str], dict[str, Any]]:
    """Return a function that gives what transformers generates with a folder of a family."""
    known: dict[tuple[str, str], dict[str, Any]] = {}

    def ask(family: str, kind: str) -> dict[str, Any]:
        if (family, kind) not in known:
            model = load(made(family) / kind)
            known[family, kind] = {"outputs": [generate(model, prompt) for prompt in PROMPTS]}
        return known[family, kind]

    return ask


@pytest.mark.parametrize("family", cases())
def test_transformers_computes_the_same(family: str, answers: Any) -> None:
    register_widths()
    assert_same(answers(family, "narrow"), answers(family, "zeroed"))


WAYS: dict[str, tuple[str, dict[str, Any]]] = {  # how else a family is served
    "two tensor-parallel ranks": ("glm4_moe", {"tensor_parallel_size": 2}),  # which divide neither 33 nor 1 channels
    "two expert-parallel ranks": ("glm4_moe", {"tensor_parallel_size": 2, "enable_expert_parallel": True}),
    "two ranks of the Transformers backend": ("olmo2", {"tensor_parallel_size": 2}),
    "two ranks, fused on disk": ("glm4", {"tensor_parallel_size": 2}),
    "two ranks, with biases": ("starcoder2", {"tensor_parallel_size": 2}),
    # vLLM 0.32 on CPU makes the tensors between the stages in a warm-up that it skips in eager mode; mode 1 has it
    "two pipeline stages": (
        "glm4_moe",
        {"pipeline_parallel_size": 2, "enforce_eager": False, "compilation_config": {"mode": 1}},
    ),
    "traced": ("glm4_moe", {"enforce_eager": False, "compilation_config": {"mode": 2, "backend": "eager"}}),
    "channels in blocks of 16": ("glm4", {"hf_overrides": {"ddp_pad_channels_to": 16}}),
    "biases in blocks of 16": ("starcoder2", {"hf_overrides": {"ddp_pad_channels_to": 16}}),
    "the Transformers backend": ("glm4_moe", {"model_impl": "transformers"}),
}
FP8 = {"dtype": "bfloat16", "quantization": "fp8_per_channel"}
ADAPTED = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
ADAPTERS = {  # family -> modules of the adapter, modules that vLLM is told to adapt
    "glm4": (["q_proj", "o_proj", "gate_up_proj", "down_proj"], ADAPTED),
    "olmo2": (["q_proj", "gate_proj", "up_proj", "down_proj"], ["q_proj", "gate_proj", "up_proj", "down_proj"]),
    "glm4_moe": (["q_proj", "o_proj"], ADAPTED),
}
UPDATED = ("glm4", "glm4_moe")
LAYER = "model.layers.3.mlp"
BROKEN: dict[str, tuple[str, Any, dict[str, Any], str]] = {  # family, how to break it, options, what the user reads
    "widths of another checkpoint": (
        "glm4",
        lambda folder: edit_config(folder, lambda config: config["quantization_config"]["layers"][0].update(W65)),
        {},
        r"tensor model.layers.0.mlp.\w+.weight has shape .* config.json requires (65|130) .*different checkpoints",
    ),
    "a width above the dense one": (
        "glm4",
        lambda folder: edit_config(folder, lambda config: config["quantization_config"]["layers"][0].update(W97)),
        {},
        r"quantization_config.layers\[0\].intermediate_size is 97, not an integer in 1…96",
    ),
    "a missing tensor": (
        "glm4",
        lambda folder: edit_weights(folder, lambda weights: weights.pop(f"{LAYER}.down_proj.weight")),
        {},
        rf"tensor {LAYER}.down_proj.weight is missing \(1 in all\)",
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
    "adapters on two ranks": (
        "glm4",
        lambda folder: None,
        {"enable_lora": True, "tensor_parallel_size": 2},
        "",
    ),
    "adapters of experts": (
        "glm4_moe",
        lambda folder: None,
        {"enable_lora": True},
        r"LoRA adapters .* on routed experts .*--lora-target-modules",
    ),
}
W65, W97 = {"intermediate_size": 65}, {"intermediate_size": 97}


def quantize(weights: dict[str, torch.Tensor]) -> None:
    name = f"{LAYER}.down_proj.weight"
    weights[name] = weights[name].to(torch.float8_e4m3fn)


@pytest.fixture(scope="session")
def adapters(root: Path, made: Callable[[str], Path]) -> dict[str, tuple[Path, dict[str, Any]]]:
    """Each adapter's folder, and what transformers and peft generate with it."""
    from peft import LoraConfig, get_peft_model

    register_widths()
    written = {}
    for family, (modules, _) in ADAPTERS.items():
        torch.manual_seed(1)
        config = LoraConfig(target_modules=modules, r=4, lora_alpha=8, init_lora_weights=False)
        model = get_peft_model(load(made(family) / "narrow"), config).eval()
        model.save_pretrained(root / f"adapter of {family}")
        outputs = [generate(model, prompt) for prompt in PROMPTS]
        written[family] = root / f"adapter of {family}", {"outputs": outputs}
    return written


@pytest.fixture(scope="session")
def other_ways(serve: Serve, made: Callable[[str], Path], adapters: Any, root: Path) -> dict[str, Any]:
    """Return what vLLM did in other ways than its defaults, and with broken folders."""
    jobs = {way: job(made(family) / "narrow", **more) for way, (family, more) in WAYS.items()}
    jobs["traced"]["compiled"] = True
    for family in UPDATED:
        jobs[f"{family} updated"] = {**job(made(family) / "narrow"), "updates": UPDATES}
        jobs[f"{family} in FP8"] = job(made(family) / "narrow", **FP8)
        jobs[f"{family} in bfloat16"] = job(made(family) / "narrow", dtype="bfloat16")
    for family, (_, targets) in ADAPTERS.items():
        lora = {"enable_lora": True, "max_lora_rank": 8, "lora_target_modules": targets}
        jobs[f"{family} adapted"] = job(made(family) / "narrow", **lora) | {"adapters": [str(adapters[family][0])]}
    for name, (family, break_it, more, _) in BROKEN.items():
        folder = shutil.copytree(made(family) / "narrow", root / "broken" / name)
        break_it(folder)
        jobs[name] = job(folder, **more)
    return serve(jobs)


@pytest.mark.parametrize("way", WAYS)
def test_other_ways_compute_the_same(way: str, other_ways: Any, answers: Any) -> None:
    assert_same(other_ways[way], answers(WAYS[way][0], "zeroed"))


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("family", UPDATED)
def test_updated_weights_are_those_of_the_checkpoint(family: str, update: str, other_ways: Any, answers: Any) -> None:
    result = other_ways[f"{family} updated"]
    assert "error" not in result, result
    assert_same_outputs(result["updated"][update], answers(family, "zeroed")["outputs"])


@pytest.mark.parametrize("family", UPDATED)
def test_fp8_is_near(family: str, other_ways: Any) -> None:
    """Linear layers and experts are quantized while vLLM loads them, at their narrow widths."""
    result, exact = other_ways[f"{family} in FP8"], other_ways[f"{family} in bfloat16"]
    assert "error" not in result, result
    assert result["mlp_widths"] == exact["mlp_widths"]
    for got, expected in zip(result["outputs"], exact["outputs"], strict=True):
        assert got["logprobs"] != expected["logprobs"]
        assert got["logprobs"][0] == pytest.approx(expected["logprobs"][0], abs=0.5)


@pytest.mark.parametrize("family", ADAPTERS)
def test_an_adapter_answers_as_in_peft(family: str, other_ways: Any, adapters: Any, answers: Any) -> None:
    result = other_ways[f"{family} adapted"]
    assert_same(result, answers(family, "zeroed"))
    assert_same(result["adapted"][0], adapters[family][1])


@pytest.mark.parametrize("name", BROKEN)
def test_what_cannot_work_stops_the_start_and_names_the_place(name: str, other_ways: Any) -> None:
    assert re.search(BROKEN[name][3], other_ways[name]["error"]), other_ways[name]


@pytest.fixture(scope="session")
def served(request: pytest.FixtureRequest, serve: Serve, made: Callable[[str], Path]) -> dict[str, Any]:
    """Return what vLLM did with the folders of all selected families, in one process."""
    selected = {item.callspec.params.get("family") for item in request.session.items if hasattr(item, "callspec")}
    jobs = {}
    for family in filter(selected.__contains__, FAMILIES):
        if "vision_config" in FAMILIES[family][1] and find_spec("torchvision") is None:
            continue
        reference = "zeroed" if family in WITHOUT_TRANSFORMERS else "dense"
        for kind in ("narrow",) if family in FAST else ("narrow", reference):
            jobs[f"{family} {kind}"] = job(made(family) / kind, **options(family))
    return serve(jobs)


@pytest.mark.parametrize("family", cases())
def test_vllm_computes_the_same(family: str, served: Any, answers: Any, record_property: Any) -> None:
    if f"{family} narrow" not in served:
        pytest.skip("vLLM requires torchvision for this family")
    result = served[f"{family} narrow"]
    if family not in WITHOUT_TRANSFORMERS:
        assert_same(result, answers(family, "zeroed"))
        if family not in FAST:
            assert_same(served[f"{family} dense"], answers(family, "dense"))
        return
    assert "error" not in result, result
    for got, zeroed in zip(result["outputs"], served[f"{family} zeroed"]["outputs"], strict=True):
        assert got["tokens"][0] == zeroed["tokens"][0]
        tolerance = BFLOAT16_TOLERANCE if "dtype" in options(family) else 1e-5
        assert got["logprobs"][0] == pytest.approx(zeroed["logprobs"][0], abs=tolerance)
