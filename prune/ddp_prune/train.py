"""Trains one size: the dense model and text in, its gates, their evaluation and the updated weights
out."""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from rich.console import Console

from ddp_prune.core.budget import Pool
from ddp_prune.core.fusion import fuse_elementwise
from ddp_prune.core.gates import GatedModel
from ddp_prune.core.learn import Joint, learn
from ddp_prune.core.passes import explained
from ddp_prune.core.saved import Unsaved
from ddp_prune.core.trainer import Learned
from ddp_prune.core.weights import TrainedWeights, UpdatedWeights
from ddp_prune.models.evaluation import Evaluation, bos_warning
from ddp_prune.models.loading import load, load_teacher
from ddp_prune.models.source import Source, weight_files
from ddp_prune.pools import head_unit_of
from ddp_prune.recipe import Recipe
from ddp_prune.run import Run
from ddp_prune.run_folder import inputs_of
from ddp_prune.text.blocks import Blocks, select_loss_mask
from ddp_prune.text.rows import sources_of
from ddp_prune.text.tokens import load_tokenizer
from ddp_prune.texts import load_text, load_watched
from ddp_vllm.errors import ModelError
from ddp_vllm.model_files import tokenizer_and_config_files
from ddp_vllm.pages.progress import StepProgress


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The dense model, the text and the devices that all sizes share."""

    source: Source
    head_unit: str
    tokenizer: Any
    blocks: Blocks
    watched: Mapping[str, torch.Tensor]
    """Blocks of the texts that are only evaluated."""
    loss_mask: torch.Tensor | None
    """Of the blocks to train on, as of `Batches`."""
    fingerprint: dict[str, Any]
    """The identity of text and weights (`inputs_of`)."""
    accelerator: Accelerator
    console: Console
    print_line: Callable[[str], None]
    """Prints a line, from one process."""

    def announce(self, run: Run) -> None:
        """Print what the run is about to do, before the model is loaded."""
        recipe, source, blocks = run.recipe, self.source, self.blocks
        passes = run.steps.last * recipe.batch_size / len(blocks.train)
        units = {"attn": self.head_unit, "mlp": "channel", "experts": "expert channel"}
        unit = self.head_unit if recipe.whole_experts else units[source.sizes.blocks[0]]
        trained = {"masks": "masks", "lora": "masks and low-rank additions", "weights": "masks and weights"}[run.train]
        self.print_line(
            f"text: {blocks.num_tokens:,} tokens of {recipe.data}, {blocks.train.numel():,} to train on "
            f"({passes:.2g} passes), {blocks.heldout.numel():,} held out"
        )
        self.print_line(
            f"model: {source.config['model_type']}, {source.sizes.num_layers} layers, unit {unit}; trained: {trained}"
        )


def read_inputs(run: Run, source: Source, accelerator: Accelerator, console: Console) -> Inputs:
    """Read the text for the steps of `run`, the longest one. Raises: as `load_text`."""
    recipe, tokenizer = run.recipe, load_tokenizer(str(source.folder))
    known = recipe, tokenizer, recipe.model, source.text_config.get("vocab_size", sys.maxsize)
    train_blocks = run.steps.last * recipe.batch_size
    blocks = load_text(recipe.data, *known, train_blocks=train_blocks, min_train_blocks=recipe.batch_size)
    watched = load_watched(sources_of(recipe.watch) if recipe.watch else [], blocks, *known)
    files = weight_files(source.folder), tokenizer_and_config_files(source.folder)
    profile = str(run.profile.path) if run.profile else ""
    show = partial(console.print, markup=False, soft_wrap=True)  # a file's name may contain [
    print_line: Callable[[str], None] = show if accelerator.is_main_process else lambda _: None
    for text in watched.values():
        for note in text.notes:
            print_line(note)
    return Inputs(
        source=source,
        head_unit=head_unit_of(recipe, source),
        tokenizer=tokenizer,
        blocks=blocks,
        watched={name: text.heldout for name, text in watched.items()},
        loss_mask=select_loss_mask(blocks, recipe.learn_from, recipe.data, print_line),
        fingerprint=inputs_of({"train": blocks.train, "heldout": blocks.heldout}, *files, profile=profile),
        accelerator=accelerator,
        console=console,
        print_line=print_line,
    )


class Result(NamedTuple):
    """What the checkpoint of a size is written from."""

    learned: Learned
    evaluation: dict[str, Any]
    """Perplexity and samples of the dense and the pruned model."""
    transform: UpdatedWeights | None
    """The updated weights; None if only masks were trained."""


def train_size(inputs: Inputs, run: Run, pools: Sequence[Pool], progress: Unsaved) -> Result:
    """Load the dense model, train gates, and weights too if the run says so, and evaluate both
    models.

    Raises: ModelError if the dense model cannot read; TrainingError as `take_steps`, or if no
        sequence fits a device.
    """
    set_seed(run.recipe.seed)
    with explained(too_large(run.recipe)):
        return _train_size(inputs, run, pools, progress)


def too_large(recipe: Recipe) -> str:
    """Return the message for a model and a sequence that do not fit a device."""
    return (
        f"{recipe.model} and a sequence of {recipe.seq_len:,} tokens do not fit into the memory of a device; free it "
        "of other processes, lower --seq-len, or distribute the weights over more devices with --shard"
    )


def _train_size(inputs: Inputs, run: Run, pools: Sequence[Pool], progress: Unsaved) -> Result:
    recipe, source, accelerator = run.recipe, inputs.source, inputs.accelerator
    gated, weights = load_trained(run, source, inputs.head_unit, accelerator)
    joint = Joint(weights, inputs.blocks.heldout) if weights else None
    evaluation = Evaluation(
        {recipe.data: inputs.blocks.heldout, **inputs.watched}, inputs.tokenizer, print_line=inputs.print_line
    )
    evaluation.evaluate("dense", gated.model)
    if not math.isfinite(dense := evaluation.perplexity(recipe.data)["dense"]):
        raise ModelError(
            f"{recipe.model} has perplexity {dense} before pruning; its weights are broken, or dtype is too small"
        )
    if warning := bos_warning(gated.model, recipe.model, inputs.tokenizer, inputs.blocks.heldout):
        inputs.print_line(warning)
    if joint and run.train == "weights" and recipe.distillation > 0:
        joint = joint._replace(teacher=load_teacher(source, recipe, accelerator, gated.model))
    phase = partial(_phase, run, {pool.name: 1.0 - pool.keep_ratio for pool in pools})
    with StepProgress(inputs.console, run.steps.last, phase, accelerator.is_main_process) as report:
        learned = learn(
            gated, inputs.blocks.train, run, pools, accelerator, progress, report, joint,
            loss_mask=inputs.loss_mask, print_line=inputs.print_line,
        )  # fmt: skip
    gates = {kind: values.to(accelerator.device) for kind, values in learned.gates.items()}
    untrained, transform = dict[str, float](), None
    if joint:
        if recipe.distillation > 0:
            dense = gated
            if joint.teacher is not None:
                dense = GatedModel(joint.teacher, source.family, source.sizes, inputs.head_unit)
            with dense.masks(gates), joint.weights.adapters_disabled():
                untrained = evaluation.divergences(dense.model)
        transform = joint.weights.finish()
    with gated.masks(gates):
        evaluation.evaluate("pruned", gated.model)
    warn_of_harm(evaluation, untrained, inputs.print_line)
    for name in inputs.watched:
        inputs.print_line(evaluation.summary(name))
    metrics = {"perplexity": evaluation.perplexity(recipe.data), **evaluation.samples()}
    if inputs.watched:
        metrics["watched"] = {name: evaluation.perplexity(name) for name in inputs.watched}
    return Result(learned, metrics, transform)


def load_trained(
    run: Run, source: Source, head_unit: str, accelerator: Accelerator
) -> tuple[GatedModel, TrainedWeights | None]:
    """Load the model of a run with its gates, and what is trained besides the gates; it must not
    have run forward."""
    model, weights = load(source, run.recipe, accelerator), None
    if run.train != "masks":  # gates scale the input of adapters too, so these are added first
        weights = TrainedWeights(model, accelerator, run.train, optimizer=run.optimizer)
    if accelerator.device.type == "cuda":
        with suppress(Exception):  # without a C compiler, eager mode is slower and right
            fuse_elementwise(model)
    return GatedModel(model, source.family, source.sizes, head_unit), weights


def warn_of_harm(evaluation: Evaluation, untrained: Mapping[str, float], print_line: Callable[[str], None]) -> None:
    """Print where the trained weights diverge further from the dense model than its own weights
    under these gates.

    untrained: the divergences of the latter.
    """
    for name, before in untrained.items():
        if (trained := evaluation.agreements[name]["pruned"]["kl"]) > before:
            print_line(
                f"on {name} training the weights did harm: KL {trained:.3f} from the dense model, {before:.3f} with "
                "its own weights under the same masks; ddp-vllm apply makes that model from the masks file, and "
                "--train masks trains masks only"
            )


def _phase(run: Run, targets: Mapping[str, float], metrics: dict[str, float]) -> tuple[str, str]:
    """Return the phase of a step and the sparsity it reached, for the progress bar."""
    shares = {name.removesuffix("_sparsity"): value for name, value in metrics.items() if name.endswith("_sparsity")}
    goals = {name: f" of {share:.0%}" for name, share in targets.items()}
    sparsity = ", ".join(f"{name} {value:.1%}{goals.get(name, '')}" for name, value in shares.items())
    annealed = f"μ {metrics['mu']:.3f} " if "mu" in metrics else ""
    phase = "search" if metrics["step"] <= run.steps.search else "polish"
    return phase, f"sparsity {sparsity} {annealed}"
