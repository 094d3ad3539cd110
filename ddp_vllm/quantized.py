"""Reads the shapes that weights had before they were quantized, from names, shapes and dtypes on disk.

| format | tensor on disk | shape on disk of a weight `[out, in]` |
|---|---|---|
| compressed-tensors, FP_quant | `weight_packed`, `qweight` of bytes | `[out, in / numbers per element]` |
| NVFP4 of ModelOpt, Quark | `weight` of bytes | `[out, in / 2]` |
| GPTQ, AutoRound | `qweight` of int32 | `[in · bits / 32, out]` |
| AWQ | `qweight` of int32 | `[in, out · bits / 32]` |
| bitsandbytes | `weight`, with a `weight.quant_state.*` | `[out · in / numbers per element, 1]` |
| MXFP4 | `*_blocks` of bytes | `[…, in / 2]` |
| BitNet | `weight` of bytes | `[out / 4, in]` |

FP8 and 8-bit integers are stored one per element. Scales, zero points and other side tensors are no weights.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ddp_vllm.dimensions import is_copied_head, quantization_of
from ddp_vllm.remote_code.files import BITS, WidthsError, short
from ddp_vllm.remote_code.tensors import Config
from ddp_vllm.remote_code.widths import Widths, states_widths

_PACKED = re.compile(r"weight_packed|qweight|.*_blocks")
_SIDE = re.compile(  # the last part of a side tensor's name
    r"(weight|input|output|activation|[qkv]|kv|prob|.*_proj)_(scale(_inv|_2|_ub)?|global_scale|zero_point|shape|g_idx)"
    r"|(.*_)?scales|pre_quant_scale|qzeros|g_idx|(nested_)?(absmax|quant_map)|bitsandbytes__\w+|SCB|weight_format"
)
_MASK = re.compile(r"bias|causal_mask")  # of attention, which GPT-NeoX, GPT-J and CodeGen store as bytes
_INTEGERS = ("U8", "U16", "I16", "U32", "I32")  # I8 is a weight as it is, those of 64 bits are no weights at all
_STATE = ".quant_state.bitsandbytes__"
_BITS_OF_BYTES = {"bitnet": 2, **dict.fromkeys(("compressed-tensors", "bitsandbytes", "modelopt", "mxfp4"), 4)}
_BITS_OF_BYTES |= dict.fromkeys(("modelopt_fp4", "fp_quant", "quark", ""), 4)  # the last without a config: NVFP4
_BY_COLUMNS = ("awq", "auto_awq")  # methods whose `qweight` packs the outputs
Tensor = tuple[str, Sequence[int], str]
"""Name, shape and dtype on disk."""


class UnknownFormatError(WidthsError):
    """A quantized tensor whose bits per weight are not known."""


def unpacked(tensors: Iterable[Tensor], config: Config, widths: Widths | None = None) -> dict[str, list[int]]:
    """Return the shapes of weights before they were quantized, without side tensors and without the
    copy of the embedding that some programs store as the output head.

    widths: of a pruned model, which state the shapes of a family's projections in any format.
    Raises: UnknownFormatError for a packed tensor whose bits per weight are not known.
    """
    tensors = [tensor for tensor in tensors if not is_copied_head(config, tensor[0])]
    stated = quantization_of(config)
    if states_widths(config) or not (stated or any(BITS.get(dtype, 8) <= 8 for *_, dtype in tensors)):
        return {name: [*shape] for name, shape, _ in tensors}
    quantization, plain = stated if isinstance(stated, Mapping) else {}, dict[str, list[int]]()
    with_state = {name.partition(_STATE)[0] for name, *_ in tensors if _STATE in name}
    for name, shape, dtype in tensors:
        module, _, kind = name.rpartition(".")
        if _SIDE.fullmatch(kind):
            continue
        known = f"{module}.weight" if kind in ("weight_packed", "qweight") else name
        if required := _by_widths(known, widths):
            plain[known] = required
        elif name in with_state:
            plain[name] = [shape[0] * BITS[dtype] // 4, *shape[1:]]
        elif _PACKED.fullmatch(kind) or (len(shape) > 1 and dtype in _INTEGERS and not _MASK.fullmatch(kind)):
            plain[known] = _unpacked(name, shape, dtype, quantization)
        else:
            plain[name] = [*shape]
    return plain


def _by_widths(name: str, widths: Widths | None) -> list[int] | None:
    """Return the shape of a family's projection; None for any other tensor."""
    if not widths or not widths.hidden_size or not name.endswith(".weight"):
        return None
    place = widths.find(name)
    if not place or not place.length:
        return None
    return [place.length, widths.hidden_size] if place.axis == 0 else [widths.hidden_size, place.length]


def _unpacked(name: str, shape: Sequence[int], dtype: str, quantization: Mapping[str, Any]) -> list[int]:
    """Return the shape of a packed weight. Raises: UnknownFormatError."""
    kind, method = name.rpartition(".")[2], str(quantization.get("quant_method") or "")
    bits = _bits(quantization) if dtype == "I32" else _BITS_OF_BYTES.get(method) if dtype == "U8" else None
    if not bits or not (_PACKED.fullmatch(kind) or (kind == "weight" and dtype == "U8")):
        raise UnknownFormatError(
            f"tensor {short(name)} of dtype {dtype} is quantized by {method or 'an unknown method'}, and how many bits "
            "a weight has is not known"
        )
    if kind == "qweight" and dtype == "I32":
        if method in _BY_COLUMNS or "awq" in str(quantization.get("packing_format")):
            return [shape[1] * 32 // bits, shape[0]]
        return [shape[1], shape[0] * 32 // bits]
    per_element = BITS[dtype] // bits
    if method == "bitnet":
        return [shape[0] * per_element, *shape[1:]]
    return [*shape[:-1], shape[-1] * per_element]


def _bits(quantization: Mapping[str, Any]) -> int | None:
    """Return the bits of a weight in int32; None if they are not stated, or differ between modules."""
    parts = [quantization]
    for key in ("dynamic", "extra_config"):  # of GPTQModel and AutoRound, by module
        parts += [part for part in _values(quantization.get(key)) if isinstance(part, Mapping)]
    for group in _values(quantization.get("config_groups")):
        packs = isinstance(group, Mapping) and group.get("format") in (None, "pack-quantized")
        parts += [part for part in (group.get("weights"),) if isinstance(part, Mapping)] if packs else []
    stated = {part[key] for part in parts for key in ("bits", "w_bit", "num_bits") if type(part.get(key)) is int}
    bits = stated.pop() if len(stated) == 1 else None
    return bits if bits and 0 < bits <= 8 else None


def _values(content: Any) -> list[Any]:
    return [*content.values()] if isinstance(content, Mapping) else []
