"""Parses the widths of a pruned model's layers, and checks configs and tensors before anything is
allocated.

`config.json` keeps every stock field at its dense value and adds one key:

    "ddp_layers": [{"query_heads_per_kv_head": [3, 2, 1], "intermediate_size": 1203}, …]

One entry per layer. `query_heads_per_kv_head` has one number for each kept KV head: its kept query
heads, which are adjacent in `q_proj`. An empty list means that the attention is removed,
`intermediate_size` 0 that the MLP is. Routed experts are stated otherwise (`module_widths.py`).

This file is part of every checkpoint and imports only the standard library, `tensors` and `files`.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .files import WidthsError, short
from .tensors import QUERY_KEY_NORMS, TABLES, TensorTable, dense_type, layer_modules

EXPERT_COUNT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
_REQUIRED = ("num_hidden_layers", "num_attention_heads", "intermediate_size")
_GROUPS = ("n_group", "topk_group", "n_shared_experts")
_COUNTS = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", *EXPERT_COUNT_KEYS, *_GROUPS)
# latent attention has all of them
_LATENT = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
_SIZES = ("hidden_size", "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "vocab_size")
# upper limits of a config's sizes, far above any model: lists of that length are allocated early
_HIGHEST = {
    **dict.fromkeys(_COUNTS, 10_000), **dict.fromkeys(_SIZES, 10_000_000),
    **dict.fromkeys(("head_dim", *_LATENT, "q_lora_rank"), 100_000), "ddp_pad_channels_to": 4096,
    **dict.fromkeys(("sliding_window", "max_position_embeddings"), 1 << 40),
    **dict.fromkeys(("decoder_sparse_step", "first_k_dense_replace", "moe_layer_freq", "max_window_layers"), 10_000),
}  # fmt: skip
_POSITIVE = ("hidden_size", "vocab_size")  # other optional sizes may be 0 for none
_LISTS = {"mlp_only_layers": int, "no_rope_layers": int, "layer_types": str}
# number that a forward pass uses, at any level of a config -> its lower and upper limit
_NUMBERS = {
    "rms_norm_eps": (0, 1), "partial_rotary_factor": (0.01, 1), "attention_dropout": (0, 1),
    **dict.fromkeys(("rope_theta", "rope_local_base_freq"), (10, 1e12)),
    "original_max_position_embeddings": (1, 1 << 40),
    **dict.fromkeys(("factor", "attention_factor", "short_factor", "long_factor", "beta_fast", "beta_slow",
                     "low_freq_factor", "high_freq_factor"), (1e-6, 1e6)),
    **dict.fromkeys(("mscale", "mscale_all_dim"), (0, 1e6)),
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling",
                     "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping",
                     "routed_scaling_factor", "clip_qkv"), (1e-9, 1e9)),
}  # fmt: skip
_ROPE = ("rope_parameters", "rope_scaling")
_FLAGS = ("tie_word_embeddings", "attention_bias", "mlp_bias", "norm_topk_prob", "use_sliding_window")
# field with a name -> the allowed names, or None for any
_NAMES: dict[str, tuple[str, ...] | None] = {
    **dict.fromkeys(("dtype", "torch_dtype"), ("auto", "bfloat16", "float16", "float32", "float64")),
    **dict.fromkeys(("hidden_act", "hidden_activation", "topk_method", "scoring_func", "rope_type", "type"), None),
}
_TENSOR = re.compile(r"model\.layers\.(\d{1,6})\.(.+)\.(\w+)")
_PACKED = ("U8", "torch.uint8")  # bitsandbytes' 4-bit formats and NVFP4
_FLOATS = {"BF16", "F16", "F32", "F64"} | {f"torch.{name}" for name in ("bfloat16", "float16", "float32", "float64")}
EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
_OUTSIDE = {EMBEDDING: ("vocabulary", "hidden"), HEAD: ("vocabulary", "hidden"), NORM: ("hidden",)}
# old checkpoints contain its frequencies, which no program reads
_COMPUTED = "self_attn.rotary_emb"


@dataclass(frozen=True, kw_only=True)
class LayerWidths:
    """The kept units of one decoder layer."""

    query_heads_per_kv_head: tuple[int, ...]
    """Kept query heads of each kept KV head, in order; empty: no attention."""
    intermediate_size: int
    """Kept MLP channels; 0: no MLP, or routed experts in its place."""
    expert_intermediate_sizes: tuple[int, ...] | None = None
    """Kept channels of each routed expert; None: the layer has no routed experts."""

    @property
    def num_query_heads(self) -> int:
        return sum(self.query_heads_per_kv_head)

    @property
    def num_kv_heads(self) -> int:
        return len(self.query_heads_per_kv_head)

    def num_units(self, unit: str) -> int:
        """Return the number of kept units of a kind (key of `tensors.BLOCK_OF`)."""
        counts = {
            "query_head": self.num_query_heads, "kv_head": self.num_kv_heads, "channel": self.intermediate_size
        }  # fmt: skip
        return counts[unit]

    def splits_over(self, num_ranks: int) -> bool:
        """Return whether tensor parallelism over `num_ranks` devices requires no padding.

        Then every device has the same number of channels and of whole KV heads, each with the same
        number of query heads; or devices share one KV head and divide its query heads. Experts may
        have any width. One device supports all widths.
        """
        if num_ranks == 1 or self.num_kv_heads == 0:
            return self.intermediate_size % num_ranks == 0
        queries, copies = self.query_heads_per_kv_head[0], num_ranks // self.num_kv_heads
        if self.num_kv_heads >= num_ranks:
            split = self.num_kv_heads % num_ranks == 0
        else:
            split = num_ranks % self.num_kv_heads == 0 and queries % copies == 0
        return split and len(set(self.query_heads_per_kv_head)) == 1 and self.intermediate_size % num_ranks == 0

    def to_json(self) -> dict[str, Any]:
        """Return the entry of `ddp_layers`, which `parse_layers` reads; with routed experts, that of
        a report."""
        entry: dict[str, Any] = {
            "query_heads_per_kv_head": list(self.query_heads_per_kv_head),
            "intermediate_size": self.intermediate_size,
        }
        if self.expert_intermediate_sizes is not None:
            entry["expert_intermediate_sizes"] = list(self.expert_intermediate_sizes)
        return entry


def count_experts(config: Mapping[str, Any]) -> int:
    """Return the number of routed experts per layer from a config's fields; 0 for a dense model."""
    return next((config[key] for key in EXPERT_COUNT_KEYS if config.get(key)), 0)


