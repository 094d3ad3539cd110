"""Times steps of several engines in turns, a few steps each, and reports their ratios.

On a shared machine (2 cores of an EPYC) engines that run one after the other differ by up to 25 %,
even two of the same model. In turns they share slow minutes, and two engines of the same model
agree within 4 %.
"""

import contextlib
import itertools
import json
import math
import re
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from ddp_benchmarks.engine import CPU_DEFAULTS, Engine, number_format, runs_on_cpu, vllm_command
from ddp_benchmarks.models import max_model_len, token_counter
from ddp_benchmarks.protocol import check_engine_arguments, rotated
from ddp_vllm.errors import ModelError, Printer, ServingError, SettingError
from ddp_vllm.intervals import judge
from ddp_vllm.machine import PHASES, Workload
from ddp_vllm.model_facts import dense_kv_bytes, known_folder, tokens_differ, unrelated
from ddp_vllm.results import new_results
from ddp_vllm.settings import Settings, setting

STEPS_FORMAT = "ddp-vllm bench steps 1"
EXCERPT, EXCERPTS = 3000, 64  # characters, and excerpts of the text that is counted
CPU_BLOCK = 128  # tokens per block of vLLM's KV cache on a CPU
# consecutive steps of an engine; after the first few, its weights are in the caches again
TURN = 12


@dataclass(frozen=True, kw_only=True)
class StepSettings(Settings):
    """Every setting of `bench steps`; saved with its results."""

    dense: str
    pruned: tuple[str, ...]
    phase: str = setting("decode", "The step to compare; decode also reports prefill.", choices=PHASES)
    concurrency: int = setting(8, "Sequences served at once.", least=1)
    context_length: int = setting(2048, "Tokens per sequence.")
    rounds: int = setting(5, "Measurements of each model.", least=1)
    steps: int = setting(96, f"Decode steps per round, in turns of {TURN}; a remainder is left out.", least=TURN)
    text: str = setting(
        "", "Text by which models with different tokens are compared in characters per second.", shown="none"
    )
    engine_arguments: tuple[str, ...] = setting((), "Passed to every vLLM engine.", is_argument=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if len({self.dense, *self.pruned}) <= len(self.pruned):
            raise SettingError("bench steps compares different folders; name each once")
        if self.context_length < self.steps:
            raise SettingError(
                "context_length", f"is {self.context_length}; it must be at least the {self.steps} steps of a round"
            )
        check_engine_arguments(self.engine_arguments, "--model", "--skip-tokenizer-init")

    @property
    def workload(self) -> Workload:
        return Workload(phase=self.phase, batch=self.concurrency, context=self.context_length)


class StepEngine(Engine):
    """A vLLM engine that runs steps on command (`steps.py`); `wait_for_model` returns when it is ready.

    Raises: ServingError if it dies, also in `ask`; SettingError if it cannot run the largest batch
    at once.
    """

    streams = subprocess.PIPE

    def __init__(
        self, model: str, arguments: Sequence[str], *, largest: tuple[int, int], log: Path, together: int = 2
    ) -> None:
        """largest: the largest batch and context to run. together: number of engines that run at
        once. Raises: SettingError for a context that the model does not have."""
        self.model, self.largest = model, largest
        if (longest := max_model_len(model)) and largest[1] > longest:
            raise SettingError(
                f"steps of {largest[1]:,} tokens are asked, but the model takes {longest:,}; pass a lower "
                "--context-length"
            )
        line = " ".join([*arguments, *number_format(arguments)])
        value_bytes = 4 if re.findall(r"--dtype[ =](\w+)", line)[-1:] in (["float32"], ["float"]) else 2
        self.cpu_defaults = CPU_DEFAULTS | {"VLLM_CPU_KVCACHE_SPACE": str(cache_gib(model, *largest, value_bytes))}
        sizes = ["--max-num-seqs", str(largest[0]), "--max-model-len", str(largest[1]), "--no-enable-prefix-caching"]
        if not runs_on_cpu() and not any("gpu-memory-utilization" in word for word in arguments):
            sizes += ["--gpu-memory-utilization", f"{0.9 / together:.2f}"]  # they share the GPU
        words = ["--model", model, "--skip-tokenizer-init", *sizes, *arguments]
        super().__init__(words, log=log, module="ddp_benchmarks.steps")

    def wait_for_model(self) -> Self:
        """Wait until the engine, whose block was entered, has loaded the model."""
        self.model_facts = self._answer()
        self._check_largest()
        return self

    def _check_largest(self) -> None:
        """Refuse a batch that vLLM would split. Raises: SettingError."""
        batch, tokens = self.largest
        limits = self.ask("limits", tokens)
        if limits["max_num_seqs"] < batch:
            raise SettingError(
                f"the engine arguments limit vLLM to {limits['max_num_seqs']} sequences, below the batch of {batch} to "
                "be timed; omit --max-num-seqs, or pass a lower --concurrency"
            )
        if limits["kv_cache"] < batch:
            raise SettingError(
                f"the KV cache of {self.describe()} holds {limits['kv_cache']} sequences of {tokens} tokens, below the "
                f"batch of {batch} to be timed; pass a lower --concurrency or --context-length, or a "
                "larger cache (VLLM_CPU_KVCACHE_SPACE in GiB on a CPU, --gpu-memory-utilization on a GPU)"
            )

    def stop(self) -> None:
        super().stop()
        for stream in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):  # the process has ended
                assert stream
                stream.close()

    def describe(self) -> str:
        return f"the engine of {self.model}"

    def ask(self, *command: str | int) -> Any:
        assert self.process.stdin
        with contextlib.suppress(OSError):  # it has died; _answer raises the reason
            self.process.stdin.write(json.dumps(command).encode() + b"\n")
            self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout
        if line := self.process.stdout.readline():
            return json.loads(line)
        self.process.wait()
        raise ServingError(f"{self.describe()} {self.failure()}")


