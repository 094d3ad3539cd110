"""Inside an engine's own process: the seconds of each step, at some batches and contexts.

    python -m ddp_benchmarks.steps MODEL --cells 1x256,8x1024 --steps 24 --output FILE [vLLM's engine arguments]

vLLM's own engine loop, from scheduler to sampler, without a server around it. All sequences of a cell begin together:
what passes until each has its first token is prefill, every step after that gives each one more token.
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

WARM_UP = 3  # decode steps before one counts: what is new to the machine is compiled in them


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--cells", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--output", type=Path, required=True)
    arguments, rest = parser.parse_known_args()
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the loop is to run here
    from vllm import EngineArgs, LLMEngine
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    options = EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(["--model", arguments.model, *rest])
    engine = LLMEngine.from_engine_args(EngineArgs.from_cli_args(options))
    cells = [tuple(map(int, cell.split("x"))) for cell in arguments.cells.split(",")]
    for batch, context in cells:  # the first of a size compiles
        measure(engine, batch, context, WARM_UP)
    config = engine.vllm_config
    found = {
        "cells": [measure(engine, batch, context, arguments.steps) for batch, context in cells],
        "compiled": not config.model_config.enforce_eager,
        "multiple": getattr(config.model_config.hf_config, "ddp_pad_channels_to", 1),
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
    }
    arguments.output.write_text(json.dumps(found), encoding="utf-8")


def measure(engine: Any, batch: int, context: int, num_steps: int) -> dict[str, Any]:
    """Return what a batch takes to be read, and a step of it once it is, in seconds."""
    from vllm import SamplingParams

    vocabulary = engine.vllm_config.model_config.get_vocab_size()
    length = WARM_UP + num_steps + 1
    ask = SamplingParams(max_tokens=length, ignore_eos=True, temperature=0.0, detokenize=False)
    for sequence in range(batch):
        tokens = [(7919 * sequence + place) % vocabulary for place in range(max(1, context - length))]
        engine.add_request(f"{time.monotonic_ns()}-{sequence}", {"prompt_token_ids": tokens}, ask)
    seconds: list[float] = []
    started: set[str] = set()
    reading = 0.0
    while engine.has_unfinished_requests():
        began = time.perf_counter()
        outputs = engine.step()
        passed = time.perf_counter() - began
        if len(started) == batch:
            seconds.append(passed)
        else:
            reading += passed
        started |= {output.request_id for output in outputs}
    kept = seconds[WARM_UP:]
    low, middle, high = statistics.quantiles(kept, n=4) if len(kept) > 1 else [*kept] * 3
    share = context / max(1, context - length)  # of the context that was read as prompt
    return {"batch": batch, "context": context, "decode": middle, "decode_quartiles": [low, high],
            "prefill": reading * share, "steps": len(kept)}  # fmt: skip


if __name__ == "__main__":
    main()
