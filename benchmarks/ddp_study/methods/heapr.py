"""HEAPr: mean(h²)·wᵀ mean(g gᵀ) w of a channel, g the gradient of its expert's output (arXiv:2509.22299).

Means are over routed tokens, and one budget is for all layers. One forward and backward pass; as wᵀ(g gᵀ)w = (gᵀw)², no
matrix is kept. Channels of experts that no token was sent to are worth 0 and go first.
"""

import torch

from ddp_prune.gates import GatedModel, Masks
from ddp_study.methods.expert_use import ExpertUse, measure_experts
from ddp_study.methods.method import Score


def of(use: ExpertUse) -> torch.Tensor:
    """Return the score, [L, E, C]."""
    counts_LE1 = use.counts.clamp_min(1)[..., None]
    return (use.squares / counts_LE1) * (use.slopes / counts_LE1)


def score(gated: GatedModel, blocks: torch.Tensor) -> Masks:
    return {"experts": of(measure_experts(gated, blocks))}


METHOD = Score(source="arXiv:2509.22299", score=score, suits="mixtures")
