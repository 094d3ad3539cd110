"""One-shot scores by the gradient of each gate at 1: its square a token, summed, and its sum.

`fisher` is Σ over tokens of g², the diagonal of the empirical Fisher matrix (as in arXiv:2204.09656, there a sequence a
sample); our search closes by the same. `taylor` is |Σ g|, first order (arXiv:1905.10650). One forward and backward pass
with frozen weights.
"""

import torch

from ddp_prune.gates import GatedModel, Masks
from ddp_prune.loss import OutputHead
from ddp_study.methods.method import Score
from ddp_study.methods.observe import backward


def gradients(gated: GatedModel, blocks: torch.Tensor) -> tuple[Masks, Masks]:
    """Return (|Σ gradient|, Σ over tokens of its part's square) of the cross-entropy for the gates at 1."""
    device = OutputHead.of(gated.model).weight.device
    first = {kind: torch.zeros(shape, device=device) for kind, shape in gated.shapes.items()}
    second = {kind: torch.zeros(shape, device=device) for kind, shape in gated.shapes.items()}
    for tokens in blocks.split(1):
        leaves = {kind: torch.ones(shape, device=device, requires_grad=True) for kind, shape in gated.shapes.items()}
        with gated.masks(leaves, second):
            backward(gated, tokens)
        for kind, leaf in leaves.items():
            assert leaf.grad is not None
            first[kind] += leaf.grad
    return {kind: value.abs() for kind, value in first.items()}, second


TAYLOR = Score(source="arXiv:1905.10650", score=lambda gated, blocks: gradients(gated, blocks)[0])
FISHER = Score(source="arXiv:2204.09656", score=lambda gated, blocks: gradients(gated, blocks)[1])
