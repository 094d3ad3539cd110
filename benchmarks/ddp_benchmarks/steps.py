"""Inside an engine's own process: reads batches and takes steps when it is told to.

    python -m ddp_benchmarks.steps --model MODEL [vLLM's engine arguments]

vLLM's own engine loop, from scheduler to sampler, without a server around it. Each line on standard input is a list of
JSON, each answered by a line of JSON on standard output; vLLM's own words go to standard error. The first line out says
how the model runs. `side_by_side.py` is the other end.
"""

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
    commands: dict[str, Callable[..., Any]] = {"read": batch.read, "step": batch.step, "end": batch.end}
    print(json.dumps(batch.facts()), file=answers, flush=True)
    for line in sys.stdin:
        name, *numbers = json.loads(line)
        print(json.dumps(commands[name](*numbers)), file=answers, flush=True)


class Batch:
    """Sequences that begin together and go on a step at a time."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.config = engine.vllm_config.model_config
        self.names: list[str] = []

    def facts(self) -> dict[str, Any]:
        return {
            "compiled": not self.config.enforce_eager,
            "multiple": getattr(self.config.hf_config, "ddp_pad_channels_to", 1),
            "dtype": str(self.config.dtype).removeprefix("torch."),
        }

    def read(self, batch: int, prompt: int, steps: int) -> float:
        """Read `batch` prompts of so many tokens; return the seconds until each has its first token."""
        from vllm import SamplingParams

        vocabulary = self.config.get_vocab_size()
        ask = SamplingParams(max_tokens=steps + WARM_UP + 1, ignore_eos=True, temperature=0.0, detokenize=False)
        self.names = [f"{time.monotonic_ns()}-{sequence}" for sequence in range(batch)]
        for sequence, name in enumerate(self.names):
            tokens = [(7919 * sequence + place) % vocabulary for place in range(prompt)]
            self.engine.add_request(name, {"prompt_token_ids": tokens}, ask)
        began, started = time.perf_counter(), set[str]()
        while len(started) < batch:
            started |= {output.request_id for output in self.engine.step()}
        seconds = time.perf_counter() - began
        self.step(WARM_UP)
        return seconds

    def step(self, times: int) -> list[float]:
        """Give each sequence so many tokens more; return the seconds of each step."""
        seconds = []
        for _ in range(times):
            began = time.perf_counter()
            self.engine.step()
            seconds.append(time.perf_counter() - began)
        return seconds

    def end(self) -> None:
        self.engine.abort_request(self.names)
        while self.engine.has_unfinished_requests():
            self.engine.step()


if __name__ == "__main__":
    main()
