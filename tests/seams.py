"""The only file of the tests that names the inside of prune: when a part of it is renamed, this file alone changes.

Tests take names from here. A dense model is opened (`open_source`), given gates (`gated`), masked, and cut by its gates
(`cut`); a run on random blocks is made in this process (`Lab`) or stopped at a step (`die_at`).
"""

# ruff: noqa: F401  # imported for the tests

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from click.testing import Result

from ddp_prune import devices, jobs, plan, resolve, verbs
from ddp_prune import export as export_module
from ddp_prune import fit as fit_module
from ddp_prune import quantize as quantize_module
from ddp_prune import trim as trim_module
from ddp_prune.core import batches as batches_module
from ddp_prune.core import experts as experts_module
from ddp_prune.core import gates as gates_module
from ddp_prune.core import learn as learn_module
from ddp_prune.core import loop as loop_module
from ddp_prune.core import loss as loss_module
from ddp_prune.core import selection
from ddp_prune.core import weights as weights_module
from ddp_prune.core.alm import AugmentedLagrangian, gate, learning_rate, retention_score, sharpness_at
from ddp_prune.core.batches import Batches
from ddp_prune.core.budget import Pool, keep_schedule
from ddp_prune.core.decoder import ROTARY, fuse_elementwise
from ddp_prune.core.experts import grouped, looped
from ddp_prune.core.gates import GatedModel, Masks, NarrowLayers, _Scale
from ddp_prune.core.learn import PRIOR_PRECISION, Learned, Trainer, learn, natural_step
from ddp_prune.core.loop import Learner
from ddp_prune.core.loss import OutputHead, distill, final_hidden
from ddp_prune.core.processes import raise_on_all_ranks
from ddp_prune.core.rate import RATES, change, find_rate
from ddp_prune.core.schedule import WARMUP, AlmSettings, Schedule, Steps, Unsaved
from ddp_prune.core.selection import best_support, choose_counts, cut_rows
from ddp_prune.core.weights import BETAS, LARGEST_GRADIENT, TrainedWeights, UpdatedWeights, rate_of
from ddp_prune.devices import free_memory
from ddp_prune.export import apply_masks, export, read_masks, read_scores
from ddp_prune.fidelity import open_model
from ddp_prune.fit import MODES, Devices, Fit, Mode, choose, held_bytes
from ddp_prune.models import evaluation as evaluation_module
from ddp_prune.models import loading as loading_module
from ddp_prune.models.evaluation import bos_warning, losses_of
from ddp_prune.models.loading import check_head, load_model, load_sharded
from ddp_prune.models.source import Source, open_source
from ddp_prune.plan import estimate
from ddp_prune.pools import make_pools
from ddp_prune.recipe import Recipe, load_recipe, load_recipes
from ddp_prune.resolve import choose_in_minutes, fit_minutes, resolve_training_mode
from ddp_prune.run import Run, steps_of
from ddp_prune.run_folder import RunFolder, find_record
from ddp_prune.settings import RecoveryRecipe
from ddp_prune.text import blocks as blocks_module
from ddp_prune.text import rows as rows_module
from ddp_prune.text import vocabulary as vocabulary_module
from ddp_prune.text.blocks import Blocks, check_watched, load_blocks, select_loss_mask
from ddp_prune.text.documents import Document, DocumentReader
from ddp_prune.text.messages import Notes
from ddp_prune.text.rows import Rows, check_sources, open_rows, sources_of
from ddp_prune.text.templates import ChatTemplate
from ddp_prune.text.tokens import Tokens, load_tokenizer, tokenize
from ddp_vllm import model_files
from ddp_vllm.checkpoint import Checkpoint
from ddp_vllm.dimensions import unit_shapes
from ddp_vllm.remote_code.files import weight_files

BLOCKS = torch.randint(1, 320, (64, 16), generator=torch.Generator().manual_seed(0))
STEPS = 12  # 8 of search, 4 of polish
SETTINGS: dict[str, Any] = {
    "sparsity": 0.4, "steps": STEPS, "batch_size": 4, "seq_len": 16, "save_every": 3,
    "alm": AlmSettings(learning_rate=0.1),  # the paper's moves little in 8 steps
}  # fmt: skip


def gated(source: Source, head_unit: str = "auto", dtype: str = "float32") -> GatedModel:
    """Load a model and put gates into it."""
    return GatedModel(load_model(source, dtype), source.widths, source.sizes, head_unit)


def cut(source: Source, gates: Masks, folder: Path, head_unit: str = "auto") -> Checkpoint:
    """Write the model without the units whose gates are 0."""
    return export(source, gates, folder, head_unit=head_unit, provenance={})


