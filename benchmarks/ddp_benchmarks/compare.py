"""Gather what is known about pruned checkpoints: their sizes, their evaluations and their benchmarks.

Results are found in a checkpoint's folder and its `eval` folder, or passed by name. What lies in a checkpoint's folder
is that checkpoint's; all else belongs to the model whose resolved folder or hub name it stores. Two evaluations are
only compared if they read the same rows.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from ddp_benchmarks.evaluate import default_output, mean_accuracy, mean_difference, score
from ddp_benchmarks.machine import on_gpu
from ddp_benchmarks.models import ModelFacts, describe_model, identify
from ddp_benchmarks.results import FORMAT, measured
from ddp_benchmarks.tasks import TASKS
from ddp_vllm.checkpoint import read_checkpoint, read_json
from ddp_vllm.errors import CheckpointError, ModelError, SettingError, TextError


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One model on the page."""

    facts: ModelFacts
    dense: str | None = None
    """The model it was pruned from, by its recipe."""
    sparsity: float | None = None
    """The fraction of units its recipe asked to remove; None if it counted something else."""
    quality: Mapping[str, Any] | None = None
    """lm-eval's results."""
    speeds: tuple[Mapping[str, Any], ...] = ()
    """Verdicts of `bench sharegpt`, each with the `bench` it comes from."""

    @property
    def accuracy(self) -> tuple[float, float, int] | None:
        """Mean accuracy, its standard error, and of how many tasks."""
        mean = mean_accuracy(self.quality) if self.quality else None
        return (mean["value"], mean["stderr"], len(mean["tasks"])) if mean else None

    @property
    def speed(self) -> Mapping[str, Any] | None:
        """The verdict that goes into the picture: offline, else all at once, else the first load."""
        order = ("offline", "all at once", "")
        return next((speed for start in order for speed in self.speeds if speed["load"].startswith(start)), None)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Everything the page shows."""

    dense: Entry | None
    pruned: tuple[Entry, ...]
    benches: tuple[Mapping[str, Any], ...]
    notes: tuple[str, ...]
    """What is missing or not comparable, in words."""

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
    origins = [str(checkpoint.provenance.get("recipe", {}).get("model", "")) or None for checkpoint in checkpoints]
    parents = sorted({identify(origin) for origin in origins if origin})
    if dense is None and len(parents) > 1:
        raise SettingError(
            f"the folders were pruned from different models ({', '.join(parents)}); compare those of one model, or "
            "pass --dense if these are copies of one"
        )
    dense = dense or next(filter(None, origins), None)
    nearby = [*folders, *([Path(dense) if Path(dense).is_dir() else default_output(dense)] if dense else [])]
    passed = {path.resolve(): path for path in results}
    found = {path.resolve(): path for path in _nearby_files(nearby) if path.resolve() not in passed}
    contents = [_read(path, strict=True) for path in passed.values()]
    contents += [_read(path, strict=False) for path in found.values()]
    benches = [content for content in contents if content.get("format") == FORMAT]
    evals = [content for content in contents if "ddp_vllm" in content]
    notes: list[str] = []
    entries = []
    for checkpoint, origin in zip(checkpoints, origins, strict=True):
        folder, facts = checkpoint.folder, describe_model(str(checkpoint.folder))
        name = facts.name
        quality = _best_evaluation(evals, facts, notes)
        speeds = _speeds(benches, facts, notes)
        notes += [f"{name} was not evaluated: ddp-vllm eval {folder}"] if quality is None else []
        command = f"ddp-vllm bench sharegpt --dense {origin or dense or 'MODEL'} --pruned {folder}"
        notes += [f"{name} was not measured: {command}"] if not speeds else []
        entries.append(
            Entry(
                facts=facts,
                dense=origin,
                sparsity=_units_removed(checkpoint.provenance.get("recipe", {})),
                quality=quality,
                speeds=speeds,
            )
        )
    reference = _dense_entry(dense, benches, evals, entries, notes)
    shown = [bench for bench in benches if any(speed["bench"] is bench for entry in entries for speed in entry.speeds)]
    notes = list(dict.fromkeys(notes))
    return Comparison(dense=reference, pruned=tuple(entries), benches=tuple(shown), notes=tuple(notes))


def _units_removed(recipe: Mapping[str, Any]) -> float | None:
    counts_units = recipe.get("budget", "units") == "units"
    return (recipe.get("sparsity") or None) if counts_units else None


def _nearby_files(folders: Iterable[Path]) -> Iterator[Path]:
    for folder in folders:
        for pattern in ("*.json", "eval/*.json", "eval/against-*/*.json"):
            yield from (path for path in sorted(folder.glob(pattern)) if path.stat().st_size < 100 * 2**20)


def _read(path: Path, *, strict: bool) -> dict[str, Any]:
    """Read a results file; a file that is none is an error when the user named it, and {} otherwise."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        if strict:
            raise TextError(f"{path} cannot be read ({error}); pass a results file of bench or eval") from error
        return {}
    if isinstance(content, dict) and content.get("format") == FORMAT:
        _identify_all(content["models"], path)
        return content
    if isinstance(content, dict) and "ddp_vllm" in content:
        _identify_all([content["ddp_vllm"]["model"]], path)
        return content
    if strict:
        raise TextError(f"{path} is no results file of ddp-vllm bench or eval; run one of them first")
    return {}


