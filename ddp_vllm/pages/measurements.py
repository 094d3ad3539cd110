"""Reads what is known of pruned checkpoints and their dense model: of themselves, bench, eval.

Results are read from a checkpoint's folder and its `eval` folder, or passed by name. They belong to
the model whose id they store (`model_facts.model_id`), wherever that model is now. Two evaluations
are only compared if they asked the same questions.
"""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple

from ddp_vllm.checkpoint import read_checkpoint
from ddp_vllm.errors import CheckpointError, ModelError, SettingError, TextError
from ddp_vllm.evaluations import (
    FIDELITY_FORMAT,
    Bits,
    Evaluation,
    Fidelity,
    Text,
    default_output,
    mean_difference,
    perplexity_ratio,
)
from ddp_vllm.intervals import Interval, with_interval
from ddp_vllm.masks import MASKS_FILE, Latency, Provenance, Quality
from ddp_vllm.model_facts import (
    ModelFacts,
    all_weight_files,
    describe_model,
    identify,
    is_pruned,
    known_folder,
    tokens_differ,
    unrelated,
)
from ddp_vllm.names import bare_name
from ddp_vllm.provenance import local_provenance, provenance_of
from ddp_vllm.remote_code.files import read_json
from ddp_vllm.results import FORMAT, Bench, LoadVerdict, undamaged
from ddp_vllm.schema import Kind

Results = Bench | Evaluation | Fidelity
Notes = list[str]
"""A sentence on each missing or incomparable result."""
HELD_OUT = "held-out"
# of results in a folder
PLACES = ("*.json", "against-*/*.json", "eval/*.json", "eval/against-*/*.json")


class Loss(NamedTuple):
    """What a model lost on one text."""

    text: str
    """`held-out` for text of the kind it was trained on."""
    ratio: Interval
    """Perplexity over the dense model's."""
    quality: Quality | None = None
    """None if its tokens differ from the dense model's."""

    @property
    def sentence(self) -> str:
        place, name = ("", "held-out ") if self.text == HELD_OUT else (f" on {self.text}", "")
        return f"{name}perplexity {with_interval(*self.ratio)} the dense model's{place}"


class Speed(NamedTuple):
    """A verdict of `bench sharegpt`, and the benchmark that it comes from."""

    verdict: LoadVerdict
    bench: Bench