def dense_kv_heads(config: Mapping[str, Any]) -> int:
    """Return the number of KV heads of a dense layer."""
    return int(config.get("num_key_value_heads") or config["num_attention_heads"])


def head_dim(config: Mapping[str, Any]) -> int:
    """Return the size of one attention head."""
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def dense_expert_size(config: Mapping[str, Any]) -> int:
    """Return the number of channels of a dense routed expert."""
    return int(config.get("moe_intermediate_size") or config["intermediate_size"])


def is_routed(config: Mapping[str, Any], index: int) -> bool:
    """Return whether layer `index` has routed experts; each family uses some of these keys."""
    return (
        count_experts(config) > 0
        and index not in (config.get("mlp_only_layers") or ())
        and (index + 1) % (config.get("decoder_sparse_step") or 1) == 0
        and index >= (config.get("first_k_dense_replace") or 0)
        and index % (config.get("moe_layer_freq") or 1) == 0
    )


def parse_layers(config: Mapping[str, Any]) -> tuple[LayerWidths, ...]:
    """Read and check `ddp_layers` against the dense fields of the same `config.json`.

    Raises: WidthsError, naming the layer, the value and its limit.
    """
    check_sizes(config)
    entries, num_layers = config.get("ddp_layers"), config["num_hidden_layers"]
    if not isinstance(entries, Sequence) or isinstance(entries, str):
        raise WidthsError("config.json: ddp_layers must be a list with one entry per layer; run ddp-vllm apply again")
    if len(entries) != num_layers:
        raise WidthsError(
            f"config.json: ddp_layers has {len(entries)} entries for {num_layers} layers; run ddp-vllm apply again"
        )
    kinds = config.get("layer_types")
    if kinds is not None and (not isinstance(kinds, Sequence) or isinstance(kinds, str) or len(kinds) != num_layers):
        raise WidthsError(f"config.json: layer_types must name a type for each of {num_layers} layers, or be absent")
    return tuple(_parse_layer(index, entry, config) for index, entry in enumerate(entries))


