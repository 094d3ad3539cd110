"""The widths of a pruned model: what `config.json` states about them, and which tensors a folder
must hold.

Every stock field of `config.json` keeps its dense value. One more key states what is kept:

    "ddp_layers": [{"query_heads_per_kv_head": [3, 2, 1], "intermediate_size": 1203}, …]

for the families of `tensors.py`, with one entry per layer and one number for each kept KV head: its
kept query heads, which are adjacent in `q_proj`. An empty list means that the attention is removed,
`intermediate_size` 0 that the MLP is. Without the key the model is dense. Any other architecture
names its pruned blocks on disk:

    "ddp_widths": {
      "quant_method": "ddp_widths",
      "layers_module": "model.layers",
      "mlp":     {"inputs": ["mlp.gate_proj", "mlp.up_proj"], "output": "mlp.down_proj", "intermediate_size": 256},
      "experts": {"inputs": ["mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"],
                  "output": "mlp.experts.{}.down_proj", "intermediate_size": 64, "num_experts": 8},
      "layers":  [{"intermediate_size": 96}, {"expert_intermediate_sizes": [64, 0, 33, …]}, {}, …]
    }

Where code must act, `quantization_config` holds a copy: vLLM and transformers both look for a
quantization method there, which may build each linear layer as it likes. A model without whole
experts has no copy, because stock code loads it: its kept experts are numbered anew on disk. What
an entry of `layers` does not state is left as it is. One input is the only projection of an MLP
without a gate, or with `"fused": "halves"` holds gate and up rows. An expert of width 0 has no
tensors. An MLP keeps at least one channel: a linear layer without inputs is not portable.

Both forms become one `Widths`: a table of projections, and the number of units that each layer has.
This file is part of every checkpoint and imports only the standard library, `tensors` and `files`.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

from .files import WidthsError, short
from .tensors import LAYERS, QUERY_KEY_NORMS, TABLES, Config, Projection, TensorTable, dense_type

METHOD = "ddp_widths"
EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
FLOATS = {"BF16", "F16", "F32", "F64", *(f"torch.{name}" for name in ("bfloat16", "float16", "float32", "float64"))}
# upper limits far above any model: lists of that length are allocated
MOST_LAYERS, LARGEST_WIDTH = 10_000, 10_000_000
_PACKED = ("U8", "torch.uint8")  # bitsandbytes' 4-bit formats and NVFP4
_KINDS = ("weight", "bias")
# old checkpoints contain its frequencies, which no program reads
_COMPUTED = "self_attn.rotary_emb"
UNITS = {"mlp": "channel", "experts": "expert_channel"}  # described block -> its units
_NAME, _NUMBER = re.compile(r"\w+(\.\w+)*"), re.compile(r"(?<![^.])\d+(?![^.])")
AGAIN = "copy the whole folder again, or run ddp-vllm apply again"


@dataclass(frozen=True, kw_only=True)
class LayerWidths:
    """The kept units of one decoder layer."""

    query_heads_per_kv_head: tuple[int, ...] = ()
    """Kept query heads of each kept KV head, in order; empty: no attention."""
    intermediate_size: int = 0
    """Kept MLP channels; 0: no MLP, or one that is not described."""
    expert_intermediate_sizes: tuple[int, ...] | None = None
    """Kept channels of each routed expert; None: the layer has no described experts."""

    @property
    def num_query_heads(self) -> int:
        return sum(self.query_heads_per_kv_head)

    @property
    def num_kv_heads(self) -> int:
        return len(self.query_heads_per_kv_head)

    @property
    def removed_blocks(self) -> tuple[str, ...]:
        """The blocks of a family that have no units."""
        return ("attn",) * (not self.num_kv_heads) + ("mlp",) * (not self.intermediate_size)

    def num_units(self, unit: str, expert: int = 0) -> int:
        """Return the number of kept units of a kind (key of `tensors.BLOCK_OF`); of channels of
        experts those of one."""
        if unit == "expert_channel":
            return (self.expert_intermediate_sizes or ())[expert]
        return {
            "query_head": self.num_query_heads, "kv_head": self.num_kv_heads, "channel": self.intermediate_size
        }[unit]  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """Return the entry of `ddp_layers`; with routed experts, that of a report."""
        stated = {name: value for name, value in vars(self).items() if value is not None}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in stated.items()}


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a tensor of a block belongs that pruning may shorten."""

    projection: Projection
    layer: int
    expert: int
    """The expert's id; 0 in other blocks."""
    axis: int
    """The axis that pruning shortens."""
    length: int | None
    """Its length; 0 of a removed block or expert, None if pruning leaves the tensor as it is."""


