"""Engines alive at once take turns at a step, a few steps each: what one takes of another's time.

Engines that run one after the other differ by up to a quarter on a shared machine, two of the same model too. Side by
side both meet the same minute, and two of the same model agree within 4 % (log 113).
"""

import contextlib
import json
import math
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from ddp_benchmarks.engine import CPU_DEFAULTS, Engine, runs_on_cpu, vllm_command
from ddp_benchmarks.protocol import check_lowest, new_results, rotated
from ddp_vllm.checkpoint import read_config
from ddp_vllm.errors import ServingError, SettingError
from ddp_vllm.families import dimensions_of
from ddp_vllm.latency import Workload, seconds_of
from ddp_vllm.results import judge

STEPS_FORMAT = "ddp-vllm bench steps 1"
CPU_BLOCK = 128  # tokens of a block of vLLM's KV cache on a CPU
TURN = 12  # steps that an engine takes in a row; after the first few its weights have come back into the caches


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """Every setting of `bench steps`; saved with its results."""

    dense: str
    pruned: tuple[str, ...]
    workload: Workload
    rounds: int = 5
    steps: int = 96
    """Decode steps of a round, in turns of `TURN`."""
    engine_arguments: tuple[str, ...] = ()
    """Passed to every vLLM engine as they are."""

    def check(self) -> None:
        """Raises: SettingError naming the value and its range."""
        check_lowest(self, rounds=1, steps=TURN)
        if len({self.dense, *self.pruned}) <= len(self.pruned):
            raise SettingError("bench steps compares different folders; name each once")
        check_lowest(self.workload, batch=1, context=self.steps)


class StepEngine(Engine):
    """A vLLM that takes steps when it is asked to (`steps.py`), ready inside the block.

    Raises: ServingError when it dies, then and in `ask`; SettingError if it cannot run the largest batch at once.
    """

    streams = subprocess.PIPE

    def __init__(
        self, model: str, arguments: Sequence[str], *, most: tuple[int, int], log: Path, together: int = 2
    ) -> None:
        """most: the largest batch and context it will be asked for. together: engines that are alive at once."""
        self.model, self.most = model, most
        value_bytes = 4 if any(word.endswith("float32") for word in arguments) else 2
        self.cpu_defaults = CPU_DEFAULTS | {"VLLM_CPU_KVCACHE_SPACE": str(cache_gib(model, *most, value_bytes))}
        sizes = ["--max-num-seqs", str(most[0]), "--max-model-len", str(most[1]), "--no-enable-prefix-caching"]
        if not runs_on_cpu() and not any("gpu-memory-utilization" in word for word in arguments):
            sizes += ["--gpu-memory-utilization", f"{0.9 / together:.2f}"]  # they share the GPU
        words = ["--model", model, "--skip-tokenizer-init", *sizes, *arguments]
        super().__init__(words, log=log, module="ddp_benchmarks.steps")

    def __enter__(self) -> Self:
        super().__enter__()
        try:
            self.facts_of_model = self._answer()
            self._check_most()
        except BaseException:
            self.stop()
            raise
        return self

    def _check_most(self) -> None:
        """Refuse a batch of which vLLM would run only a part at once. Raises: SettingError."""
        batch, tokens = self.most
        limits = self.ask("limits", tokens)
        if limits["max_num_seqs"] < batch:
            raise SettingError(
                f"the engine arguments let vLLM run {limits['max_num_seqs']} sequences at once, and a batch of {batch} "
                "is to be timed; leave out --max-num-seqs, or choose a smaller batch"
            )
        if limits["kv_cache"] < batch:
            raise SettingError(
                f"the KV cache of {self.describe()} holds {limits['kv_cache']} sequences of {tokens} tokens, and a "
                f"batch of {batch} is to be timed; choose a smaller batch or context, or give the cache more memory "
                "(VLLM_CPU_KVCACHE_SPACE in GiB on a CPU, --gpu-memory-utilization on a GPU)"
            )

    def stop(self) -> None:
        super().stop()
        for stream in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):  # what it can no longer be told
                assert stream
                stream.close()

    def describe(self) -> str:
        return f"the engine of {self.model}"

    def ask(self, *command: str | int) -> Any:
        assert self.process.stdin
        with contextlib.suppress(OSError):  # it has died; its answer says why
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
    """Return the GiB of a KV cache that holds a batch of the dense model; 1 where the model's config is not here."""
    folder = Path(model)
    if not (folder / "config.json").is_file():
        return 1
    sizes = dimensions_of(read_config(folder))
    tokens = batch * (context + CPU_BLOCK) + CPU_BLOCK
    return math.ceil(tokens * sizes.num_layers * 2 * sizes.num_kv_heads * sizes.head_dim * value_bytes / 2**30)


def most_of(batches: Sequence[int], contexts: Sequence[int], steps: int) -> tuple[int, int]:
    """Return the largest batch and context of engines that take so many steps around these contexts."""
    return max(batches), max(contexts) + steps


def take_turns(engines: Mapping[str, StepEngine], workload: Workload, steps: int, turn: int) -> dict[str, Any]:
    """Let every engine read a batch and take `steps` decode steps, around the context asked for, in turns.

    Returns for each name a cell as profiles hold it: batch, context, and the seconds of decode and prefill. The first
    engine's decode step is the median of its turns; another's is that, times the median of what it took of the first's
    time turn by turn.
    """
    names = list(engines)
    prompt = workload.context - steps // 2
    reading = {
        name: engines[name].ask("read", workload.batch, prompt, steps) * workload.context / prompt
        for name in rotated(names, turn)
    }
    turns = [
        {name: statistics.median(engines[name].ask("step", TURN)) for name in rotated(names, turn + burst)}
        for burst in range(steps // TURN)
    ]
    for engine in engines.values():
        engine.ask("end")
    first = statistics.median(each[names[0]] for each in turns)
    return {
        name: {
            "batch": workload.batch,
            "context": workload.context,
            "decode": first * statistics.median(each[name] / each[names[0]] for each in turns),
            "prefill": reading[name],
        }
        for name in names
    }


def compare_steps(settings: StepSettings, *, say: Callable[[str], None]) -> dict[str, Any]:
    """Return how much faster a step of each pruned model is than the dense one's: `verdicts`, in their order.

    Raises: SettingError before anything is started; ServingError if an engine fails.
    """
    settings.check()
    vllm_command()
    workload, models = settings.workload, (settings.dense, *settings.pruned)
    seconds: dict[str, list[float]] = {model: [] for model in models}
    most = most_of([workload.batch], [workload.context], settings.steps)
    scratch = Path(tempfile.mkdtemp(prefix="ddp-vllm-steps-"))
    engines: dict[str, StepEngine] = {}
    with ExitStack() as alive:
        for number, model in enumerate(models):
            say(f"starting the engine of {model}")
            engine = StepEngine(
                model, settings.engine_arguments, most=most, log=scratch / f"{number}.log", together=len(models)
            )
            engines[model] = alive.enter_context(engine)
        for turn in range(-1, settings.rounds):  # the first warms up
            say("warm-up" if turn < 0 else f"round {turn + 1} of {settings.rounds}")
            cells = take_turns(engines, workload, settings.steps, max(turn, 0))
            for model, cell in cells.items() if turn >= 0 else ():
                seconds[model].append(seconds_of([cell], workload))
    shutil.rmtree(scratch, ignore_errors=True)
    verdicts = [{"pruned": each} | judge(seconds[each], seconds[settings.dense]).to_json() for each in settings.pruned]
    return new_results(STEPS_FORMAT, asdict(settings)) | {"seconds": seconds, "verdicts": verdicts}
