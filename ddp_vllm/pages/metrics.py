"""The masks of a checkpoint and the metrics that its training logged: the numbers behind the
pictures of a report.

Legend: L layers, U units of a layer, E experts of a layer, C channels of an expert.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from ddp_vllm.checkpoint import Checkpoint
from ddp_vllm.dimensions import dimensions_of, unit_shapes
from ddp_vllm.errors import CheckpointError
from ddp_vllm.masks import MASKS_FILE, METRICS_FILE, RECOVERY_FILE, read_masks_file
from ddp_vllm.remote_code.files import LARGEST_JSON, parse_json, read_bytes, short
from ddp_vllm.schema import checked

_Number = Annotated[float, Meta(ge=-1e308)]  # may be infinite, but is a number


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """The masks and the logged metrics in the files of a pruned folder."""

    checkpoint: Checkpoint
    gates: Mapping[str, NDArray[np.float32]]
    """Final gates by module type, 0 where the unit was removed: [L, U], of routed experts [routed
    layers, E, C]; empty without a masks file."""
    pruning: Sequence[Mapping[str, float]]
    """The logged metrics of pruning, one object per step; empty if published masks were applied."""
    recovery: Sequence[Mapping[str, float]]
    """The logged metrics of the recovery; empty if there was none."""


def gather(checkpoint: Checkpoint) -> Metrics:
    """Read masks and metrics. Raises: CheckpointError if they are unreadable or of other widths."""
    folder, widths, sizes = checkpoint.folder, checkpoint.widths, dimensions_of(checkpoint.config)
    try:
        tensors = read_masks_file(folder / MASKS_FILE)[0] if (folder / MASKS_FILE).exists() else {}
        pruning, recovery = (_read_steps(folder / name) for name in (METRICS_FILE, RECOVERY_FILE))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder}: masks or metrics cannot be read ({error}); copy the folder again") from error
    gates = {name.removesuffix(".gates"): value for name, value in tensors.items() if name.endswith(".gates")}
    kept: dict[str, list[Any]] = {
        "mlp": [layer.intermediate_size for layer in widths.layers if widths.states("mlp", layer)],
        "experts": [list(row) for layer in widths.layers if (row := layer.expert_intermediate_sizes) is not None],
    }
    shapes = [unit_shapes(sizes, head_unit) for head_unit in ("kv-group", "query-head")]
    for kind, values in gates.items():
        left = (values > 0).sum(-1)
        if kind == "mlp" and not widths.is_family:  # the MLP of a stock class keeps a channel of zeros
            left = np.maximum(left, 1)
        if (
            values.shape not in [shape.get(kind) for shape in shapes]
            or not (np.isfinite(values) & (values >= 0)).all()
            or left.tolist() != kept.get(kind, left.tolist())
        ):
            raise CheckpointError(
                f"{folder}: {MASKS_FILE} and config.json are of different checkpoints, because the masks of "
                f"{short(kind)} have other widths; run ddp-vllm apply again"
            )
    return Metrics(checkpoint=checkpoint, gates=gates, pruning=pruning, recovery=recovery)


def _read_steps(path: Path) -> list[dict[str, float]]:
    """Return the logged metrics of each step; none if the file is missing. Raises: OSError,
    ValueError."""
    lines = read_bytes(path, LARGEST_JSON).splitlines() if path.exists() else []
    steps = checked([parse_json(line) for line in lines], list[dict[str, _Number]], path.name)
    if not all("step" in step for step in steps):
        raise ValueError(f"a line of {path.name} lacks its step")
    return steps


def expert_widths(checkpoint: Checkpoint) -> NDArray[np.float64]:
    """Return the kept channels of each expert [L, E]; NaN in layers without routed experts."""
    sizes = [layer.expert_intermediate_sizes for layer in checkpoint.layers]
    num_experts = next(len(row) for row in sizes if row is not None)
    return np.array([row if row is not None else [np.nan] * num_experts for row in sizes], dtype=np.float64)


def expert_use(checkpoint: Checkpoint) -> NDArray[np.float64] | None:
    """Return how often the router chose each expert [L, E], in multiples of an even share; None if
    unknown."""
    if not (chosen := checkpoint.times_chosen):
        return None
    use = np.full_like(expert_widths(checkpoint), np.nan)
    for layer, counts in chosen.items():
        use[layer] = np.array(counts) / max(1e-9, float(np.mean(counts)))
    return use
