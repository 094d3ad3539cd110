"""Trains the weights of a model step by step, and is the loop of every run: take a step, log its
metrics, save the run when a save is due, resume from a save.

`Learner` trains weights on the dense model's outputs; `Trainer` (learn.py) learns gates too.
"""

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor

from ddp_prune.core.batches import Batches, MicroBatch, Teacher, usual_sequences
from ddp_prune.core.decoder import checkpoint_layers, fit_attention, lent
from ddp_prune.core.loss import OutputHead, distill, final_hidden
from ddp_prune.core.processes import broadcast_from_main
from ddp_prune.core.rate import run_trials
from ddp_prune.core.schedule import Schedule, Unsaved
from ddp_prune.core.weights import TrainedWeights, highest_rate, rate_of, step_seed
from ddp_vllm.errors import Printer, TrainingError

# shortest time between two saves: a kill costs at most that much work if a save takes up to 6 s
SAVE_SECONDS = 120.0
# shortest time between two saves, in multiples of the last save: saving takes at most 5 % of a run
SAVE_SHARE = 20
TIMED_STEPS = 5  # at most: the first ones of a process take up to twice as long
AGREEMENT = 0.15  # largest difference of two successive steps whose mean is the time of a step
OUT_OF_MEMORY = 'try a recipe with micro_batch_size = 1 and activation_checkpointing = "on", or --shard on more devices'

Report = Callable[[dict[str, float]], None]


class Training(NamedTuple):
    """How the weights of a model are trained."""

    weights: TrainedWeights
    heldout: Tensor | None = None
    """Blocks on which the trials of the learning rate are judged; None: no trials."""
    teacher: Any = None
    """The dense model, if it is another one than the model without what is trained."""
    print_line: Printer = lambda _: None
    """Prints the trials of the learning rate."""


class Learner:
    """Trains the weights of a model to minimize cross-entropy + η·KL(dense ‖ model)."""

    def __init__(self, model: Any, batches: Batches, schedule: Schedule, training: Training | None) -> None:
        """Set how passes of the model are computed, which the caller lends (`lent`).

        training: None if no weights are trained.
        """
        self.model, self.batches, self.schedule, self.training = model, batches, schedule, training
        self.accelerator = batches.accelerator
        self.weights = training.weights if training else None
        dense = training.teacher if training and training.teacher is not None else model
        for loaded in (model, dense):
            fit_attention(loaded, batches.seq_len, self.accelerator.device)
        checkpoint_layers(model, schedule.checkpointed)
        adapters_disabled = self.weights.adapters_disabled if self.weights and dense is model else nullcontext
        self.teacher = Teacher(dense, batches, adapters_disabled) if schedule.distillation > 0 else None
        self.head, self.dense_head = OutputHead.of(model), OutputHead.of(dense)
        self.rate: dict[str, Any] = {}  # `highest` of the weights, and the `trials` that found it

    def begin(self) -> None:
        """Find the learning rate of the weights, as passed or by trials, unless that was done
        before; it is not part of the time of a step."""
        if not self.training or not self.weights or self.rate:
            return
        given, heldout = self.schedule.learning_rate, self.training.heldout
        if given or heldout is None or not self.teacher:
            train, config = "lora" if self.weights.adapted else "weights", self.model.config.get_text_config()
            self.rate = {"highest": given or highest_rate(train, config.hidden_size)}
        else:
            self.rate = run_trials(self, heldout, self.training.print_line)

    def step(self, step: int) -> dict[str, float]:
        """Do one optimizer step and return its metrics. Raises: TrainingError if the loss is not a
        number."""
        values = self.metrics_of(step, self.backward(step))
        return values | {"learning_rate": self.step_weights(step)}

    def backward(
        self, step: int, passing: Callable[[MicroBatch], AbstractContextManager[None]] = lambda _: nullcontext()
    ) -> Tensor:
        """Add up the gradients of a step, one micro-batch after the other; return this process's
        share of its CE and KL, in nats per token.

        passing: a context for the forward and backward pass of a micro-batch.
        """
        losses = torch.zeros(2, device=self.accelerator.device)
        for batch in self.batches.step(step):
            teacher_NH = self.teacher.hidden(batch) if self.teacher else None
            accumulating = self.weights.accumulating(batch.share) if self.weights else nullcontext()
            with accumulating, passing(batch):
                student_NH = self.hidden(batch)
                # the loss mask applies only to the cross-entropy: the teacher has an output for
                # every token
                loss, metrics = distill(
                    student_NH, teacher_NH, self.head, batch.labels_N, self.schedule.distillation, self.dense_head,
                    batch.loss_mask_N,
                )  # fmt: skip
                loss.backward()  # nothing waits for a GPU between forward and backward
            del teacher_NH, student_NH, loss  # before the next pass and the optimizer's step
            losses += batch.share * metrics
        return losses

    def hidden(self, batch: MicroBatch) -> Tensor:
        """Return the model's final hidden states, [B·(seq_len−1), H]."""
        return final_hidden(self.model, batch.tokens)

    def step_weights(self, step: int) -> float:
        """Let AdamW move the weights by the gradients of a step, and return its rate."""
        assert self.weights
        plan = self.schedule
        rate = rate_of(step, plan.steps.last, self.rate.get("highest", 0.0), plan.warmup, plan.flat_until)
        self.weights.step(rate, self.weights.reduce_gradients(), step_seed(plan.seed, step))
        return rate

    def remedy(self, step: int) -> str:
        """Return what the user can do if the loss of a step is not a number."""
        return f"try a --learning-rate below {self.rate.get('highest', 0.0):g}"

    def metrics_of(self, step: int, losses: Tensor) -> dict[str, float]:
        """Return the metrics of a step from this process's share of its losses.

        losses: CE and KL in nats per token. Raises: as `step`.
        """
        cross_entropy, divergence = self.accelerator.reduce(losses, "sum").tolist()
        loss = cross_entropy + self.schedule.distillation * divergence
        if not math.isfinite(loss):
            raise TrainingError(f"the loss is {loss} at step {step + 1}")
        distilled = {"kl": divergence} if self.teacher else {}
        return {"step": step + 1, "loss": loss, "ce": cross_entropy} | distilled

    @property
    def extra(self) -> dict[str, Any]:
        """Plain data that a saved run requires in addition to the tensors: the learning rate."""
        return {"rate": self.rate}

    def state(self) -> dict[str, Tensor]:
        """Return everything the next step depends on, as named tensors; all processes must call it
        together."""
        return self.weights.state() if self.weights else {}

    def like(self, name: str) -> Tensor | None:
        """Return the tensor that a saved one is read into; None for a new one in host memory."""
        return self.weights.like(name) if self.weights else None

    def restore(self, step: int, tensors: dict[str, Tensor], extra: dict[str, Any]) -> None:
        """Restore the `state` and `extra` that were saved before `step`; all processes must call it
        together."""
        self.rate = extra["rate"]
        if self.weights:
            self.weights.restore(step, tensors)