def cache_gib(model: str, batch: int, context: int, value_bytes: int) -> int:
    """Return the GiB of a KV cache for a batch of the dense model; 1 if it is not local or does not
    state its sizes."""
    folder = known_folder(model)
    if folder is None or not (folder / "config.json").is_file():
        return 1
    tokens = batch * (context + CPU_BLOCK) + CPU_BLOCK
    return math.ceil(tokens * (dense_kv_bytes(folder, value_bytes=value_bytes) or 1) / 2**30)


def largest_of(batches: Sequence[int], contexts: Sequence[int], steps: int) -> tuple[int, int]:
    """Return the largest batch and context of engines that run `steps` steps around these
    contexts."""
    return max(batches), max(contexts) + steps


def take_turns(engines: Mapping[str, StepEngine], workload: Workload, steps: int, turn: int) -> dict[str, Any]:
    """Prefill a batch in every engine, then time `steps` decode steps around the workload's context
    in turns.

    Returns one cell per name, as in profiles: batch, context, and the seconds of a decode step and
    of prefill. The first engine's decode step is the median of its turns. That of another engine is
    this median times the median ratio of the two engines over turns.
    """
    names = list(engines)
    prompt = workload.context - steps // 2
    prefill = {
        name: engines[name].ask("read", workload.batch, prompt, steps) * workload.context / prompt
        for name in rotated(names, turn)
    }
    turns = [
        {name: statistics.median(engines[name].ask("step", TURN)) for name in rotated(names, turn + burst)}
        for burst in range(steps // TURN)
    ]
    for engine in engines.values():
        engine.ask("end")
    first = statistics.median(cell[names[0]] for cell in turns)
    return {
        name: {
            "batch": workload.batch,
            "context": workload.context,
            "decode": first * statistics.median(cell[name] / cell[names[0]] for cell in turns),
            "prefill": prefill[name],
        }
        for name in names
    }


def compare_steps(
    settings: StepSettings, *, print_line: Printer, save: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Time steps of all models in turns; return the seconds and, per pruned model, the speedup as
    `verdicts`.

    Prompts are prefilled anyway, so each verdict also has that of `prefill`.

    save: gets the results after every round, so that a stop loses at most one.
    Raises: SettingError before an engine starts; ServingError if an engine fails.
    """
    vllm_command()
    workload, models = settings.workload, (settings.dense, *settings.pruned)
    for note in filter(None, (unrelated(settings.dense, pruned) for pruned in settings.pruned)):
        print_line(f"note: {note}")
    lengths = characters_per_token(settings, print_line)
    cells: dict[str, list[dict[str, Any]]] = {model: [] for model in models}
    results = new_results(STEPS_FORMAT, asdict(settings) | {"workload": asdict(workload)})
    largest = largest_of([workload.batch], [workload.context], settings.steps)
    scratch = Path(tempfile.mkdtemp(prefix="ddp-vllm-steps-"))
    engines: dict[str, StepEngine] = {}
    if words := number_format(settings.engine_arguments):
        print_line(f"this processor does not compute in bfloat16, so engines run with {' '.join(words)}")
    with ExitStack() as stack:
        for number, model in enumerate(models):
            print_line(f"starting the engine of {model}")
            engine = StepEngine(
                model, settings.engine_arguments, largest=largest, log=scratch / f"{number}.log", together=len(models)
            )
            engines[model] = stack.enter_context(engine)
            if not runs_on_cpu():  # vLLM measures a GPU's free memory when it starts
                engine.wait_for_model()
        for engine in engines.values() if runs_on_cpu() else ():
            engine.wait_for_model()
        print_line("warm-up")
        take_turns(engines, workload, TURN, 0)
        for turn in range(settings.rounds):
            for model, cell in take_turns(engines, workload, settings.steps, turn).items():
                cells[model].append(cell)
            seconds = {name: [cell[workload.phase] for cell in cells[name]] for name in models}
            results |= {"seconds": seconds, "verdicts": verdicts_of(settings, cells, lengths)}
            save(results)
            ratios = ", ".join(f"{verdict['ratio']:.2f}×" for verdict in results["verdicts"])
            print_line(f"round {turn + 1} of {settings.rounds}: {ratios} so far")
    shutil.rmtree(scratch, ignore_errors=True)
    return results


def characters_per_token(settings: StepSettings, print_line: Printer) -> dict[str, float]:
    """Return how many characters of `text` a token of each model holds; {} if all models have the same
    tokens, or there is no text. Raises: TextError, ModelError."""
    differing = ""
    with contextlib.suppress(ModelError):  # of a model without a tokenizer, steps can be timed too
        differing = next(filter(None, (tokens_differ(settings.dense, pruned) for pruned in settings.pruned)), "")
    if differing:
        remedy = "characters per second compare them" if settings.text else "pass --text FILE to compare characters"
        print_line(f"note: {differing}, so a token is not the same text in both; {remedy}")
    elif settings.text:
        print_line("note: the models have the same tokens, so --text is not read")
    if not (differing and settings.text):
        return {}
    from ddp_prune.text.documents import read_excerpts
    from ddp_prune.text.messages import Notes

    excerpts = read_excerpts(settings.text, None, EXCERPT, Notes())
    texts = [*itertools.islice(excerpts, EXCERPTS)]
    counters = {model: token_counter(model) for model in (settings.dense, *settings.pruned)}
    return {model: sum(map(len, texts)) / sum(map(count, texts)) for model, count in counters.items()}


def verdicts_of(
    settings: StepSettings, cells: Mapping[str, Sequence[Mapping[str, Any]]], lengths: Mapping[str, float]
) -> list[dict[str, Any]]:
    """Return the verdict of each pruned model on the workload, with that of prefill and, by the
    characters of a token, that of text: `lengths` of `characters_per_token`."""
    phase, batch, context = settings.workload.phase, settings.workload.batch, settings.workload.context

    def judged(model: str, phase: str, lengths: Mapping[str, float]) -> dict[str, Any]:
        """Judge by the seconds of a step over the characters of a token."""
        seconds = [[cell[phase] / lengths.get(name, 1.0) for cell in cells[name]] for name in (model, settings.dense)]
        return asdict(judge(seconds[0], seconds[1], unit="round"))

    def speeds(model: str) -> dict[str, float]:
        tokens = (
            batch * (context if phase == "prefill" else 1) / statistics.median(cell[phase] for cell in cells[model])
        )
        return {"tokens_per_second": tokens, "characters_per_second": tokens * lengths[model]}

    verdicts = [
        {"pruned": pruned, **judged(pruned, phase, {}), "prefill": judged(pruned, "prefill", {})}
        for pruned in settings.pruned
    ]
    for verdict in verdicts if lengths else ():
        pruned = verdict["pruned"]
        by_model = {"dense": speeds(settings.dense), "pruned": speeds(pruned)}
        verdict["characters"] = judged(pruned, phase, lengths) | by_model
    return verdicts
