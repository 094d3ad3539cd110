"""How much faster are decode steps and prefill of pruned models? In vLLM with CUDA graphs and random weights.

    python decode.py OUT.json FOLDER MODEL 0 20 40      # the configs of `machine.py`: percent removed

All engines start at once, each with a KV cache of stated size: while vLLM measures a GPU's memory
itself, no other process may free any.
"""

import json
import sys
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from ddp_benchmarks.side_by_side import StepEngine, largest_of, take_turns
from ddp_vllm.intervals import judge
from ddp_vllm.machine import Workload
from lease import DRY, Results

BATCHES, CONTEXT, STEPS, ROUNDS = ((2,), 48, 12, 1) if DRY else ((1, 8, 32), 512, 48, 5)
ENGINE = ["--load-format", "dummy"]
if DRY:
    ENGINE += ["--enforce-eager", "--dtype", "float32"]
else:
    GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": BATCHES}
    ENGINE += ["--compilation-config", json.dumps(GRAPHS), "--gpu-memory-utilization", "0.02"]
    ENGINE += ["--kv-cache-memory-bytes", str(6 * 2**30)]


def main() -> None:
    out, folder, model, *removed = sys.argv[1:]
    results, engines = Results(out, model=model), dict[str, StepEngine]()
    largest = largest_of(BATCHES, [CONTEXT], STEPS)
    with ExitStack() as stack:
        for name in removed:
            log = Path(out).with_name(f"{model}-{name}.log")
            engine = StepEngine(f"{folder}/{model}-{name}", ENGINE, largest=largest, log=log)
            engines[name] = stack.enter_context(engine)
        try:
            for engine in engines.values():
                engine.wait_for_model()
        except Exception:
            for name in removed:
                print(name, Path(out).with_name(f"{model}-{name}.log").read_text()[-4000:], flush=True)
            raise
        for batch in BATCHES:
            workload = Workload(phase="decode", batch=batch, context=CONTEXT)
            with results.row(concurrency=batch, context_length=CONTEXT) as row:
                take_turns(engines, workload, 12, 0)
                turns = [take_turns(engines, workload, STEPS, turn) for turn in range(ROUNDS)]
                for phase in ("decode", "prefill"):
                    seconds = {name: [turn[name][phase] for turn in turns] for name in removed}
                    row[f"{phase}_ms"] = {name: [1e3 * value for value in values] for name, values in seconds.items()}
                    row[phase] = {name: asdict(judge(seconds[name], seconds[removed[0]])) for name in removed[1:]}
    results.finish()


if __name__ == "__main__":
    main()