@dataclass(frozen=True, kw_only=True)
class Model:
    """One model of a comparison, and what is known of it."""

    facts: ModelFacts
    is_dense: bool = False
    """Whether it is the one that the others are compared with."""
    quality: Quality | None = None
    """Perplexities on held-out text of the kind it was trained on, as `prune` stores them."""
    predicted: Latency | None = None
    """Predicted speedup of a budget in measured time, with its conditions."""
    evaluation: Evaluation | None = None
    texts: dict[Text, Quality | Bits] = field(default_factory=dict)
    """The results of `eval --text`, by text; `Bits` if its tokens differ from the dense model's."""
    speeds: tuple[Speed, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.facts.name} (dense)" if self.is_dense else self.facts.name

    @property
    def heldout(self) -> Interval | None:
        """Its own perplexity on that text over the dense model's, which is 1 of the dense model."""
        if self.is_dense:
            return 1.0, 1.0, 1.0
        return perplexity_ratio(self.quality) if self.quality else None

    @property
    def losses(self) -> list[Loss]:
        """What limits judge: the loss on held-out text, and on each text of `eval --text`."""
        losses = [Loss(HELD_OUT, self.heldout, self.quality)] if self.heldout else []
        for text, result in self.texts.items():
            if ratio := perplexity_ratio(result):
                losses.append(Loss(text.name, ratio, result if isinstance(result, Quality) else None))
        return losses

    @property
    def loss(self) -> Loss | None:
        """The largest of these."""
        return max(self.losses, key=lambda loss: loss.ratio[0], default=None)

    @property
    def speed(self) -> Speed | None:
        """The verdict for the pictures: of a load that saturates the engine, else of the first."""
        saturating = ("offline", "all at once")
        return min(self.speeds, key=lambda speed: not speed.verdict.load.startswith(saturating), default=None)

    @property
    def speedup(self) -> Interval | None:
        """The speedup over the dense model that was measured, or else the predicted one; without an
        interval, both ends are the ratio."""
        if self.is_dense:
            return 1.0, 1.0, 1.0
        if self.speed is None:
            return self.predicted.bounds if self.predicted else None
        ratio, low, high = self.speed.verdict.main.bounds
        return ratio, ratio if low is None else low, ratio if high is None else high


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Everything the page shows."""

    dense: Model | None
    pruned: tuple[Model, ...]
    notes: Notes

    @property
    def models(self) -> tuple[Model, ...]:
        return (self.dense, *self.pruned) if self.dense else self.pruned


def collect(folders: Sequence[Path], *, results: Sequence[Path] = (), dense: str | None = None) -> Comparison:
    """Gather everything about the pruned or trimmed models in `folders` and their dense model.

    Raises: CheckpointError if a folder is neither; SettingError if they come from
        different models; ModelError if the passed dense one is none; TextError if a passed file is not a results
        file.
    """
    histories = [_history(folder) for folder in folders]
    names = [folder.resolve().name for folder in folders]
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise CheckpointError(f"two folders are called {repeated}; rename one, or the page cannot tell them apart")
    origins = [Provenance.of(local_provenance(folder / MASKS_FILE)).dense_model for folder in folders]
    facts, nearby, notes = None, [*folders], Notes()
    if dense:
        facts = describe_model(dense)
        if Path(dense).is_dir() and not all_weight_files(Path(dense)):
            raise ModelError(f"{dense} has no weights, by which its results are matched to it; pass the whole folder")
    elif dense := _common_dense(origins):
        facts = _facts_of(dense)
    if dense:
        nearby.append(Path(dense) if Path(dense).is_dir() else default_output(dense))
    files = _read_files(nearby, results)
    pruned = tuple(
        _as_compared(_pruned_model(folder, history, files, facts, notes), origin, facts, notes)
        for folder, history, origin in zip(folders, histories, origins, strict=True)
    )
    pruned = _told_apart(pruned, notes)
    _note_other_conditions(pruned, histories, notes)
    return Comparison(dense=_dense_model(facts, files, pruned, notes), pruned=pruned, notes=[*dict.fromkeys(notes)])


def _history(folder: Path) -> Provenance:
    """Return what a pruned or trimmed folder states. Raises: CheckpointError."""
    history = Provenance.of(provenance_of(folder))
    return history if history.trimmed and not is_pruned(folder) else read_checkpoint(folder).history


def _common_dense(origins: Sequence[str]) -> str | None:
    """Return the model that all folders were made from, as the first one names it. Raises:
    SettingError."""
    parents = [*filter(None, origins)]
    if len({*map(identify, parents)}) > 1:  # some may have been trimmed before they were pruned
        files = [Path(parent) / MASKS_FILE for parent in parents]
        before = [Provenance.of(local_provenance(file)).dense_model if file.is_file() else "" for file in files]
        parents = [dense or parent for dense, parent in zip(before, parents, strict=True)]
    if len(different := sorted(set(map(identify, parents)))) > 1:
        raise SettingError(
            f"the folders were made from different models ({', '.join(different)}); compare those of one model, or "
            "pass --dense if these are copies of one"
        )
    return parents[0] if parents else None


def _read_files(nearby: Sequence[Path], passed: Sequence[Path]) -> list[Results]:
    """Return the content of each results file once; of passed files and of files in passed and
    model folders.

    Raises: TextError for a passed file that holds no results, and a passed folder without any.
    """
    by_path: dict[Path, Results] = {}
    for place in (*passed, *nearby):
        paths = [place, *(path for pattern in PLACES for path in sorted(place.glob(pattern)))]
        results = {path.resolve(): content for path in paths if (content := _read_file(path.resolve()))}
        if place in passed and not results:
            raise TextError(
                f"{place} holds no results of ddp-vllm bench or eval; pass the folder of eval -o, or a results file"
            )
        by_path |= results
    return [*by_path.values()]


def _read_file(path: Path) -> Results | None:
    """Return the content of a results file; None for any other file. Raises: TextError if it is
    damaged."""
    try:
        content = read_json(path)
    except (OSError, ValueError):
        return None
    if not isinstance(content, dict):
        return None
    kinds: dict[Any, type[Results]] = {FORMAT: Bench, FIDELITY_FORMAT: Fidelity}
    kind = kinds.get(str(content.get("format")), Evaluation if "ddp_vllm" in content else None)
    return undamaged(content, kind, path) if kind else None


def _facts_of(dense: str) -> ModelFacts:
    try:
        return describe_model(dense)
    except ModelError:  # a folder of another machine
        return ModelFacts(model=identify(dense), name=bare_name(dense), pruned=False)


def _pruned_model(
    folder: Path, history: Provenance, files: Sequence[Results], dense: ModelFacts | None, notes: Notes
) -> Model:
    """Return a pruned model with its measurements, and add notes on missing ones."""
    facts, latency = describe_model(str(folder)), history.latency
    evaluation = _best_evaluation(files, facts, notes)
    latest: dict[str, Speed] = {}
    """Load -> the verdict of the latest benchmark that ended, or else of the latest."""
    for bench in sorted(_of(Bench, files), key=lambda bench: (bench.complete, bench.started)):
        labels = [model.label for model in bench.models[1:] if _is_same(model, facts, notes)]
        latest |= {verdict.load: Speed(verdict, bench) for verdict in bench.verdicts if verdict.label in labels}
    if not latest:
        notes.append(f"{facts.name} was not measured; ddp-vllm bench sharegpt does that")
    by_file: dict[tuple[str, str], tuple[Text, Quality | Bits]] = {}
    """The latest result of each text."""
    for fidelity in sorted(_of(Fidelity, files), key=lambda fidelity: fidelity.started):
        if _is_same(fidelity.model, facts, notes):
            if dense and not _is_same(fidelity.against, dense, []):
                notes.append(f"{facts.name} was compared on text with {fidelity.against.model}, not {dense.model}")
                continue
            by_file |= {(text.name, text.sha256): (text, one) for text, one in fidelity.by_text().items()}
    if evaluation is None:
        what = "evaluated on tasks" if by_file else "evaluated"
        notes.append(f"{facts.name} was not {what}; ddp-vllm eval does that")
    return Model(
        facts=facts,
        quality=history.perplexity,
        predicted=latency,
        evaluation=evaluation,
        texts=dict(by_file.values()),
        speeds=tuple(latest.values()),
    )


def _as_compared(model: Model, origin: str, dense: ModelFacts | None, notes: Notes) -> Model:
    """Return a model with those results that compare it with this dense model.

    origin: the model that it was made from, which may be another one, as before the vocabulary was
        trimmed; "" if it is unknown.
    """
    if origin and not _may_be_same(_facts_of(origin), dense):
        notes.append(f"{model.name} was made from {origin}, so the figures of its own pages are left out")
        model = replace(model, quality=None, predicted=None)
    if model.facts.pruned and read_checkpoint(Path(model.facts.model)).widths.is_quantized:
        notes.append(f"the figures of {model.name}'s own pages were measured before quantization and are left out")
        model = replace(model, quality=None, predicted=None)
    has_bits = not all(isinstance(result, Quality) for result in model.texts.values())
    differing = f"{model.name} was evaluated as having other tokens" * has_bits
    with suppress(ModelError):  # a folder of another machine
        if dense and known_folder(dense.model):
            differing = tokens_differ(dense.model, model.facts.model)
    if differing:
        folder, against = quote(model.facts.model), quote(dense.model if dense else "DENSE")
        remedy = f"; ddp-vllm eval {folder} --against {against} --text FILE does that"
        notes.append(f"{differing}, so {model.name} is compared by bits per byte{'' if has_bits else remedy}")
    comparable = {text: one for text, one in model.texts.items() if isinstance(one, Quality) != bool(differing)}
    return replace(model, texts=comparable)


def _told_apart(models: Sequence[Model], notes: Notes) -> tuple[Model, ...]:
    """Return models whose texts of one name say how they were read, where they were read in different
    ways."""
    texts = {(text, type(result)) for model in models for text, result in model.texts.items()}
    readings = Counter((text.name, kind) for text, kind in texts)
    ambiguous = {name for (name, _), count in readings.items() if count > 1}

    def renamed(text: Text) -> Text:
        file = f" of file {text.sha256[:8]}" * bool(text.sha256)
        name = f"{text.name} ({text.size:,}{file}, {text.max_length:,} at once)"
        return text._replace(name=name) if text.name in ambiguous else text

    notes += [f"results on {name} are of different text and have rows of their own" for name in sorted(ambiguous)]
    return tuple(
        replace(model, texts={renamed(text): result for text, result in model.texts.items()}) for model in models
    )


def _note_other_conditions(models: Sequence[Model], histories: Sequence[Provenance], notes: Notes) -> None:
    """Note models of other weights, and speeds that were predicted for other workloads or places."""
    pairs = zip(models, histories, strict=True)
    weights = {json.dumps(one.dense_weights) for model, one in pairs if model.quality and one.dense_weights}
    if len(weights) > 1:
        notes.append("the models were pruned from different weights, so their figures are over different dense models")
    predicted = {f"{model.predicted.workload}; {model.predicted.place}" for model in models if model.predicted}
    if len(predicted) > 1:
        notes.append(f"speeds were predicted for different conditions: {' and for '.join(sorted(predicted))}")


def _of(kind: type[Kind], files: Iterable[Results]) -> list[Kind]:
    return [content for content in files if isinstance(content, kind)]


def _is_same(model: ModelFacts, facts: ModelFacts, notes: Notes) -> bool:
    """Tell whether results of `model` are of the model with these facts: by their ids, or by name if
    one has no id. Note a model that has changed."""
    if not (model.id and facts.id):
        return (model.name, model.pruned) == (facts.name, facts.pruned)
    if model.id != facts.id and model.model == facts.model:
        notes.append(f"results of {facts.name} are left out, because it has changed since they were measured")
    return model.id == facts.id


def _may_be_same(dense: ModelFacts, other: ModelFacts | None) -> bool:
    """Tell whether two models are not known to be different ones: by their ids, if both are here."""
    return not (other and other.id and dense.id) or dense.id == other.id


def _best_evaluation(files: Iterable[Results], facts: ModelFacts, notes: Notes) -> Evaluation | None:
    """Return the evaluation of a model with the most tasks, then the most questions, then the
    latest date."""
    of_model = [one for one in _of(Evaluation, files) if _is_same(one.ddp_vllm.model, facts, notes)]
    return max(of_model, key=lambda one: (len(one.results), one.questions, one.date or 0), default=None)


def _dense_model(
    facts: ModelFacts | None, files: Sequence[Results], pruned: Sequence[Model], notes: Notes
) -> Model | None:
    """Return the dense model, with the evaluation that asked the same questions as the pruned
    ones'."""
    baselines = [bench.models[0] for bench in _of(Bench, files)]
    facts = facts or next((_facts_of(model.model) for model in baselines), None)
    if facts is None:
        return None
    dense = facts.model
    # one without whole experts is the dense model of those that are made from it
    if facts.pruned and not read_checkpoint(Path(dense)).is_stock:
        raise SettingError(f"{dense} is pruned itself; pass the dense model with --dense")
    for model in pruned:
        if note := unrelated(dense, model.facts.model):
            notes.append(note)
        others = [speed.bench.models[0] for speed in model.speeds]
        if different := [other.model for other in others if not _is_same(other, facts, [])]:
            notes.append(f"{model.name} was measured against {different[0]}, not {dense}")
    questions = [model.evaluation.conditions for model in pruned if model.evaluation]
    same = [one for one in _of(Evaluation, files) if not questions or one.conditions == questions[0]]
    evaluation = _best_evaluation(same, facts, notes)
    if evaluation is None and (questions or not any(model.texts for model in pruned)):
        notes.append("the dense model was not evaluated on the same rows; ddp-vllm eval --against MODEL does that")
    if any(others != questions[0] for others in questions[1:]):
        notes.append("the models were not evaluated on the same rows, so their accuracies can't be compared")
    known = [model for model in baselines if _is_same(model, facts, [])]
    return Model(facts=known[0] if known and facts.parameters is None else facts, is_dense=True, evaluation=evaluation)


def difference(model: Model, dense: Model | None) -> tuple[float, float] | None:
    """Return the difference of mean accuracy from the dense model on the same questions, and half
    its 95 % interval; None if they did not answer the same questions."""
    if dense is None or model is dense or not model.evaluation or not dense.evaluation:
        return None
    if model.evaluation.conditions != dense.evaluation.conditions:
        return None
    return mean_difference(model.evaluation.ddp_vllm.answers, dense.evaluation.ddp_vllm.answers)
