"""The page that `compare` writes: what pruning cost in quality and gave in speed, model by model."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ddp_vllm.evaluations import TASKS, in_points, perplexity_ratio, points
from ddp_vllm.output import atomic_file, sync, writing
from ddp_vllm.pages.measurements import (
    Comparison,
    Entry,
    Interval,
    difference,
    engine_fact,
    retained,
    task_scores,
)
from ddp_vllm.pages.page import Page, Picture, Section, Table, to_html, to_markdown
from ddp_vllm.pages.paper import PaperModel, paper_model
from ddp_vllm.pages.pictures import Point, draw_points, render
from ddp_vllm.pages.report import REPORT_FILE
from ddp_vllm.results import main_metric, main_verdict, measured_on, ratio_text, sentence, with_interval

PICTURE_HEIGHT = 3.6  # inches
CAN = 0.02  # of the questions, two standard errors above which a model can do a task of answers in words
PAPER_METRIC = "requests_per_second"
_SPEEDS = {"requests_per_second": "requests/s", "p50_tpot_ms": "time per output token"}
_ENGINE_FACTS = (  # fact, heading, divisor, decimals
    ("peak_memory_bytes", "peak memory, GiB", 2**30, 2),
    ("weights_gib", "weights in memory, GiB", 1, 2),
    ("kv_cache_tokens", "tokens the KV cache holds", 1, 0),
)


def write_comparison(comparison: Comparison, html: Path, markdown: Path, tolerance: float | None = None) -> None:
    """Write the page twice; `tolerance` as in `choice`. Raises: OutputError."""
    page = replace(page_of(comparison, tolerance), links=_reports(comparison, html.parent))
    with writing(html):
        html.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(markdown) as table, atomic_file(html) as whole:  # both are on the disk before either appears
            for text, temporary in ((to_markdown(page), table), (to_html(page), whole)):
                temporary.write_text(text, encoding="utf-8")
                sync(temporary)


def page_of(comparison: Comparison, tolerance: float | None = None) -> Page:
    """Return the page: a sentence a model, the picture if there are two points, tables, and where it was measured."""
    take = [] if tolerance is None else [(f"Within {tolerance:g} times", choice(comparison, tolerance))]
    return Page(
        title="Pruned models: quality against speed",
        lead=[*take, *((_name(entry), headline(entry, comparison)) for entry in comparison.pruned)],
        sections=list(_sections(comparison)),
        footer=provenance(comparison),
    )


def _reports(comparison: Comparison, place: Path) -> dict[str, str]:
    """Return where the report of each model is, from a folder on, by its name; of those that have one."""
    reports = {_name(entry): Path(entry.facts.model) / REPORT_FILE for entry in comparison.pruned}
    return {name: quote(os.path.relpath(file, place.resolve())) for name, file in reports.items() if file.is_file()}


def headline(entry: Entry, comparison: Comparison) -> str:
    """Say in one sentence what pruning cost and gave."""
    parts = []
    if entry.speed:
        parts.append(f"{sentence(entry.speed)}, {entry.speed['load']}")
    elif entry.predicted:
        parts.append(f"{with_interval(*entry.predicted)} as fast, predicted")
    if (kept := retained(entry, comparison.dense)) is not None:
        limit = entry.quality["ddp_vllm"]["settings"]["limit"] if entry.quality else None
        asked = f" (first {limit} rows of each task)" if limit else ""
        lost = difference(entry, comparison.dense)
        parts.append((f"accuracy: {in_points(*lost)}" if lost else f"{100 * kept:.1f} % of the dense accuracy") + asked)
    if entry.heldout:
        parts.append(f"held-out perplexity {with_interval(*entry.heldout)} the dense model's")
    if comparison.dense:
        ours, dense = entry.facts, comparison.dense.facts
        parts += _less("fewer parameters", ours.parameters, dense.parameters)
        parts += _less("less KV cache a token", ours.kv_bytes_per_token, dense.kv_bytes_per_token)
    return "; ".join(parts) or "nothing was measured yet"


def _less(what: str, ours: int | None, dense: int | None) -> list[str]:
    return [f"{100 * (1 - ours / dense):.1f} % {what}"] if ours and dense else []


def _sections(comparison: Comparison) -> Iterable[Section]:
    """Yield the sections there is something for."""
    if pictures := [each for each in (_draw(comparison), _draw_heldout(comparison)) if each]:
        yield Section(heading="", pictures=pictures)
    remark = "Speed: how many times better than dense, pair by pair, with its 95 % interval. Accuracy ± standard error."
    yield Section(heading="Size, speed, quality", table=size_table(comparison), remark=remark)
    if (tasks := task_table(comparison)).rows:
        remark = "Accuracy in percent ± standard error; perplexity per word as lm-eval defines it (lower is better)."
        yield Section(heading="Tasks", table=tasks, remark=remark)
    if (texts := text_table(comparison)).rows:
        remark = (
            "Perplexity over the dense model's with its 95 % interval, KL from the dense model in nats a token, and "
            "for how many tokens both hold the same next one likeliest."
        )
        yield Section(heading="Texts of your own", table=texts, remark=remark)
    if (latencies := latency_table(comparison)).rows:
        remark = (
            "Ratios to the dense model with 95 % intervals; above 1 the pruned model is better, latencies included."
        )
        yield Section(heading="Other measures of speed", table=latencies, remark=remark)
    dense = next(filter(None, (entry.dense for entry in comparison.pruned)), None)
    if dense and (paper := paper_model(dense)):
        remark = (
            "The paper's GPUs, tokens and calibration differ from ours; its perplexities are per token and left out."
        )
        heading = f"{paper.title} in the paper (arXiv:2603.08065)"
        yield Section(heading=heading, table=paper_table(paper, comparison), remark=remark)


def size_table(comparison: Comparison) -> Table:
    """Sizes, speed and quality, one column a model."""
    entries = comparison.entries
    rows = [
        ["units removed", *_cells((entry.sparsity for entry in entries), lambda share: f"{100 * share:g} %")],
        ["parameters", *_cells((entry.facts.parameters for entry in entries), _millions)],
        ["KV bytes a token", *_cells((entry.facts.kv_bytes_per_token for entry in entries), "{:,}".format)],
        *_engine_rows(comparison),
        *_speed_rows(comparison),
        *_own_rows(comparison),
        *_accuracy_rows(comparison),
    ]
    return Table(headings=["", *map(_column, entries)], rows=[row for row in rows if set(row[1:]) != {"–"}])


def _engine_rows(comparison: Comparison) -> Iterable[list[str]]:
    for fact, heading, divisor, decimals in _ENGINE_FACTS:
        values = [engine_fact(entry, comparison, fact) for entry in comparison.entries]
        if any(values):
            yield [heading, *("–" if value is None else f"{value / divisor:,.{decimals}f}" for value in values)]


def _speed_rows(comparison: Comparison) -> Iterable[list[str]]:
    entries = comparison.entries
    for load in dict.fromkeys(speed["load"] for entry in entries for speed in entry.speeds):
        cells = ["1"] if comparison.dense else []
        for entry in comparison.pruned:
            found = [ratio_text(main_verdict(speed)) for speed in entry.speeds if speed["load"] == load]
            cells.append(found[0] if found else "–")
        yield [f"{_SPEEDS[main_metric(load)]}, {load}", *cells]


def _own_rows(comparison: Comparison) -> Iterable[list[str]]:
    """Yield what the checkpoints say of themselves."""
    first = ["1"] if comparison.dense else []
    if any(entry.perplexities for entry in comparison.pruned):
        stated = [entry.perplexities for entry in comparison.pruned]
        own = _cells(stated, lambda both: f"{both[0]:.2f} → {both[1]:.2f}")
        yield ["held-out perplexity, dense → own", *(["–"] if comparison.dense else []), *own]
    for heading, name in (("… times the dense model's", "heldout"), ("speed of a step, predicted", "predicted")):
        values = [getattr(entry, name) for entry in comparison.pruned]
        if any(values):
            yield [heading, *first, *_cells(values, lambda value: with_interval(*value))]


def _accuracy_rows(comparison: Comparison) -> Iterable[list[str]]:
    entries, dense = comparison.entries, comparison.dense
    counts = {entry.accuracy[2] for entry in entries if entry.accuracy}  # of tasks; said at each mean if they differ
    heading = f"mean accuracy, {min(counts)} tasks" if len(counts) == 1 else "mean accuracy"
    suffix = " ({} tasks)" if len(counts) > 1 else ""
    yield [heading, *_cells((entry.accuracy for entry in entries), lambda mean: _mean(mean) + suffix.format(mean[2]))]
    yield [
        "retained accuracy",
        *_cells((retained(entry, dense) for entry in entries), lambda kept: f"{100 * kept:.1f} %"),
    ]
    lost = [difference(entry, dense) for entry in comparison.pruned]
    if any(lost):
        yield ["points, same questions, 95 %", *(["–"] if dense else []), *_cells(lost, lambda each: points(*each))]


def task_table(comparison: Comparison) -> Table:
    """Every task with its standard error, one column a model."""
    scores = [task_scores(entry) for entry in comparison.entries]
    rows = [
        [f"{task.heading} ({task.metric.replace('_', ' ')}){_beyond(name, scores[0]) if comparison.dense else ''}"]
        + [_score(name, found.get(name)) for found in scores]
        for name, task in TASKS.items()
        if any(name in found for found in scores)
    ]
    return Table(headings=["", *map(_column, comparison.entries)], rows=rows)


def _beyond(name: str, dense: Mapping[str, tuple[float, float | None]]) -> str:
    """Say of a task that models answer in words that the dense one cannot do it: then nothing there can be lost."""
    value, error = dense.get(name) or (1.0, None)
    return ", which the dense model cannot do" if TASKS[name].is_generated and value < CAN + 2 * (error or 0) else ""


def text_table(comparison: Comparison) -> Table:
    """What `eval --text` found, a row a text and model."""
    rows = []
    for entry in comparison.pruned:
        for name, quality in entry.texts.items():
            near, ratio = quality.get("agreement", {}).get("pruned"), perplexity_ratio(quality)
            cells = [f"{near['kl']:.3f}", f"{near['top1']:.1%}"] if near else ["–", "–"]
            rows.append([name, _name(entry), with_interval(*ratio) if ratio else "–", *cells])
    headings = ["text", "model", "perplexity, × dense", "KL, nats", "same likeliest token"]
    return Table(headings=headings, rows=rows)


def latency_table(comparison: Comparison) -> Table:
    """Every other metric that was compared; latencies as how many times shorter they are."""
    rows = [
        [f"{_name(entry)}, {speed['load']}", metric.removesuffix("_ms").replace("_", " "), ratio_text(verdict)]
        for entry in comparison.pruned
        for speed in entry.speeds
        for metric, verdict in speed["metrics"].items()
        if metric != main_metric(speed["load"]) and metric.startswith(("p50", "p99", "output", "goodput"))
    ]
    return Table(headings=["", "metric", "times better than dense"], rows=rows)


def paper_table(paper: PaperModel, comparison: Comparison) -> Table:
    """The paper's numbers beside ours, at the same sparsity."""
    rows = []
    for sparsity, accuracy in paper.accuracy.items():
        ours = [each for each in comparison.entries if (each.sparsity if each.facts.pruned else 0.0) == sparsity]
        means = [_mean(each.accuracy) for each in ours if each.accuracy and each.accuracy[2] == paper.num_tasks]
        speeds = [each.speed for each in ours if each.speed and main_metric(each.speed["load"]) == PAPER_METRIC]
        ratios = [ratio_text(main_verdict(speed)) for speed in speeds]
        speedup = f"{paper.speedup[sparsity]:.2f}× ({paper.gpu})" if sparsity in paper.speedup else "–"
        rows.append([f"{100 * sparsity:g} %", f"{accuracy:.2f}", [*means, "–"][0], speedup, [*ratios, "–"][0]])
    headings = ["sparsity", f"accuracy of {paper.num_tasks} tasks, paper", "ours", "speedup, paper", "ours"]
    return Table(headings=headings, rows=rows)


