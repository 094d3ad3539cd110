"""The page that `compare` writes: the cost of pruning in quality and its gain in speed, model by model."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ddp_vllm.evaluations import TASKS, in_points, perplexity_ratio, points, score
from ddp_vllm.output import atomic_file, sync, writing
from ddp_vllm.pages.measurements import (
    Comparison,
    Entry,
    Interval,
    difference,
    engine_fact,
    retained,
)
from ddp_vllm.pages.page import Page, Picture, Section, Table, to_html, to_markdown
from ddp_vllm.pages.pictures import Point, draw_points, render
from ddp_vllm.pages.report import REPORT_FILE
from ddp_vllm.results import main_metric, main_verdict, measured_on, ratio_text, sentence, with_interval

PICTURE_HEIGHT = 3.6  # inches
CAN = 0.02  # a model can do a task with generated answers if its accuracy is two standard errors above this
_SPEEDS = {"requests_per_second": "requests/s", "p50_tpot_ms": "time per output token"}
Write = Callable[[Any], str]
_ENGINE_FACTS: Mapping[str, tuple[str, Write]] = {  # fact -> heading, and how it is written
    "peak_memory_bytes": ("peak memory, GiB", lambda size: f"{size / 2**30:,.2f}"),
    "weights_gib": ("weights in memory, GiB", "{:,.2f}".format),
    "kv_cache_tokens": ("tokens the KV cache holds", "{:,.0f}".format),
}


def write_comparison(comparison: Comparison, html: Path, markdown: Path, tolerance: float | None = None) -> None:
    """Write the page in both formats; `tolerance` as in `choice`. Raises: OutputError."""
    page = replace(page_of(comparison, tolerance), links=_reports(comparison, html.parent))
    with writing(html):
        html.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(markdown) as table, atomic_file(html) as whole:  # both are on the disk before either appears
            for text, temporary in ((to_markdown(page), table), (to_html(page), whole)):
                temporary.write_text(text, encoding="utf-8")
                sync(temporary)


def page_of(comparison: Comparison, tolerance: float | None = None) -> Page:
    """Return the page: a sentence per model, pictures if there are two points, tables, and the measuring conditions."""
    take = [] if tolerance is None else [(f"Within {tolerance:g} times", choice(comparison, tolerance))]
    return Page(
        title="Pruned models: quality against speed",
        lead=[*take, *((_name(entry), headline(entry, comparison)) for entry in comparison.pruned)],
        sections=list(_sections(comparison)),
        footer=provenance(comparison),
    )


def _reports(comparison: Comparison, place: Path) -> dict[str, str]:
    """Return the path of each model's report, relative to `place`, by name; of models that have a report."""
    reports = {_name(entry): Path(entry.facts.model) / REPORT_FILE for entry in comparison.pruned}
    return {name: quote(os.path.relpath(file, place.resolve())) for name, file in reports.items() if file.is_file()}


def headline(entry: Entry, comparison: Comparison) -> str:
    """Return one sentence on the cost and the gain of pruning."""
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
        parts += _less("less KV cache per token", ours.kv_bytes_per_token, dense.kv_bytes_per_token)
    return "; ".join(parts) or "nothing was measured yet"


def _less(what: str, ours: int | None, dense: int | None) -> list[str]:
    return [f"{100 * (1 - ours / dense):.1f} % {what}"] if ours and dense else []


def _sections(comparison: Comparison) -> Iterator[Section]:
    """Yield the sections that have content."""
    if pictures := [each for each in (_draw(comparison), _draw_heldout(comparison)) if each]:
        yield Section(heading="", pictures=pictures)
    remark = "Speed: how many times better than dense, pair by pair, with its 95 % interval. Accuracy ± standard error."
    yield Section(heading="Size, speed, quality", table=size_table(comparison), remark=remark)
    if (tasks := task_table(comparison)).rows:
        remark = "Accuracy in percent ± standard error; perplexity per word as lm-eval defines it (lower is better)."
        yield Section(heading="Tasks", table=tasks, remark=remark)
    if (texts := text_table(comparison)).rows:
        remark = (
            "Perplexity over the dense model's with its 95 % interval, KL from the dense model in nats per token, and "
            "the share of tokens for which both predict the same next token."
        )
        yield Section(heading="Texts of your own", table=texts, remark=remark)
    if (latencies := latency_table(comparison)).rows:
        remark = (
            "Ratios to the dense model with 95 % intervals; above 1 the pruned model is better, latencies included."
        )
        yield Section(heading="Other measures of speed", table=latencies, remark=remark)


