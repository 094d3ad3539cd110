"""How much faster does vLLM answer ShareGPT prompts with the pruned model, and is the difference
real?

Offline, `vllm bench throughput` receives all prompts at once. In serve mode, `vllm bench serve`
sends the prompts to `vllm serve` at chosen rates. Every round measures each model once, in rotating
order, with a new engine that runs alone. A first round warms disk and compile caches and is
discarded. All models answer the same prompts with the same number of tokens, counted by the dense
model's tokenizer. A model with other tokens, as after `trim`, generates as many of its own as the
same answers have, so that requests and characters per second compare, but not tokens per second.
"""

import json
import math
import shutil
import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from itertools import product, starmap
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import convert

from ddp_benchmarks.conversations import (
    SHARE_GPT,
    Sample,
    download_share_gpt,
    draw_sample,
    read_conversations,
    write_sample,
)
from ddp_benchmarks.engine import Engine, Server, vllm_command
from ddp_benchmarks.models import max_model_len, token_counter
from ddp_benchmarks.protocol import check_engine_arguments, rotated
from ddp_vllm.errors import Printer, ServingError, SettingError, echo, line_printer
from ddp_vllm.model_facts import describe_model, is_pruned, tokens_differ, unrelated
from ddp_vllm.output import check_file
from ddp_vllm.results import BEGINS, FORMAT, Bench, new_results, verdicts, write_results
from ddp_vllm.settings import Settings, setting

SET_HERE = (  # vLLM's options that would change what is compared, or where it is found
    *("--model", "--tokenizer", "--max-model-len", "--host", "--port", "--served-model-name", "--seed"),
    *("--dataset-name", "--dataset-path", "--num-prompts", "--num-warmups", "--output-json"),
    "--enable-prefix-caching",
)
LATENCIES = ("ttft", "tpot", "e2el")
PERCENTILES = (50, 99)
_LATENCY_METRICS = [f"p{percentile}_{latency}_ms" for latency in LATENCIES for percentile in PERCENTILES]


class Requests(NamedTuple):
    """The requests to one model, in the tokens of one tokenizer."""

    tokenizer: str
    sample: Sample
    is_by_characters: bool
    """Whether models are compared whose tokens differ."""

    def speeds(self, requests_per_second: float, output_tokens_per_second: float) -> dict[str, float]:
        metrics = {
            "requests_per_second": requests_per_second,
            "output_tokens_per_second": output_tokens_per_second,
        }
        if self.is_by_characters:
            per_request = self.sample.output_characters / len(self.sample.entries)
            metrics["output_characters_per_second"] = requests_per_second * per_request
        return metrics


class Load(NamedTuple):
    """The arrival of requests at a server."""

    request_rate: float
    """Requests per second; infinity sends all at once."""
    max_concurrency: int | None
    """Maximum number of requests in flight; None: no limit."""

    @property
    def label(self) -> str:
        rate = "all at once" if self.request_rate == math.inf else f"{self.request_rate:g} requests/s"
        return rate if self.max_concurrency is None else f"{rate}, {self.max_concurrency} in flight"


