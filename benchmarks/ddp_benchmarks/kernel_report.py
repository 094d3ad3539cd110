"""Results of `bench kernel` for the eye and, in one line of JSON, for machines."""

import json
from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from ddp_benchmarks.kernel import BASELINES


def print_kernel(results: Mapping[str, Any], console: Console) -> None:
    """Print one table a shape and sparsity; intervals of the ratios are in the JSON."""
    settings, ceilings = results["settings"], results["ceilings"]
    for name in settings["shapes"]:
        for sparsity in settings["sparsities"]:
            rows = [row for row in results["rows"] if row["shape"] == name and row["sparsity"] == sparsity]
            if rows:
                console.print(_table(name, sparsity, rows, ceilings))
    if settings["scale"] != 1 or settings["experts"]:
        console.print("These are not the real shapes: --scale and --experts made them smaller.", style="bold")
    console.print(
        f"ms: ragged. N×: ragged is N times as fast as vLLM's kernel on dense or padded experts, as our kernel on even "
        f"widths of the same bytes, as vLLM's on those. ∝ kept: ragged's time over dense time × what was kept.\n"
        f"Ceilings here: copy {ceilings['copy_gb_per_s']:,.1f} GB/s, matmul {ceilings['matmul_gflop_per_s']:,.0f} "
        f"GFLOP/s; {results['threads']} threads, {settings['clock']} clock. Widths are drawn, not learned."
    )


def _table(name: str, sparsity: int, rows: list[Mapping[str, Any]], ceilings: Mapping[str, float]) -> Table:
    first = rows[0]
    title = (
        f"{name}: {first['num_experts']} experts of {min(first['widths'])}…{max(first['widths'])} channels, top "
        f"{first['num_experts_per_tok']}, hidden {first['hidden_size']}, {sparsity} % removed"
    )
    table = Table(title=title, box=box.SIMPLE_HEAD)
    for heading in ("tokens", "ms", "dense", "padded", "even", "vLLM even", "∝ kept", "GB/s", "GFLOP/s"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            f"{row['tokens']}",
            f"{1000 * row['seconds']['ragged']['median']:.3g}",
            *(f"{row['speedup_over'][baseline]['ratio']:.2f}×" for baseline in BASELINES),
            f"{100 * row['over_proportional']:.0f} %",
            f"{row['gb_per_s']:,.1f}",
            f"{row['gflop_per_s']:,.0f}",
        )
    return table


def kernel_line(results: Mapping[str, Any]) -> str:
    """Return hardware, versions, seed, medians with spread and ratios as one line of JSON."""
    keep = ("shape", "sparsity", "tokens", "seconds", "bound", "over_proportional", "gb_per_s", "gflop_per_s")
    rows = []
    for row in results["rows"]:
        ratios = {
            name: [verdict[key] for key in ("low", "ratio", "high")] for name, verdict in row["speedup_over"].items()
        }
        rows.append({key: row[key] for key in keep} | {"speedup_over": ratios})
    facts = ("complete", "hardware", "versions", "threads", "ceilings")
    return json.dumps(
        {"benchmark": "kernel"} | {key: results[key] for key in facts} | {"seed": results["settings"]["seed"]}
        | {"settings": results["settings"], "rows": rows},
        ensure_ascii=False,
    )  # fmt: skip
