"""Even widths: every expert keeps as many channels, those of most energy ‖w‖²·Σ(π h)². One forward pass would do.

The control that says what uneven widths are worth; stock engines can serve it without a plugin.
"""

import torch

from ddp_prune.gates import GatedModel, Masks
from ddp_study.methods.expert_use import ExpertUse, measure_experts
from ddp_study.methods.method import Score


def of(use: ExpertUse) -> torch.Tensor:
    """Return the score, [L, E, C]."""
    return use.norms * use.energy


def score(gated: GatedModel, blocks: torch.Tensor) -> Masks:
    return {"experts": of(measure_experts(gated, blocks))}


METHOD = Score(source="a control", score=score, scope="expert", suits="mixtures")
