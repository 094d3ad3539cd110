"""Finds the learning rate of trained weights before a run: a few steps of the dense model at
several rates.

The best rates of two small models differ twentyfold, 2e-4 for SmolLM2-135M and 1e-5 for
Qwen2.5-Coder-0.5B, so no constant serves both. A rate that is too high does harm within ten steps,
long before a higher rate pays: the loss on held-out text, cross-entropy + η·KL from the dense
model, is higher than after ten steps at a lower rate. So rates are tried from a low one upwards,
and a run takes the last one that is not harmful. Changes of the loss in ten steps of 512 tokens, in
nats: all weights of SmolLM2-135M -0.05 at 4e-5, -0.02 at 1.6e-4, +0.59 at 6.4e-4, and of
Qwen2.5-Coder-0.5B -0.18 at 1e-5, +0.20 at 4e-5; low-rank additions to SmolLM2 -0.07 at 1e-3, +0.10
at 4e-3, and to Qwen -0.22 at 2.5e-4, -0.13 at 1e-3. Of these, 1e-3 is too high for Qwen: after a
run of 40 steps KL is 0.46 instead of 0.41.
"""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ddp_prune.core.loss import distill, final_hidden
from ddp_prune.core.processes import broadcast_from_main
from ddp_prune.core.weights import step_seed
from ddp_vllm.errors import Printer, TrainingError

if TYPE_CHECKING:
    from ddp_prune.core.loop import Learner

RATES = {"weights": (2.5e-6, 1e-5, 4e-5, 1.6e-4, 6.4e-4), "lora": (6.25e-5, 2.5e-4, 1e-3, 4e-3, 1.6e-2)}
FIRST = 1  # index of the rate that is tried first
TRIAL_STEPS = 10
TRIAL_TOKENS = 4096  # held-out tokens by which a trial is judged
HARM = 0.05  # nats per token by which the loss after a trial may exceed the lowest so far


def change(loss: float, dense: float) -> str:
    """Write the change of a loss with its sign; one that rounds to nothing has none."""
    return f"{round(loss - dense, 2) + 0.0:+.2f}" if math.isfinite(loss) else "no number"


def trial_steps(train: str, batch_size: int, seq_len: int) -> int:
    """Return about how many steps the trials of a training mode take at most, with the evaluations
    of held-out text."""
    trials = len(RATES[train][FIRST:])
    # the dense model is evaluated too; two forward passes per block, where a step does about four
    # per sequence
    blocks = (trials + 1) * _num_blocks(seq_len)
    return trials * TRIAL_STEPS + blocks // (2 * batch_size)


def _num_blocks(seq_len: int) -> int:
    return max(1, TRIAL_TOKENS // seq_len)


def find_rate(
    rates: Sequence[float], dense: float, trial: Callable[[float], float]
) -> tuple[float, dict[float, float]]:
    """Return the last of the rising rates before the first harmful one, or the lowest, which is not
    tried; and the loss after the trial of each rate.

    dense: loss of the dense model. trial: runs the trial of a rate and returns the loss after it.
    """
    losses, chosen = dict[float, float](), rates[0]
    for rate in rates[FIRST:]:
        losses[rate] = trial(rate)
        # nor is a loss that is not a number
        if not losses[rate] <= min(dense, *losses.values()) + HARM:
            break
        chosen = rate
    return chosen, losses


def run_trials(learner: "Learner", heldout: Tensor, print_line: Printer) -> dict[str, Any]:
    """Return the highest learning rate of a run and the trials that found it, in the form of
    `Learned.rate`; leave the weights as they were.

    learner: of weights, with a teacher, before its first step. heldout: int64 [num_blocks, seq_len].
    print_line: prints a line before and after each trial.
    """
    weights, teacher, eta = learner.weights, learner.teacher, learner.schedule.distillation
    assert weights and teacher
    rates = RATES["lora" if weights.adapted else "weights"]

    def trial(rate: float) -> float:
        try:
            for step in range(TRIAL_STEPS):
                learner.backward(step)
                weights.step(rate, weights.reduce_gradients(), step_seed(learner.schedule.seed, step))
            loss = heldout_loss()
            print_line(
                f"learning rate {rate:g}, trial {rates.index(rate)} of {len(rates) - FIRST}: {change(loss, dense)}"
            )
            return loss
        except TrainingError:  # a gradient is not a number
            return math.inf
        finally:
            weights.reset(teacher.model)

    @torch.no_grad()
    def heldout_loss() -> float:
        blocks, total = heldout[: _num_blocks(heldout.shape[1])].to(learner.accelerator.device).split(1), 0.0
        for tokens in blocks:
            labels_N = tokens[:, 1:].reshape(-1)
            teacher_NH, student_NH = teacher.states(tokens), final_hidden(learner.model, tokens)
            cross_entropy, divergence = distill(student_NH, teacher_NH, learner.head, labels_N, eta)[1].tolist()
            total += cross_entropy + eta * divergence
        return broadcast_from_main(learner.accelerator, total / len(blocks))

    print_line(
        f"finding the learning rate: at most {len(rates) - FIRST} trials of {TRIAL_STEPS} steps of the dense model"
    )
    dense = heldout_loss()
    highest, losses = find_rate(rates, dense, trial)
    changes = ", ".join(f"{change(loss, dense)} at {rate:g}" for rate, loss in sorted(losses.items()))
    print_line(f"learning rate {highest:g}: {TRIAL_STEPS} steps changed the dense model's held-out loss by {changes}")
    return {"highest": highest, "dense": dense, "trials": {f"{rate:g}": loss for rate, loss in losses.items()}}
