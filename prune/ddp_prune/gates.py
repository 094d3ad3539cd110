"""Gates on a frozen stock model: what scales a unit from outside, and what a closed one need not compute.

Legend of shape suffixes: L layers, U units of a layer (heads, KV groups or channels); for mixtures of experts, L layers
with routed experts, E experts of a layer, C channels of an expert. In `NarrowLayers`, N bundles of units that are
computed or left out together (a KV head with its query heads, or a channel), K bundles that are computed.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ddp_prune.experts import IMPLEMENTATION, LayerGates
from ddp_vllm.families import EXPERTS, ROUTER, WHOLE_EXPERT, Dimensions, Family, unit_shapes
from ddp_vllm.remote_code.tensors import LAYERS, Projection

Masks = dict[str, torch.Tensor]  # module type -> "attn" and "mlp" [L, U], or "experts" [L, E, C] alone
CHANNEL_BLOCK = 64  # narrow widths are multiples: kernels like them, and a CPU compiles one for each it meets (log 29)
DENSE_BLOCKS = ("attn", "mlp")


class _Scale(torch.autograd.Function):
    """x[t] · mask, every entry of the mask over `columns` neighbours; backward also squares what each token says.

    The gradient of a mask is a sum over tokens. Its parts are there only in backward, so `squares` is filled there: all
    of it, or at `kept` if x has only those units.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        mask_U: torch.Tensor,
        columns: int,
        squares_U: torch.Tensor | None,
        kept: torch.Tensor | None,
    ) -> torch.Tensor:
        spread = mask_U.to(x.dtype).repeat_interleave(columns) if columns > 1 else mask_U.to(x.dtype)
        ctx.save_for_backward(x, spread)
        ctx.columns, ctx.dtype, ctx.squares_U, ctx.kept = columns, mask_U.dtype, squares_U, kept
        return x * spread

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None, None]:
        x, spread = ctx.saved_tensors
        products_TU = (gradients[0] * x).flatten(0, -2).to(ctx.dtype).unflatten(-1, (-1, ctx.columns)).sum(-1)
        if ctx.squares_U is not None and ctx.kept is None:
            ctx.squares_U += products_TU.square().sum(0)
        elif ctx.squares_U is not None:
            ctx.squares_U[ctx.kept] += products_TU.square().sum(0)
        return gradients[0] * spread, products_TU.sum(0), None, None, None


