"""Reads the widths of a family's layers from the shapes of their tensors.

Query heads, KV heads and channels follow from the lengths that `tensors.py` says they have. A block
without tensors is a removed one. Biases that only the pruner added are kept; a family's class has a
bias on all projections of a block or on none, so the others get zeros.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ddp_vllm.dimensions import widths_of
from ddp_vllm.errors import ModelError
from ddp_vllm.formats import enclosing, groups
from ddp_vllm.remote_code.files import short
from ddp_vllm.remote_code.tensors import LAYERS, TABLES, Config, Projection, Shapes, TensorTable
from ddp_vllm.remote_code.widths import LayerWidths, Widths, head_dim, split

_BIASED = {"attn": ("attention_bias", ("llama", "granite", "smollm3", "gemma2", "gemma3_text")),
           "mlp": ("mlp_bias", ("llama", "granite", "smollm3"))}  # fmt: skip
"""Block -> the flag that gives all its projections a bias, and the families that have it in
transformers and vLLM."""
AGAIN = "copy the whole folder again, or write it again with the tool that made it"


def read_layers(
    dense: Config, shapes: Shapes, *, sizes_known: bool = False
) -> tuple[dict[str, Any], Widths, dict[str, str]]:
    """Return the dense config with sizes that no layer exceeds and the flags of biases on disk, the
    widths, and each bias of zeros to add with the weight that it belongs to.

    sizes_known: the config has the sizes of the dense model, as --dense gives them; otherwise a
    tool may have written those of a pruned layer.
    Raises: ModelError for tensors that fit no widths, or whose widths have two readings.
    """
    layers: list[dict[str, list[int]]] = [{} for _ in range(dense["num_hidden_layers"])]
    for name, shape in shapes.items():
        layer, module, kind = split(name) or (0, "", "")
        if kind in ("weight", "bias"):
            if layer >= len(layers):
                raise ModelError(f"tensor {name} is of layer {layer}, but config.json has {len(layers)} layers")
            layers[layer][f"{module}.{kind}"] = shape
    if not any(layers):
        raise ModelError(f"its tensors have names like {short(min(shapes, default=''))}, not {LAYERS}.0.…; {AGAIN}")
    table = TABLES[dense["model_type"]]
    size = head_dim(dense) if sizes_known or dense.get("head_dim") else _head_size(dense, table, layers)
    widths = []
    for index, tensors in enumerate(layers):
        units = _units(tensors, table, size)
        heads, kv_heads = (units.get(kind, 0) for kind in ("query_head", "kv_head"))
        queries = groups(heads, kv_heads, f"layer {index}") if heads or kv_heads else ()
        widths.append(LayerWidths(query_heads_per_kv_head=queries, intermediate_size=units.get("channel", 0)))
    return _with_biases(enclosing({**dense, "head_dim": size}, widths), layers, widths)


def _head_size(dense: Config, table: TensorTable, layers: Sequence[Shapes]) -> int:
    """Return the size of a head where config.json has only a number of heads, which may be that of
    a pruned layer. Raises: ModelError unless every layer has that number."""
    for layer in layers:
        if norm := layer.get("self_attn.q_norm.weight"):  # as long as a head
            return norm[0]
    heads, size = dense["num_attention_heads"], head_dim(dense)
    lengths = {_length(layer, table.output("attn")) or heads * size for layer in layers}
    if lengths != {heads * size}:
        raise ModelError(
            f"config.json has {heads} heads but no head_dim, and o_proj has {min(lengths)} to {max(lengths)} "
            "columns, so the size of a head is unknown; add head_dim to config.json, or pass the dense model as --dense"
        )
    return size


def _units(layer: Shapes, table: TensorTable, size: int) -> dict[str, int]:
    """Return how many whole units of each kind a layer has, by the first projection that has them;
    none of a removed block. `Widths.check` compares all projections with them."""
    units: dict[str, int] = {}
    for part in sorted(table.projections, key=lambda part: -part.axis):  # those with units of one kind first
        unknown = [kind for kind in part.units if kind not in units]
        if unknown and (length := _length(layer, part)):
            number = length // part.unit_size(size) - sum(units.get(kind, 0) for kind in part.units)
            units |= dict.fromkeys(unknown, number // len(unknown))
    return units


def _length(layer: Shapes, projection: Projection) -> int | None:
    """Return the length of a projection's weight along the axis that pruning shortens; None if
    there is none."""
    shape = layer.get(f"{projection.name}.weight", ())
    return shape[projection.axis] if len(shape) == 2 else None


def _with_biases(
    config: dict[str, Any], layers: Sequence[Shapes], widths: list[LayerWidths]
) -> tuple[dict[str, Any], Widths, dict[str, str]]:
    """Return the values of `read_layers`.

    A block gets biases of zeros only if the pruner added some bias to such blocks; those of the
    dense class must be there. Raises: ModelError if the class has no place for a bias, or a block
    without units has one on its output projection, which it would still add.
    """
    biased = [{name[:-5] for name in layer if name.endswith(".bias")} for layer in layers]
    stated, present = widths_of(config).biased, set[str]().union(*biased)
    for module in sorted(present - stated):
        flag, families = _BIASED["attn" if module.startswith("self_attn.") else "mlp"]
        if config["model_type"] not in families:
            raise ModelError(
                f"it has {module}.bias, for which models of type {config['model_type']} have no place in transformers "
                "or vLLM; prune without added biases"
            )
        config[flag] = True
    pruned = replace(widths_of(config), layers=tuple(widths))
    parts = {module.partition(".")[0] for module in present}
    added = [module for module in pruned.biased - stated if module.partition(".")[0] in parts]
    zeros: dict[str, str] = {}
    for index, (layer, modules, kept) in enumerate(zip(layers, biased, widths, strict=True)):
        removed = {pruned.table.output(block).name for block in kept.removed_blocks}
        if constants := [module for module in removed & modules if any(layer[f"{module}.bias"])]:
            raise ModelError(
                f"layer {index} has {constants[0]}.bias, but no unit of that block: a constant that no supported class "
                "adds; keep one head or channel there"
            )
        new = [module for module in added if f"{module}.weight" in layer and module not in modules]
        zeros |= {f"{LAYERS}.{index}.{module}.bias": f"{LAYERS}.{index}.{module}.weight" for module in new}
    return config, pruned, zeros
