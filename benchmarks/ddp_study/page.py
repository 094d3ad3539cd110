"""Writes the page of a table of `ddp-vllm study`: every row at every sparsity, and whether the
paper's finding holds.

The table `shapes` also shows which units the masks of each cell removed.
Legend: L layers, U units of a layer, E experts.
"""

import csv
import io
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddp_study.pictures import draw_lines, draw_rows, draw_scales
from ddp_study.tables import COLUMNS, TABLES, StudyTable, chains
from ddp_vllm.masks import MASKS_FILE, read_masks_file
from ddp_vllm.output import write_text
from ddp_vllm.pages.page import Page, Picture, Section, Table, to_html, to_markdown
from ddp_vllm.pages.pictures import draw_heatmaps, draw_widths, height_of_map, render
from ddp_vllm.provenance import bare_name

Cell = Mapping[str, Any]
CELLS, STUDY_FILE = "cells", "study.json"
PAPER, OURS = "paper", "ours"
IN_FILE = (
    "method", "sparsity", "seed", *COLUMNS, "heldout", "params left", "kv-bytes left", "cpu_seconds", "reason",
    "source", "command",
)  # fmt: skip
LABELS = {"attn": "heads", "mlp": "MLP channels", "experts": "expert channels"}
CLAIMS = {  # heading of a number -> the paper's finding about it, as a sentence and as a test
    "removed late − early": ("later layers lose more", lambda value: value > 0),
    "spread of attention ÷ MLP": ("attention loses units less evenly", lambda value: value > 1),
    "choice × removal": ("experts lose more the less often they are chosen", lambda value: value < 0),
    "median scale": ("scales are about 1", lambda value: abs(value - 1) < 0.2),
}


def write_study(folder: Path, table: str) -> Path:
    """Write `TABLE.html`, `.md` and `.csv` of a table's cells, and return the path of the page.

    Raises: OutputError; CheckpointError for masks that cannot be read.
    """
    study = json.loads((folder / STUDY_FILE).read_text(encoding="utf-8"))
    rows = study["tables"][table]
    files = sorted((folder / CELLS).glob("*.json"))
    contents = [json.loads(path.read_text(encoding="utf-8")) | {"file": path} for path in files]
    (dense,) = (cell for cell in contents if cell["method"] == "dense")
    cells = sorted((cell for cell in contents if cell["method"] in rows), key=lambda cell: rows.index(cell["method"]))
    page = page_of(table, cells, dense, study)
    write_text(to_html(page), folder / f"{table}.html")
    write_text(to_markdown(page), folder / f"{table}.md")
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, IN_FILE, extrasaction="ignore")
    writer.writeheader()
    writer.writerows([dense, *cells])
    write_text(text.getvalue(), folder / f"{table}.csv")
    return folder / f"{table}.html"


def page_of(name: str, cells: Sequence[Cell], dense: Cell, study: Mapping[str, Any]) -> Page:
    """Return the page of a table from its cells."""
    table = TABLES[name]
    remark = (
        f"Perplexity per token on {bare_name(study['test'])}, in brackets on held-out text of "
        f"{bare_name(study['data'])}; for several seeds the mean, lowest and highest. Lower is better. Seconds exclude "
        "the evaluation. Without a GPU, peak memory includes the program."
    )
    sections = [
        Section(heading="Perplexity by row", table=row_table(table, cells, dense), remark=remark),
        Section(heading="Sources of the methods", table=_sources(cells)),
        Section(heading="Commands", table=_commands(cells), folded=True),
    ]
    holds, pictures = verdict(table, cells), [picture for picture in [_draw(name, cells, dense)] if picture]
    if name == "shapes":
        holds, drawn = shapes_of([(_label(cell), cell["file"]) for cell in cells if "perplexity" in cell])
        sections[1:1] = drawn
    if pictures:
        sections.insert(0, Section(heading="", pictures=pictures))
    steps = f"searches took {study['steps']:,} steps of {study['batch_size']} × {study['seq_len']:,} tokens"
    return Page(
        title=f"{table.title}: {bare_name(study['model'])}",
        lead=[("The paper and this model", f"The paper: {table.finding}. Here: {holds or 'not measured'}.")],
        sections=sections,
        footer=[
            f"Scores use {study['samples']} sequences; unless a row changes it, {steps}, with frozen weights.",
            "Every row keeps the same number of units of each kind. If the budget of a score does not divide evenly "
            "among layers or experts, some keep one additional unit. They are drawn at random by the seed of the row, "
            "the same for every score.",
            "The masks of every row, without trained weights, are in cells/, for ddp-vllm apply.",
        ],
    )


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


