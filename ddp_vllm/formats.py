"""Reads the formats in which other tools state the widths of layers in config.json.

| key | written by | its content |
|---|---|---|
| `per_layer_config` | transformers, NVIDIA's AnyModel with `base_architecture` | layer → own fields, and `skip` |
| `block_configs` | NVIDIA's Puzzletron and Nemotron-NAS | per layer `attention` and `ffn`, or `subblock_configs` |
| `drop_attn_list`, `drop_mlp_list` | LLM-Drop | removed blocks: their layers, or a truth value per layer |

An entry becomes the fields of config.json that a layer has for itself, and from them its widths.
NVIDIA's tools also write keys that they do not use, as null, false, or an object of these.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Annotated, Any, TypedDict

from msgspec import Meta

from ddp_vllm.dimensions import attended, widths_of
from ddp_vllm.errors import ModelError, reading
from ddp_vllm.families import FAMILIES, check_supported, pruned_config
from ddp_vllm.remote_code.files import WEIGHTS, short
from ddp_vllm.remote_code.tensors import Config
from ddp_vllm.remote_code.widths import LayerWidths, Widths, dense_heads, head_dim
from ddp_vllm.schema import checked

# LLM-Drop's keys -> the blocks that they remove
DROPPED = {"drop_attn_list": "attn", "drop_mlp_list": "mlp"}
FORMATS = ("per_layer_config", "block_configs", *DROPPED)
# in the config that vLLM gets: the folder may have tensors that are left out
IN_PLACE = "ddp_opened_in_place"
SUBBLOCKS = "subblocks_safetensors"  # folder in which Puzzletron keeps a file for every block
_OTHERS = (
    *("base_architecture", "anymodel_arch_info", "architectures", "auto_map"),
    *("allow_global_per_layer_attribute_access", "serialize_explicit_per_layer_config"),
)
NEMOTRON_NAS = "nemotron-nas"  # a model type whose layers are Llama's
HEADS, KV_HEADS, WIDTH = "num_attention_heads", "num_key_value_heads", "intermediate_size"
_Size = Annotated[int, Meta(ge=0, le=10_000_000)] | None
AGAIN = "write the checkpoint again with the tool that made it"


class _Layer(TypedDict, total=False):
    num_attention_heads: _Size
    num_key_value_heads: _Size
    intermediate_size: _Size
    skip: list[str] | None


_SKIPPED = {"attention": "attn", "self_attn": "attn", "mlp": "mlp", "ffn": "mlp"}
_RENAMED = {  # field of a block's part -> field of config.json
    "num_query_heads": HEADS, "num_heads": HEADS, "num_kv_heads": KV_HEADS, "qk_head_dim": "head_dim",
    "v_head_dim": "head_dim",
}  # fmt: skip
# keys of a part that change no size; those from n_heads_in_group on are read by themselves
_NO_FIELDS = (
    *("no_op", "kind", "name", "weights_precision", "use_prefill_window_in_sink_attention"),
    *("n_heads_in_group", "ffn_mult", "sliding_window_size", "window_length", "gated"),
)


def block_files(folder: Path) -> list[Path]:
    """Return the files of Puzzletron's blocks, which are in a subfolder; none if the model has weight files."""
    return [] if any(folder.glob(WEIGHTS)) else sorted((folder / SUBBLOCKS).glob("*.safetensors"))


def base_type(config: Config) -> str:
    """Return the model type of the dense model that a tool pruned."""
    base = str(config.get("base_architecture") or "").removesuffix("ForCausalLM")
    model_type = next((kind for kind, name in FAMILIES.items() if name == base), str(config.get("model_type")))
    return "llama" if model_type == NEMOTRON_NAS else model_type


def dense_config(config: Config) -> dict[str, Any]:
    """Return a supported family's config of the model that a tool pruned, without the tool's own
    keys.

    Sizes that only the blocks state are 1; `enclosing` raises them. Raises: ModelError.
    """
    dense = {key: value for key, value in config.items() if key not in (*FORMATS, *_OTHERS)}
    dense["model_type"] = base_type(config)
    if any(config.get(key) for key in FORMATS):
        left_out = (WIDTH, KV_HEADS) if config.get("block_configs") else (WIDTH,)
        dense |= {key: 1 for key in left_out if config.get(key) is None}
    check_supported(dense)
    return dense


