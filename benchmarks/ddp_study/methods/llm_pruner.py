"""LLM-Pruner: what the loss would change by without a unit's weights, estimated weight by weight (arXiv:2305.11627).

`taylor` is Σ |w·g|; `mixed` is Σ |w·g − ½ w²·F|, with g the mean gradient and F the mean of the blocks' squared ones.
A backward pass through all weights that can go: a gradient of each in memory, for `mixed` two. Even in every layer. Not
here: its recipe of leaving the first four and last two layers alone.
"""

from typing import Any

import torch

from ddp_prune.gates import GatedModel, Masks
from ddp_study.methods.method import Score
from ddp_study.methods.observe import backward, coupled, learning, pruned_weights

Gradients = dict[torch.Tensor, torch.Tensor]  # of each weight


def taylor(gated: GatedModel, blocks: torch.Tensor) -> Masks:
    """Return Σ |w·g| over the weights of each unit."""
    first, _ = _gradients(gated, blocks, squared=False)
    return coupled(gated, lambda weight: (weight.detach().float() * first[weight]).abs())


def mixed(gated: GatedModel, blocks: torch.Tensor) -> Masks:
    """Return Σ |w·g − ½ w²·F| over the weights of each unit."""
    first, second = _gradients(gated, blocks, squared=True)

    def value(weight: torch.Tensor) -> torch.Tensor:
        w = weight.detach().float()
        return (w * first[weight] - 0.5 * w.square() * second[weight]).abs()

    return coupled(gated, value)


def _gradients(gated: GatedModel, blocks: torch.Tensor, *, squared: bool) -> tuple[Gradients, Gradients]:
    """Return the mean over blocks of each weight's gradient, and of its square where asked, in float32."""
    weights: list[Any] = pruned_weights(gated)
    first: Gradients = {weight: torch.zeros_like(weight, dtype=torch.float32) for weight in weights}
    second: Gradients = {weight: torch.zeros_like(first[weight]) for weight in weights if squared}
    with learning(weights):
        for tokens in blocks.split(1):
            backward(gated, tokens)
            for weight in weights:
                first[weight] += weight.grad / len(blocks)
                if squared:
                    second[weight] += weight.grad.float().square() / len(blocks)
                weight.grad = None
    return first, second


TAYLOR = Score(source="arXiv:2305.11627", score=taylor, scope="layer")
MIXED = Score(source="arXiv:2305.11627", score=mixed, scope="layer")
