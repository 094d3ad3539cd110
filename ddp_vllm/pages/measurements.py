"""Gathers the sizes, evaluations and benchmarks of pruned checkpoints.

Results are found in a checkpoint's folder and its `eval` folder, or passed by name. They belong to the model whose id
they store (`model_facts.model_id`), wherever that model is now. Two evaluations are only compared if they asked the
same questions.
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
from ddp_vllm.results import FORMAT, check_results, measured, on_gpu

Interval = tuple[float, float, float]
"""A value and the ends of its interval."""
Results = Mapping[str, Any]
"""The results of one run of bench or eval, or a part of them, as in the file."""
Found = Mapping[str, Sequence[Results]]
"""All results files by kind: `bench`, `tasks` and `text`."""
LARGEST_FILE = 100 * 2**20  # bytes; larger files in a model folder are not results


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One model on the page."""

    facts: ModelFacts
    sparsity: float | None = None
    """The fraction of units to remove, from the recipe; None for another budget than `units`."""
    quality: Results | None = None
    """lm-eval's results."""
    speeds: tuple[Results, ...] = ()
    """Verdicts of `bench sharegpt`, each with the `bench` it comes from."""
    perplexities: tuple[float, float] | None = None
    """On held-out text of the kind it was trained on: the dense model's, and its own."""
    heldout: Interval | None = None
    """Its own perplexity over the dense model's."""
    texts: Mapping[str, Results] = field(default_factory=dict)
    """The results of `eval --text`, by text."""
    predicted: Interval | None = None
    """Predicted speedup of a budget in measured time, with the range of the profile's rounds."""

    @property
    def accuracy(self) -> tuple[float, float, int] | None:
        """Mean accuracy, its standard error, and the number of tasks."""
        mean = mean_accuracy(self.quality) if self.quality else None
        return (mean["value"], mean["stderr"], len(mean["tasks"])) if mean else None

    @property
    def speed(self) -> Results | None:
        """The verdict for the picture: offline, else all at once, else the first load."""
        order = ("offline", "all at once", "")
        return next((speed for start in order for speed in self.speeds if speed["load"].startswith(start)), None)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Everything the page shows."""

    dense: Entry | None
    pruned: tuple[Entry, ...]
    benches: tuple[Results, ...]
    notes: Mapping[str, str]
    """A sentence on each missing or incomparable result -> the command that corrects it, or ""."""

    @property
    def entries(self) -> tuple[Entry, ...]:
        return (self.dense, *self.pruned) if self.dense else self.pruned


def collect(folders: Sequence[Path], *, results: Sequence[Path] = (), dense: str | None = None) -> Comparison:
    """Gather everything about the pruned checkpoints in `folders` and their dense model.

    Raises: CheckpointError if a folder is not a pruned checkpoint; SettingError if they come from different models;
        TextError if a passed file is not a results file.
    """
    checkpoints = [read_checkpoint(folder) for folder in folders]
    names = [folder.resolve().name for folder in folders]
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise CheckpointError(f"two folders are called {repeated}; rename one, or the page cannot tell them apart")
    dense = dense or _common_dense(checkpoints)
    nearby = [*folders, *([Path(dense) if Path(dense).is_dir() else default_output(dense)] if dense else [])]
    found = _read_all(nearby, results)
    notes: dict[str, str] = {}
    entries = tuple(_entry(checkpoint, dense, found, notes) for checkpoint in checkpoints)
    reference = _dense_entry(dense, found, entries, notes)
    used = {id(speed["bench"]) for entry in entries for speed in entry.speeds}
    benches = tuple(bench for bench in found["bench"] if id(bench) in used)
    return Comparison(dense=reference, pruned=entries, benches=benches, notes=notes)


def _dense_of(checkpoint: Checkpoint) -> str | None:
    """Return the folder or hub name of the model that a checkpoint was pruned from, if it is known."""
    provenance = local_provenance(checkpoint.folder / MASKS_FILE)
    return str(provenance.get("applied_to") or provenance.get("recipe", {}).get("model", "")) or None


def _common_dense(checkpoints: Sequence[Checkpoint]) -> str | None:
    """Return the model that all checkpoints were pruned from, as the first one names it. Raises: SettingError."""
    found = [dense for checkpoint in checkpoints if (dense := _dense_of(checkpoint))]
    parents = sorted(set(map(identify, found)))
    if len(parents) > 1:
        raise SettingError(
            f"the folders were pruned from different models ({', '.join(parents)}); compare those of one model, or "
            "pass --dense if these are copies of one"
        )
    return found[0] if found else None


def _read_all(nearby: Sequence[Path], passed: Sequence[Path]) -> Found:
    """Read each results file once: the passed files, and the files in passed folders and in folders of models."""
    patterns = ("*.json", "against-*/*.json", "eval/*.json", "eval/against-*/*.json")
    folders, files = [path for path in passed if path.is_dir()], [path for path in passed if not path.is_dir()]
    inside = [path for folder in (*nearby, *folders) for pattern in patterns for path in sorted(folder.glob(pattern))]
    small = [path for path in inside if path.stat().st_size < LARGEST_FILE]
    named, paths = {path.resolve() for path in files}, {path.resolve(): path for path in (*files, *small)}
    found: dict[str, list[Results]] = {"bench": [], "tasks": [], "text": []}
    empty = {folder: folder.resolve() for folder in folders}
    for resolved, path in paths.items():
        if (content := _read(path, strict=resolved in named)) is not None:
            found[_kind(content)].append(content)
            empty = {folder: home for folder, home in empty.items() if not resolved.is_relative_to(home)}
    for folder in empty:
        raise TextError(f"{folder} holds no results of ddp-vllm bench or eval; pass the folder of eval -o, or a file")
    return found


def _kind(content: Any) -> str:
    """Return the kind of a results file; "" for any other file."""
    if not isinstance(content, dict):
        return ""
    by_format = {FORMAT: "bench", FIDELITY_FORMAT: "text"}
    return by_format.get(str(content.get("format")), "tasks" if "ddp_vllm" in content else "")


def _read(path: Path, *, strict: bool) -> Results | None:
    """Read a results file. For any other file, raise if the user passed it (`strict`), and return None otherwise.

    Raises: TextError, also for a results file that is damaged.
    """
    try:
        content = read_json(path)
    except (OSError, ValueError) as error:
        if strict:
            raise TextError(f"{path} cannot be read ({error}); pass a results file of bench or eval") from error
        return None
    if kind := _kind(content):
        check_all = check_results if kind == "bench" else check_evaluation
        check_all(content, path)
        return dict(content)
    if strict:
        raise TextError(f"{path} is not a results file of ddp-vllm bench or eval; run one of them first")
    return None


def _entry(checkpoint: Checkpoint, dense: str | None, found: Found, notes: dict[str, str]) -> Entry:
    """Return a pruned model with its measurements, and add notes on missing ones."""
    folder, recipe = checkpoint.folder, checkpoint.provenance.get("recipe", {})
    facts = describe_model(str(folder))
    quality, speeds = _best_evaluation(found["tasks"], facts, notes), _speeds(found["bench"], facts, notes)
    if quality is None:
        notes[f"{facts.name} was not evaluated"] = f"ddp-vllm eval {folder}"
    if not speeds:
        command = f"ddp-vllm bench sharegpt --dense {_dense_of(checkpoint) or dense or 'MODEL'} --pruned {folder}"
        notes[f"{facts.name} was not measured"] = command
    stated, latency = checkpoint.provenance.get("perplexity"), checkpoint.provenance.get("latency")
    counts_units = recipe.get("budget", "units") == "units" and recipe.get("attention_sparsity") is None
    return Entry(
        facts=facts,
        sparsity=recipe.get("sparsity") or None if counts_units else None,
        quality=quality,
        speeds=speeds,
        perplexities=(stated["dense"], stated.get("recovered", stated["pruned"])) if stated else None,
        heldout=perplexity_ratio(stated or {}),
        texts=_texts(found["text"], facts, notes),
        predicted=(latency["speedup"], latency["low"], latency["high"]) if latency else None,
    )


def _find(models: Sequence[Results], facts: ModelFacts, notes: dict[str, str]) -> Results | None:
    """Return the entry of this model among a results file's models; among copies, the entry with its folder."""
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


