"""Gather what is known about pruned checkpoints: their sizes, their evaluations and their benchmarks.

Results are found in a checkpoint's folder and its `eval` folder, or passed by name. What lies in a checkpoint's folder
is that checkpoint's; all else belongs to the model whose resolved folder or hub name it stores. Two evaluations are
only compared if they asked the same questions.
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
    TASKS,
    check_evaluation,
    default_output,
    mean_accuracy,
    mean_difference,
    perplexity_ratio,
    score,
)
from ddp_vllm.masks import MASKS_FILE
from ddp_vllm.model_facts import ModelFacts, describe_model, identify, is_pruned
from ddp_vllm.provenance import local_provenance
from ddp_vllm.remote_code.files import read_json
from ddp_vllm.results import FORMAT, check_results, measured, on_gpu

Interval = tuple[float, float, float]
"""A value and the ends of its interval."""
Results = Mapping[str, Any]
"""Of one run of bench or eval, or a part of it, as it stands in the file."""
LARGEST_FILE = 100 * 2**20  # bytes; larger ones beside a model are no results


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One model on the page."""

    facts: ModelFacts
    dense: str | None = None
    """The model it was pruned from, by its recipe."""
    sparsity: float | None = None
    """The fraction of units its recipe asked to remove; None if it counted something else."""
    quality: Results | None = None
    """lm-eval's results."""
    speeds: tuple[Results, ...] = ()
    """Verdicts of `bench sharegpt`, each with the `bench` it comes from."""
    perplexities: tuple[float, float] | None = None
    """Of the text that was held out of what it learned on: the dense model's, and its own."""
    heldout: Interval | None = None
    """The second over the first."""
    texts: Mapping[str, Results] = field(default_factory=dict)
    """What `eval --text` found, text by text."""
    predicted: Interval | None = None
    """Speedup that a budget in measured time promised, with the range of the profile's rounds."""

    @property
    def accuracy(self) -> tuple[float, float, int] | None:
        """Mean accuracy, its standard error, and of how many tasks."""
        mean = mean_accuracy(self.quality) if self.quality else None
        return (mean["value"], mean["stderr"], len(mean["tasks"])) if mean else None

    @property
    def speed(self) -> Results | None:
        """The verdict that goes into the picture: offline, else all at once, else the first load."""
        order = ("offline", "all at once", "")
        return next((speed for start in order for speed in self.speeds if speed["load"].startswith(start)), None)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Everything the page shows."""

    dense: Entry | None
    pruned: tuple[Entry, ...]
    benches: tuple[Results, ...]
    notes: Mapping[str, str]
    """What is missing or not comparable, in words -> the command that mends it, or ""."""

    @property
    def entries(self) -> tuple[Entry, ...]:
        return (self.dense, *self.pruned) if self.dense else self.pruned


def collect(folders: Sequence[Path], *, results: Sequence[Path] = (), dense: str | None = None) -> Comparison:
    """Gather everything about the pruned checkpoints in `folders` and their dense model.

    Raises: CheckpointError if a folder is no pruned checkpoint; SettingError if they come from different models;
        TextError if a passed file is no results file.
    """
    checkpoints = [read_checkpoint(folder) for folder in folders]
    names = [folder.resolve().name for folder in folders]
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise CheckpointError(f"two folders are called {repeated}; rename one, or the page cannot tell them apart")
    dense = dense or _common_origin(checkpoints)
    nearby = [*folders, *([Path(dense) if Path(dense).is_dir() else default_output(dense)] if dense else [])]
    found = _read_all(nearby, results)
    notes: dict[str, str] = {}
    entries = tuple(_entry(checkpoint, dense, found, notes) for checkpoint in checkpoints)
    reference = _dense_entry(dense, found, entries, notes)
    shown = [each for each in found if any(speed["bench"] is each for entry in entries for speed in entry.speeds)]
    return Comparison(dense=reference, pruned=entries, benches=tuple(shown), notes=notes)


def _origin(checkpoint: Checkpoint) -> str | None:
    provenance = local_provenance(checkpoint.folder / MASKS_FILE)
    return str(provenance.get("applied_to") or provenance.get("recipe", {}).get("model", "")) or None


def _common_origin(checkpoints: Sequence[Checkpoint]) -> str | None:
    """Return the model that all were pruned from, as the first one calls it. Raises: SettingError."""
    origins = [origin for checkpoint in checkpoints if (origin := _origin(checkpoint))]
    parents = sorted(set(map(identify, origins)))
    if len(parents) > 1:
        raise SettingError(
            f"the folders were pruned from different models ({', '.join(parents)}); compare those of one model, or "
            "pass --dense if these are copies of one"
        )
    return origins[0] if origins else None


def _read_all(nearby: Sequence[Path], passed: Sequence[Path]) -> list[Results]:
    """Read the results files that were passed, and those that lie in folders, passed or of models; each once."""
    patterns = ("*.json", "against-*/*.json", "eval/*.json", "eval/against-*/*.json")
    folders, files = [path for path in passed if path.is_dir()], [path for path in passed if not path.is_dir()]
    lying = [path for folder in (*nearby, *folders) for pattern in patterns for path in sorted(folder.glob(pattern))]
    small = [path for path in lying if path.stat().st_size < LARGEST_FILE]
    named, places = {path.resolve() for path in files}, {path.resolve(): path for path in (*files, *small)}
    read = {place: found for place, path in places.items() if (found := _read(path, strict=place in named))}
    for folder in folders:
        if not any(place.is_relative_to(folder.resolve()) for place in read):
            raise TextError(
                f"{folder} holds no results of ddp-vllm bench or eval; pass the folder of eval -o, or a file"
            )
    return list(read.values())


def _is_bench(content: Results) -> bool:
    return content.get("format") == FORMAT


def _is_of_text(content: Results) -> bool:
    return content.get("format") == FIDELITY_FORMAT


def _is_of_tasks(content: Results) -> bool:
    return "ddp_vllm" in content and not _is_bench(content) and not _is_of_text(content)


def _models_in(content: Results) -> list[dict[str, Any]]:
    """Return what a results file says of the models it is about."""
    if _is_bench(content):
        return list(content["models"])
    return [content["model"], content["against"]] if _is_of_text(content) else [content["ddp_vllm"]["model"]]


def _read(path: Path, *, strict: bool) -> dict[str, Any]:
    """Read a results file; a file that is none is an error when the user named it, and {} otherwise.

    Raises: TextError, also for a damaged one that lies there.
    """
    try:
        content = read_json(path)
    except (OSError, ValueError) as error:
        if strict:
            raise TextError(f"{path} cannot be read ({error}); pass a results file of bench or eval") from error
        return {}
    if isinstance(content, dict) and (_is_bench(content) or _is_of_text(content) or _is_of_tasks(content)):
        check_all = check_results if _is_bench(content) else check_evaluation
        check_all(content, path)
        _settle(_models_in(content), path)
        return content
    if strict:
        raise TextError(f"{path} is no results file of ddp-vllm bench or eval; run one of them first")
    return {}


def _settle(models: Sequence[dict[str, Any]], path: Path) -> None:
    """Settle which folders of this machine the models of a results file are.

    What lies in a model's folder or its `eval` is that model's, whatever it was called when it was measured: of the
    models that are pruned as it is, or dense as it is, the only one.
    """
    for model in models:
        if Path(model["model"]).is_absolute():  # else a name on the hub, whatever lies here by that name
            model["model"] = identify(model["model"])
    parent = path.absolute().parent
    home = parent.parent if parent.name == "eval" else parent
    if (home / "config.json").is_file():
        pruned = is_pruned(home)
        alike = [model for model in models if model["pruned"] == pruned]
        if len(alike) == 1:
            alike[0]["model"] = identify(str(home))


def _entry(checkpoint: Checkpoint, dense: str | None, found: Sequence[Results], notes: dict[str, str]) -> Entry:
    """Return a pruned model with what was measured of it; notes say what is missing."""
    folder, recipe = checkpoint.folder, checkpoint.provenance.get("recipe", {})
    facts = describe_model(str(folder))
    quality, speeds = _best_evaluation(found, facts, notes), _speeds(found, facts, notes)
    if quality is None:
        notes[f"{facts.name} was not evaluated"] = f"ddp-vllm eval {folder}"
    if not speeds:
        command = f"ddp-vllm bench sharegpt --dense {_origin(checkpoint) or dense or 'MODEL'} --pruned {folder}"
        notes[f"{facts.name} was not measured"] = command
    even = recipe.get("budget", "units") == "units" and recipe.get("attention_sparsity") is None
    sparsity = (recipe.get("sparsity") or None) if even else None
    own: dict[str, Any] = {"heldout": perplexity_ratio(checkpoint.provenance.get("perplexity") or {})}
    own["texts"] = _texts(found, facts, notes)
    if stated := checkpoint.provenance.get("perplexity"):
        own["perplexities"] = (stated["dense"], stated.get("recovered", stated["pruned"]))
    if latency := checkpoint.provenance.get("latency"):
        own["predicted"] = (latency["speedup"], latency["low"], latency["high"])
    return Entry(facts=facts, dense=_origin(checkpoint), sparsity=sparsity, quality=quality, speeds=speeds, **own)


def _of(models: Sequence[Results], facts: ModelFacts) -> list[Results]:
    """Return those of a file's models that are the one in question, by folder or hub name, else by name alone.

    A name is enough where the file is of another machine, and where only one has it.
    """
    alike = [model for model in models if model["pruned"] == facts.pruned]
    found = [model for model in alike if model["model"] == facts.model]
    namesakes = [model for model in alike if _is_namesake(Path(model["model"]), Path(facts.model))]
    return found or (namesakes if len(namesakes) == 1 else [])


def _is_namesake(one: Path, other: Path) -> bool:
    """Say whether two folders, or a folder and a hub name, end alike and are not both folders of this machine."""
    folders = [place for place in (one, other) if place.is_absolute()]
    both_here = len(folders) == 2 and all(folder.exists() for folder in folders)
    return one.name == other.name and bool(folders) and not both_here


def _unchanged(models: Iterable[Results], facts: ModelFacts, notes: dict[str, str]) -> list[Results]:
    """Leave out those that had another number of parameters: their folder was pruned again since they were measured."""
    kept = []
    for model in models:
        before = model.get("parameters")
        if before and facts.parameters and before != facts.parameters:
            left_out = f"results of {facts.name} with {before:,} parameters are left out"
            notes[f"{left_out}: it has {facts.parameters:,} now"] = ""
        else:
            kept.append(model)
    return kept


def _best_evaluation(found: Iterable[Results], facts: ModelFacts, notes: dict[str, str]) -> Results | None:
    """Return the evaluation of a model with the most tasks, of most questions and then the latest among equals."""
    evaluations = list(filter(_is_of_tasks, found))
    mine = [each for each in evaluations if _unchanged(_of([each["ddp_vllm"]["model"]], facts), facts, notes)]
    return max(mine, key=lambda each: (len(each["results"]), _num_asked(each), each.get("date") or 0), default=None)


def _texts(found: Iterable[Results], facts: ModelFacts, notes: dict[str, str]) -> dict[str, Results]:
    """Return what the latest `eval --text` of a model found, text by text."""
    latest: dict[str, Results] = {}
    for each in sorted(filter(_is_of_text, found), key=lambda each: str(each["started"])):
        if _unchanged(_of([each["model"]], facts), facts, notes):
            latest |= each["texts"]
    return latest


def _num_asked(evaluation: Results) -> int:
    return sum(count.get("effective", 0) for count in evaluation.get("n-samples", {}).values())


def _speeds(found: Iterable[Results], facts: ModelFacts, notes: dict[str, str]) -> tuple[Results, ...]:
    """Return a model's verdict at each load: of the latest benchmark that ended, or else of the latest."""
    latest: dict[str, Results] = {}
    for bench in sorted(filter(_is_bench, found), key=lambda bench: (bench["complete"], bench["started"])):
        labels = [model["label"] for model in _unchanged(_of(bench["models"][1:], facts), facts, notes)]
        mine = [verdict for verdict in bench.get("verdicts", []) if verdict["label"] in labels]
        latest |= {verdict["load"]: {**verdict, "bench": bench} for verdict in mine}
    return tuple(latest.values())