def check_sizes(config: Mapping[str, Any], *more: str) -> None:
    """Refuse a config whose sizes are not positive integers or far above any model, and other
    impossible values.

    more: sizes that are required in addition to those that always are. Raises: WidthsError.
    """
    required = (*_REQUIRED, *more, *(_LATENT if config.get("kv_lora_rank") else ()))
    stated = (name for name in _HIGHEST if config.get(name) or (name in _POSITIVE and config.get(name) is not None))
    for name in dict.fromkeys((*required, *stated)):
        size = config.get(name)
        if type(size) is not int or not 1 <= size <= _HIGHEST[name]:
            raise WidthsError(
                f"config.json: {name} is {short(size)}, not a positive integer up to {_HIGHEST[name]:,}; download the "
                "model again"
            )
    for name, kind in _LISTS.items():
        if (values := config.get(name)) and not (isinstance(values, list | tuple) and {*map(type, values)} == {kind}):
            raise WidthsError(f"config.json: {name} is {short(values)}, not a list of {kind.__name__}; download again")
    for prefix, values in _objects(config):
        for name in (name for name in (*_NUMBERS, *_NAMES, *_FLAGS) if values.get(name) is not None):
            if fault := _fault(name, values[name]):
                raise WidthsError(
                    f"config.json: {prefix}{name} is {short(values[name])}, {fault}; download the model again"
                )
    for fits, fault in _relations(config):
        if not fits:
            raise WidthsError(f"config.json: {fault}; download the model again")


