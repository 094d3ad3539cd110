"""CAMERA-P: ‖w‖²·((1 − α) Σ(π h)² + α max(π h)²) of a channel, α = 0.9, even in every layer (arXiv:2508.02322).

One forward pass would do; the backward one is not used. Not here: shared experts, and layer after layer.
"""

import torch

from ddp_prune.gates import GatedModel, Masks
from ddp_study.methods.expert_use import ExpertUse, measure_experts
from ddp_study.methods.method import Score

ALPHA = 0.9


def of(use: ExpertUse) -> torch.Tensor:
    """Return the score, [L, E, C]."""
    return use.norms * ((1.0 - ALPHA) * use.energy + ALPHA * use.peak)


def score(gated: GatedModel, blocks: torch.Tensor) -> Masks:
    return {"experts": of(measure_experts(gated, blocks))}


METHOD = Score(source="arXiv:2508.02322", score=score, scope="layer", suits="mixtures")
