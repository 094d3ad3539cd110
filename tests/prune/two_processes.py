"""Two processes, started with the variables that torchrun sets, or one, and what `test_processes.py` runs in them.

They are forked from a process that has imported what is slow to import; it does so once for all tests.
"""

# ruff: noqa: E402

import json
import multiprocessing.forkserver
import os
import runpy
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

sys.modules |= dict.fromkeys(("sklearn", "scipy"))  # as in conftest.py

import seams
import torch
import torch.distributed
from accelerate import Accelerator
from safetensors.torch import save_file
from seams import GatedModel, Recipe, Trainer, load_sharded, open_source
from seams import loop_module as train_module

from ddp_vllm.errors import TextError

BLOCKS = torch.randint(1, 320, (12, 16), generator=torch.Generator().manual_seed(0))  # four passes in 12 steps
SETTINGS: dict[str, Any] = {
    "sparsity": 0.4, "steps": 12, "batch_size": 4, "seq_len": 16, "save_every": 3, "micro_batch_size": 1,
}  # fmt: skip
SLOW_TO_IMPORT = ["seams", "datasets", "matplotlib.pyplot", "transformers.models.llama.modeling_llama"]
PATIENCE = 1200  # seconds, for a busy machine


def forking() -> Any:
    """Return the context whose processes are forks."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["two_processes", *SLOW_TO_IMPORT])
    with patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):  # for Python 3.11 and 3.12, which forget it
        multiprocessing.forkserver.ensure_running()
    return context


def launch(folder: Path, function: Callable[..., None], *arguments: Any) -> list[tuple[int | None, str, str]]:
    """Call a function in two processes that work in `folder`; return exit code, stdout and stderr of each."""
    context = forking()
    # held here, as torchrun does: a port that was free is another's by the time process 0 asks for it
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)} | {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }
    with tempfile.TemporaryDirectory() as streams:
        started = [
            context.Process(target=_be, args=(rank, address, folder, Path(streams), function, arguments))
            for rank in (0, 1)
        ]
        for process in started:
            process.start()
        for process in started:
            process.join(PATIENCE)
            process.kill()
            process.join()
        said = [[Path(streams, f"{name}-{rank}").read_text() for name in ("stdout", "stderr")] for rank in (0, 1)]
    return [(process.exitcode, stdout, stderr) for process, (stdout, stderr) in zip(started, said, strict=True)]


def _be(
    rank: int, address: dict[str, str], folder: Path, streams: Path, function: Callable[..., None], arguments: Any
) -> None:
    """Be one of the two."""
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        with open(streams / f"{name}-{rank}", "wb") as file:
            os.dup2(file.fileno(), descriptor)
    ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ.update(address | ranks | {"DDP_VLLM_CACHE": str(folder / "cache")})
    os.chdir(folder)
    torch.set_num_threads(1)
    function(*arguments)


def command_line(*arguments: str) -> None:
    """Be `ddp-vllm` with these arguments."""
    sys.argv = ["ddp-vllm", *arguments]
    runpy.run_module("ddp_vllm", run_name="__main__", alter_sys=True)


def command_line_on(cache: Path, terminal: str, *arguments: str) -> None:
    """Be that in a terminal."""
    for descriptor in (0, 1, 2):
        os.dup2(os.open(terminal, os.O_RDWR | os.O_NOCTTY), descriptor)
    os.environ["DDP_VLLM_CACHE"] = str(cache)
    command_line(*arguments)


def stopped_command_line(stop: int, *arguments: str) -> None:
    """Be `ddp-vllm`, interrupted before the step of this number. Nothing is compiled, which takes half a minute."""
    step = Trainer.step

    def interrupted(self: Trainer, number: int) -> dict[str, float]:
        if number == stop:
            raise KeyboardInterrupt
        return step(self, number)

    torch.compiler.set_stance("force_eager")
    with patch.object(Trainer, "step", interrupted):
        command_line(*arguments)


def learn_in_two(model: str, folder: Path) -> None:
    """Learn masks in several ways; process 0 writes `<case>.safetensors`, each process `facts-<rank>.json`."""
    accelerator = Accelerator(cpu=True)
    rank, world = accelerator.process_index, accelerator.num_processes
    facts: dict[str, Any] = {"world": world, "steps": []}
    source, recipe = open_source(model), Recipe(model=model, **SETTINGS)
    unit = "auto" if source.sizes.num_experts else "query-head"
    unsharded = GatedModel(seams.load_model(source, "float32"), source.widths, source.sizes, unit)
    sharded_model = load_sharded(source, "float32", accelerator.device, world)
    sharded = GatedModel(sharded_model, source.widths, source.sizes, unit)

    def run(name: str, gated: GatedModel, recipe: Recipe, stop: int = 0) -> None:
        def report(metrics: dict[str, float]) -> None:
            facts["steps"].append([name, metrics["step"]])
            if metrics["step"] == stop:
                raise KeyboardInterrupt

        with seams.saved_in(folder / name, recipe) as progress:
            schedule, pools = seams.Run.alone(recipe).schedule, seams.pools_of(gated, recipe)
            learned = seams.learn(gated, BLOCKS, schedule, pools, accelerator, progress, report)
        if rank == 0:
            save_file(learned.gates | {f"{kind}.counts": n for kind, n in learned.routed.items()}, folder / name)

    run("sharded", sharded, replace(recipe, activation_checkpointing="on"))
    try:
        run("resumed", unsharded, recipe, stop=5)
    except KeyboardInterrupt:
        run("resumed", unsharded, recipe)
    ticks = count()
    clock = SimpleNamespace(perf_counter=lambda: next(ticks) * (10.0, 10_000.0)[rank])  # a step asks three times
    choose = Trainer.choose
    closed = {kind: torch.zeros(shape, dtype=torch.bool) for kind, shape in unsharded.shapes.items()}
    with (
        patch.object(train_module, "time", clock),
        patch.object(Trainer, "choose", lambda *parts: closed if rank else choose(*parts)),  # the main process decides
    ):
        run("clocks", unsharded, replace(recipe, save_every=0))
    facts["bytes"] = {
        name: getattr(parameter, "_local_tensor", parameter).nbytes
        for name, parameter in sharded_model.named_parameters()
    }
    try:
        with seams.raise_on_all_ranks(accelerator):
            if rank == 1:
                raise TextError("only process 1 cannot read its text")
    except TextError as error:
        facts["error"] = str(error)
    (folder / f"facts-{rank}.json").write_text(json.dumps(facts), encoding="utf-8")
    accelerator.end_training()


def summed_gradients(model: Any, accelerator: Accelerator, numbers: Sequence[int]) -> dict[str, torch.Tensor]:
    """Return the full gradients of all weights that learn, from these sequences of each process."""
    weights = seams.TrainedWeights(model, accelerator)
    for number in numbers:
        tokens = BLOCKS[[number]]
        hidden, labels = seams.final_hidden(model, tokens), tokens[:, 1:].flatten()
        seams.distill(hidden, None, seams.OutputHead.of(model), labels, 0.0)[0].backward()
    weights.reduce_gradients()
    return {name: getattr(each, "full_tensor", lambda each=each: each)() for name, each in weights.sums.items()}


def sum_gradients(model: str, folder: Path) -> None:
    """Sum the gradients of sharded weights in bfloat16 over four sequences; process 0 writes `gradients`."""
    accelerator = Accelerator(cpu=True)
    rank, world = accelerator.process_index, accelerator.num_processes
    sharded = load_sharded(open_source(model), "bfloat16", accelerator.device, world)
    gradients = summed_gradients(sharded, accelerator, range(rank, 4, world))
    if rank == 0:
        save_file(gradients, folder / "gradients")
    accelerator.end_training()
