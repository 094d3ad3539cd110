"""The widths of a non-uniform model: one entry a layer, checked before anything is allocated.

`config.json` keeps every stock field at its dense value and adds one key:

    "ddp_layers": [{"query_heads_per_kv_head": [3, 2, 1], "intermediate_size": 1203}, …]

One entry a layer. `query_heads_per_kv_head` has one number for each kept KV head: the query heads it still
serves, next to each other in `q_proj`; an empty list means the layer has no attention any more.
`intermediate_size` 0 means it has no MLP. Layers with routed experts carry `expert_intermediate_sizes`,
one width an expert, 0 for an expert that is gone: the router still scores it, tokens sent there get nothing from it.
In such a model nothing else is pruned: attention, router, shared experts and MLPs without experts stay dense.

This file travels inside checkpoints: standard library only.
"""

import json
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EXPERT_COUNT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
_REQUIRED = ("num_hidden_layers", "num_attention_heads", "intermediate_size")
_OPTIONAL = (
    "num_key_value_heads", "hidden_size", "head_dim", "moe_intermediate_size", "sliding_window", *EXPERT_COUNT_KEYS
)  # fmt: skip
EXPERT_PROJECTIONS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))  # the second is Mixtral's
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.(.+)\.(weight|bias)$")
_EXPERT = re.compile(r"(?:^|\.)experts\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)$")
_PACKED = ("U8", "torch.uint8")  # bitsandbytes' 4 bits, NVFP4
_INPUT_SIDE = ("o_proj", "down_proj", "w2")  # pruned along their inputs, the last axis of the weight


class WidthsError(ValueError):
    """The widths contradict the dense model, or the tensors contradict the widths."""


@dataclass(frozen=True, kw_only=True)
class LayerWidths:
    """What one decoder layer has left."""

    query_heads_per_kv_head: tuple[int, ...]
    """Query heads left for each kept KV head, in order; empty: no attention."""
    intermediate_size: int
    """MLP channels left; 0: no MLP, or routed experts in its place."""
    expert_intermediate_sizes: tuple[int, ...] | None = None
    """Channels left in each routed expert; None: the layer has no routed experts."""

    @property
    def num_query_heads(self) -> int:
        return sum(self.query_heads_per_kv_head)

    @property
    def num_kv_heads(self) -> int:
        return len(self.query_heads_per_kv_head)

    def splits_over(self, num_ranks: int) -> bool:
        """Say whether tensor parallelism over `num_ranks` devices needs no padding.

        Then every device has the same number of whole KV heads, each with equally many query heads (or shares one KV
        head with others and has its part of the query heads), and of channels. Experts may have any width. One device
        takes anything.
        """
        if num_ranks == 1 or self.num_kv_heads == 0:
            return self.intermediate_size % num_ranks == 0
        group, copies = self.query_heads_per_kv_head[0], num_ranks // self.num_kv_heads
        if self.num_kv_heads >= num_ranks:
            split = self.num_kv_heads % num_ranks == 0
        else:
            split = num_ranks % self.num_kv_heads == 0 and group % copies == 0
        return split and len(set(self.query_heads_per_kv_head)) == 1 and self.intermediate_size % num_ranks == 0

    def to_json(self) -> dict[str, Any]:
        """Return the entry of `ddp_layers` that `parse_layers` reads back."""
        entry: dict[str, Any] = {
            "query_heads_per_kv_head": list(self.query_heads_per_kv_head),
            "intermediate_size": self.intermediate_size,
        }
        if self.expert_intermediate_sizes is not None:
            entry["expert_intermediate_sizes"] = list(self.expert_intermediate_sizes)
        return entry


def count_experts(config: Mapping[str, Any]) -> int:
    """Return the number of routed experts of a layer, from a config as plain data; 0 for a dense model."""
    return next((config[key] for key in EXPERT_COUNT_KEYS if config.get(key)), 0)


def dense_kv_heads(config: Mapping[str, Any]) -> int:
    """Return the KV heads of a layer of the dense model."""
    return int(config.get("num_key_value_heads") or config["num_attention_heads"])