class _Cut(torch.autograd.Function):
    """x at `kept` along an axis, each place at most once; the gradient is 0 elsewhere. That of indexing would add."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: int, kept: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(kept)
        ctx.shape, ctx.axis = x.shape, axis
        return x.index_select(axis, kept)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (kept,) = ctx.saved_tensors
        return gradients[0].new_zeros(ctx.shape).index_copy_(ctx.axis, kept, gradients[0]), None, None


@dataclass
class _Applied:
    """What the hooks of a model read. It does not know the model: a cycle would keep the weights in memory."""

    masks: Mapping[str, Sequence[torch.Tensor]] | None = None
    """The masks of every layer."""
    squares: Mapping[str, torch.Tensor] | None = None
    counts: torch.Tensor | None = None
    routed: Sequence[torch.Tensor] | None = None
    """The experts of every layer that its router chooses among."""
    kept: Mapping[str, Sequence[torch.Tensor | None]] | None = None
    """The units that are computed; None: all."""

    def expert_gates(self, place: int) -> LayerGates:
        """Return what the routed experts of a layer are run with."""
        if self.masks is None:
            return LayerGates(None, None, None)
        squares = None if self.squares is None else self.squares["experts"][place]
        counts = None if self.counts is None else self.counts[place]
        routed = None if self.routed is None else self.routed[place]
        return LayerGates(self.masks["experts"][place], squares, counts, routed)

    def route(self, place: int, router_of: Callable[[], Any], *args: Any) -> Any:
        """Let a router choose among open experts, whose rows alone are its weight meanwhile, as in the exported one."""
        router = router_of()
        forward = partial(type(router).forward, router)
        if self.routed is None:
            return forward(*args)
        whole = router._parameters["weight"]
        router._parameters["weight"] = whole.index_select(0, self.routed[place])
        try:
            return forward(*args)
        finally:
            router._parameters["weight"] = whole

    def scale_input(self, block: str, layer: int, columns: int, _module: nn.Module, args: Any) -> Any:
        """Multiply the input of an output projection by the masks of its layer."""
        if self.masks is None:
            return None
        squares = None if self.squares is None else self.squares[block][layer]
        kept = None if self.kept is None else self.kept[block][layer]
        return (_Scale.apply(args[0], self.masks[block][layer], columns, squares, kept), *args[1:])

    def subtract_bias(
        self, block: str, layer: int, module: Any, _args: Any, output: torch.Tensor
    ) -> torch.Tensor | None:
        """Remove the output bias of a block with no unit left, as the exported model does."""
        if self.masks is None:
            return None
        gone = ~(self.masks[block][layer] > 0).any(-1, keepdim=True)
        return output - module.bias * gone


class GatedModel:
    """A stock transformers model whose heads and channels can be scaled from outside.

    Pre-hooks on the projections that write to the residual stream multiply their input by the current masks; routed
    experts are run by our implementation of transformers' experts interface (`experts.py`). Where whole experts go,
    routers choose among those that are open. The weights are not changed, and without masks nothing is scaled, so the
    same model is the dense teacher.
    """

    def __init__(self, model: nn.Module, family: Family, sizes: Dimensions, head_unit: str) -> None:
        self.model, self.family, self.sizes, self.head_unit = model, family, sizes, head_unit
        self.shapes = unit_shapes(sizes, head_unit)
        self.layers = list(model.get_submodule(LAYERS).children())
        self._applied = _Applied()
        if sizes.num_experts:
            self._attach_to_experts()
        else:
            self._attach_to_projections()

    def _attach_to_experts(self) -> None:
        for place, index in enumerate(self.sizes.routed_layers):
            experts: Any = self.layers[index].get_submodule(EXPERTS)
            experts.ddp_gates = partial(self._applied.expert_gates, place)
            router = self.layers[index].get_submodule(ROUTER)
            router.forward = partial(self._applied.route, place, weakref.ref(router))
        model: Any = self.model
        model.set_experts_implementation(IMPLEMENTATION)
        assert model.config._experts_implementation == IMPLEMENTATION  # transformers is silent where it fails

    def _attach_to_projections(self) -> None:
        sizes = self.sizes
        for block in DENSE_BLOCKS:
            projection = self.family.tensors.output(block)
            length = sizes.units_in(projection.units[0]) * projection.unit_size(sizes.head_dim)
            columns = length // self.shapes[block][1]  # inputs that a unit spans
            for index, layer in enumerate(self.layers):
                module = layer.get_submodule(projection.name)
                module.register_forward_pre_hook(partial(self._applied.scale_input, block, index, columns))
                if module.bias is not None:
                    module.register_forward_hook(partial(self._applied.subtract_bias, block, index))

    @contextmanager
    def masks(
        self,
        masks: Mapping[str, torch.Tensor] | None,
        squares: Mapping[str, torch.Tensor] | None = None,
        narrow: "NarrowLayers | None" = None,
    ) -> Iterator[None]:
        """Apply `masks` (their shapes are those of `shapes`, any float dtype) to every forward inside the block.

        None is the dense model. `backward()` adds to float32 `squares`, where given, the sum over tokens of
        (∂loss/∂mask at that token)². Checkpointed layers run again in backward, so it belongs inside the block too.
        With `narrow`, units that it leaves out are not computed; their masks must be 0, and get no gradient.
        """
        applied = self._applied
        assert applied.kept is None  # inside, the weights are not those of the dense model
        previous = applied.masks, applied.squares, applied.routed
        applied.masks, applied.squares, applied.routed = None, squares, None
        applied.kept = narrow.kept if narrow else None
        if masks is not None and self.head_unit == WHOLE_EXPERT:
            open_LE = (masks["experts"] > 0).any(-1).cpu()  # a GPU is waited for once, not in every layer
            applied.routed = [row.nonzero().flatten().to(masks["experts"].device) for row in open_LE]
        if masks is not None:  # taken apart once: a slice a layer would make a gradient of all layers in each
            mask_of = {block: mask.unbind() for block, mask in masks.items()}
            for block, kept_of in (applied.kept or {}).items():
                pairs = zip(mask_of[block], kept_of, strict=True)
                mask_of[block] = tuple(mask if kept is None else mask[kept] for mask, kept in pairs)
            applied.masks = mask_of
        try:
            with narrow.computed() if narrow else nullcontext():
                yield
        finally:
            applied.masks, applied.squares, applied.routed = previous
            applied.kept = None

    @contextmanager
    def counting(self, counts_LE: torch.Tensor | None) -> Iterator[None]:
        """Add to int64 `counts_LE` how often each expert is chosen by forwards with masks inside the block."""
        previous, self._applied.counts = self._applied.counts, counts_LE
        try:
            yield
        finally:
            self._applied.counts = previous


class NarrowLayers:
    """Copies of a dense model's projections that compute only the heads and channels that are still open.

    A gate that closed for good gives neither output nor gradient. The narrow weights are used by the student and not
    by the dense teacher, which is the same model where weights are frozen. Weights that learn are cut anew for every
    forward, and their gradients arrive at the whole ones.
    """

    def __init__(self, gated: GatedModel) -> None:
        self.layers, self.sizes = gated.layers, gated.sizes
        table = gated.family.tensors
        self.inputs = {block: table.inputs(block) for block in DENSE_BLOCKS}
        self.outputs = {block: table.output(block) for block in DENSE_BLOCKS}
        if any(len(each.units) > 1 for each in self.inputs["attn"]):
            self.inputs["attn"] = ()  # transformers splits fused heads where the config says, whatever the widths
        self.kept: dict[str, list[torch.Tensor | None]] = {
            block: [None] * self.sizes.num_layers for block in DENSE_BLOCKS
        }
        """Units that are computed, rising, int64; one tensor a layer, None where all are."""
        self.learning = False  # the weights move between forwards
        self._bundles_kept: dict[tuple[str, int], torch.Tensor] = {}
        self._weights: dict[tuple[str, int], dict[tuple[nn.Module, str], torch.Tensor]] = {}  # of those that are frozen

    def copied_bytes(self) -> int | None:
        """Return what copies of all these projections would take; None where a process holds only a part of them."""
        projections = [*self.outputs.values(), *(each for block in DENSE_BLOCKS for each in self.inputs[block])]
        modules = [layer.get_submodule(each.name) for layer in self.layers for each in projections]
        tensors = [tensor for module in modules for tensor in module.parameters()]
        cut = any(isinstance(tensor, DTensor) for tensor in tensors)
        return None if cut else sum(tensor.nbytes for tensor in tensors)

    def follow(self, is_open: Mapping[str, torch.Tensor]) -> None:
        """Compute the open units (bool [L, U] a module type) from now on; what is cut depends on nothing else."""
        for block in DENSE_BLOCKS:
            num_bundles = {"attn": self.sizes.num_kv_heads, "mlp": self.sizes.intermediate_size}[block]
            multiple = {"attn": 1, "mlp": CHANNEL_BLOCK}[block]
            for layer, open_NU in enumerate(is_open[block].unflatten(1, (num_bundles, -1))):
                wanted_N = open_NU.any(-1)
                num_kept = max(1, -(-int(wanted_N.sum()) // multiple)) * multiple  # closed ones fill the last multiple
                kept_K = wanted_N.int().argsort(descending=True, stable=True)[:num_kept].sort().values
                if num_kept >= num_bundles or not self.inputs[block]:
                    self.kept[block][layer] = None
                    self._bundles_kept.pop((block, layer), None)
                    self._weights.pop((block, layer), None)
                    continue
                units_NU = torch.arange(open_NU.numel(), device=kept_K.device).view_as(open_NU)
                before, now = self.kept[block][layer], units_NU[kept_K].flatten()
                if before is None or not torch.equal(before, now):
                    self.kept[block][layer], self._bundles_kept[block, layer] = now, kept_K
                    self._weights.pop((block, layer), None)

    def _cut(self, block: str, layer: int, kept_K: torch.Tensor) -> dict[tuple[nn.Module, str], torch.Tensor]:
        found = {}
        for projection in self.inputs[block]:
            module = self.layers[layer].get_submodule(projection.name)
            for key, tensor in module.named_parameters():
                pieces = zip(tensor.chunk(len(projection.units)), projection.units, strict=True)
                bundles = [self._bundles(piece, 0, projection, unit) for piece, unit in pieces]
                found[module, key] = torch.cat([_Cut.apply(each, 0, kept_K).flatten(0, 1) for each in bundles])
        projection = self.outputs[block]
        output: Any = self.layers[layer].get_submodule(projection.name)  # its bias does not depend on units
        columns = self._bundles(output.weight, 1, projection, projection.units[0])
        found[output, "weight"] = _Cut.apply(columns, 1, kept_K).flatten(1)
        return found

    def _bundles(self, tensor: torch.Tensor, axis: int, projection: Projection, unit: str) -> torch.Tensor:
        """Split an axis into bundles and what one of them has there."""
        size = projection.unit_size(self.sizes.head_dim)
        return tensor.unflatten(axis, (-1, size * (self.sizes.queries_per_kv if unit == "query_head" else 1)))

    @contextmanager
    def computed(self) -> Iterator[None]:
        """Put the narrow weights in the place of the model's, inside the block."""
        weights = {} if self.learning else self._weights
        for place, kept_K in self._bundles_kept.items():
            if place not in weights:
                weights[place] = self._cut(*place, kept_K)
        changes = {place: narrow for cut in weights.values() for place, narrow in cut.items()}
        whole = {(module, name): module._parameters[name] for module, name in changes}
        try:
            for (module, name), narrow in changes.items():
                module._parameters[name] = narrow  # type: ignore[assignment]  # no leaf if it learns
            yield
        finally:
            for (module, name), parameter in whole.items():
                module._parameters[name] = parameter
