"""Benchmark results for the eye: a table in the terminal, a picture beside the JSON, one JSON line for machines."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ddp_vllm.evaluations import TASKS, in_points, mean_difference, score
from ddp_vllm.results import main_metric, main_verdict, measured, on_gpu, ratio_text, sentence, spread

FILE_WIDTH = 200  # characters; with rich's 80 the columns of several models are cut off
_ROWS = (  # metric, heading, decimals
    ("requests_per_second", "requests/s", 2),
    ("total_tokens_per_second", "tokens/s, total", 0),
    ("output_tokens_per_second", "tokens/s, output", 0),
    ("goodput_requests_per_second", "requests/s within the service level", 2),
    ("p50_ttft_ms", "time to first token, median ms", 1),
    ("p99_ttft_ms", "time to first token, p99 ms", 1),
    ("p50_tpot_ms", "time per output token, median ms", 2),
    ("p99_tpot_ms", "time per output token, p99 ms", 2),
    ("p50_itl_ms", "inter-token latency, median ms", 2),
    ("p99_itl_ms", "inter-token latency, p99 ms", 2),
    ("p50_e2el_ms", "end to end, median ms", 0),
    ("p99_e2el_ms", "end to end, p99 ms", 0),
)
_ENGINE_ROWS = (  # fact, heading, divisor, decimals
    ("peak_memory_bytes", "peak memory of all processes, GiB", 2**30, 2),
    ("weights_gib", "weights, GiB", 1, 2),
    ("kv_cache_tokens", "tokens the KV cache holds", 1, 0),
    ("weights_load_seconds", "loading the weights, s", 1, 1),
    ("init_engine_seconds", "compiling and warming up, s", 1, 1),
    ("startup_seconds", "start to first answer, s", 1, 1),
)


def plain_console() -> Console:
    """Return a console that prints names and vLLM's errors as they are: neither [brackets] nor :colons: are markup.

    In a file tables are as wide as they need.
    """
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else FILE_WIDTH
    return Console(highlight=False, markup=False, emoji=False, width=width)


def print_report(results: Mapping[str, Any], console: Console) -> None:
    """Print one table a load, medians of the rounds and ratios to the dense model, and each verdict under it."""
    labels = [model["label"] for model in results["models"]]
    for load in dict.fromkeys(run["load"] for run in results["runs"]):
        table = Table(title=f"ShareGPT, {load}: medians of the measured rounds", box=box.SIMPLE_HEAD)
        table.add_column("")
        answers = {each["label"]: each["metrics"] for each in results.get("verdicts", []) if each["load"] == load}
        for label in (*labels, *(f"{label}, times better [95 %]" for label in answers)):
            table.add_column(label, justify="right")
        runs = {label: measured(results, label, load) for label in labels}
        for metric, heading, decimals in _ROWS:
            values = [[run["metrics"].get(metric) for run in runs[label]] for label in labels]
            ratios = [ratio_text(found[metric]) if metric in found else "–" for found in answers.values()]
            _add_row(table, heading, values, decimals, ratios)
        for fact, heading, divisor, decimals in _ENGINE_ROWS:
            if fact == "peak_memory_bytes" and on_gpu(results):
                continue
            values = [[run["engine"].get(fact) for run in runs[label]] for label in labels]
            _add_row(table, heading, [[v / divisor for v in each if v is not None] for each in values], decimals)
        console.print(table)
    for answer in results.get("verdicts", []):
        console.print(Text.assemble((answer["label"], "bold"), f", {answer['load']}: ", (sentence(answer), "bold")))
    if not results["complete"]:
        console.print(Text.assemble(("Incomplete", "bold"), f": {results['reason']}"), style="red")


def _add_row(table: Table, heading: str, columns: list[list[Any]], decimals: int, ratios: Sequence[str] = ()) -> None:
    present = [[value for value in column if value is not None] for column in columns]
    if any(present):
        medians = [f"{median(column):,.{decimals}f}" if column else "–" for column in present]
        table.add_row(heading, *medians, *ratios)


def json_line(results: Mapping[str, Any]) -> str:
    """Return hardware, versions, seed, medians with their spread and the verdicts, as one line of JSON."""
    medians: dict[str, Any] = {}
    for model in results["models"]:
        for load in dict.fromkeys(run["load"] for run in results["runs"]):
            values = [run["metrics"]["requests_per_second"] for run in measured(results, model["label"], load)]
            if values:
                medians.setdefault(model["label"], {})[load] = spread(values)
    return json.dumps(
        {
            "benchmark": "sharegpt",
            "complete": results["complete"],
            "hardware": results["hardware"],
            "versions": results["versions"],
            "seed": results["settings"]["seed"],
            "requests_per_second": medians,
            "verdicts": [
                {key: answer[key] for key in ("label", "load", "pairs")}
                | {"metric": main_metric(answer["load"]), "sentence": sentence(answer)}
                for answer in results.get("verdicts", [])
            ],
        },
        ensure_ascii=False,
    )


def draw_speed(results: Mapping[str, Any], path: Path) -> None:
    """Draw every measured run, model by model, and the ratio with its interval; PNG or SVG by the name of `path`."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    labels = [model["label"] for model in results["models"]]
    loads = list(dict.fromkeys(run["load"] for run in results["runs"]))
    plt.rcParams["text.parse_math"] = False  # a $ in a name is a dollar
    figure, rows = plt.subplots(
        len(loads), 2, figsize=(9, 0.9 + 1.1 * len(loads) * len(labels)), squeeze=False, layout="constrained"
    )
    for (speeds, ratios), load in zip(rows, loads, strict=True):
        metric = main_metric(load)
        for row, label in enumerate(labels):
            values = [run["metrics"][metric] for run in measured(results, label, load) if metric in run["metrics"]]
            speeds.plot(values, [row] * len(values), "o", color="black", fillstyle="none", markersize=7)
            if values:
                speeds.plot([median(values)] * 2, [row - 0.25, row + 0.25], color="black")
        heading = next(heading for name, heading, _ in _ROWS if name == metric)
        speeds.set(xlabel=f"{heading} (circles: runs, bar: median)", title=load)
        speeds.set(yticks=range(len(labels)), yticklabels=labels, ylim=(len(labels) - 0.5, -0.5))
        speeds.set_xlim(0, 1.08 * speeds.get_xlim()[1])
        for row, label in enumerate(labels):
            _draw_ratio(ratios, row, label, load, results)
        ratios.axvline(1, color="black", linestyle=":")
        ratios.set(xlabel="times better than dense, 95 % interval", yticks=[])
        ratios.set(ylim=(len(labels) - 0.5, -0.5))
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _draw_ratio(axes: Any, row: int, label: str, load: str, results: Mapping[str, Any]) -> None:
    for answer in results.get("verdicts", []):
        if (answer["label"], answer["load"]) == (label, load):
            verdict = main_verdict(answer)
            if verdict["low"] is not None:
                axes.plot([verdict["low"], verdict["high"]], [row, row], color="black", marker="|", markersize=10)
            axes.plot(verdict["ratio"], row, "s", color="black")
            axes.text(0.5, row - 0.2, sentence(answer), transform=axes.get_yaxis_transform(), ha="center", fontsize=9)


