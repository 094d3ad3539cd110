"""Reads the widths of layers from the shapes of their tensors, and plans what a converted folder
holds.

Query heads, KV heads and channels follow from the lengths that `tensors.py` says they have. A block
without tensors is a removed one. Biases that only the pruner added are kept; a family's class has a
bias on all projections of a block or on none, so the others get zeros.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddp_vllm.errors import ModelError
from ddp_vllm.families import dense_layers
from ddp_vllm.formats import groups
from ddp_vllm.remote_code.files import short
from ddp_vllm.remote_code.tensors import LAYERS, TABLES, Projection, TensorTable
from ddp_vllm.remote_code.widths import (
    LayerWidths,
    ModelWidths,
    head_dim,
)

Shapes = Mapping[str, list[int]]
_TENSOR = re.compile(r"model\.layers\.(\d{1,6})\.(.+)\.(weight|bias)")
_BIASED = {"attn": ("attention_bias", ("llama", "granite", "smollm3", "gemma2", "gemma3_text")),
           "mlp": ("mlp_bias", ("llama", "granite", "smollm3"))}  # fmt: skip
"""Block -> the flag that gives all its projections a bias, and the families that have it in
transformers and vLLM."""
AGAIN = "copy the whole folder again, or write it again with the tool that made it"


@dataclass(frozen=True, kw_only=True)
class Layer:
    """The modules of one decoder layer on disk, relative to it."""

    index: int
    weights: Shapes
    biases: Shapes

    @classmethod
    def all_of(cls, shapes: Shapes, number: int) -> "list[Layer]":
        """Return all layers. Raises: ModelError if there are tensors of more than `number`
        layers."""
        layers: list[tuple[dict[str, list[int]], dict[str, list[int]]]] = [({}, {}) for _ in range(number)]
        for name, shape in shapes.items():
            if match := _TENSOR.fullmatch(name):
                if int(match[1]) >= number:
                    raise ModelError(f"tensor {name} is of layer {match[1]}, but config.json has {number} layers")
                layers[int(match[1])][match[3] == "bias"][match[2]] = shape
        return [cls(index=index, weights=parts[0], biases=parts[1]) for index, parts in enumerate(layers)]


def read_layers(
    dense: Mapping[str, Any], shapes: Shapes, *, sizes_known: bool = False
) -> tuple[dict[str, Any], list[LayerWidths]]:
    """Return the widths of all layers, and the config with the head size and number of experts that
    tensors have.

    sizes_known: the config has the sizes of the dense model, as --dense gives them; otherwise a
    tool may have written those of a pruned layer.
    Raises: ModelError for tensors that fit no widths, or whose widths have two readings.
    """
    layers = Layer.all_of(shapes, dense["num_hidden_layers"])
    if not any(layer.weights for layer in layers):
        raise ModelError(f"its tensors have names like {short(min(shapes, default=''))}, not {LAYERS}.0.…; {AGAIN}")
    table = TABLES[dense["model_type"]]
    size = head_dim(dense) if sizes_known or dense.get("head_dim") else _head_size(dense, table, layers)
    return {**dense, "head_dim": size}, [_of_blocks(layer, table, size) for layer in layers]


def _head_size(dense: Mapping[str, Any], table: TensorTable, layers: Sequence[Layer]) -> int:
    """Return the size of a head where config.json has only a number of heads, which pruning may
    have changed.

    That number is the dense model's or some layer's. Each of these readings gives a size, and the
    sizes that divide all lengths of attention are possible ones. Raises: ModelError unless there is
    exactly one.
    """
    norms = [layer.weights["self_attn.q_norm"][0] for layer in layers if layer.weights.get("self_attn.q_norm")]
    if norms:  # as long as a head
        return norms[0]
    heads, stated, output = dense["num_attention_heads"], head_dim(dense), table.output("attn")
    projections = (output, *table.inputs("attn"))
    lengths = {_length(layer, projection) or 0 for layer in layers for projection in projections} - {0}
    outputs = {_length(layer, output) or 0 for layer in layers} - {0}
    sizes = sorted({stated, *(length // heads for length in outputs if length % heads == 0)})
    possible = [size for size in sizes if size % 2 == 0 and not any(length % size for length in lengths)]
    if not lengths or (possible == [stated] and heads * stated in outputs):
        return stated
    length = max(outputs)
    readings = " or ".join(f"{length / size:g} heads of {size}" for size in sizes)
    raise ModelError(
        f"config.json has {heads} heads but no head_dim, and tools also write the number of a pruned layer there: "
        f"{length} columns of o_proj could be {readings}; add head_dim to config.json, or pass the folder of the dense "
        "model as --dense"
    )


def _of_blocks(layer: Layer, table: TensorTable, size: int) -> LayerWidths:
    """Return the widths of a layer of a dense family. Raises: ModelError."""
    heads, channels = _units(layer, table, "attn", size), _units(layer, table, "mlp", size)
    kv_heads, queries = heads.get("kv_head", 0), heads.get("query_head", 0)
    return LayerWidths(
        query_heads_per_kv_head=groups(queries, kv_heads, f"layer {layer.index}") if heads else (),
        intermediate_size=channels.get("channel", 0),
    )


def _units(layer: Layer, table: TensorTable, block: str, size: int) -> dict[str, int]:
    """Return how many units of each kind a block has; {} if it is removed. Raises: ModelError."""
    projections = (table.output(block), *table.inputs(block))
    lengths = {projection: _length(layer, projection) for projection in projections}
    if not any(lengths.values()):
        return {}
    units: dict[str, int] = {}
    for projection, length in lengths.items():
        name, unit = projection.name, projection.unit_size(size)
        if length is None:
            raise ModelError(f"layer {layer.index} lacks {name}.weight, but has other tensors of that block; {AGAIN}")
        unknown = [kind for kind in projection.units if kind not in units]
        known = unit * sum(units.get(kind, 0) for kind in projection.units)
        count = (length - known) / (unit * len(unknown)) if unknown else 0
        if (unknown and (count < 1 or count % 1)) or (not unknown and length != known):
            what = (
                f"{count:g} heads of {unit}" if unknown and unit > 1 else f"not the {known} of the same units elsewhere"
            )
            axis = "columns" if projection.axis else "rows"
            raise ModelError(f"layer {layer.index}: {name} has {length} {axis}, {what}; {AGAIN}")
        units |= {kind: int(count) for kind in unknown}
    return units


def _length(layer: Layer, projection: Projection) -> int | None:
    """Return the length of a projection's weight along the axis that pruning shortens; None if
    there is none."""
    shape = layer.weights.get(projection.name)
    return shape[projection.axis] if shape is not None and len(shape) == 2 else None


def with_biases(dense: Mapping[str, Any], shapes: Shapes) -> dict[str, Any]:
    """Return the config with the flags of the biases that are on disk. Raises: ModelError if the
    class has none."""
    config, model_type = dict(dense), dense["model_type"]
    own = _biased(dense)
    for layer in Layer.all_of(shapes, dense["num_hidden_layers"]):
        for module in (module for module in layer.biases if module not in own):
            flag, families = _BIASED["attn" if module.startswith("self_attn.") else "mlp"]
            if model_type not in families:
                raise ModelError(
                    f"layer {layer.index} has {module}.bias, for which models of type {model_type} have no place in "
                    "transformers or vLLM; prune without added biases"
                )
            config[flag] = True
    return config


def _biased(dense: Mapping[str, Any]) -> Collection[str]:
    """Return the modules that have a bias by the dense model's config."""
    return ModelWidths.of({**dense, "ddp_layers": [layer.to_json() for layer in dense_layers(dense)]}).biased


