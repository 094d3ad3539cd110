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
from any_families import EXPERT_WIDTHS, OPTIONS, WITHOUT_TRANSFORMERS, WRAPPERS, load
from any_models import MODELS, SIZES
from commands import cases, invoke, passed
from runs import Edit, config, edit_config, edit_weights, without
from safetensors.torch import load_file
from serving import UPDATES, Serve, assert_same, assert_same_outputs, difference, job, selected
from tiny_models import make_adapter

from ddp_vllm.checkpoint import read_config
from ddp_vllm.families import register_pruned
from ddp_vllm.remote_code.configuration_ddp_widths import register_widths
from ddp_vllm.remote_code.files import WidthsError

pytestmark = pytest.mark.slow

# fused on disk; the Transformers backend; no gate; experts; a forward that uses the dense width
FAST = ("glm4", "olmo2", "starcoder2", "glm4_moe", "falcon_h1")
TEXT_ONLY = {"limit_mm_per_prompt": {"image": 0, "video": 0}}
BFLOAT16_TOLERANCE = 0.05
TRACED = {"enforce_eager": False, "compilation_config": {"mode": 2, "backend": "eager"}, "compiled": True}
WAYS: dict[str, tuple[str, dict[str, Any]]] = {  # how else a family is served, and with which options
    "two ranks, with biases": ("starcoder2", {"tensor_parallel_size": 2}),
    # each rank has a part of every expert, or some experts
    "two ranks, experts": ("mixtral", {"tensor_parallel_size": 2}),
    "two expert-parallel ranks": ("mixtral", {"tensor_parallel_size": 2, "enable_expert_parallel": True}),
    # vLLM 0.32 on CPU makes the tensors between the stages in a warm-up that it skips in eager mode; mode 1 has it
    "two stages": (
        "glm4_moe",
        {"pipeline_parallel_size": 2, "enforce_eager": False, "compilation_config": {"mode": 1}},
    ),
    "traced": ("glm4_moe", TRACED),
    "channels in blocks of 16": ("glm4", {"hf_overrides": {"ddp_pad_channels_to": 16}}),
    "the Transformers backend": ("glm4_moe", {"model_impl": "transformers"}),
}
WAYS_AT_NIGHT = ("two stages", "the Transformers backend", "traced")
UPDATED = ("glm4", "mixtral")
FUSED = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
SPLIT = ["q_proj", "gate_proj", "up_proj", "down_proj"]
ADAPTERS = {  # family -> modules of the adapter, modules that vLLM is told to adapt
    "gemma4_text": ([*SPLIT, "o_proj"], FUSED),
    "olmo2": (SPLIT, SPLIT),
    "mixtral": (["q_proj", "o_proj"], ["qkv_proj", "o_proj"]),
}
REFUSED_ADAPTERS = ("gemma4_text", "mixtral")  # families of which one is refused


other_widths = config(lambda content: content["quantization_config"]["layers"][0].update(intermediate_size=65))
nothing = config()
WEIGHT_ONLY = {"quantization": "int8_per_channel_weight_only", "dtype": "bfloat16"}
BROKEN: dict[str, tuple[str, Edit, dict[str, Any], str]] = {
    # family, how to break it, options, what the user reads
    "widths of another checkpoint": ("glm4", other_widths, {},
        r"tensor model.layers.0.mlp.\w+.weight has shape .* require (65|130) along .*different checkpoints"),
    # which vLLM looks for in unquantized models alone; norms and routers are found as attention is, and tried at night
    "a missing tensor of attention": ("glm4", without("model.layers.1.self_attn.o_proj.weight"), {},
        r"not initialized from checkpoint: \{'model.layers.1.self_attn.o_proj.weight'\}"),
    "a missing norm": ("olmo2", without("model.layers.2.post_feedforward_layernorm.weight"), {},
        r"not initialized from checkpoint: \{'model.layers.2.post_feedforward_layernorm.weight'\}"),
    "a missing router": ("glm4_moe", without("model.layers.1.mlp.gate.weight"), {},
        r"not initialized from checkpoint: \{'model.layers.1.mlp.gate.weight'\}"),
    "a format that no kernel multiplies": ("glm4_moe", nothing, WEIGHT_ONLY,
        r"experts quantized as int8_per_channel_static: .* --quantization fp8_per_channel or fp8_per_tensor"),
    "a format of checkpoints": ("glm4", nothing, {"quantization": "fp8"},
        r"--quantization fp8 requires a checkpoint in that format; .*fp8_per_channel"),
    "adapters of experts": ("glm4_moe", nothing, {"enable_lora": True},
        r"LoRA adapters .* on routed experts .*--lora-target-modules"),
}  # fmt: skip