def _identify_all(models: Sequence[dict[str, Any]], path: Path) -> None:
    """Replace each `model` that results store by its resolved folder.

    A checkpoint may have been renamed since, so what lies in its folder or `eval` folder is its own: of models that are
    pruned as it is, or dense as it is, the only one.
    """
    for model in models:
        if Path(model["model"]).is_absolute():  # older results also hold paths relative to an unknown folder
            model["model"] = identify(model["model"])
    parent = path.absolute().parent
    home = parent.parent if parent.name == "eval" else parent
    if (home / "config.json").is_file():
        pruned = "ddp_layers" in read_json(home / "config.json")
        alike = [model for model in models if model["pruned"] == pruned]
        if len(alike) == 1:
            alike[0]["model"] = identify(str(home))


def _same(models: Iterable[Mapping[str, Any]], facts: ModelFacts) -> list[Mapping[str, Any]]:
    return [model for model in models if model["pruned"] == facts.pruned and model["model"] == facts.model]


def _namesakes(models: Iterable[Mapping[str, Any]], facts: ModelFacts) -> list[Mapping[str, Any]]:
    """Return those of the same name in no known folder: of another machine, or relative; [] if there are several."""
    found = []
    for model in models:
        name, folders = model["name"], (Path(model["model"]), Path(facts.model))
        alike = facts.name in (name, Path(name).name) or name == Path(facts.name).name
        here = all(folder.is_absolute() and folder.exists() for folder in folders)
        if alike and not here and model["pruned"] == facts.pruned and model["model"] != facts.model:
            found.append(model)
    return found if len({model["model"] for model in found}) == 1 else []


def _of_this_model(models: Sequence[Mapping[str, Any]], facts: ModelFacts, notes: list[str]) -> list[Mapping[str, Any]]:
    """Leave out those that had another number of parameters: their folder was pruned again since they were measured."""
    kept = []
    for model in models:
        before = model.get("parameters")
        if before and facts.parameters and before != facts.parameters:
            notes.append(
                f"results of {facts.name} with {before:,} parameters are left out: it has {facts.parameters:,} now"
            )
        else:
            kept.append(model)
    return kept