def _dense_entry(
    dense: str | None, found: Sequence[Results], entries: Sequence[Entry], notes: dict[str, str]
) -> Entry | None:
    """Return the dense model's entry, with the evaluation that asked the same questions as the pruned ones'."""
    baselines = [bench["models"][0] for bench in found if _is_bench(bench)]
    dense = dense or next((model["model"] for model in baselines), None)
    if dense is None:
        return None
    try:
        facts = describe_model(dense)
    except ModelError:  # a folder of another machine
        facts = ModelFacts(model=identify(dense), name=dense, pruned=False)
    if facts.pruned:
        raise SettingError(f"{dense} is pruned itself; pass the dense model with --dense")
    for entry in entries:
        others = [model for speed in entry.speeds if not _of([model := speed["bench"]["models"][0]], facts)]
        notes |= {f"{entry.facts.name} was measured against {each['model']}, not {dense}": "" for each in others[:1]}
    wanted = [conditions(entry.quality) for entry in entries if entry.quality]
    same = [each for each in found if _is_of_tasks(each) and (not wanted or conditions(each) == wanted[0])]
    quality = _best_evaluation(same, facts, notes)
    if quality is None:
        command = f"ddp-vllm eval {entries[0].facts.model} --against {dense}"
        notes["the dense model was not evaluated on the same rows"] = command
    if any(others != wanted[0] for others in wanted[1:]):
        notes["the models were not evaluated on the same rows, so their accuracies can't be compared"] = ""
    known = [model for model in baselines if _of([model], facts)]
    if known and facts.parameters is None:
        facts = ModelFacts(**{key: known[0].get(key) for key in ModelFacts.__dataclass_fields__})
    return Entry(facts=facts, quality=quality)


