"""Trains the gates of a model, and its weights if the run says so; and how that is decided."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from accelerate import Accelerator

from ddp_prune.alm import AlmTrainer
from ddp_prune.budget import Pool
from ddp_prune.gates import GatedModel
from ddp_prune.run import Run
from ddp_prune.trainer import Learned, Trainer
from ddp_training.batches import Batches, fit_batches
from ddp_training.loop import FamilyCheckpoints, Report, take_steps
from ddp_training.memory import fit_attention
from ddp_training.run_state import RunState
from ddp_training.weights import TrainedWeights

TRAINERS = {"gradual": Trainer, "alm": AlmTrainer}


def train(
    gated: GatedModel,
    blocks: torch.Tensor,
    run: Run,
    pools: Sequence[Pool],
    accelerator: Accelerator,
    state: RunState,
    report: Report,
    weights: TrainedWeights | None = None,
    teacher: Any = None,
    family: FamilyCheckpoints = FamilyCheckpoints(),  # noqa: B008 (a tuple)
    make: Callable[..., Trainer] | None = None,
    loss_mask: torch.Tensor | None = None,
) -> Learned:
    """Train the gates of a model and return them; resumes from `state` if it can.

    blocks: int64 [num_blocks, seq_len].
    weights: the model's weights, if they are trained too; `teacher` is then another copy of the model.
    make: makes another trainer than the recipe's controller.
    loss_mask: as of `Batches`.

    Raises: as `take_steps`.
    """
    recipe = run.recipe
    model: Any = gated.model
    batches = Batches(blocks, recipe, accelerator, loss_mask)
    stock_attention = model.config._attn_implementation
    fit_batches(gated, batches, recipe, accelerator, state.say)
    trainer = (make or TRAINERS[recipe.controller])(gated, batches, run, pools, accelerator)
    if weights:
        if teacher is not None:
            fit_attention(teacher, recipe.seq_len, accelerator.device)
        trainer.train_weights(weights, teacher)
    take_steps(trainer, recipe, run.steps.last, accelerator, state, report, family)
    model.set_attn_implementation(stock_attention)  # evaluated like the dense model
    return trainer.learned()
