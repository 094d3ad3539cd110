"""Scores units by gradients of gates (Taylor, Fisher), weights (LLM-Pruner) or LoRA (LoRAPrune)."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ddp_prune.core.gates import GatedModel, Masks
from ddp_prune.core.loss import OutputHead
from scores import Score, backward, coupled, projections, routed_experts

RANK = 8
SCALE = 2.0  # LoRAPrune's lora_alpha of 16 over the rank
RATE = 1e-4
MOMENTUM = 0.9  # weight of the previous mean in each step

Gradients = dict[torch.Tensor, torch.Tensor]
"""Weight -> its gradient."""
Adapter = tuple[nn.Parameter, nn.Parameter]
"""B [O, RANK] and A [RANK, I]."""


def of_gates(gated: GatedModel, blocks: torch.Tensor) -> tuple[Masks, Masks]:
    """Return the Taylor score |Σ g| and the Fisher score Σ g² of the gates at 1; g: a token's
    gradient of the loss.

    The loss is the cross-entropy. The Taylor score is that of arXiv:1905.10650. The Fisher score,
    which our search also uses, is the diagonal empirical Fisher (arXiv:2204.09656 takes g per
    sequence). Weights are frozen.
    """
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


@contextmanager
def _with_gradients(tensors: list[nn.Parameter]) -> Iterator[None]:
    """Enable gradients of frozen weights inside the block, and remove them after it."""
    for tensor in tensors:
        tensor.requires_grad_()
    try:
        yield
    finally:
        for tensor in tensors:
            tensor.requires_grad_(False).grad = None


def _pruned_weights(gated: GatedModel) -> list[Any]:
    """Return the weights that pruning shortens; experts are stacked in two tensors per layer."""
    if "experts" in gated.shapes:
        return [tensor for module in routed_experts(gated) for tensor in (module.gate_up_proj, module.down_proj)]
    return [module.weight for module in projections(gated).values()]


def llm_pruner(gated: GatedModel, blocks: torch.Tensor) -> Masks:
    """Return LLM-Pruner's first-order score (arXiv:2305.11627): Σ |w·g|, g the mean gradient of the
    blocks.

    Stores one gradient per prunable weight. Not implemented: its second-order term, which changed
    no result in our tables, and exempting the first four and last two layers.
    """
    first = _gradients(gated, blocks)
    return coupled(gated, lambda weight: (weight.detach().float() * first[weight]).abs())


def _gradients(gated: GatedModel, blocks: torch.Tensor) -> Gradients:
    """Return the mean over blocks of each weight's gradient, in float32."""
    weights = _pruned_weights(gated)
    first: Gradients = {weight: torch.zeros_like(weight, dtype=torch.float32) for weight in weights}
    with _with_gradients(weights):
        for tokens in blocks.split(1):
            backward(gated, tokens)
            for weight in weights:
                first[weight] += weight.grad / len(blocks)
                weight.grad = None
    return first


def loraprune(gated: GatedModel, blocks: torch.Tensor) -> Masks:
    """Return LoRAPrune's score (arXiv:2305.18403); the weights are restored afterwards.

    Adapters s·B·A of rank 8 on every projection are trained, one step per block of text. The
    gradient of a weight is estimated as ĝ = g_B·A + B·g_A − g_B·g_A, and the score of a unit is Σ
    |ĝ ⊙ (W + s·B·A)| over its weights. The sums of each matrix are divided by the norm of their
    vector and added over matrices; over steps they are averaged with weights 0.9 and 0.1. Not
    implemented: removing units during training, adapters in the pruned model, and the small memory,
        because g_A and g_B are computed from the gradient of the whole weight.
    """
    weights = _pruned_weights(gated)
    frozen = {weight: weight.detach().clone() for weight in weights}
    generator = torch.Generator().manual_seed(0)
    adapters = {weight: _adapter(weight, generator) for weight in weights}
    optimizer = torch.optim.AdamW([weight for pair in adapters.values() for weight in pair], lr=RATE)

    def value(weight: torch.Tensor) -> torch.Tensor:
        b, a = adapters[weight]
        estimate = b.grad @ a + b @ a.grad - b.grad @ a.grad  # type: ignore[operator]
        return (estimate * weight.detach().float()).abs()

    mean: Masks = {}
    with _with_gradients(weights):
        for tokens in blocks.split(1):
            backward(gated, tokens)
            with torch.no_grad():
                for weight, (b, a) in adapters.items():
                    gradient = weight.grad.float()
                    b.grad, a.grad, weight.grad = SCALE * gradient @ a.T, SCALE * b.T @ gradient, None
                now = coupled(gated, value, _normalized)
                mean = {
                    kind: MOMENTUM * mean[kind] + (1 - MOMENTUM) * gradient if mean else gradient
                    for kind, gradient in now.items()
                }
                optimizer.step()
                for weight, (b, a) in adapters.items():
                    weight.copy_(frozen[weight].float() + SCALE * b @ a)
        for weight, original in frozen.items():
            weight.data.copy_(original)
    return mean


def _normalized(sums_U: torch.Tensor) -> torch.Tensor:
    return sums_U / sums_U.norm().clamp_min(torch.finfo(sums_U.dtype).tiny)


def _adapter(weight: torch.Tensor, generator: torch.Generator) -> Adapter:
    """Return PEFT's initial values: B = 0 and a random A."""
    num_outputs, num_inputs = weight.shape
    a = (2 * torch.rand(RANK, num_inputs, generator=generator) - 1) / num_inputs**0.5
    return nn.Parameter(torch.zeros(num_outputs, RANK, device=weight.device)), nn.Parameter(a.to(weight.device))


METHODS = {
    "llm-pruner": Score(source="arXiv:2305.11627", score=llm_pruner, scope="layer"),
    "loraprune": Score(source="arXiv:2305.18403, only its scores", score=loraprune, scope="layer", suits="dense"),
    "taylor": Score(source="arXiv:1905.10650", score=lambda gated, blocks: of_gates(gated, blocks)[0]),
    "fisher": Score(source="arXiv:2204.09656", score=lambda gated, blocks: of_gates(gated, blocks)[1]),
}
