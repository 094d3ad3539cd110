"""Parameters of quantized folders are counted as weights, in every format that a program writes; files made by hand."""

import json
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import assert_refused, edit_json, invoke, passed
from safetensors.numpy import load_file, save_file
from written_folders import write_model

from ddp_vllm.checkpoint import read_checkpoint
from ddp_vllm.model_facts import describe_model
from ddp_vllm.remote_code.files import BITS

Tensors = dict[str, tuple[str, list[int]]]
UP = "model.layers.0.mlp.up_proj"
PLAIN: Tensors = {"model.embed_tokens.weight": ("BF16", [10, 32]), "model.norm.weight": ("BF16", [32])}
OUT, IN = 48, 32
GROUPS = {"a": {"weights": {"num_bits": 4, "type": "int"}, "input_activations": {"num_bits": 8}}}


def _of(**tensors: tuple[str, list[int]]) -> Tensors:
    return {f"{UP}.{name}": tensor for name, tensor in tensors.items()}


FP8 = _of(weight=("F8_E4M3", [OUT, IN]))
GPTQ = _of(
    qweight=("I32", [IN // 8, OUT]), qzeros=("I32", [2, OUT // 8]), scales=("F16", [2, OUT]), g_idx=("I32", [IN])
)
FORMATS: dict[str, tuple[dict[str, Any] | None, Tensors]] = {  # -> quantization_config, tensors of a weight of 48 × 32
    "NVFP4 of ModelOpt": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        _of(weight=("U8", [OUT, IN // 2]), weight_scale=("F8_E4M3", [OUT, IN // 16]), weight_scale_2=("F32", []),
            input_scale=("F32", []), k_scale=("F32", []), v_scale=("F32", [])),
    ),
    "NVFP4 without a statement in config.json": (
        None, _of(weight=("U8", [OUT, IN // 2]), weight_scale=("F8_E4M3", [OUT, 2]), weight_scale_2=("F32", []))
    ),
    "NVFP4 of compressed-tensors": (
        {"quant_method": "compressed-tensors", "config_groups": GROUPS},
        _of(weight_packed=("U8", [OUT, IN // 2]), weight_scale=("F8_E4M3", [OUT, 2]),
            weight_global_scale=("F32", [1]), input_global_scale=("F32", [1])),
    ),
    "W4A16 of compressed-tensors": (
        {"quant_method": "compressed-tensors", "config_groups": GROUPS},
        _of(weight_packed=("I32", [OUT, IN // 8]), weight_scale=("BF16", [OUT, 1]), weight_shape=("I64", [2]),
            weight_zero_point=("I32", [OUT // 8, 1]), weight_g_idx=("I32", [IN])),
    ),
    "W4A16 next to FP8, which is not packed": (
        {"quant_method": "compressed-tensors", "config_groups": {
            "a": {"format": "pack-quantized", "weights": {"num_bits": 4}},
            "b": {"format": "float-quantized", "weights": {"num_bits": 8}},
        }},
        _of(weight_packed=("I32", [OUT, IN // 8]), weight_scale=("BF16", [OUT, 1])),
    ),
    "W8A8 of compressed-tensors": (
        {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 8}}}},
        _of(weight=("I8", [OUT, IN]), weight_scale=("BF16", [OUT, 1])),
    ),
    "NF4 of bitsandbytes": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        _of(**{"weight": ("U8", [OUT * IN // 2, 1]), "weight.absmax": ("U8", [OUT]), "weight.quant_map": ("F32", [16]),
               "weight.nested_absmax": ("F32", [1]), "weight.nested_quant_map": ("F32", [256]),
               "weight.quant_state.bitsandbytes__nf4": ("U8", [90])}),
    ),
    "NF4 stored in elements of 16 bits": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        _of(**{"weight": ("BF16", [OUT * IN // 4, 1]), "weight.absmax": ("F32", [OUT]),
               "weight.quant_state.bitsandbytes__nf4": ("U8", [90])}),
    ),
    "LLM.int8 of bitsandbytes": (
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        _of(weight=("I8", [OUT, IN]), SCB=("F32", [OUT]), weight_format=("U8", [])),
    ),
    "GPTQ": ({"quant_method": "gptq", "bits": 4}, GPTQ),
    "GPTQ of 3 bits, 32 weights in three numbers": (
        {"quant_method": "gptq", "bits": 3},
        _of(qweight=("I32", [IN * 3 // 32, OUT]), qzeros=("I32", [2, OUT * 3 // 32]), scales=("F16", [2, OUT])),
    ),
    "AWQ": (
        {"quant_method": "awq", "bits": 4},
        _of(qweight=("I32", [IN, OUT // 8]), qzeros=("I32", [2, OUT // 8]), scales=("F16", [2, OUT])),
    ),
    "AutoRound in the order of AWQ": (
        {"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:auto_awq"},
        _of(qweight=("I32", [IN, OUT // 8]), qzeros=("I32", [2, OUT // 8]), scales=("F16", [2, OUT])),
    ),
    "FP8 in blocks": ({"quant_method": "fp8"}, FP8 | _of(weight_scale_inv=("F32", [1, 1]))),
    "FP8 with one scale": (
        {"quant_method": "fp8"},
        FP8 | _of(weight_scale=("F32", []), input_scale=("F32", []), input_scale_ub=("F32", [])),
    ),
    "ternary weights of BitNet": (
        {"quant_method": "bitnet"}, _of(weight=("U8", [OUT // 4, IN]), weight_scale=("BF16", [1]))
    ),
    "a causal mask of bytes in a model that is not quantized": (
        None, _of(weight=("BF16", [OUT, IN])) | {"model.layers.0.attention.bias": ("U8", [1, 1, 4, 4])}
    ),
    "a scalar in a model that is not quantized": (None, _of(weight=("BF16", [OUT, IN])) | {"model.one": ("F32", [])}),
}  # fmt: skip
FURTHER = {
    "a causal mask of bytes in a model that is not quantized": 16, "a scalar in a model that is not quantized": 1
}  # fmt: skip


def _write(folder: Path, quantization: dict[str, Any] | None, tensors: Tensors) -> Path:
    folder.mkdir()
    config: dict[str, Any] = {"model_type": "llama", "hidden_size": IN, "num_hidden_layers": 1, "vocab_size": 10}
    config |= {"quantization_config": quantization} if quantization else {}
    (folder / "config.json").write_text(json.dumps(config))
    header, end = dict[str, Any](), 0
    for name, (dtype, shape) in (PLAIN | tensors).items():
        start, end = end, end + prod(shape) * BITS[dtype] // 8
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    content = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(content).to_bytes(8, "little") + content + bytes(end))
    return folder


@pytest.mark.parametrize("case", FORMATS)
def test_weights_are_counted_and_side_tensors_are_not(case: str, tmp_path: Path) -> None:
    facts = describe_model(str(_write(tmp_path / "model", *FORMATS[case])))
    assert facts.parameters == 10 * 32 + 32 + OUT * IN + FURTHER.get(case, 0)


def test_a_quantization_that_the_config_of_the_language_model_states(tmp_path: Path) -> None:
    """As of Kimi K2.5."""
    folder = _write(tmp_path / "model", *FORMATS["W4A16 of compressed-tensors"])
    stated = json.loads((folder / "config.json").read_text())
    edit_json(folder / "config.json", quantization_config=None, text_config=stated)
    assert describe_model(str(folder)).parameters == 10 * 32 + 32 + OUT * IN
    refused = invoke("prune", folder, "--sparsity", 0.5, "-o", tmp_path / "new")
    assert_refused(refused, 3, "quantized (compressed-tensors)")


UNKNOWN: dict[str, tuple[dict[str, Any], Tensors]] = {
    "no bits": ({"quant_method": "gptq"}, GPTQ),
    "other bits in some modules": ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*down": {"bits": 8}}}, GPTQ),
    "a method of its own": ({"quant_method": "hqq"}, _of(W_q=("U8", [OUT // 2, IN]))),
    "bytes of an unknown method": ({"quant_method": "new"}, _of(weight=("U8", [OUT, IN // 2]))),
    "two formats of int32": (
        {"quant_method": "compressed-tensors", "config_groups": GROUPS | {"b": {"weights": {"num_bits": 8}}}},
        _of(weight_packed=("I32", [OUT, IN // 8])),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", UNKNOWN)
def test_an_unknown_number_of_bits_gives_no_number(case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = _write(tmp_path / case, *UNKNOWN[case])
    assert describe_model(str(folder)).parameters is None
    assert "the number of parameters is unknown: tensor" in caplog.text and UP in caplog.text


@pytest.mark.parametrize("method", ["bitsandbytes", "gptq", "awq", "hqq"])
def test_the_removed_share_of_a_quantized_model_is_that_of_its_weights(method: str, tmp_path: Path) -> None:
    """Of a family the widths state the shapes, in any format."""
    folder = write_model(tmp_path / "pruned", widths=[(1, 8), (2, 16)], origin="owner/base")
    before = read_checkpoint(folder)
    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if name.endswith("_proj.weight")]:
        rows, columns = weights.pop(name).shape
        module = name.removesuffix(".weight")
        weights |= {
            "bitsandbytes": {
                name: np.zeros((rows * columns // 2, 1), np.uint8),
                f"{name}.quant_state.bitsandbytes__nf4": np.zeros(90, np.uint8),
            },
            "gptq": {f"{module}.qweight": np.zeros((columns // 8, rows), np.int32)},
            "awq": {f"{module}.qweight": np.zeros((columns, rows // 8), np.int32)},
            "hqq": {name: np.zeros((rows, columns // 4), np.uint8)},  # of bits that nothing states
        }[method]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    edit_json(folder / "config.json", quantization_config={"quant_method": method, "bits": 4})
    after = read_checkpoint(folder)
    assert (after.num_parameters, after.removed) == (before.num_parameters, before.removed)
    assert f"{before.removed:.1%}" in passed(invoke("inspect", folder)).output
