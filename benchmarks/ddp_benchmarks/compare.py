"""Gather what is known about pruned checkpoints: their sizes, their evaluations and their benchmarks.

Results are found in a checkpoint's folder and its `eval` folder, or passed by name. Two evaluations are only compared
if they read the same rows.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_benchmarks.evaluate import default_output, mean_accuracy, mean_difference, score
from ddp_benchmarks.models import ModelFacts, describe_model
from ddp_benchmarks.results import FORMAT
from ddp_benchmarks.tasks import TASKS
from ddp_vllm.checkpoint import read_checkpoint
from ddp_vllm.errors import CheckpointError, TextError


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
        """The verdict that goes into the picture: offline if there is one, else the first load."""
        return next((speed for speed in self.speeds if speed["load"] == "offline"), next(iter(self.speeds), None))


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

    Raises: CheckpointError if a folder is no pruned checkpoint; TextError if a passed file is no results file.
    """
    checkpoints = [read_checkpoint(folder) for folder in folders]
    names = [folder.resolve().name for folder in folders]
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise CheckpointError(f"two folders are called {repeated}; rename one, or the page cannot tell them apart")
    origins = [str(checkpoint.provenance.get("recipe", {}).get("model", "")) or None for checkpoint in checkpoints]
    dense = dense or next(filter(None, origins), None)
    nearby = [*folders, *([Path(dense) if Path(dense).is_dir() else default_output(dense)] if dense else [])]
    files = [(path, _read(path, strict=True)) for path in results] + list(_nearby_results(nearby))
    benches = [content for _, content in files if content.get("format") == FORMAT]
    evals = [content for _, content in files if "ddp_vllm" in content]
    notes: list[str] = []
    entries = []
    for checkpoint, origin in zip(checkpoints, origins, strict=True):
        folder, name = checkpoint.folder, checkpoint.folder.resolve().name
        quality = _best_evaluation(evals, name)
        speeds = tuple(_speeds(benches, name))
        notes += [f"{name} was not evaluated: ddp-vllm eval {folder}"] if quality is None else []
        command = f"ddp-vllm bench sharegpt --dense {origin or dense or 'MODEL'} --pruned {folder}"
        notes += [f"{name} was not measured: {command}"] if not speeds else []
        entries.append(
            Entry(
                facts=describe_model(str(folder)),
                dense=origin,
                sparsity=_units_removed(checkpoint.provenance.get("recipe", {})),
                quality=quality,
                speeds=speeds,
            )
        )
    reference = _dense_entry(dense, benches, evals, entries, notes)
    return Comparison(dense=reference, pruned=tuple(entries), benches=tuple(benches), notes=tuple(notes))


def _units_removed(recipe: Mapping[str, Any]) -> float | None:
    counts_units = recipe.get("budget", "units") == "units"
    return (recipe.get("sparsity") or None) if counts_units else None


def _nearby_results(folders: Iterable[Path]) -> Iterator[tuple[Path, dict[str, Any]]]:
    for folder in folders:
        for path in sorted([*folder.glob("*.json"), *(folder / "eval").glob("*.json")]):
            if path.stat().st_size < 100 * 2**20 and (content := _read(path, strict=False)):
                yield path, content


def _read(path: Path, *, strict: bool) -> dict[str, Any]:
    """Read a results file; a file that is none is an error when the user named it, and {} otherwise."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        if strict:
            raise TextError(f"{path} cannot be read ({error}); pass a results file of bench or eval") from error
        return {}
    if isinstance(content, dict) and (content.get("format") == FORMAT or "ddp_vllm" in content):
        return content
    if strict:
        raise TextError(f"{path} is no results file of ddp-vllm bench or eval; run one of them first")
    return {}


def _best_evaluation(evals: Iterable[Mapping[str, Any]], name: str) -> Mapping[str, Any] | None:
    """Return the evaluation of a model with the most tasks, the one of most rows and then the latest among equals."""
    mine = [found for found in evals if Path(found["ddp_vllm"]["model"]["model"]).resolve().name == name]
    return max(mine, key=lambda found: (len(found["results"]), _num_rows(found), found.get("date") or 0), default=None)


def _num_rows(evaluation: Mapping[str, Any]) -> int:
    return sum(count.get("effective", 0) for count in evaluation.get("n-samples", {}).values())


def _speeds(benches: Iterable[Mapping[str, Any]], name: str) -> Iterator[Mapping[str, Any]]:
    for bench in benches:
        labels = [m["label"] for m in bench["models"][1:] if Path(m["model"]).resolve().name == name]
        for verdict in bench.get("verdicts", []):
            if verdict["label"] in labels:
                yield {**verdict, "bench": bench}


def _dense_entry(
    dense: str | None,
    benches: Sequence[Mapping[str, Any]],
    evals: Sequence[Mapping[str, Any]],
    entries: Sequence[Entry],
    notes: list[str],
) -> Entry | None:
    """Return the dense model's entry, with the evaluation that read the same rows as the pruned ones'."""
    facts = next((bench["models"][0] for bench in benches), None)
    dense = dense or (facts["model"] if facts else None)
    if dense is None:
        return None
    known = {key: facts[key] for key in ModelFacts.__dataclass_fields__} if facts else None
    local = (Path(dense) / "config.json").is_file()
    reference = describe_model(dense) if local else ModelFacts(**known) if known else None
    if reference is None:
        reference = ModelFacts(model=dense, name=dense, pruned=False)
    wanted = [rows_read(entry.quality) for entry in entries if entry.quality]
    same = [found for found in evals if not wanted or rows_read(found) == wanted[0]]
    quality = _best_evaluation(same, Path(dense).resolve().name)
    if quality is None:
        command = f"ddp-vllm eval {entries[0].facts.model} --against {dense}"
        notes.append(f"the dense model was not evaluated on the same rows: {command}")
    if any(rows != wanted[0] for rows in wanted[1:]):
        notes.append("the models were not evaluated on the same rows, so their accuracies can't be compared")
    return Entry(facts=reference, quality=quality)


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


def peak_memory(entry: Entry, comparison: Comparison) -> float | None:
    """Return the highest memory in bytes any engine of a model took in the benchmark that is in the picture.

    On the GPUs if there were some. Served and offline engines differ in processes, so only one benchmark is read.
    """
    speed = entry.speed or next((other.speed for other in comparison.pruned if other.speed), None)
    if speed is None:
        return None
    bench, name = speed["bench"], Path(entry.facts.model).resolve().name
    models = bench["models"] if entry.facts.pruned else bench["models"][:1]
    labels = [model["label"] for model in models if not entry.facts.pruned or Path(model["model"]).name == name]
    engines = [run["engine"] for run in bench["runs"] if run["label"] in labels and run["load"] == speed["load"]]
    return max((taken.get("peak_device_bytes") or taken["peak_memory_bytes"] for taken in engines), default=None)
