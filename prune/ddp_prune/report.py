"""What was removed, as a page: `report.html` needs no network, its pictures (PNG) and numbers (CSV) lie in `report/`.

Everything is read from the checkpoint itself, so the page can be made again wherever the folder is.
"""

import csv
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from ddp_prune import pictures
from ddp_prune.evidence import Evidence, Table, expert_use, expert_widths, gather, kept_scales, tables
from ddp_prune.recipe import Recipe
from ddp_prune.summary import footprint, totals
from ddp_vllm.checkpoint import Checkpoint
from ddp_vllm.errors import OutputError, SettingError
from ddp_vllm.remote_code.widths import dense_kv_heads

REPORT_FILE, DATA_FOLDER = "report.html", "report"
STYLE = """
body{font:16px/1.5 system-ui,sans-serif;color:#111;background:#fff;max-width:64rem;margin:0 auto;padding:1rem}
h1{font-size:1.5rem;line-height:1.2;overflow-wrap:anywhere}h2{font-size:1.15rem;margin:2rem 0 .5rem}
.pictures{display:grid;gap:1.5rem;grid-template-columns:repeat(auto-fit,minmax(min(100%,26rem),1fr));align-items:start}
figure{margin:0}svg{width:100%;height:auto;display:block}figcaption,.small{font-size:.875rem;color:#333}
.wide{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums}
th,td{padding:.25rem .6rem;border-bottom:1px solid #bbb;text-align:right;white-space:nowrap}
th:first-child,td:first-child{text-align:left;white-space:normal}
thead th{border-bottom:2px solid #111;vertical-align:bottom;white-space:normal}
.settings td{text-align:left;white-space:normal;overflow-wrap:anywhere}
a{color:inherit}summary{cursor:pointer;font-weight:bold;margin-top:1rem}
@media(max-width:30rem){body{padding:.6rem}th,td{padding:.2rem .4rem;font-size:.85rem}}
"""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One picture of the page."""

    name: str
    title: str
    caption: str
    draw: pictures.Picture
    height: float
    """In inches."""


def figures(evidence: Evidence) -> list[Figure]:
    """Choose the pictures there is evidence for."""
    drawn = [
        draw(evidence)
        for kind, draw in (("attn", _heads), ("mlp", _widths), ("experts", _experts))
        if kind in evidence.gates
    ]
    drawn += [_scales(evidence)] if evidence.gates else []
    return drawn + ([_curves(evidence)] if evidence.metrics else [])


def _heads(evidence: Evidence) -> Figure:
    config, gates = evidence.checkpoint.config, evidence.gates["attn"].astype(np.float64)
    units, heads = gates.shape[1], config["num_attention_heads"]
    group = heads // dense_kv_heads(config)
    unit, title, lines = "KV group", f"Attention, KV groups of {group} query heads", ""
    if units == heads:
        unit, title = "query head", "Attention, query heads"
        lines = " Lines part those that share a KV head." if group > 1 else ""
    return Figure(
        name="heads",
        title=title,
        caption=f"Crossed out: removed. The darker, the larger the scale of what stays.{lines}",
        draw=pictures.heatmaps({"scale": gates}, unit, group=group if lines else 1),
        height=pictures.height_of_map(units),
    )


def _widths(evidence: Evidence) -> Figure:
    kept = [layer.intermediate_size for layer in evidence.checkpoint.layers]
    dense = evidence.checkpoint.config["intermediate_size"]
    return Figure(
        name="widths",
        title="MLP width of each layer",
        caption=f"Grey: channels kept. Outline: the dense model's {dense:,}.",
        draw=pictures.widths(kept, dense),
        height=2.5,
    )


def _experts(evidence: Evidence) -> Figure:
    widths, use = expert_widths(evidence.checkpoint), expert_use(evidence.checkpoint)
    panels = {"channels left": widths} if use is None else {"channels left": widths, "× even share": use}
    below = "" if use is None else " Below: how often the router chose each on the training text; crossed out: never."
    return Figure(
        name="experts",
        title="Width of each expert",
        caption=f"The darker, the wider; crossed out: removed.{below}",
        draw=pictures.heatmaps(panels, "expert"),
        height=pictures.height_of_map(widths.shape[1]) * len(panels),
    )


def _scales(evidence: Evidence) -> Figure:
    kept = {evidence.labels[kind]: kept_scales(value) for kind, value in evidence.gates.items()}
    searched = {
        evidence.labels[kind]: kept_scales(value) for kind, value in evidence.searched.items() if kind in evidence.gates
    }
    ranges = [
        "{}: median {:.2f}, 90 % between {:.2f} and {:.2f}.".format(label, *np.quantile(scales, [0.5, 0.05, 0.95]))
        for label, scales in kept.items()
        if len(scales)
    ]
    return Figure(
        name="gates",
        title="Scales of what stays",
        caption=" ".join([*ranges, "Dotted: 1, unscaled."]),
        draw=pictures.histograms(kept, searched),
        height=0.6 + 1.6 * len(kept),
    )


def _curves(evidence: Evidence) -> Figure:
    recipe = evidence.checkpoint.provenance.get("recipe", {})
    return Figure(
        name="curves",
        title="Training",
        caption="Losses: every step in grey, a running mean over a twentieth of the steps in black. At the upright "
        "line the support is rounded and frozen; from there on only scales are learned.",
        draw=pictures.training_curves(
            evidence.metrics, target=recipe.get("sparsity") or None, rounded_after=_search_steps(recipe)
        ),
        height=pictures.height_of_curves(evidence.metrics),
    )


def _search_steps(recipe: Mapping[str, Any]) -> int | None:
    try:
        return Recipe(**recipe).search_steps
    except (TypeError, SettingError):
        return None  # written by another version


def size_table(checkpoint: Checkpoint) -> Table:
    """Return what is left of each kind of unit, and of what they cost."""
    rows = [*totals(checkpoint).rows, *footprint(checkpoint)]
    return ["", "dense", "kept", "removed"], [[n, f"{a:,}", f"{b:,}", f"{1 - b / a:.1%}"] for n, a, b in rows]


def perplexity_table(quality: Mapping[str, Any]) -> Table:
    """Return perplexities with standard errors over the held-out blocks; the ratio's from the blocks' differences."""
    rows = []
    whole = {name: [math.log(quality[name])] for name in ("dense", "pruned")}  # what older checkpoints say
    losses = quality.get("block_losses", whole)
    differences = [b - a for a, b in zip(losses["dense"], losses["pruned"], strict=True)]
    for label, values in (("dense", losses["dense"]), ("pruned", losses["pruned"]), ("pruned / dense", differences)):
        value = math.exp(statistics.fmean(values))
        error = value * statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
        rows.append([label, f"{value:.2f}", "–" if error is None else f"± {error:.2f}"])
    return ["", "perplexity", "standard error"], rows


def rounding_table(evidence: Evidence) -> Table:
    """Return what the step to exact counts changed."""
    rows = []
    for kind, change in evidence.checkpoint.provenance["rounding"].items():
        values = evidence.gates.get(kind, np.zeros(1))
        final = 1.0 - float((values > 0).mean())
        rows.append(
            [
                evidence.labels.get(kind, kind),
                f"{change['raw_sparsity']:.2%}",
                f"{change['dropped']:,}",
                f"{change['revived']:,}",
                f"{final:.2%}",
            ]
        )
    return ["", "sparsity before", "dropped", "revived", "sparsity after"], rows


def write_report(checkpoint: Checkpoint, folder: Path) -> Path:
    """Write `report.html` and `report/` into `folder` and return the page's path; older ones are replaced.

    Raises: CheckpointError as `gather`; OutputError if nothing can be written there.
    """
    evidence = gather(checkpoint)
    data = folder / DATA_FOLDER
    try:
        data.mkdir(parents=True, exist_ok=True)
        drawn = []
        for figure in figures(evidence):
            vector, raster = pictures.render(figure.draw, figure.name, figure.height)
            (data / f"{figure.name}.png").write_bytes(raster)
            drawn.append((figure, vector))
        numbers = tables(evidence)
        for name, (headings, rows) in numbers.items():
            with open(data / f"{name}.csv", "w", encoding="utf-8", newline="") as file:
                csv.writer(file).writerows([headings, *rows])
        page = folder / REPORT_FILE
        page.write_text(_html(evidence, drawn, list(numbers)), encoding="utf-8")
    except OSError as error:
        raise OutputError(f"{folder} cannot be written ({error}); choose another folder with -o") from error
    return page


def _html(evidence: Evidence, drawn: Sequence[tuple[Figure, str]], files: Iterable[str]) -> str:
    checkpoint = evidence.checkpoint
    provenance = checkpoint.provenance
    recipe = provenance.get("recipe", {})
    name = escape(checkpoint.folder.resolve().name)
    learned_on = escape(str(recipe.get("model", "its dense model")))
    dense = escape(str(provenance.get("applied_to") or recipe.get("model", "its dense model")))
    body = [f"<h1>{name}: what was removed</h1>"]
    body.append(f"<p>From {dense}, by masks learned on the frozen weights of {learned_on}.</p>")
    body += ["<h2>Size</h2>", _html_table(size_table(checkpoint))]
    if quality := provenance.get("perplexity"):
        body += ["<h2>Perplexity on held-out text</h2>", _html_table(perplexity_table(quality))]
        blocks = len(quality.get("block_losses", {}).get("dense", ())) or "some"
        body.append(
            f'<p class="small">{quality["tokens"]:,} tokens of {escape(str(recipe.get("data", "text")))} in {blocks} '
            f"blocks that were not learned on, by {learned_on} and what was left of it. Errors are over blocks; the "
            "ratio's is that of the blocks' differences, for both models read the same ones.</p>"
        )
    if provenance.get("rounding"):
        body += ["<h2>What rounding changed</h2>", _html_table(rounding_table(evidence))]
        body.append('<p class="small">To the budget, by saliency; in units of each module type.</p>')
    body += ["<h2>Pictures</h2>", '<div class="pictures">']
    for figure, vector in drawn:
        image = vector.replace("<svg ", f'<svg role="img" aria-label="{escape(figure.title)}" ', 1)
        body.append(
            f'<figure id="{figure.name}"><strong>{escape(figure.title)}</strong>{image}'
            f"<figcaption>{escape(figure.caption)}</figcaption></figure>"
        )
    body.append("</div>")
    if "experts" not in evidence.gates:
        widths = _html_table(tables(evidence)["widths"])
        body.append(f"<details><summary>Widths, layer by layer</summary>{widths}</details>")
    if recipe:
        settings = (["setting", "value"], [[key, str(value)] for key, value in recipe.items()])
        body.append(f"<details><summary>Recipe</summary><div class=settings>{_html_table(settings)}</div></details>")
    links = [f'<a href="{DATA_FOLDER}/{file}.csv">{file}.csv</a>' for file in files]
    links += [f'<a href="{DATA_FOLDER}/{figure.name}.png">{figure.name}.png</a>' for figure, _ in drawn]
    version = escape(str(provenance.get("ddp_vllm", "unknown")))
    body.append(f'<p class="small">Beside this page: {", ".join(links)}. Written by ddp-vllm {version}.</p>')
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}<title>{name}: what was removed</title>'
        f"<style>{STYLE}</style></head>\n<body>\n" + "\n".join(body) + "\n</body></html>\n"
    )


def _html_table(table: Table) -> str:
    headings, rows = table
    head = "".join(f"<th>{escape(cell)}</th>" for cell in headings)
    body = "\n".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>'
