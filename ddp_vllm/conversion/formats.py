"""Reads the formats in which other tools state the widths of layers in config.json.

| key | written by | its content |
|---|---|---|
| `per_layer_config` | transformers, NVIDIA's AnyModel with `base_architecture` | layer → own fields, and `skip` |
| `block_configs` | NVIDIA's Puzzletron and Nemotron-NAS | per layer `attention` and `ffn`, or `subblock_configs` |

An entry of either becomes the fields of config.json that a layer has for itself, and from them its widths.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import ceil
from typing import Any

from ddp_vllm.costs import attended
from ddp_vllm.errors import ModelError
from ddp_vllm.families import FAMILIES, dense_layers, family_of, pruned_config
from ddp_vllm.remote_code.files import WidthsError, short
from ddp_vllm.remote_code.tensors import MODEL_TYPE_PREFIX
from ddp_vllm.remote_code.widths import (
    EXPERT_COUNT_KEYS,
    LayerWidths,
    check_sizes,
    count_experts,
    dense_expert_size,
    dense_kv_heads,
    head_dim,
    is_routed,
)
from ddp_vllm.schema import ANY, NAME, Number, SchemaError, check

FORMATS = ("per_layer_config", "block_configs")
IN_PLACE = "ddp_opened_in_place"  # in the config that vLLM gets: the folder may have tensors that are left out
SUBBLOCKS = "subblocks_safetensors"  # folder in which Puzzletron keeps a file for every block
_OTHERS = (
    *("base_architecture", "anymodel_arch_info", "architectures", "auto_map"),
    *("allow_global_per_layer_attribute_access", "serialize_explicit_per_layer_config"),
)
_LLAMA = ("nemotron-nas",)  # model types whose layers are Llama's
HEADS, KV_HEADS, WIDTH = "num_attention_heads", "num_key_value_heads", "intermediate_size"
_SIZE, _FLAG = (None, Number(0, 10_000_000, whole=True)), (None, bool)
_LAYER = {f"{HEADS}?": _SIZE, f"{KV_HEADS}?": _SIZE, f"{WIDTH}?": _SIZE, "moe_intermediate_size?": _SIZE,
          "skip?": [NAME, 10]}  # fmt: skip
_PART = {"no_op?": _FLAG, "kind?": NAME, "n_heads_in_group?": _SIZE, "ffn_mult?": (None, Number(0, 1000)),
         "sliding_window_size?": (None, NAME, Number(1, 1e12, whole=True)), "moe?": (None, {})}  # fmt: skip
_FORM = {
    "per_layer_config?": (None, {str: {}}),
    "block_configs?": (None, [{"attention?": (None, _PART), "ffn?": (None, _PART), "parallel_blocks?": ANY,
                               "subblock_configs?": (None, [_PART, 10])}, 10_000]),
}  # fmt: skip
_SKIPPED = {"attention": "attn", "self_attn": "attn", "mlp": "mlp", "ffn": "mlp", "moe": "mlp"}
_RENAMED = {  # field of a block's part -> field of config.json
    "num_query_heads": HEADS, "num_kv_heads": KV_HEADS, "qk_head_dim": "head_dim", "v_head_dim": "head_dim",
    "top_k": "num_experts_per_tok", "shared_expert_intermediate_dim": "shared_expert_intermediate_size",
}  # fmt: skip
_IGNORED = ("no_op", "kind", "weights_precision", "n_heads_in_group", "ffn_mult", "sliding_window_size", "moe")


def dense_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a supported family's config of the model that a tool pruned, without the tool's own keys.

    Sizes that the tool leaves out are 1; `enclosing` raises them. Raises: ModelError.
    """
    base = str(config.get("base_architecture") or "").removesuffix("ForCausalLM")
    model_type = next((kind for kind, name in FAMILIES.items() if name == base), config.get("model_type"))
    dense = {key: value for key, value in config.items() if key not in (*FORMATS, *_OTHERS)}
    dense["model_type"] = "llama" if model_type in _LLAMA else model_type
    if any(config.get(key) for key in FORMATS):
        dense |= {key: 1 for key in (KV_HEADS, WIDTH) if config.get(key) is None}
    family_of(dense)
    try:
        check_sizes(dense, "hidden_size")
    except WidthsError as error:
        raise ModelError(str(error)) from None
    return dense