def _draw(comparison: Comparison) -> Picture | None:
    """Return accuracy against speed with 95 % intervals, or None if no two models have both."""
    entries = [each for each in comparison.entries if each.accuracy and (each.speed or not each.facts.pruned)]
    if len(entries) < 2:
        return None
    speeds = dict.fromkeys(_SPEEDS[main_metric(each.speed["load"])] for each in entries if each.speed)
    return render(
        partial(draw_points, points=list(map(_point, entries)), speed=" or ".join(speeds), quality="mean accuracy, %"),
        name="quality",
        title="Accuracy against speed",
        caption="Right and up is better. Bars are 95 % intervals: Student t over pairs for speed, 1.96 standard errors "
        "for accuracy. The dashed line joins the models that no other beats in both. The dense model stands at 1.",
        height=PICTURE_HEIGHT,
    )


def _point(entry: Entry) -> Point:
    """Place a model in the picture; the dense one stands at 1 without an interval."""
    assert entry.accuracy
    verdict = main_verdict(entry.speed) if entry.speed else {"ratio": 1.0, "low": 1.0, "high": 1.0}
    ratio, low, high = (verdict["ratio"] if verdict[key] is None else verdict[key] for key in ("ratio", "low", "high"))
    value, error, _ = entry.accuracy
    quality = (100 * value, 100 * value - 196 * error, 100 * value + 196 * error)
    return Point(name=_name(entry), is_dense=not entry.facts.pruned, ratio=(ratio, low, high), quality=quality)