def _best_evaluation(evaluations: Iterable[Results], facts: ModelFacts, notes: dict[str, str]) -> Results | None:
    """Return the evaluation of a model with the most tasks, then the most questions, then the latest date."""
    mine = [each for each in evaluations if _find([each["ddp_vllm"]["model"]], facts, notes)]
    return max(mine, key=lambda each: (len(each["results"]), _num_asked(each), each.get("date") or 0), default=None)


def _texts(evaluations: Iterable[Results], facts: ModelFacts, notes: dict[str, str]) -> dict[str, Results]:
    """Return the results of the latest `eval --text` of a model, by text."""
    latest: dict[str, Results] = {}
    for each in sorted(evaluations, key=lambda each: str(each["started"])):
        if _find([each["model"]], facts, notes):
            latest |= each["texts"]
    return latest


def _num_asked(evaluation: Results) -> int:
    return sum(count.get("effective", 0) for count in evaluation.get("n-samples", {}).values())


def _speeds(benches: Iterable[Results], facts: ModelFacts, notes: dict[str, str]) -> tuple[Results, ...]:
    """Return a model's verdict at each load: of the latest benchmark that ended, or else of the latest."""
    latest: dict[str, Results] = {}
    for bench in sorted(benches, key=lambda bench: (bench["complete"], bench["started"])):
        if model := _find(bench["models"][1:], facts, notes):
            mine = [verdict for verdict in bench.get("verdicts", []) if verdict["label"] == model["label"]]
            latest |= {verdict["load"]: {**verdict, "bench": bench} for verdict in mine}
    return tuple(latest.values())


