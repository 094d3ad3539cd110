"""What a checkpoint says about its own making, and the numbers behind the pictures of a report.

Legend: L layers, U units of a layer.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file

from ddp_prune.run_state import METRICS_FILE
from ddp_vllm.checkpoint import MASKS_FILE, Checkpoint
from ddp_vllm.errors import CheckpointError

Table = tuple[Sequence[str], Sequence[Sequence[Any]]]
"""Headings and rows; the first column is text."""


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
    """One row a step; empty if the masks were applied, not learned, here."""

    @property
    def labels(self) -> dict[str, str]:
        """Say what a unit of each module type is."""
        heads = "KV groups" if self.checkpoint.provenance.get("head_unit") != "query-head" else "query heads"
        names = {"attn": heads, "mlp": "MLP channels", "experts": "expert channels"}
        return {kind: names.get(kind, kind) for kind in self.gates}


def gather(checkpoint: Checkpoint) -> Evidence:
    """Read masks and metrics. Raises: CheckpointError if they cannot be read or are of other widths."""
    folder = checkpoint.folder
    tensors: dict[str, NDArray[np.float32]] = {}
    metrics: list[dict[str, float]] = []
    try:
        if (folder / MASKS_FILE).exists():
            tensors = load_file(folder / MASKS_FILE)
        if (path := folder / f"ddp_{METRICS_FILE}").exists():
            metrics = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
            if not all(isinstance(row, dict) and "step" in row for row in metrics):
                raise ValueError(f"a line of {path.name} states no step")
    except (OSError, SafetensorError, ValueError) as error:
        raise CheckpointError(f"{folder}: masks or metrics cannot be read ({error}); copy the folder again") from error
    gates = {name.removesuffix(".gates"): value for name, value in tensors.items() if name.endswith(".gates")}
    searched = {name.removesuffix(".z"): value for name, value in tensors.items() if name.endswith(".z")}
    kept = {
        "mlp": [layer.intermediate_size for layer in checkpoint.layers],
        "experts": [list(row) for layer in checkpoint.layers if (row := layer.expert_intermediate_sizes) is not None],
    }
    if any((gates[kind] > 0).sum(-1).tolist() != widths for kind, widths in kept.items() if kind in gates):
        raise CheckpointError(
            f"{folder}: {MASKS_FILE} and config.json are of different checkpoints; run ddp-vllm apply again"
        )
    return Evidence(checkpoint=checkpoint, gates=gates, searched=searched, metrics=metrics)


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
    chosen = checkpoint.provenance.get("routing", {}).get("chosen")
    if not chosen:
        return None
    use = np.full_like(expert_widths(checkpoint), np.nan)
    for layer, counts in chosen.items():
        use[int(layer)] = np.array(counts) / max(1e-9, float(np.mean(counts)))
    return use


def bin_edges(gates: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the edges of a histogram: steps of 0.05 from 0 past the highest gate, of more where it is far out."""
    top = max(1.5, float(gates.max(initial=0.0)))
    return np.linspace(0.0, top, min(81, int(np.ceil(top / 0.05)) + 1))


def tables(evidence: Evidence) -> dict[str, Table]:
    """Return the numbers behind the page by the name of their CSV file."""
    checkpoint, gates = evidence.checkpoint, evidence.gates
    rows: list[list[Any]]
    found: dict[str, Table] = {
        "widths": (
            ["layer", "kv_heads", "query_heads", "intermediate_size"],
            [
                [index, layer.num_kv_heads, layer.num_query_heads, layer.intermediate_size]
                for index, layer in enumerate(checkpoint.layers)
            ],
        )
    }
    if "attn" in gates:
        rows = [[index, *map(_short, row)] for index, row in enumerate(gates["attn"].tolist())]
        found["heads"] = (["layer", *(f"unit_{unit}" for unit in range(gates["attn"].shape[1]))], rows)
    if "experts" in gates:
        use = expert_use(checkpoint)
        rows = [
            [index, expert, width, "" if use is None else _short(use[index, expert])]
            for index, layer in enumerate(checkpoint.layers)
            for expert, width in enumerate(layer.expert_intermediate_sizes or ())
        ]
        found["experts"] = (["layer", "expert", "intermediate_size", "times_even_share"], rows)
    if gates:
        rows = []
        for kind, values in gates.items():
            edges = bin_edges(kept_scales(values))
            counts = np.histogram(kept_scales(values), edges)[0].tolist()
            rows += [[kind, _short(a), _short(b), n] for a, b, n in zip(edges, edges[1:], counts, strict=False)]
        found["gates"] = (["module_type", "scale_from", "scale_to", "units"], rows)
    if evidence.metrics:
        names = list(evidence.metrics[0])
        found["curves"] = (names, [[row.get(name, "") for name in names] for row in evidence.metrics])
    if rounding := checkpoint.provenance.get("rounding"):
        names = list(next(iter(rounding.values())))
        found["rounding"] = (
            ["module_type", *names],
            [[kind, *(change.get(name, "") for name in names)] for kind, change in rounding.items()],
        )
    if losses := checkpoint.provenance.get("perplexity", {}).get("block_losses"):
        pairs = zip(losses["dense"], losses["pruned"], strict=True)
        found["perplexity"] = (["block", "dense_loss", "pruned_loss"], [[i, a, b] for i, (a, b) in enumerate(pairs)])
    return found


def _short(value: float) -> float:
    return float(f"{value:.6g}")
