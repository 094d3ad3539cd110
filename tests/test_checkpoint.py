"""A pruned checkpoint is checked before a weight is loaded: one of a family with a table, and one of a stock class."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import edit_json, invoke
from safetensors import torch as torch_file
from safetensors.numpy import load_file, save_file
from written_folders import write_model

from ddp_vllm.checkpoint import read_checkpoint
from ddp_vllm.errors import CheckpointError
from ddp_vllm.model_facts import describe_model

LAYERS: list[dict[str, Any]] = [
    {"query_heads_per_kv_head": [2, 1], "intermediate_size": 7},  # uneven groups, a width that is prime
    {"query_heads_per_kv_head": [], "intermediate_size": 0},  # nothing left
    {"query_heads_per_kv_head": [2], "intermediate_size": 12},  # MLP as in the dense model
]
FAMILY: dict[str, Any] = {
    "model_type": "ddp_llama", "hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "vocab_size": 10,
    "tie_word_embeddings": True, "ddp_layers": LAYERS,
}  # fmt: skip
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
FILE = "model.safetensors"
Edit = Callable[[Path], Any]
EXPERT = "mlp.experts.{}."
WIDTHS: dict[str, Any] = {
    "quant_method": "ddp_widths",
    "layers_module": "model.language_model.layers",
    "mlp": {"inputs": ["mlp.gate_up"], "output": "mlp.down", "intermediate_size": 12, "fused": "halves"},
    "experts": {"inputs": [f"{EXPERT}w1", f"{EXPERT}w3"], "output": f"{EXPERT}w2", "intermediate_size": 8,
                "num_experts": 3},
    "layers": [{"intermediate_size": 5}, {"expert_intermediate_sizes": [8, 0, 3]}, {}, {"intermediate_size": 12}],
}  # fmt: skip
# a wrapper, which states its layers inside
STOCK = {"model_type": "own", "text_config": {"num_hidden_layers": 4}, "quantization_config": WIDTHS}
WHOLE = [[8, 0, 8], [0, 8, 8]]  # of a model that lost whole experts, which stock code loads
L = "model.language_model.layers"


def _of_family() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (10, 16), "model.norm": (16,)}
    for index, layer in enumerate(LAYERS):
        counts, width = layer["query_heads_per_kv_head"], layer["intermediate_size"]
        block = {
            "self_attn.q_proj": (4 * sum(counts), 16), "self_attn.k_proj": (4 * len(counts), 16),
            "self_attn.v_proj": (4 * len(counts), 16), "self_attn.o_proj": (16, 4 * sum(counts)),
            "input_layernorm": (16,) * bool(counts), "mlp.gate_proj": (width, 16), "mlp.up_proj": (width, 16),
            "mlp.down_proj": (16, width), "post_attention_layernorm": (16,) * bool(width),
        }  # fmt: skip
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in block.items() if shape and all(shape)}
    return {f"{name}.weight": shape for name, shape in shapes.items()}


def _of_stock_class() -> dict[str, tuple[int, ...]]:
    """The tensors of a folder with WIDTHS, and others whose names are similar."""
    shapes: dict[str, tuple[int, ...]] = {
        f"{L}.4.mlp.gate_up.weight": (24, 16), "visual.layers.0.mlp.gate_up.weight": (24, 16),
        f"{L}.1.mlp.shared.experts.0.w1.weight": (9, 16), f"{L}.0.mlp.gate_up.scale": (1,),
    }  # fmt: skip
    for layer, width in ((0, 5), (2, 12), (3, 12)):
        mlp = {"gate_up.weight": (2 * width, 16), "gate_up.bias": (2 * width,), "down.weight": (16, width)}
        shapes |= {f"{L}.{layer}.mlp.{name}": shape for name, shape in (mlp | {"down.bias": (16,)}).items()}
    return shapes | _experts(1, (0, 8), (2, 3))


def _experts(layer: int, *widths: tuple[int, int]) -> dict[str, tuple[int, ...]]:
    return {
        f"{L}.{layer}.mlp.experts.{expert}.{name}.weight": (16, width) if name == "w2" else (width, 16)
        for expert, width in widths
        for name in ("w1", "w2", "w3")
    }


def _write(folder: Path, config: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, folder / FILE)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return _write(tmp_path / "family", FAMILY, _of_family())


@pytest.fixture
def stock(tmp_path: Path) -> Path:
    return _write(tmp_path / "stock", STOCK, _of_stock_class())


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    layers = [{"expert_intermediate_sizes": row} for row in WHOLE]
    stated = {key: value for key, value in WIDTHS.items() if key != "mlp"} | {"layers": layers}
    shapes = _experts(0, (0, 8), (1, 8)) | _experts(1, (0, 8), (1, 8))  # numbered anew
    return _write(tmp_path / "whole", {"model_type": "own", "num_hidden_layers": 2, "ddp_widths": stated}, shapes)


def _edit(*edits: Callable[[dict[str, Any]], Any], **changes: Any) -> Edit:
    return lambda folder: edit_json(folder / "config.json", *edits, **changes)


def _first(key: str, value: Any) -> Edit:
    return _edit(lambda config: config["ddp_layers"][0].update({key: value}))


def _stated(edit: Callable[[dict[str, Any]], Any]) -> Edit:
    return _edit(lambda config: edit(config["quantization_config"]))


def _layer(index: int, **fields: Any) -> Edit:
    return _stated(lambda stated: stated["layers"][index].update(fields))


def _unstated(field: str) -> Edit:
    return _stated(lambda stated: [layer.pop(field, 0) for layer in stated["layers"]])


def _weights(edit: Callable[[dict[str, np.ndarray]], Any]) -> Edit:
    def run(folder: Path) -> None:
        weights = load_file(folder / FILE)
        edit(weights)
        save_file(weights, folder / FILE)

    return run


def _zeros(name: str, *shape: int, dtype: Any = np.float32) -> Edit:
    return _weights(lambda weights: weights.update({name: np.zeros(shape, dtype)}))


def _drop(name: str) -> Edit:
    return _weights(lambda weights: weights.pop(name))


def _pipe(folder: Path) -> None:
    (folder / FILE).unlink()
    os.mkfifo(folder / FILE)


def _cut_off(folder: Path) -> None:
    os.truncate(folder / FILE, (folder / FILE).stat().st_size - 4)


def _pointer(name: str) -> Edit:
    return lambda folder: (folder / name).write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    )


def _index(weight_map: Any) -> Edit:
    text = json.dumps({"metadata": {}, "weight_map": weight_map})
    return lambda folder: (folder / "model.safetensors.index.json").write_text(text)


def _many_lists(folder: Path) -> None:
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text('{"x": [' + "[]," * 2_000_000 + "[]], " + text[1:])


def _not_a_number(folder: Path) -> None:
    """Write a header that JSON does not have."""
    content = (folder / FILE).read_bytes()
    size = 8 + int.from_bytes(content[:8], "little")
    header = content[8:size].replace(b"{", b'{"__metadata__": {"a": NaN}, ', 1)
    (folder / FILE).write_bytes(len(header).to_bytes(8, "little") + header + content[size:])


O_PROJ = "model.layers.0.self_attn.o_proj.weight"
UP_PROJ = "model.layers.0.mlp.up_proj.weight"
DOWN_PROJ = "model.layers.2.mlp.down_proj.weight"
OF_EXPERT = f"{L}.1.mlp.experts.{{}}.w1.weight".format
CORRUPTIONS: dict[str, dict[str, tuple[Any, ...]]] = {  # fixture of a folder -> what is broken, and what the line names
    "folder": {
        "a header that safetensors does not read": (_not_a_number, "header is not JSON"),
        "negative width": (_first("intermediate_size", -1), "ddp_layers[0].intermediate_size", "-1", "0…12"),
        "widths of another checkpoint": (_first("intermediate_size", 8), "layers.0.mlp", "7", "require 8"),
        "tensor of a removed block": (
            _zeros("model.layers.1.mlp.up_proj.weight", 3, 16), "layers.1.mlp.up_proj", "removes"
        ),
        "a norm of a removed block": (
            _zeros("model.layers.1.input_layernorm.weight", 16), "layers.1.input_layernorm", "removes"
        ),
        "a head that is not the embedding it is tied to": (
            _weights(lambda w: w.update({"lm_head.weight": np.ones((10, 16), np.float32)})),
            "tie_word_embeddings, but lm_head.weight differs from model.embed_tokens.weight; set",
        ),
        "an axis too many": (_zeros("model.norm.weight", 16, 1), "model.norm.weight has", "require 1 axes"),
        "missing o_proj": (_drop(O_PROJ), "layer 0", "o_proj"),
        "an unknown family": (_edit(model_type="ddp_newlm"), "'ddp_newlm'", "unknown"),
        "a tensor of no model": (_zeros("model.extra", 1), "'model.extra'", "unknown in"),
        "integers as weights": (_zeros(UP_PROJ, 7, 16, dtype=np.int8), UP_PROJ, "'I8'"),
        "a name that writes to the terminal": (_zeros("\x1b]0;evil\x07", 1), "\\x1b]0;evil\\x07"),
        "index outside the folder": (_index({O_PROJ: f"../{FILE}"}), f"'../{FILE}'", "its folder"),
        "index of another folder": (_index({O_PROJ: FILE}), "index.json and the files contradict each other"),
        "no weights": (lambda folder: (folder / FILE).unlink(), "has no model*.safetensors"),
        "weights a pipe": (_pipe, "model.safetensors is not a file"),
        "weights without their end": (_cut_off, FILE, "truncated"),
        "config of many lists": (_many_lists, "config.json cannot be read", "4,000,000 bytes"),
        "a pointer in place of the weights": (_pointer(FILE), "pointer of git-lfs", "lfs pull"),
        "a pointer in place of the config": (_pointer("config.json"), "config.json is a pointer of git-lfs"),
    },
    "stock": {
        "layers of another model": (_stated(lambda s: s["layers"].append({})), "5 entries for 4 layers"),
        "an unknown key of a layer": (_layer(2, heads=1), "layers[2] has the unknown key 'heads'"),
        "an expert without a place": (
            _stated(lambda s: s["experts"].update(output="mlp.w2")),
            "experts.output is 'mlp.w2', not the name of a module with {} for the expert",
        ),
        "a width of 0": (_layer(0, intermediate_size=0), "is 0, not an integer in 1…12"),
        "too few experts": (_layer(1, expert_intermediate_sizes=[1, 2]), "not a list of 3 widths, one per expert"),
        "an expert above": (
            _layer(1, expert_intermediate_sizes=[1, 9, 2]),
            "expert_intermediate_sizes[1] is 9, not an integer in 0…8",
        ),
        "a copy that differs": (
            _edit(ddp_widths=WIDTHS | {"layers": [{}] * 4}), "quantization_config is no copy of it"
        ),
        "half of a fused tensor": (_zeros(f"{L}.0.mlp.gate_up.weight", 5, 16), "require 10 along axis 0"),
        "a missing projection": (
            _drop(f"{L}.3.mlp.down.weight"), "layer 3 lacks the tensors of mlp.down (1 modules in all)"
        ),
        "a removed expert": (_zeros(OF_EXPERT(1), 1, 16), "of a block or expert that config.json removes"),
        "an expert too many": (_zeros(OF_EXPERT(3), 1, 16), "of expert 3, but config.json has 3"),
        "quantized weights": (
            _zeros(f"{L}.0.mlp.down.weight", 16, 5, dtype=np.int8), "is 'I8': ", "; export the unquantized model"
        ),
        "a described block that no layer states": (
            _unstated("intermediate_size"), "ddp_widths.mlp describes a block that no layer states"
        ),
        "described experts that no layer states": (
            _unstated("expert_intermediate_sizes"), "ddp_widths.experts describes a block that no layer states"
        ),
    },
    "whole": {
        "a number of the dense model": (
            _zeros(OF_EXPERT(2), 8, 16), "experts.2.w1.weight' is of expert 2, but config.json has 2"
        ),
        "narrower whole experts": (_zeros(OF_EXPERT(1), 5, 16), "require 8 along axis 0"),
        "fewer whole experts in a layer": (
            _edit(lambda c: c["ddp_widths"]["layers"][1].update(expert_intermediate_sizes=[0, 8, 0])),
            "keep [1, 2] whole experts",
        ),
    },
}  # fmt: skip


@pytest.mark.parametrize(("kind", "case"), [(kind, case) for kind, cases in CORRUPTIONS.items() for case in cases])
def test_refuses_a_corrupted_checkpoint(kind: str, case: str, request: pytest.FixtureRequest) -> None:
    folder, (corrupt, *words) = request.getfixturevalue(kind), CORRUPTIONS[kind][case]
    corrupt(folder)
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(folder)
    result = invoke("inspect", folder)
    assert result.exit_code == 7 and result.stdout == ""
    assert result.stderr == f"ddp-vllm: {' '.join(str(caught.value).split())}\n"
    for word in words:
        assert word in result.stderr


@pytest.mark.parametrize("quantization", [None, {"quant_method": "fp8"}])
def test_a_copy_of_the_embedding_is_a_head_that_counts_once(quantization: dict[str, Any] | None, folder: Path) -> None:
    """One in another number format is that of a quantizer."""
    before = read_checkpoint(folder).num_parameters
    edit_json(folder / "config.json", quantization_config=quantization or {})
    dtype = np.uint8 if quantization else np.float32
    save_file({"lm_head.weight": np.zeros((10, 16), dtype)}, folder / "model-2.safetensors")
    assert read_checkpoint(folder).num_parameters == before


@pytest.mark.parametrize(("dtype", "lost"), [(torch.float16, 0.0), (torch.bfloat16, 0.0), (torch.bfloat16, 2**-9)])
def test_a_tied_head_is_compared_by_value(dtype: torch.dtype, lost: float, folder: Path) -> None:
    """lost: what the number format of the head cannot hold."""
    before, table = read_checkpoint(folder).num_parameters, torch.arange(160.0).reshape(10, 16) + lost
    _weights(lambda weights: weights.update({"model.embed_tokens.weight": table.numpy()}))(folder)
    torch_file.save_file({"lm_head.weight": table.to(dtype)}, folder / "model-2.safetensors")
    if lost:
        with pytest.raises(CheckpointError, match="tie_word_embeddings"):
            read_checkpoint(folder)
    else:
        assert read_checkpoint(folder).num_parameters == before


def test_widths_are_written_as_they_were_read_and_give_the_dense_shapes(stock: Path, whole: Path) -> None:
    checkpoint = read_checkpoint(stock)
    assert checkpoint.widths.to_json() == WIDTHS
    dense = {name: [*shape] for name, shape in _of_stock_class().items()} | {
        f"{L}.0.mlp.gate_up.weight": [24, 16], f"{L}.0.mlp.gate_up.bias": [24], f"{L}.0.mlp.down.weight": [16, 12],
    }  # fmt: skip
    dense |= {name: [*shape] for name, shape in _experts(1, (0, 8), (1, 8), (2, 8)).items()}
    assert checkpoint.dense_shapes == dense
    widths = read_checkpoint(whole).widths
    assert widths.num_experts == 3 and [layer.expert_intermediate_sizes for layer in widths.layers] == [
        tuple(row) for row in WHOLE
    ]
    _edit(ddp_widths=WIDTHS)(stock)  # a copy of the same
    assert read_checkpoint(stock).widths == checkpoint.widths


def test_packed_weights_may_have_any_shape_but_in_a_removed_block(folder: Path) -> None:
    """bitsandbytes keeps two numbers a byte in one column, NVFP4 two along each row."""
    _edit(quantization_config={"quant_method": "bitsandbytes"})(folder)
    _zeros(DOWN_PROJ, 16, 6, dtype=np.int8)(folder)  # one number a byte
    with pytest.raises(CheckpointError, match="require 12 along axis 1"):
        read_checkpoint(folder)
    packed = {O_PROJ: np.zeros((16 * 12 // 2, 1), np.uint8), DOWN_PROJ: np.zeros((16, 12 // 2), np.uint8)}
    _weights(lambda w: w.update(packed))(folder)
    assert read_checkpoint(folder).shapes[O_PROJ] == [16, 12]
    _zeros("model.layers.1.mlp.up_proj.weight", 24, 1, dtype=np.uint8)(folder)
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj.*removes"):
        read_checkpoint(folder)


def test_what_a_quantizer_adds_to_some_layers_is_none_of_ours(folder: Path) -> None:
    """It leaves a layer as it is, and gives another more tensors: bitsandbytes' states, scales of the KV cache."""
    _edit(quantization_config={"quant_method": "bitsandbytes"})(folder)
    for name in ("model.layers.2.mlp.down_proj.weight.absmax", "model.layers.2.self_attn.attn.k_scale"):
        _zeros(name, 3)(folder)
    _weights(lambda w: w.update({f"{DOWN_PROJ}_packed": w.pop(DOWN_PROJ)}))(folder)
    read_checkpoint(folder)


