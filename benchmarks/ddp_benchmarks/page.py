"""One page that shows quality against speed: a self-contained HTML file, and the same tables in Markdown.

No script, no font and no picture is loaded from anywhere. Shapes and labels, not colours, tell models apart.
"""

import io
from collections.abc import Sequence
from html import escape
from math import inf
from typing import Any

from ddp_benchmarks.compare import Comparison, Entry, difference, engine_fact, retained, task_scores
from ddp_benchmarks.evaluate import in_points, points
from ddp_benchmarks.paper import PaperModel, paper_model
from ddp_benchmarks.results import main_metric, main_verdict, sentence
from ddp_benchmarks.tasks import TASKS
from ddp_benchmarks.verdict import ratio_text

_METRICS = {"requests_per_second": "requests/s", "p50_tpot_ms": "time per output token"}
_ENGINE_ROWS = (  # fact, heading, divisor, decimals
    ("peak_memory_bytes", "peak memory, GiB", 2**30, 2),
    ("weights_gib", "weights in memory, GiB", 1, 2),
    ("kv_cache_tokens", "tokens the KV cache holds", 1, 0),
)
_MARKERS = ("s", "^", "D", "v", "P", "X", "<", ">")
_STYLE = """
body{font:16px/1.5 system-ui,sans-serif;color:#111;background:#fff;max-width:60rem;margin:0 auto;padding:1rem}
h1{font-size:1.5rem;line-height:1.2}h2{font-size:1.15rem;margin-top:2rem}
.wide{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums}
th,td{padding:.25rem .6rem;border-bottom:1px solid #bbb;text-align:right;white-space:nowrap}
th:first-child,td:first-child{text-align:left;position:sticky;left:0;background:#fff}
thead th{border-bottom:2px solid #111}svg{width:100%;max-width:40rem;height:auto}
li{margin:.3rem 0}.small{font-size:.875rem;color:#333}
@media(max-width:30rem){body{padding:.6rem}th,td{padding:.2rem .4rem;font-size:.85rem}
th,td{white-space:normal}th:first-child,td:first-child{min-width:5.5rem}}
"""
Table = tuple[list[str], list[list[str]]]
"""Headings and rows; the first column is text."""


def headline(entry: Entry, comparison: Comparison) -> str:
    """Say in one sentence what pruning cost and gave."""
    parts = []
    if entry.speed:
        parts.append(f"{sentence(entry.speed)}, {entry.speed['load']}")
    if (kept := retained(entry, comparison.dense)) is not None:
        limit = entry.quality["ddp_vllm"]["settings"]["limit"] if entry.quality else None
        rows = f" (first {limit} rows of each task)" if limit else ""
        lost = difference(entry, comparison.dense)
        parts.append((f"accuracy {in_points(*lost)}" if lost else f"{100 * kept:.1f} % of the dense accuracy") + rows)
    dense = comparison.dense.facts if comparison.dense else None
    if dense and dense.parameters and entry.facts.parameters:
        parts.append(f"{100 * (1 - entry.facts.parameters / dense.parameters):.1f} % fewer parameters")
    if dense and dense.kv_bytes_per_token and entry.facts.kv_bytes_per_token:
        less = 1 - entry.facts.kv_bytes_per_token / dense.kv_bytes_per_token
        parts.append(f"{100 * less:.1f} % less KV cache a token")
    return "; ".join(parts) or "nothing was measured yet"


