"""The paper's tasks, and the results of lm-eval on them, which `eval` writes and `compare`
reads."""

from collections.abc import Iterator, Mapping, Sequence
from math import isfinite, isnan, log, nan
from pathlib import Path
from statistics import fmean, pvariance
from typing import Any, NamedTuple, NotRequired, TypedDict

import msgspec

from ddp_vllm.errors import LimitError, SettingError
from ddp_vllm.intervals import Interval, mean_interval, ratio_of
from ddp_vllm.machine import Measured
from ddp_vllm.masks import Quality
from ddp_vllm.model_facts import ModelFacts
from ddp_vllm.schema import AboveZero, AtLeastZero, Count, Finite, SchemaError, Share

Score = tuple[float, float | None]
"""A value and its standard error."""
Answers = Mapping[str, Sequence[float]]
"""Task -> what each row scored."""
FIDELITY_FORMAT = "ddp-vllm eval text 1"
UNDEFINED = "KL and top-1 agreement are not defined, because the models have different tokens"
# of accuracy: an interval within this distance of 0 is reported as no measurable difference
LEVEL = 0.02


class Task(NamedTuple):
    """How a task is reported."""

    heading: str
    metric: str
    """The metric that is reported."""
    higher_is_better: bool = True
    filter: str = "none"
    """lm-eval's name of the rule that extracts the answer from the generated text."""
    is_generated: bool = False
    """The model generates its answer, with its chat template if it has one, instead of choosing
    among options."""


# The metric of each task is the one that gives the paper's dense rows (tables "dense" and "moe"):
# its LLaMA-7B has HellaSwag 76.00, ARC-c 44.28, ARC-e 72.10 and OBQA 44.00, which are that model's
# known length-normalized accuracies (plain ones: about 57, 42, 75 and 34). So: acc_norm wherever
# lm-eval reports it, acc for the other three.
TASKS = {
    "boolq": Task("BoolQ", "acc"),
    "openbookqa": Task("OBQA", "acc_norm"),
    "rte": Task("RTE", "acc"),
    "winogrande": Task("WinoGrande", "acc"),
    "hellaswag": Task("HellaSwag", "acc_norm"),
    "piqa": Task("PIQA", "acc_norm"),
    "mathqa": Task("MathQA", "acc_norm"),
    "arc_easy": Task("ARC-e", "acc_norm"),
    "arc_challenge": Task("ARC-c", "acc_norm"),
    "wikitext": Task("WikiText-2", "word_perplexity", higher_is_better=False),
    "c4": Task("C4", "word_perplexity", higher_is_better=False),
    "gsm8k": Task("GSM8K", "exact_match", filter="flexible-extract", is_generated=True),
    "ifeval": Task("IFEval", "prompt_level_loose_acc", is_generated=True),
}
ACCURACY = tuple(name for name, task in TASKS.items() if task.higher_is_better and not task.is_generated)
"""The nine tasks whose unweighted mean is the paper's "mean accuracy" for MoE and Qwen3."""


class Additions(Measured, kw_only=True):
    """What `eval` adds to lm-eval's results."""

    class Settings(msgspec.Struct):
        """The settings that pages show."""

        limit: Count | None
        max_length: Count
        backend: str
        dtype: str = "auto"
        model_args: list[str] = []

    model: ModelFacts
    data: str | dict[str, str]
    """`hub`, or a hash of each task's rows."""
    settings: Settings
    answers: dict[str, list[Share]] = msgspec.field(default_factory=dict)
    """Of each task with an accuracy, what each row scored."""


