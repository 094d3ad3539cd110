"""The loop of every run: take a step, log its metrics, save the run when a save is due, resume from
a save."""

import math
import os
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from accelerate import Accelerator

from ddp_prune.core.batches import Teacher
from ddp_prune.core.processes import broadcast_from_main
from ddp_prune.core.saved import Unsaved
from ddp_prune.core.weights import TrainedWeights
from ddp_prune.settings import TrainingSettings
from ddp_vllm.errors import TrainingError

# shortest time between two saves: a kill costs at most that much work if a save takes up to 6 s
SAVE_SECONDS = 120.0
# shortest time between two saves, in multiples of the last save: saving takes at most 5 % of a run
SAVE_SHARE = 20
TIMED_STEPS = 5  # at most: the first ones of a process take up to twice as long
AGREEMENT = 0.15  # largest difference of two successive steps whose mean is the time of a step
OUT_OF_MEMORY = 'try a recipe with micro_batch_size = 1 and activation_checkpointing = "on", or --shard on more devices'

Report = Callable[[dict[str, float]], None]


class Learner(ABC):
    """Trains gates, or the weights of a pruned model, step by step."""

    accelerator: Accelerator
    recipe: TrainingSettings
    weights: TrainedWeights | None
    """The weights that are trained; None: only gates are."""
    teacher: Teacher | None
    """The dense model; None without distillation."""

    def begin(self) -> None:  # noqa: B027 (optional)
        """Do what precedes the first step, after a saved run was restored; it is not part of the
        time of a step."""

    @abstractmethod
    def step(self, step: int) -> dict[str, float]:
        """Do one optimizer step and return its metrics. Raises: TrainingError if the loss is not a
        number."""

    @abstractmethod
    def remedy(self, step: int) -> str:
        """Return what the user can do if the loss of a step is not a number."""

    def metrics_of(self, step: int, losses: torch.Tensor) -> dict[str, float]:
        """Return the metrics of a step from this process's share of its losses.

        losses: CE and KL in nats per token. Raises: as `step`.
        """
        cross_entropy, divergence = self.accelerator.reduce(losses, "sum").tolist()
        loss = cross_entropy + self.recipe.distillation * divergence
        if not math.isfinite(loss):
            raise TrainingError(f"the loss is {loss} at step {step + 1}")
        distilled = {"kl": divergence} if self.teacher else {}
        return {"step": step + 1, "loss": loss, "ce": cross_entropy} | distilled

    @property
    def extra(self) -> dict[str, Any]:
        """Plain data that a saved run requires in addition to the tensors."""
        return {}

    def state(self) -> dict[str, torch.Tensor]:
        """Return everything the next step depends on, as named tensors; all processes must call it
        together."""
        return self.weights.state() if self.weights else {}

    def like(self, name: str) -> torch.Tensor | None:
        """Return the tensor that a saved one is read into; None for a new one in host memory."""
        return self.weights.like(name) if self.weights else None

    def restore(self, step: int, tensors: dict[str, torch.Tensor], extra: dict[str, Any]) -> None:
        """Restore the `state` and `extra` that were saved before `step`; all processes must call it
        together."""
        if self.weights:
            self.weights.restore(step, tensors)


def seconds_a_step(make: Callable[[int], Learner], batch_size: int, at_once: int) -> float:
    """Return the seconds of a step, of the slowest process; nothing is trained.

    Steps of one and, if the batch has more, of two micro-batches are timed. The difference is the
    time of a micro-batch; the rest, such as the optimizer of trained weights, counts once a step.
    make: returns a learner, which does not `begin`, whose steps have so many sequences.
    at_once: sequences of a micro-batch, over all processes.
    """
    seconds = _seconds_of(make(at_once))
    if batch_size <= at_once:
        return seconds
    another = max(0.0, _seconds_of(make(2 * at_once)) - seconds)
    return seconds + another * (batch_size / at_once - 1)


def _seconds_of(learner: Learner) -> float:
    """Return the mean of the first two successive steps that take equally long."""
    seconds = list[float]()
    while len(seconds) < TIMED_STEPS:
        began = time.perf_counter()
        learner.step(len(seconds))
        took = torch.tensor([time.perf_counter() - began], device=learner.accelerator.device)
        seconds.append(float(learner.accelerator.gather(took).max()))
        if len(seconds) > 1 and abs(seconds[-1] - seconds[-2]) <= AGREEMENT * max(seconds[-2:]):
            break
    return sum(seconds[-2:]) / 2


def take_steps(learner: Learner, num_steps: int, run: Unsaved, report: Report) -> None:
    """Take the steps of a run, or the remaining ones if it was interrupted.

    run: where the states and the metrics are kept. All processes take part in a save together, so
        the main process's clock decides when it is due.
    report: called after every step with its metrics (losses in nats per token, tokens and seconds).

    Raises: TrainingError if the loss is not a number or memory runs out; the last save stays in the
        run's folder. KeyboardInterrupt after Ctrl-C, when the step is done and saved.
    """
    recipe, accelerator, first = learner.recipe, learner.accelerator, 0
    if saved := run.resume(learner.like):
        learner.restore(*saved)
        first = saved.step
    saved_at, pause = time.perf_counter(), SAVE_SECONDS
    if first < num_steps:
        with _remedy(learner, first, run):
            learner.begin()
    with stopping(alone=accelerator.num_processes == 1) as stop:
        for step in range(first, num_steps):
            began = time.perf_counter()
            with _remedy(learner, step, run):
                metrics = learner.step(step)
            tokens = float(recipe.batch_size * recipe.seq_len)
            metrics |= {"seconds": time.perf_counter() - began, "tokens": tokens}
            run.log(metrics)
            # also after the last step: the export can fail too
            due = bool(stop) or step + 1 in (run.search, num_steps)
            if recipe.save_every:
                due = due or (step + 1) % recipe.save_every == 0
            elif not due:
                due = broadcast_from_main(accelerator, time.perf_counter() - saved_at >= pause)
            if due:
                began = time.perf_counter()
                run.save(step + 1, learner.state(), learner.extra)
                saved_at = time.perf_counter()
                pause = max(SAVE_SECONDS, SAVE_SHARE * (saved_at - began))
            accelerator.log(metrics, step=step + 1)
            report(metrics)
            if stop:
                raise KeyboardInterrupt(f"stopped at step {step + 1} of {num_steps}; the same command resumes")


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
        with suppress(OSError):  # print is not safe in a handler
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