def dense_heads(config: Config) -> tuple[int, ...]:
    """Return the query heads of each KV head of a dense layer."""
    heads = int(config.get("num_attention_heads") or 1)
    kv_heads = int(config.get("num_key_value_heads") or heads)
    return (heads // kv_heads,) * kv_heads


def text_config(config: Config) -> Config:
    """Return the config of the language model: that inside a multimodal model's config, or the
    config itself."""
    text = config.get("text_config")
    return text if isinstance(text, Mapping) else config


def head_dim(config: Config) -> int:
    """Return the size of one attention head."""
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def split(name: str, layers_module: str = LAYERS) -> tuple[int, str, str] | None:
    """Return layer, module and kind of a tensor of a decoder layer on disk, such as 3,
    `mlp.down_proj` and `weight`; None for any other tensor."""
    if not name.startswith(f"{layers_module}."):
        return None
    number, _, rest = name[len(layers_module) + 1 :].partition(".")
    module, _, kind = rest.rpartition(".")
    return (int(number), module, kind) if number.isdecimal() and len(number) < 7 and module else None


def block_table(block: str, inputs: Iterable[str], output: str, *, fused: bool = False) -> tuple[Projection, ...]:
    """Return the projections of a described block. fused: the one input holds gate and up rows."""
    units = (UNITS[block],)
    rows = (Projection(name=name, axis=0, units=units * (1 + fused)) for name in inputs)
    return (*rows, Projection(name=output, axis=1, units=units))


@dataclass(frozen=True, kw_only=True)
class Widths:
    """The widths of all layers, and the table from which the shape of every tensor follows."""

    table: TensorTable
    """The projections of a layer by their names on disk; `{}` in a name stands for the id of an
    expert."""
    layers: tuple[LayerWidths, ...]
    dense: LayerWidths = LayerWidths()
    """A dense layer with all blocks of the table."""
    layers_module: str = LAYERS
    """Module of the decoder layers, such as model.layers."""
    is_family: bool = True
    """Whether all tensors of the model are known, and a block without units is removed; otherwise
    everything outside of the table is left as it is."""
    head_dim: int = 1
    hidden_size: int | None = None
    """Of a family; of any other model neither it nor the fields below are known."""
    vocab_size: int | None = None
    is_tied: bool = True
    """Whether the output head is the embedding, and may be absent from disk."""
    biased: frozenset[str] = frozenset()
    """Modules of a layer that have a bias."""
    is_renumbered: bool = False
    """Whether whole experts were removed, and the kept experts have new numbers on disk."""
    is_quantized: bool = False
    """Weights may have other shapes, dtypes and additional tensors, which vLLM's quantization
    method checks."""

    @classmethod
    def of(cls, config: Config) -> "Widths":
        """Read the fields of a `config.json`, pruned or of a dense model of a family.
        Raises: WidthsError, naming the key, its value and its limit."""
        if (stated := stated_widths(config)) is not None:
            return _described(stated, config)
        table = TABLES.get(dense_type(config))
        if table is None:
            raise WidthsError(f"config.json: model_type {config.get('model_type')!r} is unknown; update ddp-vllm")
        check_sizes(config)
        dense = LayerWidths(query_heads_per_kv_head=dense_heads(config), intermediate_size=config["intermediate_size"])
        number, entries = config["num_hidden_layers"], config.get("ddp_layers")
        is_dense = entries is None and dense_type(config) == config["model_type"]
        flags = {"attn": config.get("attention_bias"), "mlp": config.get("mlp_bias")}
        biased = {part.name for part in table.projections if flags[part.block]}
        if not config.get("attention_out_bias", True):
            biased -= {table.output("attn").name}
        return cls(
            table=table,
            layers=(dense,) * number if is_dense else _layers(entries, "ddp_layers", number, dense, is_family=True),
            dense=dense,
            head_dim=head_dim(config),
            hidden_size=config["hidden_size"],
            vocab_size=config.get("vocab_size"),
            is_tied=bool(config.get("tie_word_embeddings", table.is_tied)),
            biased=frozenset({*table.biases, *biased}),
            is_quantized=bool(config.get("quantization_config")),
        )

    def to_json(self) -> Any:
        """Return the value of `ddp_layers`, or of `quantization_config`, which `of` reads."""
        layers = [layer.to_json() for layer in self.layers]
        if self.is_family:
            return layers
        stated = ("intermediate_size", "expert_intermediate_sizes")
        entries = [{key: entry[key] for key in stated if entry.get(key)} for entry in layers]
        blocks = dict[str, dict[str, Any]]()
        for block in self.blocks:
            inputs = self.table.inputs(block)
            described: dict[str, Any] = {"inputs": [part.name for part in inputs]}
            described["output"] = self.table.output(block).name
            described["intermediate_size"] = self.dense.num_units(UNITS[block])
            if block == "experts":
                described["num_experts"] = self.num_experts
            if len(inputs[0].units) > 1:
                described["fused"] = "halves"
            blocks[block] = described
        return {"quant_method": METHOD, "layers_module": self.layers_module, **blocks, "layers": entries}

    @property
    def blocks(self) -> tuple[str, ...]:
        """The blocks of the table."""
        return tuple(dict.fromkeys(projection.block for projection in self.table.projections))

    def only(self, blocks: Collection[str]) -> "Widths":
        """Return the widths with some blocks of the table."""
        projections = tuple(part for part in self.table.projections if part.block in blocks)
        dense = LayerWidths(
            query_heads_per_kv_head=self.dense.query_heads_per_kv_head,
            intermediate_size=self.dense.intermediate_size if "mlp" in blocks else 0,
            expert_intermediate_sizes=self.dense.expert_intermediate_sizes if "experts" in blocks else None,
        )
        return replace(self, table=replace(self.table, projections=projections), dense=dense)

    @property
    def num_experts(self) -> int:
        """Routed experts per dense layer."""
        return len(self.dense.expert_intermediate_sizes or ())

    @property
    def on_disk(self) -> "Widths":
        """The widths by the numbers that experts have on disk. Raises: WidthsError if layers keep
        different numbers of whole experts."""
        if not self.is_renumbered:
            return self
        rows = [layer.expert_intermediate_sizes for layer in self.layers]
        numbers = {len(row) - row.count(0) for row in rows if row is not None}
        if len(numbers) > 1:
            raise WidthsError(f"config.json: layers of {METHOD} keep {sorted(numbers)} whole experts; {AGAIN}")
        kept = (self.dense.expert_intermediate_sizes or ())[: max(numbers, default=0)] or None
        layers = (
            replace(layer, expert_intermediate_sizes=row and kept) for layer, row in zip(self.layers, rows, strict=True)
        )
        dense = replace(self.dense, expert_intermediate_sizes=kept)
        return replace(self, layers=tuple(layers), dense=dense, is_renumbered=False)

    @property
    def dense_layers(self) -> tuple[LayerWidths, ...]:
        """The widths before pruning."""
        dense = self.dense
        return tuple(
            replace(
                dense,
                intermediate_size=dense.intermediate_size if self.states("mlp", layer) else 0,
                expert_intermediate_sizes=dense.expert_intermediate_sizes if self.states("experts", layer) else None,
            )
            for layer in self.layers
        )

    @property
    def router(self) -> str:
        """The module that chooses among experts of which some may be removed whole."""
        return f"{self.table.output('experts').name.partition('.experts.')[0]}.gate"

    def states(self, block: str, layer: LayerWidths) -> bool:
        """Return whether a layer states the units of a block, and does not leave it as it is."""
        if block == "experts":
            return layer.expert_intermediate_sizes is not None
        return self.is_family or (block == "mlp" and layer.intermediate_size > 0)

    def split(self, name: str) -> tuple[int, str, str] | None:
        """Return layer, module and kind of a tensor, as the function `split`."""
        return split(name, self.layers_module)

    def find(self, name: str) -> Place | None:
        """Return which tensor of a block `name` is, such as
        `model.layers.3.self_attn.q_proj.weight`; None for any other.

        Raises: WidthsError for an expert that the model does not have, and in a family for such a
            layer; elsewhere it is a head that predicts further tokens, and is left as it is.
        """
        layer, module, kind = self.split(name) or (0, "", "")
        if kind not in _KINDS:
            return None
        projection, expert = self.table.find(module), 0
        for number in () if projection or not self.num_experts else _NUMBER.finditer(module):
            if projection := self.table.find(f"{module[: number.start()]}{{}}{module[number.end() :]}"):
                expert = int(number[0])
                break
        if projection is None or (layer >= len(self.layers) and not self.is_family):
            return None
        if layer >= len(self.layers):
            raise WidthsError(f"tensor {name} is of layer {layer}, but ddp_layers has {len(self.layers)} entries")
        if projection.block == "experts" and expert >= self.num_experts:
            raise WidthsError(
                f"tensor {short(name)} is of expert {expert}, but config.json has {self.num_experts}; {AGAIN}"
            )
        axis, kept, length = 0 if kind == "bias" else projection.axis, self.layers[layer], None
        if self.states(projection.block, kept):
            units = sum(kept.num_units(unit, expert) for unit in projection.units)
            length = units * projection.unit_size(self.head_dim)
            if length and axis != projection.axis:  # a bias as long as the hidden state
                length = None
        return Place(projection=projection, layer=layer, expert=expert, axis=axis, length=length)

    def check(self, tensors: Iterable[tuple[str, Sequence[int], str]]) -> None:
        """Refuse a folder whose tensors do not have these widths, or that lacks some.

        tensors: name, shape and dtype of every tensor, as safetensors or torch write it.
        Raises: WidthsError, naming the tensor, its length and the required length.
        """
        self.check_complete(self.checked(tensors))

    def checked(self, tensors: Iterable[tuple[str, Sequence[int], str]]) -> Iterator[str]:
        """Yield each tensor's name after checking its shape.

        tensors: as in `check`. Packed quantized weights, with several numbers per byte, may have
            any shape: vLLM's quantization method checks it.
        Raises: WidthsError as `check`.
        """
        hidden: dict[str, int] = {}
        for name, shape, dtype in tensors:
            place = self.find(name)
            if self.is_removed(name) or (place and place.length == 0 and 0 not in shape):
                raise WidthsError(f"tensor {name} is of a block or expert that config.json removes; {AGAIN}")
            required = self._shape(name, place, dtype, hidden)
            if required is None and not self.is_quantized:
                raise WidthsError(f"tensor {short(name)} is unknown in this family; copy the whole folder again")
            if required and not self.is_quantized and dtype not in FLOATS:
                raise WidthsError(
                    f"tensor {name} is {short(dtype)}: config.json states unquantized weights; export the unquantized "
                    "model"
                )
            required = required or []
            is_exact = len(shape) == len(required) or self.is_quantized or not required
            wrong = [] if is_exact else [f"{len(required)} axes"]
            pairs = enumerate(zip_longest(required, shape))
            wrong += [f"{number} along axis {axis}" for axis, (number, size) in pairs if number not in (None, size)]
            if wrong:
                raise WidthsError(
                    f"tensor {name} has shape {list(shape)}, but config.json and the other tensors require {wrong[0]}; "
                    "they are of different checkpoints"
                )
            if place and len(shape) == 2 and not self.is_family:
                hidden.setdefault(place.projection.block, shape[1 - place.axis])
            yield name

    def _shape(self, name: str, place: Place | None, dtype: str, hidden: Mapping[str, int]) -> list[int | None] | None:
        """Return the shape of a tensor, None for an unknown length; [] if it is not checked, None
        if no model of the family has it.

        hidden: the hidden size by block, where only other tensors state it.
        """
        size, (_, module, kind) = self.hidden_size, self.split(name) or (0, "", "")
        if place and kind == "weight" and self.is_quantized:  # only the axis that pruning shortens is known
            return [] if dtype in _PACKED else [*[None] * place.axis, place.length]
        if place:
            size = size or hidden.get(place.projection.block)
            sizes = [place.length, size] if place.projection.axis == 0 else [size, place.length]
            return sizes[:1] if kind == "bias" else sizes
        if not self.is_family or module == _COMPUTED:
            return []
        if name in (EMBEDDING, HEAD):
            return [] if self.is_quantized else [self.vocab_size, size]
        if kind in _KINDS and self.table.knows(module):
            return [self.head_dim if module in QUERY_KEY_NORMS else size]
        return [size] if name == NORM else None

    def modules(self, index: int) -> Iterator[str]:
        """Yield the modules of the table that a layer must have, relative to it."""
        layer = self.layers[index]
        sizes, removed = layer.expert_intermediate_sizes or (), layer.removed_blocks
        yield from self.table.untouched
        for part in self.table.projections:
            if part.block == "experts":
                yield from (part.name.format(expert) for expert, size in enumerate(sizes) if size)
            elif part.block not in removed:
                yield part.name
        for block, norms in self.table.norms.items():
            yield from () if block in removed else norms

    def check_complete(self, names: Iterable[str]) -> None:
        """Refuse a checkpoint in which a layer lacks a module of the table, or in a family a module
        of similar layers.

        names: of all tensors, as on disk. Raises: WidthsError, naming the first layer and module.
        """
        present: list[set[str]] = [set() for _ in self.layers]
        alike = {f"{module}.bias" for module in self.biased}  # and the modules of any layer
        outside = {EMBEDDING, NORM} | (set() if self.is_tied else {HEAD}) if self.is_family else set()
        for name in names:
            outside.discard(name)
            layer, module, kind = self.split(name) or (len(present), "", "")
            if layer < len(present):
                module = f"{module}.bias" if kind == "bias" else module
                present[layer].add(module)
                # quantization adds others
                if kind in _KINDS and self.is_family:
                    alike.add(module)
        if outside:
            raise WidthsError(f"tensor {min(outside)} is missing; {AGAIN}")
        for index, (widths, modules) in enumerate(zip(self.layers, present, strict=True)):
            needed, removed = {*alike, *self.modules(index)} - modules, self.removed(widths)
            if missing := [module for module in needed if not f"{module}.".startswith(removed)]:
                raise WidthsError(
                    f"layer {index} lacks the tensors of {min(missing)} ({len(missing)} modules in all); {AGAIN}"
                )

    def is_removed(self, name: str) -> bool:
        """Return whether a tensor is of a removed block of a family, such as its norm."""
        layer, module, _ = self.split(name) or (len(self.layers), "", "")
        return layer < len(self.layers) and f"{module}.".startswith(self.removed(self.layers[layer]))

    def removed(self, layer: LayerWidths) -> tuple[str, ...]:
        """Return how the names of modules begin that a layer of these widths lacks, a dot at the
        end of each: blocks without units, and their norms."""
        names = list[str]()
        for block in layer.removed_blocks if self.is_family else ():
            names += [self.table.output(block).name.partition(".")[0], *self.table.norms[block]]
        return tuple(f"{name}." for name in names)


def stated_widths(config: Config) -> Mapping[str, Any] | None:
    """Return the description of the blocks in a `config.json`; None if it has none. Raises:
    WidthsError if its copy differs."""
    copied = config["quantization_config"] if states_widths(config) else None
    if (stated := config.get(METHOD)) is None:
        return copied
    if not isinstance(stated, Mapping) or copied not in (None, stated):
        raise WidthsError(f"config.json: {METHOD} is no object, or quantization_config is no copy of it; {AGAIN}")
    return stated


def states_widths(config: Config) -> bool:
    """Return whether a `config.json` describes blocks that code must build narrower."""
    stated = config.get("quantization_config")
    return isinstance(stated, Mapping) and stated.get("quant_method") == METHOD


def check_sizes(config: Config) -> None:
    """Refuse a config without the sizes that widths are compared with, or with impossible ones.
    Raises: WidthsError."""
    needed = ("num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_size")
    for name in (*needed, "num_key_value_heads", "head_dim", "vocab_size"):
        if name in needed or config.get(name) is not None:
            _integer(config.get(name), name, 1, MOST_LAYERS if name.startswith("num_") else LARGEST_WIDTH)
    if (heads := config["num_attention_heads"]) % (kv_heads := len(dense_heads(config))):
        raise _fault("num_attention_heads", heads, f"not a multiple of num_key_value_heads {kv_heads}")


def _described(stated: Mapping[str, Any], config: Config) -> Widths:
    """Read the description of a model's blocks. Raises: WidthsError."""
    text = text_config(config)
    dense = LayerWidths(query_heads_per_kv_head=dense_heads(text))
    projections = list[Projection]()
    _check_keys(stated, METHOD, {"quant_method", "layers_module", *UNITS, "layers"})
    for block in UNITS:
        value, where, has_number = stated.get(block), f"{METHOD}.{block}", block == "experts"
        if value is None:
            continue
        _check_keys(value, where, {"inputs", "output", "intermediate_size", "fused", *["num_experts"] * has_number})
        inputs, fused = _list(value.get("inputs"), f"{where}.inputs", 1, 2, "modules"), value.get("fused")
        if fused not in (None, "halves") or (fused and len(inputs) > 1):
            raise _fault(f"{where}.fused", fused, "not halves of one input")
        names = [_name(name, f"{where}.inputs[{i}]", has_number=has_number) for i, name in enumerate(inputs)]
        output = _name(value.get("output"), f"{where}.output", has_number=has_number)
        projections += block_table(block, names, output, fused=bool(fused))
        if len({*names, output}) <= len(names):
            raise _fault(where, [*names, output], "names a module twice")
        width = _integer(value.get("intermediate_size"), f"{where}.intermediate_size", 1, LARGEST_WIDTH)
        if has_number:
            num_experts = _integer(value.get("num_experts"), f"{where}.num_experts", 1, MOST_LAYERS)
            dense = replace(dense, expert_intermediate_sizes=(width,) * num_experts)
        else:
            dense = replace(dense, intermediate_size=width)
    number = text.get("num_hidden_layers")
    widths = Widths(
        table=TensorTable(projections=tuple(projections)),
        layers=_layers(stated.get("layers"), f"{METHOD}.layers", number, dense, is_family=False),
        dense=dense,
        layers_module=_name(stated.get("layers_module"), f"{METHOD}.layers_module"),
        is_family=False,
        is_renumbered=not states_widths(config),
    )
    for block in widths.blocks:
        if not any(widths.states(block, layer) for layer in widths.layers):
            raise WidthsError(f"config.json: {METHOD}.{block} describes a block that no layer states; {AGAIN}")
    return widths


def _layers(stated: Any, where: str, number: Any, dense: LayerWidths, *, is_family: bool) -> tuple[LayerWidths, ...]:
    entries = _list(stated, where, 1, MOST_LAYERS, "layers")
    if type(number) is int and len(entries) != number:
        raise WidthsError(f"config.json: {where} has {len(entries)} entries for {number} layers; {AGAIN}")
    return tuple(_layer(entry, f"{where}[{i}]", dense, is_family=is_family) for i, entry in enumerate(entries))


def _layer(stated: Any, where: str, dense: LayerWidths, *, is_family: bool) -> LayerWidths:
    """Read the entry of a layer. In a family it states heads and channels; a description leaves
    blocks as they are that it does not state. Raises: WidthsError."""
    names = heads_key, width_key, experts_key = tuple(vars(dense))
    _check_keys(stated, where, {*(names[:2] if is_family else [name for name in names[1:] if vars(dense)[name]])})
    heads, width, sizes = map(stated.get, names)
    layer = LayerWidths(query_heads_per_kv_head=dense.query_heads_per_kv_head)
    if is_family:
        most, place = dense.num_query_heads, f"{where}.{heads_key}"
        heads = _integers(_list(heads, place, 0, dense.num_kv_heads, "KV heads"), place, 1, most)
        if sum(heads) > most:
            raise _fault(place, list(heads), f"{sum(heads)} query heads of {most} dense ones")
        layer = replace(layer, query_heads_per_kv_head=heads)
    if is_family or width is not None:
        width = _integer(width, f"{where}.{width_key}", 0 if is_family else 1, dense.intermediate_size)
        layer = replace(layer, intermediate_size=width)
    if sizes is not None:
        experts, place = dense.expert_intermediate_sizes or (), f"{where}.{experts_key}"
        rows = _list(sizes, place, len(experts), len(experts), "widths, one per expert")
        sizes = _integers(rows, place, 0, experts[0])
        layer = replace(layer, expert_intermediate_sizes=sizes)
    return layer


def _list(values: Any, where: str, low: int, high: int, what: str) -> Sequence[Any]:
    if not isinstance(values, list | tuple) or not low <= len(values) <= high:
        raise _fault(where, values, f"not a list of {f'{low} to ' if low < high else ''}{high:,} {what}")
    return values


def _check_keys(stated: Any, where: str, known: set[str]) -> None:
    if not isinstance(stated, Mapping):
        raise _fault(where, stated, "not an object")
    if unknown := {*map(str, stated)} - known:
        raise WidthsError(f"config.json: {where} has the unknown key {short(min(unknown))}; update ddp-vllm")


def _name(value: Any, where: str, *, has_number: bool = False) -> str:
    text = value.replace("{}", "0") if isinstance(value, str) and value.count("{}") == has_number else ""
    if len(text) > 200 or not _NAME.fullmatch(text):
        raise _fault(where, value, "not the name of a module" + " with {} for the expert" * has_number)
    return str(value)


def _integer(value: Any, where: str, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise _fault(where, value, f"not an integer in {low}…{high:,}")
    return value


def _integers(values: Sequence[Any], where: str, low: int, high: int) -> tuple[int, ...]:
    return tuple(_integer(value, f"{where}[{i}]", low, high) for i, value in enumerate(values))


def _fault(where: str, value: Any, fault: str) -> WidthsError:
    return WidthsError(f"config.json: {where} is {short(value)}, {fault}; {AGAIN}")
