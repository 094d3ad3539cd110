"""What a method of the study is, what scores read of a model, and the two scores that need no text.

A method is a score, which ranks units once, or a search, which trains gates. A score is one number per unit, [L, U] per
module type ([L, E, C] for routed experts); the highest are kept. It is given the model, with all gates at 1, and text
from the training data of the searches. Every method keeps exactly the same number of units.

Legend: L layers, U units of a layer; E experts, C channels of an expert; T tokens, I inputs and O outputs of a
projection.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from ddp_prune.gates import DENSE_BLOCKS, GatedModel, Masks
from ddp_prune.loss import OutputHead, distilled_loss, final_hidden
from ddp_prune.selection import exact_support
from ddp_prune.trainer import Trainer
from ddp_vllm.families import EXPERTS, Dimensions

Place = tuple[int, str]
"""Layer and name of a projection in it."""
Note = Callable[[Place, torch.Tensor, torch.Tensor], None]


@dataclass(frozen=True, kw_only=True)
class Score:
    """A one-shot method."""

    source: str
    """The paper, and what of its method is not implemented."""
    score: Callable[[GatedModel, torch.Tensor], Masks]
    """Of a model and blocks of text, int64 [num_blocks, seq_len]."""
    scope: str = "global"
    """Where the budget holds, evenly: over the model, in every layer, or in every expert."""
    suits: str = "all"
    """`dense` models, `mixtures` of experts, or all."""


@dataclass(frozen=True, kw_only=True)
class Search:
    """A method that trains."""

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
    """Return the gates (0 or 1, float32) that keep exactly round(ρK) units of each module type, the best per place.

    whole_experts: keep in each layer the experts whose channels have the highest sums, ρE of them rounded down.
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