def dense_expert_size(config: Mapping[str, Any]) -> int:
    """Return the channels of a routed expert of the dense model."""
    return int(config.get("moe_intermediate_size") or config["intermediate_size"])


def is_routed(config: Mapping[str, Any], index: int) -> bool:
    """Say whether layer `index` has routed experts; each family states it by some of these keys."""
    return (
        count_experts(config) > 0
        and index not in (config.get("mlp_only_layers") or ())
        and (index + 1) % (config.get("decoder_sparse_step") or 1) == 0
        and index >= (config.get("first_k_dense_replace") or 0)
        and index % (config.get("moe_layer_freq") or 1) == 0
    )


def tensor_parallel_sizes(layers: Sequence[LayerWidths], config: Mapping[str, Any]) -> list[int]:
    """Return the tensor-parallel sizes at which vLLM takes the model as it is and no layer needs padding.

    vLLM asks that the heads of the dense model, and the channels of its experts, divide.
    """
    heads, experts = config["num_attention_heads"], count_experts(config)
    channels = dense_expert_size(config) if experts else 0
    return [
        size
        for size in range(1, heads + 1)
        if heads % size == 0 and channels % size == 0 and all(layer.splits_over(size) for layer in layers)
    ]


def parse_layers(config: Mapping[str, Any]) -> tuple[LayerWidths, ...]:
    """Read and check `ddp_layers` against the dense fields of the same `config.json`.

    Raises: WidthsError, naming the layer, the value and its limit.
    """
    for name in (*_REQUIRED, *(name for name in _OPTIONAL if config.get(name))):
        size = config.get(name)
        if type(size) is not int or size < 1:
            raise WidthsError(f"config.json: {name} is {size!r}, not a positive integer; run ddp-vllm apply again")
    entries, num_layers = config.get("ddp_layers"), config["num_hidden_layers"]
    if not isinstance(entries, Sequence) or isinstance(entries, str):
        raise WidthsError("config.json: ddp_layers must be a list with one entry a layer; run ddp-vllm apply again")
    if len(entries) != num_layers:
        raise WidthsError(
            f"config.json: ddp_layers has {len(entries)} entries for {num_layers} layers; run ddp-vllm apply again"
        )
    kinds = config.get("layer_types")
    if kinds is not None and (not isinstance(kinds, Sequence) or isinstance(kinds, str) or len(kinds) != num_layers):
        raise WidthsError(f"config.json: layer_types must name a type for each of {num_layers} layers, or be left out")
    if count_experts(config):
        check_routing(config)
    return tuple(_parse_layer(index, entry, config) for index, entry in enumerate(entries))


def check_routing(config: Mapping[str, Any]) -> None:
    """Refuse a mixture of experts that cannot be routed, or whose weights are not plain numbers.

    Fewer experts left in a layer than `num_experts_per_tok` is legal: the router scores all of the dense model's, and
    what it sends to a removed one adds nothing. Raises: WidthsError.
    """
    chosen, num_experts = config.get("num_experts_per_tok"), count_experts(config)
    if isinstance(chosen, bool) or not isinstance(chosen, int) or not 1 <= chosen <= num_experts:
        raise WidthsError(
            f"config.json: num_experts_per_tok is {chosen!r}, but a layer has {num_experts} experts to choose from; "
            f"it must be an integer in 1…{num_experts}"
        )
    if config.get("quantization_config"):
        raise WidthsError(
            "the mixture of experts is quantised; experts of different widths are supported in bfloat16, float16 and "
            "float32: use the unquantised checkpoint"
        )


