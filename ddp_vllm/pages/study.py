"""The page of `ddp-vllm study methods`: perplexity of every method at every sparsity, and what the paper found."""

import csv
import io
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ddp_vllm.origins import bare_name
from ddp_vllm.output import write_text
from ddp_vllm.pages.page import Page, Picture, Section, Table, to_html, to_markdown
from ddp_vllm.pages.pictures import draw_rows, render

Cell = Mapping[str, Any]
CELLS, STUDY_FILE = "cells", "study.json"
PAPER, OURS = "paper", "ours"
COLUMNS = (
    "method", "sparsity", "seed", "perplexity", "heldout", "params left", "kv-bytes left", "seconds", "cpu_seconds",
    "reason", "source", "command",
)  # fmt: skip


def write_study(folder: Path) -> Path:
    """Write `methods.html`, `.md` and `.csv` of the cells in a folder, and return the path of the page.

    Raises: OutputError.
    """
    study = json.loads((folder / STUDY_FILE).read_text(encoding="utf-8"))
    cells = [json.loads(path.read_text(encoding="utf-8")) for path in sorted((folder / CELLS).glob("*.json"))]
    page = page_of(cells, study)
    write_text(to_html(page), folder / "methods.html")
    write_text(to_markdown(page), folder / "methods.md")
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, COLUMNS, extrasaction="ignore")
    writer.writeheader()
    writer.writerows(cells)
    write_text(text.getvalue(), folder / "methods.csv")
    return folder / "methods.html"


def page_of(cells: Sequence[Cell], study: Mapping[str, Any]) -> Page:
    """Return the page of all cells of a study."""
    (dense,) = (cell for cell in cells if cell["method"] == "dense")
    cells = [cell for cell in cells if cell is not dense]
    remark = (
        f"Perplexity a token on {bare_name(study['test'])}, in brackets on held-out text of "
        f"{bare_name(study['data'])}; of several seeds the mean and the lowest and highest. Less is better. Seconds "
        "are those of choosing, not of judging."
    )
    sections = [
        Section(heading="Perplexity by method", table=method_table(cells, dense), remark=remark),
        Section(heading="Where each method is from", table=_sources(cells)),
        Section(heading="What made each row", table=_commands(cells), folded=True),
    ]
    if picture := _draw(cells, dense):
        sections.insert(0, Section(heading="", pictures=[picture]))
    steps = f"searches took {study['steps']:,} steps of {study['batch_size']} × {study['seq_len']:,} tokens"
    return Page(
        title=f"Pruning methods on {bare_name(study['model'])}",
        lead=[("The paper and this model", verdict(cells))],
        sections=sections,
        footer=[
            f"Scores read {study['samples']} sequences; {steps}, on frozen weights.",
            "Every method keeps the same number of units of each kind. Its masks lie in cells/, for ddp-vllm apply.",
        ],
        files=["methods.csv"],
    )


def verdict(cells: Sequence[Cell]) -> str:
    """Say on one line what the paper found, and whether it holds here."""
    found = "learned masks have the lowest perplexity in 11 of 12 columns of tables 1 and 2"
    return (
        f"The paper: {found}, its dense rivals after fine-tuning. Here: "
        + "; ".join(_holds(cells, sparsity) for sparsity in _sparsities(cells))
        + "."
    )


def _holds(cells: Sequence[Cell], sparsity: float) -> str:
    """Say of one sparsity how the paper's search and ours compare with the best score, by means over seeds."""
    means = _means(cells, sparsity)
    scores = {name for name, each in means.items() if not _is_search(cells, name)}
    searches = [name for name in (PAPER, OURS) if name in means]
    if not (scores and searches):
        return f"at {100 * sparsity:g} % not measured"
    best = min(scores, key=lambda name: means[name])
    said = [
        f"{name} {means[name]:.2f}, {'holds' if means[name] < means[best] else 'does not hold'}" for name in searches
    ]
    return f"at {100 * sparsity:g} % {', '.join(said)} (best score: {best} {means[best]:.2f})"


