"""From masks to a checkpoint: slice the dense weights, fold the gates into them, and write a
Hugging Face folder.

The gates come from training, or from a published masks file (`apply_masks`).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ddp_prune.core.gates import Masks
from ddp_prune.core.selection import round_to_blocks
from ddp_prune.core.weights import UpdatedWeights
from ddp_prune.masks_file import read_masks, read_scores, write_masks
from ddp_prune.models.source import Source, open_source
from ddp_prune.models.writing import stored_tensors, write_model
from ddp_vllm.checkpoint import Checkpoint, check_links, read_config
from ddp_vllm.errors import CheckpointError, SettingError
from ddp_vllm.families import (
    WHOLE_EXPERT,
    Dimensions,
    described_config,
    fewer_experts,
    pruned_config,
    unit_shapes,
)
from ddp_vllm.masks import MASKS_FILE
from ddp_vllm.model_files import state_tokenizer_class
from ddp_vllm.output import atomic_folder
from ddp_vllm.pages.card import write_card
from ddp_vllm.provenance import local_provenance
from ddp_vllm.remote_code.module_widths import LayerChannels, ModuleWidths
from ddp_vllm.remote_code.tensors import BLOCK_OF, LAYERS, Projection
from ddp_vllm.remote_code.widths import LayerWidths
from ddp_vllm.tensor_parallel import check_tensor_parallel

Slice = Callable[[str, torch.Tensor], tuple[str, torch.Tensor] | None]
"""Takes the name and the value of a stored tensor, and returns its new name and kept part; None if
none is kept."""


def export(
    source: Source,
    gates: Masks,
    output: Path,
    *,
    head_unit: str,
    provenance: Mapping[str, Any],
    scores: Mapping[str, Masks] | None = None,
    overwrite: bool = False,
    extra_files: Mapping[str, str] | None = None,
    transform: UpdatedWeights | None = None,
    finish: Callable[[Path, Path], Checkpoint] = write_card,
) -> Checkpoint:
    """Write the pruned checkpoint: weights, config, tokenizer, remote code, masks and model card.
    Return it.

    If whole experts are removed, it is a stock checkpoint with fewer experts, which requires no
    remote code. The output appears whole or not at all.

    gates: float32 of `unit_shapes`, 0 for removed units.
    head_unit: the unit of attention gates, or `WHOLE_EXPERT`.
    provenance, scores: stored with the gates in the masks file.
    extra_files: file name -> text.
    transform: updates weights that were trained together with the masks.
    finish: writes the pages of the folder that will become `output`.

    Raises: OutputError if the output exists and `overwrite` is off; for whole experts as
        `kept_experts`, and SettingError if too few are kept.
    """
    stock = read_config(source.folder)
    if head_unit == WHOLE_EXPERT:
        kept = kept_experts(gates, source)
        slice_tensor: Slice = WholeExpertSlicer(gates, source, kept).slice
        numbers = fewer_experts(source.config, len(next(iter(kept.values()))))
        # the class of some families has another name for the key of the published config
        config = stock | ({key: number for key, number in numbers.items() if key in stock} or numbers)
        provenance = {**provenance, "experts": {"of": source.sizes.num_experts, "stay": kept}}
    elif source.structure:
        slicer = ChannelSlicer(gates, source)
        slice_tensor = slicer.slice
        config = described_config(stock, slicer.widths)
    else:
        slice_tensor = UnitSlicer(gates, source).slice
        config = pruned_config(source.config, layer_widths(gates, source.sizes))
    with atomic_folder(output, overwrite=overwrite) as folder:
        write_model(folder, source.folder, config, sliced_tensors(source, slice_tensor, transform))
        if "ddp_layers" in config:
            state_tokenizer_class(source.folder, folder)
        write_masks(gates, folder / MASKS_FILE, head_unit=head_unit, provenance=provenance, scores=scores)
        for name, text in (extra_files or {}).items():
            (folder / name).write_text(text, encoding="utf-8")
        return finish(folder, output)


def sliced_tensors(
    source: Source, slice_tensor: Slice, transform: UpdatedWeights | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the kept part of each stored tensor by its new name, rounded once to the dtype it was
    stored in."""
    for name, tensor in stored_tensors(source.folder):
        updated = transform(name, tensor) if transform else tensor
        for single, part in _singles(source, name, updated):
            if (kept := slice_tensor(single, part)) is not None:
                yield kept[0], kept[1].to(tensor.dtype)
    if transform:
        transform.check_complete()


