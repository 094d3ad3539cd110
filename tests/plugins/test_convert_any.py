"""Convert for any architecture: narrower MLPs and experts are found by shapes, constants by `approximate_experts`."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from any_families import load, narrow
from any_models import MODELS, NUM_EXPERTS, write_model
from commands import assert_refused, invoke, passed
from safetensors.torch import load_file
from serving import Serve, assert_same, job
from test_gguf import save_tokenizer
from tiny_models import PROMPTS, edit_config, edit_weights, generate
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM

from ddp_vllm.checkpoint import read_checkpoint
from ddp_vllm.remote_code.configuration_ddp_widths import AnyConfig, register_widths

FAST = ("olmo2", "glm4", "glm4_moe")
OTHERS = (
    "starcoder2",
    "gemma4_text",
    "mistral3",
    "qwen3_5",
    "qwen3_5_moe",
    "deepseek_v3",
    "minimax_m2",
    "ernie4_5_moe",
)
FAMILIES = [*FAST, *(pytest.param(name, marks=pytest.mark.nightly) for name in OTHERS)]
CONSTANT = "mone"


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that makes a family's folders: `dense`, `zeroed`, `tool`, another tool's narrower model,
    `converted`, and of mixtures `mone`, whose experts are replaced by constant vectors, `mone-converted`."""
    root = tmp_path_factory.mktemp("any")

    def make(family: str) -> Path:
        place = root / family
        if not place.exists():
            write_model(family, place / "dense")
            narrow(place / "dense", place / "tool", place / "zeroed")
            edit_config(place / "tool", lambda config: config.pop("quantization_config"))
            replace_experts(place / "dense", place / CONSTANT)
            has_experts = "approximate_experts" in json.loads((place / CONSTANT / "config.json").read_text())
            for tool in (place / name for name in ("tool", CONSTANT)[: 1 + has_experts]):
                save_tokenizer(tool, pre_tokenizers.ByteLevel(add_prefix_space=False))
                passed(invoke("convert", tool, "-o", place / f"{tool.name}-converted"))
        return place

    return make


def replace_experts(dense: Path, folder: Path) -> None:
    """Write a dense mixture in the form of vLLM 0.33: constant vectors replace other experts in each layer."""
    shutil.copytree(dense, folder)
    removed: dict[str, list[int]] = {}

    def edit(weights: dict[str, torch.Tensor]) -> None:
        for name in [name for name in weights if re.search(r"\.experts\.\d+\.", name)]:
            layer, expert = (int(part) for part in re.findall(r"\.(\d+)\.", name))
            if expert in (layer, 5) or (layer == 1 and expert == 7):
                removed.setdefault(str(layer), []).append(expert)
                del weights[name]
                vector = torch.randn(64, generator=torch.Generator().manual_seed(8 * layer + expert)) * 0.5
                weights[f"{name.rpartition('.experts.')[0]}.experts.{expert}.approx_value"] = vector

    edit_weights(folder, edit)
    stated = {layer: sorted({*experts}) for layer, experts in removed.items()}
    edit_config(folder, lambda config: config.update({"approximate_experts": stated} if stated else {}))


def by_hand(place: Path) -> Any:
    """Load the dense model with its experts' outputs replaced, without code of ours."""
    model, config = load(place / "dense"), json.loads((place / CONSTANT / "config.json").read_text())
    tensors = load_file(place / CONSTANT / "model.safetensors")
    experts = {name.split(".layers.")[1].split(".")[0]: module for name, module in model.named_modules()
               if hasattr(module, "gate_up_proj") and module.gate_up_proj.dim() == 3}  # fmt: skip
    for layer, ids in config["approximate_experts"].items():
        vectors = {
            i: next(v for k, v in tensors.items() if f".{layer}." in k and k.endswith(f".{i}.approx_value"))
            for i in ids
        }
        experts[layer].down_proj.data[ids] = 0.0

        def forward(
            x: Any, chosen: Any, shares: Any, stock: Any = experts[layer].forward, vectors: Any = vectors
        ) -> Any:
            y = stock(x, chosen, shares)
            for expert, vector in vectors.items():
                y = y + (shares * (chosen == expert)).sum(-1, keepdim=True).to(y.dtype) * vector
            return y

        experts[layer].forward = forward
    return model


def answers(model: Any) -> dict[str, Any]:
    return {"outputs": [generate(model, prompt) for prompt in PROMPTS]}


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_computes_what_the_tool_meant(family: str, made: Callable[[str], Path]) -> None:
    place = made(family)
    register_widths()
    config = json.loads((place / "tool-converted" / "config.json").read_text())
    assert config["architectures"] == [type(load(place / "zeroed")).__name__]
    assert_same(answers(load(place / "tool-converted")), answers(load(place / "zeroed")))
    checkpoint = read_checkpoint(place / "tool-converted")
    assert checkpoint.provenance["converted"] == {"from": "tool", "format": "tensors"} and 0 < checkpoint.removed < 1


@pytest.mark.parametrize(
    "family",
    ["glm4_moe", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("qwen3_moe", "mixtral", "minimax_m2"))],
)
def test_constant_vectors_of_another_tool(family: str, made: Callable[[str], Path]) -> None:
    place = made(family)
    folder = place / f"{CONSTANT}-converted"
    model = AutoModelForCausalLM.from_pretrained(folder, config=AnyConfig.from_pretrained(folder), dtype=torch.float32)
    assert_same(answers(model.eval()), answers(by_hand(place)))
    stated = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in stated and stated["approximate_experts"]
    assert read_checkpoint(folder).provenance["converted"]["format"] == "approximate_experts"