def _best_evaluation(
    evals: Sequence[Mapping[str, Any]], facts: ModelFacts, notes: list[str]
) -> Mapping[str, Any] | None:
    """Return the evaluation of a model with the most tasks, the one of most rows and then the latest among equals."""
    models = [found["ddp_vllm"]["model"] for found in evals]
    known = _of_this_model([*_same(models, facts), *_namesakes(models, facts)], facts, notes)
    mine = [found for found, model in zip(evals, models, strict=True) if model in known]
    return max(mine, key=lambda found: (len(found["results"]), _num_rows(found), found.get("date") or 0), default=None)


def _num_rows(evaluation: Mapping[str, Any]) -> int:
    return sum(count.get("effective", 0) for count in evaluation.get("n-samples", {}).values())


def _speeds(benches: Iterable[Mapping[str, Any]], facts: ModelFacts, notes: list[str]) -> tuple[Mapping[str, Any], ...]:
    """Return a model's verdict at each load: of the latest benchmark that ended, or else of the latest."""
    latest: dict[str, Mapping[str, Any]] = {}
    for bench in sorted(benches, key=lambda bench: (bench["complete"], bench["started"])):
        models = bench["models"][1:]
        mine = _of_this_model(_same(models, facts) or _namesakes(models, facts), facts, notes)
        labels = [model["label"] for model in mine]
        for verdict in bench.get("verdicts", []):
            if verdict["label"] in labels:
                latest[verdict["load"]] = {**verdict, "bench": bench}
    return tuple(latest.values())


def _dense_entry(
    dense: str | None,
    benches: Sequence[Mapping[str, Any]],
    evals: Sequence[Mapping[str, Any]],
    entries: Sequence[Entry],
    notes: list[str],
) -> Entry | None:
    """Return the dense model's entry, with the evaluation that read the same rows as the pruned ones'."""
    baselines = [bench["models"][0] for bench in benches]
    dense = dense or next((model["model"] for model in baselines), None)
    if dense is None:
        return None
    try:
        facts = describe_model(dense)
    except ModelError:  # a folder of another machine
        facts = ModelFacts(model=identify(dense), name=dense, pruned=False)
    known = [model for model in baselines if _same([model], facts) or _namesakes([model], facts)]
    if facts.pruned:
        raise SettingError(f"{dense} is pruned itself; pass the dense model with --dense")
    for entry in entries:
        others = [model for model in (speed["bench"]["models"][0] for speed in entry.speeds) if model not in known]
        notes += [f"{entry.facts.name} was measured against {model['model']}, not {dense}" for model in others[:1]]
    wanted = [rows_read(entry.quality) for entry in entries if entry.quality]
    same = [found for found in evals if not wanted or rows_read(found) == wanted[0]]
    quality = _best_evaluation(same, facts, notes)
    if quality is None:
        command = f"ddp-vllm eval {entries[0].facts.model} --against {dense}"
        notes.append(f"the dense model was not evaluated on the same rows: {command}")
    if any(rows != wanted[0] for rows in wanted[1:]):
        notes.append("the models were not evaluated on the same rows, so their accuracies can't be compared")
    if known and facts.parameters is None:
        facts = ModelFacts(**{key: known[0][key] for key in ModelFacts.__dataclass_fields__})
    return Entry(facts=facts, quality=quality)


def rows_read(evaluation: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what two evaluations must share to be comparable: tasks, rows, data and context length."""
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
    both = _on_same_rows(entry, dense)
    return mean_difference(*both) if both else None


def retained(entry: Entry, dense: Entry | None) -> float | None:
    """Return the fraction of the dense mean accuracy that is left, if both were evaluated on the same rows."""
    both = _on_same_rows(entry, dense)
    ours, theirs = map(mean_accuracy, both) if both else (None, None)
    return ours["value"] / theirs["value"] if ours and theirs and theirs["value"] else None


def _on_same_rows(entry: Entry, dense: Entry | None) -> tuple[Mapping[str, Any], Mapping[str, Any]] | None:
    """Return both evaluations if there are two, of the same rows."""
    if not (dense and entry.quality and dense.quality and rows_read(entry.quality) == rows_read(dense.quality)):
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
