"""A pruned checkpoint is checked before a weight is loaded."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import invoke
from safetensors.numpy import load_file, save_file

from ddp_vllm.checkpoint import read_checkpoint
from ddp_vllm.errors import CheckpointError

LAYERS = [
    {"query_heads_per_kv_head": [2, 1], "intermediate_size": 7},  # uneven groups, a width that is prime
    {"query_heads_per_kv_head": [], "intermediate_size": 0},  # nothing left
    {"query_heads_per_kv_head": [2], "intermediate_size": 12},  # MLP as in the dense model
]
CONFIG = {
    "model_type": "ddp_llama", "hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "vocab_size": 10,
    "tie_word_embeddings": True,
}  # fmt: skip


def _shapes() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (10, 16), "model.norm": (16,)}
    for index, layer in enumerate(LAYERS):
        counts: Any = layer["query_heads_per_kv_head"]
        width: Any = layer["intermediate_size"]
        block = {
            "self_attn.q_proj": (4 * sum(counts), 16), "self_attn.k_proj": (4 * len(counts), 16),
            "self_attn.v_proj": (4 * len(counts), 16), "self_attn.o_proj": (16, 4 * sum(counts)),
            "input_layernorm": (16,) * bool(counts), "mlp.gate_proj": (width, 16), "mlp.up_proj": (width, 16),
            "mlp.down_proj": (16, width), "post_attention_layernorm": (16,) * bool(width),
        }  # fmt: skip
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in block.items() if shape and all(shape)}
    return {f"{name}.weight": shape for name, shape in shapes.items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "pruned"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**CONFIG, "ddp_layers": LAYERS}))
    save_file({name: np.zeros(shape, np.float32) for name, shape in _shapes().items()}, folder / "model.safetensors")
    return folder


def _edit(folder: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    edit(config)
    (folder / "config.json").write_text(json.dumps(config))


def _first(key: str, value: Any) -> Callable[[Path], None]:
    return lambda folder: _edit(folder, lambda config: config["ddp_layers"][0].update({key: value}))


def _weights(edit: Callable[[dict[str, np.ndarray]], Any]) -> Callable[[Path], None]:
    def run(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        edit(weights)
        save_file(weights, folder / "model.safetensors")

    return run


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _index(weight_map: Any) -> Callable[[Path], None]:
    def run(folder: Path) -> None:
        text = json.dumps({"metadata": {}, "weight_map": weight_map})
        (folder / "model.safetensors.index.json").write_text(text)

    return run


O_PROJ = "model.layers.0.self_attn.o_proj.weight"
UP_PROJ = "model.layers.0.mlp.up_proj.weight"
DOWN_PROJ = "model.layers.2.mlp.down_proj.weight"
CORRUPTIONS: dict[str, tuple[Callable[[Path], Any], list[str]]] = {  # what is broken, what the line must name
    "negative width": (_first("intermediate_size", -1), ["ddp_layers[0].intermediate_size", "-1", "0…12"]),
    "widths of another checkpoint": (_first("intermediate_size", 8), ["layers.0.mlp", "7", "require 8"]),
    "tensor of a removed block": (
        _weights(lambda w: w.update({"model.layers.1.mlp.up_proj.weight": np.zeros((3, 16), np.float32)})),
        ["layers.1.mlp.up_proj", "removes"],
    ),
    "missing o_proj": (_weights(lambda w: w.pop(O_PROJ)), ["layer 0", "o_proj"]),
    "an unknown family": (lambda f: _edit(f, lambda c: c.update(model_type="ddp_newlm")), ["'ddp_newlm'", "unknown"]),
    "a tensor of no model": (
        _weights(lambda w: w.update({"model.extra": np.zeros(1)})),
        ["'model.extra'", "unknown in"],
    ),
    "integers as weights": (_weights(lambda w: w.update({UP_PROJ: np.zeros((7, 16), np.int8)})), [UP_PROJ, "'I8'"]),
    "a name that writes to the terminal": (
        _weights(lambda w: w.update({"\x1b]0;evil\x07": np.zeros(1)})),
        ["\\x1b]0;evil\\x07"],
    ),
    "index outside the folder": (_index({O_PROJ: "../model.safetensors"}), ["'../model.safetensors'", "its folder"]),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), ["has no model*.safetensors"]),
    "weights a pipe": (lambda f: _pipe(f / "model.safetensors"), ["model.safetensors is not a file"]),
    "weights without their end": (
        lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-4]),
        ["model.safetensors", "truncated"],
    ),
    "config of many lists": (
        lambda f: (f / "config.json").write_text(
            '{"x": [' + "[]," * 2_000_000 + "[]], " + (f / "config.json").read_text()[1:]
        ),
        ["config.json cannot be read", "4,000,000 bytes"],
    ),
}


def test_packed_weights_may_have_any_shape_but_in_a_removed_block(folder: Path) -> None:
    """bitsandbytes keeps two numbers a byte in one column, NVFP4 two along each row."""
    _edit(folder, lambda config: config.update(quantization_config={"quant_method": "bitsandbytes"}))
    packed = {O_PROJ: np.zeros((16 * 12 // 2, 1), np.uint8), DOWN_PROJ: np.zeros((16, 12 // 2), np.uint8)}
    _weights(lambda w: w.update(packed))(folder)
    assert read_checkpoint(folder).shapes[O_PROJ] == [96, 1]
    _weights(lambda w: w.update({"model.layers.1.mlp.up_proj.weight": np.zeros((24, 1), np.uint8)}))(folder)
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj.*removes"):
        read_checkpoint(folder)


def test_what_a_quantizer_adds_to_some_layers_is_none_of_ours(folder: Path) -> None:
    """It leaves a layer as it is, and gives another more tensors: bitsandbytes' states, scales of the KV cache."""
    _edit(folder, lambda config: config.update(quantization_config={"quant_method": "bitsandbytes"}))
    more = ("model.layers.2.mlp.down_proj.weight.absmax", "model.layers.2.self_attn.attn.k_scale")
    _weights(lambda w: w.update({name: np.zeros(3, np.float32) for name in more}))(folder)
    _weights(lambda w: w.update({f"{DOWN_PROJ}_packed": w.pop(DOWN_PROJ)}))(folder)
    read_checkpoint(folder)


@pytest.mark.parametrize("case", CORRUPTIONS)
def test_refuses_a_corrupted_checkpoint(case: str, folder: Path) -> None:
    corrupt, words = CORRUPTIONS[case]
    corrupt(folder)
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(folder)
    result = invoke("inspect", folder)
    assert result.exit_code == 7 and result.stdout == ""
    assert result.stderr == f"ddp-vllm: {' '.join(str(caught.value).split())}\n"
    for word in words:
        assert word in result.stderr