@pytest.fixture(scope="session")
def served(serve: Serve, made: Callable[[str], Path]) -> dict[str, Any]:
    folders = {family: made(family) / "tool-converted" for family in ("olmo2", "glm4")}
    mone = made("glm4_moe") / f"{CONSTANT}-converted"
    jobs = {name: job(folder) for name, folder in folders.items()} | {CONSTANT: job(mone)}
    jobs["two ranks"] = job(mone, tensor_parallel_size=2)
    jobs["two expert-parallel ranks"] = job(mone, tensor_parallel_size=2, enable_expert_parallel=True)
    jobs["FP8"] = job(mone, dtype="bfloat16", quantization="fp8_per_channel")
    return serve(jobs)


@pytest.mark.vllm
@pytest.mark.parametrize("family", ["olmo2", "glm4"])
def test_vllm_computes_the_same(family: str, served: dict[str, Any], made: Callable[[str], Path]) -> None:
    assert_same(served[family], answers(load(made(family) / "zeroed")))


@pytest.mark.vllm
@pytest.mark.parametrize("way", [CONSTANT, "two ranks", "two expert-parallel ranks"])
def test_vllm_adds_the_constants(way: str, served: dict[str, Any], made: Callable[[str], Path]) -> None:
    assert_same(served[way], answers(by_hand(made("glm4_moe"))))


@pytest.mark.vllm
def test_constants_are_not_served_quantized(served: dict[str, Any]) -> None:
    assert "replaced by constant vectors are served unquantized only" in served["FP8"]["error"]


def _approximate(layer: str, ids: Any) -> Callable[[Path], None]:
    return lambda folder: edit_config(folder, lambda config: config["approximate_experts"].update({layer: ids}))


def _tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor] | None) -> Callable[[Path], None]:
    def edit(weights: dict[str, torch.Tensor]) -> None:
        tensor = weights.pop(name)
        if change:
            weights[name] = change(tensor)

    return lambda folder: edit_weights(folder, edit)


VECTOR, O_PROJ = "model.layers.1.mlp.experts.5.approx_value", "model.layers.1.self_attn.o_proj.weight"
MOE, TOOL, DOWN = ("glm4_moe", CONSTANT), ("olmo2", "tool"), "model.layers.1.mlp.down_proj.weight"
BROKEN: dict[str, tuple[tuple[str, str], Callable[[Path], Any], str]] = {  # folder, how to break it, words
    "an id out of range": (MOE, _approximate("1", [1, 5, NUM_EXPERTS]), "names experts [1, 5, 8] of layer 1"),
    "a layer out of range": (MOE, _approximate("9", [1]), "of layer 9, but the model has 8 in 2 layers"),
    "a layer without experts": (MOE, _approximate("0", [1]), "of layer 0"),
    "an id that is kept": (MOE, _approximate("1", [1, 3, 5, 7]), "names expert 3 of layer 1, which has"),
    "an id too few": (MOE, _approximate("1", [1, 5]), "the folder lacks experts"),
    "ids as words": (MOE, _approximate("1", ["a"]), "not lists of expert ids by layer"),
    "a missing constant": (MOE, _tensor(VECTOR, None), f"tensor {VECTOR} is missing"),
    "a constant of another length": (
        MOE, _tensor(VECTOR, lambda x: torch.ones(65)), "has shape [65], but the output of an expert has 64"
    ),
    "a narrower attention": (TOOL, _tensor(O_PROJ, lambda x: x[:32].contiguous()), "only MLPs and experts may be"),
    "an MLP without its output": (TOOL, _tensor(DOWN, None), "layer 1 has no"),
    "a dense model": (
        ("olmo2", "dense"), lambda folder: None, "no MLP and no expert is narrower"
    ),
    "an unknown architecture": (
        TOOL, lambda folder: edit_config(folder, lambda config: config.update(model_type="own")),
        "transformers has no class for model_type 'own'",
    ),
    "no width": (
        TOOL, lambda folder: edit_config(folder, lambda config: config.pop("intermediate_size")), "--dense"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_refused(name: str, made: Callable[[str], Path], tmp_path: Path) -> None:
    (family, kind), break_it, words = BROKEN[name]
    folder = shutil.copytree(made(family) / kind, tmp_path / "folder")
    break_it(folder)
    result = invoke("convert", folder, "-o", tmp_path / "out")
    assert_refused(result, result.exit_code, words)
    assert result.exit_code in (2, 3)


def test_the_dense_model_gives_the_widths(made: Callable[[str], Path], tmp_path: Path) -> None:
    """Also where all layers are alike, and config.json has their width."""
    place = made("olmo2")
    folder = shutil.copytree(place / "dense", tmp_path / "folder")
    edit_config(folder, lambda config: config.update(intermediate_size=80))
    parts = {"gate_proj": 0, "up_proj": 0, "down_proj": 1}

    def cut(weights: dict[str, torch.Tensor]) -> None:
        for name in [name for name in weights if ".mlp." in name]:
            weights[name] = weights[name].narrow(parts[name.split(".")[-2]], 0, 80).contiguous()

    edit_weights(folder, cut)
    assert_refused(invoke("convert", folder, "-o", tmp_path / "out"), 3, "vLLM serves it as it is")
    passed(invoke("convert", folder, "-o", tmp_path / "out", "--dense", place / "dense"))
    assert [layer.intermediate_size for layer in read_checkpoint(tmp_path / "out").layers] == [80, 80, 80]


def test_every_other_family_is_in_the_models() -> None:
    assert {*FAST, *OTHERS} <= {*MODELS}
