"""What was removed, as a page: `report.html` needs no network, its pictures (PNG) and numbers (CSV) lie in `report/`.

Everything is read from the checkpoint itself, so the page can be made again wherever the folder is.
"""

import csv
import dataclasses
import io
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ddp_vllm.checkpoint import Checkpoint
from ddp_vllm.output import write_into
from ddp_vllm.pages import pictures
from ddp_vllm.pages.evidence import (
    Evidence,
    answers,
    expert_use,
    expert_widths,
    gather,
    kept_scales,
    tables,
)
from ddp_vllm.pages.page import Page, Picture, Section, Table, to_html
from ddp_vllm.pages.summary import (
    bare_names,
    conclusion,
    learning,
    perplexity_table,
    prediction,
    size_table,
    texts_of,
)
from ddp_vllm.remote_code.widths import dense_kv_heads

REPORT_FILE, DATA_FOLDER = "report.html", "report"
SHOWN = 3  # answers that are not folded away


def write_report(checkpoint: Checkpoint, folder: Path) -> Path:
    """Write `report.html` and `report/` into `folder` and return the page's path; older ones are replaced.

    Raises: CheckpointError as `gather`; OutputError if nothing can be written there.
    """
    evidence = gather(checkpoint)
    numbers, drawn = tables(evidence), draw(evidence)
    files = {f"{name}.csv": _csv(table) for name, table in numbers.items()}
    files |= {f"{picture.name}.png": picture.png for picture in drawn}
    page = _page(evidence, drawn, numbers["widths"], [f"{DATA_FOLDER}/{name}" for name in files])
    inside = {f"{DATA_FOLDER}/{name}": content for name, content in files.items()}
    write_into(folder, inside | {REPORT_FILE: to_html(page).encode()})
    return folder / REPORT_FILE


def _csv(table: Table) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text).writerows([[_plain(cell) for cell in row] for row in (table.headings, *table.rows)])
    return text.getvalue().encode()


def _plain(cell: Any) -> Any:
    """Return a cell that no spreadsheet takes for a formula."""
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(("=", "+", "-", "@", "\t", "\r")) else cell


def _page(evidence: Evidence, drawn: Sequence[Picture], widths: Table, files: Sequence[str]) -> Page:
    checkpoint = evidence.checkpoint
    provenance, recipe = checkpoint.provenance, checkpoint.provenance.get("recipe", {})
    learned_on = str(recipe.get("model", "its dense model"))
    dense = str(provenance.get("applied_to") or learned_on)
    version, recovery = provenance.get("ddp_vllm", "of an unknown version"), provenance.get("recovery", {})
    sections = [*_answers(provenance), Section(heading="Size", table=size_table(checkpoint))]
    if losses := evidence.block_losses:
        remark = (
            f"{provenance['perplexity']['tokens']:,} tokens of {texts_of(provenance)} in {len(losses['dense'])} blocks "
            f"that were not learned on, by {dense} and what was left of it. Errors are over blocks; the ratio's "
            "is that of the blocks' differences, for both models read the same ones."
        )
        table = perplexity_table(losses, provenance["perplexity"])
        sections.append(Section(heading="Perplexity on held-out text", table=table, remark=remark))
    for name, losses_there in evidence.watched.items():
        watched = perplexity_table(losses_there, recovery["watched"][name])
        heading = f"Perplexity on {bare_names(name.split(','))}"
        sections.append(
            Section(heading=heading, table=watched, remark="Text on which no weight was learned in recovery.")
        )
    if any(change["dropped"] or change["revived"] for change in provenance.get("rounding", {}).values()):
        remark = "To the budget, by saliency; in units of each module type."
        sections.append(Section(heading="What rounding changed", table=rounding_table(evidence), remark=remark))
    if drawn:
        sections.append(Section(heading="Pictures", pictures=drawn))
    if "experts" not in evidence.gates:
        sections.append(Section(heading="Widths, layer by layer", table=widths, folded=True))
    for heading, chosen in {"Recipe": recipe, "Recipe of the recovery": recovery.get("recipe", {})}.items():
        if chosen:
            settings = Table(headings=["setting", "value"], rows=list(_settings(chosen)), is_text=True)
            sections.append(Section(heading=heading, table=settings, folded=True))
    return Page(
        title=f"{checkpoint.folder.resolve().name}: what was removed",
        lead=[
            ("", conclusion(checkpoint)),
            ("", f"From {dense}, by masks learned on {learned_on}. {learning(provenance)}"),
        ]
        + [("Predicted", f"{promised}.") for promised in [prediction(provenance)] if promised],
        sections=sections,
        footer=[f"All numbers are from the checkpoint, which ddp-vllm {version} wrote."],
        files=files,
    )


def _answers(provenance: Mapping[str, Any]) -> Iterator[Section]:
    """Yield what each model answered, prompt by prompt: the first of them, and the others to be opened."""
    if said := answers(provenance):
        first, others = (
            dataclasses.replace(Table.of(some), is_text=True) if some else None for some in (said[:SHOWN], said[SHOWN:])
        )
        remark = "Prompts that nobody picked for these models; the most likely tokens, 64 at most."
        yield Section(heading="Answers", table=first, remark=remark)
        if others:
            yield Section(heading=f"{len(others.rows)} more answers", table=others, folded=True)


