"""Writes a table of the study as Markdown and CSV: every row at every sparsity, and whether the paper's
finding holds.
"""

import csv
import io
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from ddp_vllm.names import bare_name
from ddp_vllm.output import write_text
from tables import COLUMNS, TABLES, StudyTable, chains

Cell = Mapping[str, Any]
CELLS, STUDY_FILE = "cells", "study.json"
PAPER, OURS = "paper", "ours"
IN_FILE = (
    "method", "sparsity", "seed", *COLUMNS, "heldout", "params left", "kv-bytes left", "cpu_seconds", "reason",
    "source",
)  # fmt: skip


def write_study(folder: Path, name: str) -> Path:
    """Write `TABLE.md` and `TABLE.csv` of a table's cells, and return the path of the first.

    Raises: OutputError; CheckpointError for masks that cannot be read.
    """
    study, table = json.loads((folder / STUDY_FILE).read_text(encoding="utf-8")), TABLES[name]
    rows = study["tables"][name]
    files = sorted((folder / CELLS).glob("*.json"))
    contents = [json.loads(path.read_text(encoding="utf-8")) | {"file": path} for path in files]
    (dense,) = (cell for cell in contents if cell["method"] == "dense")
    cells = sorted((cell for cell in contents if cell["method"] in rows), key=lambda cell: rows.index(cell["method"]))
    findings = verdict(table, cells)
    sources = {cell["method"]: cell["source"] for cell in cells}
    parts = [
        f"- **The paper and this model**: The paper: {table.finding}. Here: {findings or 'not measured'}.",
        "### Perplexity by row",
        to_markdown(row_table(table, cells, dense)),
        f"Perplexity per token on {bare_name(study['test'])}, in brackets on held-out text of "
        f"{bare_name(study['data'])}; for several seeds the mean, lowest and highest. Lower is better. Seconds exclude "
        "the evaluation. Without a GPU, peak memory includes the program.",
        "### Sources of the methods",
        to_markdown([["method", "source"], *map(list, sources.items())]),
        f"Scores use {study['samples']} sequences; unless a row changes it, searches took {study['steps']:,} steps of "
        f"{study['batch_size']} × {study['seq_len']:,} tokens, with frozen weights. Every row keeps the same number of "
        "units of each kind. If the budget of a score does not divide evenly among layers or experts, some keep one "
        "more, drawn by the seed of the row, the same for every score. The masks of every row are in cells/.",
    ]
    write_text("\n\n".join(parts) + "\n", folder / f"{name}.md")
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, IN_FILE, extrasaction="ignore")
    writer.writeheader()
    writer.writerows([dense, *cells])
    write_text(text.getvalue(), folder / f"{name}.csv")
    return folder / f"{name}.md"


def to_markdown(rows: Sequence[Sequence[str]]) -> str:
    """Return a table whose first row is its heading."""
    lines = [rows[0], ["---", *["--:"] * (len(rows[0]) - 1)], *rows[1:]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def verdict(table: StudyTable, cells: Sequence[Cell]) -> str:
    """Return in one line whether the paper's finding holds; empty without measurements."""
    rows, sparsities = list(dict.fromkeys(cell["method"] for cell in cells)), _sparsities(cells)
    if not table.rows:
        return "; ".join(_best(cells, sparsity) for sparsity in sparsities)
    findings = [_falls(cells, sparsity, *order) for sparsity in sparsities for order in chains(table, rows)]
    return "; ".join(filter(None, findings))


def _falls(cells: Sequence[Cell], sparsity: float, column: str, order: Sequence[str]) -> str:
    """Return whether a column's means over seeds fall from row to row; empty with fewer than two
    rows."""
    means, (heading, unit) = _means(cells, sparsity, column), COLUMNS[column]
    measured = [(name, means[name] / unit) for name in order if name in means]
    if len(measured) < 2:
        return ""
    holds = all(after < before for (_, before), (_, after) in pairwise(measured))
    ends = measured[0][0], measured[-1][0]
    values = " → ".join(f"{name} {value:.3g}" if name in ends else f"{value:.3g}" for name, value in measured)
    return f"at {100 * sparsity:g} % {heading} {values}, {'holds' if holds else 'does not hold'}"


def _best(cells: Sequence[Cell], sparsity: float) -> str:
    """Compare the paper's search and ours with the best score at one sparsity, by means over
    seeds."""
    means = _means(cells, sparsity)
    scores = {cell["method"] for cell in cells if cell["method"] in means and not cell["is_search"]}
    searches = [name for name in (PAPER, OURS) if name in means]
    if not (scores and searches):
        return f"at {100 * sparsity:g} % not measured"
    best = min(scores, key=lambda name: means[name])
    verdicts = [
        f"{name} {means[name]:.2f}, {'holds' if means[name] < means[best] else 'does not hold'}" for name in searches
    ]
    return f"at {100 * sparsity:g} % {', '.join(verdicts)} (best score: {best} {means[best]:.2f})"


def _sparsities(cells: Iterable[Cell]) -> list[float]:
    return sorted({cell["sparsity"] for cell in cells})


def _means(cells: Iterable[Cell], sparsity: float, column: str = "perplexity") -> dict[str, float]:
    """Return each row's mean of a column over seeds."""
    by_method: dict[str, list[float]] = {}
    for cell in cells:
        if cell["sparsity"] == sparsity and column in cell:
            by_method.setdefault(cell["method"], []).append(cell[column])
    return {name: statistics.fmean(values) for name, values in by_method.items()}


def row_table(table: StudyTable, cells: Sequence[Cell], dense: Cell) -> list[list[str]]:
    """Return the table's rows in its order, or methods best first; a row without results gives the
    reason."""
    sparsities = _sparsities(cells)
    names = list(dict.fromkeys(cell["method"] for cell in cells))
    if not table.rows and sparsities:
        first = _means(cells, sparsities[0])
        names.sort(key=lambda name: (first.get(name, math.inf), name))
    rows = [["dense", *[_quality([dense])] * len(sparsities), *[""] * len(table.columns)]]
    for name in names:
        of_row = [cell for cell in cells if cell["method"] == name]
        by_sparsity = [[cell for cell in of_row if cell["sparsity"] == sparsity] for sparsity in sparsities]
        rows.append([name, *map(_quality, by_sparsity), *(_highest(of_row, column) for column in table.columns)])
    removed = [f"{100 * sparsity:g} % removed" for sparsity in sparsities]
    return [["row", *removed, *(COLUMNS[column][0] for column in table.columns)], *rows]


def _highest(cells: Iterable[Cell], column: str) -> str:
    """Return the highest value of a column over sparsities and seeds, small values with three
    digits."""
    values = [cell[column] / COLUMNS[column][1] for cell in cells if column in cell]
    return "–" if not values else f"{max(values):,.0f}" if max(values) >= 100 else f"{max(values):.3g}"


def _quality(cells: Sequence[Cell]) -> str:
    """Return the perplexity of one row at one sparsity as text, or the reason why there is none."""
    if not (done := [cell for cell in cells if "perplexity" in cell]):
        return cells[0]["reason"] if cells else "–"
    values = [cell["perplexity"] for cell in done]
    spread = f" ({min(values):,.2f} to {max(values):,.2f})" if len(values) > 1 else ""
    return f"{statistics.fmean(values):,.2f}{spread} [{statistics.fmean(cell['heldout'] for cell in done):,.2f}]"
