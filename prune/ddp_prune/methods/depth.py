"""Depth: whole layers go, those that turn their input least first (ShortGPT, arXiv:2403.03853). One forward pass.

The last one goes in part, so that the budget is the same.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from ddp_prune.gates import GatedModel, Masks
from ddp_prune.loss import OutputHead, final_hidden
from ddp_prune.methods.method import Score


@torch.no_grad()
def score(gated: GatedModel, blocks: torch.Tensor) -> Masks:
    """Return 1 − the mean cosine of what enters and leaves a layer, the same for all its units."""
    sums = torch.zeros(len(gated.layers))

    def note(index: int, _layer: Any, given: tuple[torch.Tensor], made: Any) -> None:
        made = made[0] if isinstance(made, tuple) else made
        sums[index] += 1.0 - F.cosine_similarity(given[0].float(), made.float(), dim=-1).mean().cpu()

    hooks = [layer.register_forward_hook(partial(note, index)) for index, layer in enumerate(gated.layers)]
    try:
        for tokens in blocks.split(1):
            final_hidden(gated.model, tokens.to(OutputHead.of(gated.model).weight.device))
    finally:
        for hook in hooks:
            hook.remove()
    rows = {kind: sums[list(gated.sizes.routed_layers)] if kind == "experts" else sums for kind in gated.shapes}
    return {
        kind: rows[kind].view(-1, *[1] * (len(shape) - 1)).expand(shape).clone() for kind, shape in gated.shapes.items()
    }


METHOD = Score(source="arXiv:2403.03853", score=score)