class Evaluation(msgspec.Struct, kw_only=True, rename={"samples": "n-samples"}):
    """The results of lm-eval, with ours."""

    class Rows(msgspec.Struct):
        """The number of rows of a task."""

        effective: Count = 0

    results: dict[str, dict[str, Any]]
    samples: dict[str, Rows] = {}
    date: Finite | None = None
    higher_is_better: dict[str, dict[str, Any]] = {}
    ddp_vllm: Additions

    def task(self, name: str) -> Task:
        """Return how a task is reported: one of `TASKS`, else by the first metric of lm-eval's."""
        known, scores = TASKS.get(name), self.results.get(name, {})
        if known and (not scores or f"{known.metric},{known.filter}" in scores):
            return known
        metrics = [key.partition(",") for key in scores if "," in key and "_stderr" not in key]
        metric, _, kept = min(metrics, key=lambda parts: parts[0] != "acc_norm", default=("", "", ""))
        higher = self.higher_is_better.get(name, {}).get(metric) is not False
        return Task(known.heading if known else name, metric, higher, kept)

    def score(self, name: str) -> Score | None:
        """Return the reported metric of one task, or None if it was not run."""
        return _score(self.results.get(name, {}), self.task(name))

    @property
    def questions(self) -> int:
        """The number of rows of all tasks."""
        return sum(rows.effective for rows in self.samples.values())

    @property
    def conditions(self) -> tuple[Any, ...]:
        """What two comparable evaluations share: tasks, data, and all settings that are shown."""
        return sorted(self.results), self.ddp_vllm.data, self.ddp_vllm.settings


class ScoreRow(NamedTuple):
    """A row of a table of models: one task, or the mean accuracy."""

    heading: str
    is_accuracy: bool
    scores: list[Score | None]
    """Of each model."""

    def cells(self) -> list[str]:
        """Return each value with its standard error, accuracies in percent; "" where a model has none."""
        scale, cells = 100 if self.is_accuracy else 1, []
        for value, error in (score or (None, None) for score in self.scores):
            cell = "" if value is None else f"{scale * value:.2f}"
            cells.append(cell if error is None else f"{cell} ± {scale * error:.2f}")
        return cells


class Bits(TypedDict):
    """What two models with different tokens require for the same excerpts of a text; the keys `dense`
    and `pruned` of each entry are the models."""

    sha256: NotRequired[str]
    bits_per_byte: dict[str, AtLeastZero]
    tokens_per_byte: dict[str, AtLeastZero]
    excerpt_bits: dict[str, list[AboveZero]]
    excerpt_bytes: list[Count]


class Text(NamedTuple):
    """A text of `eval --text` as it was read; results of equal ones can be compared."""

    name: str
    sha256: str
    """Of its file; "" of a hub dataset."""
    size: int
    """Tokens that were read, or bytes where the models have different tokens."""
    max_length: int
    """Tokens, or about as many characters, that were read at once."""


class Fidelity(Measured, kw_only=True):
    """What `eval --text` writes."""

    class Settings(msgspec.Struct):
        """The settings that decide what is read."""

        max_length: Count

    settings: Settings
    started: str
    model: ModelFacts
    against: ModelFacts
    """The dense model."""
    texts: dict[str, Quality]
    bits: dict[str, Bits] = msgspec.field(default_factory=dict)
    """By text, instead of `texts` if the models have different tokens."""

    def __post_init__(self) -> None:
        for name, bits in self.bits.items():
            excerpts = {len(bits["excerpt_bits"].get(model, [])) for model in ("dense", "pruned")}
            if excerpts != {len(bits["excerpt_bytes"])} or 0 in excerpts:
                raise SchemaError(f"the bits on {name} are not of the same excerpts for both models")
            if {*bits["bits_per_byte"]} != {"dense", "pruned"} or {*bits["tokens_per_byte"]} != {"dense", "pruned"}:
                raise SchemaError(f"the bits on {name} are not of both models")

    def by_text(self) -> "dict[Text, Quality | Bits]":
        """Return the result of each text."""
        length = self.settings.max_length
        results = dict[Text, Quality | Bits]()
        for name, quality in self.texts.items():
            results[Text(name, quality.sha256, quality.tokens, length)] = quality
        for name, bits in self.bits.items():
            results[Text(name, bits.get("sha256", ""), sum(bits["excerpt_bytes"]), length)] = bits
        return results


def default_output(model: str) -> Path:
    """Return the default folder of results: `eval` in the model's folder, or `eval-NAME` here for a
    name on the hub."""
    return Path(model) / "eval" if Path(model).is_dir() else Path(f"eval-{_folder_name(model)}")


