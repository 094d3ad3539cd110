"""Whole experts go, the worst of a layer first: by how often they are chosen, by REAP's score, by both, or by NAEE's.

REAP's (arXiv:2510.13999) is the mean over an expert's tokens of π·‖output‖; both is the sum. NAEE (arXiv:2402.14800)
keeps the experts whose layer is nearest to the dense one in ‖MoE(X) − MoE_S(X)‖. Here one by one, not all sets, and
the router sends no tokens of what goes to others, as in our models. The expert on which the budget ends loses its
channels of least energy only. One forward pass would do.
"""

from collections.abc import Callable

import torch

from ddp_prune.gates import GatedModel, Masks
from ddp_prune.methods import even_widths
from ddp_prune.methods.expert_use import ExpertUse, measure_experts
from ddp_prune.methods.method import Score

Worth = Callable[[ExpertUse], torch.Tensor]


def frequency(use: ExpertUse) -> torch.Tensor:
    """Return the tokens sent to each expert, [L, E]."""
    return use.counts


def reap(use: ExpertUse) -> torch.Tensor:
    """Return the mean of π·‖output‖ over an expert's tokens, [L, E]; 0 without any."""
    return use.output / use.counts.clamp_min(1)


def sum_of_outputs(use: ExpertUse) -> torch.Tensor:
    """Return the sum of π·‖output‖ over an expert's tokens, [L, E]."""
    return use.output


def nearest_layer(use: ExpertUse) -> torch.Tensor:
    """Return the place of each expert in the order in which they go, [L, E]: always that which takes least away."""
    places = torch.zeros_like(use.counts)
    for products_EE, place_E in zip(use.products, places, strict=True):
        taken_E, gone = products_EE.diagonal().clone(), torch.zeros_like(place_E, dtype=torch.bool)
        for place in range(len(place_E)):  # taken: what ‖sum of outputs that are gone‖² would grow by
            expert = int(taken_E.masked_fill(gone, torch.inf).argmin())
            place_E[expert], gone[expert] = place, True
            taken_E += 2 * products_EE[expert]
    return places


def of(use: ExpertUse, worth: Worth) -> torch.Tensor:
    """Return a score by which experts go one by one, [L, E, C]."""
    channel_rank = even_widths.of(use).argsort(dim=-1, stable=True).argsort(dim=-1)
    expert_rank = worth(use).argsort(dim=-1, stable=True).argsort(dim=-1)
    return (expert_rank[..., None] * channel_rank.shape[-1] + channel_rank).float()


def _method(source: str, worth: Worth) -> Score:
    def score(gated: GatedModel, blocks: torch.Tensor) -> Masks:
        return {"experts": of(measure_experts(gated, blocks), worth)}

    return Score(source=source, score=score, scope="layer", suits="mixtures")


FREQUENCY = _method("arXiv:2206.00277", frequency)
REAP = _method("arXiv:2510.13999", reap)
NAEE = _method("arXiv:2402.14800, greedy, router as it is", nearest_layer)
USE = _method("a control: frequency × REAP", sum_of_outputs)
