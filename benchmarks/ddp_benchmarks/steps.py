"""Inside an engine's own process: reads batches and takes steps when it is told to.

    python -m ddp_benchmarks.steps --model MODEL [vLLM's engine arguments]

vLLM's own engine loop, from scheduler to sampler, without a server around it. Each line on standard input is a list of
JSON, each answered by a line of JSON on standard output; vLLM's own words go to standard error. The first line out says
how the model runs. `side_by_side.py` is the other end.
"""

import copy
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

WARM_UP = 3  # decode steps before one counts: what is new to the machine is compiled in them


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM may print what it likes
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the loop is to run here
    from vllm import EngineArgs, LLMEngine
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    options = EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args()
    batch = Batch(LLMEngine.from_engine_args(EngineArgs.from_cli_args(options)))
    commands: dict[str, Callable[..., Any]] = {
        "limits": batch.limits,
        "read": batch.read,
        "step": batch.step,
        "end": batch.end,
    }
    print(json.dumps(batch.facts()), file=answers, flush=True)
    for line in sys.stdin:
        name, *numbers = json.loads(line)
        print(json.dumps(commands[name](*numbers)), file=answers, flush=True)


class Batch:
    """Sequences that begin together and go on a step at a time."""

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
        """Return how many sequences of `tokens` the KV cache holds and how many the scheduler runs at once."""
        from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config

        asked = copy.copy(self.engine.vllm_config)
        asked.model_config = copy.copy(self.config)
        asked.model_config.max_model_len = tokens
        held = int(get_max_concurrency_for_kv_cache_config(asked, self.scheduler.kv_cache_config))
        return {"kv_cache": held, "max_num_seqs": self.engine.vllm_config.scheduler_config.max_num_seqs}

    def read(self, batch: int, prompt: int, steps: int) -> float:
        """Prefill `batch` prompts of so many tokens; return the seconds until each has its first token."""
        from vllm import SamplingParams

        vocabulary = self.config.get_vocab_size()
        ask = SamplingParams(max_tokens=steps + WARM_UP + 1, ignore_eos=True, temperature=0.0, detokenize=False)
        self.names = [f"{time.monotonic_ns()}-{sequence}" for sequence in range(batch)]
        self.engine.reset_prefix_cache()  # which an engine argument may have turned on
        for sequence, name in enumerate(self.names):
            tokens = [(7919 * sequence + place) % vocabulary for place in range(prompt)]
            self.engine.add_request(name, {"prompt_token_ids": tokens}, ask)
        began, started = time.perf_counter(), 0
        while started < batch:
            started += len(self.engine.step())
        seconds = time.perf_counter() - began
        self.step(WARM_UP)
        return seconds

    def step(self, times: int) -> list[float]:
        """Give each sequence so many tokens more; return the seconds of each decode step.

        Raises: RuntimeError if a step gives a token to fewer sequences than the batch has.
        """
        seconds = []
        for _ in range(times):
            began = time.perf_counter()
            outputs = self.engine.step()
            seconds.append(time.perf_counter() - began)
            if len(outputs) != len(self.names):
                raise RuntimeError(
                    f"a decode step had {len(outputs)} of {len(self.names)} sequences, so its time is not that of the "
                    "batch; choose a smaller batch or context, or leave out the engine arguments that split a batch"
                )
        return seconds

    def end(self) -> None:
        self.engine.abort_request(self.names)
        while self.engine.has_unfinished_requests():
            self.engine.step()


def prefill_before_decode(scheduler: Any) -> None:
    """Let vLLM's scheduler decode only when no prompt is left to prefill.

    Else the sequences whose prompts are done decode while the later prompts are prefilled, in the same steps. They
    keep their blocks of the KV cache meanwhile, and sequences that are not scheduled in a step are nothing new to vLLM.
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
                "choose a smaller batch or context, or give the KV cache more memory"
            )
        return output

    scheduler.schedule = held


if __name__ == "__main__":
    main()