def conditions(evaluation: Results) -> tuple[Any, ...]:
    """Return what two evaluations must share to be comparable: tasks, limit, context length and data."""
    ours = evaluation["ddp_vllm"]
    data = ours["data"] if isinstance(ours["data"], str) else sorted(ours["data"].items())
    settings = ours["settings"]
    return (sorted(evaluation["results"]), settings["limit"], settings["max_length"], json.dumps(data))


def task_scores(entry: Entry) -> dict[str, tuple[float, float | None]]:
    """Return (value, standard error) of each task that was evaluated, in the paper's order."""
    scores = {name: score(entry.quality, name) if entry.quality else None for name in TASKS}
    return {name: value for name, value in scores.items() if value is not None}


def difference(entry: Entry, dense: Entry | None) -> tuple[float, float] | None:
    """Return by how much the mean accuracy differs from the dense model's on the same questions, and half its 95 %."""
    both = _comparable(entry, dense)
    return mean_difference(*both) if both else None


def retained(entry: Entry, dense: Entry | None) -> float | None:
    """Return the fraction of the dense mean accuracy that is left, if both answered the same questions."""
    both = _comparable(entry, dense)
    ours, theirs = map(mean_accuracy, both) if both else (None, None)
    return ours["value"] / theirs["value"] if ours and theirs and theirs["value"] else None


def _comparable(entry: Entry, dense: Entry | None) -> tuple[Results, Results] | None:
    """Return both evaluations if there are two, of the same questions."""
    if not (dense and entry.quality and dense.quality and conditions(entry.quality) == conditions(dense.quality)):
        return None
    return entry.quality, dense.quality


def engine_fact(entry: Entry, comparison: Comparison, fact: str) -> float | None:
    """Return the median of what a model's engines said of themselves in the benchmark that is in the picture.

    Served and offline engines differ in processes, so only one benchmark is read. Peak memory is unknown on a GPU.
    """
    speeds = [entry.speed] if entry.facts.pruned else [other.speed for other in comparison.pruned]
    speed = next(filter(None, speeds), None)
    if speed is None or (fact == "peak_memory_bytes" and on_gpu(speed["bench"])):
        return None
    label = speed["label"] if entry.facts.pruned else speed["bench"]["models"][0]["label"]
    engines = [run["engine"] for run in measured(speed["bench"], label, speed["load"])]
    values = [engine[fact] for engine in engines if fact in engine]
    return median(values) if values else None
