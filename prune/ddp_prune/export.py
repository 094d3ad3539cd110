"""From masks to a checkpoint: slice the dense weights, fold the gates into them, and write a
Hugging Face folder.

The gates come from training, or from a published masks file (`apply_masks`), which this file reads
and writes too.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddp_prune.core.gates import GatedModel, Masks
from ddp_prune.core.weights import UpdatedWeights
from ddp_prune.models.evaluation import reference_of
from ddp_prune.models.loading import load_model
from ddp_prune.models.source import Source, open_source
from ddp_prune.run_folder import identity_of_weights
from ddp_prune.text.tokens import load_tokenizer
from ddp_vllm.checkpoint import Checkpoint, check_links, read_config
from ddp_vllm.dimensions import WHOLE_EXPERT, Dimensions, is_copied_head, unit_shapes, widths_of
from ddp_vllm.errors import CheckpointError, ModelError
from ddp_vllm.families import fewer_experts, pruned_config, warn
from ddp_vllm.masks import MASKS_FILE, Provenance, masks_metadata, read_masks_file
from ddp_vllm.model_files import has_tokenizer, save_tensors, state_tokenizer, stored_tensors, write_model
from ddp_vllm.output import atomic_folder
from ddp_vllm.pages.card import write_card
from ddp_vllm.proof import Reference, prove
from ddp_vllm.provenance import header_of, local_provenance, provenance_of, remember
from ddp_vllm.remote_code.widths import METHOD, LayerWidths, Place, Widths

OF_MASKS = ("recipe", "run", "search_steps", "targets", "texts", "rounding", "learning_rate", "routing", "fingerprint")
"""Entries of a provenance on masks and their search; all others describe the model that they were found with."""


def export(
    source: Source,
    gates: Masks,
    output: Path,
    *,
    head_unit: str,
    provenance: Mapping[str, Any],
    scores: Masks | None = None,
    overwrite: bool = False,
    transform: UpdatedWeights | None = None,
    reference: Reference | None = None,
    finish: Callable[[Path, Path], Checkpoint] = write_card,
) -> Checkpoint:
    """Write the pruned checkpoint: weights, config, tokenizer, remote code, masks and model card.
    Return it.

    If whole experts are removed, it is a stock checkpoint with fewer experts, which requires no
    remote code. The output appears whole or not at all.

    gates: float32 of `unit_shapes`, 0 for removed units.
    head_unit: the unit of attention gates, or `WHOLE_EXPERT`.
    provenance, scores: stored with the gates in the masks file.
    transform: updates weights that were trained together with the masks.
    reference: of the measured model, which the folder must repeat (`prove`).
    finish: writes the pages, and other files, of the folder that will become `output`.

    Raises: OutputError if the output exists and `overwrite` is off; CheckpointError if its proof
        fails; for whole experts as
        `WholeExpertSlicer`, and SettingError if too few are kept.
    """
    stock = read_config(source.folder)
    slicer = (WholeExpertSlicer if head_unit == WHOLE_EXPERT else UnitSlicer)(gates, source)
    if isinstance(slicer, WholeExpertSlicer):
        numbers = fewer_experts(source.config, slicer.num_kept)
        # the class of some families has another name for the key of the published config
        config = stock | ({key: number for key, number in numbers.items() if key in stock} or numbers)
        config |= {METHOD: slicer.widths.to_json()}
    else:
        config = pruned_config(stock, slicer.widths)
    with atomic_folder(output, overwrite=overwrite) as folder:
        write_model(folder, source.folder, config, sliced_tensors(source, slicer, transform))
        state_tokenizer(source.tokenizer, folder, has_own_type="ddp_layers" in config)
        proved = {**_removed_before(source.folder, stock), **provenance, **prove(folder, reference)}
        write_masks(gates, folder / MASKS_FILE, head_unit=head_unit, provenance=proved, scores=scores)
        return finish(folder, output)


def _removed_before(folder: Path, stock: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries on what the dense model lacks already, tokens and whole experts. stock: its config."""
    entries = {name: value for name, value in provenance_of(folder).items() if name in ("trimmed", "fewer_experts")}
    if METHOD in stock:
        widths = widths_of(stock)
        first, _ = entries.get("fewer_experts", (widths.num_experts, 0))
        entries["fewer_experts"] = [first, widths.on_disk.num_experts]
    return entries


def sliced_tensors(
    source: Source, slicer: "UnitSlicer", transform: UpdatedWeights | None
) -> Iterator[tuple[str, Tensor]]:
    """Yield the kept part of each stored tensor by its new name, rounded once to the dtype it was
    stored in."""
    # experts in a tensor that stacks them will differ in width
    stacked = source.structure if "experts" in source.sizes.blocks else None
    for name, tensor in stored_tensors(source.folder):
        if is_copied_head(source.config, name):
            continue
        updated = transform(name, tensor) if transform else tensor
        for single, part in stacked.unstack(name, updated) if stacked else [(name, updated)]:
            if (kept := slicer.slice(single, part)) is not None:
                yield kept[0], kept[1].to(tensor.dtype)
    if transform:
        transform.check_complete()


