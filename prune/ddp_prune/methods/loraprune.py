"""LoRAPrune: what the loss would change by without a unit's weights, by gradients of low-rank additions (2305.18403).

Additions s·B·A of rank 8 on every projection learn, one step a block of text. The gradient of a weight is taken to be
ĝ = g_B·A + B·g_A − g_B·g_A, and a unit is worth Σ |ĝ ⊙ (W + s·B·A)| over its weights. Sums of a matrix are divided by
the length of the vector of its rows' (of output projections, columns') sums; over steps they are averaged as 0.9 and
0.1. Even in every layer. Not here: units that go while the additions learn, additions that stay in the pruned model,
and the small memory, for g_A and g_B are made of the weight's own gradient.
"""

from typing import Any

import torch
from torch import nn

from ddp_prune.gates import DENSE_BLOCKS, GatedModel, Masks
from ddp_prune.methods.method import Score
from ddp_prune.methods.observe import backward, coupled, learning, pruned_weights

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
    outputs = [gated.family.tensors.output(block).name for block in DENSE_BLOCKS]
    by_column: set[Any] = {layer.get_submodule(name).weight for layer in gated.layers for name in outputs}

    def value(weight: torch.Tensor) -> torch.Tensor:
        b, a = additions[weight]
        estimate = b.grad @ a + b @ a.grad - b.grad @ a.grad  # type: ignore[operator]
        found = (estimate * weight.detach().float()).abs()
        return found / found.sum(0 if weight in by_column else 1).norm().clamp_min(torch.finfo(found.dtype).tiny)

    mean: Masks = {}
    with learning(weights):
        for tokens in blocks.split(1):
            backward(gated, tokens)
            with torch.no_grad():
                for weight, (b, a) in additions.items():
                    gradient = weight.grad.float()
                    b.grad, a.grad, weight.grad = SCALE * gradient @ a.T, SCALE * b.T @ gradient, None
                now = coupled(gated, value)
                mean = {kind: KEPT * mean[kind] + (1 - KEPT) * each if mean else each for kind, each in now.items()}
                optimizer.step()
                for weight, (b, a) in additions.items():
                    weight.copy_(frozen[weight].float() + SCALE * b @ a)
        for weight, original in frozen.items():
            weight.data.copy_(original)
    return mean


def _addition(weight: torch.Tensor, generator: torch.Generator) -> Addition:
    """Return B, which is 0, and a random A, as PEFT begins."""
    num_outputs, num_inputs = weight.shape
    a = (2 * torch.rand(RANK, num_inputs, generator=generator) - 1) / num_inputs**0.5
    return nn.Parameter(torch.zeros(num_outputs, RANK, device=weight.device)), nn.Parameter(a.to(weight.device))


METHOD = Score(source="arXiv:2305.18403; scores alone", score=score, scope="layer", suits="dense")
