"""Scores by gradients, from backward passes: of gates (Taylor, Fisher), weights (LLM-Pruner) or LoRA (LoRAPrune)."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ddp_prune.gates import GatedModel, Masks
from ddp_prune.loss import OutputHead
from ddp_study.scores import Score, backward, coupled, projections, routed_experts

RANK = 8
SCALE = 2.0  # LoRAPrune's lora_alpha of 16 over the rank
RATE = 1e-4
KEPT = 0.9  # of the mean so far, in each step

Gradients = dict[torch.Tensor, torch.Tensor]
"""Of each weight."""
Addition = tuple[nn.Parameter, nn.Parameter]
"""B [O, RANK] and A [RANK, I]."""


def of_gates(gated: GatedModel, blocks: torch.Tensor) -> tuple[Masks, Masks]:
    """Return (|Σ gradient|, Σ over tokens of its part's square) of the cross-entropy for the gates at 1.

    The first is the Taylor score (arXiv:1905.10650). The second, by which our search closes gates too, is the diagonal
    of the empirical Fisher matrix (as in arXiv:2204.09656, where a sample is a sequence). Weights are frozen.
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
def _learning(tensors: list[nn.Parameter]) -> Iterator[None]:
    """Let frozen weights have gradients inside the block, and none before or after."""
    for tensor in tensors:
        tensor.requires_grad_()
    try:
        yield
    finally:
        for tensor in tensors:
            tensor.requires_grad_(False).grad = None


def _pruned_weights(gated: GatedModel) -> list[Any]:
    """Return the weights that pruning cuts; those of experts are stacked in two tensors per layer."""
    if "experts" in gated.shapes:
        return [tensor for module in routed_experts(gated) for tensor in (module.gate_up_proj, module.down_proj)]
    return [module.weight for module in projections(gated).values()]


def llm_pruner(gated: GatedModel, blocks: torch.Tensor) -> Masks:
    """Return LLM-Pruner's first-order score (arXiv:2305.11627): Σ |w·g|, g the mean gradient of the blocks.

    A gradient of each weight that can be removed is in memory; of `llm_pruner_mixed`, two. Not implemented, of both:
    leaving the first four and last two layers alone.
    """
    first, _ = _gradients(gated, blocks, squared=False)
    return coupled(gated, lambda weight: (weight.detach().float() * first[weight]).abs())


def llm_pruner_mixed(gated: GatedModel, blocks: torch.Tensor) -> Masks:
    """Return LLM-Pruner's Σ |w·g − ½ w²·F|, F the mean of the blocks' squared gradients."""
    first, second = _gradients(gated, blocks, squared=True)

    def value(weight: torch.Tensor) -> torch.Tensor:
        w = weight.detach().float()
        return (w * first[weight] - 0.5 * w.square() * second[weight]).abs()

    return coupled(gated, value)


def _gradients(gated: GatedModel, blocks: torch.Tensor, *, squared: bool) -> tuple[Gradients, Gradients]:
    """Return the mean over blocks of each weight's gradient and, if `squared`, of its square, in float32."""
    weights = _pruned_weights(gated)
    first: Gradients = {weight: torch.zeros_like(weight, dtype=torch.float32) for weight in weights}
    second: Gradients = {weight: torch.zeros_like(first[weight]) for weight in weights if squared}
    with _learning(weights):
        for tokens in blocks.split(1):
            backward(gated, tokens)
            for weight in weights:
                first[weight] += weight.grad / len(blocks)
                if squared:
                    second[weight] += weight.grad.float().square() / len(blocks)
                weight.grad = None
    return first, second


def loraprune(gated: GatedModel, blocks: torch.Tensor) -> Masks:
    """Return LoRAPrune's score (arXiv:2305.18403); the weights are left as they were.

    Additions s·B·A of rank 8 on every projection are trained, one step per block of text. The gradient of a weight is
    estimated as ĝ = g_B·A + B·g_A − g_B·g_A, and a unit scores Σ |ĝ ⊙ (W + s·B·A)| over its weights. The sums of a
    matrix, one per head or channel, are divided by the Euclidean length of their vector, and added up over matrices;
    over steps they are averaged with weights 0.9 and 0.1. Not implemented: removing units while the additions are
    trained, additions in the pruned model, and the small memory, as g_A and g_B are computed from the whole gradient.
    """
    weights = _pruned_weights(gated)
    frozen = {weight: weight.detach().clone() for weight in weights}
    generator = torch.Generator().manual_seed(0)
    additions = {weight: _addition(weight, generator) for weight in weights}
    optimizer = torch.optim.AdamW([each for pair in additions.values() for each in pair], lr=RATE)

    def value(weight: torch.Tensor) -> torch.Tensor:
        b, a = additions[weight]
        estimate = b.grad @ a + b @ a.grad - b.grad @ a.grad  # type: ignore[operator]
        return (estimate * weight.detach().float()).abs()

    mean: Masks = {}
    with _learning(weights):
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


METHODS = {
    "llm-pruner": Score(source="arXiv:2305.11627", score=llm_pruner, scope="layer"),
    "llm-pruner-mixed": Score(source="arXiv:2305.11627", score=llm_pruner_mixed, scope="layer"),
    "loraprune": Score(source="arXiv:2305.18403, scores alone", score=loraprune, scope="layer", suits="dense"),
    "taylor": Score(source="arXiv:1905.10650", score=lambda gated, blocks: of_gates(gated, blocks)[0]),
    "fisher": Score(source="arXiv:2204.09656", score=lambda gated, blocks: of_gates(gated, blocks)[1]),
}
