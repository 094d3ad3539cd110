"""LoRAPrune: how the loss would change without a unit's weights, by gradients of low-rank additions (2305.18403).

Additions s·B·A of rank 8 on every projection are trained, one step per block of text. The gradient of a weight is
estimated as ĝ = g_B·A + B·g_A − g_B·g_A, and the importance of a unit is Σ |ĝ ⊙ (W + s·B·A)| over its weights. The sums
of a matrix, one per head or channel, are divided by the Euclidean length of their vector, and added up over matrices;
over steps they are averaged with weights 0.9 and 0.1. The budget is even over layers. Not implemented: removing units
while the additions are trained, additions in the pruned model, and the small memory, as g_A and g_B are computed from
the gradient of the whole weight.
"""

from typing import Any

import torch
from torch import nn

from ddp_prune.gates import GatedModel, Masks
from ddp_study.methods.method import Score
from ddp_study.methods.observe import backward, coupled, learning, pruned_weights

RANK = 8
SCALE = 2.0  # its lora_alpha of 16 over the rank
RATE = 1e-4
KEPT = 0.9  # of the mean so far, in each step

Addition = tuple[nn.Parameter, nn.Parameter]
"""B [O, RANK] and A [RANK, I]."""


def score(gated: GatedModel, blocks: torch.Tensor) -> Masks:
    """Learn the additions on `blocks`, and leave the weights as they were."""
    weights: list[Any] = pruned_weights(gated)
    frozen = {weight: weight.detach().clone() for weight in weights}
    generator = torch.Generator().manual_seed(0)
    additions = {weight: _addition(weight, generator) for weight in weights}
    optimizer = torch.optim.AdamW([each for pair in additions.values() for each in pair], lr=RATE)

    def value(weight: torch.Tensor) -> torch.Tensor:
        b, a = additions[weight]
        estimate = b.grad @ a + b @ a.grad - b.grad @ a.grad  # type: ignore[operator]
        return (estimate * weight.detach().float()).abs()

    mean: Masks = {}
    with learning(weights):
        for tokens in blocks.split(1):
            backward(gated, tokens)
            with torch.no_grad():
                for weight, (b, a) in additions.items():
                    gradient = weight.grad.float()
                    b.grad, a.grad, weight.grad = SCALE * gradient @ a.T, SCALE * b.T @ gradient, None
                now = coupled(gated, value, _of_length_1)
                mean = {kind: KEPT * mean[kind] + (1 - KEPT) * each if mean else each for kind, each in now.items()}
                optimizer.step()
                for weight, (b, a) in additions.items():
                    weight.copy_(frozen[weight].float() + SCALE * b @ a)
        for weight, original in frozen.items():
            weight.data.copy_(original)
    return mean


def _of_length_1(sums_U: torch.Tensor) -> torch.Tensor:
    return sums_U / sums_U.norm().clamp_min(torch.finfo(sums_U.dtype).tiny)


def _addition(weight: torch.Tensor, generator: torch.Generator) -> Addition:
    """Return B, which is 0, and a random A, as PEFT begins."""
    num_outputs, num_inputs = weight.shape
    a = (2 * torch.rand(RANK, num_inputs, generator=generator) - 1) / num_inputs**0.5
    return nn.Parameter(torch.zeros(num_outputs, RANK, device=weight.device)), nn.Parameter(a.to(weight.device))


METHOD = Score(source="arXiv:2305.18403; scores alone", score=score, scope="layer", suits="dense")