FAMILIES = cases(MODELS, FAST)


def options(family: str) -> dict[str, Any]:
    return (TEXT_ONLY if family in WRAPPERS else {}) | WITHOUT_TRANSFORMERS.get(family, {}) | OPTIONS.get(family, {})


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_computes_the_same(family: str, made: Callable[[str], Path], answers: Any) -> None:
    register_pruned(read_config(made(family) / "narrow"))
    assert_same(answers(family, "narrow"), answers(family, "zeroed"))


def test_transformers_refuses_what_vllm_refuses(made: Callable[[str], Path], tmp_path: Path) -> None:
    """By the check whose every refusal is in test_checkpoint.py."""
    register_widths()
    family, break_it, _, words = BROKEN["widths of another checkpoint"]
    folder = shutil.copytree(made(family) / "narrow", tmp_path / "folder")
    break_it(folder)
    with pytest.raises(WidthsError, match=words):
        load(folder)


LACKING = {  # family -> a tensor outside of the blocks that were pruned, and its name in transformers
    "olmo2": ("model.layers.1.self_attn.o_proj.weight",) * 2,
    "starcoder2": ("model.layers.0.self_attn.k_proj.bias",) * 2,
    "gpt_neox": ("gpt_neox.final_layer_norm.weight",) * 2,
    "mixtral": ("model.layers.2.block_sparse_moe.gate.weight", "model.layers.2.mlp.gate.weight"),
}


@pytest.mark.parametrize("lacking", LACKING)
def test_transformers_and_inspect_refuse_a_missing_tensor(
    lacking: str, made: Callable[[str], Path], tmp_path: Path
) -> None:
    """transformers would initialize it at random, or leave it as memory was."""
    register_widths()
    folder = Path(shutil.copytree(made(lacking) / "narrow", tmp_path / "folder"))
    passed(invoke("inspect", folder))
    stored, name = LACKING[lacking]
    without(stored)(folder)
    words = rf"tensor {name} is missing \(1 in all\); copy the whole folder again"
    assert re.search(words, (refused := invoke("inspect", folder)).stderr), refused.output
    with pytest.raises(WidthsError, match=words):
        load(folder)


def add_further_layer(family: Path, folder: Path) -> Path:
    """Copy a narrow model and add a dense layer that predicts further tokens, as DeepSeek and GLM name it."""
    shutil.copytree(family / "narrow", folder)
    dense = load_file(family / "dense" / "model.safetensors")
    further = {name.replace("layers.2.", "layers.3."): dense[name] for name in dense if "layers.2." in name}
    edit_weights(folder, lambda weights: weights.update(further))
    edit_config(folder, num_nextn_predict_layers=1)
    return folder


@pytest.fixture(scope="session")
def adapters(
    request: pytest.FixtureRequest, made: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str], tuple[Path, dict[str, Any]]]:
    """Adapters of the narrow and of the dense model of each selected family, and what peft generates with them."""
    register_widths()
    root, known = tmp_path_factory.mktemp("adapters"), dict[tuple[str, str], tuple[Path, dict[str, Any]]]()
    for family in selected(request, "adapted", __file__) | {*REFUSED_ADAPTERS}:
        for kind in ("narrow", "dense"):
            folder = root / f"{kind} {family}"
            known[family, kind] = folder, make_adapter(folder, load(made(family) / kind), ADAPTERS[family][0])
    return known


@pytest.fixture(scope="session")
def served(
    request: pytest.FixtureRequest,
    serve: Serve,
    made: Callable[[str], Path],
    adapters: Any,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Any]:
    """Return what vLLM did with the folders of all selected cases, in one process."""
    root, jobs = tmp_path_factory.mktemp("stock_classes"), dict[str, dict[str, Any]]()
    for family in filter((selected(request, "family", __file__) | {*UPDATED}).__contains__, MODELS):
        if family in WRAPPERS and find_spec("torchvision") is None:
            continue
        reference = "zeroed" if family in WITHOUT_TRANSFORMERS else "dense"
        # vLLM's own kernel takes no experts of 48 inputs
        for kind in ("narrow",) if family in (*FAST, *UPDATED) else ("narrow", reference):
            updates = UPDATES * (family in UPDATED)
            jobs[f"{family} {kind}"] = job(made(family) / kind, updates=updates, **options(family))
    for way in selected(request, "way", __file__) & {*WAYS}:
        family, more = WAYS[way]
        jobs[way] = job(made(family) / "narrow", **more)
    for name in selected(request, "name", __file__) & {*BROKEN}:
        family, break_it, more, _ = BROKEN[name]
        folder = Path(shutil.copytree(made(family) / "narrow", root / name))
        break_it(folder)
        jobs[name] = job(folder, **more)
    for family in {family for family, _ in adapters}:
        folders = tuple(adapters[family, kind][0] for kind in ("narrow", "dense"))
        modules = ADAPTERS[family][1]
        jobs[f"{family}: adapters"] = job(made(family) / "narrow", folders, lora_target_modules=modules)
    jobs["q alone"] = job(
        made("mixtral") / "narrow", (adapters["mixtral", "narrow"][0],), lora_target_modules=["qkv_proj"]
    )
    jobs["further"] = job(add_further_layer(made("glm4_moe"), root / "further"))
    return serve(jobs)