@pytest.mark.parametrize(
    ("bits", "dtype", "stated"),
    [
        (4, np.int32, {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 4}}}}),
        (8, np.int32, {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 8}}}}),
        (4, np.uint8, {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 4}}}}),
        (4, np.int32, {"quant_method": "gptq", "bits": 4}),
    ],
)
def test_parameters_of_packed_weights_are_counted_before_they_were_packed(
    bits: int, dtype: Any, stated: dict[str, Any], tmp_path: Path
) -> None:
    """Of dense and of pruned folders by one rule, without scales."""
    name = "qweight" if stated["quant_method"] == "gptq" else "weight_packed"
    for origin, widths in ((None, (2, 16)), ("owner/base", (1, 8))):
        folder = write_model(tmp_path / str(origin), widths=[widths, widths], origin=origin)
        before = describe_model(str(folder)).parameters
        if name == "qweight" and origin:
            continue  # a family has no such tensors
        weights = load_file(folder / "model.safetensors")
        for tensor in [tensor for tensor in weights if tensor.endswith("_proj.weight")]:
            rows, columns = weights.pop(tensor).shape
            module = tensor.removesuffix(".weight")
            packed = columns * bits // (8 * np.dtype(dtype).itemsize)
            weights[f"{module}.{name}"] = np.zeros((rows, packed), dtype)
            weights[f"{module}.{'scales' if name == 'qweight' else 'weight_scale'}"] = np.zeros((rows, 1), np.float32)
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        edit_json(folder / "config.json", quantization_config=stated)
        assert describe_model(str(folder)).parameters == before