def _singles(source: Source, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the experts in a tensor that stacks them, because they will differ in width; others as
    they are."""
    if source.structure and "experts" in source.sizes.blocks:
        yield from source.structure.unstack(name, tensor)
    else:
        yield name, tensor


def unit_scales(gates: Masks, sizes: Dimensions) -> dict[str, torch.Tensor]:
    """Return the gates of heads and MLP channels of all layers by unit, float32 [L, U].

    Key and value rows are not scaled: a KV head has scale 1 if a query head that reads it is kept,
    else 0.
    """
    if len(gates) == 1:  # the other blocks are not pruned
        every = unit_shapes(replace(sizes, blocks=("attn", "mlp")), "kv-group")
        gates = {kind: torch.ones(shape) for kind, shape in every.items()} | dict(gates)
    queries_LQ = gates["attn"].repeat_interleave(sizes.num_query_heads // gates["attn"].shape[1], dim=1)
    kv_heads_LK = (queries_LQ > 0).unflatten(1, (sizes.num_kv_heads, -1)).any(-1).float()
    return {"query_head": queries_LQ, "kv_head": kv_heads_LK, "channel": gates["mlp"]}


def layer_widths(gates: Masks, sizes: Dimensions) -> list[LayerWidths]:
    """Return the kept widths of each layer: the units whose gate is above 0."""
    if "experts" in gates:
        heads, rows = (sizes.queries_per_kv,) * sizes.num_kv_heads, (gates["experts"] > 0).sum(-1).tolist()
        of_layer = dict(zip(sizes.routed_layers, map(tuple, rows), strict=True))
        return [
            LayerWidths(
                query_heads_per_kv_head=heads, intermediate_size=0, expert_intermediate_sizes=of_layer.get(layer)
            )
            for layer in range(sizes.num_layers)
        ]
    kept = {unit: scales > 0 for unit, scales in unit_scales(gates, sizes).items()}
    heads_LK = kept["query_head"].unflatten(1, (sizes.num_kv_heads, -1)).sum(-1).tolist()
    return [
        LayerWidths(query_heads_per_kv_head=tuple(filter(None, heads)), intermediate_size=width)
        for heads, width in zip(heads_LK, kept["channel"].sum(-1).tolist(), strict=True)
    ]


class UnitSlicer:
    """Slices tensors one by one: removes heads and channels whose gate is 0, and emptied blocks."""

    def __init__(self, gates: Masks, source: Source) -> None:
        self.table, self.head_dim = source.family.tensors, source.sizes.head_dim
        self.scales = unit_scales(gates, source.sizes)

    def slice(self, name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor] | None:
        """Return the name and the kept part of a tensor, with gates folded in; None if nothing of
        it is kept."""
        if (parsed := _parse_name(name)) is None:
            return name, tensor
        layer, module, kind = parsed
        if (projection := self.table.find(module)) is None:
            return None if self._is_emptied(layer, module) else (name, tensor)
        scale = self._scale(projection, layer)
        keep = scale > 0
        if not keep.any():
            return None
        if projection.axis == 0:
            tensor = tensor[keep].contiguous()
        elif kind == "weight":  # a bias is added after the gates
            tensor = fold(tensor[:, keep], scale[keep])
        return name, tensor

    def _scale(self, projection: Projection, layer: int) -> torch.Tensor:
        """Return the gate of each row (axis 0) or column (axis 1) of a projection."""
        scales = torch.cat([self.scales[unit][layer] for unit in projection.units])
        return scales.repeat_interleave(projection.unit_size(self.head_dim))

    def _is_emptied(self, layer: int, module: str) -> bool:
        """Tell whether a module without units, such as a norm, belongs to a block that keeps no
        unit."""
        blocks = {BLOCK_OF[unit] for unit, scales in self.scales.items() if not (scales[layer] > 0).any()}
        return any(
            module in self.table.norms[block]
            or module.startswith(self.table.output(block).name.partition(".")[0] + ".")
            for block in blocks
        )


class ChannelSlicer:
    """Slices the MLPs and routed experts that a model's config describes, and leaves all other
    tensors as they are."""

    def __init__(self, gates: Masks, source: Source) -> None:
        assert source.structure
        dense, sizes = source.structure.widths, source.sizes
        self.rows: dict[str, dict[int, tuple[torch.Tensor, torch.Tensor]]] = {}
        for kind, values in gates.items():
            keep = values > 0
            # a linear layer without inputs is not portable, so one channel of zeros stays
            if kind == "mlp":
                keep[:, 0] |= ~keep.any(-1)
            self.rows[kind] = dict(zip(sizes.layers_of(kind), zip(values, keep, strict=True), strict=True))
        kept: dict[str, dict[int, Any]] = {
            kind: {layer: keep.sum(-1).tolist() for layer, (_, keep) in rows.items()}
            for kind, rows in self.rows.items()
        }
        mlps, experts = kept.get("mlp", {}), kept.get("experts", {})
        self.widths = ModuleWidths(
            layers_module=dense.layers_module,
            mlp=dense.mlp if mlps else None,
            experts=dense.experts if experts else None,
            layers=tuple(
                LayerChannels(
                    intermediate_size=mlps.get(layer),
                    expert_intermediate_sizes=tuple(experts[layer]) if layer in experts else None,
                )
                for layer in range(sizes.num_layers)
            ),
        )

    def slice(self, name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor] | None:
        """Return the name and the kept part of a tensor, as `UnitSlicer.slice`."""
        pruned = self.widths.find(name)
        if pruned is None or pruned.width is None:
            return name, tensor
        if not pruned.width:
            return None
        scale, keep = self.rows["experts" if pruned.block.num_experts else "mlp"][pruned.layer]
        if pruned.block.num_experts:
            scale, keep = scale[pruned.expert], keep[pruned.expert]
        if not pruned.is_output:
            return name, tensor[keep.repeat(pruned.block.rows_per_channel)].contiguous()
        return name, tensor if pruned.is_bias else fold(tensor[:, keep], scale[keep])


def kept_experts(gates: Masks, source: Source) -> dict[int, list[int]]:
    """Return the numbers of the experts that each routed layer keeps, equally many in every layer.

    Raises: CheckpointError for gates that keep a part of an expert, or more experts in one layer
        than in another.
    """
    open_LEC = gates["experts"] > 0
    kept_LE = open_LEC.any(-1)
    if not torch.equal(kept_LE, open_LEC.all(-1)) or len(set(kept_LE.sum(1).tolist())) != 1:
        raise CheckpointError("the masks do not keep whole experts, equally many in every layer; prune again")
    rows = zip(source.sizes.routed_layers, kept_LE, strict=True)
    return {layer: row.nonzero().flatten().tolist() for layer, row in rows}


class WholeExpertSlicer:
    """Removes whole experts and their rows of the router, and renumbers the kept experts."""

    def __init__(self, gates: Masks, source: Source, kept: Mapping[int, list[int]]) -> None:
        """kept: the numbers of the experts to keep, per routed layer."""
        assert source.structure and source.structure.widths.experts
        self.widths, self.kept = source.structure.widths, kept
        output = self.widths.experts.output if self.widths.experts else ""
        self.router = f"{output.partition('.experts.')[0]}.gate.weight"
        self.gates = dict(zip(kept, gates["experts"], strict=True))  # layer -> [E, C]

    def slice(self, name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor] | None:
        """Return the new name and the kept part of a tensor, as `UnitSlicer.slice`."""
        layers = f"{self.widths.layers_module}."
        number, _, rest = name.removeprefix(layers).partition(".")
        if name.startswith(layers) and rest == self.router and int(number) in self.kept:
            return name, tensor[self.kept[int(number)]]
        pruned = self.widths.find(name)
        if pruned is None or not pruned.block.num_experts or pruned.layer not in self.kept:
            return name, tensor
        kept = self.kept[pruned.layer]
        if pruned.expert not in kept:
            return None
        if pruned.is_output and not pruned.is_bias:
            tensor = fold(tensor, self.gates[pruned.layer][pruned.expert])
        before, after = f".experts.{pruned.expert}.", f".experts.{kept.index(pruned.expert)}."
        return name.replace(before, after), tensor


def fold(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Multiply the columns of a weight by gates, in float32 and rounded once to the weight's
    dtype."""
    return (weight.float() * scale).to(weight.dtype).contiguous()


def _parse_name(name: str) -> tuple[int, str, str] | None:
    """Return layer, module and kind (weight or bias) of a tensor of a decoder layer; None for any
    other tensor."""
    if not name.startswith(f"{LAYERS}."):
        return None
    layer, _, rest = name.removeprefix(f"{LAYERS}.").partition(".")
    module, _, kind = rest.rpartition(".")
    return int(layer), module, kind


def apply_masks(model: str, masks: Path, output: Path, *, overwrite: bool, tp: int = 1, align: int = 1) -> Checkpoint:
    """Prune a dense model by a masks file. The widths are those of the masks unless `align` changes
    them.

    Raises: CheckpointError if the masks belong to a model of other sizes, or lack the scores that
        aligning needs; SettingError if the kept units do not split over `tp` devices or are fewer
        than a block; else as `open_source` and `export`.
    """
    source = open_source(model)
    # the folder of a model, possibly from an untrusted source
    if (masks.parent / "config.json").exists():
        check_links(masks.parent)
    gates, provenance = read_masks(masks)[0], local_provenance(masks)
    head_unit = provenance.get("head_unit", "kv-group")
    shapes = {kind: tuple(values.shape) for kind, values in gates.items()}
    source = source.with_blocks([kind for kind in gates if kind in source.prunable])
    if (needed := unit_shapes(source.sizes, head_unit)) != shapes:
        raise CheckpointError(
            f"{masks} holds gates of {_shown(shapes)}, {model} requires gates of {_shown(needed)}; the masks "
            "were made for another model"
        )
    scores = read_scores(masks)
    # they describe other weights or widths
    outdated = {"recovery", "perplexity", "prompts", "answers", "latency", "run_id"}
    if align != 1:
        gates = _aligned(gates, scores, provenance, masks, align)
        outdated, provenance = outdated | {"rounding"}, provenance | {"aligned_after": align}
    layers = () if source.structure else layer_widths(gates, source.sizes)
    if tp != 1 and "num_attention_heads" in source.text_config:
        check_tensor_parallel(tp, source.config, layers, remedy=f"or prune with --tp {tp}")
    provenance = {name: value for name, value in provenance.items() if name not in outdated} | {"applied_to": model}
    return export(source, gates, output, head_unit=head_unit, provenance=provenance, scores=scores, overwrite=overwrite)


def _shown(shapes: Mapping[str, tuple[int, ...]]) -> str:
    return " and ".join(f"{kind} {list(shape)}" for kind, shape in shapes.items())


def _aligned(gates: Masks, scores: Mapping[str, Masks], provenance: Mapping[str, Any], path: Path, align: int) -> Masks:
    """Return gates whose widths are multiples of `align`. Raises: SettingError, CheckpointError."""
    kind = "experts" if "experts" in gates else "mlp"
    scope = provenance.get("recipe", {}).get("scope", "global")
    kept, units = int((gates[kind] > 0).sum()), gates[kind].shape[-1]
    if provenance.get("head_unit") == WHOLE_EXPERT:
        raise SettingError(f"{path} keeps whole experts with all their channels; leave --align out")
    if scope != "global":
        raise SettingError(f"{path} has a budget per {scope}, which --align would break; prune with --align")
    if not 0 < align <= min(kept, units):
        raise SettingError(
            f"align is {align}; with {kept:,} kept channels in rows of {units:,}, it must be 1 to {min(kept, units):,}"
        )
    saliency = scores.get("saliency", {}).get(kind)
    if saliency is None:
        raise CheckpointError(f"{path} holds no {kind}.saliency, which --align requires; prune again with --align")
    if saliency.shape != gates[kind].shape or not (saliency.isfinite() & (saliency >= 0)).all():
        raise CheckpointError(f"{path} holds {kind}.saliency of another shape, negative or not finite; prune again")
    return gates | {kind: round_to_blocks(gates[kind], saliency, align)}
