"""Reads the widths of layers from the shapes of their tensors, and plans what a converted folder
holds.

Query heads, KV heads and channels follow from the lengths that `tensors.py` says they have. A block
without tensors is a removed one. Biases that only the pruner added are kept; a family's class has a
bias on all projections of a block or on none, so the others get zeros.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ddp_vllm.dimensions import widths_of
from ddp_vllm.errors import ModelError
from ddp_vllm.formats import enclosing, groups
from ddp_vllm.remote_code.files import short
from ddp_vllm.remote_code.tensors import LAYERS, TABLES, Projection, TensorTable
from ddp_vllm.remote_code.widths import LayerWidths, Widths, head_dim, split

Shapes = Mapping[str, list[int]]
_BIASED = {"attn": ("attention_bias", ("llama", "granite", "smollm3", "gemma2", "gemma3_text")),
           "mlp": ("mlp_bias", ("llama", "granite", "smollm3"))}  # fmt: skip
"""Block -> the flag that gives all its projections a bias, and the families that have it in
transformers and vLLM."""
AGAIN = "copy the whole folder again, or write it again with the tool that made it"


class Layer(NamedTuple):
    """The modules of one decoder layer on disk, relative to it."""

    number: int
    weights: dict[str, list[int]]
    biases: dict[str, list[int]]


class Reading(NamedTuple):
    """What the tensors of a family's model say of it."""

    enclosing: dict[str, Any]
    """The dense config, with the sizes that no layer exceeds."""
    config: dict[str, Any]
    """The same with the flags of biases that are on disk."""
    widths: Widths
    zeros: dict[str, str]
    """Bias of zeros to add -> the weight whose rows and dtype it has."""


def read_layers(dense: Mapping[str, Any], shapes: Shapes, *, sizes_known: bool = False) -> Reading:
    """Return the widths of all layers, and the config with the head size and biases that tensors have.

    sizes_known: the config has the sizes of the dense model, as --dense gives them; otherwise a
    tool may have written those of a pruned layer.
    Raises: ModelError for tensors that fit no widths, or whose widths have two readings.
    """
    number = dense["num_hidden_layers"]
    layers = [Layer(index, {}, {}) for index in range(number)]
    for name, shape in shapes.items():
        layer, module, kind = split(name) or (0, "", "")
        if kind in ("weight", "bias"):
            if layer >= number:
                raise ModelError(f"tensor {name} is of layer {layer}, but config.json has {number} layers")
            (layers[layer].biases if kind == "bias" else layers[layer].weights)[module] = shape
    if not any(layer.weights for layer in layers):
        raise ModelError(f"its tensors have names like {short(min(shapes, default=''))}, not {LAYERS}.0.…; {AGAIN}")
    table = TABLES[dense["model_type"]]
    size = head_dim(dense) if sizes_known or dense.get("head_dim") else _head_size(dense, table, layers)
    widths = [_of_blocks(layer, table, size) for layer in layers]
    config = enclosing({**dense, "head_dim": size}, widths)
    return Reading(config, *_biases(config, dense, layers, widths))


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
        query_heads_per_kv_head=groups(queries, kv_heads, f"layer {layer.number}") if heads else (),
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
            raise ModelError(f"layer {layer.number} lacks {name}.weight, but has other tensors of that block; {AGAIN}")
        unknown = [kind for kind in projection.units if kind not in units]
        known = unit * sum(units.get(kind, 0) for kind in projection.units)
        count = (length - known) / (unit * len(unknown)) if unknown else 0
        if (unknown and (count < 1 or count % 1)) or (not unknown and length != known):
            what = (
                f"{count:g} heads of {unit}" if unknown and unit > 1 else f"not the {known} of the same units elsewhere"
            )
            axis = "columns" if projection.axis else "rows"
            raise ModelError(f"layer {layer.number}: {name} has {length} {axis}, {what}; {AGAIN}")
        units |= {kind: int(count) for kind in unknown}
    return units


def _length(layer: Layer, projection: Projection) -> int | None:
    """Return the length of a projection's weight along the axis that pruning shortens; None if
    there is none."""
    shape = layer.weights.get(projection.name)
    return shape[projection.axis] if shape is not None and len(shape) == 2 else None


def _biases(
    enclosing: Mapping[str, Any], dense: Mapping[str, Any], layers: Sequence[Layer], widths: list[LayerWidths]
) -> tuple[dict[str, Any], Widths, dict[str, str]]:
    """Return the last three parts of a `Reading`.

    A block gets biases of zeros only if the pruner added some bias to such blocks; those of the
    dense class must be there. Raises: ModelError if the class has no place for a bias, or a block
    without units has one on its output projection, which it would still add.
    """
    config, model_type = dict(enclosing), dense["model_type"]
    stated = widths_of(dense).biased
    for layer in layers:
        for module in (module for module in layer.biases if module not in stated):
            flag, families = _BIASED["attn" if module.startswith("self_attn.") else "mlp"]
            if model_type not in families:
                raise ModelError(
                    f"layer {layer.number} has {module}.bias, for which models of type {model_type} have no place in "
                    "transformers or vLLM; prune without added biases"
                )
            config[flag] = True
    pruned = replace(widths_of(config), layers=tuple(widths))
    for layer, kept in zip(layers, widths, strict=True):
        counts = {"attn": kept.num_kv_heads, "mlp": kept.intermediate_size}
        for module in (pruned.table.output(block).name for block in pruned.table.norms if not counts[block]):
            if any(layer.biases.get(module, ())):
                raise ModelError(
                    f"layer {layer.number} has {module}.bias, but no unit of that block: a constant that no supported "
                    "class adds; keep one head or channel there"
                )
    parts = {module.partition(".")[0] for layer in layers for module in layer.biases}
    added = [module for module in pruned.biased if module.partition(".")[0] in parts and module not in stated]
    zeros = {
        f"{LAYERS}.{layer.number}.{module}.bias": f"{LAYERS}.{layer.number}.{module}.weight"
        for layer in layers
        for module in added
        if module in layer.weights and module not in layer.biases
    }
    return config, pruned, zeros
