"""How close is the formula of `prune --dry-run --on` to the memory that a step takes, simulated and measured?

    python benchmarks/lab/sizing_check.py MODEL [MODEL ...] [--batch-size 2] [--seq-len 512] [--simulate-only]

For each model and training mode the real step runs on fake tensors, which have shapes but no data. Unless
--simulate-only is passed, a process of its own also loads the model, its teacher and the optimizer, and does two steps
with checkpointed layers; its peak of resident memory, less what it had before loading, is the measured value. The last
line on stdout is JSON.
"""

import dataclasses
import gc
import json
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from accelerate import Accelerator
from torch import distributed
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ddp_benchmarks.protocol import script_parser
from ddp_models.loading import load, load_teacher, shard_layers, share_frozen_weights
from ddp_models.source import open_source
from ddp_prune.gates import GatedModel
from ddp_prune.mode import MODES, Mode
from ddp_prune.recipe import load_recipe
from ddp_prune.sizing import Devices, step_bytes
from ddp_training.loss import CHUNK_BYTES, OutputHead, distill, final_hidden
from ddp_training.memory import checkpoint_layers, peak_bytes, reset_peak
from ddp_training.weights import MOMENTS, TrainedWeights
from ddp_vllm.families import dimensions_of, family_of
from study import print_result


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--simulate-only", action="store_true")
    parser.add_argument("--mode", type=int, help="Measure this mode in this process.")
    arguments = parser.parse_args()
    if arguments.mode is not None:
        print(measure(arguments.models[0], arguments.mode, arguments.batch_size, arguments.seq_len))
        return
    found: dict[str, Any] = {}
    for model in arguments.models:
        source = open_source(model)
        recipe = load_recipe(None, {"model": model, "sparsity": 0.2, "dtype": "bfloat16", "seq_len": arguments.seq_len})
        for number, mode in enumerate(MODES):
            sizes = arguments.batch_size, arguments.seq_len
            by_formula = step_bytes(recipe, source, mode, arguments.batch_size, Devices(), checkpointed=True)
            row = {"formula_gb": by_formula / 1e9}
            if mode.train != "lora" and not source.sizes.num_experts:  # peft takes no fake tensors, routing needs data
                row["simulated_gb"] = simulate(source.config, mode, *sizes, chunk_bytes=CHUNK_BYTES) / 1e9
                row["formula_over_simulated"] = row["formula_gb"] / row["simulated_gb"]
            if not arguments.simulate_only:
                words = ["--mode", str(number), "--batch-size", str(sizes[0]), "--seq-len", str(sizes[1])]
                environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}  # freed memory goes back to the system
                command = [sys.executable, __file__, model, *words]
                done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
                row["measured_gb"] = float(done.stdout.split()[-1]) / 1e9
                row["formula_over_measured"] = row["formula_gb"] / row["measured_gb"]
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
            distill(final_hidden(trained, tokens), states, OutputHead.of(trained), labels, 2.0)[0].backward()
        if weights:
            weights.move(1e-5, weights.join(), step)
    return peak_bytes(torch.device("cpu")) - before


def simulate(
    config: Mapping[str, Any], mode: Mode, num_sequences: int, seq_len: int, num_devices: int = 1,
    *, chunk_bytes: int,
) -> int:  # fmt: skip
    """Return the peak bytes of one process in two training steps of a bfloat16 model.

    chunk_bytes: logits that exist at once; a CPU has fewer than a GPU.
    """
    accelerator = SimpleNamespace(num_processes=num_devices, device=torch.device("cpu"), is_main_process=True)
    with _mesh(num_devices) as mesh, FakeTensorMode(), LiveBytes() as live:
        model = _build(config)
        if mesh:
            shard_layers(model, mesh, torch.bfloat16)
        gated = GatedModel(model, family_of(config), dimensions_of(config), "kv-group")
        weights, teacher = None, model
        if mode.optimizer:
            weights = TrainedWeights(model, cast(Accelerator, accelerator), optimizer=mode.optimizer)
            teacher = _build(config)
            share_frozen_weights(teacher, model)
            if mesh:
                shard_layers(teacher, mesh, torch.bfloat16)
        checkpoint_layers(model, True)
        live.peak = live.now
        moments = list[torch.Tensor]()
        for _ in range(2):
            _backward(gated, teacher, torch.zeros(num_sequences, seq_len, dtype=torch.int64), chunk_bytes)
            if weights and mode.optimizer == "adamw-8bit":  # its own step reads data, and takes no memory but this
                moments = moments or [
                    torch.zeros_like(m, dtype=torch.uint8) for m in weights.moved.values() for _ in MOMENTS
                ]
                weights.sums.clear()
            elif weights:
                weights.move(1e-5, 0.5)
        return live.peak


def _backward(gated: GatedModel, teacher: Any, tokens: torch.Tensor, chunk_bytes: int) -> None:
    """Do the forward and backward pass of a step, as `Trainer` does."""
    model: Any = gated.model
    leaves = {kind: torch.ones(shape).requires_grad_() for kind, shape in gated.shapes.items()}
    squares = {kind: torch.zeros(shape) for kind, shape in gated.shapes.items()}
    with torch.no_grad():
        states = final_hidden(teacher, tokens)
    with gated.masks(leaves, squares):
        student, head = final_hidden(model, tokens), dataclasses.replace(OutputHead.of(model), chunk_bytes=chunk_bytes)
        distill(student, states, head, tokens[:, 1:].reshape(-1), 2.0)[0].backward()


def _build(config: Mapping[str, Any]) -> Any:
    """Return a frozen bfloat16 model on fake tensors."""
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {name: value for name, value in config.items() if name not in ("dtype", "torch_dtype")}
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**values), dtype=torch.bfloat16, trust_remote_code=False
    )
    model.requires_grad_(False)
    return model.eval()


@contextmanager
def _mesh(number: int) -> Iterator[DeviceMesh | None]:
    """Pretend to be one of several processes, whose collectives return at once; yield None for a single one."""
    if number == 1:
        yield None
        return
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=number)
    try:
        yield init_device_mesh("cpu", (number,))
    finally:
        distributed.destroy_process_group()


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that exist after every operation, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self.storages: weakref.WeakSet[Any] = weakref.WeakSet()

    @property
    def now(self) -> int:
        """Bytes that exist now; FSDP frees a layer by resizing its storage to 0."""
        return sum(storage.nbytes() for storage in self.storages)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.storages.add((tensor._local_tensor if isinstance(tensor, DTensor) else tensor).untyped_storage())
        self.peak = max(self.peak, self.now)
        return result


if __name__ == "__main__":
    main()
