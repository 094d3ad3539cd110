"""Convert for any architecture: narrower MLPs and experts are found by shapes."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from any_families import load, narrow
from any_models import MODELS, write_model
from commands import assert_refused, invoke, passed
from serving import Serve, assert_same, job
from test_gguf import save_tokenizer
from tiny_models import PROMPTS, edit_config, edit_weights, generate
from tokenizers import pre_tokenizers

from ddp_vllm.checkpoint import read_checkpoint
from ddp_vllm.remote_code.configuration_ddp_widths import register_widths

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


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that makes a family's folders: `dense`, `zeroed`, `tool`, another tool's narrower model, and
    `tool-converted`."""
    root = tmp_path_factory.mktemp("any")

    def make(family: str) -> Path:
        place = root / family
        if not place.exists():
            write_model(family, place / "dense")
            narrow(place / "dense", place / "tool", place / "zeroed")
            edit_config(place / "tool", lambda config: config.pop("quantization_config"))
            save_tokenizer(place / "tool", pre_tokenizers.ByteLevel(add_prefix_space=False))
            passed(invoke("convert", place / "tool", "-o", place / "tool-converted"))
        return place

    return make


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


@pytest.fixture(scope="session")
def served(serve: Serve, made: Callable[[str], Path]) -> dict[str, Any]:
    return serve({family: job(made(family) / "tool-converted") for family in ("olmo2", "glm4")})


@pytest.mark.vllm
@pytest.mark.parametrize("family", ["olmo2", "glm4"])
def test_vllm_computes_the_same(family: str, served: dict[str, Any], made: Callable[[str], Path]) -> None:
    assert_same(served[family], answers(load(made(family) / "zeroed")))


def _tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor] | None) -> Callable[[Path], None]:
    def edit(weights: dict[str, torch.Tensor]) -> None:
        tensor = weights.pop(name)
        if change:
            weights[name] = change(tensor)

    return lambda folder: edit_weights(folder, edit)


O_PROJ, DOWN = "model.layers.1.self_attn.o_proj.weight", "model.layers.1.mlp.down_proj.weight"
TOOL = ("olmo2", "tool")
BROKEN: dict[str, tuple[tuple[str, str], Callable[[Path], Any], str]] = {  # folder, how to break it, words
    "a narrower attention": (TOOL, _tensor(O_PROJ, lambda x: x[:32].contiguous()), "only MLPs and experts may be"),
    "an MLP without its output": (TOOL, _tensor(DOWN, None), f"tensor {DOWN} of shape [64, 96] is missing"),
    "a dense model": (
        ("olmo2", "dense"), lambda folder: None, "no block is narrower than"
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
