"""The loop: search the support, round it exactly, polish the scales of what is kept; save, and go on from a save."""

import time
from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator

from ddp_prune.alm import AlmTrainer
from ddp_prune.devices import fit_activations, load_run
from ddp_prune.gates import GatedModel
from ddp_prune.recipe import Recipe
from ddp_prune.run_state import RunState
from ddp_prune.trainer import Batches, Learned, Trainer
from ddp_vllm.errors import TrainingError

SAVE_SECONDS = 600.0  # a step of the paper's 16 sequences of 2,048 tokens takes minutes on a CPU
TRAINERS = {"gradual": Trainer, "alm": AlmTrainer}


def train(
    gated: GatedModel,
    blocks: torch.Tensor,
    recipe: Recipe,
    accelerator: Accelerator,
    run: RunState,
    report: Callable[[dict[str, float]], None],
) -> Learned:
    """Learn the gates of a frozen model on `blocks` (int64 [num_blocks, seq_len]); goes on from `run` if it can.

    `report` is called after every step with its metrics (losses in nats a token, sparsity a module type, tokens and
    seconds). Raises: TrainingError if the loss is not a number or memory runs out; the last saved masks stay in the
    run's folder.
    """
    batches = Batches(blocks, recipe, accelerator)
    model: Any = gated.model
    stock_attention = model.config._attn_implementation
    fitting = fit_activations(gated, recipe.activation_checkpointing, batches.micro, recipe.seq_len, accelerator)
    if fitting < batches.micro and not recipe.micro_batch_size:
        if accelerator.is_main_process:
            run.say(f"memory is short: {fitting} sequences a forward pass instead of {batches.micro}")
        batches.micro = fitting
    trainer = TRAINERS[recipe.controller](gated, batches, recipe, accelerator)
    first, saved, saved_at = 0, load_run(run, accelerator), time.perf_counter()
    if saved is None:
        run.start()
    else:
        first, tensors, rounding = saved
        trainer.restore(tensors, rounding)
    for step in range(first, recipe.steps):
        began = time.perf_counter()
        try:
            metrics = trainer.step(step)
        except (TrainingError, torch.OutOfMemoryError) as error:
            kept = f"the masks of the last save are in {run.folder}" if run.state.exists() else "nothing was saved yet"
            raise TrainingError(f"{_reason(error, step)}; {kept}; {_remedy(error, recipe, step)}") from error
        seconds = time.perf_counter() - began
        metrics |= {"seconds": seconds, "tokens": float(recipe.batch_size * recipe.seq_len)}
        run.log(metrics)
        due = (step + 1) % recipe.save_every == 0 or time.perf_counter() - saved_at > SAVE_SECONDS
        if due or step + 1 == recipe.steps:  # what comes after the last step can fail too
            run.save(step + 1, trainer.state(), trainer.rounding)
            saved_at = time.perf_counter()
        accelerator.log(metrics, step=step + 1)
        report(metrics)
    model.set_attn_implementation(stock_attention)  # what is judged is judged as the dense model was
    return trainer.learned()


def _reason(error: Exception, step: int) -> str:
    return str(error) if isinstance(error, TrainingError) else f"a device ran out of memory at step {step + 1}"


def _remedy(error: Exception, recipe: Recipe, step: int) -> str:
    """Say what to try."""
    if not isinstance(error, TrainingError):
        return 'try a recipe with micro_batch_size = 1 and activation_checkpointing = "on", or --shard on more devices'
    if recipe.controller != "gradual" and step < recipe.search_steps:
        return "try a lower learning_rate in the recipe's table [alm]"
    return "check the weights" if recipe.dtype == "float32" else 'try a recipe with dtype = "float32"'
