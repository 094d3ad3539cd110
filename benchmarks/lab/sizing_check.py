"""How close is the memory that `prune --dry-run --on` simulates to the memory that a step takes here?

    python benchmarks/lab/sizing_check.py MODEL [MODEL ...] [--batch-size 2] [--seq-len 512]

For each model and training mode a process of its own loads the model, its teacher and the optimizer, and does two steps
with checkpointed layers. Its peak of resident memory, less what it had before loading, is compared with the simulation
on a CPU at all layers. The last line on stdout is JSON.
"""

import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from ddp_benchmarks.protocol import script_parser
from ddp_models.loading import load, load_teacher
from ddp_models.source import open_source
from ddp_prune.gates import GatedModel
from ddp_prune.mode import MODES
from ddp_prune.recipe import load_recipe
from ddp_prune.sizing import simulate
from ddp_training.loss import CHUNK_BYTES, OutputHead, distilled_loss, final_hidden
from ddp_training.memory import checkpoint_layers, peak_bytes, reset_peak
from ddp_training.weights import TrainedWeights
from study import print_result


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--mode", type=int, help="Measure this mode in this process.")
    arguments = parser.parse_args()
    if arguments.mode is not None:
        print(measure(arguments.models[0], arguments.mode, arguments.batch_size, arguments.seq_len))
        return
    found: dict[str, Any] = {}
    for model in arguments.models:
        config = open_source(model).config
        for number, mode in enumerate(MODES):
            sizes = arguments.batch_size, arguments.seq_len, 1
            simulated = simulate(
                config, int(config["num_hidden_layers"]), mode, *sizes, distillation=True, chunk_bytes=CHUNK_BYTES
            )
            words = ["--mode", str(number), "--batch-size", str(sizes[0]), "--seq-len", str(sizes[1])]
            environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}  # freed memory goes back to the system
            command = [sys.executable, __file__, model, *words]
            done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
            measured = float(done.stdout.split()[-1])
            row = {"simulated_gb": simulated / 1e9, "measured_gb": measured / 1e9, "ratio": simulated / measured}
            found[f"{Path(model).name}, {mode}"] = row
            print(f"{Path(model).name}, {mode}: {json.dumps(row)}", flush=True)
    print_result(__doc__, arguments, found=found)


def measure(model: str, number: int, batch_size: int, seq_len: int) -> float:
    """Return the peak bytes of two steps in this process."""
    mode, source = MODES[number], open_source(model)
    recipe = load_recipe(None, {"model": model, "sparsity": 0.2, "dtype": "bfloat16"})
    accelerator = Accelerator(cpu=True)
    gc.collect()
    before = reset_peak(torch.device("cpu"))
    gated = GatedModel(load(source, recipe, accelerator), source.family, source.sizes, "kv-group")
    trained: Any = gated.model
    weights = TrainedWeights(trained, accelerator, optimizer=mode.optimizer) if mode.optimizer else None
    teacher = load_teacher(source, recipe, accelerator, trained) if mode.optimizer else trained
    checkpoint_layers(trained, True)
    tokens = torch.zeros(batch_size, seq_len, dtype=torch.int64)
    for step in range(2):
        leaves = {kind: torch.ones(shape).requires_grad_() for kind, shape in gated.shapes.items()}
        with torch.no_grad():
            states = final_hidden(teacher, tokens)
        with gated.masks(leaves, {kind: torch.zeros(shape) for kind, shape in gated.shapes.items()}):
            labels = tokens[:, 1:].reshape(-1)
            distilled_loss(final_hidden(trained, tokens), states, OutputHead.of(trained), labels, 2.0)[0].backward()
        if weights:
            weights.move(1e-5, weights.join(), step)
    return peak_bytes(torch.device("cpu")) - before


if __name__ == "__main__":
    main()
