"""Learns the gates of a model in memory, and its weights too: a loaded model, blocks of tokens and
budgets in; gates out.

This is the paper's algorithm end to end: masks, forward, backward, natural step, closing of gates (`Trainer.step`),
rounding and polish. Files, commands, pages and memory are no concern of this room.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator

from ddp_prune.core.alm import AlmTrainer
from ddp_prune.core.batches import Batches
from ddp_prune.core.budget import Pool
from ddp_prune.core.decoder import checkpoint_layers, fit_attention
from ddp_prune.core.gates import GatedModel
from ddp_prune.core.loop import Report, take_steps
from ddp_prune.core.rate import run_trials
from ddp_prune.core.saved import Unsaved
from ddp_prune.core.trainer import Learned, Trainer
from ddp_prune.core.weights import TrainedWeights, highest_rate
from ddp_prune.run import Run

TRAINERS = {"gradual": Trainer, "alm": AlmTrainer}


class Joint(NamedTuple):
    """What training the weights together with the masks requires."""

    weights: TrainedWeights
    heldout: torch.Tensor | None = None
    """Blocks on which the trials of the learning rate are judged; None: no trials."""
    teacher: Any = None
    """A copy of the dense model; None without distillation, and for adapters, which can be
    disabled."""


def learn(
    gated: GatedModel,
    blocks: torch.Tensor,
    run: Run,
    pools: Sequence[Pool],
    accelerator: Accelerator,
    progress: Unsaved,
    report: Report,
    joint: Joint | None = None,
    make: Callable[..., Trainer] | None = None,
    loss_mask: torch.Tensor | None = None,
    print_line: Callable[[str], None] = lambda _: None,
) -> Learned:
    """Train the gates of a model and return them; resumes from `progress` if it can.

    blocks: int64 [num_blocks, seq_len].
    joint: how weights are trained too, if they are.
    make: makes another trainer than the recipe's controller.
    loss_mask: as of `Batches`.

    Raises: as `take_steps`.
    """
    recipe = run.recipe
    model: Any = gated.model
    stock_attention = model.config._attn_implementation
    batches = prepare_passes(model, Batches(blocks, recipe, accelerator, loss_mask), run)
    trainer = (make or TRAINERS[recipe.controller])(gated, batches, run, pools, accelerator)
    if joint:
        if joint.teacher is not None:
            fit_attention(joint.teacher, recipe.seq_len, accelerator.device)
        find = partial(resolve_learning_rate, joint, trainer, print_line)
        trainer.train_weights(joint.weights, joint.teacher, find)
    take_steps(trainer, recipe, run.steps.last, accelerator, progress, report)
    model.set_attn_implementation(stock_attention)  # evaluated like the dense model
    return trainer.learned()


def prepare_passes(model: Any, batches: Batches, run: Run) -> Batches:
    """Choose attention, checkpointed layers and the number of sequences of a pass as fitted."""
    fit_attention(model, run.recipe.seq_len, batches.accelerator.device)
    checkpoint_layers(model, run.checkpointed or run.recipe.activation_checkpointing == "on")
    batches.micro_batch_size = run.num_sequences or batches.micro_batch_size
    return batches


def resolve_learning_rate(joint: Joint, trainer: Trainer, print_line: Callable[[str], None]) -> dict[str, Any]:
    """Return the highest rate of the weights, as asked or found by trials, in the form of
    `Learned.rate`."""
    recipe, model = trainer.run.recipe, trainer.gated.model
    if recipe.learning_rate:
        return {"highest": recipe.learning_rate}
    if joint.heldout is None or trainer.teacher is None:
        return {"highest": highest_rate(trainer.run.train, trainer.gated.sizes.hidden_size)}
    trials = run_trials(
        model,
        trainer.teacher,
        joint.weights,
        trainer.batches,
        joint.heldout,
        recipe.distillation,
        recipe.seed,
        print_line,
    )
    print_line(str(trials))
    return {
        "highest": trials.rate,
        "dense": trials.dense,
        "trials": {f"{rate:g}": loss for rate, loss in trials.losses.items()},
    }
