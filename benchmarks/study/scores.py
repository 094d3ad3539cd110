"""Defines the methods of the study, how scores observe a model, and the two scores that use no
text.

A method is a score, which ranks units once, or a search, which trains gates. A score is one number
per unit, [L, U] per module type ([L, E, C] for routed experts); the units with the highest scores
are kept. It is computed on the model with all gates at 1 and text of the searches' training data.
Every method keeps exactly the same number of units.

Legend: L layers, U units of a layer; E experts, C channels of an expert; T tokens, I inputs and O
outputs of a projection.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from ddp_prune.core.gates import DENSE_BLOCKS, GatedModel, Masks
from ddp_prune.core.learn import Trainer
from ddp_prune.core.loss import OutputHead, distill, final_hidden
from ddp_prune.core.selection import greedy
from ddp_vllm.dimensions import Dimensions

Location = tuple[int, str]
"""Layer and name of a projection in it."""
Note = Callable[[Location, torch.Tensor, torch.Tensor], None]


@dataclass(frozen=True, kw_only=True)
class Score:
    """A one-shot method, which ranks units once."""

    source: str
    """The paper, and which part of its method is implemented."""
    score: Callable[[GatedModel, torch.Tensor], Masks]
    """Computes the scores from a model and blocks of text, int64 [num_blocks, seq_len]."""
    scope: str = "global"
    """What the budget applies to: the whole model, every layer, or every expert."""
    suits: str = "all"
    """`dense` models, `mixtures` of experts, or all."""


@dataclass(frozen=True, kw_only=True)
class Search:
    """A method that trains gates."""

    source: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Its changes to the recipe."""
    trainer: type[Trainer] | None = None
    """None: the trainer of the recipe's controller."""
    suits: str = "all"


def exact_support(importance: torch.Tensor, kept: int) -> torch.Tensor:
    """Return the bool mask of the `kept` most important units, of any shape; ties go to the lower
    index."""
    flat = importance.reshape(1, -1)
    return greedy(flat, torch.ones_like(flat), flat.new_tensor([kept])).view(importance.shape)


def unfit(method: Score | Search, sizes: Dimensions) -> str:
    """Return why a method does not apply to a model of these sizes; empty if it does."""
    if method.suits == "dense" and sizes.num_experts:
        return "scores heads and MLP channels; a mixture of experts is pruned only in its routed experts"
    if method.suits == "mixtures" and not sizes.num_experts:
        return "scores routed experts, and this model has none"
    return ""


def choose(scores: Masks, keep_ratio: float, scope: str, *, whole_experts: bool = False, seed: int = 0) -> Masks:
    """Return the gates (0 or 1, float32) that keep exactly round(ρK) units of each module type, the
    best of each group.

    scope: `global`, `layer` or `expert`, the groups of units with equal budgets.
    whole_experts: keep the experts of each layer whose channels have the highest sums, ρE rounded
        down.
    seed: draws the groups that keep one additional unit if the budget does not divide evenly.
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
    """Return the bool mask of the `kept` units of highest score, divided evenly among layers or
    experts.

    score: [L, U] or [L, E, C]. If the budget does not divide evenly, groups drawn at random keep
    one additional unit: early layers matter more than others, so keeping more in the first ones
    would favor some methods.
    """
    num_groups = math.prod(score.shape[: {"global": 0, "layer": 1, "expert": 2}[scope]])
    groups = score.reshape(num_groups, -1)
    counts = torch.full((num_groups,), kept // num_groups)
    counts[torch.randperm(num_groups, generator=draws)[: kept % num_groups]] += 1
    return torch.stack([exact_support(*pair) for pair in zip(groups, counts.tolist(), strict=True)]).view_as(score)


def routed_experts(gated: GatedModel) -> list[Any]:
    """Return the module of stacked experts of every layer that has routed experts."""
    return [experts for experts, *_ in gated.modules["experts"]]


def projections(gated: GatedModel) -> dict[Location, Any]:
    """Return the projections of heads and MLP channels of every layer."""
    names = [projection.name for projection in gated.widths.table.projections]
    return {(i, name): layer.get_submodule(name) for i, layer in enumerate(gated.layers) for name in names}


def coupled(
    gated: GatedModel,
    value: Callable[[torch.Tensor], torch.Tensor],
    of_matrix: Callable[[torch.Tensor], torch.Tensor] = lambda sums_U: sums_U,
) -> Masks:
    """Return for each unit the sum of `value` over all its weights.

    value: maps a weight to a tensor of the same shape. The value of a weight that several gates
        share, as query heads share a KV head, is divided among them.
    of_matrix: applied to the sums [U] of each matrix of heads or MLP channels before matrices are
        added.
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
    inputs_EC = value(experts.gate_up_proj).sum(2).unflatten(1, (2, -1)).sum(1)
    return inputs_EC + value(experts.down_proj).sum(1)