def size_table(comparison: Comparison) -> Table:
    """Return sizes, speed and quality, one column per model; rows without any value are left out."""
    entries, dense = comparison.entries, comparison.dense
    one = "1" if dense else None  # the dense model's cell in a row of ratios to it
    rows = [
        _row("units removed", [entry.sparsity for entry in entries], lambda share: f"{100 * share:g} %"),
        _row("parameters", [entry.facts.parameters for entry in entries], _millions),
        _row("KV-cache bytes per token", [entry.facts.kv_bytes_per_token for entry in entries], "{:,}".format),
    ]
    for fact, (heading, write) in _ENGINE_FACTS.items():
        rows.append(_row(heading, [engine_fact(entry, comparison, fact) for entry in entries], write))
    for load in dict.fromkeys(speed["load"] for entry in entries for speed in entry.speeds):
        verdicts = [_verdict_at(load, entry) for entry in entries]
        rows.append(_row(f"{_SPEEDS[main_metric(load)]}, {load}", verdicts, ratio_text, one))
    both = [entry.perplexities for entry in entries]
    rows += [
        _row("held-out perplexity, dense → own", both, lambda found: f"{found[0]:.2f} → {found[1]:.2f}"),
        _row("… times the dense model's", [entry.heldout for entry in entries], _interval, one),
        _row("speed of a step, predicted", [entry.predicted for entry in entries], _interval, one),
    ]
    counts = {entry.accuracy[2] for entry in entries if entry.accuracy}
    if len(counts) == 1:
        rows.append(_row(f"mean accuracy, {min(counts)} tasks", [entry.accuracy for entry in entries], _mean))
    else:
        means = [entry.accuracy for entry in entries]
        rows.append(_row("mean accuracy", means, lambda mean: f"{_mean(mean)} ({mean[2]} tasks)"))
    lost = [None if entry is dense else difference(entry, dense) for entry in entries]
    rows += [
        _row("retained accuracy", [retained(entry, dense) for entry in entries], lambda kept: f"{100 * kept:.1f} %"),
        _row("points, same questions, 95 %", lost, lambda each: points(*each)),
    ]
    return Table(headings=["", *map(_name, entries)], rows=list(filter(None, rows)))


def _row(heading: str, values: Sequence[Any], write: Write, of_dense: str | None = None) -> list[str]:
    """Return a row with a dash for each unknown value, and `of_dense` in the first cell; [] if no value is known."""
    cells = ["–" if value is None else write(value) for value in values]
    return [] if set(cells) == {"–"} else [heading, of_dense or cells[0], *cells[1:]]


def _verdict_at(load: str, entry: Entry) -> Mapping[str, Any] | None:
    return next((main_verdict(speed) for speed in entry.speeds if speed["load"] == load), None)


def _interval(ratio: Interval) -> str:
    return with_interval(*ratio)


def task_table(comparison: Comparison) -> Table:
    """Return the score of every task with its standard error, one column per model."""
    entries = comparison.entries
    scores = [{name: score(entry.quality, name) for name in TASKS} if entry.quality else {} for entry in entries]
    rows = [
        [f"{task.heading} ({task.metric.replace('_', ' ')}){_beyond(name, scores[0]) if comparison.dense else ''}"]
        + [_score(name, found.get(name)) for found in scores]
        for name, task in TASKS.items()
        if any(found.get(name) for found in scores)
    ]
    return Table(headings=["", *map(_name, comparison.entries)], rows=rows)


def _beyond(name: str, dense: Mapping[str, tuple[float, float | None] | None]) -> str:
    """Mark a task with generated answers that the dense model cannot do: pruning has nothing to lose on it."""
    value, error = dense.get(name) or (1.0, None)
    return ", which the dense model cannot do" if TASKS[name].is_generated and value < CAN + 2 * (error or 0) else ""


def text_table(comparison: Comparison) -> Table:
    """Return the results of `eval --text`, one row per text and model."""
    rows = []
    for entry in comparison.pruned:
        for name, quality in entry.texts.items():
            near, ratio = quality.get("agreement", {}).get("pruned"), perplexity_ratio(quality)
            cells = [f"{near['kl']:.3f}", f"{near['top1']:.1%}"] if near else ["–", "–"]
            rows.append([name, _name(entry), with_interval(*ratio) if ratio else "–", *cells])
    headings = ["text", "model", "perplexity, × dense", "KL, nats", "top-1 agreement"]
    return Table(headings=headings, rows=rows)