def _parse_layer(index: int, entry: Any, config: Mapping[str, Any]) -> LayerWidths:
    where = f"config.json: ddp_layers[{index}]"
    if not isinstance(entry, Mapping):
        raise WidthsError(f"{where} is {entry!r}, not an object; run ddp-vllm apply again")
    unknown = set(entry) - {"query_heads_per_kv_head", "intermediate_size", "expert_intermediate_sizes"}
    if unknown:
        raise WidthsError(f"{where} has the unknown key {min(map(str, unknown))!r}; a newer ddp-vllm wrote it?")
    num_heads = config["num_attention_heads"]
    num_kv_heads = dense_kv_heads(config)
    heads = _integers(
        entry.get("query_heads_per_kv_head"), f"{where}.query_heads_per_kv_head", 1, num_heads // num_kv_heads
    )
    if len(heads) > num_kv_heads:
        raise WidthsError(f"{where}.query_heads_per_kv_head has {len(heads)} KV heads, the dense model {num_kv_heads}")
    dense_width = config["intermediate_size"]
    width = _integer(entry.get("intermediate_size"), f"{where}.intermediate_size", 0, dense_width)
    experts = None
    if entry.get("expert_intermediate_sizes") is not None:
        name = f"{where}.expert_intermediate_sizes"
        experts = _integers(entry["expert_intermediate_sizes"], name, 0, dense_expert_size(config))
        if len(experts) != count_experts(config):
            raise WidthsError(
                f"{name} has {len(experts)} widths for {count_experts(config)} experts; run ddp-vllm apply again"
            )
    widths = LayerWidths(query_heads_per_kv_head=heads, intermediate_size=width, expert_intermediate_sizes=experts)
    if count_experts(config):
        _check_only_experts(where, widths, is_routed(config, index), num_heads, num_kv_heads, dense_width)
    return widths


