"""LLM-Pruner: what the loss would change by without a unit's weights, estimated weight by weight (arXiv:2305.11627).

`taylor` is Σ |w·g|; `mixed` is Σ |w·g − ½ w²·F|, with g the mean gradient and F the mean of the blocks' squared ones.
A backward pass through all weights that can go: a gradient of each in memory, for `mixed` two. Even in every layer. Not
here: its recipe of leaving the first four and last two layers alone.
"""

import torch

from ddp_prune.gates import GatedModel, Masks
from ddp_prune.methods.method import Score
from ddp_prune.methods.observe import backward, coupled, learning, pruned_weights


def taylor(gated: GatedModel, blocks: torch.Tensor) -> Masks:
    """Return Σ |w·g| over the weights of each unit."""
    with learning(pruned_weights(gated)):
        for tokens in blocks.split(1):
            backward(gated, tokens)
        return coupled(gated, lambda w: (w.detach() * w.grad).float().abs())  # type: ignore[operator]  # it has one


def mixed(gated: GatedModel, blocks: torch.Tensor) -> Masks:
    """Return Σ |w·g − ½ w²·F| over the weights of each unit."""
    weights = pruned_weights(gated)
    first = {weight: torch.zeros_like(weight, dtype=torch.float32) for weight in weights}
    second = {weight: torch.zeros_like(weight, dtype=torch.float32) for weight in weights}
    with learning(weights):
        for tokens in blocks.split(1):
            backward(gated, tokens)
            for weight in weights:
                assert weight.grad is not None
                first[weight] += weight.grad.float() / len(blocks)
                second[weight] += weight.grad.float().square() / len(blocks)
                weight.grad = None

    def value(weight: torch.Tensor) -> torch.Tensor:
        w = weight.detach().float()
        return (w * first[weight] - 0.5 * w.square() * second[weight]).abs()  # type: ignore[index]

    return coupled(gated, value)


TAYLOR = Score(source="arXiv:2305.11627", score=taylor, scope="layer")
MIXED = Score(source="arXiv:2305.11627", score=mixed, scope="layer")
