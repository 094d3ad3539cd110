"""The results file of a benchmark: written in one step after every engine, judged pair by pair, read by `compare`."""

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddp_benchmarks.verdict import judge
from ddp_vllm.errors import OutputError, TextError

FORMAT = "ddp-vllm bench sharegpt 1"


def verdicts(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Compare each pruned model with the dense one, for each load, from the rounds that both finished.

    Throughput ratios are pruned over dense; latency ratios are dense over pruned. Above 1 is better in both.
    """
    runs = [run for run in results["runs"] if run["round"] >= 0 and "incomplete" not in run]
    speed = {(run["label"], run["load"], run["round"]): run["metrics"] for run in runs}
    answers = []
    for label in [model["label"] for model in results["models"][1:]]:
        for load in dict.fromkeys(run["load"] for run in runs):
            rounds = sorted(turn for name, at, turn in speed if name == label and at == load)
            pairs = [
                (speed["dense", load, turn], speed[label, load, turn])
                for turn in rounds
                if ("dense", load, turn) in speed
            ]
            if not pairs:
                continue
            answer: dict[str, Any] = {"label": label, "load": load, "pairs": len(pairs), "metrics": {}}
            for metric in pairs[0][0]:
                before, after = ([pair[side][metric] for pair in pairs] for side in (0, 1))
                if min(*before, *after) > 0:
                    verdict = judge(after, before) if metric.endswith("_ms") else judge(before, after)
                    answer["metrics"][metric] = verdict.to_json()
            if "requests_per_second" in answer["metrics"]:
                answer["sentence"] = answer["metrics"]["requests_per_second"]["sentence"]
                answers.append(answer)
    return answers


def check_file(output: Path, *, overwrite: bool) -> None:
    """Refuse, before any work, to replace results. Raises: OutputError."""
    if output.is_dir():
        raise OutputError(f"{output} is a folder; pass the name of a .json file")
    if output.exists() and not overwrite:
        raise OutputError(f"{output} exists; choose another --output or pass --overwrite")


def make_folder(folder: Path) -> None:
    """Make a folder of results before any work. Raises: OutputError if nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OutputError(f"{folder} cannot be written ({error}); choose another --output") from error


def write_results(results: Mapping[str, Any], output: Path) -> None:
    """Replace `output` in one step; readers see the old results or the new. Raises: OutputError."""
    write_text(json.dumps(results, indent=1, ensure_ascii=False), output)


def write_text(text: str, output: Path) -> None:
    """Replace `output` in one step. Raises: OutputError."""
    temporary = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, output)
    except OSError as error:
        raise OutputError(f"{output} cannot be written ({error}); choose another --output") from error


def read_results(path: Path) -> dict[str, Any]:
    """Read a results file back. Raises: TextError if it is missing or none of ours."""
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TextError(f"{path} cannot be read ({error}); pass a results file of ddp-vllm bench") from error
    if not isinstance(results, dict) or results.get("format") != FORMAT:
        raise TextError(f"{path} is no results file of this version ({FORMAT!r}); run ddp-vllm bench sharegpt again")
    return results