def size_table(comparison: Comparison) -> Table:
    """Sizes, speed and quality, one column a model."""
    entries = comparison.entries
    rows = [
        ["units removed", *(f"{100 * e.sparsity:g} %" if e.sparsity is not None else "–" for e in entries)],
        ["parameters", *(_millions(e.facts.parameters) for e in entries)],
        ["KV bytes a token", *(_count(e.facts.kv_bytes_per_token) for e in entries)],
    ]
    for fact, heading, divisor, decimals in _ENGINE_ROWS:
        values = [engine_fact(entry, comparison, fact) for entry in entries]
        if any(values):
            rows.append([heading, *("–" if v is None else f"{v / divisor:,.{decimals}f}" for v in values)])
    for load in dict.fromkeys(speed["load"] for entry in entries for speed in entry.speeds):
        cells = []
        for entry in entries:
            found = [speed for speed in entry.speeds if speed["load"] == load]
            cells.append(ratio_text(main_verdict(found[0])) if found else "–")
        if comparison.dense:
            cells[0] = "1"
        rows.append([f"{_METRICS[main_metric(load)]}, {load}", *cells])
    tasks = {e.accuracy[2] for e in entries if e.accuracy}
    heading = f"mean accuracy, {min(tasks)} tasks" if len(tasks) == 1 else "mean accuracy"
    rows.append([heading, *(_mean(e) + _of_tasks(e, tasks) for e in entries)])
    kept = [retained(e, comparison.dense) for e in entries]
    rows.append(["retained accuracy", *("–" if k is None else f"{100 * k:.1f} %" for k in kept)])
    lost = [difference(e, comparison.dense) for e in comparison.pruned]
    if any(lost):
        dense = ["–"] if comparison.dense else []
        rows.append(["points, same questions, 95 %", *dense, *(points(*each) if each else "–" for each in lost)])
    return ["", *(_column(e) for e in entries)], rows


def task_table(comparison: Comparison) -> Table:
    """Every task with its standard error, one column a model."""
    scores = [task_scores(entry) for entry in comparison.entries]
    rows = []
    for name, task in TASKS.items():
        if any(name in found for found in scores):
            metric = task.metric.replace("_", " ")
            rows.append([f"{task.heading} ({metric})", *(_score(name, found.get(name)) for found in scores)])
    return ["", *(_column(e) for e in comparison.entries)], rows


def latency_table(comparison: Comparison) -> Table:
    """Every other metric that was compared; latencies as how many times shorter they are."""
    rows = []
    for entry in comparison.pruned:
        for speed in entry.speeds:
            for metric, verdict in speed["metrics"].items():
                if metric != main_metric(speed["load"]) and metric.startswith(("p50", "p99", "output", "goodput")):
                    heading = metric.removesuffix("_ms").replace("_", " ")
                    rows.append([f"{_name(entry)}, {speed['load']}", heading, ratio_text(verdict)])
    return ["", "metric", "times better than dense"], rows


def paper_table(paper: PaperModel, comparison: Comparison) -> Table:
    """The paper's rows beside ours, at the same sparsity."""
    rows = []
    for row in paper.rows:
        ours = [
            entry for entry in comparison.entries if (entry.sparsity if entry.facts.pruned else 0.0) == row.sparsity
        ]
        matching = [entry for entry in ours if entry.accuracy and entry.accuracy[2] == paper.num_tasks]
        speed = f"{row.speedup:.2f}× ({row.gpu})" if row.speedup else "–"
        ratios = [ratio_text(main_verdict(e.speed)) for e in ours if e.speed and _metric(e) == "requests_per_second"]
        accuracy = _mean(matching[0]) if matching else "–"
        rows.append([f"{100 * row.sparsity:g} %", f"{row.accuracy:.2f}", accuracy, speed, ratios[0] if ratios else "–"])
    return [
        "sparsity",
        f"accuracy of {paper.num_tasks} tasks, paper",
        "ours",
        "speedup, paper",
        "ours",
    ], rows


