"""Runs on tiny models, in this process and by the command line; and folders to change."""

import json
import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from click.testing import Result
from commands import invoke
from safetensors.torch import load_file, save_file

from ddp_prune.core.batches import Batches
from ddp_prune.core.budget import Pool
from ddp_prune.core.gates import GatedModel
from ddp_prune.core.learn import learn
from ddp_prune.core.trainer import Learned, Trainer
from ddp_prune.export import export
from ddp_prune.models.loading import load_model
from ddp_prune.models.source import Source, open_source
from ddp_prune.pools import make_pools
from ddp_prune.recipe import AlmSettings, Recipe
from ddp_prune.run import Run
from ddp_prune.run_folder import RunFolder, SizeFolder
from ddp_prune.text.blocks import load_blocks
from ddp_prune.text.tokens import load_tokenizer
from ddp_vllm.families import unit_shapes

BLOCKS = torch.randint(1, 320, (64, 16), generator=torch.Generator().manual_seed(0))
STEPS = 12  # 8 of search, 4 of polish
SETTINGS: dict[str, Any] = {
    "sparsity": 0.4, "steps": STEPS, "batch_size": 4, "seq_len": 16, "save_every": 3,
    "alm": AlmSettings(learning_rate=0.1),  # the paper's moves little in 8 steps
}  # fmt: skip
SMALL = ["--steps", "6", "--batch-size", "2", "--seq-len", "16", "--train", "masks", "--learning-rate", "2e-4"]


def pools_of(gated: GatedModel, recipe: Recipe) -> Sequence[Pool]:
    """Return the pools of a recipe for a loaded model."""
    model: Any = gated.model
    shapes = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    return make_pools(model.config.to_dict(), shapes, gated.sizes, gated.head_unit, recipe)


@contextmanager
def saved_in(output: Path, recipe: Recipe) -> Iterator[SizeFolder]:
    """Yield where a run is saved that is trained in this process."""
    run = RunFolder(output, Accelerator())
    with run.open([recipe], overwrite=False):
        run.begin({}, {}, shared_by=1)
        yield SizeFolder(run)


class Lab:
    """One tiny gated model and the runs made with it."""

    def __init__(self, model: Path, folder: Path, head_unit: str) -> None:
        source = open_source(str(model))
        self.folder, self.name = folder, str(model)
        self.gated = GatedModel(load_model(source, "float32"), source.family, source.sizes, head_unit)
        self.forwards = 0  # of the model body, teacher and student alike
        self.gated.model.model.register_forward_pre_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.forwards += 1

    def recipe(self, **changes: Any) -> Recipe:
        return Recipe(model=self.name, **SETTINGS | changes)

    def trainer(self, **changes: Any) -> Trainer:
        recipe = self.recipe(**changes)
        pools = pools_of(self.gated, recipe)
        return Trainer(self.gated, Batches(BLOCKS, recipe, Accelerator()), Run.alone(recipe), pools, Accelerator())

    def run(
        self,
        name: str = "out",
        report: Callable[[dict[str, float]], None] = lambda _: None,
        blocks: torch.Tensor = BLOCKS,
        **changes: Any,
    ) -> Learned:
        recipe = self.recipe(**changes)
        self.forwards = 0
        pools = pools_of(self.gated, recipe)
        with saved_in(self.folder / name, recipe) as progress:
            return learn(self.gated, blocks, Run.alone(recipe), pools, progress.run.accelerator, progress, report)

    def interrupted_run(self, stop: int, **changes: Any) -> tuple[Learned, list[float]]:
        """Return what a run learns that was interrupted at the end of step `stop`, and the steps it did."""
        steps: list[float] = []

        def report(metrics: dict[str, float]) -> None:
            steps.append(metrics["step"])
            if len(steps) == stop:
                raise KeyboardInterrupt

        try:
            self.run("broken", report, **changes)
        except KeyboardInterrupt:
            return self.run("broken", report, **changes), steps
        raise AssertionError(f"step {stop} was not reached")


def assert_same(first: Learned, second: Learned) -> None:
    """To the bit."""
    assert first.gates.keys() == second.gates.keys() and first.routed.keys() == second.routed.keys()
    for kind in first.gates:
        assert torch.equal(first.gates[kind], second.gates[kind]), kind
        assert torch.equal(first.z[kind], second.z[kind]), kind
        assert torch.equal(first.saliency[kind], second.saliency[kind]), kind
    for kind in first.routed:
        assert torch.equal(first.routed[kind], second.routed[kind]), kind
    assert first.rounding == second.rounding


def prune(model: Path | str, text: Path | str, output: Path, *more: str, sparsity: str = "0.4") -> Result:
    """Run `ddp-vllm prune` for six steps."""
    size = [] if "--sparsity" in more else ["--sparsity", sparsity]  # given twice, it would be two sizes
    return invoke("prune", model, *size, "--data", text, "-o", output, *SMALL, *more)


def recover(pruned: Path, output: Path, *more: str) -> Result:
    """Run `ddp-vllm recover` for thirty steps of two sequences of 16, unless told otherwise."""
    return invoke("recover", pruned, "-o", output, "--tokens", "960", *more)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Read the one file of a tiny model's weights."""
    return load_file(folder / "model.safetensors")


def assert_same_weights(one: Path, other: Path) -> None:
    """To the bit."""
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def heldout_of(folder: Path, text: Path) -> torch.Tensor:
    """Return the blocks of a text that `prune` holds out."""
    sizes = {"seq_len": 16, "train_blocks": 2, "heldout_blocks": 16, "min_train_blocks": 2, "seed": 0}
    return load_blocks(str(text), load_tokenizer(str(folder)), **sizes).heldout  # type: ignore[arg-type]


def die_at(number: int, run: Callable[[], Result], trainer: Any = Trainer) -> Result:
    """Run a command that is interrupted before the step of this number."""
    step = trainer.step

    def die(self: Any, at: int) -> dict[str, float]:
        if at == number:
            raise KeyboardInterrupt
        return step(self, at)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "step", die)
        result = run()
    assert result.exit_code == 130, result.output
    return result


def out_of_memory(*_: object, **__: object) -> None:
    """Stand in for what a GPU refuses: none runs in these tests."""
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def edit_json(path: Path, **changes: Any) -> None:
    """Change fields of a file that may not exist yet."""
    settings = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(settings | changes))


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Change the one file of a tiny model's weights."""
    tensors = weights(folder)
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def export_whole(source: Source, folder: Path, head_unit: str = "kv-group") -> Path:
    """Export a model from which nothing is removed."""
    gates = {kind: torch.ones(shape) for kind, shape in unit_shapes(source.sizes, head_unit).items()}
    export(source, gates, folder, head_unit=head_unit, provenance={})
    return folder


@contextmanager
def small_files(num_bytes: int) -> Iterator[None]:
    """Let no file of this process grow above that, as on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
