"""The masks of a checkpoint and the metrics that its training logged: the numbers behind the
pictures of a report.

Legend: L layers, U units of a layer, E experts of a layer, C channels of an expert.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypedDict

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from ddp_vllm.checkpoint import Checkpoint
from ddp_vllm.dimensions import dimensions_of, unit_shapes
from ddp_vllm.errors import CheckpointError
from ddp_vllm.masks import MASKS_FILE, METRICS_FILE, RECOVERY_FILE, read_masks_file
from ddp_vllm.remote_code.files import LARGEST_JSON, parse_json, read_bytes, short
from ddp_vllm.schema import Count, checked

# lines of a metrics file, which take seconds to read; the paper's search has 1,000 steps
MOST_STEPS = 200_000
_Number = Annotated[float, Meta(ge=-1e308)]  # may be infinite, but is a number


class _Step(TypedDict):
    step: Count


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
    folder = checkpoint.folder
    try:
        tensors = read_masks_file(folder / MASKS_FILE)[0] if (folder / MASKS_FILE).exists() else {}
        metrics = Metrics(
            checkpoint=checkpoint,
            gates={name.removesuffix(".gates"): value for name, value in tensors.items() if name.endswith(".gates")},
            pruning=_read_steps(folder / METRICS_FILE),
            recovery=_read_steps(folder / RECOVERY_FILE),
        )
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder}: masks or metrics cannot be read ({error}); copy the folder again") from error
    _check_masks(metrics)
    widths = checkpoint.widths
    kept = {
        "mlp": [layer.intermediate_size for layer in widths.layers if widths.states("mlp", layer)],
        "experts": [list(row) for layer in widths.layers if (row := layer.expert_intermediate_sizes) is not None],
    }
    gates = metrics.gates
    # the MLP of a stock class keeps a channel of zeros
    least = int(not widths.is_family)
    left = {kind: (values > 0).sum(-1) for kind, values in gates.items()}
    left |= {"mlp": np.maximum(left["mlp"], least)} if "mlp" in left else {}
    if any(left[kind].tolist() != widths for kind, widths in kept.items() if kind in gates):
        raise CheckpointError(
            f"{folder}: {MASKS_FILE} and config.json are of different checkpoints; run ddp-vllm apply again"
        )
    return metrics


def _check_masks(metrics: Metrics) -> None:
    """Refuse masks of a model of other sizes. Raises: CheckpointError."""
    sizes = dimensions_of(metrics.checkpoint.config)
    shapes = [unit_shapes(sizes, head_unit) for head_unit in ("kv-group", "query-head")]
    for kind, values in metrics.gates.items():
        if (
            values.shape not in [unit_shape.get(kind) for unit_shape in shapes]
            or not (np.isfinite(values) & (values >= 0)).all()
        ):
            raise CheckpointError(
                f"{metrics.checkpoint.folder}: the masks of {short(kind)} have shape {list(values.shape)}, which does "
                "not fit the config, or hold values that are negative or not finite; run ddp-vllm apply again"
            )


def _read_steps(path: Path) -> list[dict[str, float]]:
    """Return the logged metrics of each step; none if the file is missing. Raises: OSError,
    ValueError."""
    if not path.exists():
        return []
    if len(lines := read_bytes(path, LARGEST_JSON).splitlines()) > MOST_STEPS:
        raise ValueError(f"{path.name} has {len(lines):,} lines, more than {MOST_STEPS:,}")
    steps = [parse_json(line) for line in lines]
    for number, step in enumerate(steps, 1):
        checked(step, _Step, f"line {number} of {path.name}")
        checked(step, dict[str, _Number], f"line {number} of {path.name}")
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
