"""Random: no method at all, which every other one has to beat. No text; nothing to compute."""

import torch

from ddp_prune.gates import GatedModel, Masks
from ddp_study.methods.method import Score


def score(gated: GatedModel, _blocks: torch.Tensor) -> Masks:
    """Return numbers between 0 and 1, which change with the seed."""
    return {kind: torch.rand(shape) for kind, shape in gated.shapes.items()}


METHOD = Score(source="chance", score=score)