def _of_block(layer: Any, gated: GatedModel, block: str, num_gates: int, value: Any) -> Iterator[torch.Tensor]:
    """Yield the sums [U] of each matrix of one layer's block; fused queries, keys and values are
    three matrices."""
    table, sizes = gated.widths.table, gated.sizes
    yield value(layer.get_submodule(table.output(block).name).weight).sum(0).view(num_gates, -1).sum(1)
    for projection in table.inputs(block):
        rows = value(layer.get_submodule(projection.name).weight).sum(1)
        counts = [gated.widths.dense.num_units(unit) for unit in projection.units]
        size = projection.unit_size(sizes.head_dim)
        for part, count in zip(rows.split([size * count for count in counts]), counts, strict=True):
            gates_each = max(1, num_gates // count)
            shares = part.view(count, -1).sum(1).repeat_interleave(gates_each) / gates_each
            yield shares.view(num_gates, -1).sum(1)


def by_columns(gated: GatedModel, value: Callable[[Location, torch.Tensor], torch.Tensor]) -> Masks:
    """Return for each unit the sum of `value` over its inputs of the block's output projection.

    value: maps the location and the weight, float32 [O, I], to one number per input, [I].
    """
    sums = {}
    for block, (num_layers, num_units) in ((kind, gated.shapes[kind]) for kind in DENSE_BLOCKS):
        name = gated.widths.table.output(block).name
        weights = (gated.layers[i].get_submodule(name).weight.detach().float() for i in range(num_layers))  # type: ignore[operator]
        sums[block] = torch.stack([value((i, name), w).view(num_units, -1).sum(1) for i, w in enumerate(weights)])
    return sums


def observe_projections(gated: GatedModel, blocks: torch.Tensor, note: Note) -> None:
    """Run the dense model on `blocks` and call `note` with the location, input and output of every
    projection."""
    observe(gated, blocks, projections(gated), note)


@torch.no_grad()
def observe(
    gated: GatedModel, blocks: torch.Tensor, modules: Mapping[Any, nn.Module], note: Callable[..., None]
) -> None:
    """Run the dense model on `blocks`, int64 [num_blocks, seq_len], one after the other.

    note: called with a module's key, its first input [T, I] and its output [T, O], both float32.
    """

    def hook(key: Any, _module: nn.Module, args: Any, output: Any) -> None:
        output = output[0] if isinstance(output, tuple) else output
        note(key, args[0].flatten(0, -2).float(), output.flatten(0, -2).float())

    handles = [module.register_forward_hook(partial(hook, key)) for key, module in modules.items()]
    try:
        for tokens in blocks.split(1):
            final_hidden(gated.model, tokens.to(OutputHead.of(gated.model).weight.device))
    finally:
        for handle in handles:
            handle.remove()


def backward(gated: GatedModel, tokens: torch.Tensor) -> None:
    """Run the forward and backward pass of one block's mean cross-entropy. tokens: int64 [1,
    seq_len]."""
    head = OutputHead.of(gated.model)
    tokens = tokens.to(head.weight.device)
    distill(final_hidden(gated.model, tokens), None, head, tokens[:, 1:].reshape(-1), 0.0)[0].backward()


def chance(gated: GatedModel, _blocks: torch.Tensor) -> Masks:
    """Return random scores, which depend on the seed: the baseline that every method must beat."""
    return {kind: torch.rand(shape) for kind, shape in gated.shapes.items()}


def magnitude(gated: GatedModel, _blocks: torch.Tensor) -> Masks:
    """Return Σ W² over the weights of each unit, as Li et al. (arXiv:1608.08710)."""
    return coupled(gated, lambda weight: weight.detach().float().square())


METHODS = {
    "random": Score(source="chance", score=chance),
    "magnitude": Score(source="arXiv:1608.08710", score=magnitude),
}
