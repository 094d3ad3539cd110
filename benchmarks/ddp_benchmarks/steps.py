"""Runs inside an engine's process: prefills batches and runs decode steps on command.

    python -m ddp_benchmarks.steps --model MODEL [vLLM's engine arguments]

It runs vLLM's engine loop, from scheduler to sampler, without a server. Each line on standard input
is a command as a JSON list, answered by one line of JSON on standard output; vLLM's output goes to
standard error. The first output line describes the model. `side_by_side.py` sends the commands.
"""

import copy
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

WARM_UP = 3  # untimed decode steps, in which kernels are compiled


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM may print to standard output
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # run the loop in this process
    from vllm import EngineArgs, LLMEngine
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    options = EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args()
    batch = Batch(LLMEngine.from_engine_args(EngineArgs.from_cli_args(options)))
    commands: dict[str, Callable[..., Any]] = {
        "limits": batch.limits, "read": batch.prefill, "step": batch.step, "end": batch.end
    }  # fmt: skip
    print(json.dumps(batch.facts()), file=answers, flush=True)
    for line in sys.stdin:
        name, *numbers = json.loads(line)
        print(json.dumps(commands[name](*numbers)), file=answers, flush=True)


class Batch:
    """Sequences that start together and are decoded one step at a time."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.config = engine.vllm_config.model_config
        self.scheduler = engine.engine_core.engine_core.scheduler
        self.names: list[str] = []
        prefill_before_decode(self.scheduler)

    def facts(self) -> dict[str, Any]:
        return {
            "compiled": not self.config.enforce_eager,
            "multiple": getattr(self.config.hf_config, "ddp_pad_channels_to", 1),
            "dtype": str(self.config.dtype).removeprefix("torch."),
        }

    def limits(self, tokens: int) -> dict[str, int]:
        """Return how many sequences of `tokens` tokens the KV cache holds, and how many the
        scheduler runs at once."""
        from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config

        config = copy.copy(self.engine.vllm_config)
        config.model_config = copy.copy(self.config)
        config.model_config.max_model_len = tokens
        num_sequences = int(get_max_concurrency_for_kv_cache_config(config, self.scheduler.kv_cache_config))
        return {"kv_cache": num_sequences, "max_num_seqs": self.engine.vllm_config.scheduler_config.max_num_seqs}

    def prefill(self, batch: int, prompt: int, steps: int) -> float:
        """Prefill `batch` prompts of `prompt` tokens; return the seconds until each has its first
        token."""
        from vllm import SamplingParams

        vocabulary = self.config.get_vocab_size()
        sampling = SamplingParams(max_tokens=steps + WARM_UP + 1, ignore_eos=True, temperature=0.0, detokenize=False)
        self.names = [f"{time.monotonic_ns()}-{sequence}" for sequence in range(batch)]
        self.engine.reset_prefix_cache()  # an engine argument may have enabled it
        for sequence, name in enumerate(self.names):
            tokens = [(7919 * sequence + index) % vocabulary for index in range(prompt)]
            self.engine.add_request(name, {"prompt_token_ids": tokens}, sampling)
        began, started = time.perf_counter(), 0
        while started < batch:
            started += len(self.engine.step())
        seconds = time.perf_counter() - began
        self.step(WARM_UP)
        return seconds

    def step(self, times: int) -> list[float]:
        """Decode `times` tokens of each sequence; return the seconds of each decode step.

        Raises: RuntimeError if a step decodes fewer sequences than the batch has.
        """
        seconds = []
        for _ in range(times):
            began = time.perf_counter()
            outputs = self.engine.step()
            seconds.append(time.perf_counter() - began)
            if len(outputs) != len(self.names):
                raise RuntimeError(
                    f"a decode step ran {len(outputs)} of {len(self.names)} sequences, so it does not time the batch; "
                    "pass a lower --concurrency or --context-length, or omit the engine arguments that split a batch"
                )
        return seconds

    def end(self) -> None:
        self.engine.abort_request(self.names)
        while self.engine.has_unfinished_requests():
            self.engine.step()


def prefill_before_decode(scheduler: Any) -> None:
    """Make vLLM's scheduler decode only when no prompt is left to prefill.

    Otherwise vLLM decodes sequences in the same steps in which it prefills later prompts. Waiting
    sequences keep their blocks of the KV cache; vLLM itself may leave sequences out of a step too.
    """
    schedule = scheduler.schedule

    def held(*arguments: Any, **options: Any) -> Any:
        prefilling: list[Any] = []
        decoding: list[Any] = []
        for request in scheduler.running:
            (prefilling if request.num_computed_tokens < request.num_prompt_tokens else decoding).append(request)
        if not prefilling and not scheduler.waiting:
            return schedule(*arguments, **options)
        scheduler.running = prefilling
        output = schedule(*arguments, **options)
        scheduler.running = decoding + scheduler.running
        if not output.total_num_scheduled_tokens:
            raise RuntimeError(
                f"the KV cache is full with {len(scheduler.running)} sequences while {len(scheduler.waiting)} wait; "
                "pass a lower --concurrency or --context-length, or a larger KV cache"
            )
        return output

    scheduler.schedule = held


if __name__ == "__main__":
    main()