@pytest.mark.vllm
@pytest.mark.parametrize("way", cases(WAYS, {*WAYS} - {*WAYS_AT_NIGHT}))
def test_other_ways_compute_the_same(way: str, served: Any, answers: Any) -> None:
    assert_same(served[way], answers(WAYS[way][0], "zeroed"))
    if WAYS[way][0] == "mixtral":
        assert difference(served[way], answers("mixtral", "zeroed")) < 1e-5


@pytest.mark.vllm
@pytest.mark.parametrize("way", ["mixtral narrow", "two ranks, experts", "two expert-parallel ranks"])
def test_experts_are_loaded_as_kept_plus_their_alignment(way: str, served: Any) -> None:
    """All ranks together hold no more than one does."""
    rows = SIZES["num_hidden_layers"] * sum(-(-width // 16) * 16 for width in EXPERT_WIDTHS)
    assert sum(served[way]["expert_bytes"]) == rows * 3 * 48 * 4  # gate, up and down in fp32


@pytest.mark.vllm
def test_a_layer_that_predicts_further_tokens_stays_whole(served: Any, answers: Any) -> None:
    assert_same(served["further"], answers("glm4_moe", "zeroed"))


@pytest.mark.vllm
@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("updated", UPDATED)
def test_updated_weights_are_those_of_the_checkpoint(updated: str, update: str, served: Any, answers: Any) -> None:
    """Memory that vLLM allocates for them is poisoned with NaN; the masks among the pieces are left out."""
    result = served[f"{updated} narrow"]
    assert "error" not in result, result
    assert_same_outputs(result["updated"][update], answers(updated, "zeroed")["outputs"])


@pytest.mark.vllm
@pytest.mark.parametrize("adapted", cases(ADAPTERS, REFUSED_ADAPTERS))
def test_an_adapter_answers_as_in_peft(adapted: str, served: Any, adapters: Any, answers: Any) -> None:
    result = served[f"{adapted}: adapters"]
    assert_same(result, answers(adapted, "zeroed"))
    assert_same(result["adapted"][0], adapters[adapted, "narrow"][1])


@pytest.mark.vllm
def test_an_adapter_that_does_not_fit_is_refused(served: Any) -> None:
    """vLLM alone would ignore the parts for modules that get no LoRA."""
    words = r"model.layers.0.mlp.down_proj is for 96 inputs and 64 outputs, and this layer requires 33 and 64; .*train"
    assert re.search(words, served["gemma4_text: adapters"]["adapted"][1]["error"])
    words = r"changes model.layers.\d.self_attn.o_proj, to which no LoRA is applied here: --lora-target-modules"
    assert re.search(words, served["q alone"]["adapted"][0]["error"])


@pytest.mark.vllm
@pytest.mark.parametrize("name", cases(BROKEN, {*BROKEN} - {"a missing norm", "a missing router"}))
def test_what_cannot_work_stops_the_start_and_names_the_place(name: str, served: Any) -> None:
    assert re.search(BROKEN[name][3], served[name]["error"]), served[name]


@pytest.mark.vllm
@pytest.mark.parametrize("family", FAMILIES)
def test_vllm_computes_the_same(family: str, served: Any, answers: Any) -> None:
    if f"{family} narrow" not in served:
        pytest.skip("vLLM requires torchvision for this family")
    result = served[f"{family} narrow"]
    if family in WITHOUT_TRANSFORMERS:
        assert "error" not in result, result
        tolerance = BFLOAT16_TOLERANCE if "dtype" in options(family) else 1e-5
        for got, zeroed in zip(result["outputs"], served[f"{family} zeroed"]["outputs"], strict=True):
            assert got["tokens"][0] == zeroed["tokens"][0]
            assert got["logprobs"][0] == pytest.approx(zeroed["logprobs"][0], abs=tolerance)
    else:
        assert_same(result, answers(family, "zeroed"))
    if f"{family} dense" in served:
        assert_same(served[f"{family} dense"], answers(family, "dense"))