def _speedup(entry: Entry) -> Interval | None:
    """Return how much faster than the dense model it was measured to be, or else was promised to be."""
    if entry.speed is None:
        return entry.predicted
    verdict = main_verdict(entry.speed)
    return tuple(verdict["ratio"] if verdict[key] is None else verdict[key] for key in ("ratio", "low", "high"))


def _draw_heldout(comparison: Comparison) -> Picture | None:
    """Return held-out perplexity against speed; None if no two models have both."""
    points = [
        Point(name=_name(entry), is_dense=False, ratio=speed, quality=entry.heldout)
        for entry in comparison.pruned
        if entry.heldout and (speed := _speedup(entry))
    ]
    if len(points) < 2:
        return None
    points.insert(0, Point(name="dense", is_dense=True, ratio=(1.0, 1.0, 1.0), quality=(1.0, 1.0, 1.0)))
    drawn = partial(draw_points, points=points, speed="speed", quality="perplexity, × dense", less_is_better=True)
    return render(
        drawn,
        name="heldout",
        title="Held-out perplexity against speed",
        caption="Right and up is better. Speed as measured by bench, or else as the profile predicts, with its range. "
        "Perplexity over the dense model's, of text held out of what each learned on; bars are 95 % intervals over "
        "blocks of text.",
        height=PICTURE_HEIGHT,
    )


