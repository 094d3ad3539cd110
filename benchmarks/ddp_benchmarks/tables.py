"""Prints results as tables in the terminal, draws a picture, and returns one line of JSON for
programs."""

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

from ddp_benchmarks.protocol import result_line
from ddp_vllm.evaluations import TASKS, in_points, mean_difference, score, task_of
from ddp_vllm.intervals import ratio_text, spread
from ddp_vllm.pages.terminal import SafeConsole
from ddp_vllm.results import main_metric, main_verdict, measured, on_gpu

FILE_WIDTH = 200  # characters; rich's default of 80 truncates the columns of several models
_METRICS = (  # metric, heading, decimals
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
_FACTS = (  # fact, heading, divisor, decimals
    ("peak_memory_bytes", "peak memory of all processes, GiB", 2**30, 2),
    ("weights_gib", "weights, GiB", 1, 2),
    ("kv_cache_tokens", "tokens the KV cache holds", 1, 0),
    ("weights_load_seconds", "loading the weights, s", 1, 1),
    ("init_engine_seconds", "compiling and warming up, s", 1, 1),
    ("startup_seconds", "start to first answer, s", 1, 1),
)


def plain_console(*, as_json: bool = False, quiet: bool = False) -> Console:
    """Return a console that prints names and errors unchanged: neither [brackets] nor :colons: are
    markup.

    Outside of a terminal tables are FILE_WIDTH wide. as_json: print to stderr. quiet: print
    nothing.
    """
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else FILE_WIDTH
    return SafeConsole(
        highlight=False, markup=False, emoji=False, width=width, soft_wrap=True, stderr=as_json, quiet=quiet
    )


def print_report(results: Mapping[str, Any], console: Console) -> None:
    """Print one table per load, with medians of the rounds and ratios to the dense model, then the
    verdicts."""
    labels = [model["label"] for model in results["models"]]
    for load in dict.fromkeys(run["load"] for run in results["runs"]):
        table = Table(title=f"ShareGPT, {load}: medians of the measured rounds", box=box.SIMPLE_HEAD)
        table.add_column("metric")
        answers = {verdict["label"]: verdict["metrics"] for verdict in results["verdicts"] if verdict["load"] == load}
        for label in (*labels, *(f"{label}, times better [95 %]" for label in answers)):
            table.add_column(label, justify="right")
        runs = {label: measured(results, label, load) for label in labels}
        for metric, heading, decimals in _METRICS:
            values = [[run["metrics"].get(metric) for run in runs[label]] for label in labels]
            ratios = [ratio_text(metrics[metric]) if metric in metrics else "–" for metrics in answers.values()]
            _add_row(table, heading, values, decimals, ratios)
        for fact, heading, divisor, decimals in _FACTS:
            if fact == "peak_memory_bytes" and on_gpu(results):
                continue
            values = [[run["engine"].get(fact) for run in runs[label]] for label in labels]
            _add_row(table, heading, [[v / divisor for v in runs if v is not None] for runs in values], decimals)
        console.print(table)
    for answer in results["verdicts"]:
        console.print(Text.assemble((answer["label"], "bold"), f", {answer['load']}: ", (answer["sentence"], "bold")))
    if not results["complete"]:
        console.print(Text.assemble(("Incomplete", "bold"), f": {results['reason']}"), style="red")


def _add_row(table: Table, heading: str, columns: list[list[Any]], decimals: int, ratios: Sequence[str] = ()) -> None:
    present = [[value for value in column if value is not None] for column in columns]
    if any(present):
        medians = [f"{median(column):,.{decimals}f}" if column else "–" for column in present]
        table.add_row(heading, *medians, *ratios)


def json_line(results: Mapping[str, Any]) -> str:
    """Return hardware, versions, seed, medians with their spread and the verdicts, as one line of
    JSON."""
    medians: dict[str, Any] = {}
    for model in results["models"]:
        for load in dict.fromkeys(run["load"] for run in results["runs"]):
            values = [run["metrics"]["requests_per_second"] for run in measured(results, model["label"], load)]
            if values:
                medians.setdefault(model["label"], {})[load] = spread(values)
    keep = ("label", "load", "pairs", "metric", "sentence")
    return result_line(
        "How much faster does vLLM answer ShareGPT prompts with the pruned model, and is the difference real?",
        results["settings"],
        seed=results["settings"]["seed"],
        where=results,
        benchmark="sharegpt",
        complete=results["complete"],
        requests_per_second=medians,
        verdicts=[{key: answer[key] for key in keep} for answer in results["verdicts"]],
    )


def draw_speed(results: Mapping[str, Any], path: Path) -> None:
    """Draw every run of each model, and the ratios with their intervals; PNG or SVG by the suffix
    of `path`."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    labels = [model["label"] for model in results["models"]]
    loads = list(dict.fromkeys(run["load"] for run in results["runs"]))
    plt.rcParams["text.parse_math"] = False  # print a $ in a name as it is
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
        heading = next(heading for name, heading, _ in _METRICS if name == metric)
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
    for answer in results["verdicts"]:
        if (answer["label"], answer["load"]) == (label, load):
            verdict = main_verdict(answer)
            if verdict["low"] is not None:
                axes.plot([verdict["low"], verdict["high"]], [row, row], color="black", marker="|", markersize=10)
            axes.plot(verdict["ratio"], row, "s", color="black")
            axes.text(0.5, row - 0.2, answer["sentence"], transform=axes.get_yaxis_transform(), ha="center", fontsize=9)


def print_quality(results: Mapping[str, Any], dense: Mapping[str, Any] | None, console: Console) -> None:
    """Print each task's metric with its standard error; with `dense`, also its metric and the
    retained fraction."""
    models = [dense, results] if dense else [results]
    limit = results["ddp_vllm"]["settings"]["limit"]
    table = Table("task", "metric", box=box.SIMPLE_HEAD, title=f"first {limit} rows of each task" if limit else None)
    for heading in [model["ddp_vllm"]["model"]["name"] for model in models] + (["retained"] if dense else []):
        table.add_column(heading, justify="right")
    for name in sorted(results["results"], key=lambda name: [*TASKS, name].index(name)):
        task = task_of(results, name)
        if score(results, name) is not None:
            cells = _quality([score(model, name) for model in models], in_percent=task.higher_is_better)
            table.add_row(task.heading, task.metric.replace("_", " "), *cells)
    means = [model["ddp_vllm"]["mean_accuracy"] for model in models]
    if means[-1]:
        table.add_section()
        cells = _quality([mean and (mean["value"], mean["stderr"]) for mean in means], in_percent=True)
        table.add_row(f"mean of {len(means[-1]['tasks'])}", "accuracy", *cells)
    console.print(table)
    if difference := mean_difference(results, dense) if dense else None:
        same_questions = Text.assemble(("mean accuracy", "bold"), ", same questions: ")
        console.print(same_questions.append(in_points(*difference), "bold"))


def _quality(scores: Sequence[tuple[float, float | None] | None], *, in_percent: bool) -> list[str]:
    """Return a table cell for each (value, standard error) and, for two, the ratio of the second to
    the first.

    The ratio of accuracies is in percent, that of perplexities a factor.
    """
    cells = []
    for result in scores:
        value, error = result or (None, None)
        scale, around = (100, error) if in_percent else (1, None)
        cell = "–" if value is None else f"{scale * value:.2f}"
        cells.append(cell if around is None else f"{cell} ± {100 * around:.2f}")
    if len(scores) == 2:
        (dense, _), (pruned, _) = (result or (0.0, None) for result in scores)
        kept = pruned / dense if dense else None
        cells.append("–" if kept is None else f"{100 * kept:.1f} %" if in_percent else f"×{kept:.2f}")
    return cells