def _is_search(cells: Iterable[Cell], name: str) -> bool:
    return any(cell["is_search"] or "+" in name or "." in name for cell in cells if cell["method"] == name)


def _sparsities(cells: Iterable[Cell]) -> list[float]:
    return sorted({cell["sparsity"] for cell in cells})


def _means(cells: Iterable[Cell], sparsity: float) -> dict[str, float]:
    """Return the mean perplexity of every method that has one."""
    found: dict[str, list[float]] = {}
    for cell in cells:
        if cell["sparsity"] == sparsity and "perplexity" in cell:
            found.setdefault(cell["method"], []).append(cell["perplexity"])
    return {name: statistics.fmean(values) for name, values in found.items()}


def method_table(cells: Sequence[Cell], dense: Cell) -> Table:
    """Return a row a method, best first at the lowest sparsity; what it cannot do says why."""
    sparsities = _sparsities(cells)
    first = _means(cells, sparsities[0]) if sparsities else {}
    names = sorted({cell["method"] for cell in cells}, key=lambda name: (first.get(name, math.inf), name))
    rows: list[list[str]] = [["dense", *[_quality([dense])] * len(sparsities), ""]]
    for name in names:
        mine = [cell for cell in cells if cell["method"] == name]
        there = [[cell for cell in mine if cell["sparsity"] == sparsity] for sparsity in sparsities]
        took = [cell["seconds"] for cell in mine if "seconds" in cell]
        rows.append([name, *map(_quality, there), f"{max(took):,.0f}" if took else "–"])
    return Table(headings=["", *(f"{100 * sparsity:g} % removed" for sparsity in sparsities), "seconds"], rows=rows)


def _quality(cells: Sequence[Cell]) -> str:
    """Return the cell of one method at one sparsity."""
    if not (done := [cell for cell in cells if "perplexity" in cell]):
        return cells[0]["reason"] if cells else "–"
    values = [cell["perplexity"] for cell in done]
    spread = f" ({min(values):,.2f} to {max(values):,.2f})" if len(values) > 1 else ""
    return f"{statistics.fmean(values):,.2f}{spread} [{statistics.fmean(cell['heldout'] for cell in done):,.2f}]"


def _sources(cells: Iterable[Cell]) -> Table:
    sources = {cell["method"]: cell["source"] for cell in cells}
    return Table(headings=["method", "from"], rows=[list(row) for row in sources.items()], is_text=True)


def _commands(cells: Iterable[Cell]) -> Table:
    rows = [[f"{cell['method']}, {100 * cell['sparsity']:g} %, seed {cell['seed']}", cell["command"]] for cell in cells]
    return Table(headings=["row", "command"], rows=rows, is_text=True)


def _draw(cells: Sequence[Cell], dense: Cell) -> Picture | None:
    """Return a point a method and seed, a panel a sparsity; None if nothing was measured."""
    panels: dict[str, dict[str, list[float]]] = {}
    for sparsity in _sparsities(cells):
        means = _means(cells, sparsity)
        values: dict[str, list[float]] = {name: [] for name in sorted(means, key=lambda name: -means[name])}
        for cell in cells:
            if cell["sparsity"] == sparsity and cell["method"] in values and math.isfinite(cell["perplexity"]):
                values[cell["method"]].append(cell["perplexity"])
        if any(values.values()):
            panels[f"perplexity, {100 * sparsity:g} % removed"] = values
    if not panels:
        return None
    return render(
        partial(draw_rows, panels=panels, reference=dense["perplexity"]),
        name="methods",
        title="Perplexity by method",
        caption="Left is better, on a logarithmic scale; a point is a seed, a triangle one that is off the scale. The "
        "dotted line is the dense model.",
        height=sum(0.7 + 0.16 * len(values) for values in panels.values()),
    )