def _objects(config: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield a config and its objects for rotary embeddings, with the prefix of their names.
    Raises: WidthsError."""
    yield "", config
    for key in _ROPE:
        if (rope := config.get(key)) is not None:
            if not isinstance(rope, Mapping):
                raise WidthsError(f"config.json: {key} is {short(rope)}, not an object; download the model again")
            yield f"{key}.", rope
            yield from ((f"{key}.{kind}.", each) for kind, each in rope.items() if isinstance(each, Mapping))


def _fault(name: str, value: Any) -> str:
    """Return how a value violates its limits, or an empty text."""
    if name in _FLAGS:
        return "" if isinstance(value, bool) else "not true or false"
    if name in _NAMES:
        known = _NAMES[name]
        # transformers' configs contain the torch.dtype itself
        text = str(value).removeprefix("torch.")
        fits = isinstance(value, str) if known is None else text in known
        return "" if fits else f"not {'a name' if known is None else ' or '.join(known)}"
    low, high = _NUMBERS[name]
    numbers = value if isinstance(value, list) and name.endswith("_factor") else [value]
    fits = all(type(each) in (int, float) and low <= each <= high for each in numbers)
    return "" if fits else f"not a number in {low:g}…{high:g}"


def _relations(config: Mapping[str, Any]) -> Iterator[tuple[bool, str]]:
    """Yield for each relation between fields whether it holds, and the message if it does not."""
    heads, kv_heads, experts = config["num_attention_heads"], dense_kv_heads(config), count_experts(config)
    yield heads % kv_heads == 0, f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
    if config.get("kv_lora_rank") or config.get("head_dim") or config.get("hidden_size"):
        rotated = config["qk_rope_head_dim"] if config.get("kv_lora_rank") else head_dim(config)
        yield (
            rotated > 0 and rotated % 2 == 0,
            f"{rotated} numbers of a head are rotated in pairs; they must be even",
        )
    groups, chosen = config.get("n_group") or 1, config.get("topk_group") or 1
    yield chosen <= groups, f"topk_group {chosen} is greater than n_group {groups}"
    yield experts % groups == 0, f"{experts} experts are not a multiple of n_group {groups}"
    padding, vocabulary = config.get("pad_token_id"), config.get("vocab_size") or 0
    fits = padding is None or (type(padding) is int and -vocabulary <= padding < vocabulary)
    yield fits or not vocabulary, f"pad_token_id is {short(padding)}, not one of {vocabulary} tokens"


def _parse_layer(index: int, entry: Any, config: Mapping[str, Any]) -> LayerWidths:
    where = f"config.json: ddp_layers[{index}]"
    if not isinstance(entry, Mapping):
        raise WidthsError(f"{where} is {entry!r}, not an object; run ddp-vllm apply again")
    unknown = set(entry) - {"query_heads_per_kv_head", "intermediate_size"}
    if unknown:
        raise WidthsError(f"{where} has the unknown key {min(map(str, unknown))!r}; update ddp-vllm")
    num_heads = config["num_attention_heads"]
    num_kv_heads = dense_kv_heads(config)
    heads = _integers(entry.get("query_heads_per_kv_head"), f"{where}.query_heads_per_kv_head", 1, num_heads)
    for kind, count, limit in (("KV", len(heads), num_kv_heads), ("query", sum(heads), num_heads)):
        if count > limit:
            raise WidthsError(f"{where}.query_heads_per_kv_head has {count} {kind} heads, the dense model {limit}")
    dense_width = config["intermediate_size"]
    width = _integer(entry.get("intermediate_size"), f"{where}.intermediate_size", 0, dense_width)
    return LayerWidths(query_heads_per_kv_head=heads, intermediate_size=width)


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


@dataclass(frozen=True, kw_only=True)
class ModelWidths:
    """The widths of all layers and the family's table, from which the shape of every tensor
    follows."""

    table: TensorTable
    layers: tuple[LayerWidths, ...]
    head_dim: int
    hidden_size: int | None = None
    """None: neither it nor the fields below are checked."""
    vocab_size: int | None = None
    is_tied: bool = True
    """Whether the output head is the embedding, and may be absent from disk."""
    biased: frozenset[str] = frozenset()
    """Modules of a layer that have a bias."""
    is_quantized: bool = False
    """Weights may have other shapes, dtypes and additional tensors, which vLLM's quantization
    method checks."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "ModelWidths":
        """Read the fields of a pruned config. Raises: WidthsError as `parse_layers`, also for an
        unknown family."""
        table = TABLES.get(dense_type(config))
        if table is None:
            raise WidthsError(f"config.json: model_type {config.get('model_type')!r} is unknown; update ddp-vllm")
        return cls(
            table=table,
            layers=parse_layers(config),
            head_dim=head_dim(config),
            hidden_size=config.get("hidden_size"),
            vocab_size=config.get("vocab_size"),
            is_tied=bool(config.get("tie_word_embeddings", table.is_tied)),
            biased=_biased(table, config),
            is_quantized=bool(config.get("quantization_config")),
        )

    def expected(self, name: str) -> tuple[int, int] | None:
        """Return the axis of a tensor that pruning shortens and its length, or None for an
        unchanged tensor.

        name: as on disk, such as `model.layers.3.self_attn.q_proj.weight`. Tensors of removed
            blocks have length 0.
        Raises: WidthsError for a layer that the widths do not contain.
        """
        match = _TENSOR.fullmatch(name)
        if match is None or match[3] not in ("weight", "bias") or (projection := self.table.find(match[2])) is None:
            return None
        if int(match[1]) >= len(self.layers):
            raise WidthsError(f"tensor {name} is of layer {match[1]}, but ddp_layers has {len(self.layers)} entries")
        units = sum(map(self.layers[int(match[1])].num_units, projection.units))
        length = units * projection.unit_size(self.head_dim)
        if projection.axis == 1 and match[3] == "bias" and length:
            return None  # as long as the hidden state
        return (projection.axis if length else 0), length

    def checked(self, tensors: Iterable[tuple[str, Sequence[int], str]]) -> Iterator[str]:
        """Yield each tensor's name after checking its shape.

        tensors: name, shape and dtype, as safetensors or torch write it. Packed quantized weights,
            with several numbers per byte, may have any shape: vLLM's quantization method checks it.
        Raises: WidthsError, naming the tensor, its length and the required length.
        """
        for name, shape, dtype in tensors:
            axis, length = self.expected(name) or (0, None)
            if length == 0:
                raise WidthsError(f"tensor {name} is of a block that ddp_layers removes; run ddp-vllm apply again")
            packed = self.is_quantized and dtype in _PACKED
            if length is not None and not packed and (axis >= len(shape) or shape[axis] != length):
                raise WidthsError(
                    f"tensor {name} has shape {list(shape)}, but ddp_layers requires {length} along axis {axis}; "
                    "config.json and the weights are of different checkpoints"
                )
            if not self.is_quantized and self.hidden_size:
                self._check_known(name, dtype)
            if self.hidden_size:
                self._check_shape(name, shape, length)
            yield name

    def _check_known(self, name: str, dtype: str) -> None:
        """Refuse a tensor or dtype that no model of the family has. Raises: WidthsError."""
        match = _TENSOR.fullmatch(name)
        if match and match[2] == _COMPUTED:
            return
        if name not in _OUTSIDE and not (match and match[3] in ("weight", "bias") and self.table.knows(match[2])):
            raise WidthsError(f"tensor {short(name)} is unknown in this family; copy the whole folder again")
        if dtype not in _FLOATS:
            raise WidthsError(f"tensor {name} is {short(dtype)}, but config.json has no quantization_config")

    def _check_shape(self, name: str, shape: Sequence[int], length: int | None) -> None:
        """Refuse a tensor whose shape contradicts the config. Raises: WidthsError.

        length: of the axis that pruning shortens, or None. Of a quantized model only vectors are
            checked.
        """
        match = _TENSOR.fullmatch(name)
        lengths = {"vocabulary": self.vocab_size, "hidden": self.hidden_size}
        required = [lengths.get(each) for each in _OUTSIDE.get(name, ())]
        if match and match[3] in ("weight", "bias"):
            if projection := self.table.find(match[2]):
                required = [length, self.hidden_size] if projection.axis == 0 else [self.hidden_size, length]
            elif self.table.knows(match[2]):
                required = [self.head_dim if match[2] in QUERY_KEY_NORMS else self.hidden_size]
            required = required[: 1 if match[3] == "bias" else None]
        if not required or (self.is_quantized and len(required) > 1):
            return
        if len(shape) != len(required) or any(b is not None and a != b for a, b in zip(shape, required, strict=True)):
            raise WidthsError(
                f"tensor {name} has shape {list(shape)}, but config.json requires {required}; config.json and the "
                "weights are of different checkpoints"
            )

    def check_complete(self, names: Iterable[str]) -> None:
        """Refuse a checkpoint in which a layer lacks a module of the table, or a module of similar
        layers.

        names: of all tensors, as on disk. Raises: WidthsError, naming the first layer and module.
        """
        present: list[set[str]] = [set() for _ in self.layers]
        alike: set[str] = set()  # the modules of any layer
        outside = {EMBEDDING, NORM} | (set() if self.is_tied else {HEAD}) if self.hidden_size else set()
        for name in names:
            outside.discard(name)
            if (match := _TENSOR.fullmatch(name)) and int(match[1]) < len(present):
                module = f"{match[2]}.bias" if match[3] == "bias" else match[2]
                present[int(match[1])].add(module)
                # quantization adds others
                if match[3] in ("weight", "bias"):
                    alike.add(module)
        if outside:
            raise WidthsError(f"tensor {min(outside)} is missing; copy the whole folder, or run ddp-vllm apply again")
        for index, (layer, modules) in enumerate(zip(self.layers, present, strict=True)):
            blocks = {"attn": layer.num_kv_heads, "mlp": layer.intermediate_size}
            removed = [f"{part}." for block, part in (("attn", "self_attn"), ("mlp", "mlp")) if not blocks[block]]
            removed += [f"{norm}." for block, norms in self.table.norms.items() if not blocks[block] for norm in norms]
            needed = alike | {*layer_modules(self.table, blocks)} | {f"{module}.bias" for module in self.biased}
            needed = {module for module in needed if not f"{module}.".startswith(tuple(removed))}
            if surplus := [module for module in modules if f"{module}.".startswith(tuple(removed))]:
                raise WidthsError(
                    f"layer {index} has {min(surplus)} of a block that ddp_layers removes; run ddp-vllm apply again"
                )
            if missing := needed - modules:
                raise WidthsError(
                    f"layer {index} lacks the tensors of {min(missing)} ({len(missing)} modules in all); copy the "
                    "whole folder, or run ddp-vllm apply again"
                )


def _biased(table: TensorTable, config: Mapping[str, Any]) -> frozenset[str]:
    """Return the modules of a layer with a bias."""
    biased = set(table.biases)
    for key, block in (("attention_bias", "attn"), ("mlp_bias", "mlp")):
        biased |= {part.name for part in table.projections if config.get(key) and part.block == block}
    return frozenset(biased)
