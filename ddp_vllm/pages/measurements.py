"""Reads what is known of pruned checkpoints and their dense model: of themselves, bench, eval.

Results are read from a checkpoint's folder and its `eval` folder, or passed by name. They belong to
the model whose id they store (`model_facts.model_id`), wherever that model is now. Two evaluations
are only compared if they asked the same questions.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from ddp_vllm.checkpoint import Checkpoint, read_checkpoint
from ddp_vllm.errors import CheckpointError, ModelError, SettingError, TextError
from ddp_vllm.evaluations import (
    FIDELITY_FORMAT,
    check_evaluation,
    default_output,
    mean_accuracy,
    mean_difference,
    perplexity_ratio,
)
from ddp_vllm.masks import MASKS_FILE
from ddp_vllm.model_facts import ModelFacts, describe_model, identify
from ddp_vllm.provenance import bare_name, local_provenance
from ddp_vllm.remote_code.files import read_json
from ddp_vllm.results import FORMAT, check_results, main_verdict, measured, on_gpu

Interval = tuple[float, float, float]
"""A value and the ends of its interval."""
Results = Mapping[str, Any]
"""The results of one run of bench or eval, or a part of them, as in the file."""
Notes = dict[str, str]
"""A sentence on each missing or incomparable result -> the command that corrects it, or ""."""
# of results in a folder
PLACES = ("*.json", "against-*/*.json", "eval/*.json", "eval/against-*/*.json")


@dataclass(frozen=True, kw_only=True)
class Model:
    """One model of a comparison, and what is known of it."""

    facts: ModelFacts
    sparsity: float | None = None
    """The fraction of units to remove, from the recipe; None for another budget than `units`."""
    quality: Results = field(default_factory=dict)
    """Perplexities on held-out text of the kind it was trained on, as `prune` stores them."""
    predicted: Interval | None = None
    """Predicted speedup of a budget in measured time, with the range of the profile's rounds."""
    evaluation: Results | None = None
    """lm-eval's results."""
    texts: Mapping[str, Results] = field(default_factory=dict)
    """The results of `eval --text`, by text."""
    speeds: tuple[Results, ...] = ()
    """Verdicts of `bench sharegpt`, each with the `bench` it comes from."""

    @property
    def name(self) -> str:
        return self.facts.name if self.facts.pruned else f"{self.facts.name} (dense)"

    @property
    def heldout(self) -> Interval | None:
        """Its own perplexity on that text over the dense model's."""
        return perplexity_ratio(self.quality)

    @property
    def accuracy(self) -> tuple[float, float, int] | None:
        """Mean accuracy, its standard error, and the number of tasks."""
        mean = mean_accuracy(self.evaluation) if self.evaluation else None
        return (mean["value"], mean["stderr"], len(mean["tasks"])) if mean else None

    @property
    def speed(self) -> Results | None:
        """The verdict for the picture: offline, else all at once, else the first load."""
        for start in ("offline", "all at once", ""):
            for speed in self.speeds:
                if speed["load"].startswith(start):
                    return speed
        return None

    @property
    def measured_speedup(self) -> Interval | None:
        """The ratio of that verdict with its interval; without one, both ends are the ratio."""
        if self.speed is None:
            return None
        verdict = main_verdict(self.speed)
        low, high = (verdict["ratio"] if verdict[end] is None else verdict[end] for end in ("low", "high"))
        return verdict["ratio"], low, high

    @property
    def speedup(self) -> Interval | None:
        """The speedup over the dense model that was measured, or else the predicted one."""
        return self.measured_speedup or self.predicted


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Everything the page shows."""

    dense: Model | None
    pruned: tuple[Model, ...]
    notes: Notes

    @property
    def models(self) -> tuple[Model, ...]:
        return (self.dense, *self.pruned) if self.dense else self.pruned

    @property
    def benches(self) -> list[Results]:
        """The benchmarks that the speeds come from."""
        benches: list[Results] = []
        for speed in (speed for model in self.pruned for speed in model.speeds):
            if speed["bench"] not in benches:
                benches.append(speed["bench"])
        return benches


def collect(folders: Sequence[Path], *, results: Sequence[Path] = (), dense: str | None = None) -> Comparison:
    """Gather everything about the pruned checkpoints in `folders` and their dense model.

    Raises: CheckpointError if a folder is not a pruned checkpoint; SettingError if they come from
        different models; TextError if a passed file is not a results file.
    """
    checkpoints = [read_checkpoint(folder) for folder in folders]
    names = [folder.resolve().name for folder in folders]
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise CheckpointError(f"two folders are called {repeated}; rename one, or the page cannot tell them apart")
    dense = dense or _common_dense(checkpoints)
    nearby = [*folders]
    if dense:
        nearby.append(Path(dense) if Path(dense).is_dir() else default_output(dense))
    files = _read_files(nearby, results)
    notes: Notes = {}
    pruned = tuple(_pruned_model(checkpoint, dense, files, notes) for checkpoint in checkpoints)
    return Comparison(dense=_dense_model(dense, files, pruned, notes), pruned=pruned, notes=notes)


def _dense_of(checkpoint: Checkpoint) -> str | None:
    """Return the folder or hub name of the model that a checkpoint was pruned from, if it is
    known."""
    provenance = local_provenance(checkpoint.folder / MASKS_FILE)
    return str(provenance.get("applied_to") or provenance.get("recipe", {}).get("model", "")) or None


def _common_dense(checkpoints: Sequence[Checkpoint]) -> str | None:
    """Return the model that all checkpoints were pruned from, as the first one names it. Raises:
    SettingError."""
    parents = [dense for checkpoint in checkpoints if (dense := _dense_of(checkpoint))]
    if len(different := sorted(set(map(identify, parents)))) > 1:
        raise SettingError(
            f"the folders were pruned from different models ({', '.join(different)}); compare those of one model, or "
            "pass --dense if these are copies of one"
        )
    return parents[0] if parents else None


def _read_files(nearby: Sequence[Path], passed: Sequence[Path]) -> dict[str, list[Results]]:
    """Return the content of each results file once, by kind; of passed files and of files in passed
    and model folders.

    Raises: TextError for a passed file that holds no results, and a passed folder without any.
    """
    by_path: dict[Path, tuple[str, Results]] = {}
    for place in (*passed, *nearby):
        in_folder = place.is_dir() or place in nearby
        paths = [path for pattern in PLACES for path in sorted(place.glob(pattern))]
        known = {path.resolve(): _read_file(path) for path in (paths if in_folder else [place])}
        results = {path: content for path, content in known.items() if content}
        if place in passed and not results:
            raise TextError(
                f"{place} holds no results of ddp-vllm bench or eval; pass the folder of eval -o, or a results file"
            )
        by_path |= results
    contents: dict[str, list[Results]] = {"bench": [], "tasks": [], "text": []}
    for kind, content in by_path.values():
        contents[kind].append(content)
    return contents


def _read_file(path: Path) -> tuple[str, Results] | None:
    """Return the kind and the content of a results file; None for any other file.

    Raises: TextError if it is damaged.
    """
    try:
        content = read_json(path)
    except (OSError, ValueError):
        return None
    if not isinstance(content, dict):
        return None
    if content.get("format") == FORMAT:
        check_results(content, path)
        return "bench", content
    is_text = content.get("format") == FIDELITY_FORMAT
    if not is_text and "ddp_vllm" not in content:
        return None
    check_evaluation(content, path)
    return "text" if is_text else "tasks", content


def _pruned_model(
    checkpoint: Checkpoint, dense: str | None, files: Mapping[str, Sequence[Results]], notes: Notes
) -> Model:
    """Return a pruned model with its measurements, and add notes on missing ones."""
    folder, provenance = checkpoint.folder, checkpoint.provenance
    recipe, quality, latency = (provenance.get(key) or {} for key in ("recipe", "perplexity", "latency"))
    facts = describe_model(str(folder))
    evaluation, speeds = _best_evaluation(files["tasks"], facts, notes), _speeds(files["bench"], facts, notes)
    if evaluation is None:
        notes[f"{facts.name} was not evaluated"] = f"ddp-vllm eval {folder}"
    if not speeds:
        command = f"ddp-vllm bench sharegpt --dense {_dense_of(checkpoint) or dense or 'MODEL'} --pruned {folder}"
        notes[f"{facts.name} was not measured"] = command
    texts: dict[str, Results] = {}
    for results in sorted(files["text"], key=lambda results: str(results["started"])):
        if _find([results["model"]], facts, notes):
            texts |= results["texts"]
    counts_units = recipe.get("budget", "units") == "units"
    return Model(
        facts=facts,
        sparsity=recipe.get("sparsity") or None if counts_units else None,
        quality=quality,
        predicted=(latency["speedup"], latency["low"], latency["high"]) if latency else None,
        evaluation=evaluation,
        texts=texts,
        speeds=speeds,
    )


def _find(models: Sequence[Results], facts: ModelFacts, notes: Notes) -> Results | None:
    """Return the entry of this model among a results file's models; among copies, the entry with
    its folder."""
    same = [model for model in models if _is_same(model, facts)]
    in_place = [model for model in models if model["model"] == facts.model]
    if in_place and not same:
        notes[f"results of {facts.name} are left out, because it has changed since they were measured"] = ""
    return next((model for model in in_place if model in same), same[0] if same else None)


def _is_same(model: Results, facts: ModelFacts) -> bool:
    """Tell whether two models are the same: by their ids, or by name if one has no id."""
    if model.get("id") and facts.id:
        return bool(model["id"] == facts.id)
    return (model["name"], model["pruned"]) == (facts.name, facts.pruned)


def _best_evaluation(evaluations: Iterable[Results], facts: ModelFacts, notes: Notes) -> Results | None:
    """Return the evaluation of a model with the most tasks, then the most questions, then the
    latest date."""

    def size(evaluation: Results) -> tuple[int, int, float]:
        questions = sum(count.get("effective", 0) for count in evaluation.get("n-samples", {}).values())
        return len(evaluation["results"]), questions, evaluation.get("date") or 0

    of_model = [results for results in evaluations if _find([results["ddp_vllm"]["model"]], facts, notes)]
    return max(of_model, key=size, default=None)


def _speeds(benches: Iterable[Results], facts: ModelFacts, notes: Notes) -> tuple[Results, ...]:
    """Return a model's verdict at each load: of the latest benchmark that ended, or else of the
    latest."""
    latest: dict[str, Results] = {}
    for bench in sorted(benches, key=lambda bench: (bench["complete"], bench["started"])):
        if model := _find(bench["models"][1:], facts, notes):
            verdicts = [verdict for verdict in bench.get("verdicts", []) if verdict["label"] == model["label"]]
            latest |= {verdict["load"]: {**verdict, "bench": bench} for verdict in verdicts}
    return tuple(latest.values())


def _dense_model(
    dense: str | None, files: Mapping[str, Sequence[Results]], pruned: Sequence[Model], notes: Notes
) -> Model | None:
    """Return the dense model, with the evaluation that asked the same questions as the pruned
    ones'."""
    baselines = [bench["models"][0] for bench in files["bench"]]
    dense = dense or next((model["model"] for model in baselines), None)
    if dense is None:
        return None
    try:
        facts = describe_model(dense)
    except ModelError:  # a folder of another machine
        facts = ModelFacts(model=identify(dense), name=bare_name(dense), pruned=False)
    if facts.pruned:
        raise SettingError(f"{dense} is pruned itself; pass the dense model with --dense")
    for model in pruned:
        others = [speed["bench"]["models"][0] for speed in model.speeds]
        for other in [other for other in others if not _is_same(other, facts)][:1]:
            notes[f"{model.name} was measured against {other['model']}, not {dense}"] = ""
    questions = [conditions(model.evaluation) for model in pruned if model.evaluation]
    same = [results for results in files["tasks"] if not questions or conditions(results) == questions[0]]
    evaluation = _best_evaluation(same, facts, notes)
    if evaluation is None:
        command = f"ddp-vllm eval {pruned[0].facts.model} --against {dense}"
        notes["the dense model was not evaluated on the same rows"] = command
    if any(others != questions[0] for others in questions[1:]):
        notes["the models were not evaluated on the same rows, so their accuracies can't be compared"] = ""
    known = [model for model in baselines if _is_same(model, facts)]
    if known and facts.parameters is None:
        facts = ModelFacts(**{key: known[0].get(key) for key in ModelFacts.__dataclass_fields__})
    return Model(facts=facts, evaluation=evaluation)


