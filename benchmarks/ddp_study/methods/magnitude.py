"""Magnitude: Σ W² over everything that goes with a unit, as in Li et al. (arXiv:1608.08710). No text."""

import torch

from ddp_prune.gates import GatedModel, Masks
from ddp_study.methods.method import Score
from ddp_study.methods.observe import coupled


def score(gated: GatedModel, _blocks: torch.Tensor) -> Masks:
    """Return the squared Frobenius norm of what goes with each unit."""
    return coupled(gated, lambda weight: weight.detach().float().square())


METHOD = Score(source="arXiv:1608.08710", score=score)
