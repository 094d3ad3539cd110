"""What `compare` shows: one table of models, a sentence on each, two pictures, and how everything
was measured."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ddp_vllm.evaluations import TASKS, Score, in_points, perplexity_ratio, points
from ddp_vllm.intervals import with_interval
from ddp_vllm.output import write_text
from ddp_vllm.pages.measurements import Comparison, Model, difference
from ddp_vllm.pages.page import Page, Picture, Section, Table, to_html, to_markdown
from ddp_vllm.pages.pictures import Point, draw_points, render
from ddp_vllm.results import Bench, main_metric

SPEEDS = {"requests_per_second": "requests/s", "p50_tpot_ms": "time per output token"}
OTHER_SPEEDS = ("p50", "p99")  # the first words of the other compared metrics
REMARK = (
    "Speeds and latencies: how many times better than dense, pair by pair, with 95 % intervals; above 1 the pruned "
    "model is better. Tasks: percent ± standard error, and perplexity per word as lm-eval defines it (lower is "
    "better). Texts: perplexity over the dense model's with its 95 % interval, KL from the dense model in nats per "
    "token, and the share of tokens for which both predict the same next token."
)


def write_comparison(comparison: Comparison, html: Path, markdown: Path, tolerance: float | None = None) -> None:
    """Write the page in both formats; `tolerance` as in `choice`. Raises: OutputError."""
    page = page_of(comparison, tolerance)
    write_text(to_markdown(page), markdown)
    write_text(to_html(page), html)


def page_of(comparison: Comparison, tolerance: float | None = None) -> Page:
    """Return the page: a sentence per model, pictures if there are two points, the table, and the
    conditions."""
    take = [] if tolerance is None else [(f"Within {tolerance:g} times", choice(comparison, tolerance))]
    pictures = [picture for picture in (_draw_accuracy(comparison), _draw_heldout(comparison)) if picture]
    shown = [Section(heading="", pictures=pictures)] if pictures else []
    table = Section(heading="Size, speed, quality", table=comparison_table(comparison), remark=REMARK)
    return Page(
        title="Pruned models: quality against speed",
        lead=[*take, *((model.name, headline(model, comparison)) for model in comparison.pruned)],
        sections=[*shown, table],
        footer=[*comparison.notes, *map(_speed_measured, comparison.benches), *_quality_measured(comparison)],
    )


def headline(model: Model, comparison: Comparison) -> str:
    """Return one sentence on the cost and the gain of pruning."""
    parts, dense = [], comparison.dense
    if model.speed:
        parts.append(f"{model.speed.verdict.sentence}, {model.speed.verdict.load}")
    elif model.predicted:
        parts.append(f"{with_interval(*model.predicted)} as fast, predicted")
    if model.evaluation and (lost := difference(model, dense)):
        limit = model.evaluation.ddp_vllm.settings.limit
        rows = f" (first {limit} rows of each task)" if limit else ""
        parts.append(f"accuracy: {in_points(*lost)}{rows}")
    if model.heldout:
        parts.append(f"held-out perplexity {with_interval(*model.heldout)} the dense model's")
    for label, fact in (("fewer parameters", "parameters"), ("less KV cache per token", "kv_bytes_per_token")):
        before, after = (getattr(facts.facts, fact) if facts else None for facts in (dense, model))
        if before and after:
            parts.append(f"{100 * (1 - after / before):.1f} % {label}")
    return "; ".join(parts) or "nothing was measured yet"


def comparison_table(comparison: Comparison) -> Table:
    """Return everything that is known, one column per model; rows without any value are left
    out."""
    rows = [
        [heading, *(cell or "–" for cell in cells)]
        for heading, cells in (*_facts(comparison), *_speeds(comparison), *_qualities(comparison))
        if any(cells)
    ]
    return Table(headings=["", *(model.name for model in comparison.models)], rows=rows)


Row = tuple[str, list[str]]
"""A heading and a cell for each model, "" where it is unknown."""


def _row(heading: str, write: Callable[[Any], str], values: Iterable[Any]) -> Row:
    return heading, ["" if value is None else write(value) for value in values]


def _ratios(comparison: Comparison, heading: str, bounds: Iterable[Any]) -> Row:
    """Return a row of ratios of each pruned model to the dense model, which is 1."""
    heading, cells = _row(heading, lambda ratio: with_interval(*ratio), bounds)
    return heading, ["1"] * bool(comparison.dense) + cells if any(cells) else []


def _facts(comparison: Comparison) -> Iterator[Row]:
    """Yield the rows of sizes and memory."""
    models = comparison.models
    yield _row("parameters", _millions, (model.facts.parameters for model in models))
    yield _row("KV-cache bytes per token", "{:,}".format, (model.facts.kv_bytes_per_token for model in models))


def _speeds(comparison: Comparison) -> Iterator[Row]:
    """Yield a row per load and metric, and the predicted speed."""
    by_model = [{speed.verdict.load: speed.verdict for speed in model.speeds} for model in comparison.pruned]
    for load in dict.fromkeys(load for verdicts in by_model for load in verdicts):
        metrics = [verdicts[load].metrics if load in verdicts else {} for verdicts in by_model]
        main = main_metric(load)
        others = (metric for of_model in metrics for metric in of_model if metric.startswith(OTHER_SPEEDS))
        for metric in dict.fromkeys((main, *others)):
            name = SPEEDS[main] if metric == main else metric.removesuffix("_ms").replace("_", " ")
            bounds = (of_model[metric].bounds if metric in of_model else None for of_model in metrics)
            yield _ratios(comparison, f"{name}, {load}", bounds)
    yield _ratios(comparison, "speed of a step, predicted", (model.predicted for model in comparison.pruned))


def _qualities(comparison: Comparison) -> Iterator[Row]:
    """Yield the rows of held-out text, tasks and texts."""
    dense, models, pruned = comparison.dense, comparison.models, comparison.pruned
    quality_of = lambda quality: f"{quality['dense']:.2f} → {quality.get('recovered', quality['pruned']):.2f}"  # noqa: E731
    yield _row("held-out perplexity, dense → pruned", quality_of, (model.quality for model in models))
    yield _ratios(comparison, "… times the dense model's", (model.heldout for model in pruned))
    means = (
        (mean := model.accuracy) and f"{100 * mean[0]:.2f} ± {100 * mean[1]:.2f} ({mean[2]} tasks)" for model in models
    )
    yield _row("mean accuracy", str, means)
    changes = (difference(model, dense) for model in models)
    yield _row("points, same questions, 95 %", lambda change: points(*change), changes)
    for name, task in TASKS.items():
        scores = [model.evaluation.score(name) if model.evaluation else None for model in models]
        heading = f"{task.heading} ({task.metric.replace('_', ' ')})"
        yield _row(heading, partial(_score, 100 if task.higher_is_better else 1), scores)
    for text in dict.fromkeys(text for model in models for text in model.texts):
        ratios = (perplexity_ratio(model.texts[text]) if text in model.texts else None for model in pruned)
        yield _ratios(comparison, f"perplexity on {text}, × dense", ratios)
        near = [
            model.texts[text].get("agreement", {}).get("pruned") if text in model.texts else None for model in models
        ]
        yield _row(f"KL on {text}, nats", lambda agreement: f"{agreement['kl']:.3f}", near)
        yield _row(f"top-1 agreement on {text}", lambda agreement: f"{agreement['top1']:.1%}", near)


def _score(scale: int, score: Score) -> str:
    value, error = score
    return f"{scale * value:.2f}" + (f" ± {scale * error:.2f}" if error is not None else "")


def _millions(value: int) -> str:
    return f"{value / 1e9:.2f} B" if value >= 1e9 else f"{value / 1e6:.1f} M"


def _draw_accuracy(comparison: Comparison) -> Picture | None:
    """Return accuracy against speed with 95 % intervals, or None if no two models have both."""
    points = []
    for model in comparison.models:
        ratio = model.measured_speedup if model.facts.pruned else (1.0, 1.0, 1.0)
        if model.accuracy and ratio:
            percent, error = 100 * model.accuracy[0], 196 * model.accuracy[1]
            points.append(Point(model.name, not model.facts.pruned, ratio, (percent, percent - error, percent + error)))
    speeds = dict.fromkeys(SPEEDS[model.speed.verdict.metric] for model in comparison.pruned if model.speed)
    caption = (
        "Bars are 95 % intervals: Student t over pairs for speed, 1.96 standard errors for accuracy. "
        "The dashed line joins the models that no other beats in both. The dense model is at 1."
    )
    return _draw(
        points, "quality", "Accuracy against speed", caption, speed=" or ".join(speeds), quality="mean accuracy, %"
    )


def _draw_heldout(comparison: Comparison) -> Picture | None:
    """Return held-out perplexity against speed; None if no pruned model has both."""
    points = [Point("dense", True, (1.0, 1.0, 1.0), (1.0, 1.0, 1.0))]
    for model in comparison.pruned:
        if model.heldout and model.speedup:
            points.append(Point(model.name, False, model.speedup, model.heldout))
    caption = (
        "Speed is measured by bench, or else predicted by the profile, with its range. Perplexity is "
        "relative to the dense model's, on text held out of each model's training text; bars are "
        "95 % intervals over blocks of text."
    )
    return _draw(
        points, "heldout", "Held-out perplexity against speed", caption, speed="speed",
        quality="perplexity, × dense", less_is_better=True,
    )  # fmt: skip


def _draw(points: Sequence[Point], name: str, title: str, caption: str, **labels: Any) -> Picture | None:
    caption = f"Right and up is better. {caption}"
    return render(draw_points, name=name, title=title, caption=caption, points=points, **labels) if points[1:] else None


def choice(comparison: Comparison, tolerance: float) -> str:
    """Return the fastest model whose held-out perplexity is at most this many times the dense
    model's, in words."""
    best = fastest(comparison, tolerance)
    if not any(model.heldout for model in comparison.pruned):
        return "none was evaluated on held-out text, as ddp-vllm prune does"
    if best is None:
        return f"none has a held-out perplexity of at most {tolerance:g} times the dense model's"
    assert best.heldout
    gain = f", {with_interval(*best.speedup)} as fast" if best.speedup else ""
    return f"{best.name}: held-out perplexity {with_interval(*best.heldout)} the dense model's{gain}"