def layer_widths(gates: Masks, sizes: Dimensions, dense: Widths) -> list[LayerWidths]:
    """Return the kept widths of each layer: the units whose gate is above 0, and all units of the
    blocks without gates."""
    layers = list(dense.dense_layers)
    for kind, rows in gates.items():
        for layer, row in zip(sizes.layers_of(kind), rows > 0, strict=True):
            if kind == "attn":
                heads = row.repeat_interleave(sizes.num_query_heads // len(row)).unflatten(0, (sizes.num_kv_heads, -1))
                counts = tuple(filter(None, heads.sum(-1).tolist()))
                layers[layer] = replace(layers[layer], query_heads_per_kv_head=counts)
            elif kind == "mlp":  # in a stock class, a linear layer without inputs is not portable
                width = max(int(not dense.is_family), int(row.sum()))
                layers[layer] = replace(layers[layer], intermediate_size=width)
            else:
                layers[layer] = replace(layers[layer], expert_intermediate_sizes=tuple(row.sum(-1).tolist()))
    return layers


class UnitSlicer:
    """Slices tensors one by one by the table of the model: removes heads and channels whose gate is
    0, and emptied blocks of a family."""

    def __init__(self, gates: Masks, source: Source) -> None:
        self.gates = {kind: dict(zip(source.sizes.layers_of(kind), rows, strict=True)) for kind, rows in gates.items()}
        """Module type -> layer -> the gates of its units, float32 [U], or [E, C]."""
        dense = source.widths if source.widths.is_family else source.widths.only(gates)
        self.widths = replace(dense, layers=tuple(layer_widths(gates, source.sizes, dense)))

    def slice(self, name: str, tensor: Tensor) -> tuple[str, Tensor] | None:
        """Return the name and the kept part of a tensor, with gates folded in; None if nothing of
        it is kept."""
        if (place := self.widths.find(name)) is None:
            return None if self.widths.is_removed(name) else (name, tensor)
        if place.projection.block not in self.gates or place.length is None:
            return name, tensor
        if not place.length:
            return None
        scale = self._scale(place)
        keep = scale > 0
        if not keep.any():  # the channel of zeros of an MLP of a stock class
            keep.unflatten(0, (len(place.projection.units), -1))[:, 0] = True
        if place.axis == 0:
            return name, tensor[keep].contiguous()
        # in float32, and rounded once to the weight's dtype
        return name, (tensor[:, keep].float() * scale[keep]).to(tensor.dtype).contiguous()

    def _scale(self, place: Place) -> Tensor:
        """Return the gate of each row (axis 0) or column (axis 1) of a projection.

        Key and value rows are not scaled: a KV head has scale 1 if a query head that reads it is
        kept, else 0.
        """
        gates, dense = self.gates[place.projection.block][place.layer], self.widths.dense
        scales = {"channel": gates, "expert_channel": gates[place.expert]}
        if place.projection.block == "attn":
            queries = gates.repeat_interleave(dense.num_query_heads // len(gates))
            is_kept = (queries > 0).unflatten(0, (dense.num_kv_heads, -1)).any(-1)
            scales = {"query_head": queries, "kv_head": is_kept.float()}
        rows = torch.cat([scales[unit] for unit in place.projection.units])
        return rows.repeat_interleave(place.projection.unit_size(self.widths.head_dim))


class WholeExpertSlicer(UnitSlicer):
    """Removes whole experts and their rows of the router, and renumbers the kept experts."""

    def __init__(self, gates: Masks, source: Source) -> None:
        """Raises: CheckpointError for gates that keep a part of an expert, or more experts in one
        layer than in another."""
        open_LEC = gates["experts"] > 0
        kept_LE = open_LEC.any(-1)
        if not torch.equal(kept_LE, open_LEC.all(-1)) or len(set(kept_LE.sum(1).tolist())) != 1:
            raise CheckpointError("the masks do not keep whole experts, equally many in every layer; prune again")
        super().__init__(gates, source)
        self.kept = {
            layer: row.nonzero().flatten().tolist()
            for layer, row in zip(source.sizes.routed_layers, kept_LE, strict=True)
        }
        """Routed layer -> the numbers of the kept experts."""
        self.num_kept = int(kept_LE[0].sum())

    def slice(self, name: str, tensor: Tensor) -> tuple[str, Tensor] | None:
        """Return the new name and the kept part of a tensor, as `UnitSlicer.slice`."""
        layer, module, kind = self.widths.split(name) or (0, "", "")
        if (module, kind) == (self.widths.router, "weight") and layer in self.kept:
            return name, tensor[self.kept[layer]]
        place, sliced = self.widths.find(name), super().slice(name, tensor)
        if place is None or sliced is None or layer not in self.kept:
            return sliced
        number = self.kept[layer].index(place.expert)
        return name.replace(f".experts.{place.expert}.", f".experts.{number}."), sliced[1]


def apply_masks(model: str, masks: Path, output: Path, *, overwrite: bool, proof: bool = True) -> Checkpoint:
    """Prune a dense model by a masks file.

    proof: compare the written folder with the dense model under the masks, which is loaded for it.
    Raises: CheckpointError if the masks belong to a model of other sizes; else as `open_source` and
        `export`.
    """
    source = open_source(model)
    # the masks file is in the folder of a model, possibly from an untrusted source
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
    # another fine-tune may have the same masks on purpose, another model hardly
    cut = identity_of_weights(source.folder)
    if (known := provenance.get("fingerprint", {}).get("weights")) and known != cut:
        made_for = provenance.get("recipe", {}).get("model", "another model")
        warn(f"{masks} was made for other weights ({made_for}) than those of {model}; evaluate the result")
    provenance = {name: provenance[name] for name in OF_MASKS if name in provenance}
    provenance |= {"applied_to": model, "applied_weights": cut}
    scores = read_scores(masks)
    reference = Reference() if proof else None
    with suppress(ModelError):  # transformers loads no shards without an index, which can be cut all the same
        if proof:
            masked = GatedModel(load_model(source, "auto"), source.widths, source.sizes, head_unit)
            tokenizer = load_tokenizer(source.tokenizer) if has_tokenizer(source.folder) else None
            with masked.masks(gates):
                reference = reference_of(masked.model, tokenizer)
            del masked
    return export(
        source, gates, output, head_unit=head_unit, provenance=provenance, scores=scores, overwrite=overwrite,
        reference=reference,
    )  # fmt: skip


def warn_of_other_weights(folder: Path, dense: Source) -> None:
    """Warn if the weights of the dense model are not those that a pruned folder was made from, as after another
    fine-tuning into the same folder."""
    known = Provenance.of(provenance_of(folder)).dense_weights
    if known and known != identity_of_weights(dense.folder):
        warn(f"{folder} was pruned from other weights than {dense.folder} now has, with which it is compared")


def _shown(shapes: Mapping[str, tuple[int, ...]]) -> str:
    return " and ".join(f"{kind} {list(shape)}" for kind, shape in shapes.items())


def read_masks(path: Path) -> tuple[Masks, dict[str, Any]]:
    """Return the gates of a masks file, a tensor per module type, and its provenance.
    Raises: CheckpointError."""
    tensors, provenance = read_masks_file(path)
    kinds = [kind for kind in ("attn", "mlp", "experts") if f"{kind}.gates" in tensors]
    if not kinds:
        raise CheckpointError(
            f"{path} is not a masks file (it holds no mlp.gates); pass the {MASKS_FILE} of a pruned folder"
        )
    gates = {kind: torch.from_numpy(tensors[f"{kind}.gates"]).float() for kind in kinds}
    for kind, values in gates.items():
        if not (values.isfinite() & (values >= 0)).all():
            raise CheckpointError(f"{path} holds {kind} gates that are negative or not finite; prune again")
    return gates, provenance


def read_scores(path: Path) -> Masks:
    """Return the other tensors of a masks file by their names: the gates before rounding, such as
    `mlp.z`, and their importance, squared gradient × z², such as `mlp.saliency`."""
    tensors = read_masks_file(path)[0]
    return {name: torch.from_numpy(values) for name, values in tensors.items() if not name.endswith(".gates")}


def copy_masks(source: Path, folder: Path, provenance: Mapping[str, Any]) -> None:
    """Write the gates and scores of a folder's masks file into another folder, if it has some, with other
    provenance: of a model that another tool pruned only the widths are known."""
    masks, has_masks = source / MASKS_FILE, "converted" not in provenance
    gates, scores = (read_masks(masks)[0], read_scores(masks)) if has_masks else ({}, {})
    head_unit = str(provenance.get("head_unit", "kv-group"))
    write_masks(gates, folder / MASKS_FILE, head_unit=head_unit, provenance=provenance, scores=scores)


def write_masks(
    gates: Masks,
    path: Path,
    *,
    head_unit: str,
    provenance: Mapping[str, Any],
    scores: Masks | None = None,
) -> None:
    """Write a masks file, which `read_masks` and `read_scores` read.

    gates: float32 per module type, as in `export`. scores: as `read_scores` returns them.
    provenance: how the masks were made. The file holds the names of models and texts only; their
    paths are kept in this machine's cache.
    """
    tensors = {f"{kind}.gates": values for kind, values in gates.items()} | (scores or {})
    header = header_of(provenance, head_unit=head_unit)
    save_tensors(tensors, path, masks_metadata(header, {name: values.numpy() for name, values in tensors.items()}))
    remember(path, provenance)