def choice(comparison: Comparison, tolerance: float) -> str:
    """Say which model to take if perplexity may be this many times the dense model's: the fastest of those."""
    within = [entry for entry in comparison.pruned if entry.heldout and entry.heldout[0] <= tolerance]
    if not within:
        return f"none has a held-out perplexity of at most {tolerance:g} times the dense model's"

    def by_speed(entry: Entry) -> tuple[float, float]:
        return (_speedup(entry) or (0.0,))[0], -float(entry.facts.parameters or 0)

    best = max(within, key=by_speed)
    assert best.heldout
    speed = _speedup(best)
    gain = f", {with_interval(*speed)} as fast" if speed else ""
    return f"{best.facts.name}: held-out perplexity {with_interval(*best.heldout)} the dense model's{gain}"


def provenance(comparison: Comparison) -> list[str]:
    """Say on what hardware, with which versions, seeds and limits every number was measured, and what is missing."""
    evaluated = [(_name(entry), entry.quality) for entry in comparison.entries if entry.quality]
    lines = [*comparison.notes, *map(_speed_measured, comparison.benches)]
    return lines + [_quality_measured(name, quality["ddp_vllm"]) for name, quality in evaluated]


def _speed_measured(bench: Mapping[str, Any]) -> str:
    settings, sample = bench["settings"], bench["sample"]
    state = "" if bench["complete"] else f" INCOMPLETE: {bench['reason']}."
    return (
        f"Speed, {settings['mode']}: {sample['conversations']} ShareGPT conversations ({sample['prompt_tokens']} "
        f"prompt and {sample['output_tokens']} output tokens), {settings['pairs']} pairs, seed {settings['seed']}, "
        f"{measured_on(bench)}, {bench['started']}.{state}"
    )


def _quality_measured(name: str, ours: Mapping[str, Any]) -> str:
    settings, source = ours["settings"], "hub" if ours["data"] == "hub" else "local files"
    asked = f"the first {settings['limit']} rows of each task" if settings["limit"] else "every row"
    return (
        f"Quality of {name}: {asked}, {source}, {settings['backend']} backend, context {settings['max_length']}, "
        f"{measured_on(ours)}."
    )


def _cells(values: Iterable[Any], write: Callable[[Any], str]) -> Sequence[str]:
    """Return what is written of each value, a dash where there is none."""
    return ["–" if value is None else write(value) for value in values]


def _name(entry: Entry) -> str:
    return entry.facts.name if entry.facts.pruned else f"{entry.facts.name} (dense)"


def _column(entry: Entry) -> str:
    return entry.facts.name if entry.facts.pruned else "dense"


def _mean(accuracy: tuple[float, float, int]) -> str:
    return f"{100 * accuracy[0]:.2f} ± {100 * accuracy[1]:.2f}"


def _score(name: str, found: tuple[float, float | None] | None) -> str:
    if found is None:
        return "–"
    value, error = found
    scale = 100 if TASKS[name].higher_is_better else 1
    return f"{scale * value:.2f}" + (f" ± {scale * error:.2f}" if error is not None else "")


def _millions(value: int) -> str:
    return f"{value / 1e9:.2f} B" if value >= 1e9 else f"{value / 1e6:.1f} M"
