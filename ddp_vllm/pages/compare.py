"""What `compare` shows: one table of models, a sentence on each, two pictures, and how everything
was measured."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from shlex import quote
from typing import Any

from ddp_vllm.evaluations import (
    Evaluation,
    Text,
    bits_ratio,
    in_points,
    mean_accuracy,
    perplexity_ratio,
    points,
    score_rows,
)
from ddp_vllm.intervals import Interval, with_interval
from ddp_vllm.masks import Quality
from ddp_vllm.pages.measurements import Comparison, Loss, Model, difference
from ddp_vllm.pages.page import Page, Picture, Section, Table
from ddp_vllm.pages.pictures import Point, draw_points, render
from ddp_vllm.pages.summary import agrees, lowest_agreement
from ddp_vllm.results import Bench, main_metric

REMARK = (
    "Speeds and latencies: how many times better than dense, pair by pair, with 95 % intervals; above 1 the pruned "
    "model is better. Tasks: percent ± standard error, and perplexity per word as lm-eval defines it (lower is "
    "better). Texts: perplexity over the dense model's with its 95 % interval, KL from the dense model in nats per "
    "token, and the share of tokens for which both predict the same next token. KL and that share are not defined for "
    "a model whose tokens differ from the dense model's; its perplexity is per token of the dense model."
)


def page_of(comparison: Comparison, tolerance: float | None = None, min_agreement: float | None = None) -> Page:
    """Return the page: a sentence per model, pictures if there are two points, the table, and the
    conditions; `tolerance` and `min_agreement` as in `choice`."""
    take = list[tuple[str, str]]()
    if tolerance is not None:
        take = [(f"Within {tolerance:g} times", choice(comparison, tolerance, min_agreement)[1])]
    pictures = Section(heading="", pictures=[*draw(comparison)])
    conditions = [_speed_measured(speed.bench) for model in comparison.pruned for speed in model.speeds]
    conditions += [_quality_measured(model.evaluation) for model in comparison.models if model.evaluation]
    table = Section(heading="Size, speed, quality", table=comparison_table(comparison), remark=REMARK)
    return Page(
        title="Pruned models: quality against speed",
        lead=[*take, *((model.name, headline(model, comparison)) for model in comparison.pruned)],
        sections=[pictures, table],
        footer=[*comparison.notes, *dict.fromkeys(conditions)],
    )


def headline(model: Model, comparison: Comparison) -> str:
    """Return one sentence on the cost and the gain of pruning."""
    parts, dense = [], comparison.dense
    if model.speed:
        parts.append(f"{model.speed.verdict.sentence}, {model.speed.verdict.load}")
    elif model.speedup:
        parts.append(f"{with_interval(*model.speedup)} as fast, {_predicted(model)}")
    if lost := difference(model, dense):
        parts.append(f"accuracy: {in_points(*lost)}")
    if model.loss:
        parts.append(model.loss.sentence)
    for label, fact in (("fewer parameters", "parameters"), ("less KV cache per token", "kv_bytes_per_token")):
        before, after = (getattr(facts.facts, fact) if facts else None for facts in (dense, model))
        if before and after:
            parts.append(f"{100 * (1 - after / before):.1f} % {label}")
    return "; ".join(parts) or "nothing was measured yet"


def comparison_table(comparison: Comparison) -> Table:
    """Return everything that is known, one column per model; rows without any value are left
    out."""
    dense, models, pruned = comparison.dense, comparison.models, comparison.pruned
    rows = list[list[str]]()

    def add(heading: str, write: Callable[[Any], str], values: Iterable[Any], *before: str) -> None:
        cells = ["" if value is None else write(value) for value in values]
        if any(cells):
            rows.append([heading, *before, *(cell or "–" for cell in cells)])

    def add_ratios(heading: str, bounds: Iterable[Any]) -> None:
        """Add ratios of each pruned model to the dense model, which is 1."""
        add(heading, lambda ratio: with_interval(*ratio), bounds, *["1"] * bool(dense))

    add("parameters", _millions, (model.facts.parameters for model in models))
    add("KV-cache bytes per token", "{:,}".format, (model.facts.kv_bytes_per_token for model in models))
    by_model = [{speed.verdict.load: speed.verdict.metrics for speed in model.speeds} for model in pruned]
    for load in dict.fromkeys(load for loads in by_model for load in loads):
        metrics = [loads.get(load, {}) for loads in by_model]
        for metric in dict.fromkeys(metric for of_model in metrics for metric in of_model):
            if metric == main_metric(load, metrics[0]) or metric.startswith("p"):  # a percentile of a latency
                name = metric.removesuffix("_ms").replace("_", " ")
                verdicts = (of_model.get(metric) for of_model in metrics)
                add_ratios(f"{name}, {load}", (verdict and verdict.bounds for verdict in verdicts))
    for heading in dict.fromkeys(f"speed of a step, {_predicted(model)}" for model in pruned if model.predicted):
        of_heading = (model.predicted if heading.endswith(_predicted(model)) else None for model in pruned)
        add_ratios(heading, (one and one.bounds for one in of_heading))
    add_ratios("held-out perplexity, × dense", (model.heldout for model in pruned))
    for row in score_rows([model.evaluation for model in models]):
        add(row.heading, str, row.cells())
    changes = (difference(model, dense) for model in models)
    add("points, same questions, 95 %", lambda change: points(*change), changes)
    unknown = ["–"] * bool(dense)
    for text, qualities in _on_texts(pruned, Quality):
        add_ratios(f"perplexity on {text.name}, × dense", (one and perplexity_ratio(one) for one in qualities))
        near = [quality and quality.last_agreement for quality in qualities]
        add(f"KL on {text.name}, nats", lambda agreement: f"{agreement.kl:.3f}", near, *unknown)
        add(f"top-1 agreement on {text.name}", lambda agreement: f"{agreement.top1:.1%}", near, *unknown)
    _add_bits(comparison, add, add_ratios)
    return Table(headings=["", *(model.name for model in models)], rows=rows)


def _add_bits(comparison: Comparison, add: Callable[..., None], add_ratios: Callable[..., None]) -> None:
    """Add what is known of models whose tokens differ from the dense model's."""
    for text, bits in _on_texts(comparison.pruned, dict):
        add_ratios(f"perplexity on {text.name}, × dense", (one and perplexity_ratio(one) for one in bits))
        add_ratios(f"bits per byte of {text.name}, × dense", (one and bits_ratio(one) for one in bits))
        for key in ("bits", "tokens"):
            values = [one and one[f"{key}_per_byte"] for one in bits]
            of_dense = [next(value["dense"] for value in values if value)] * bool(comparison.dense)
            of_pruned = [value and value["pruned"] for value in values]
            add(f"{key} per byte of {text.name}", "{:.4f}".format, [*of_dense, *of_pruned])


