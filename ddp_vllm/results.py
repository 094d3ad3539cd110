"""The results file of a benchmark, and the verdicts in it: a ratio, an interval and a sentence."""

import json
import secrets
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from ddp_vllm.errors import TextError
from ddp_vllm.intervals import Verdict, judge
from ddp_vllm.machine import Measured, hardware, now, versions
from ddp_vllm.model_facts import ModelFacts
from ddp_vllm.output import write_text
from ddp_vllm.schema import AtLeastZero, Count, Finite, Kind, SchemaError, checked

FORMAT = "ddp-vllm bench sharegpt 1"
PER_TOKEN = {"output_tokens_per_second", "p50_tpot_ms", "p99_tpot_ms"}
"""Metrics that do not compare models with different tokens."""
TIMES = {"p50_tpot_ms": "time per output token: ", "p50_e2el_ms": "time per answer: "}
BEGINS = '{\n "format": "ddp-vllm '
"""The first characters of a results file and of a profile."""


@dataclass(frozen=True, kw_only=True)
class Contestant(ModelFacts):
    """A model of a benchmark."""

    label: str
    """Its name there; the first one is `dense`."""


class Run(msgspec.Struct, kw_only=True):
    """One engine at one load."""

    round: int
    """From 0; −1 is the discarded warm-up."""
    label: str
    load: str
    metrics: dict[str, AtLeastZero] = {}
    engine: dict[str, Finite]
    incomplete: str = ""
    """Why its speed is not comparable, if it is not."""


class LoadVerdict(msgspec.Struct, kw_only=True):
    """A pruned model compared with the dense one at one load."""

    label: str
    load: str
    pairs: Count
    metrics: dict[str, Verdict]
    sentence: str
    """The verdict on it; the metric is named unless it is requests/s."""

    def __post_init__(self) -> None:
        if main_metric(self.load, self.metrics) not in self.metrics:
            raise SchemaError("this verdict lacks its main metric")

    @property
    def main(self) -> Verdict:
        """The verdict on the main metric."""
        return self.metrics[main_metric(self.load, self.metrics)]


class Bench(Measured, kw_only=True):
    """The results of one `bench sharegpt`, complete or not."""

    class Settings(msgspec.Struct):
        """The settings that pages show."""

        mode: str
        pairs: Count
        seed: int
        engine_arguments: list[str] = []

    class Sample(msgspec.Struct):
        """The conversations that were replayed."""

        conversations: Count
        prompt_tokens: Count
        output_tokens: Count

    complete: bool
    reason: str | None
    tokens_differ: str = ""
    """How the tokens of the models differ. Then all models are asked for the same characters."""
    started: str
    settings: Settings
    sample: Sample
    models: Annotated[list[Contestant], msgspec.Meta(min_length=1)]
    runs: list[Run]
    verdicts: list[LoadVerdict] = msgspec.field(default_factory=list)

    def __post_init__(self) -> None:
        self.engine_arguments = self.settings.engine_arguments

    @property
    def loads(self) -> list[str]:
        return list(dict.fromkeys(run.load for run in self.runs))

    def measured(self, label: str, load: str) -> list[Run]:
        """Return the complete runs of one model at one load, without the warm-up round."""
        return [
            run for run in self.runs if (run.label, run.load) == (label, load) and run.round >= 0 and not run.incomplete
        ]


def verdicts(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Compare each pruned model with the dense one at each load, in the rounds that both finished;
    return `LoadVerdict`s as the results file has them.

    Throughput ratios are pruned over dense; latency ratios are dense over pruned. Above 1 is better
    in both.
    """
    bench, judged = msgspec.convert({**results, "verdicts": []}, Bench), list[LoadVerdict]()
    for model in bench.models[1:]:
        for load in bench.loads:
            dense, pruned = (
                {run.round: run.metrics for run in bench.measured(label, load)} for label in ("dense", model.label)
            )
            rounds, metrics = sorted(dense.keys() & pruned.keys()), dict[str, Verdict]()
            known = [*(dense[rounds[0]] if rounds else ())]
            if "output_characters_per_second" in known:
                known = [metric for metric in known if metric not in PER_TOKEN]
            main = main_metric(load, known)
            for metric in known:
                before, after = ([runs[turn][metric] for turn in rounds] for runs in (dense, pruned))
                if min(*before, *after) > 0:
                    metrics[metric] = judge(after, before) if metric.endswith("_ms") else judge(before, after)
            if main in metrics:
                sentence = TIMES.get(main, "") + metrics[main].sentence
                judged.append(
                    LoadVerdict(label=model.label, load=load, pairs=len(rounds), metrics=metrics, sentence=sentence)
                )
    return list(msgspec.to_builtins(judged))


def main_metric(load: str, metrics: Container[str]) -> str:
    """Return the main metric of a load: requests/s, but if requests arrive at a fixed rate time per
    output token, or per answer if the tokens of the models differ.

    At a fixed rate below saturation, all models finish equally many requests per second.
    """
    if "requests/s" not in load:
        return "requests_per_second"
    return "p50_tpot_ms" if "p50_tpot_ms" in metrics else "p50_e2el_ms"


def new_results(form: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the first fields of a results file: format, time, settings, hardware and versions."""
    facts = {"format": form, "started": now(), "settings": dict(settings)}
    return facts | {"hardware": hardware(), "versions": versions()}


def write_results(results: Mapping[str, Any], output: Path) -> None:
    """Replace `output` in one step, so that readers see either the old or the new results. Raises:
    OutputError."""
    write_text(json.dumps(results, indent=1, ensure_ascii=False), output)


def write_new_results(results: Mapping[str, Any], folder: Path, kind: str) -> Path:
    """Write results into a file of their own, `KIND_<now>_<4 hex digits>.json`, and return it. Raises: OutputError."""
    file = folder / f"{kind}_{now().replace(':', '-')}_{secrets.token_hex(2)}.json"
    write_results(results, file)
    return file


def undamaged(results: Any, kind: type[Kind], path: Path) -> Kind:
    """Return the content of a results file as `kind`. Raises: TextError, naming the fault."""
    try:
        return checked(results, kind, "it")
    except SchemaError as error:
        raise TextError(f"{path} is damaged: {error}; move it away, or measure again") from error