def random_gates(source: Source, head_unit: str = "auto", kept: float = 0.6, seed: int = 0) -> Masks:
    """Scales around 1, and a share of units that stay."""
    generator = torch.Generator().manual_seed(seed)
    return {
        kind: (torch.rand(shape, generator=generator) + 0.5) * (torch.rand(shape, generator=generator) < kept)
        for kind, shape in unit_shapes(source.sizes, head_unit).items()
    }


def export_whole(source: Source, folder: Path, head_unit: str = "kv-group") -> Path:
    """Export a model from which nothing is removed."""
    cut(source, {kind: torch.ones(n) for kind, n in unit_shapes(source.sizes, head_unit).items()}, folder, head_unit)
    return folder


@torch.no_grad()
def logits(model: Any, tokens: torch.Tensor, **inputs: Any) -> torch.Tensor:
    return model(tokens, **inputs).logits


def losses(model: Any, blocks: torch.Tensor) -> list[float]:
    """Return the mean loss of each block, in nats per token."""
    return losses_of(model, blocks)[0]


def document(row: Any, tokenizer: Any, notes: Notes | None = None) -> Document:
    """Return a row as a document."""
    reader = DocumentReader("chat.jsonl", ChatTemplate(tokenizer), notes or Notes())
    return next(reader.read(lambda: iter([("chat.jsonl, line 1", row)])))


def in_loss(document: Document) -> str:
    """Return the characters that contribute to the loss, with | for the others."""
    assert document.loss_mask is not None
    pairs = zip(document.text, document.loss_mask, strict=True)
    return "".join(character if mask else "|" for character, mask in pairs)


def heldout_of(folder: Path, text: Path, num_blocks: int = 4) -> torch.Tensor:
    """Return the blocks of a text that `prune` holds out."""
    sizes = {"seq_len": 16, "train_blocks": 2, "heldout_blocks": num_blocks, "min_train_blocks": 2, "seed": 0}
    return load_blocks(str(text), load_tokenizer(str(folder)), **sizes).heldout  # type: ignore[arg-type]


def pools_of(gated: GatedModel, recipe: Recipe) -> Sequence[Pool]:
    """Return the pools of a recipe for a loaded model."""
    model: Any = gated.model
    shapes = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    return make_pools(model.config.to_dict(), shapes, gated.sizes, gated.head_unit, recipe)


@contextmanager
def saved_in(output: Path, recipe: Recipe) -> Iterator[RunFolder]:
    """Yield where a run is saved that is trained in this process."""
    run = RunFolder(output, Accelerator())
    with run.open([recipe], overwrite=False):
        run.begin({}, {}, shared_by=1)
        yield run


class Lab:
    """One tiny gated model and the runs made with it."""

    def __init__(self, model: Path, folder: Path, head_unit: str) -> None:
        self.folder, self.name = folder, str(model)
        self.gated = gated(open_source(str(model)), head_unit)
        self.forwards = 0  # of the model body, teacher and student alike
        self.gated.model.model.register_forward_pre_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.forwards += 1

    def recipe(self, **changes: Any) -> Recipe:
        return Recipe(model=self.name, **SETTINGS | changes)

    def trainer(self, loss_mask: torch.Tensor | None = None, **changes: Any) -> Trainer:
        recipe = self.recipe(**changes)
        schedule = Run.alone(recipe).schedule
        batches = Batches(BLOCKS, schedule, Accelerator(), loss_mask)
        return Trainer(self.gated, batches, schedule, pools_of(self.gated, recipe))

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
            return learn(self.gated, blocks, Run.alone(recipe).schedule, pools, progress.accelerator, progress, report)


def assert_same(first: Learned, second: Learned) -> None:
    """To the bit."""
    assert first.rounding == second.rounding
    for name in ("gates", "z", "saliency", "routed"):
        one, other = getattr(first, name), getattr(second, name)
        assert one.keys() == other.keys() and all(torch.equal(one[kind], other[kind]) for kind in one), name


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


def leave_unquantized(patch: pytest.MonkeyPatch) -> None:
    """Let `quantize` write weights as they are, for what it does besides, without llm-compressor."""

    def compress(checkpoint: Checkpoint, scheme: str, work: Path, **_: Any) -> None:
        for file in weight_files(checkpoint.folder):
            shutil.copy(file, work)
        (work / "config.json").write_text('{"quantization_config": {"quant_method": "compressed-tensors"}}')

    patch.setattr(quantize_module, "_compress", compress)
    patch.setattr(quantize_module, "find_spec", lambda _: True)


def out_of_memory(*_: object, **__: object) -> None:
    """Stand in for what a GPU refuses: none runs in these tests."""
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def triton_kernels() -> Any:
    """Return the module of the kernels on gates and of the loss; Triton is imported only here."""
    from ddp_prune.core import kernels

    return kernels