def _on_texts(models: Sequence[Model], kind: type[Any]) -> Iterator[tuple[Text, list[Any]]]:
    """Yield each text on which a model has a result of this kind, and those of all models."""
    for text in dict.fromkeys(text for model in models for text in model.texts):
        results = [model.texts.get(text) for model in models]
        of_kind = [result if isinstance(result, kind) else None for result in results]
        if any(of_kind):
            yield text, of_kind


def _predicted(model: Model) -> str:
    """Return what a speed was predicted for, in words."""
    return f"predicted ({model.predicted.workload})" if model.predicted else ""


def _millions(value: int) -> str:
    return f"{value / 1e9:.2f} B" if value >= 1e9 else f"{value / 1e6:.1f} M"


def draw(comparison: Comparison) -> Iterator[Picture]:
    """Draw accuracy and held-out perplexity against speed, each if two models have both."""
    caption = (
        "Right and up is better. The dashed line joins the models that no other beats in both. Bars are 95 % "
        "intervals; speed is measured by bench, or else predicted by the profile, with its range. "
    )
    for name, title, quality, value_of, note in (
        ("quality", "Accuracy against speed", "mean accuracy, %", _percent, "Accuracy ± 1.96 standard errors."),
        ("heldout", "Held-out perplexity against speed", "perplexity, × dense", lambda model: model.heldout,
         "Perplexity on text held out of each model's training text."),
    ):  # fmt: skip
        points = [
            Point(model.name, model.is_dense, model.speedup, value)
            for model in comparison.models
            if model.speedup and (value := value_of(model))
        ]
        if len(points) > 1:
            yield render(
                draw_points, name=name, title=title, caption=caption + note, points=points, quality=quality,
                less_is_better=name == "heldout",
            )  # fmt: skip