def latency_table(comparison: Comparison) -> Table:
    """Return every other compared metric as a ratio; above 1 the pruned model is better, also for latencies."""
    rows = [
        [f"{_name(entry)}, {speed['load']}", metric.removesuffix("_ms").replace("_", " "), ratio_text(verdict)]
        for entry in comparison.pruned
        for speed in entry.speeds
        for metric, verdict in speed["metrics"].items()
        if metric != main_metric(speed["load"]) and metric.startswith(("p50", "p99", "output", "goodput"))
    ]
    return Table(headings=["", "metric", "times better than dense"], rows=rows)


def _draw(comparison: Comparison) -> Picture | None:
    """Return accuracy against speed with 95 % intervals, or None if no two models have both."""
    entries = [each for each in comparison.entries if each.accuracy and (each.speed or not each.facts.pruned)]
    if len(entries) < 2:
        return None
    speeds = dict.fromkeys(_SPEEDS[main_metric(each.speed["load"])] for each in entries if each.speed)
    drawn = partial(
        draw_points, points=list(map(_point, entries)), speed=" or ".join(speeds), quality="mean accuracy, %"
    )
    return render(
        drawn,
        name="quality",
        title="Accuracy against speed",
        caption="Right and up is better. Bars are 95 % intervals: Student t over pairs for speed, 1.96 standard errors "
        "for accuracy. The dashed line joins the models that no other beats in both. The dense model is at 1.",
        height=PICTURE_HEIGHT,
    )


def _point(entry: Entry) -> Point:
    """Return a model's point in the picture of accuracies; the dense model is at 1, without an interval."""
    assert entry.accuracy
    value, error, _ = entry.accuracy
    quality = (100 * value, 100 * value - 196 * error, 100 * value + 196 * error)
    ratio = _measured_speedup(entry.speed) if entry.speed else (1.0, 1.0, 1.0)
    return Point(name=_name(entry), is_dense=not entry.facts.pruned, ratio=ratio, quality=quality)


def _measured_speedup(speed: Mapping[str, Any]) -> Interval:
    """Return the ratio of a verdict with its interval; without one, both ends are the ratio."""
    verdict = main_verdict(speed)
    low, high = (verdict["ratio"] if verdict[end] is None else verdict[end] for end in ("low", "high"))
    return verdict["ratio"], low, high


def _speedup(entry: Entry) -> Interval | None:
    """Return the speedup over the dense model that was measured, or else the predicted one."""
    return _measured_speedup(entry.speed) if entry.speed else entry.predicted


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
    return render(
        partial(draw_points, points=points, speed="speed", quality="perplexity, × dense", less_is_better=True),
        name="heldout",
        title="Held-out perplexity against speed",
        caption="Right and up is better. Speed is measured by bench, or else predicted by the profile, with its range. "
        "Perplexity is relative to the dense model's, on text held out of each model's training text; bars are 95 % "
        "intervals over blocks of text.",
        height=PICTURE_HEIGHT,
    )


def choice(comparison: Comparison, tolerance: float) -> str:
    """Return the fastest model whose held-out perplexity is at most this many times the dense model's, in words."""
    best = fastest(comparison, tolerance)
    if best is None:
        return f"none has a held-out perplexity of at most {tolerance:g} times the dense model's"
    assert best.heldout
    speed = _speedup(best)
    gain = f", {with_interval(*speed)} as fast" if speed else ""
    return f"{best.facts.name}: held-out perplexity {with_interval(*best.heldout)} the dense model's{gain}"


def within(comparison: Comparison, tolerance: float) -> list[Entry]:
    """Return the models whose held-out perplexity is at most this many times the dense model's."""
    return [entry for entry in comparison.pruned if entry.heldout and entry.heldout[0] <= tolerance]


def fastest(comparison: Comparison, tolerance: float) -> Entry | None:
    """Return the fastest model within a tolerance, by its measured or else its predicted speed; None without any."""

    def by_speed(entry: Entry) -> tuple[float, float]:
        return (_speedup(entry) or (0.0,))[0], -float(entry.facts.parameters or 0)

    return max(within(comparison, tolerance), key=by_speed, default=None)


def records(comparison: Comparison, tolerance: float | None) -> dict[str, Any]:
    """Return what `compare --json` prints: the facts of each model, its two ratios with intervals, and the choice."""
    best = None if tolerance is None else fastest(comparison, tolerance)
    models = [
        {"facts": entry.facts.to_json(), "heldout_ratio": entry.heldout, "speedup": _speedup(entry)}
        for entry in comparison.pruned
    ]
    return {"models": models, "chosen": best.facts.name if best else None, "notes": comparison.notes}


def provenance(comparison: Comparison) -> list[str]:
    """Return the hardware, versions, seeds and limits of every measurement, and notes on missing ones."""
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


def _name(entry: Entry) -> str:
    return entry.facts.name if entry.facts.pruned else f"{entry.facts.name} (dense)"


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