def stated_layers(config: Config, dense: Config) -> list[LayerWidths] | None:
    """Return the widths that config.json states for each layer; None if it states none. Raises:
    ModelError."""
    number, dropped = dense["num_hidden_layers"], dict[int, set[str]]()
    fields: dict[int, dict[str, Any]] = {}
    with reading("config.json", ModelError, AGAIN):
        for key, block in DROPPED.items():
            for place, entry in enumerate(config.get(key) or ()):
                if entry is not False:
                    dropped.setdefault(place if entry is True else entry, set()).add(block)
        if layers := config.get("per_layer_config"):
            fields = {int(name): dict(entry) for name, entry in layers.items()}
        elif blocks := config.get("block_configs"):
            if len(blocks) != number:
                raise ModelError(f"config.json: block_configs has {len(blocks)} entries for {number} layers")
            fields = {index: _fields(block, dense, index) for index, block in enumerate(blocks)}
        if wrong := {*fields, *dropped} - {*range(number)}:
            raise ModelError(f"config.json states widths of layer {short(wrong.pop())}, of {number} layers")
        if fields or dropped:
            return [_widths(index, fields.get(index, {}), dense, dropped.get(index, set())) for index in range(number)]
    return None


def _fields(block: Mapping[str, Any], dense: Config, index: int) -> dict[str, Any]:
    """Return an entry of `block_configs` in the fields of `per_layer_config`.
    Raises: ModelError."""
    parts = [(kind, block[kind]) for kind in ("attention", "ffn") if block.get(kind)]
    parts += [(str(part.get("kind")), part) for part in block.get("subblock_configs") or () if part]
    kinds = [kind for kind, _ in parts]
    others = [kind for kind in kinds if kind not in _SKIPPED]
    others += [f"several parts of kind {kind}" for kind in kinds if kinds.count(kind) > 1]
    if block.get("parallel_blocks"):
        others.append("parallel_blocks")
    if others:
        what = short(others[0])
        raise ModelError(f"config.json: layer {index} of block_configs has {what}, which no supported family has")
    fields: dict[str, Any] = {"skip": [kind for kind, part in parts if part.get("no_op")]}
    for part in [part for _, part in parts if not part.get("no_op")]:
        used = {key: value for key, value in part.items() if key not in _NO_FIELDS and _is_set(value)}
        fields |= {_RENAMED.get(key, key): value for key, value in used.items()}
        if part.get("gated") is False:
            fields["gated"] = False
        if group := part.get("n_heads_in_group"):
            if dense[HEADS] % group:
                fault = f"n_heads_in_group {group}, which does not divide {dense[HEADS]} heads"
                raise ModelError(f"config.json: layer {index} has {fault}")
            fields[KV_HEADS] = dense[HEADS] // group
        if (factor := part.get("ffn_mult")) is not None and part.get(WIDTH) is None:
            channels = int(2 * factor * dense["hidden_size"] / 3)
            fields[WIDTH] = ceil(channels / 256) * 256  # as in Nemotron-NAS's own code
        window = part.get("sliding_window_size") or part.get("window_length")
        if window and attended(dense, 1 << 40)[index] != (1 << 40 if window == "full" else window):
            fields["sliding_window"] = window
    return fields


def _is_set(value: Any) -> bool:
    """Tell whether a tool uses a key with this value."""
    if isinstance(value, dict):
        return any(map(_is_set, value.values()))
    return value is not None and value is not False and value not in ([], "")


def _widths(index: int, fields: Mapping[str, Any], dense: Config, dropped: set[str]) -> LayerWidths:
    """Return the widths of a layer from its own fields of config.json; dropped: removed blocks.
    Raises: ModelError."""
    checked(fields, _Layer, f"config.json: layer {index}")
    stated = {key: value for key, value in fields.items() if value is not None}
    skipped = {_SKIPPED.get(name, name) for name in stated.pop("skip", ())} | dropped
    others = {key for key, value in stated.items() if value != _dense_value(dense, key)} - {HEADS, KV_HEADS, WIDTH}
    if others := others | skipped - {"attn", "mlp"}:
        raise ModelError(
            f"config.json: layer {index} has {short(min(others))} of its own; supported are heads, MLP channels, and "
            "blocks that are left out"
        )
    sizes = {HEADS: dense[HEADS], KV_HEADS: len(dense_heads(dense)), WIDTH: dense[WIDTH]} | stated
    heads, kv_heads = sizes[HEADS], sizes[KV_HEADS]
    has_heads = heads and kv_heads and "attn" not in skipped
    return LayerWidths(
        query_heads_per_kv_head=groups(heads, kv_heads, f"config.json: layer {index}") if has_heads else (),
        intermediate_size=0 if "mlp" in skipped else sizes[WIDTH],
    )


