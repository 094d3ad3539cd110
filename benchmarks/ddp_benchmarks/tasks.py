"""The paper's tasks as lm-eval has them, and the same tasks reading local files instead of the hub.

A local task is four lines of YAML around lm-eval's own file: `include:` keeps its prompts, choices, metrics and
version, the other lines replace where the data come from. So the two can't drift apart.
"""

import glob
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_vllm.errors import SettingError, TextError


@dataclass(frozen=True, kw_only=True)
class Task:
    """One row of the suite."""

    heading: str
    stock: str
    """lm-eval's own file, below its tasks folder."""
    metric: str
    """The metric that counts here."""
    split: str
    """The split lm-eval scores."""
    file: str
    """Name of the local file, without .jsonl."""
    fields: tuple[str, ...]
    """What every row of the local file must have."""
    higher_is_better: bool = True


# The metric of each task is the one that gives the paper's dense rows (tables "dense" and "moe"): its LLaMA-7B has
# HellaSwag 76.00, ARC-c 44.28, ARC-e 72.10 and OBQA 44.00, which are that model's known length-normalised accuracies
# (plain ones: about 57, 42, 75 and 34). So: acc_norm wherever lm-eval reports it, acc for the other three.
TASKS = {
    "boolq": Task(
        heading="BoolQ",
        stock="super_glue/boolq/default.yaml",
        metric="acc",
        split="validation",
        file="boolq_val",
        fields=("passage", "question", "label"),
    ),
    "openbookqa": Task(
        heading="OBQA",
        stock="openbookqa/openbookqa.yaml",
        metric="acc_norm",
        split="test",
        file="openbookqa_test",
        fields=("question_stem", "choices", "answerKey"),
    ),
    "rte": Task(
        heading="RTE",
        stock="glue/rte/default.yaml",
        metric="acc",
        split="validation",
        file="rte_val",
        fields=("sentence1", "sentence2", "label"),
    ),
    "winogrande": Task(
        heading="WinoGrande",
        stock="winogrande/default.yaml",
        metric="acc",
        split="validation",
        file="winogrande_val",
        fields=("sentence", "option1", "option2", "answer"),
    ),
    "hellaswag": Task(
        heading="HellaSwag",
        stock="hellaswag/hellaswag.yaml",
        metric="acc_norm",
        split="validation",
        file="hellaswag_val",
        fields=("label",),
    ),
    "piqa": Task(
        heading="PIQA",
        stock="piqa/piqa.yaml",
        metric="acc_norm",
        split="validation",
        file="piqa_val",
        fields=("goal", "sol1", "sol2", "label"),
    ),
    "mathqa": Task(
        heading="MathQA",
        stock="mathqa/mathqa.yaml",
        metric="acc_norm",
        split="test",
        file="mathqa_test",
        fields=("Problem", "options", "correct"),
    ),
    "arc_easy": Task(
        heading="ARC-e",
        stock="arc/arc_easy.yaml",
        metric="acc_norm",
        split="test",
        file="ARC-Easy_test",
        fields=("question", "choices", "answerKey"),
    ),
    "arc_challenge": Task(
        heading="ARC-c",
        stock="arc/arc_challenge.yaml",
        metric="acc_norm",
        split="test",
        file="ARC-Challenge_test",
        fields=("question", "choices", "answerKey"),
    ),
    "wikitext": Task(
        heading="WikiText-2",
        stock="wikitext/wikitext.yaml",
        metric="word_perplexity",
        split="test",
        file="wikitext2_test_docs",
        fields=("page",),
        higher_is_better=False,
    ),
    "c4": Task(
        heading="C4",
        stock="c4/c4.yaml",
        metric="word_perplexity",
        split="validation",
        file="c4_sample",
        fields=("text",),
        higher_is_better=False,
    ),
}
ACCURACY = tuple(name for name, task in TASKS.items() if task.higher_is_better)
"""The nine tasks whose unweighted mean is the paper's "mean accuracy" for MoE and Qwen3."""
SUITES = {
    "paper": (*ACCURACY, "wikitext"),  # c4 only by name: its validation split on the hub has 364,608 documents
    "nine": ACCURACY,
    "llama": tuple(name for name in ACCURACY if name not in ("rte", "mathqa")),  # the seven of its LLaMA tables
}


def choose_tasks(text: str) -> tuple[str, ...]:
    """Turn `paper` or `arc_easy,piqa` into names. Raises: SettingError naming the unknown one."""
    names: list[str] = []
    for name in filter(None, (part.strip() for part in text.split(","))):
        if name not in SUITES and name not in TASKS:
            raise SettingError(f"unknown task {name!r}; known: {', '.join(TASKS)}, and the suites {', '.join(SUITES)}")
        names += SUITES.get(name, (name,))
    if not names:
        raise SettingError("--tasks is empty; pass paper, or names such as arc_easy,piqa")
    return tuple(dict.fromkeys(names))


def find_files(names: Iterable[str], data: Sequence[Path]) -> dict[str, Path]:
    """Return the local file of each task that has one; `data` are folders or single files, later ones win.

    Raises: TextError if a path in `data` does not exist.
    """
    found: dict[str, Path] = {}
    for path in data:
        if not path.exists():
            raise TextError(f"{path} does not exist; pass a folder with files such as {TASKS['piqa'].file}.jsonl")
        files = {file.stem: file for file in ([path] if path.is_file() else sorted(path.glob("*.jsonl")))}
        found |= {name: files[TASKS[name].file] for name in names if TASKS[name].file in files}
    return found


def write_task(name: str, file: Path, folder: Path) -> Path:
    """Write `folder/name.yaml`: lm-eval's own task of that name, on the rows of `file`.

    Raises: TextError if the file is empty, no JSON, or its rows lack a field of the task.
    """
    import lm_eval

    task = TASKS[name]
    row = _first_row(file)
    if missing := [field for field in task.fields if field not in row]:
        raise TextError(f"{file}, line 1: no field {missing[0]!r}; rows of {name} need {', '.join(task.fields)}")
    config: dict[str, Any] = {
        "include": str(Path(lm_eval.__file__).parent / "tasks" / task.stock),
        "task": name,
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {task.split: glob.escape(str(file.resolve()))}},  # it reads names as patterns
        **{f"{split}_split": split if split == task.split else None for split in ("training", "validation", "test")},
    }
    if name == "hellaswag" and "query" in row:  # rows that were prepared already, as lm-eval's process_docs would
        config["process_docs"] = None
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(config, indent=1), encoding="utf-8")  # JSON is YAML
    return path


def _first_row(file: Path) -> Mapping[str, Any]:
    try:
        with open(file, encoding="utf-8") as lines:
            row = json.loads(next(lines, "null"))
    except (OSError, ValueError) as error:
        raise TextError(f"{file}, line 1: no JSON ({error}); pass a file with one JSON object a line") from error
    if not isinstance(row, dict):
        raise TextError(f"{file}, line 1: no JSON object; pass a file with one JSON object a line")
    return row


def file_sha256(file: Path) -> str:
    """Return the digest of a data file; the evaluations of two models are comparable if it is the same."""
    return hashlib.sha256(file.read_bytes()).hexdigest()