def against_output(model: str, output: Path) -> Path:
    """Return the folder for the results of the model to compare with, inside the `output` of the
    evaluated model."""
    return output / f"against-{_folder_name(model)}"


def _folder_name(model: str) -> str:
    return Path(model).resolve().name if Path(model).is_dir() else model.replace("/", "--")


def _score(scores: Mapping[str, Any], task: Task) -> Score | None:
    numbers = (scores.get(f"{task.metric}{suffix},{task.filter}") for suffix in ("", "_stderr"))
    value, error = (float(number) if isinstance(number, int | float) else nan for number in numbers)
    return None if isnan(value) else (value, error if isfinite(error) else None)


def score_rows(evaluations: Sequence[Evaluation | None]) -> Iterator[ScoreRow]:
    """Yield a row per task that a model answered, then their mean accuracy.

    Models whose task of one name has different metrics get a row per metric, and so do means over
    different tasks.
    """
    known = [evaluation for evaluation in evaluations if evaluation]
    for name in dict.fromkeys([*TASKS, *(name for evaluation in known for name in evaluation.results)]):
        for task in dict.fromkeys(evaluation.task(name) for evaluation in known):
            scores = [one.score(name) if one and one.task(name) == task else None for one in evaluations]
            if any(scores):
                yield ScoreRow(f"{task.heading} ({task.metric.replace('_', ' ')})", task.higher_is_better, scores)
    means = [mean_accuracy(evaluation.results) if evaluation else None for evaluation in evaluations]
    for tasks in dict.fromkeys(tuple(mean["tasks"]) for mean in means if mean):
        scores = [(one["value"], one["stderr"]) if one and tuple(one["tasks"]) == tasks else None for one in means]
        yield ScoreRow(f"mean accuracy ({len(tasks)} tasks)", True, scores)


def mean_difference(answers: Answers, dense_answers: Answers) -> tuple[float, float] | None:
    """Return the difference of the mean accuracy from the dense model's and half its 95 % interval;
    None if unknown.

    Both models answered the same rows, so the differences per row are averaged, and the difficulty
    of a row cancels out. For the interval, each task gets one additional lost and one additional
    won row (Bonett and Price, J. Educ. Behav. Stat. 37, 2012), because a few rows that all changed
    alike, or not at all, are no proof for other rows.
    """
    after, before = ({name: tasks[name] for name in ACCURACY if tasks.get(name)} for tasks in (answers, dense_answers))
    sizes = [[(name, len(rows)) for name, rows in tasks.items()] for tasks in (after, before)]
    if not after or sizes[0] != sizes[1]:
        return None
    means, variances = [], []
    for name, rows in after.items():
        differences = [new - old for new, old in zip(rows, before[name], strict=True)]
        means.append(fmean(differences))
        variances.append(pvariance([*differences, 1.0, -1.0]) / (len(differences) + 2))
    return fmean(means), 1.96 * sum(variances) ** 0.5 / len(means)


def points(difference: float, half_width: float) -> str:
    """Write a difference of accuracies with its 95 % interval in percentage points."""
    return f"{100 * difference:+.1f} ± {100 * half_width:.1f}".replace("-", "−")


def in_points(difference: float, half_width: float) -> str:
    """Return a difference of accuracies in words."""
    value = f"{points(difference, half_width)} points"
    if abs(difference) > half_width:
        return value
    worse, better = half_width - difference, half_width + difference
    if max(worse, better) <= LEVEL:
        return f"no measurable difference ({value})"
    return f"cannot tell: between {100 * worse:.1f} points worse and {100 * better:.1f} better; use more rows"


def perplexity_ratio(result: Quality | Bits) -> Interval | None:
    """Return the last model's perplexity over the dense one's, both per token of the dense model, as
    `ratio_of_losses`; None if the losses of their blocks are unknown."""
    if isinstance(result, Quality):
        losses = result.block_losses or {}
        if "dense" not in losses or result.last not in losses:
            return None
        return ratio_of_losses(losses["dense"], losses[result.last], result.block_tokens)
    sizes, nats_of_bit = result["excerpt_bytes"], log(2.0) / result["tokens_per_byte"]["dense"]
    dense, pruned = (
        [nats_of_bit * bits / size for bits, size in zip(result["excerpt_bits"][model], sizes, strict=True)]
        for model in ("dense", "pruned")
    )
    return ratio_of_losses(dense, pruned, sizes)


