"""The report of a checkpoint, `report.html`, which requires no network.

The checkpoint itself has all the data, so the page can be made again wherever the folder is.
"""

from functools import partial
from pathlib import Path

import numpy as np

from ddp_vllm.checkpoint import Checkpoint
from ddp_vllm.names import bare_name
from ddp_vllm.output import write_text
from ddp_vllm.pages import pictures
from ddp_vllm.pages.metrics import Metrics, expert_use, expert_widths, gather
from ddp_vllm.pages.page import REPORT_FILE, Page, Picture, Section, Table, to_html
from ddp_vllm.pages.summary import answers, dense_name, lead, sections


def write_report(checkpoint: Checkpoint, folder: Path, name: str = "") -> Path:
    """Write `report.html` into `folder`, replacing an older one, and return its path.

    name: of the checkpoint, by default that of its folder.

    Raises: CheckpointError as `gather`; OutputError if nothing can be written there.
    """
    provenance, drawn = checkpoint.provenance, draw(gather(checkpoint))
    *tables, widths = sections(checkpoint)
    folded = [widths]
    if rows := answers(provenance):
        remark = "The prompts are the same for every model. Answers are greedy, at most 64 tokens."
        table = Table(headings=[*rows[0]], rows=[[*row.values()] for row in rows], is_text=True)
        tables.insert(0, Section(heading="Answers", table=table, remark=remark))
    tables += [Section(heading="Pictures", pictures=drawn)] if drawn else []
    runs = {"Recipe": provenance, "Recipe of the recovery": provenance.get("recovery", {})}
    for heading, run in runs.items():
        if recipe := run.get("recipe"):
            table = Table(headings=["setting", "value"], rows=[*recipe.items()], is_text=True)
            folded.append(Section(heading=heading, table=table, folded=True))
    dense, version = dense_name(checkpoint), provenance.get("ddp_vllm", "of an unknown version")
    title = f"{bare_name(dense)}, pruned: {name or checkpoint.folder.resolve().name}"
    if "converted" not in provenance:
        dense += f"; masks learned on {provenance.get('recipe', {}).get('model', dense)}"
    page = Page(
        title=title,
        lead=[*lead(checkpoint), ("dense model", dense)],
        sections=[*tables, *folded],
        footer=[f"All numbers are from the checkpoint, which ddp-vllm {version} wrote."],
    )
    write_text(to_html(page), folder / REPORT_FILE)
    return folder / REPORT_FILE


def draw(metrics: Metrics) -> list[Picture]:
    """Draw the masks and the logged metrics."""
    kinds = {"attn": _heads, "mlp": _widths, "experts": _experts}
    drawn = [draw_kind(metrics) for kind, draw_kind in kinds.items() if kind in metrics.gates]
    provenance = metrics.checkpoint.provenance
    marks = {"targets": provenance.get("targets", {}), "rounded_after": provenance.get("search_steps")}
    caption = (
        "Losses: each step as a thin line, and a running mean over a twentieth of the steps. At the vertical line "
        "the kept units are fixed; after it only their scales are trained."
    )
    recovered = "The weights are trained on the dense model's outputs. Each step as a thin line, and a running mean."
    for name, title, text, steps, options in (
        ("curves", "Training", caption, metrics.pruning, marks),
        ("recovery", "Recovery", recovered, metrics.recovery, {}),
    ):
        if steps:
            panels = pictures.metrics_drawn(steps)
            draw_panels = partial(pictures.draw_curves, curves=steps, panels=panels, **options)
            height = 0.4 + 1.15 * len(panels)
            drawn.append(pictures.render(draw_panels, name=name, title=title, caption=text, height=height))
    return drawn


def _heads(metrics: Metrics) -> Picture:
    dense, gates_LU = metrics.checkpoint.widths.dense, metrics.gates["attn"].astype(np.float64)
    unit = "query head" if gates_LU.shape[1] == dense.num_query_heads else "KV group"
    return pictures.render(
        partial(pictures.draw_heatmaps, values={"scale": gates_LU}, unit_label=unit),
        name="heads",
        title=f"Attention: each {unit}",
        caption="White: removed. The bar has the scale of each shade.",
        height=pictures.height_of_map(gates_LU.shape[1]),
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
    use = " Below: how often the router chose each on the training text; white: never." if len(panels) > 1 else ""
    return pictures.render(
        partial(pictures.draw_heatmaps, values=panels, unit_label="expert"),
        name="experts",
        title="Width of each expert",
        caption=f"White: removed. The bar has the width of each shade.{blank}{use}",
        height=pictures.height_of_map(widths_LE.shape[1]) * len(panels),
    )
