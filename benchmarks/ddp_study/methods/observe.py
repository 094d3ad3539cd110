"""What scores look at: weights that go with a unit, and what the projections of a dense model read and write.

Legend: L layers, U units of a layer; T tokens, I inputs and O outputs of a projection.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from ddp_prune.gates import DENSE_BLOCKS, GatedModel, Masks
from ddp_prune.loss import OutputHead, distilled_loss, final_hidden
from ddp_vllm.families import EXPERTS

Place = tuple[int, str]
"""Layer and name of a projection in it."""
Note = Callable[[Place, torch.Tensor, torch.Tensor], None]


def routed_experts(gated: GatedModel) -> list[Any]:
    """Return the module of stacked experts of every layer that has some."""
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
    return {
        block: torch.stack(
            [sum(map(of_matrix, _of_block(layer, gated, block, shape[1], value))) for layer in gated.layers]
        )
        for block, shape in gated.shapes.items()
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
    """Return the sum over a unit's inputs of a block's output projection, of what `value` says of each, [I].

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


def input_squares(gated: GatedModel, blocks: torch.Tensor) -> dict[Place, torch.Tensor]:
    """Return the mean square of every input of every projection over tokens, [I]."""
    sums: dict[Place, torch.Tensor] = {}

    def note(place: Place, x_TI: torch.Tensor, _y_TO: torch.Tensor) -> None:
        sums[place] = sums.get(place, 0.0) + x_TI.square().sum(0)

    read(gated, blocks, note)
    return {place: each / blocks.numel() for place, each in sums.items()}


def backward(gated: GatedModel, tokens: torch.Tensor) -> None:
    """Run one block, int64 [1, seq_len], forward and back from its mean cross-entropy."""
    head = OutputHead.of(gated.model)
    tokens = tokens.to(head.weight.device)
    distilled_loss(final_hidden(gated.model, tokens), None, head, tokens[:, 1:].reshape(-1), 0.0)[0].backward()


@contextmanager
def learning(tensors: list[nn.Parameter]) -> Iterator[None]:
    """Let frozen weights have gradients inside the block, and none before or after."""
    for tensor in tensors:
        tensor.requires_grad_()
    try:
        yield
    finally:
        for tensor in tensors:
            tensor.requires_grad_(False).grad = None


def pruned_weights(gated: GatedModel) -> list[nn.Parameter]:
    """Return the weights that pruning cuts; expert by expert they are stacked in two tensors a layer."""
    if "experts" in gated.shapes:
        return [tensor for module in routed_experts(gated) for tensor in (module.gate_up_proj, module.down_proj)]
    return [module.weight for module in projections(gated).values()]