def _percent(model: Model) -> Interval | None:
    """Return the mean accuracy in percent, with its 95 % interval."""
    mean = mean_accuracy(model.evaluation.results) if model.evaluation else None
    if not mean:
        return None
    percent, reach = 100 * mean["value"], 196 * mean["stderr"]
    return percent, percent - reach, percent + reach


def choice(comparison: Comparison, tolerance: float, min_agreement: float | None = None) -> tuple[Model | None, str]:
    """Return the fastest model, by its measured or else its predicted speed, whose perplexity is at most
    this many times the dense model's on every text and whose top-1 agreement is high enough, where it is
    known, and the same in words; if there is none, None and what the user can do."""
    least = lowest_agreement(tolerance, min_agreement)

    def is_within(loss: Loss) -> bool:
        return loss.ratio[0] <= tolerance and (loss.quality is None or agrees(loss.quality, least))

    within = [(model, model.loss) for model in comparison.pruned if model.losses and all(map(is_within, model.losses))]
    by_speed = lambda pair: ((pair[0].speedup or (0.0,))[0], -float(pair[0].facts.parameters or 0))  # noqa: E731
    best, loss = max(within, key=by_speed, default=(None, None))
    if best and loss:
        gain = f", {with_interval(*best.speedup)} as fast" if best.speedup else ""
        gain += f", {_predicted(best)}" * bool(best.predicted and not best.speed)
        return best, f"{best.name}: {loss.sentence}{gain}"
    agreement = f" and {least:.0%} top-1 agreement" * bool(least)
    sentence = f"none has a known perplexity of at most {tolerance:g} times the dense model's{agreement}"
    remedy = "train for longer with ddp-vllm recover, or remove less"
    if unknown := [model.name for model in comparison.pruned if not model.loss]:
        dense = quote(comparison.dense.facts.model if comparison.dense else "DENSE")
        remedy = f"measure {', '.join(unknown)} with ddp-vllm eval FOLDER --against {dense} --text FILE"
    return None, f"{sentence}; {remedy}"


def _speed_measured(bench: Bench) -> str:
    settings, sample = bench.settings, bench.sample
    tokens = f" {bench.tokens_differ}: all answer the same characters." if bench.tokens_differ else ""
    state = "" if bench.complete else f" INCOMPLETE: {bench.reason}."
    return (
        f"Speed, {settings.mode}: {sample.conversations} ShareGPT conversations ({sample.prompt_tokens} "
        f"prompt and {sample.output_tokens} output tokens), {settings.pairs} pairs, seed {settings.seed}, "
        f"{bench.place}, {bench.started}.{tokens}{state}"
    )


def _quality_measured(evaluation: Evaluation) -> str:
    stated = evaluation.ddp_vllm
    settings, source = stated.settings, "hub" if stated.data == "hub" else "local files"
    rows = f"the first {settings.limit} rows of each task" if settings.limit else "every row"
    backend = " ".join([settings.backend, "backend", *(["with", *settings.model_args] if settings.model_args else [])])
    return f"Quality: {rows}, {source}, {backend}, context {settings.max_length}, {stated.place}."