def even_support(score: torch.Tensor, kept: int, scope: str, draws: torch.Generator) -> torch.Tensor:
    """Return the bool mask of the `kept` units of highest score, evenly spread over layers or experts.

    score: [L, U] or [L, E, C]. The remainder of a budget that does not divide evenly goes to places drawn at random,
    one unit each: early layers matter more than others, so giving it to the first ones would favor some methods.
    """
    num_places = math.prod(score.shape[: {"global": 0, "layer": 1, "expert": 2}[scope]])
    places = score.reshape(num_places, -1)
    counts = torch.full((num_places,), kept // num_places)
    counts[torch.randperm(num_places, generator=draws)[: kept % num_places]] += 1
    return torch.stack([exact_support(*each) for each in zip(places, counts.tolist(), strict=True)]).view_as(score)


def routed_experts(gated: GatedModel) -> list[Any]:
    """Return the module of stacked experts of every layer that has routed experts."""
    return [gated.layers[index].get_submodule(EXPERTS) for index in gated.sizes.routed_layers]


def projections(gated: GatedModel) -> dict[Place, Any]:
    """Return the modules of heads and MLP channels, of every layer."""
    names = [each.name for each in gated.family.tensors.projections]
    return {(i, name): layer.get_submodule(name) for i, layer in enumerate(gated.layers) for name in names}


def coupled(
    gated: GatedModel,
    value: Callable[[torch.Tensor], torch.Tensor],
    of_matrix: Callable[[torch.Tensor], torch.Tensor] = lambda sums_U: sums_U,
) -> Masks:
    """Return the sum over all weights of a unit of what `value` makes of their tensors, entry by entry.

    Weights that several gates share, as query heads share a KV head, are divided among these gates. `of_matrix` is
    applied to the sums [U] of each matrix of heads or MLP channels before they are added up.
    """
    if "experts" in gated.shapes:
        return {"experts": torch.stack([_of_experts(experts, value) for experts in routed_experts(gated)])}

    def of_block(layer: Any, block: str, num_gates: int) -> torch.Tensor:
        return torch.stack([of_matrix(sums) for sums in _of_block(layer, gated, block, num_gates, value)]).sum(0)

    return {
        block: torch.stack([of_block(layer, block, num_gates) for layer in gated.layers])
        for block, (_, num_gates) in gated.shapes.items()
    }


def _of_experts(experts: Any, value: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    made_EC = value(experts.gate_up_proj).sum(2).unflatten(1, (2, -1)).sum(1)
    return made_EC + value(experts.down_proj).sum(1)


def _of_block(layer: Any, gated: GatedModel, block: str, num_gates: int, value: Any) -> Iterator[torch.Tensor]:
    """Yield the sums [U] of each matrix of one layer's block; queries, keys and values are matrices even if fused."""
    table, sizes = gated.family.tensors, gated.sizes
    yield value(layer.get_submodule(table.output(block).name).weight).sum(0).view(num_gates, -1).sum(1)
    for projection in table.inputs(block):
        rows = value(layer.get_submodule(projection.name).weight).sum(1)
        counts = [sizes.units_in(unit) for unit in projection.units]
        size = projection.unit_size(sizes.head_dim)
        for part, count in zip(rows.split([size * count for count in counts]), counts, strict=True):
            gates_each = max(1, num_gates // count)
            shares = part.view(count, -1).sum(1).repeat_interleave(gates_each) / gates_each
            yield shares.view(num_gates, -1).sum(1)


def by_columns(gated: GatedModel, value: Callable[[Place, torch.Tensor], torch.Tensor]) -> Masks:
    """Return the sum, over a unit's inputs of a block's output projection, of the [I] that `value` returns.

    `value` is given the place and the weight, float32 [O, I].
    """
    found = {}
    for block, (num_layers, num_units) in ((each, gated.shapes[each]) for each in DENSE_BLOCKS):
        name = gated.family.tensors.output(block).name
        weights = (gated.layers[i].get_submodule(name).weight.detach().float() for i in range(num_layers))  # type: ignore[operator]
        found[block] = torch.stack([value((i, name), w).view(num_units, -1).sum(1) for i, w in enumerate(weights)])
    return found


def read(gated: GatedModel, blocks: torch.Tensor, note: Note) -> None:
    """Let the dense model read `blocks`, and call `note` with the place of every projection, its input and output."""
    listen(gated, blocks, projections(gated), note)


@torch.no_grad()
def listen(
    gated: GatedModel, blocks: torch.Tensor, modules: Mapping[Any, nn.Module], note: Callable[..., None]
) -> None:
    """Let the dense model read `blocks`, int64 [num_blocks, seq_len], one after the other.

    note: called with a module's key, its first input [T, I] and its output [T, O], both float32.
    """

    def hear(place: Any, _module: nn.Module, args: Any, output: Any) -> None:
        output = output[0] if isinstance(output, tuple) else output
        note(place, args[0].flatten(0, -2).float(), output.flatten(0, -2).float())

    hooks = [module.register_forward_hook(partial(hear, place)) for place, module in modules.items()]
    try:
        for tokens in blocks.split(1):
            final_hidden(gated.model, tokens.to(OutputHead.of(gated.model).weight.device))
    finally:
        for hook in hooks:
            hook.remove()


def backward(gated: GatedModel, tokens: torch.Tensor) -> None:
    """Run one block, int64 [1, seq_len], forward and back from its mean cross-entropy."""
    head = OutputHead.of(gated.model)
    tokens = tokens.to(head.weight.device)
    distilled_loss(final_hidden(gated.model, tokens), None, head, tokens[:, 1:].reshape(-1), 0.0)[0].backward()


def chance(gated: GatedModel, _blocks: torch.Tensor) -> Masks:
    """Return numbers between 0 and 1, which change with the seed: no method at all, which every other must beat."""
    return {kind: torch.rand(shape) for kind, shape in gated.shapes.items()}


def magnitude(gated: GatedModel, _blocks: torch.Tensor) -> Masks:
    """Return Σ W² over the weights of each unit, as Li et al. (arXiv:1608.08710)."""
    return coupled(gated, lambda weight: weight.detach().float().square())


METHODS = {
    "random": Score(source="chance", score=chance),
    "magnitude": Score(source="arXiv:1608.08710", score=magnitude),
}