def conditions(evaluation: Results) -> tuple[Any, ...]:
    """Return the conditions that two comparable evaluations share: tasks, limit, context length and
    data."""
    stated = evaluation["ddp_vllm"]
    settings, data = stated["settings"], json.dumps(stated["data"], sort_keys=True)
    return sorted(evaluation["results"]), settings["limit"], settings["max_length"], data


def difference(model: Model, dense: Model | None) -> tuple[float, float] | None:
    """Return the difference of mean accuracy from the dense model on the same questions, and half
    its 95 % interval; None if they did not answer the same questions."""
    if dense is None or model is dense or not model.evaluation or not dense.evaluation:
        return None
    if conditions(model.evaluation) != conditions(dense.evaluation):
        return None
    return mean_difference(model.evaluation, dense.evaluation)


def engine_fact(model: Model, comparison: Comparison, fact: str) -> float | None:
    """Return the median of a value that a model's engines reported in the benchmark of the picture.

    Served and offline engines differ in processes, so only one benchmark is read. Peak memory is
    unknown on a GPU.
    """
    speeds = [model.speed] if model.facts.pruned else [other.speed for other in comparison.pruned]
    speed = next(filter(None, speeds), None)
    if speed is None or (fact == "peak_memory_bytes" and on_gpu(speed["bench"])):
        return None
    label = speed["label"] if model.facts.pruned else speed["bench"]["models"][0]["label"]
    engines = [run["engine"] for run in measured(speed["bench"], label, speed["load"])]
    values = [engine[fact] for engine in engines if fact in engine]
    return median(values) if values else None