def _check_only_experts(
    where: str, widths: LayerWidths, routed: bool, num_heads: int, num_kv_heads: int, dense_width: int
) -> None:
    """In a mixture of experts, all but the routed experts must be as in the dense model."""
    if routed != (widths.expert_intermediate_sizes is not None):
        has = "has routed experts, but no" if routed else "has no routed experts, but"
        raise WidthsError(f"{where}: the layer {has} expert_intermediate_sizes; run ddp-vllm apply again")
    if widths.query_heads_per_kv_head != (num_heads // num_kv_heads,) * num_kv_heads:
        raise WidthsError(f"{where}: in a mixture of experts only the experts are pruned, attention must stay dense")
    if widths.intermediate_size != (0 if routed else dense_width):
        raise WidthsError(
            f"{where}.intermediate_size is {widths.intermediate_size}; in a mixture of experts it must be "
            f"{0 if routed else dense_width} in this layer, because only experts are pruned"
        )


def _integer(value: Any, where: str, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise WidthsError(f"{where} is {value!r}, not an integer; run ddp-vllm apply again")
    if not low <= value <= high:
        raise WidthsError(f"{where} is {value}, outside {low}…{high} of the dense model; run ddp-vllm apply again")
    return value


def _integers(values: Any, where: str, low: int, high: int) -> tuple[int, ...]:
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise WidthsError(f"{where} is {values!r}, not a list of integers; run ddp-vllm apply again")
    return tuple(_integer(value, f"{where}[{i}]", low, high) for i, value in enumerate(values))


def expected_width(name: str, layers: Sequence[LayerWidths], head_dim: int) -> tuple[int, int] | None:
    """Return the axis of tensor `name` that pruning changes and its length, or None if pruning leaves it alone.

    `name` ends as in the dense family: `layers.3.self_attn.q_proj.weight`, `layers.3.mlp.experts.7.up_proj.weight`.
    A block that is gone has length 0. Raises: WidthsError for a layer or expert that the widths do not know.
    """
    match = _LAYER.search(name)
    if match is None:
        return None
    if int(match[1]) >= len(layers):
        raise WidthsError(f"tensor {name} is of layer {match[1]}, but ddp_layers has {len(layers)} entries")
    layer, module, kind = layers[int(match[1])], match[2], match[3]
    projection = module.rsplit(".", 1)[-1]
    if expert := _EXPERT.search(module):
        sizes = layer.expert_intermediate_sizes or ()
        if int(expert[1]) >= len(sizes):
            raise WidthsError(f"tensor {name} is of expert {expert[1]}, but ddp_layers has {len(sizes)} in that layer")
        length = sizes[int(expert[1])]
    elif any(other.expert_intermediate_sizes is not None for other in layers):
        return None  # in a mixture of experts only the experts are pruned
    elif projection in ("q_proj", "o_proj"):
        length = layer.num_query_heads * head_dim
    elif projection in ("k_proj", "v_proj"):
        length = layer.num_kv_heads * head_dim
    elif projection == "qkv_proj":
        length = (layer.num_query_heads + 2 * layer.num_kv_heads) * head_dim
    elif module in ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"):
        length = layer.intermediate_size
    elif module == "mlp.gate_up_proj":
        length = 2 * layer.intermediate_size
    else:
        return None
    if projection not in _INPUT_SIDE or length == 0:
        return 0, length
    return (1, length) if kind == "weight" else None  # an output bias is as long as the hidden state


def check_shapes(
    tensors: Iterable[tuple[str, Sequence[int], str]], layers: Sequence[LayerWidths], head_dim: int
) -> Iterator[str]:
    """Yield each tensor name after checking its shape against the widths.

    tensors: name, shape and number format, as safetensors or torch write it. Packed quantised weights, whose bytes
        hold several numbers each, may have any shape: their quantiser checks it.
    Raises: WidthsError, naming the tensor, its length and the length the widths ask for.
    """
    for name, shape, dtype in tensors:
        expected = expected_width(name, layers, head_dim)
        if expected is not None:
            axis, length = expected
            if length == 0:
                raise WidthsError(
                    f"tensor {name} belongs to a block that ddp_layers says is gone; run ddp-vllm apply again"
                )
            if dtype not in _PACKED and (axis >= len(shape) or shape[axis] != length):
                raise WidthsError(
                    f"tensor {name} has shape {list(shape)}, but ddp_layers asks for {length} along axis {axis}; "
                    "config.json and the weights are of different checkpoints"
                )
        yield name


def check_experts(names: Iterable[str], layers: Sequence[LayerWidths]) -> None:
    """Check that every expert with a width has its three projections.

    Raises: WidthsError, naming the first tensor that is missing.
    """
    found: dict[tuple[int, int], set[str]] = {}
    for name in names:
        match = _LAYER.search(name)
        if match and match[3] == "weight" and (expert := _EXPERT.search(match[2])):
            found.setdefault((int(match[1]), int(expert[1])), set()).add(expert[2])
    styles = (style for style in EXPERT_PROJECTIONS if all(parts <= set(style) for parts in found.values()))
    projections = next(styles, EXPERT_PROJECTIONS[0])
    for index, layer in enumerate(layers):
        for expert_id, width in enumerate(layer.expert_intermediate_sizes or ()):
            missing = [name for name in projections if name not in found.get((index, expert_id), ())]
            if width and missing:
                raise WidthsError(
                    f"layer {index} lacks the tensor experts.{expert_id}.{missing[0]}.weight, though ddp_layers gives "
                    f"that expert {width} channels; copy the whole folder or run ddp-vllm apply again"
                )


def folder_tensors(folder: Path) -> Iterator[tuple[str, list[int], str]]:
    """Yield (name, shape, number format) from the headers of all safetensors files of a local checkpoint.

    Weights are not read. The masks file is not part of them and is left out.
    """
    for path in sorted(folder.glob("model*.safetensors")):
        with open(path, "rb") as file:
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            if not 2 <= length <= 100_000_000:
                raise WidthsError(f"{path} is no safetensors file: its header says {length} bytes; download it again")
            try:
                header = json.loads(file.read(length))
            except ValueError as error:
                raise WidthsError(f"{path} is no safetensors file: its header is no JSON; download it again") from error
        if not isinstance(header, dict):
            raise WidthsError(f"{path} is no safetensors file: its header is no object; download it again")
        for name, entry in header.items():
            if name != "__metadata__":
                yield name, entry["shape"], entry["dtype"]
