"""The loop of every run: take a step, log its metrics, save the run when a save is due, resume from
a save."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from accelerate import Accelerator

from ddp_training.batches import Settings
from ddp_training.processes import broadcast_from_main
from ddp_training.run_state import RunState, Saved, load_run
from ddp_vllm.errors import OutputError, TrainingError

# shortest time between two saves: a kill costs at most that much work if a save takes up to 6 s
SAVE_SECONDS = 120.0
# shortest time between two saves, in multiples of the last save: saving takes at most 5 % of a run
SAVE_SHARE = 20
OUT_OF_MEMORY = 'try a recipe with micro_batch_size = 1 and activation_checkpointing = "on", or --shard on more devices'

Report = Callable[[dict[str, float]], None]


class FamilyCheckpoints(NamedTuple):
    """The saved states of a size family's search before and after the part of one size."""

    resume_from: RunState | None = None
    """The end of the previous size's search; None for the smallest cut."""
    save_to: RunState | None = None
    """The run that saves the end of this size's search for the next size; None for the largest
    cut."""
    search: int = 0
    """Steps after which the search of this size ends."""


NO_FAMILY = FamilyCheckpoints()


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
        """Return everything the next step depends on, as named tensors; all processes call it
        together."""

    def restore(self, step: int, tensors: dict[str, torch.Tensor], extra: dict[str, Any]) -> None:
        """Restore the `state` and `extra` that were saved before `step`; all processes call it
        together."""


def take_steps(
    learner: Learner,
    settings: Settings,
    num_steps: int,
    accelerator: Accelerator,
    state: RunState,
    report: Report,
    family: FamilyCheckpoints = NO_FAMILY,
) -> None:
    """Take the steps of a run, or the remaining ones if it was interrupted.

    report: called after every step with its metrics (losses in nats per token, tokens and seconds).
    family: at the end of its search, a size saves its own state and then the state for the next
        size. A run that resumes from the first of these saves repeats the second.

    Raises: TrainingError if the loss is not a number or memory runs out; the last save stays in the
        run's folder. KeyboardInterrupt after Ctrl-C, when the step is done and saved.
    """
    first = _resume(learner, accelerator, state, family)
    clock = SaveClock(settings.save_every, accelerator)
    if first < num_steps:
        with _remedy(learner, first, state):
            learner.begin()
    with stopping(alone=accelerator.num_processes == 1) as stop:
        for step in range(first, num_steps):
            metrics = _timed_step(learner, step, settings, state)
            state.log(metrics)
            ends_search = family.save_to is not None and step + 1 == family.search
            # the export can fail too
            if stop or ends_search or step + 1 == num_steps or clock.is_due(step + 1):
                with clock.saving():
                    tensors = learner.state()
                    state.save(step + 1, tensors, learner.extra)
                if family.save_to and ends_search:
                    family.save_to.save(step + 1, tensors, learner.extra)
                del tensors
            accelerator.log(metrics, step=step + 1)
            report(metrics)
            if stop:
                raise KeyboardInterrupt(f"stopped at step {step + 1} of {num_steps}; the same command resumes")


def _resume(learner: Learner, accelerator: Accelerator, state: RunState, family: FamilyCheckpoints) -> int:
    """Restore the saved state of this run, or else of the previous size, and return the first step
    to take."""
    saved: Saved | None = load_run(state, accelerator)
    if saved is None:
        state.start()
        if (shared := family.resume_from) is None:
            return 0
        if (saved := load_run(shared, accelerator)) is None:
            raise OutputError(
                f"{shared.folder} lacks the search of the previous size, from which this size resumes; delete "
                f"{shared.folder.parent} and start again"
            )
    learner.restore(*saved)
    if family.save_to and saved.step == family.search:
        family.save_to.save(saved.step, learner.state(), learner.extra)
    return saved.step


def _timed_step(learner: Learner, step: int, settings: Settings, state: RunState) -> dict[str, float]:
    """Take one step and return its metrics with its seconds and tokens. Raises: TrainingError with
    a remedy."""
    began = time.perf_counter()
    with _remedy(learner, step, state):
        metrics = learner.step(step)
    seconds = time.perf_counter() - began
    return metrics | {"seconds": seconds, "tokens": float(settings.batch_size * settings.seq_len)}


@contextmanager
def _remedy(learner: Learner, step: int, state: RunState) -> Iterator[None]:
    """Add to an error of the block where the run was saved, and what the user can do.
    Raises: TrainingError."""
    try:
        yield
    except (TrainingError, torch.OutOfMemoryError) as error:
        reason, remedy = str(error), learner.remedy(step)
        if isinstance(error, torch.OutOfMemoryError):
            reason, remedy = f"a device ran out of memory at step {step + 1}", OUT_OF_MEMORY
        kept = f"the last save is in {state.folder}" if state.state.exists() else "nothing was saved yet"
        raise TrainingError(f"{reason}; {kept}; {remedy}") from error


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
