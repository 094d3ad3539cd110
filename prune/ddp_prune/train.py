"""The loop of every run: a step, its metrics, a save now and then; and resuming from a save."""

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
from ddp_prune.batches import Batches
from ddp_prune.budget import Pool
from ddp_prune.distributed import broadcast_from_main
from ddp_prune.gates import GatedModel
from ddp_prune.memory import SizedModel, fit_activations, fit_attention
from ddp_prune.recipe import Recipe, RecoveryRecipe
from ddp_prune.run_state import RunState, load_run
from ddp_prune.trainer import Learned, Trainer
from ddp_prune.weights import LearningWeights
from ddp_vllm.errors import OutputError, TrainingError

SAVE_SECONDS = 120.0  # the least time between two saves: a kill costs no more than that where a save takes 6 s …
SAVE_SHARE = 20  # … and elsewhere this many times what the last save took, so that saves take at most 5 % of a run
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
    loss_mask: torch.Tensor | None = None,
    start: Mapping[str, float] | None = None,
) -> Learned:
    """Learn the gates of a model on `blocks` (int64 [num_blocks, seq_len]); goes on from `run` if it can.

    The model's weights are frozen; or `weights` are those of it that learn, and `dense` is another copy of it,
    the teacher. `make`
    makes another trainer than that of the recipe's controller. loss_mask: as of `Batches`. start: as of `Trainer`.
    Raises: as `take_steps`.
    """
    batches = Batches(blocks, recipe, accelerator, loss_mask)
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

    `report` is called after every step with its metrics (losses in nats per token, tokens and seconds). A size of a
    family saves its own state at the end of its search, then the branch for the next size; a run that resumes from the
    first save repeats the second.
    Raises: TrainingError if the loss is not a number or memory runs out, and what was saved last stays in the run's
        folder; KeyboardInterrupt after Ctrl-C, when the step is done and saved.
    """
    (before, after), first = branches, 0
    searched = recipe.search_steps if isinstance(recipe, Recipe) else 0
    clock = SaveClock(recipe.save_every, accelerator)
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
        if after and first == searched:
            after.save(first, learner.state(), learner.extra)
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
            leave = after is not None and step + 1 == searched
            if stop or leave or step + 1 == recipe.steps or clock.is_due(step + 1):  # what follows a run can fail too
                with clock.saving():
                    state = learner.state()
                    run.save(step + 1, state, learner.extra)
                if after and leave:
                    after.save(step + 1, state, learner.extra)
                del state
            accelerator.log(metrics, step=step + 1)
            report(metrics)
            if stop:
                raise KeyboardInterrupt(f"stopped at step {step + 1} of {recipe.steps}; the same command goes on")


class SaveClock:
    """Says when a run is saved: by the main process's clock, for all processes take part in a save together."""

    def __init__(self, save_every: int, accelerator: Accelerator) -> None:
        """save_every: the steps between saves instead of the clock; 0: none."""
        self.save_every, self.accelerator = save_every, accelerator
        self.saved_at, self.pause = time.perf_counter(), SAVE_SECONDS

    def is_due(self, step: int) -> bool:
        """Tell whether to save after this step; all processes must ask together, and get the same answer."""
        if self.save_every:
            return step % self.save_every == 0
        return broadcast_from_main(self.accelerator, time.perf_counter() - self.saved_at >= self.pause)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Time a save, which the next one waits for in proportion."""
        began = time.perf_counter()
        yield
        self.saved_at = time.perf_counter()
        self.pause = max(SAVE_SECONDS, SAVE_SHARE * (self.saved_at - began))


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