def row_table(table: StudyTable, cells: Sequence[Cell], dense: Cell) -> Table:
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
    return Table(headings=["row", *removed, *(COLUMNS[column][0] for column in table.columns)], rows=rows)


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


def _sources(cells: Iterable[Cell]) -> Table:
    sources = {cell["method"]: cell["source"] for cell in cells}
    return Table(headings=["method", "source"], rows=[list(row) for row in sources.items()], is_text=True)


def _commands(cells: Iterable[Cell]) -> Table:
    rows = [[_label(cell), cell["command"]] for cell in cells]
    return Table(headings=["row", "command"], rows=rows, is_text=True)


def _label(cell: Cell) -> str:
    return f"{cell['method']}, {100 * cell['sparsity']:g} %, seed {cell['seed']}"


def _draw(table: str, cells: Sequence[Cell], dense: Cell) -> Picture | None:
    """Draw one panel per sparsity with a point per row and seed, or curves over tokens; None
    without measurements."""
    drawn, title, panels = TABLES[table].drawn, TABLES[table].title, {}
    for sparsity in _sparsities(cells):
        for column in drawn:
            heading, unit = COLUMNS[column]
            means = _means(cells, sparsity, column)
            values: dict[str, list[float]] = {name: [] for name in sorted(means, key=lambda name: -means[name])}
            for cell in cells:
                if cell["sparsity"] == sparsity and math.isfinite(cell.get(column, math.nan)):
                    values[cell["method"]].append(cell[column] / unit)
            if any(values.values()):
                panels[f"{heading}, {100 * sparsity:g} % removed"] = values
    if not panels:
        return None
    reference, dotted = dense["perplexity"] if "perplexity" in drawn else None, " The dotted line is the dense model."
    if table == "tokens":
        tokens = {cell["method"]: cell["tokens"] for cell in cells if "tokens" in cell}
        curves: dict[str, dict[str, list[tuple[float, float]]]] = {label: {} for label in panels}
        for label, rows in panels.items():
            for name in (row for row in rows if row in tokens):
                points = curves[label].setdefault(name.partition("+steps=")[0], [])
                points += [(tokens[name], value) for value in rows[name]]
        draw = partial(draw_lines, panels=curves, xlabel="training tokens", reference=dense["perplexity"])
        caption, height = f"Each point is a seed; lower is better.{dotted}", 2.4 * len(curves)
    else:
        draw = partial(draw_rows, panels=panels, reference=reference)
        caption = "Left is better, on a logarithmic scale. Each point is a seed; triangles are off the scale."
        caption += dotted if reference else ""
        height = sum(0.7 + 0.16 * len(rows) for rows in panels.values())
    return render(draw, name=table, title=title, caption=caption, height=height)


