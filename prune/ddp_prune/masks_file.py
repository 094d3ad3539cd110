"""A masks file, published or of a pruned folder: read it, and prune a dense model by it without training."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ddp_prune.export import export, layer_widths
from ddp_prune.gates import Masks
from ddp_prune.model import check_spares_source, open_source
from ddp_prune.selection import realign
from ddp_vllm.checkpoint import Checkpoint, check_links
from ddp_vllm.errors import CheckpointError, SettingError
from ddp_vllm.families import WHOLE_EXPERT, unit_shapes
from ddp_vllm.masks import MASKS_FILE, read_masks_file, read_provenance
from ddp_vllm.provenance import local_provenance
from ddp_vllm.tensor_parallel import check_tensor_parallel

SCORES = ("z", "saliency")  # the gates before rounding, and their importance: squared gradient × z²


def read_masks(path: Path) -> tuple[Masks, dict[str, Any]]:
    """Return the gates of a masks file, a tensor per module type, and its provenance. Raises: CheckpointError."""
    tensors, provenance = read_masks_file(path)
    kinds = ("experts",) if "experts.gates" in tensors else ("attn", "mlp")
    if missing := [kind for kind in kinds if f"{kind}.gates" not in tensors]:
        raise CheckpointError(
            f"{path} is no masks file (it holds no {missing[0]}.gates); pass the {MASKS_FILE} of a pruned folder"
        )
    gates = {kind: torch.from_numpy(tensors[f"{kind}.gates"]).float() for kind in kinds}
    for kind, values in gates.items():
        if not (values.isfinite() & (values >= 0)).all():
            raise CheckpointError(f"{path} holds {kind} gates that are negative or not finite; prune again")
    return gates, provenance


def read_scores(path: Path) -> dict[str, Masks]:
    """Return z and saliency of each module type from a masks file; {} for masks without them."""
    scores: dict[str, Masks] = {}
    for key, values in read_masks_file(path)[0].items():
        kind, _, name = key.partition(".")
        if name in SCORES:
            scores.setdefault(name, {})[kind] = torch.from_numpy(values)
    return scores


def provenance_of(folder: Path) -> dict[str, Any]:
    """Return the provenance of a pruned folder; {} if there is no such folder or its masks file cannot be read."""
    try:
        return read_provenance(folder / MASKS_FILE)
    except CheckpointError:
        return {}


def apply_masks(model: str, masks: Path, output: Path, *, overwrite: bool, tp: int = 1, align: int = 1) -> Checkpoint:
    """Prune a dense model by a masks file. The widths are those of the masks unless `align` changes them.

    Raises: CheckpointError if the masks belong to a model of other sizes, or lack the scores that aligning needs;
        SettingError if the kept units do not split over `tp` devices or are fewer than a block; else as `open_source`
        and `export`.
    """
    source = open_source(model)
    check_spares_source(output, source)
    if (masks.parent / "config.json").exists():  # a model's folder, which somebody else may have made
        check_links(masks.parent)
    gates, provenance = read_masks(masks)[0], local_provenance(masks)
    head_unit = provenance.get("head_unit", "kv-group")
    shapes = {kind: tuple(values.shape) for kind, values in gates.items()}
    if (needed := unit_shapes(source.sizes, head_unit)) != shapes:
        raise CheckpointError(
            f"{masks} holds gates of {_shown(shapes)}, {model} needs gates of {_shown(needed)}; the masks "
            "were made for another model"
        )
    scores = read_scores(masks)
    outdated = {"recovery", "perplexity", "prompts", "answers", "latency"}  # they describe other weights or widths
    if align != 1:
        gates = _aligned(gates, scores, provenance, masks, align)
        outdated, provenance = outdated | {"rounding"}, provenance | {"aligned_after": align}
    check_tensor_parallel(tp, source.config, layer_widths(gates, source, head_unit), remedy=f"or prune with --tp {tp}")
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
        raise SettingError(f"{path} has a budget per {scope}, which aligning would break; prune with --align")
    if not 0 < align <= min(kept, units):
        raise SettingError(
            f"align is {align}; {kept:,} channels, at most {units:,} together, allow 1 to {min(kept, units):,}"
        )
    saliency = scores.get("saliency", {}).get(kind)
    if saliency is None:
        raise CheckpointError(f"{path} holds no {kind}.saliency, which aligning needs; prune again with --align")
    if saliency.shape != gates[kind].shape or not (saliency.isfinite() & (saliency >= 0)).all():
        raise CheckpointError(f"{path} holds {kind}.saliency of another shape, negative or not finite; prune again")
    return gates | {kind: realign(gates[kind], saliency, align)}
