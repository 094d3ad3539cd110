"""A model that cannot be pruned is refused before anything is loaded, with the reason and the remedy."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ddp_prune.families import FAMILIES, choose_head_unit
from ddp_prune.source import load_model, open_source
from ddp_vllm.errors import ModelError

REFUSED: dict[str, tuple[dict[str, Any], list[str]]] = {  # what the config says, what the line must say
    "unsupported family": ({"model_type": "gpt2"}, ["'gpt2'", *FAMILIES]),
    "no family": ({"model_type": None}, ["None", *FAMILIES]),
    "not exact": ({"model_type": "olmo2"}, ["olmo2", "norm spans all heads"]),
    "pruned already": ({"model_type": "ddp_llama"}, ["pruned already", "dense model it came from"]),
    "quantised": ({"quantization_config": {"quant_method": "gptq"}}, ["quantised", "unquantised"]),
    "no width": ({"intermediate_size": None}, ["intermediate_size", "None"]),
    "uneven groups": ({"num_key_value_heads": 3}, ["num_attention_heads", "8", "3"]),
}


@pytest.fixture
def folder(tiny_model: Path, tmp_path: Path) -> Path:
    for file in tiny_model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def _edit(folder: Path, changes: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def test_reads_the_sizes_of_a_dense_model(tiny_model: Path) -> None:
    source = open_source(str(tiny_model))
    sizes = source.sizes
    assert (sizes.num_layers, sizes.num_query_heads, sizes.num_kv_heads, sizes.head_dim) == (3, 8, 4, 8)
    assert (sizes.intermediate_size, sizes.hidden_size, sizes.group_size) == (96, 64, 2)
    assert choose_head_unit("auto", sizes) == "kv-group" and choose_head_unit("query-head", sizes) == "query-head"


def test_config_without_the_optional_sizes(folder: Path) -> None:
    _edit(folder, {"head_dim": None, "num_key_value_heads": None})
    sizes = open_source(str(folder)).sizes
    assert (sizes.head_dim, sizes.num_kv_heads) == (8, 8)
    assert choose_head_unit("auto", sizes) == "query-head"


def test_the_model_is_frozen(tiny_model: Path) -> None:
    model = load_model(open_source(str(tiny_model)), "auto")
    assert not model.training and not any(parameter.requires_grad for parameter in model.parameters())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("case", REFUSED)
def test_a_model_that_cannot_be_pruned(case: str, folder: Path) -> None:
    changes, words = REFUSED[case]
    _edit(folder, changes)
    _refused(str(folder), words)


BROKEN: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "no safetensors": (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), [".safetensors"]),
    "no config": (lambda f: (f / "config.json").unlink(), ["config.json is missing"]),
    "config no JSON": (lambda f: (f / "config.json").write_text("{"), ["config.json cannot be read"]),
    "config no object": (lambda f: (f / "config.json").write_text("[]"), ["config.json is not an object"]),
    "shard missing": (
        lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-2.safetensors"}}'),
        ["model-2.safetensors"],
    ),
    "index no object": (lambda f: (f / "model.safetensors.index.json").write_text("[]"), ["index"]),
    "weights cut short": (
        lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:50]),
        ["model.safetensors"],
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_folder(case: str, folder: Path) -> None:
    breaks, words = BROKEN[case]
    breaks(folder)
    _refused(str(folder), words)


@pytest.mark.parametrize("model", ["./nowhere", "/nowhere/model", "~/nowhere", "nowhere", "a/b/c", ""])
def test_an_unknown_folder(model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    _refused(model, [model, "folder"])


def _refused(model: str, words: list[str]) -> None:
    with pytest.raises(ModelError) as caught:
        open_source(model)
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert "\n" not in message
