"""What `test_processes.py` runs in two processes: learns masks in several ways and leaves what it learned in files.

torchrun --nproc_per_node 2 two_processes.py MODEL FOLDER
"""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors.torch import save_file

from ddp_prune.devices import failing_together, load_sharded
from ddp_prune.gates import GatedModel
from ddp_prune.model import load_model, open_source
from ddp_prune.recipe import Recipe
from ddp_prune.run_state import RunState
from ddp_prune.train import train
from ddp_vllm.errors import TextError

BLOCKS = torch.randint(1, 320, (12, 16), generator=torch.Generator().manual_seed(0))  # four passes in 12 steps
SETTINGS: dict[str, Any] = {
    "sparsity": 0.4, "steps": 12, "batch_size": 4, "seq_len": 16, "save_every": 3, "learning_rate": 0.1,
    "micro_batch_size": 1,
}  # fmt: skip


def main(model: str, folder: Path) -> None:
    """Run every case; process 0 writes `<case>.safetensors`, each process `facts-<rank>.json`."""
    accelerator = Accelerator(cpu=True)
    rank, world = accelerator.process_index, accelerator.num_processes
    facts: dict[str, Any] = {"world": world, "steps": []}
    source, recipe = open_source(model), Recipe(model=model, **SETTINGS)
    unit = "auto" if source.sizes.num_experts else "query-head"
    whole = GatedModel(load_model(source, "float32"), source.family, source.sizes, unit)
    cut_model = load_sharded(source, "float32", accelerator.device, world)
    cut = GatedModel(cut_model, source.family, source.sizes, unit)

    def run(name: str, gated: GatedModel, recipe: Recipe, stop: int = 0) -> None:
        def report(metrics: dict[str, float]) -> None:
            facts["steps"].append([name, metrics["step"]])
            if metrics["step"] == stop:
                raise KeyboardInterrupt

        # each process has its own disk, as if on its own machine
        state = RunState(folder / f"machine-{rank}" / name, recipe, writes=rank == 0)
        learned = train(gated, BLOCKS, recipe, accelerator, state, report)
        if rank == 0:
            save_file(learned.gates | {f"{kind}.counts": n for kind, n in learned.routed.items()}, folder / name)

    run("whole", whole, recipe)
    run("cut", cut, recipe)
    run("cut-again", cut, replace(recipe, activation_checkpointing="on"))
    try:
        run("resumed", whole, recipe, stop=5)
    except KeyboardInterrupt:
        run("resumed", whole, recipe)
    facts["types"] = {name: type(parameter).__name__ for name, parameter in cut_model.named_parameters()}
    facts["bytes"] = {
        name: getattr(parameter, "_local_tensor", parameter).nbytes for name, parameter in cut_model.named_parameters()
    }
    try:
        with failing_together(accelerator):
            if rank == 1:
                raise TextError("only process 1 cannot read its text")
    except TextError as error:
        facts["error"] = str(error)
    (folder / f"facts-{rank}.json").write_text(json.dumps(facts), encoding="utf-8")
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
    # gloo's threads may abort a process while its interpreter ends (pytorch/pytorch#179291, #190489; seen once here)
    os._exit(0)
