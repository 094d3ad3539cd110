"""The loop of every run: take a step, log its metrics, save the run when a save is due, resume from
a save."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from accelerate import Accelerator

from ddp_prune.core.batches import Settings
from ddp_prune.core.processes import broadcast_from_main
from ddp_prune.core.saved import Unsaved
from ddp_vllm.errors import TrainingError

# shortest time between two saves: a kill costs at most that much work if a save takes up to 6 s
SAVE_SECONDS = 120.0
# shortest time between two saves, in multiples of the last save: saving takes at most 5 % of a run
SAVE_SHARE = 20
OUT_OF_MEMORY = 'try a recipe with micro_batch_size = 1 and activation_checkpointing = "on", or --shard on more devices'

Report = Callable[[dict[str, float]], None]


class Learner(Protocol):
    """Trains gates, or the weights of a pruned model, step by step."""

    @property
    def extra(self) -> dict[str, Any]:
        """Plain data that a saved run requires in addition to the tensors."""

    def begin(self) -> None:
        """Do what precedes the first step, after a saved run was restored; it is not part of the
        time of a step."""

    def step(self, step: int) -> dict[str, float]:
        """Do one optimizer step and return its metrics. Raises: TrainingError if the loss is not a
        number."""

    def remedy(self, step: int) -> str:
        """Return what the user can do if the loss of a step is not a number."""

    def state(self) -> dict[str, torch.Tensor]:
        """Return everything the next step depends on, as named tensors."""

    def like(self, name: str) -> torch.Tensor | None:
        """Return the tensor that a saved one is read into; None for a new one in host memory."""

    def restore(self, step: int, tensors: dict[str, torch.Tensor], extra: dict[str, Any]) -> None:
        """Restore the `state` and `extra` that were saved before `step`."""


def take_steps(
    learner: Learner,
    settings: Settings,
    num_steps: int,
    accelerator: Accelerator,
    run: Unsaved,
    report: Report,
) -> None:
    """Take the steps of a run, or the remaining ones if it was interrupted.

    run: where the states and the metrics are kept.
    report: called after every step with its metrics (losses in nats per token, tokens and seconds).

    Raises: TrainingError if the loss is not a number or memory runs out; the last save stays in the
        run's folder. KeyboardInterrupt after Ctrl-C, when the step is done and saved.
    """
    first = 0
    if saved := run.resume(learner.like):
        learner.restore(*saved)
        first = saved.step
    clock = SaveClock(settings.save_every, accelerator)
    if first < num_steps:
        with _remedy(learner, first, run):
            learner.begin()
    with stopping(alone=accelerator.num_processes == 1) as stop:
        for step in range(first, num_steps):
            metrics = _timed_step(learner, step, settings, run)
            run.log(metrics)
            # also after the last step: the export can fail too
            if stop or step + 1 in (run.search, num_steps) or clock.is_due(step + 1):
                with clock.saving():
                    run.save(step + 1, learner.state(), learner.extra)
            accelerator.log(metrics, step=step + 1)
            report(metrics)
            if stop:
                raise KeyboardInterrupt(f"stopped at step {step + 1} of {num_steps}; the same command resumes")


def _timed_step(learner: Learner, step: int, settings: Settings, run: Unsaved) -> dict[str, float]:
    """Take one step and return its metrics with its seconds and tokens. Raises: TrainingError with
    a remedy."""
    began = time.perf_counter()
    with _remedy(learner, step, run):
        metrics = learner.step(step)
    seconds = time.perf_counter() - began
    return metrics | {"seconds": seconds, "tokens": float(settings.batch_size * settings.seq_len)}


@contextmanager
def _remedy(learner: Learner, step: int, run: Unsaved) -> Iterator[None]:
    """Add to an error of the block where the run was saved, and what the user can do.
    Raises: TrainingError."""
    try:
        yield
    except (TrainingError, torch.OutOfMemoryError) as error:
        reason, remedy = str(error), learner.remedy(step)
        if isinstance(error, torch.OutOfMemoryError):
            reason, remedy = f"a device ran out of memory at step {step + 1}", OUT_OF_MEMORY
        raise TrainingError(f"{reason}; {run.where}; {remedy}") from error


class SaveClock:
    """Decides when a run is saved, by the main process's clock: all processes must take part in a
    save together."""

    def __init__(self, save_every: int, accelerator: Accelerator) -> None:
        """save_every: steps between saves; 0 saves by the clock."""
        self.save_every, self.accelerator = save_every, accelerator
        self.saved_at, self.pause = time.perf_counter(), SAVE_SECONDS

    def is_due(self, step: int) -> bool:
        """Tell whether to save after this step; all processes must call it together and get the
        same answer."""
        if self.save_every:
            return step % self.save_every == 0
        return broadcast_from_main(self.accelerator, time.perf_counter() - self.saved_at >= self.pause)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Measure how long a save takes; the pause before the next one is in proportion."""
        began = time.perf_counter()
        yield
        self.saved_at = time.perf_counter()
        self.pause = max(SAVE_SECONDS, SAVE_SHARE * (self.saved_at - began))


@contextmanager
def stopping(*, alone: bool) -> Iterator[list[int]]:
    """Postpone Ctrl-C to the end of a step: the first adds an entry to the yielded list, a second
    one stops at once.

    In the middle of a step there is no consistent state to save. With several processes
    (alone=False) Ctrl-C stops at once, because they would not all stop at the same step. Only the
    main thread receives signals.
    """
    interrupts: list[int] = []

    def postpone(number: int, _frame: Any) -> None:
        interrupts.append(number)
        signal.signal(number, signal.default_int_handler)
        # print is not safe in a handler
        os.write(2, b"\nstopping after this step; Ctrl-C again stops at once\n")

    in_main_thread = threading.current_thread() is threading.main_thread()
    if not (alone and in_main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler):
        yield interrupts
        return
    signal.signal(signal.SIGINT, postpone)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