def ratio_of_losses(dense: Sequence[float], pruned: Sequence[float], block_tokens: Sequence[int] | None) -> Interval:
    """Return perplexity over the dense model's, with a 95 % interval by Student t over blocks of text.

    dense, pruned: nats per token of each block. Both models read the same blocks, so `mean_loss` is
    taken of the blocks' differences.
    """
    differences = [after - before for before, after in zip(dense, pruned, strict=True)]
    ratio, low, high = map(ratio_of, mean_interval(differences, block_tokens))
    return ratio, low, high


def bits_ratio(bits: Bits) -> Interval:
    """Return bits per byte over the dense model's, with a 95 % interval by Student t over excerpts.

    Both models read the same excerpts. The ratio of their sums is the mean of the excerpts' ratios,
    weighted by the dense model's bits.
    """
    dense, pruned = bits["excerpt_bits"]["dense"], bits["excerpt_bits"]["pruned"]
    ratios = [after / before for before, after in zip(dense, pruned, strict=True)]
    ratio, low, high = mean_interval(ratios, dense)
    return ratio, max(0.0, low), high


def retained(evaluation: Evaluation, dense: Evaluation) -> dict[str, float]:
    """Return the fraction of the dense model's accuracy that a model retains: of the paper's mean,
    and of every task that is not in it, as those in which it writes, whose loss the mean would hide.

    It is 0 where the dense model has no right answer.
    """
    means = [mean_accuracy(model.results) for model in (evaluation, dense)]
    scores = {"mean accuracy": [mean and mean["value"] for mean in means]}
    for name in evaluation.results:
        task = evaluation.task(name)
        if task.higher_is_better and not (means[0] and name in means[0]["tasks"]):
            scores[task.heading] = [score and score[0] for score in (evaluation.score(name), dense.score(name))]
    return {
        name: after / before if before else 0.0
        for name, (after, before) in scores.items()
        if after is not None and before is not None
    }


def check_min_retained(limit: float | None, tasks: Sequence[str]) -> None:
    """Refuse a limit that no evaluation of these tasks can meet or miss. Raises: SettingError."""
    if limit is None:
        return
    if not 0 < limit <= 1:
        raise SettingError(f"--min-retained {limit:g} is not a fraction; give a number above 0 and up to 1, as 0.97")
    if all(name in TASKS and not TASKS[name].higher_is_better for name in tasks):
        raise SettingError("--min-retained requires a task with an accuracy; add one to --tasks")


def judge_retained(evaluation: Evaluation, dense: Evaluation, limit: float | None) -> None:
    """Do nothing without a limit. Raises: LimitError if less than `limit` of the dense model's
    accuracy is retained."""
    if limit is None:
        return
    fractions = retained(evaluation, dense)
    if not fractions:
        raise LimitError(f"no task has an accuracy, by which --min-retained {limit:g} judges; add one to --tasks")
    missed = [
        f"{value:.3g} of {name}"
        for name, value in fractions.items()
        if value < limit - 1e-9  # a quotient of decimal fractions may be rounded down
    ]
    if missed:
        raise LimitError(
            f"the model retains {' and '.join(missed)}, below --min-retained {limit:g}; train for longer with "
            "ddp-vllm recover, or remove less"
        )


def mean_accuracy(results: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the unweighted mean of the accuracies, as the paper averages, with its standard error
    and its tasks.

    results: of lm-eval, task -> its scores.
    """
    scores = {name: _score(results.get(name, {}), TASKS[name]) for name in ACCURACY}
    present = {name: score for name, score in scores.items() if score}
    if not present:
        return None
    errors = [error or 0.0 for _, error in present.values()]
    return {
        "value": sum(value for value, _ in present.values()) / len(present),
        "stderr": sum(error**2 for error in errors) ** 0.5 / len(present),
        "tasks": list(present),
    }