def _settings(recipe: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the settings of a recipe, those of a sub-table by their dotted names."""
    for name, value in recipe.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}.{each}", setting) for each, setting in value.items())
        else:
            yield name, value


def rounding_table(evidence: Evidence) -> Table:
    """Return what the step to exact counts changed."""
    rows = []
    for kind, change in evidence.checkpoint.provenance["rounding"].items():
        final = 1.0 - float((evidence.gates.get(kind, np.zeros(1)) > 0).mean())
        before, after = f"{change['raw_sparsity']:.2%}", f"{final:.2%}"
        rows.append(
            [evidence.labels.get(kind, kind), before, f"{change['dropped']:,}", f"{change['revived']:,}", after]
        )
    return Table(headings=["", "sparsity before", "dropped", "revived", "sparsity after"], rows=rows)


def draw(evidence: Evidence) -> list[Picture]:
    """Draw what there is evidence for."""
    kinds = {"attn": _heads, "mlp": _widths, "experts": _experts}
    drawn = [draw_kind(evidence) for kind, draw_kind in kinds.items() if kind in evidence.gates]
    drawn += [_scales(evidence)] if evidence.gates else []
    drawn += [_curves(evidence)] if evidence.metrics else []
    return drawn + ([_recovery(evidence)] if evidence.recovery else [])


def _heads(evidence: Evidence) -> Picture:
    config, gates_LU = evidence.checkpoint.config, evidence.gates["attn"].astype(np.float64)
    units, heads = gates_LU.shape[1], config["num_attention_heads"]
    queries_per_kv = heads // dense_kv_heads(config)
    unit, title, lines = "KV group", f"Attention, KV groups of {queries_per_kv} query heads", ""
    if units == heads:
        unit, title = "query head", "Attention, query heads"
        lines = " Lines part those that share a KV head." if queries_per_kv > 1 else ""
    together = queries_per_kv if lines else 1
    return pictures.render(
        partial(pictures.draw_heatmaps, values={"scale": gates_LU}, unit_label=unit, together=together),
        name="heads",
        title=title,
        caption=f"Crossed out: removed. The stronger the tone, the larger the scale of what stays.{lines}",
        height=pictures.height_of_map(units),
    )


def _widths(evidence: Evidence) -> Picture:
    kept_L = [layer.intermediate_size for layer in evidence.checkpoint.layers]
    dense = evidence.checkpoint.config["intermediate_size"]
    return pictures.render(
        partial(pictures.draw_widths, kept_L=kept_L, dense=dense),
        name="widths",
        title="MLP width of each layer",
        caption=f"Filled: channels kept. Outline: the dense model's {dense:,}.",
        height=2.5,
    )


def _experts(evidence: Evidence) -> Picture:
    widths_LE, use_LE = expert_widths(evidence.checkpoint), expert_use(evidence.checkpoint)
    panels = {"channels left": widths_LE} | ({} if use_LE is None else {"× even share": use_LE})
    below = (
        "" if use_LE is None else " Below: how often the router chose each on the training text; crossed out: never."
    )
    return pictures.render(
        partial(pictures.draw_heatmaps, values=panels, unit_label="expert"),
        name="experts",
        title="Width of each expert",
        caption=f"The stronger the tone, the wider; crossed out: removed.{below}",
        height=pictures.height_of_map(widths_LE.shape[1]) * len(panels),
    )


def _scales(evidence: Evidence) -> Picture:
    kept, searched = (
        {evidence.labels[kind]: kept_scales(values) for kind, values in masks.items() if kind in evidence.gates}
        for masks in (evidence.gates, evidence.searched)
    )
    ranges = [
        "{}: median {:.2f}, 90 % between {:.2f} and {:.2f}.".format(label, *np.quantile(scales, [0.5, 0.05, 0.95]))
        for label, scales in kept.items()
        if len(scales)
    ]
    return pictures.render(
        partial(pictures.draw_histograms, kept=kept, searched=searched),
        name="gates",
        title="Scales of what stays",
        caption=" ".join([*ranges, "Dotted: 1, unscaled."]),
        height=0.6 + 1.6 * len(kept),
    )


def _curves(evidence: Evidence) -> Picture:
    provenance, curves = evidence.checkpoint.provenance, evidence.metrics
    target = provenance.get("recipe", {}).get("sparsity") or None
    return pictures.render(
        partial(pictures.draw_curves, curves=curves, target=target, rounded_after=provenance.get("search_steps")),
        name="curves",
        title="Training",
        caption="Losses: every step in the faintest line, and a running mean over a twentieth of the steps. At the "
        "upright line what stays is settled; from there on its scales are learned further.",
        height=pictures.height_of_curves(curves),
    )


def _recovery(evidence: Evidence) -> Picture:
    curves = evidence.recovery
    return pictures.render(
        partial(pictures.draw_curves, curves=curves, target=None, rounded_after=None),
        name="recovery",
        title="Recovery",
        caption="Weights that stay learn from the dense model. Every step in the faintest line; and a running mean.",
        height=pictures.height_of_curves(curves),
    )