def stated_layers(config: Mapping[str, Any], dense: Mapping[str, Any]) -> list[LayerWidths] | None:
    """Return the widths that config.json states for each layer; None if it states none. Raises: ModelError."""
    _check(config, _FORM, "config.json")
    number = dense["num_hidden_layers"]
    if layers := config.get("per_layer_config"):
        if wrong := [name for name in layers if not (name.isdecimal() and len(name) < 6 and int(name) < number)]:
            raise ModelError(f"config.json: per_layer_config names layer {short(wrong[0])}, of {number} layers")
        fields = {int(name): dict(entry) for name, entry in layers.items()}
    elif blocks := config.get("block_configs"):
        if len(blocks) != number:
            raise ModelError(f"config.json: block_configs has {len(blocks)} entries for {number} layers")
        fields = {index: _fields(block, dense, index) for index, block in enumerate(blocks)}
    else:
        return None
    return [_widths(index, fields.get(index, {}), dense) for index in range(number)]


def _check(value: Any, form: Mapping[str, Any], place: str) -> None:
    """Refuse values that no tool writes. Raises: ModelError."""
    try:
        check(value, form, place)
    except SchemaError as error:
        raise ModelError(f"{error}; write the checkpoint again with the tool that made it") from error


def _fields(block: Mapping[str, Any], dense: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Return an entry of `block_configs` in the fields of `per_layer_config`. Raises: ModelError."""
    parts = {name: block.get(name) or {} for name in ("attention", "ffn")}
    parts |= {str(part.get("kind")): part for part in block.get("subblock_configs") or ()}
    parts |= {"moe": parts["ffn"]["moe"]} if parts["ffn"].get("moe") else {}
    if block.get("parallel_blocks") or (other := [*parts.keys() - {"attention", "ffn", "moe"}]):
        what = "parallel_blocks" if block.get("parallel_blocks") else short(min(other))
        raise ModelError(f"config.json: layer {index} of block_configs has {what}, which no supported family has")
    fields: dict[str, Any] = {"skip": [name for name, part in parts.items() if part.get("no_op")]}
    counts, expert_width = [key for key in EXPERT_COUNT_KEYS if dense.get(key)], "moe_intermediate_size"
    renamed = _RENAMED | dict.fromkeys(("num_experts", "num_local_experts"), (*counts, "num_experts")[0])
    of_experts = expert_width if dense.get(expert_width) else WIDTH
    renamed |= dict.fromkeys(("expert_intermediate_dim", "expert_intermediate_size"), of_experts)
    for part in (part for part in parts.values() if not part.get("no_op")):
        fields |= {renamed.get(key, key): value for key, value in part.items() if value and key not in _IGNORED}
    if group := parts["attention"].get("n_heads_in_group"):
        if dense[HEADS] % group:
            raise ModelError(
                f"config.json: layer {index} has n_heads_in_group {group}, which does not divide {dense[HEADS]} heads"
            )
        fields[KV_HEADS] = dense[HEADS] // group
    if (factor := parts["ffn"].get("ffn_mult")) and not fields.get(WIDTH):
        fields[WIDTH] = ceil(int(2 * factor * dense["hidden_size"] / 3) / 256) * 256  # as in Nemotron-NAS's own code
    if window := parts["attention"].get("sliding_window_size"):
        own = attended(dense, 1 << 40)[index]
        if own != (1 << 40 if window == "full" else window):
            fields["sliding_window"] = window
    return fields


def _widths(index: int, fields: Mapping[str, Any], dense: Mapping[str, Any]) -> LayerWidths:
    """Return the widths of a layer from its own fields of config.json. Raises: ModelError."""
    _check(fields, _LAYER, f"config.json: layer {index}")
    routed = is_routed(dense, index)
    skipped = {_SKIPPED.get(name, name) for name in fields.get("skip", ())}
    varying = {HEADS, KV_HEADS, WIDTH, *(("moe_intermediate_size",) if routed else ()), "skip"}
    others = [key for key in fields.keys() - varying if fields[key] != dense.get(key)]
    if others or skipped - {"attn", "mlp"}:
        what = min(others or skipped - {"attn", "mlp"})
        raise ModelError(
            f"config.json: layer {index} has {short(what)} of its own; supported are heads, MLP channels, the width of "
            "a layer's experts, and blocks that are left out"
        )
    heads, kv_heads = fields.get(HEADS) or dense[HEADS], fields.get(KV_HEADS) or dense_kv_heads(dense)
    width = fields.get(WIDTH) or dense[WIDTH]
    experts = fields.get("moe_intermediate_size") or (width if WIDTH in fields else dense_expert_size(dense))
    return LayerWidths(
        query_heads_per_kv_head=() if "attn" in skipped else groups(heads, kv_heads, f"config.json: layer {index}"),
        intermediate_size=0 if "mlp" in skipped or routed else width,
        expert_intermediate_sizes=(0 if "mlp" in skipped else experts,) * count_experts(dense) if routed else None,
    )


def groups(heads: int, kv_heads: int, where: str) -> tuple[int, ...]:
    """Return the query heads of each KV head, as every KV head has equally many.

    Raises: ModelError if they do not divide, naming two readings.
    """
    if kv_heads and heads % kv_heads == 0:
        return (heads // kv_heads,) * kv_heads
    least, more = divmod(heads, max(1, kv_heads))
    readings = [[least + 1] * more + [least] * (kv_heads - more), [least] * (kv_heads - more) + [least + 1] * more]
    raise ModelError(
        f"{where} has {heads} query heads for {kv_heads} KV heads, and nothing says which share one: it could be "
        f"{readings[0][:20]} or {readings[1][:20]}; prune whole groups of query heads"
    )


def enclosing(dense: Mapping[str, Any], layers: Sequence[LayerWidths]) -> dict[str, Any]:
    """Return the config with sizes that no layer exceeds: some tools write those of one pruned layer into it."""
    found = dict(dense)
    if not dense.get("kv_lora_rank"):
        found["head_dim"] = head_dim(dense)  # before the number of heads, from which it may be derived, changes
        least = max([dense_kv_heads(dense), *(layer.num_kv_heads for layer in layers)])
        most = max([dense[HEADS], *(layer.num_query_heads for layer in layers)])
        if (heads := most) != dense[HEADS]:  # transformers requires a divisor of the hidden size of some families
            hidden = dense["hidden_size"]
            heads = next((each for each in range(most, hidden + 1) if hidden % each == 0), most)
        kv_heads = next((each for each in range(least, heads + 1) if heads % each == 0), heads)
        found |= {HEADS: heads, KV_HEADS: kv_heads}
    sizes = [size for layer in layers for size in layer.expert_intermediate_sizes or ()]
    if sizes:
        key = "moe_intermediate_size" if dense.get("moe_intermediate_size") else WIDTH
        found[key] = max(dense[key], *sizes)
    found[WIDTH] = max([found[WIDTH], *(layer.intermediate_size for layer in layers)])
    return found


def grown(dense: Mapping[str, Any], whole: Mapping[str, Any]) -> Iterator[str]:
    """Yield a phrase for each size that `enclosing` raised from a stated one."""
    for key in (HEADS, KV_HEADS, WIDTH, "moe_intermediate_size"):
        if dense.get(key) not in (None, 1, whole.get(key)):
            yield f"{key} is {dense[key]} in config.json, but a layer has more: {whole[key]}, taken as the dense size"


def opened_in_place(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the config of a pruned model for another tool's config that states the widths of its layers.

    None if it states none, if all layers are alike, or if ddp-vllm wrote it. Raises: ModelError.
    """
    if not any(config.get(key) for key in FORMATS) or str(config.get("model_type")).startswith(MODEL_TYPE_PREFIX):
        return None
    dense = dense_config(config)
    layers = stated_layers(config, dense) or []
    whole = enclosing(dense, layers)
    return None if layers == dense_layers(whole) else pruned_config(whole, layers) | {IN_PLACE: True}
