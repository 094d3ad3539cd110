"""What a method of the table is: a score that ranks units once, or a search that learns which stay.

A score returns a number a unit, [L, U] a module type ([L, E, C] of experts); the highest stay. It sees the model, as it
is and with gates at 1, and text that the searches learn on too. Every method keeps exactly the same number of units.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ddp_prune.gates import GatedModel, Masks
from ddp_prune.selection import exact_support
from ddp_prune.trainer import Trainer
from ddp_vllm.families import Dimensions


@dataclass(frozen=True, kw_only=True)
class Score:
    """A one-shot method."""

    source: str
    """The paper, and what of its method is not here."""
    score: Callable[[GatedModel, torch.Tensor], Masks]
    """Of a model and blocks of text, int64 [num_blocks, seq_len]."""
    scope: str = "global"
    """Where the budget holds, evenly: over the model, in every layer, or in every expert."""
    suits: str = "all"
    """`dense` models, `mixtures` of experts, or all."""


@dataclass(frozen=True, kw_only=True)
class Search:
    """A method that learns."""

    source: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What it changes in the recipe."""
    trainer: type[Trainer] | None = None
    """None: that of the recipe's controller."""
    suits: str = "all"


def unfit(method: Score | Search, sizes: Dimensions) -> str:
    """Say why a method cannot be used on a model of these sizes; empty if it can."""
    if method.suits == "dense" and sizes.num_experts:
        return "scores heads and MLP channels; of a mixture only channels of routed experts are pruned"
    if method.suits == "mixtures" and not sizes.num_experts:
        return "scores routed experts; this model has none"
    return ""


def choose(scores: Masks, keep_ratio: float, scope: str, *, whole_experts: bool = False, seed: int = 0) -> Masks:
    """Return the gates (0 or 1, float32) that keep exactly round(ρK) units of each module type, the best of a place.

    whole_experts: keep in each layer those experts whose channels score most together, ρE of them rounded down.
    seed: draws the places that keep one unit more where a budget does not divide evenly.
    """
    draws = torch.Generator().manual_seed(seed)
    if whole_experts:
        num_layers, num_experts, _ = scores["experts"].shape
        kept_of_all = num_layers * math.floor(num_experts * keep_ratio * (1.0 + 1e-9))
        support = even_support(scores["experts"].double().sum(-1), kept_of_all, "layer", draws)
        return {"experts": support.float().cpu()[..., None].expand_as(scores["experts"]).contiguous()}
    kept = {kind: round(keep_ratio * score.numel()) for kind, score in scores.items()}
    return {kind: even_support(score, kept[kind], scope, draws).float().cpu() for kind, score in scores.items()}


def even_support(worth: torch.Tensor, kept: int, scope: str, draws: torch.Generator) -> torch.Tensor:
    """Return the bool mask of the `kept` units of highest worth, evenly spread over layers or experts.

    worth: [L, U] or [L, E, C]. The remainder of a budget that does not divide evenly goes to places drawn at random,
    one unit each: early layers matter more than others, so giving it to the first ones would favor some methods.
    """
    num_places = math.prod(worth.shape[: {"global": 0, "layer": 1, "expert": 2}[scope]])
    places = worth.reshape(num_places, -1)
    counts = torch.full((num_places,), kept // num_places)
    counts[torch.randperm(num_places, generator=draws)[: kept % num_places]] += 1
    return torch.stack([exact_support(*each) for each in zip(places, counts.tolist(), strict=True)]).view_as(worth)