def draw_quality(comparison: Comparison) -> str | None:
    """Return an SVG of accuracy against speed with 95 % intervals, or None if no model has both."""
    points = [(e, _point(e, comparison)) for e in comparison.entries]
    shown = [(entry, point) for entry, point in points if point]
    if len(shown) < 2:
        return None
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with plt.rc_context(
        {"svg.fonttype": "none", "text.parse_math": False, "font.size": 12, "font.family": "sans-serif"}
    ):
        figure, axes = plt.subplots(figsize=(5.4, 4.6), layout="constrained")
        front = _pareto([point for _, point in shown])
        axes.plot([p["x"] for p in front], [p["y"] for p in front], color="0.6", linestyle="--", zorder=0)
        for number, (entry, p) in enumerate(shown):
            marker = "o" if not entry.facts.pruned else _MARKERS[(number - 1) % len(_MARKERS)]
            axes.errorbar(
                p["x"],
                p["y"],
                xerr=[[p["x"] - p["low"]], [p["high"] - p["x"]]],
                yerr=p["reach"],
                fmt=marker,
                color="black",
                markerfacecolor="white" if not entry.facts.pruned else "black",
                markersize=8,
                capsize=4,
                label=_name(entry),
            )
        names = dict.fromkeys(_METRICS[_metric(entry)] for entry, _ in shown if entry.speed)
        axes.set(xlabel=f"{' or '.join(names)}, times better than dense", ylabel="mean accuracy, %")
        axes.margins(0.15)
        figure.legend(loc="outside lower center", ncols=1 if len(shown) < 4 else 2, frameon=False)
        image = io.StringIO()
        figure.savefig(image, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
        plt.close(figure)
    text = image.getvalue()
    return text[text.index("<svg") :]


def _point(entry: Entry, comparison: Comparison) -> dict[str, float] | None:
    """Place a model in the picture; the dense one stands at 1 without an interval."""
    if entry.accuracy is None or (entry.facts.pruned and not entry.speed):
        return None
    if entry.facts.pruned and entry.speed:
        verdict = main_verdict(entry.speed)
        x = verdict["ratio"]
        low, high = (verdict[key] if verdict[key] is not None else x for key in ("low", "high"))
    else:
        x = low = high = 1.0
    return {"x": x, "low": low, "high": high, "y": 100 * entry.accuracy[0], "reach": 196 * entry.accuracy[1]}


def _pareto(points: Sequence[dict[str, float]]) -> list[dict[str, float]]:
    """Return the points that no other beats in both speed and accuracy, slowest first."""
    best, front = -inf, []
    for point in sorted(points, key=lambda p: (-p["x"], -p["y"])):
        if point["y"] > best:
            front.append(point)
            best = point["y"]
    return front[::-1]


def write_html(comparison: Comparison) -> str:
    """Return the whole page."""
    body = ["<h1>Pruned models: quality against speed</h1>", "<ul>"]
    body += [
        f"<li><strong>{escape(_name(e))}</strong>: {escape(headline(e, comparison))}</li>" for e in comparison.pruned
    ]
    body.append("</ul>")
    if picture := draw_quality(comparison):
        body += [picture, f'<p class="small">{escape(_CAPTION)}</p>']
    for title, table, remark in _sections(comparison):
        body += [f"<h2>{escape(title)}</h2>", _html_table(table), f'<p class="small">{escape(remark)}</p>']
    body += ["<h2>How this was measured</h2>", "<ul class=small>"]
    body += [f"<li>{escape(line)}</li>" for line in provenance(comparison)]
    body.append("</ul>")
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
    title = "<title>Pruned models: quality against speed</title>"
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}{title}<style>{_STYLE}</style></head>\n<body>\n'
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def write_markdown(comparison: Comparison) -> str:
    """Return the sentences and tables of the page in Markdown."""
    lines = [f"- **{_name(e)}**: {headline(e, comparison)}" for e in comparison.pruned] + [""]
    for title, (headings, rows), remark in _sections(comparison):
        lines += [f"### {title}", "", f"| {' | '.join(headings)} |", "|---" + "|--:" * (len(headings) - 1) + "|"]
        lines += [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
        lines += ["", remark, ""]
    return "\n".join([*lines, *(f"- {line}" for line in provenance(comparison)), ""])


_CAPTION = (
    "Right and up is better. Bars are 95 % intervals: Student t over pairs for speed, 1.96 standard errors for "
    "accuracy. The dashed line joins the models that no other beats in both. The dense model stands at 1."
)


def _sections(comparison: Comparison) -> list[tuple[str, Table, str]]:
    size_remark = (
        "Speed: how many times better than dense, pair by pair, with its 95 % interval. Accuracy ± standard error."
    )
    sections = [("Size, speed, quality", size_table(comparison), size_remark)]
    if (tasks := task_table(comparison))[1]:
        remark = "Accuracy in percent ± standard error; perplexity per word as lm-eval defines it (lower is better)."
        sections.append(("Tasks", tasks, remark))
    if (latencies := latency_table(comparison))[1]:
        remark = (
            "Ratios to the dense model with 95 % intervals; above 1 the pruned model is better, latencies included."
        )
        sections.append(("Other measures of speed", latencies, remark))
    dense = next(filter(None, (e.dense for e in comparison.pruned)), None)
    if dense and (paper := paper_model(dense)):
        remark = (
            "The paper's GPUs, tokens and calibration differ from ours; its perplexities are per token and left out."
        )
        sections.append((f"{paper.title} in the paper (arXiv:2603.08065)", paper_table(paper, comparison), remark))
    return sections


def provenance(comparison: Comparison) -> list[str]:
    """Say on what hardware, with which versions, seeds and limits every number was measured, and what is missing."""
    lines = list(comparison.notes)
    for bench in comparison.benches:
        settings, sample = bench["settings"], bench["sample"]
        state = "" if bench["complete"] else f" INCOMPLETE: {bench['reason']}."
        lines.append(
            f"Speed, {settings['mode']}: {sample['conversations']} ShareGPT conversations ({sample['prompt_tokens']} "
            f"prompt and {sample['output_tokens']} output tokens), {settings['pairs']} pairs, seed {settings['seed']}, "
            f"{_machine(bench)}, {bench['started']}.{state}"
        )
    for entry in comparison.entries:
        if entry.quality:
            ours = entry.quality["ddp_vllm"]
            limit = ours["settings"]["limit"]
            rows = f"the first {limit} rows of each task" if limit else "every row"
            source = "hub" if ours["data"] == "hub" else "local files"
            lines.append(
                f"Quality of {_name(entry)}: {rows}, {source}, {ours['settings']['backend']} backend, "
                f"context {ours['settings']['max_length']}, {_machine(ours)}."
            )
    return lines


def _machine(source: Any) -> str:
    hardware, versions = source["hardware"], source["versions"]
    where = ", ".join(hardware["gpus"]) or f"{hardware['cores']} cores of {hardware['cpu']}"
    packages = [f"{name} {versions[name]}" for name in ("vllm", "torch", "lm-eval", "ddp-vllm") if name in versions]
    return f"{where}, {', '.join(packages)}"


def _html_table(table: Table) -> str:
    headings, rows = table
    head = "".join(f"<th>{escape(cell)}</th>" for cell in headings)
    lines = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>'


def _name(entry: Entry) -> str:
    return entry.facts.name if entry.facts.pruned else f"{entry.facts.name} (dense)"


def _column(entry: Entry) -> str:
    return entry.facts.name if entry.facts.pruned else "dense"


def _metric(entry: Entry) -> str:
    return main_metric(entry.speed["load"] if entry.speed else "")


def _mean(entry: Entry) -> str:
    if entry.accuracy is None:
        return "–"
    value, error, _ = entry.accuracy
    return f"{100 * value:.2f} ± {100 * error:.2f}"


def _of_tasks(entry: Entry, counts: set[int]) -> str:
    """Say of how many tasks a mean is, where the models differ in that."""
    return f" ({entry.accuracy[2]} tasks)" if entry.accuracy and len(counts) > 1 else ""


def _score(name: str, found: tuple[float, float | None] | None) -> str:
    if found is None:
        return "–"
    value, error = found
    scale = 100 if TASKS[name].higher_is_better else 1
    return f"{scale * value:.2f}" + (f" ± {scale * error:.2f}" if error is not None else "")


def _millions(value: int | None) -> str:
    if value is None:
        return "–"
    return f"{value / 1e9:.2f} B" if value >= 1e9 else f"{value / 1e6:.1f} M"


def _count(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"