def seconds_a_step(
    models: Sequence[Any], make: Callable[[Tensor, Schedule], Learner], schedule: Schedule, seq_len: int,
    accelerator: Accelerator,
) -> float:  # fmt: skip
    """Return the seconds of a step on random tokens, of the slowest process. Nothing is trained.

    Steps of one and, if the batch has more, of two micro-batches are timed. The difference is the
    time of a micro-batch; the rest, such as the optimizer of trained weights, counts once a step.
    models: the one that learns, and its teacher if that is another one. make: returns a learner of
    blocks, which does not `begin`. All processes call this together.
    """
    number, batch_size = accelerator.num_processes, schedule.batch_size
    usual = usual_sequences(batch_size, seq_len, number, accelerator.device.type)
    at_once = number * (schedule.num_sequences or usual)
    vocabulary = models[0].config.get_text_config().vocab_size

    def seconds_of(size: int) -> float:
        """Return the mean of the first two successive steps that take equally long."""
        blocks, seconds = torch.randint(vocabulary, (TIMED_STEPS * size, seq_len)), list[float]()
        learner = make(blocks, replace(schedule, batch_size=size))
        while len(seconds) < TIMED_STEPS:
            began = time.perf_counter()
            learner.step(len(seconds))
            took = torch.tensor([time.perf_counter() - began], device=accelerator.device)
            seconds.append(float(accelerator.gather(took).max()))
            if len(seconds) > 1 and abs(seconds[-1] - seconds[-2]) <= AGREEMENT * max(seconds[-2:]):
                break
        if learner.weights:
            learner.weights.reset_optimizer()
        return sum(seconds[-2:]) / 2

    with lent(*models):
        seconds = seconds_of(at_once)
        if batch_size <= at_once:
            return seconds
        another = max(0.0, seconds_of(2 * at_once) - seconds)
    return seconds + another * (batch_size / at_once - 1)


def take_steps(learner: Learner, progress: Unsaved, report: Report) -> None:
    """Take the steps of a run, or the remaining ones if it was interrupted.

    progress: where the states and the metrics are kept. All processes take part in a save together, so
        the main process's clock decides when it is due.
    report: called after every step with its metrics (losses in nats per token, tokens and seconds).

    Raises: TrainingError if the loss is not a number or memory runs out; the last save stays in the
        run's folder. KeyboardInterrupt after Ctrl-C, when the step is done and saved.
    """
    schedule, accelerator, first = learner.schedule, learner.accelerator, 0
    if saved := progress.resume(learner.like):
        learner.restore(*saved)
        first = saved.step
    saved_at, pause, num_steps = time.perf_counter(), SAVE_SECONDS, schedule.steps.last
    if first < num_steps:
        with _remedy(learner, first, progress):
            learner.begin()
    with stopping(alone=accelerator.num_processes == 1) as stop:
        for step in range(first, num_steps):
            began = time.perf_counter()
            with _remedy(learner, step, progress):
                metrics = learner.step(step)
            tokens = float(schedule.batch_size * learner.batches.seq_len)
            metrics |= {"seconds": time.perf_counter() - began, "tokens": tokens}
            progress.log(metrics)
            # also after the last step: the export can fail too
            due = bool(stop) or step + 1 in (progress.search, num_steps)
            if schedule.save_every:
                due = due or (step + 1) % schedule.save_every == 0
            elif not due:
                due = broadcast_from_main(accelerator, time.perf_counter() - saved_at >= pause)
            if due:
                began = time.perf_counter()
                progress.save(step + 1, learner.state(), learner.extra)
                saved_at = time.perf_counter()
                pause = max(SAVE_SECONDS, SAVE_SHARE * (saved_at - began))
            accelerator.log(metrics, step=progress.before + step + 1)
            report(metrics)
            if stop:
                raise KeyboardInterrupt(f"stopped at step {step + 1} of {num_steps}; the same command resumes")


@contextmanager
def _remedy(learner: Learner, step: int, progress: Unsaved) -> Iterator[None]:
    """Add to an error of the block where the run was saved, and what the user can do.
    Raises: TrainingError."""
    try:
        yield
    except (TrainingError, torch.OutOfMemoryError) as error:
        reason, remedy = str(error), learner.remedy(step)
        if isinstance(error, torch.OutOfMemoryError):
            reason, remedy = f"a device ran out of memory at step {step + 1}", OUT_OF_MEMORY
        raise TrainingError(f"{reason}; {progress.where}; {remedy}") from error


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