@dataclass(frozen=True, kw_only=True)
class BenchSettings(Settings):
    """Every setting of one benchmark; saved in its results."""

    dense: str
    pruned: tuple[str, ...]
    mode: str = setting("offline", "All prompts at once, or requests over HTTP.", choices=("offline", "serve"))
    num_prompts: int = setting(1000, "Conversations to replay.", least=1)
    pairs: int = setting(5, "Measurements of each model.", least=1)
    dataset: Path | None = setting(
        None, "Conversations in any form that prune reads.", "--dataset-path", shown="ShareGPT of the Hub"
    )
    seed: int = setting(0, "Of everything random.", least=0)
    max_model_len: int = setting(
        2048, "Context of the engines, in tokens. vLLM's ShareGPT sampler skips anything longer than 2048.", least=8
    )
    request_rate: tuple[float, ...] = setting(
        (math.inf,), "Requests/s. Infinity sends all at once.", may_be_infinite=True, least=0.001
    )
    max_concurrency: tuple[int, ...] = setting((), "Requests in flight.", least=1, shown="no limit")
    warmups: int = setting(2, "Requests before an engine is measured.", "--num-warmups", least=0)
    warmup_round: bool = setting(True, "Skip the discarded round before the pairs.")
    engine_arguments: tuple[str, ...] = setting((), "Passed to every vLLM engine.", is_argument=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_engine_arguments(self.engine_arguments, *SET_HERE)
        if not self.pruned:
            raise SettingError("there is no pruned model to compare; pass --pruned DIR")

    @property
    def loads(self) -> list[Load]:
        return list(starmap(Load, product(self.request_rate, self.max_concurrency or (None,))))

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as results state them; JSON has no infinity."""
        stated = asdict(self) | {"dataset": str(self.dataset) if self.dataset else "/".join(SHARE_GPT)}
        del stated["request_rate"], stated["max_concurrency"]
        return stated | {"loads": [load.label for load in self.loads]}


def results_file(settings: BenchSettings, output: Path | None, *, overwrite: bool) -> Path:
    """Return the results file: `output`, or `sharegpt-MODE.json` in the first pruned folder, where
    `compare` finds it.

    Raises: OutputError if the file exists; SettingError if a `--pruned` model is not pruned and there
        is no `output`. With `output`, a model compared with itself shows this machine's noise.
    """
    dense = [
        model for model in settings.pruned if (Path(model) / "config.json").exists() and not is_pruned(Path(model))
    ]
    if dense and not output:
        raise SettingError(
            f"{dense[0]} is not pruned; pass a folder of ddp-vllm prune, or -o FILE to compare dense models"
        )
    folder = Path(settings.pruned[0]) if settings.pruned else Path()
    file = output or (folder if folder.is_dir() else Path()) / f"sharegpt-{settings.mode}.json"
    check_file(file, overwrite=overwrite, begins=BEGINS)
    return file


def run_benchmark(settings: BenchSettings, output: Path, *, verbose: bool) -> dict[str, Any]:
    """Measure all models and return the results, which are written to `output` after every engine.

    verbose: print them at the end, also those of an interrupted run.

    Raises: ServingError if an engine fails, after writing the results so far with `complete: false`
    and the reason; SettingError, TextError, ModelError, OutputError before any engine starts.
    """
    vllm_command()
    print_line = line_printer(verbose)
    models = [settings.dense, *settings.pruned]
    described = [describe_model(model) for model in models]
    for pruned in settings.pruned:
        if note := unrelated(settings.dense, pruned):
            print_line(f"note: {note}")
    labels = _labels([model.name for model in described])
    facts = [model.to_json() | {"label": label} for model, label in zip(described, labels, strict=True)]
    settings = _fit(settings, print_line)
    differing = {model: words for model in settings.pruned if (words := tokens_differ(settings.dense, model))}
    sample, *others = _draw(settings, [*differing])
    requests = {model: Requests(settings.dense, sample, bool(differing)) for model in models}
    requests |= {model: Requests(model, other, True) for model, other in zip(differing, others, strict=True)}
    for different in differing.values():
        print_line(f"note: {different}, so requests and characters per second compare, but not tokens per second")
    print_line(sample.describe())
    results = new_results(FORMAT, settings.to_dict()) | {
        "complete": False,
        "reason": "still running",
        "tokens_differ": "; ".join(differing.values()),
        "sample": sample.to_json(),
        "models": facts,
        "runs": [],
        "verdicts": [],
    }
    write_results(results, output)
    folder = Path(tempfile.mkdtemp(prefix="ddp-vllm-bench-"))
    write_sample(sample, folder / "sharegpt.json")
    try:
        for turn, model, label in _schedule(settings, models, labels):
            print_line(f"{'warm-up' if turn < 0 else f'pair {turn + 1} of {settings.pairs}'}: {label}")
            with closing(_measure(settings, model, requests[model], folder)) as runs:
                for run in runs:
                    results["runs"].append({"round": turn, "label": label, **run})
                    write_results(results, output)
                    if reason := run.get("incomplete"):
                        raise ServingError(f"{label}: {reason}")
        results["complete"], results["reason"] = True, None
    except (ServingError, KeyboardInterrupt) as error:
        results["reason"] = str(error) or "interrupted"
        raise
    finally:
        results["verdicts"] = verdicts(results)
        write_results(results, output)
        if verbose and results["runs"]:
            from ddp_benchmarks.tables import print_report

            print_report(convert(results, Bench))
            echo(f"{output} has vLLM's raw results")
        if results["complete"]:
            shutil.rmtree(folder, ignore_errors=True)  # otherwise error messages refer to its logs
    return results


def _labels(names: Sequence[str]) -> list[str]:
    """Return unique labels; the dense model is the first."""
    names = ["dense", *names[1:]]
    return [f"{name} ({i})" if names.count(name) > 1 and i else name for i, name in enumerate(names)]


def _fit(settings: BenchSettings, print_line: Printer) -> BenchSettings:
    """Limit the context to the shortest of all models, and print it; vLLM refuses a longer one."""
    longest = min(filter(None, map(max_model_len, (settings.dense, *settings.pruned))), default=settings.max_model_len)
    if longest >= settings.max_model_len:
        return settings
    print_line(f"the context is {longest:,} tokens instead of {settings.max_model_len:,}: a model takes no more")
    return replace(settings, max_model_len=longest)


def _draw(settings: BenchSettings, others: Sequence[str]) -> list[Sample]:
    """Return the conversations with the tokens of the dense model, and with those of each other model."""
    count, *counters = map(token_counter, [settings.dense, *others])
    sample = draw_sample(
        read_conversations(settings.dataset or download_share_gpt()),
        count,
        *counters,
        num_prompts=settings.num_prompts,
        seed=settings.seed,
        max_model_len=settings.max_model_len,
    )
    return [sample, *map(sample.counted, counters)]


def _schedule(settings: BenchSettings, models: list[str], labels: list[str]) -> Iterator[tuple[int, str, str]]:
    """Yield (round, model, label): the discarded round −1, then the pairs in rotating order."""
    for turn in range(-1 if settings.warmup_round else 0, settings.pairs):
        for model, label in rotated(list(zip(models, labels, strict=True)), max(turn, 0)):
            yield turn, model, label


def _measure(
    settings: BenchSettings, model: str, requests: Requests, folder: Path
) -> Generator[dict[str, Any], None, None]:
    """Yield one run per load: vLLM's raw result, our metrics, and the engine's memory and startup
    times."""
    prefix = f"{time.strftime('%H%M%S')}-{len(list(folder.iterdir()))}"
    engine = ["--max-model-len", str(settings.max_model_len), *settings.engine_arguments]
    # otherwise prompts of the warm-up are answered from the cache
    engine += ["--no-enable-prefix-caching"]
    if settings.mode == "offline":
        yield _throughput(settings, model, requests, folder / prefix, engine)
        return
    arguments = ["--tokenizer", requests.tokenizer, *engine]
    with Server(model, arguments=arguments, log=folder / f"{prefix}-server.log") as server:
        for number, load in enumerate(settings.loads):
            yield _serve(settings, server, load, requests, folder / f"{prefix}-{number}")


def _dataset_arguments(settings: BenchSettings, folder: Path, requests: Requests) -> list[str]:
    arguments = ["--tokenizer", requests.tokenizer, "--dataset-name", "sharegpt"]
    arguments += ["--dataset-path", str(folder / "sharegpt.json"), "--seed", str(settings.seed)]
    return [*arguments, "--num-prompts", str(len(requests.sample.entries)), "--num-warmups", str(settings.warmups)]


def _throughput(
    settings: BenchSettings, model: str, requests: Requests, stem: Path, engine: list[str]
) -> dict[str, Any]:
    """Run `vllm bench throughput` once."""
    raw_file = stem.with_suffix(".json")
    command = ["bench", "throughput", "--model", model, "--output-json", str(raw_file)]
    command += [*_dataset_arguments(settings, stem.parent, requests), *engine]
    with Engine(command, log=stem.with_suffix(".log")) as process:
        process.wait()
    raw = _read_raw(raw_file)
    run = {
        "load": "offline",
        "metrics": requests.speeds(
            raw["requests_per_second"], (raw["total_num_tokens"] - requests.sample.prompt_tokens) / raw["elapsed_time"]
        ),
        "engine": process.facts(),
        "raw": raw,
    }
    return run | _incomplete(raw["num_requests"], raw["total_num_tokens"], requests.sample)


def _serve(settings: BenchSettings, server: Server, load: Load, requests: Requests, stem: Path) -> dict[str, Any]:
    """Run `vllm bench serve` once against a running server."""
    raw_file = stem.with_suffix(".json")
    command = ["bench", "serve", "--model", server.model, "--base-url", server.address, "--backend", "openai"]
    command += ["--endpoint", "/v1/completions", "--ignore-eos", "--temperature", "0", "--disable-tqdm"]
    command += [*_dataset_arguments(settings, stem.parent, requests), "--request-rate", str(load.request_rate)]
    command += ["--percentile-metrics", ",".join(LATENCIES), "--metric-percentiles", ",".join(map(str, PERCENTILES))]
    command += ["--save-result", "--result-dir", str(stem.parent), "--result-filename", raw_file.name]
    if load.max_concurrency is not None:
        command += ["--max-concurrency", str(load.max_concurrency)]
    with Engine(command, log=stem.with_suffix(".log")) as client:
        code = client.process.wait()
    run: dict[str, Any] = {"load": load.label, "engine": server.facts()}
    if server.process.poll() is not None:
        return run | {"incomplete": f"the server died during the measurement; it {server.failure()}"}
    if code:
        raise ServingError(f"{client.describe()} {client.failure()}")
    raw = _read_raw(raw_file)
    metrics = requests.speeds(raw["request_throughput"], raw["output_throughput"])
    metrics |= {name: raw[name] for name in _LATENCY_METRICS if name in raw}
    tokens = raw["total_input_tokens"] + raw["total_output_tokens"]
    return run | {"metrics": metrics, "raw": raw} | _incomplete(raw["completed"], tokens, requests.sample)


def _read_raw(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise ServingError(f"vLLM ended without results ({error}); see {path.with_suffix('.log')}") from error


def _incomplete(requests: int, tokens: int, sample: Sample) -> dict[str, str]:
    """Return why a run is incomplete, if it is: speeds are comparable only for equal prompts and
    numbers of tokens."""
    expected = sample.prompt_tokens + sample.output_tokens
    if requests == len(sample.entries) and tokens == expected:
        return {}
    return {
        "incomplete": f"vLLM finished {requests} of {len(sample.entries)} requests and {tokens} of {expected} tokens, "
        "so its speed is not comparable; see its log"
    }