def zeros(widths: ModelWidths, dense: Mapping[str, Any], shapes: Shapes) -> Iterator[tuple[str, str]]:
    """Yield each bias of zeros to add, with the weight whose rows and dtype it has.

    A block gets them only if the pruner added some bias to such blocks; those of the dense class
    must be there.
    """
    layers, stated = Layer.all_of(shapes, len(widths.layers)), _biased(dense)
    parts = {module.partition(".")[0] for layer in layers for module in layer.biases}
    modules = [module for module in widths.biased if module.partition(".")[0] in parts and module not in stated]
    for layer in layers:
        for module in (module for module in modules if module in layer.weights and module not in layer.biases):
            yield f"{LAYERS}.{layer.index}.{module}.bias", f"{LAYERS}.{layer.index}.{module}.weight"


def check_constants(layers: Sequence[LayerWidths], table: TensorTable, shapes: Shapes) -> None:
    """Refuse a block without units whose output projection has a bias, which it would still add.
    Raises: ModelError."""
    for layer in Layer.all_of(shapes, len(layers)):
        counts = {"attn": layers[layer.index].num_kv_heads, "mlp": layers[layer.index].intermediate_size}
        for module in (table.output(block).name for block in table.norms if not counts[block]):
            if any(layer.biases.get(module, ())):
                raise ModelError(
                    f"layer {layer.index} has {module}.bias, but no unit of that block: a constant that no supported "
                    "class adds; keep one head or channel there"
                )
