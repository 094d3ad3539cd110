"""Wanda-SP: Σ |w| · ‖x‖₂ over the inputs of the output projection that a unit has, even in every layer.

Wanda (arXiv:2306.11695) summed over structures, as FLAP's authors compare with (arXiv:2312.11983). One forward pass.
"""

import torch

from ddp_prune.gates import GatedModel, Masks
from ddp_study.methods.method import Score
from ddp_study.methods.observe import by_columns, input_squares


def score(gated: GatedModel, blocks: torch.Tensor) -> Masks:
    """Return Σ over rows of |w_j|, times the norm of activation j."""
    squares = input_squares(gated, blocks)
    return by_columns(gated, lambda place, w_OI: w_OI.abs().sum(0) * squares[place].sqrt())


METHOD = Score(source="arXiv:2306.11695", score=score, scope="layer", suits="dense")
