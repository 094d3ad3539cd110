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


def measured(results: Mapping[str, Any], label: str, load: str) -> list[Mapping[str, Any]]:
    """Return the runs of one model at one load that count: complete, and not of the warm-up round."""
    return [
        run
        for run in results["runs"]
        if run["label"] == label and run["load"] == load and run["round"] >= 0 and "incomplete" not in run
    ]


def verdicts(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Compare each pruned model with the dense one, for each load, from the rounds that both finished.

    Throughput ratios are pruned over dense; latency ratios are dense over pruned. Above 1 is better in both.
    """
    answers = []
    for model in results["models"][1:]:
        for load in dict.fromkeys(run["load"] for run in results["runs"]):
            dense, pruned = (
                {run["round"]: run["metrics"] for run in measured(results, label, load)}
                for label in ("dense", model["label"])
            )
            pairs = [(dense[turn], pruned[turn]) for turn in sorted(dense.keys() & pruned.keys())]
            if not pairs:
                continue
            answer: dict[str, Any] = {"label": model["label"], "load": load, "pairs": len(pairs), "metrics": {}}
            for metric in pairs[0][0]:
                before, after = ([pair[side][metric] for pair in pairs] for side in (0, 1))
                if min(*before, *after) > 0:
                    verdict = judge(after, before) if metric.endswith("_ms") else judge(before, after)
                    answer["metrics"][metric] = verdict.to_json()
            if main_metric(load) in answer["metrics"]:
                answers.append(answer | {"metric": main_metric(load), "sentence": sentence(answer)})
    return answers


def main_metric(load: str) -> str:
    """Return the metric that says how much faster a model is at a load.

    That is requests/s, but where they arrive at a rate: below saturation every model then finishes as many as arrive.
    """
    return "p50_tpot_ms" if "requests/s" in load else "requests_per_second"


def main_verdict(answer: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the verdict on the metric that counts at the load of an answer of `verdicts`."""
    return dict(answer["metrics"][main_metric(answer["load"])])


def sentence(answer: Mapping[str, Any]) -> str:
    """Say an answer of `verdicts` in words; the metric is named where it is not requests/s."""
    timed = main_metric(answer["load"]).endswith("_ms")
    return ("time per output token: " if timed else "") + str(main_verdict(answer)["sentence"])


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