def _dense_value(dense: Config, key: str) -> Any:
    """Return the value that a field has in layers that do not state it."""
    if key == "hidden_act":
        return dense.get("hidden_activation") or dense.get("hidden_act") or "silu"
    return head_dim(dense) if key == "head_dim" else dense.get(key)


def groups(heads: int, kv_heads: int, where: str) -> tuple[int, ...]:
    """Return the query heads of each KV head, as every KV head has equally many. Raises: ModelError
    if they do not divide."""
    if heads and kv_heads and heads % kv_heads == 0:
        return (heads // kv_heads,) * kv_heads
    raise ModelError(
        f"{where} has {heads} query heads for {kv_heads} KV heads, and nothing says which share one; prune whole "
        "groups of query heads"
    )


def enclosing(dense: Config, layers: Sequence[LayerWidths]) -> dict[str, Any]:
    """Return the config with sizes that no layer exceeds: some tools write those of one pruned
    layer into it."""
    # before the number of heads, from which it may be derived, changes
    config = {**dense, "head_dim": head_dim(dense)}
    least = max([len(dense_heads(dense)), *(layer.num_kv_heads for layer in layers)])
    most = max([dense[HEADS], *(layer.num_query_heads for layer in layers)])
    # transformers requires a divisor of the hidden size of some families
    if (heads := most) != dense[HEADS]:
        hidden = dense["hidden_size"]
        heads = next((count for count in range(most, hidden + 1) if hidden % count == 0), most)
    kv_heads = next((count for count in range(least, heads + 1) if heads % count == 0), heads)
    width = max([dense[WIDTH], *(layer.intermediate_size for layer in layers)])
    return config | {HEADS: heads, KV_HEADS: kv_heads, WIDTH: width}


def grown(dense: Config, enclosed: Config) -> Iterator[str]:
    """Yield a phrase for each size that `enclosing` raised from a stated one."""
    for key in (HEADS, KV_HEADS, WIDTH):
        if dense.get(key) not in (None, 1, enclosed.get(key)):
            size = enclosed[key]
            yield f"{key} is {dense[key]} in config.json, but a layer has more: {size}, taken as the dense size"


def opened_in_place(config: Config) -> dict[str, Any] | None:
    """Return the config of a pruned model for another tool's config that states the widths of its
    layers.

    None if it states none, if all layers are alike, if ddp-vllm wrote it, or for another family,
    which is vLLM's own business. Raises: ModelError.
    """
    if "ddp_layers" in config or not any(config.get(key) for key in FORMATS):
        return None
    if base_type(config) not in FAMILIES:
        check_drops_nothing(config)
        return None
    # vLLM's classes load them
    quantized = {key: config[key] for key in ("quantization_config",) if config.get(key)}
    dense = dense_config({key: value for key, value in config.items() if key not in quantized})
    if not (layers := stated_layers(config, dense)):
        return None
    widths = widths_of(enclosed := enclosing(dense, layers))
    pruned = replace(widths, layers=tuple(layers))
    return None if pruned.layers == widths.layers else pruned_config(enclosed, pruned) | quantized | {IN_PLACE: True}


def check_drops_nothing(config: Config) -> None:
    """Refuse the config of a stock class that states removed blocks. Raises: ModelError."""
    skip = "skip" if "skip" in str(config.get("per_layer_config")) else None
    if key := next((key for key in DROPPED if config.get(key)), skip):
        raise ModelError(f"{key} removes whole blocks, which no stock class can lack; prune channels instead")


def is_leftover(widths: Widths, name: str, shape: Sequence[int]) -> bool:
    """Return whether a tensor is left out: one of a removed block, such as its norm, or a matrix of
    length 0."""
    return 0 in shape or widths.is_removed(name)


def check_states_no_widths(config: Config) -> None:
    """Refuse the config of a model that another tool pruned, in a verb for dense models. Raises:
    ModelError."""
    if opened_in_place(config) is not None:
        key = next(key for key in FORMATS if config.get(key))
        raise ModelError(f"another tool pruned it: its config.json has {key}; run ddp-vllm convert and use its output")