_SAME_QUESTIONS = Text.assemble(("mean accuracy", "bold"), ", same questions: ")


def print_quality(results: Mapping[str, Any], dense: Mapping[str, Any] | None, console: Console) -> None:
    """Print each task's metric with its standard error; with `dense` beside it, what fraction is retained."""
    name = results["ddp_vllm"]["model"]["name"]
    limit = results["ddp_vllm"]["settings"]["limit"]
    table = Table(box=box.SIMPLE_HEAD, title=f"first {limit} rows of each task" if limit else None)
    table.add_column("task")
    table.add_column("metric")
    for heading in ([dense["ddp_vllm"]["model"]["name"]] if dense else []) + [name] + (["retained"] if dense else []):
        table.add_column(heading, justify="right")
    for task, row in TASKS.items():
        ours, theirs = score(results, task), score(dense, task) if dense else None
        if ours is not None:
            cells = [_value(task, theirs)] if dense else []
            kept = [_retained(task, ours[0], theirs[0]) if theirs else "–"] if dense else []
            table.add_row(row.heading, row.metric.replace("_", " "), *cells, _value(task, ours), *kept)
    ours_mean = results["ddp_vllm"]["mean_accuracy"]
    dense_mean = dense["ddp_vllm"]["mean_accuracy"] if dense else None
    if ours_mean:
        table.add_section()
        cells = [f"{100 * m['value']:.2f} ± {100 * m['stderr']:.2f}" for m in (dense_mean, ours_mean) if m]
        kept = (
            [f"{100 * ours_mean['value'] / dense_mean['value']:.1f} %" if dense_mean["value"] else "–"]
            if dense_mean
            else []
        )
        table.add_row(f"mean of {len(ours_mean['tasks'])}", "accuracy", *cells, *kept)
    console.print(table)
    if difference := mean_difference(results, dense) if dense else None:
        console.print(Text.assemble(_SAME_QUESTIONS, (in_points(*difference), "bold")))


def _value(task: str, found: tuple[float, float | None] | None) -> str:
    if found is None:
        return "–"
    value, error = found
    if not TASKS[task].higher_is_better:
        return f"{value:.2f}"
    return f"{100 * value:.2f}" + (f" ± {100 * error:.2f}" if error is not None else "")


def _retained(task: str, ours: float, dense: float) -> str:
    """An accuracy is retained in percent, a perplexity grows by a factor."""
    if not dense:
        return "–"
    return f"{100 * ours / dense:.1f} %" if TASKS[task].higher_is_better else f"×{ours / dense:.2f}"
