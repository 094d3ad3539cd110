"""The loop of every run: a step, its metrics, a save now and then; and going on from a save."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from accelerate import Accelerator

from ddp_prune.alm import AlmTrainer
from ddp_prune.budget import Pool
from ddp_prune.devices import SizedModel, fit_activations, fit_attention, load_run
from ddp_prune.gates import GatedModel
from ddp_prune.recipe import Recipe, RecoveryRecipe
from ddp_prune.run_state import RunState
from ddp_prune.trainer import Batches, Learned, Trainer
from ddp_prune.weights import LearningWeights
from ddp_vllm.errors import OutputError, TrainingError

SAVE_SECONDS = 600.0  # a step of the paper's 16 sequences of 2,048 tokens takes minutes on a CPU
TRAINERS = {"gradual": Trainer, "alm": AlmTrainer}

Report = Callable[[dict[str, float]], None]
Branches = tuple[RunState | None, RunState | None]
"""Of a family of sizes: the search of the size before, to begin from, and where to leave that of this one."""


class Learner(Protocol):
    """What takes steps: the gates of a frozen model, or weights."""

    @property
    def extra(self) -> dict[str, Any]:
        """What a saved run needs beside tensors, as plain data."""

    def step(self, step: int) -> dict[str, float]:
        """Do one optimizer step and return its metrics. Raises: TrainingError if the loss is not a number."""

    def state(self) -> dict[str, torch.Tensor]:
        """Return everything the next step depends on, as named tensors."""

    def restore(self, step: int, tensors: dict[str, torch.Tensor], extra: dict[str, Any]) -> None:
        """Take back what `state` and `extra` were before `step`."""


def train(
    gated: GatedModel,
    blocks: torch.Tensor,
    recipe: Recipe,
    pools: Sequence[Pool],
    accelerator: Accelerator,
    run: RunState,
    report: Report,
    weights: LearningWeights | None = None,
    dense: Any = None,
    branches: Branches = (None, None),
    make: Callable[..., Trainer] | None = None,
    scored: torch.Tensor | None = None,
    start: Mapping[str, float] | None = None,
) -> Learned:
    """Learn the gates of a model on `blocks` (int64 [num_blocks, seq_len]); goes on from `run` if it can.

    The model's weights are frozen; or `weights` are those of it that learn, and `dense` is another copy of it,
    the teacher. `make`
    makes another trainer than that of the recipe's controller. scored: as of `Batches`. start: as of `Trainer`.
    Raises: as `take_steps`.
    """
    batches = Batches(blocks, recipe, accelerator, scored)
    model: Any = gated.model
    stock_attention = model.config._attn_implementation
    fit_batches(gated, batches, recipe, accelerator, run.say)
    trainer = (make or TRAINERS[recipe.controller])(gated, batches, recipe, pools, accelerator, start)
    if weights:
        if dense is not None:
            fit_attention(dense, recipe.seq_len, accelerator.device)
        trainer.learn_weights(weights, dense)
    take_steps(trainer, recipe, accelerator, run, report, branches)
    model.set_attn_implementation(stock_attention)  # what is judged is judged as the dense model was
    return trainer.learned()


def fit_batches(
    model: SizedModel,
    batches: Batches,
    recipe: Recipe | RecoveryRecipe,
    accelerator: Accelerator,
    say: Callable[[str], None],
) -> None:
    """Choose attention and checkpointing of a model that learns; pass fewer sequences at once if memory is short."""
    fitting = fit_activations(model, recipe.activation_checkpointing, batches.micro, recipe.seq_len, accelerator)
    if fitting < batches.micro and not recipe.micro_batch_size:
        if accelerator.is_main_process:
            say(f"memory is short: {fitting} sequences a forward pass instead of {batches.micro}")
        batches.micro = fitting


def take_steps(
    learner: Learner,
    recipe: Recipe | RecoveryRecipe,
    accelerator: Accelerator,
    run: RunState,
    report: Report,
    branches: Branches = (None, None),
) -> None:
    """Do all steps of a recipe, or those that an interrupted run has left.

    `report` is called after every step with its metrics (losses in nats a token, tokens and seconds). Raises:
    TrainingError if the loss is not a number or memory runs out, and what was saved last stays in the run's folder;
    KeyboardInterrupt after Ctrl-C, when the step is done and saved.
    """
    (before, after), first, saved_at = branches, 0, time.perf_counter()
    if (saved := load_run(run, accelerator)) is None:
        run.start()
        if before and (saved := load_run(before, accelerator)) is None:
            raise OutputError(
                f"{before.folder} lacks the search of the size before, which this one goes on from; delete "
                f"{before.folder.parent} and begin anew"
            )
    if saved:
        first = saved[0]
        learner.restore(*saved)
    with stopping(alone=accelerator.num_processes == 1) as stop:
        for step in range(first, recipe.steps):
            began = time.perf_counter()
            try:
                metrics = learner.step(step)
            except (TrainingError, torch.OutOfMemoryError) as error:
                kept = f"what was saved last is in {run.folder}" if run.state.exists() else "nothing was saved yet"
                raise TrainingError(f"{_reason(error, step)}; {kept}; {_remedy(error, recipe, step)}") from error
            seconds = time.perf_counter() - began
            metrics |= {"seconds": seconds, "tokens": float(recipe.batch_size * recipe.seq_len)}
            run.log(metrics)
            due = (step + 1) % recipe.save_every == 0 or time.perf_counter() - saved_at > SAVE_SECONDS
            if due or stop or step + 1 == recipe.steps:  # what comes after the last step can fail too
                run.save(step + 1, learner.state(), learner.extra)
                saved_at = time.perf_counter()
            if after and isinstance(recipe, Recipe) and step + 1 == recipe.search_steps:
                after.save(step + 1, learner.state(), learner.extra)
            accelerator.log(metrics, step=step + 1)
            report(metrics)
            if stop:
                raise KeyboardInterrupt(f"stopped at step {step + 1} of {recipe.steps}; the same command goes on")


@contextmanager
def stopping(*, alone: bool) -> Iterator[list[int]]:
    """Let Ctrl-C be heard between steps, by a list that is then no longer empty; a second one ends the block at once.

    In the middle of a step there is nothing whole to save. Several processes would not all stop at the same step, so
    theirs ends at once and goes on from what was saved last. Only the main thread hears of signals.
    """
    heard: list[int] = []

    def hear(number: int, _frame: Any) -> None:
        heard.append(number)
        signal.signal(number, signal.default_int_handler)
        os.write(2, b"\nstopping after this step; Ctrl-C again stops at once\n")  # not amid what is being printed

    ours = threading.current_thread() is threading.main_thread()
    if not (alone and ours and signal.getsignal(signal.SIGINT) is signal.default_int_handler):
        yield heard
        return
    signal.signal(signal.SIGINT, hear)
    try:
        yield heard
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _reason(error: Exception, step: int) -> str:
    return str(error) if isinstance(error, TrainingError) else f"a device ran out of memory at step {step + 1}"


def _remedy(error: Exception, recipe: Recipe | RecoveryRecipe, step: int) -> str:
    """Say what to try."""
    if not isinstance(error, TrainingError):
        return 'try a recipe with micro_batch_size = 1 and activation_checkpointing = "on", or --shard on more devices'
    if isinstance(recipe, RecoveryRecipe):
        return f"try a --learning-rate below {recipe.learning_rate:g}"
    if recipe.controller != "gradual" and step < recipe.search_steps:
        return "try a lower learning_rate in the recipe's table [alm]"
    return "check the weights" if recipe.dtype == "float32" else 'try a recipe with dtype = "float32"'