def _dense_entry(dense: str | None, found: Found, entries: Sequence[Entry], notes: dict[str, str]) -> Entry | None:
    """Return the dense model's entry, with the evaluation that asked the same questions as the pruned ones'."""
    baselines = [bench["models"][0] for bench in found["bench"]]
    dense = dense or next((model["model"] for model in baselines), None)
    if dense is None:
        return None
    try:
        facts = describe_model(dense)
    except ModelError:  # a folder of another machine
        facts = ModelFacts(model=identify(dense), name=bare_name(dense), pruned=False)
    if facts.pruned:
        raise SettingError(f"{dense} is pruned itself; pass the dense model with --dense")
    for entry in entries:
        others = [model for speed in entry.speeds if not _is_same(model := speed["bench"]["models"][0], facts)]
        notes |= {f"{entry.facts.name} was measured against {each['model']}, not {dense}": "" for each in others[:1]}
    wanted = [conditions(entry.quality) for entry in entries if entry.quality]
    same = [each for each in found["tasks"] if not wanted or conditions(each) == wanted[0]]
    quality = _best_evaluation(same, facts, notes)
    if quality is None:
        command = f"ddp-vllm eval {entries[0].facts.model} --against {dense}"
        notes["the dense model was not evaluated on the same rows"] = command
    if any(others != wanted[0] for others in wanted[1:]):
        notes["the models were not evaluated on the same rows, so their accuracies can't be compared"] = ""
    known = [model for model in baselines if _is_same(model, facts)]
    if known and facts.parameters is None:
        facts = ModelFacts(**{key: known[0].get(key) for key in ModelFacts.__dataclass_fields__})
    return Entry(facts=facts, quality=quality)


def conditions(evaluation: Results) -> tuple[Any, ...]:
    """Return the conditions that two comparable evaluations share: tasks, limit, context length and data."""
    ours = evaluation["ddp_vllm"]
    data = ours["data"] if isinstance(ours["data"], str) else sorted(ours["data"].items())
    settings = ours["settings"]
    return (sorted(evaluation["results"]), settings["limit"], settings["max_length"], json.dumps(data))


def difference(entry: Entry, dense: Entry | None) -> tuple[float, float] | None:
    """Return the difference of mean accuracy from the dense model on the same questions, and half its 95 % interval."""
    both = _comparable(entry, dense)
    return mean_difference(*both) if both else None


def retained(entry: Entry, dense: Entry | None) -> float | None:
    """Return the retained fraction of the dense mean accuracy, if both models answered the same questions."""
    both = _comparable(entry, dense)
    ours, theirs = map(mean_accuracy, both) if both else (None, None)
    return ours["value"] / theirs["value"] if ours and theirs and theirs["value"] else None


def _comparable(entry: Entry, dense: Entry | None) -> tuple[Results, Results] | None:
    """Return both evaluations if there are two, of the same questions."""
    if not (dense and entry.quality and dense.quality and conditions(entry.quality) == conditions(dense.quality)):
        return None
    return entry.quality, dense.quality


def engine_fact(entry: Entry, comparison: Comparison, fact: str) -> float | None:
    """Return the median of a value that a model's engines reported in the benchmark of the picture.

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