def shapes_of(cells: Sequence[tuple[str, Path]]) -> tuple[str, list[Section]]:
    """Return in one line whether the paper's findings hold, and a table and pictures of the masks.

    cells: pairs of a cell's name and file. Raises: CheckpointError for masks that cannot be read.
    """
    rows: list[dict[str, Any]] = []
    drawn: list[Section] = []
    for label, path in cells:
        tensors, provenance = read_masks_file(path.with_suffix(Path(MASKS_FILE).suffix))
        gates = {name.removesuffix(".gates"): values for name, values in tensors.items() if name.endswith(".gates")}
        chosen = provenance.get("routing", {}).get("chosen", {})
        rows.append({"row": label, **numbers_of(gates, np.array(list(chosen.values()), dtype=np.float64))})
        drawn.append(Section(heading=label, pictures=_draw_shape(gates, f"shape-{len(drawn)}")))
    if not rows:
        return "", []
    held = {claim: [test(row[claim]) for row in rows if claim in row] for claim, (_, test) in CLAIMS.items()}
    findings = [f"{CLAIMS[claim][0]} in {sum(holds)} of {len(holds)} rows" for claim, holds in held.items() if holds]
    shown = [{name: value if name == "row" else f"{value:.3g}" for name, value in row.items()} for row in rows]
    remark = "Removed late − early: the removed share of units in the later half of the layers minus the earlier half. "
    remark += "Spread: its standard deviation over layers. Choice × removal: the correlation of ranks."
    return "; ".join(findings), [Section(heading="Numbers", table=Table.of(shown), remark=remark), *drawn]


def numbers_of(gates: dict[str, NDArray[np.float32]], chosen_LE: NDArray[np.float64]) -> dict[str, float]:
    """Return the numbers of `CLAIMS`. chosen_LE: number of times each expert was chosen, empty if
    unknown."""
    removed = {kind: (values == 0).reshape(len(values), -1).mean(1) for kind, values in gates.items()}
    share_L = removed.get("experts", removed.get("mlp"))
    assert share_L is not None
    half = len(share_L) // 2
    facts = {"removed late − early": float(share_L[-half:].mean() - share_L[:half].mean())} if half else {}
    if "attn" in removed:
        facts["spread of attention ÷ MLP"] = float(removed["attn"].std() / max(removed["mlp"].std(), 1e-9))
    if chosen_LE.size and (gates["experts"] == 0).any():
        ranks = [np.argsort(np.argsort(shares.ravel())) for shares in (chosen_LE, (gates["experts"] == 0).mean(-1))]
        facts["choice × removal"] = statistics.correlation(*(rank.tolist() for rank in ranks))
    scales = np.concatenate([values[values > 0] for values in gates.values()]).astype(np.float64)
    facts["median scale"] = float(np.median(scales))
    facts["scales above 1.05"] = float((scales > 1.05).mean())
    return facts


def _draw_shape(gates: dict[str, NDArray[np.float32]], name: str) -> list[Picture]:
    """Draw a map of heads and the widths of MLPs, or a map of experts, and the scales of the kept
    units."""
    maps, drawn = {}, []
    if "attn" in gates:
        maps = {"scale": gates["attn"].astype(np.float64)}
    if "experts" in gates:
        maps = {"kept channels": (gates["experts"] > 0).sum(-1).astype(np.float64)}
    for label, values_LU in maps.items():
        draw = partial(draw_heatmaps, values=maps, unit_label="expert" if "experts" in gates else "head")
        title, height = "Experts" if "experts" in gates else "Attention", height_of_map(values_LU.shape[1])
        caption = f"Darker: more {label}. Crossed out: removed."
        drawn.append(render(draw, name=f"{name}-map", title=title, caption=caption, height=height))
    if "mlp" in gates:
        kept_L = (gates["mlp"] > 0).sum(1).tolist()
        draw = partial(draw_widths, kept_L=kept_L, dense=gates["mlp"].shape[1])
        caption = "Filled: kept channels. Outline: channels of the dense model."
        drawn.append(render(draw, name=f"{name}-widths", title="MLP widths", caption=caption, height=2.5))
    kept = {LABELS[kind]: values[values > 0].astype(np.float64) for kind, values in gates.items()}
    draw = partial(draw_scales, scales=kept)
    height = 0.6 + 1.6 * len(kept)
    caption = "Dotted line: 1, unscaled."
    drawn.append(render(draw, name=f"{name}-scales", title="Scales", caption=caption, height=height))
    return drawn
