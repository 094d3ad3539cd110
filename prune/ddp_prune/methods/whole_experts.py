"""Whole experts go, the worst of a layer first: by how often they are chosen, by REAP's score, or by both.

REAP's (arXiv:2510.13999) is the mean over an expert's tokens of π·‖output‖; both is the sum. The expert
on which the budget ends loses its channels of least energy only. One forward pass would do.
"""

from collections.abc import Callable

import torch

from ddp_prune.gates import GatedModel, Masks
from ddp_prune.methods import even_widths
from ddp_prune.methods.expert_use import ExpertUse, measure_experts
from ddp_prune.methods.method import Score

Worth = Callable[[ExpertUse], torch.Tensor]


def frequency(use: ExpertUse) -> torch.Tensor:
    """Return the tokens sent to each expert, [L, E]."""
    return use.counts


def reap(use: ExpertUse) -> torch.Tensor:
    """Return the mean of π·‖output‖ over an expert's tokens, [L, E]; 0 without any."""
    return use.output / use.counts.clamp_min(1)


def sum_of_outputs(use: ExpertUse) -> torch.Tensor:
    """Return the sum of π·‖output‖ over an expert's tokens, [L, E]."""
    return use.output


def of(use: ExpertUse, worth: Worth) -> torch.Tensor:
    """Return a score by which experts go one by one, [L, E, C]."""
    channel_rank = even_widths.of(use).argsort(dim=-1, stable=True).argsort(dim=-1)
    expert_rank = worth(use).argsort(dim=-1, stable=True).argsort(dim=-1)
    return (expert_rank[..., None] * channel_rank.shape[-1] + channel_rank).float()


def _method(source: str, worth: Worth) -> Score:
    def score(gated: GatedModel, blocks: torch.Tensor) -> Masks:
        return {"experts": of(measure_experts(gated, blocks), worth)}

    return Score(source=source, score=score, scope="layer", suits="mixtures")


FREQUENCY = _method("arXiv:2206.00277", frequency)
REAP = _method("arXiv:2510.13999", reap)
USE = _method("a control: frequency × REAP", sum_of_outputs)
