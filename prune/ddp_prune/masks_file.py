"""The masks file, published alone or in a pruned folder: gates, the search results behind them, and
provenance."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ddp_prune.core.gates import Masks
from ddp_vllm import __version__
from ddp_vllm.errors import CheckpointError
from ddp_vllm.masks import MASKS_FILE, masks_metadata, read_masks_file
from ddp_vllm.model_files import save_tensors
from ddp_vllm.provenance import published, remember

# the gates before rounding; their importance, squared gradient × z²
SCORES = ("z", "saliency")


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


def read_scores(path: Path) -> dict[str, Masks]:
    """Return the `SCORES` of each module type from a masks file; {} if the file has none."""
    scores: dict[str, Masks] = {}
    for key, values in read_masks_file(path)[0].items():
        kind, _, name = key.partition(".")
        if name in SCORES:
            scores.setdefault(name, {})[kind] = torch.from_numpy(values)
    return scores


def write_masks(
    gates: Masks,
    path: Path,
    *,
    head_unit: str,
    provenance: Mapping[str, Any],
    scores: Mapping[str, Masks] | None = None,
) -> None:
    """Write a masks file, which `read_masks` and `read_scores` read.

    gates, scores: float32 per module type, as in `export`. provenance: how the masks were made. The
    file holds the names of models and texts only; their paths are kept in this machine's cache.
    """
    tensors = {f"{kind}.gates": values for kind, values in gates.items()}
    for name, masks in (scores or {}).items():
        tensors |= {f"{kind}.{name}": values for kind, values in masks.items()}
    header = {"ddp_vllm": __version__, "head_unit": head_unit, **published(provenance)}
    save_tensors(tensors, path, masks_metadata(header, {name: values.numpy() for name, values in tensors.items()}))
    remember(path, provenance)
