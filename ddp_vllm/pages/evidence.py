"""What a checkpoint says about its own making, and the numbers behind the pictures of a report.

Legend: L layers, U units of a layer.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddp_vllm.checkpoint import Checkpoint
from ddp_vllm.errors import CheckpointError
from ddp_vllm.families import dimensions_of, unit_shapes
from ddp_vllm.masks import MASKS_FILE, read_masks_file
from ddp_vllm.pages.page import Table
from ddp_vllm.pages.summary import times_chosen
from ddp_vllm.remote_code.files import LARGEST_JSON, parse_json, read_bytes, short
from ddp_vllm.schema import COUNT, Number, check

METRICS_FILE, RECOVERY_FILE = "ddp_metrics.jsonl", "ddp_recovery.jsonl"
"""What `prune` and `recover` logged, a JSON object a step; in the pruned folder."""
MOST_STEPS = 200_000  # lines of one of them, which take seconds to read; the paper's search has 1,000 steps


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What a checkpoint says about its making, beside its widths."""

    checkpoint: Checkpoint
    gates: Mapping[str, NDArray[np.float32]]
    """Final gates a module type, 0 where the unit is gone: [L, U], of routed experts [routed layers, E, C]; empty
    without a masks file."""
    searched: Mapping[str, NDArray[np.float32]]
    """The same before rounding and polish (z)."""
    metrics: Sequence[Mapping[str, float]]
    """One object a step; empty if the masks were applied, not learned, here."""
    recovery: Sequence[Mapping[str, float]]
    """One object a step in which weights learned; empty if they were frozen."""
    block_losses: Mapping[str, Sequence[float]]
    """Loss of each held-out block in nats a token, `dense`, `pruned` and, after a recovery, `recovered`; empty if
    quality was not measured."""
    watched: Mapping[str, Mapping[str, Sequence[float]]]
    """The same of texts of another kind than that of the recovery, by name."""

    @property
    def labels(self) -> dict[str, str]:
        """Say what a unit of each module type is."""
        heads = "KV groups" if self.checkpoint.provenance.get("head_unit") != "query-head" else "query heads"
        names = {"attn": heads, "mlp": "MLP channels", "experts": "expert channels"}
        return {kind: names.get(kind, kind) for kind in self.gates}


def gather(checkpoint: Checkpoint) -> Evidence:
    """Read masks and metrics. Raises: CheckpointError if they cannot be read or are of other widths."""
    folder = checkpoint.folder
    watched = checkpoint.provenance.get("recovery", {}).get("watched", {})
    try:
        tensors = read_masks_file(folder / MASKS_FILE)[0] if (folder / MASKS_FILE).exists() else {}
        evidence = Evidence(
            checkpoint=checkpoint,
            gates={name.removesuffix(".gates"): value for name, value in tensors.items() if name.endswith(".gates")},
            searched={name.removesuffix(".z"): value for name, value in tensors.items() if name.endswith(".z")},
            metrics=_read_metrics(folder / METRICS_FILE),
            recovery=_read_metrics(folder / RECOVERY_FILE),
            block_losses=block_losses(checkpoint.provenance.get("perplexity")),
            watched={name: block_losses(quality) for name, quality in watched.items()},
        )
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder}: masks or metrics cannot be read ({error}); copy the folder again") from error
    _check_masks(evidence)
    kept = {
        "mlp": [layer.intermediate_size for layer in checkpoint.layers],
        "experts": [list(row) for layer in checkpoint.layers if (row := layer.expert_intermediate_sizes) is not None],
    }
    gates = evidence.gates
    if any((gates[kind] > 0).sum(-1).tolist() != widths for kind, widths in kept.items() if kind in gates):
        raise CheckpointError(
            f"{folder}: {MASKS_FILE} and config.json are of different checkpoints; run ddp-vllm apply again"
        )
    return evidence


def _check_masks(evidence: Evidence) -> None:
    """Refuse masks that are not of a model of these sizes. Raises: CheckpointError."""
    checkpoint = evidence.checkpoint
    sizes = dimensions_of(checkpoint.config)
    shapes = [unit_shapes(sizes, head_unit) for head_unit in ("kv-group", "query-head")]
    for kind, values in (*evidence.gates.items(), *evidence.searched.items()):
        if values.shape not in [each.get(kind) for each in shapes] or not (np.isfinite(values) & (values >= 0)).all():
            raise CheckpointError(
                f"{checkpoint.folder}: the masks of {short(kind)} have shape {list(values.shape)}, which is not the "
                "config's, or values that are none; run ddp-vllm apply again"
            )


def _read_metrics(path: Path) -> list[dict[str, float]]:
    """Return one object a step, none if the masks were not learned here. Raises: OSError, ValueError."""
    if not path.exists():
        return []
    if len(lines := read_bytes(path, LARGEST_JSON).splitlines()) > MOST_STEPS:
        raise ValueError(f"{path.name} has {len(lines):,} lines, more than {MOST_STEPS:,}")
    metrics = [parse_json(line) for line in lines]
    for number, step in enumerate(metrics, 1):
        check(step, {"step": COUNT}, f"line {number} of {path.name}")
        check(step, {str: Number(-math.inf, math.inf)}, f"line {number} of {path.name}")
    return metrics