def fastest(comparison: Comparison, tolerance: float) -> Model | None:
    """Return the fastest model within a tolerance, by its measured or else its predicted speed;
    None without any."""
    within = [model for model in comparison.pruned if model.heldout and model.heldout[0] <= tolerance]
    by_speed = lambda model: ((model.speedup or (0.0,))[0], -float(model.facts.parameters or 0))  # noqa: E731
    return max(within, key=by_speed, default=None)


def records(comparison: Comparison, tolerance: float | None) -> dict[str, Any]:
    """Return what `compare --json` prints: the facts of each model, its two ratios with intervals,
    and the choice."""
    best = None if tolerance is None else fastest(comparison, tolerance)
    models = [
        {"facts": model.facts.to_json(), "heldout_ratio": model.heldout, "speedup": model.speedup}
        for model in comparison.pruned
    ]
    return {"models": models, "chosen": best.name if best else None, "notes": comparison.notes}


def _speed_measured(bench: Bench) -> str:
    settings, sample = bench.settings, bench.sample
    state = "" if bench.complete else f" INCOMPLETE: {bench.reason}."
    return (
        f"Speed, {settings.mode}: {sample.conversations} ShareGPT conversations ({sample.prompt_tokens} "
        f"prompt and {sample.output_tokens} output tokens), {settings.pairs} pairs, seed {settings.seed}, "
        f"{bench.place}, {bench.started}.{state}"
    )


def _quality_measured(comparison: Comparison) -> Iterator[str]:
    for model in comparison.models:
        if model.evaluation:
            stated = model.evaluation.ddp_vllm
            settings, source = stated.settings, "hub" if stated.data == "hub" else "local files"
            rows = f"the first {settings.limit} rows of each task" if settings.limit else "every row"
            yield (
                f"Quality of {model.name}: {rows}, {source}, {settings.backend} backend, context "
                f"{settings.max_length}, {stated.place}."
            )
