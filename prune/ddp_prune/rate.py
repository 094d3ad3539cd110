"""Finds the learning rate of trained weights before a run: short trials at several rates, judged on held-out text.

The best rates of two small models differ twentyfold, 2e-4 for SmolLM2-135M and 1e-5 for Qwen2.5-Coder-0.5B, so no
constant serves both. A rate that is too high makes the model forget what the text to train on does not show. The
cross-entropy of that text does not tell; the KL divergence from the dense model on held-out text does.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator

from ddp_prune.gates import GatedModel, Masks
from ddp_prune.run import Run
from ddp_training.loss import OutputHead, agreement, final_hidden
from ddp_training.processes import broadcast_from_main

RATES = (1e-5, 4e-5, 1.6e-4, 6.4e-4)
FIRST = 1  # index of the rate that is tried first
TRIAL_STEPS = 20
TRIAL_BLOCKS = 16  # held-out blocks at most, by which a trial is judged


def trial_steps(run: Run) -> int:
    """Return about how many steps the trials of a run take."""
    has_trials = run.train == "weights" and run.recipe.distillation > 0 and run.recipe.learning_rate is None
    return 3 * TRIAL_STEPS if has_trials else 0


class Found(NamedTuple):
    """The outcome of the trials."""

    rate: float
    """The one with the lowest divergence."""
    divergences: Mapping[float, float]
    """Rate -> KL(dense ‖ pruned) in nats per token on held-out text, at the end of its trial."""

    def __str__(self) -> str:
        tried = ", ".join(f"{kl:.3f} at {rate:.1e}" for rate, kl in sorted(self.divergences.items()))
        return f"learning rate {self.rate:.1e}: held-out KL after trials of {TRIAL_STEPS} steps is {tried}"


def find_rate(trial: Callable[[float], float]) -> Found:
    """Return the rate of RATES with the lowest divergence, going downhill from the first.

    trial: runs one trial and returns its divergence.
    """
    found = {RATES[FIRST]: trial(RATES[FIRST])}
    for neighbours in (RATES[FIRST - 1 :: -1], RATES[FIRST + 1 :]):
        for rate in neighbours:
            found[rate] = trial(rate)
            if found[rate] > min(found.values()):
                break
    return Found(min(found, key=lambda rate: found[rate]), found)


@torch.no_grad()
def divergence(gated: GatedModel, masks: Masks, teacher: Any, blocks: torch.Tensor, accelerator: Accelerator) -> float:
    """Return the mean KL(teacher ‖ gated model under `masks`) in nats per token on held-out blocks."""
    model: Any = gated.model
    head, total, count = OutputHead.of(model), 0.0, 0
    with gated.masks(masks):
        for tokens in blocks[:TRIAL_BLOCKS].to(head.weight.device).split(1):
            states = final_hidden(model, tokens)
            total += agreement(states, head, final_hidden(teacher, tokens), head)[0]
            count += len(states)
    return broadcast_from_main(accelerator, total / count)
