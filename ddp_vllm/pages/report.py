"""The report of a checkpoint, `report.html`, which requires no network.

The checkpoint itself has all the data, so the page can be made again wherever the folder is.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ddp_vllm.checkpoint import Checkpoint
from ddp_vllm.names import bare_name
from ddp_vllm.output import write_files
from ddp_vllm.pages import pictures
from ddp_vllm.pages.metrics import Metrics, expert_use, expert_widths, gather
from ddp_vllm.pages.page import REPORT_FILE, Page, Picture, Section, Table, to_html
from ddp_vllm.pages.summary import answers, dense_name, lead, sections

SHOWN = 3  # answers that are not folded away


def write_report(checkpoint: Checkpoint, folder: Path, name: str = "") -> Path:
    """Write `report.html` into `folder`, replacing an older one, and return its path.

    name: of the checkpoint, by default that of its folder.

    Raises: CheckpointError as `gather`; OutputError if nothing can be written there.
    """
    page = page_of(checkpoint, draw(gather(checkpoint)), name or checkpoint.folder.resolve().name)
    write_files(folder, {REPORT_FILE: to_html(page).encode()})
    return folder / REPORT_FILE


def page_of(checkpoint: Checkpoint, drawn: Sequence[Picture], name: str) -> Page:
    """Return the page: statements, answers, tables, pictures, and the recipes."""
    provenance = checkpoint.provenance
    *tables, widths = sections(checkpoint)
    shown = [Section(heading="Pictures", pictures=drawn)] if drawn else []
    dense, learned_on = dense_name(checkpoint), provenance.get("recipe", {}).get("model", "its dense model")
    learned = f"{dense}; masks learned on {learned_on}"
    version = provenance.get("ddp_vllm", "of an unknown version")
    return Page(
        title=f"{bare_name(dense)}, pruned: {name}",
        lead=[*lead(checkpoint), ("dense model", dense if "converted" in provenance else learned)],
        sections=[*_answers(provenance), *tables, *shown, widths, *_recipes(provenance)],
        footer=[f"All numbers are from the checkpoint, which ddp-vllm {version} wrote."],
    )


def _answers(provenance: Mapping[str, Any]) -> Iterator[Section]:
    """Yield the answers of each model, prompt by prompt; all but the first few are folded away."""
    rows = answers(provenance)
    first, others = (
        dataclasses.replace(Table.of(some), is_text=True) if some else None for some in (rows[:SHOWN], rows[SHOWN:])
    )
    if first:
        remark = "The prompts are the same for every model. Answers are greedy, at most 64 tokens."
        yield Section(heading="Answers", table=first, remark=remark)
    if others:
        yield Section(heading=f"{len(others.rows)} more answers", table=others, folded=True)


def _recipes(provenance: Mapping[str, Any]) -> Iterator[Section]:
    """Yield the settings of each run; settings of a sub-table have dotted names."""
    recovery = provenance.get("recovery", {})
    for heading, recipe in (("Recipe", provenance.get("recipe")), ("Recipe of the recovery", recovery.get("recipe"))):
        rows: list[tuple[str, Any]] = []
        for name, value in (recipe or {}).items():
            table = value.items() if isinstance(value, Mapping) else None
            rows += [(name, value)] if table is None else [(f"{name}.{key}", setting) for key, setting in table]
        if rows:
            yield Section(
                heading=heading, table=Table(headings=["setting", "value"], rows=rows, is_text=True), folded=True
            )


def draw(metrics: Metrics) -> list[Picture]:
    """Draw the masks and the logged metrics."""
    kinds = {"attn": _heads, "mlp": _widths, "experts": _experts}
    drawn = [draw_kind(metrics) for kind, draw_kind in kinds.items() if kind in metrics.gates]
    provenance = metrics.checkpoint.provenance
    if metrics.pruning:
        caption = (
            "Losses: each step as a thin line, and a running mean over a twentieth of the steps. At the vertical line "
            "the kept units are fixed; after it only their scales are trained."
        )
        targets, steps = provenance.get("targets", {}), provenance.get("search_steps")
        drawn.append(_curves("curves", "Training", caption, metrics.pruning, targets=targets, rounded_after=steps))
    if metrics.recovery:
        caption = "The weights are trained on the dense model's outputs. Each step as a thin line, and a running mean."
        drawn.append(_curves("recovery", "Recovery", caption, metrics.recovery, targets={}, rounded_after=None))
    return drawn


def _heads(metrics: Metrics) -> Picture:
    dense, gates_LU = metrics.checkpoint.widths.dense, metrics.gates["attn"].astype(np.float64)
    units, heads = gates_LU.shape[1], dense.num_query_heads
    queries_per_kv = heads // dense.num_kv_heads
    unit, title, lines = "KV group", f"Attention, KV groups of {queries_per_kv} query heads", ""
    if units == heads:
        unit, title = "query head", "Attention, query heads"
        lines = " Lines separate groups that share a KV head." if queries_per_kv > 1 else ""
    together = queries_per_kv if lines else 1
    return pictures.render(
        partial(pictures.draw_heatmaps, values={"scale": gates_LU}, unit_label=unit, together=together),
        name="heads",
        title=title,
        caption=f"Crossed out: removed. The bar has the scale of each shade.{lines}",
        height=pictures.height_of_map(units),
    )


def _widths(metrics: Metrics) -> Picture:
    widths = metrics.checkpoint.widths
    kept_L = [layer.intermediate_size for layer in widths.layers if widths.states("mlp", layer)]
    dense = widths.dense.intermediate_size
    return pictures.render(
        partial(pictures.draw_widths, kept_L=kept_L, dense=dense),
        name="widths",
        title="MLP width of each layer",
        caption=f"Filled: channels kept. Outline: the dense model's {dense:,}.",
        height=2.5,
    )


def _experts(metrics: Metrics) -> Picture:
    widths_LE, use_LE = expert_widths(metrics.checkpoint), expert_use(metrics.checkpoint)
    panels = {"channels kept": widths_LE} | ({} if use_LE is None else {"× even share": use_LE})
    blank = " Blank: layers without experts." if np.isnan(widths_LE).any() else ""
    use = " Below: how often the router chose each on the training text; crossed out: never." if len(panels) > 1 else ""
    return pictures.render(
        partial(pictures.draw_heatmaps, values=panels, unit_label="expert"),
        name="experts",
        title="Width of each expert",
        caption=f"Crossed out: removed. The bar has the width of each shade.{blank}{use}",
        height=pictures.height_of_map(widths_LE.shape[1]) * len(panels),
    )


def _curves(name: str, title: str, caption: str, curves: pictures.Curves, **marks: Any) -> Picture:
    return pictures.render(
        partial(pictures.draw_curves, curves=curves, **marks),
        name=name,
        title=title,
        caption=caption,
        height=pictures.height_of_curves(curves),
    )
