"""Depth: whole layers go, those that turn their input least first (ShortGPT, arXiv:2403.03853). One forward pass.

The last one goes in part, so that the budget is the same.
"""

import torch
import torch.nn.functional as F

from ddp_prune.gates import GatedModel, Masks
from ddp_study.methods.method import Score
from ddp_study.methods.observe import listen


def score(gated: GatedModel, blocks: torch.Tensor) -> Masks:
    """Return 1 − the mean cosine of what enters and leaves a layer, the same for all its units."""
    sums = torch.zeros(len(gated.layers))

    def note(index: int, given_TH: torch.Tensor, made_TH: torch.Tensor) -> None:
        sums[index] += 1.0 - F.cosine_similarity(given_TH, made_TH, dim=-1).mean().cpu()

    listen(gated, blocks, dict(enumerate(gated.layers)), note)
    rows = {kind: sums[list(gated.sizes.routed_layers)] if kind == "experts" else sums for kind in gated.shapes}
    return {
        kind: rows[kind].view(-1, *[1] * (len(shape) - 1)).expand(shape).clone() for kind, shape in gated.shapes.items()
    }


METHOD = Score(source="arXiv:2403.03853", score=score)
