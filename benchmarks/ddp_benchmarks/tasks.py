"""Selects the paper's tasks in lm-eval, and makes the same tasks read local files instead of the
Hub.

A local task is a short YAML file that includes lm-eval's own file. `include:` keeps its prompts,
choices, metrics and version; the other lines replace the source of the data. So local tasks always
match lm-eval's.
"""

import glob
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ddp_vllm.errors import SettingError, TextError
from ddp_vllm.evaluations import ACCURACY, TASKS
from ddp_vllm.remote_code.files import parse_json

SUITES = {
    # without c4, whose validation split on the Hub has 364,608 documents
    "paper": (*ACCURACY, "wikitext"),
    "nine": ACCURACY,
    "generative": tuple(name for name, task in TASKS.items() if task.is_generated),
    # the seven of its LLaMA tables
    "llama": tuple(name for name in ACCURACY if name not in ("rte", "mathqa")),
}


def choose_tasks(text: str) -> tuple[str, ...]:
    """Return the tasks named by `paper` or `arc_easy,piqa`. Raises: SettingError naming the unknown
    task."""
    names: list[str] = []
    for name in filter(None, (part.strip() for part in text.split(","))):
        if name not in SUITES and name not in TASKS:
            raise SettingError(f"unknown task {name!r}; known: {', '.join(TASKS)}, and the suites {', '.join(SUITES)}")
        names += SUITES.get(name, (name,))
    if not names:
        raise SettingError("--tasks is empty; pass paper, or names such as arc_easy,piqa")
    return tuple(dict.fromkeys(names))


def find_files(names: Iterable[str], data: Sequence[Path]) -> dict[str, Path]:
    """Return the local file of each task that has one.

    data: folders or files; later ones take precedence. Raises: TextError if one does not exist.
    """
    paths: dict[str, Path] = {}
    for path in data:
        if not path.exists():
            raise TextError(f"{path} does not exist; pass a folder with files such as {TASKS['piqa'].file}.jsonl")
        files = {file.stem: file for file in ([path] if path.is_file() else sorted(path.glob("*.jsonl")))}
        paths |= {name: files[TASKS[name].file] for name in names if TASKS[name].file in files}
    return paths


def write_task(name: str, file: Path, folder: Path) -> Path:
    """Write `folder/name.yaml`: lm-eval's task of that name, on the rows of `file`.

    Raises: TextError if the file is empty or not JSON, or its rows lack a field of the task.
    """
    import lm_eval

    task = TASKS[name]
    row = _first_row(file)
    if missing := [field for field in task.fields if field not in row]:
        raise TextError(f"{file}, line 1: no field {missing[0]!r}; rows of {name} require {', '.join(task.fields)}")
    config: dict[str, Any] = {
        "include": str(Path(lm_eval.__file__).parent / "tasks" / task.stock),
        "task": name,
        "dataset_path": "json",
        "dataset_name": None,
        # datasets expands patterns
        "dataset_kwargs": {"data_files": {task.split: glob.escape(str(file.resolve()))}},
        **{f"{split}_split": split if split == task.split else None for split in ("training", "validation", "test")},
    }
    if name == "gsm8k":  # its few-shot examples are other rows of the same file
        config["fewshot_split"] = task.split
    # rows that lm-eval's process_docs has prepared already
    if name == "hellaswag" and "query" in row:
        config["process_docs"] = None
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(config, indent=1), encoding="utf-8")  # JSON is YAML
    return path


def _first_row(file: Path) -> Mapping[str, Any]:
    try:
        with open(file, encoding="utf-8") as lines:
            row = parse_json(next(lines, "null"))
    except (OSError, ValueError) as error:
        raise TextError(f"{file}, line 1: not JSON ({error}); pass a file with one JSON object per line") from error
    if not isinstance(row, dict):
        raise TextError(f"{file}, line 1: not a JSON object; pass a file with one JSON object per line")
    return row


def file_sha256(file: Path) -> str:
    """Return the digest of a data file; two evaluations are comparable if their digests are
    equal."""
    return hashlib.sha256(file.read_bytes()).hexdigest()