def block_losses(quality: Mapping[str, Any] | None) -> dict[str, list[float]]:
    """Raises: ValueError if a perplexity comes without them, or those of the models are not of the same blocks."""
    if not quality:
        return {}
    models = ["dense", "pruned", *(name for name in ("recovered",) if name in quality)]
    try:
        found = {name: [float(loss) for loss in quality["block_losses"][name]] for name in models}
    except (TypeError, KeyError):
        found = {}
    if not found or not found["dense"] or len({len(losses) for losses in found.values()}) != 1:
        raise ValueError("its perplexity does not come with the loss of each block")
    if not all(abs(loss) < 700 for losses in found.values() for loss in losses):  # whose exponent is a number
        raise ValueError("the loss of a block is out of bounds")
    return found


def kept_scales(values: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the gates of the units that stay, flat."""
    return values[values > 0].astype(np.float64)


def expert_widths(checkpoint: Checkpoint) -> NDArray[np.float64]:
    """Return [L, E] channels left, not a number in layers without routed experts."""
    sizes = [layer.expert_intermediate_sizes for layer in checkpoint.layers]
    num_experts = next(len(row) for row in sizes if row is not None)
    return np.array([row if row is not None else [np.nan] * num_experts for row in sizes], dtype=np.float64)


def expert_use(checkpoint: Checkpoint) -> NDArray[np.float64] | None:
    """Return [L, E], how often the router chose each expert while learning, 1 for an even share; None if unknown."""
    if not (chosen := times_chosen(checkpoint.provenance)):
        return None
    use = np.full_like(expert_widths(checkpoint), np.nan)
    for layer, counts in chosen.items():
        use[layer] = np.array(counts) / max(1e-9, float(np.mean(counts)))
    return use


def bin_edges(gates: NDArray[np.float64]) -> list[float]:
    """Return the edges of a histogram: steps of 0.05 from 0 past the highest gate, of more where it is far out."""
    top = max(1.5, float(gates.max(initial=0.0)))
    edges: list[float] = np.linspace(0.0, top, min(81, int(np.ceil(top / 0.05)) + 1)).tolist()
    return edges


def tables(evidence: Evidence) -> dict[str, Table]:
    """Return the numbers behind the page by the name of their CSV file."""
    gates, provenance = evidence.gates, evidence.checkpoint.provenance
    losses = evidence.block_losses
    blocks = enumerate(zip(*losses.values(), strict=True))
    found: dict[str, Sequence[Mapping[str, Any]]] = {
        "widths": [
            {
                "layer": index,
                "kv_heads": layer.num_kv_heads,
                "query_heads": layer.num_query_heads,
                "intermediate_size": layer.intermediate_size,
            }
            for index, layer in enumerate(evidence.checkpoint.layers)
        ],
        "heads": [
            {"layer": index} | {f"unit_{unit}": _short(gate) for unit, gate in enumerate(gates_U)}
            for index, gates_U in enumerate(gates["attn"].tolist() if "attn" in gates else ())
        ],
        "experts": _experts(evidence.checkpoint) if "experts" in gates else (),
        "gates": [each for kind, values in gates.items() for each in _histogram(kind, kept_scales(values))],
        "curves": evidence.metrics,
        "rounding": [{"module_type": kind, **change} for kind, change in provenance.get("rounding", {}).items()],
        "recovery": evidence.recovery,
        "perplexity": [
            {"block": block} | {f"{who}_loss": loss for who, loss in zip(losses, each, strict=True)}
            for block, each in blocks
        ],
        "answers": answers(provenance),
    }
    return {name: Table.of(records) for name, records in found.items() if records}


def answers(provenance: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return prompts with what each model answered, one object a prompt; [] if none were asked."""
    recovery = provenance.get("recovery", provenance)
    said = recovery.get("answers", {})
    return [
        {"prompt": str(prompt)} | {str(who): str(texts[number]) for who, texts in said.items()}
        for number, prompt in enumerate(recovery.get("prompts", []))
    ]


def _experts(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    use_LE = expert_use(checkpoint)
    return [
        {
            "layer": index,
            "expert": expert,
            "intermediate_size": width,
            "times_even_share": "" if use_LE is None else _short(use_LE[index, expert]),
        }
        for index, layer in enumerate(checkpoint.layers)
        for expert, width in enumerate(layer.expert_intermediate_sizes or ())
    ]


def _histogram(kind: str, scales: NDArray[np.float64]) -> list[dict[str, Any]]:
    edges = bin_edges(scales)
    bins = zip(edges, edges[1:], np.histogram(scales, edges)[0].tolist(), strict=False)
    return [{"module_type": kind, "scale_from": _short(a), "scale_to": _short(b), "units": n} for a, b, n in bins]


def _short(value: float) -> float:
    return float(f"{value:.6g}")
