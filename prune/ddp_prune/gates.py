"""Gates on a stock model: hooks scale its units, and units whose gates closed for good need not be computed.

Legend of shape suffixes: T tokens, L layers, U units of a layer (heads, KV groups or channels); for mixtures of
experts, L layers with routed experts, E experts of a layer, C channels of an expert. In `NarrowLayers`, N bundles of
units that are computed or left out together (a KV head with its query heads, or a channel), K computed bundles.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.tensor import DTensor

from ddp_prune.experts import IMPLEMENTATION, LayerGates
from ddp_training.decoder import decoder_layers
from ddp_training.loss import OutputHead, losses
from ddp_training.memory import fits_with_pass
from ddp_vllm.families import ROUTER, WHOLE_EXPERT, Dimensions, Family, unit_shapes
from ddp_vllm.remote_code.tensors import Projection

Masks = dict[str, torch.Tensor]  # module type -> "attn" and "mlp" [L, U], "experts" [L, E, C]; some of these
CHANNEL_BLOCK = 64  # narrow MLPs have multiples of this: kernels prefer them, and a CPU compiles a kernel per width
DENSE_BLOCKS = ("attn", "mlp")


class _Scale(torch.autograd.Function):
    """x[t] · mask, where each entry of the mask scales `columns` neighbors; backward also squares per-token gradients.

    The gradient of a mask is a sum over tokens, and its terms exist only in backward, which adds their squares to
    `squares_U`: the diagonal of the empirical Fisher. `kept` are the units that x has; None means all units.
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
        ctx.mask_U = mask_U.detach().float()
        return x * spread

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None, None]:
        x, spread = ctx.saved_tensors
        if x.is_cuda:
            from ddp_prune.gate_kernels import gate_backward

            out, sums_U, squares_U = gate_backward(gradients[0], x, ctx.mask_U, ctx.columns)
            if ctx.squares_U is not None:
                kept = slice(None) if ctx.kept is None else ctx.kept
                ctx.squares_U[kept] += squares_U
            return out, sums_U.to(ctx.dtype), None, None, None
        products_TU = (gradients[0] * x).flatten(0, -2).to(ctx.dtype).unflatten(-1, (-1, ctx.columns)).sum(-1)
        if ctx.squares_U is not None and ctx.kept is None:
            ctx.squares_U += products_TU.square().sum(0)
        elif ctx.squares_U is not None:
            ctx.squares_U[ctx.kept] += products_TU.square().sum(0)
        return gradients[0] * spread, products_TU.sum(0), None, None, None


class _Select(torch.autograd.Function):
    """x at the distinct indices `kept` of an axis. Backward copies; the backward of indexing adds, which is slower."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: int, kept: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(kept)
        ctx.shape, ctx.axis = x.shape, axis
        return x.index_select(axis, kept)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (kept,) = ctx.saved_tensors
        return gradients[0].new_zeros(ctx.shape).index_copy_(ctx.axis, kept, gradients[0]), None, None


ForwardPlan = dict[str, list[LayerGates]]
"""How every layer is computed in a forward pass and its backward: per module type, one entry per layer."""


class _Hooks:
    """The hooks of a gated model. They hold no reference to the model: a cycle would keep the weights in memory."""

    plan: ForwardPlan | None = None
    """None: the dense model."""

    def gates(self, block: str, layer: int) -> LayerGates:
        """Return how a layer is computed."""
        return self.plan[block][layer] if self.plan else LayerGates()

    def route(self, layer: int, router_of: Callable[[], Any], *args: Any) -> Any:
        """Let a router choose among the open experts: in this call its weight has only their rows, as when exported."""
        router, open_E = router_of(), self.gates("experts", layer).routed
        forward = partial(type(router).forward, router)
        if open_E is None:
            return forward(*args)
        whole = router._parameters["weight"]
        router._parameters["weight"] = whole.index_select(0, open_E)
        try:
            return forward(*args)
        finally:
            router._parameters["weight"] = whole

    def scale_input(self, block: str, layer: int, columns: int, _module: nn.Module, args: Any) -> Any:
        """Multiply the input of an output projection by the gates of its layer."""
        gates = self.gates(block, layer)
        if gates.mask is None:
            return None
        return (_Scale.apply(args[0], gates.mask, columns, gates.squares, gates.kept), *args[1:])

    def subtract_bias(
        self, block: str, layer: int, module: Any, _args: Any, output: torch.Tensor
    ) -> torch.Tensor | None:
        """Remove the output bias of a block without open units, as the exported model does."""
        mask = self.gates(block, layer).mask
        return None if mask is None else output - module.bias * ~(mask > 0).any(-1, keepdim=True)


class GatedModel:
    """A stock transformers model whose heads, channels or experts can be masked.

    Pre-hooks on the projections that write to the residual stream multiply their input by the current masks. Routed
    experts run through our implementation of transformers' experts interface (`experts.py`). When whole experts are
    pruned, routers choose among the open ones. The weights are not changed and without masks nothing is scaled, so the
    same model is the dense teacher.
    """

    def __init__(self, model: nn.Module, family: Family, sizes: Dimensions, head_unit: str) -> None:
        self.model, self.family, self.sizes, self.head_unit = model, family, sizes, head_unit
        self.shapes = unit_shapes(sizes, head_unit)
        self.layers = list(decoder_layers(model)[1])
        self._hooks = _Hooks()
        if "experts" in self.shapes:
            self._attach_to_experts()
        self._attach_to_projections()

    def rows_of(self, block: str) -> Iterator[tuple[int, nn.Module]]:
        """Yield the rows of a module type's masks with their layers."""
        return ((row, self.layers[layer]) for row, layer in enumerate(self.sizes.layers_of(block)))

    def _attach_to_experts(self) -> None:
        experts: Any
        for row, layer in self.rows_of("experts"):
            experts = layer.get_submodule(self.family.experts)
            experts.ddp_gates = partial(self._hooks.gates, "experts", row)
            if self.head_unit == WHOLE_EXPERT:
                router = layer.get_submodule(ROUTER)
                router.forward = partial(self._hooks.route, row, weakref.ref(router))
        model: Any = self.model
        model.set_experts_implementation(IMPLEMENTATION)
        assert experts.config._experts_implementation == IMPLEMENTATION  # transformers fails silently

    def _attach_to_projections(self) -> None:
        sizes = self.sizes
        for block in (block for block in DENSE_BLOCKS if block in self.shapes):
            projection = self.family.tensors.output(block)
            length = sizes.units_in(projection.units[0]) * projection.unit_size(sizes.head_dim)
            columns = length // self.shapes[block][1]  # inputs per unit
            for row, layer in self.rows_of(block):
                module: Any = layer.get_submodule(projection.name)
                module.register_forward_pre_hook(partial(self._hooks.scale_input, block, row, columns))
                if module.bias is not None and self.family.removes_blocks:
                    module.register_forward_hook(partial(self._hooks.subtract_bias, block, row))

    @contextmanager
    def masks(
        self,
        masks: Mapping[str, torch.Tensor] | None,
        squares: Mapping[str, torch.Tensor] | None = None,
        narrow: "NarrowLayers | None" = None,
    ) -> Iterator[None]:
        """Apply masks to every forward inside the block, and to backward, where checkpointed layers run again.

        masks: of the shapes `self.shapes`, any float dtype; None is the dense model.
        squares: float32; backward adds the sum over tokens of (∂loss/∂mask at that token)².
        narrow: leaves closed units out; their masks must be 0, and get no gradient.
        """
        assert self._hooks.plan is None  # blocks do not nest: with narrow layers the weights are not the dense model's
        if masks is not None:
            self._hooks.plan = {
                block: self._plan(mask, squares[block] if squares else None, narrow.kept[block] if narrow else None)
                for block, mask in masks.items()
            }
        try:
            with narrow.swapped_in() if narrow else nullcontext():
                yield
        finally:
            self._hooks.plan = None

    def _plan(
        self, mask: torch.Tensor, squares: torch.Tensor | None, kept: Sequence[torch.Tensor | None] | None
    ) -> list[LayerGates]:
        """Return how each layer is computed: the rows of mask and squares, both [L, …], with its computed units."""
        nothing = [None] * len(mask)
        routed: Sequence[torch.Tensor | None] = nothing
        if self.head_unit == WHOLE_EXPERT:
            open_LE = (mask > 0).any(-1).cpu()  # a GPU is waited for once, not in every layer
            routed = [open_E.nonzero().flatten().to(mask.device) for open_E in open_LE]
        # The mask is unbound once: a slice per layer would make a gradient as large as all layers in each of them.
        rows = zip(mask.unbind(), nothing if squares is None else squares, kept or nothing, routed, strict=True)
        return [
            LayerGates(row if units is None else row[units], sums, kept=units, routed=open_experts)
            for row, sums, units, open_experts in rows
        ]

    @contextmanager
    def counting(self, counts_LE: torch.Tensor | None) -> Iterator[None]:
        """Inside `masks`: add to int64 `counts_LE`, if given, how often forwards in this block choose each expert."""
        plan = self._hooks.plan
        assert plan is not None
        if counts_LE is not None:
            pairs = zip(plan["experts"], counts_LE, strict=True)
            self._hooks.plan = {"experts": [gates._replace(counts=counts_E) for gates, counts_E in pairs]}
        try:
            yield
        finally:
            self._hooks.plan = plan


class NarrowLayers:
    """Copies of a dense model's projections that compute only the heads and channels that are still open.

    A gate that closed for good has neither output nor gradient. Only the student uses the narrow weights; the dense
    teacher, which is the same model if weights are frozen, uses the whole weights. Trained weights are cut again for
    every forward, and their gradients flow back to the whole weights.
    """

    def __init__(self, gated: GatedModel) -> None:
        self.sizes = gated.sizes
        table, blocks = gated.family.tensors, [block for block in DENSE_BLOCKS if block in gated.shapes]
        self.layers = {block: [layer for _, layer in gated.rows_of(block)] for block in blocks}
        self.inputs = {block: table.inputs(block) for block in blocks}
        self.outputs = {block: table.output(block) for block in blocks}
        self._num_bundles = {"attn": self.sizes.num_kv_heads, "mlp": self.sizes.intermediate_size}
        if any(len(each.units) > 1 for each in self.inputs.get("attn", ())):
            self.inputs["attn"] = ()  # transformers splits fused heads by the config, whatever their widths
        self.kept: dict[str, list[torch.Tensor | None]] = {
            block: [None] * len(layers) for block, layers in self.layers.items()
        }
        """The computed units, ascending, int64; one tensor per row of the masks, None where all units are computed."""
        self._open: dict[str, torch.Tensor] = {}  # bool [L, N], bundles with an open unit
        self._bundles_kept: dict[tuple[str, int], torch.Tensor] = {}
        self._weights: dict[tuple[str, int], dict[tuple[nn.Module, str], torch.Tensor]] = {}  # of frozen models

    def copied_bytes(self) -> int | None:
        """Return the bytes of copies of all these projections; None if weights are sharded."""
        modules = [
            layer.get_submodule(each.name)
            for block, layers in self.layers.items()
            for layer in layers
            for each in (self.outputs[block], *self.inputs[block])
        ]
        tensors = [tensor for module in modules for tensor in module.parameters()]
        sharded = any(isinstance(tensor, DTensor) for tensor in tensors)
        return None if sharded else sum(tensor.nbytes for tensor in tensors)

    def follow(self, is_open: Mapping[str, torch.Tensor]) -> None:
        """Compute only the open units (bool [L, U] per module type) from now on."""
        rows, open_LN = [], {}
        for block in (block for block, inputs in self.inputs.items() if inputs):
            open_LN[block] = is_open[block].unflatten(1, (self._num_bundles[block], -1)).any(-1)
            changed_L = (open_LN[block] != self._open.get(block, True)).any(1)
            rows.append(torch.where(changed_L, open_LN[block].sum(1), -1))  # -1: the layer has not changed
        for block, counts in zip(open_LN, torch.stack(rows).tolist(), strict=True):  # the one wait for the device
            units_per_bundle = is_open[block].shape[1] // self._num_bundles[block]
            for layer, num_open in enumerate(counts):
                if num_open >= 0:
                    self._choose_computed(block, layer, open_LN[block][layer], num_open, units_per_bundle)
        self._open = open_LN

    def _choose_computed(
        self, block: str, layer: int, open_N: torch.Tensor, num_open: int, units_per_bundle: int
    ) -> None:
        """Choose the bundles of a layer to compute: the open ones, and closed ones up to the next multiple."""
        self._weights.pop((block, layer), None)
        multiple = {"attn": 1, "mlp": CHANNEL_BLOCK}[block]
        num_kept = max(1, -(-num_open // multiple)) * multiple
        if num_kept >= len(open_N):
            self.kept[block][layer] = None
            self._bundles_kept.pop((block, layer), None)
            return
        kept_K = open_N.int().argsort(descending=True, stable=True)[:num_kept].sort().values
        units = torch.arange(units_per_bundle, device=kept_K.device)
        self._bundles_kept[block, layer] = kept_K
        self.kept[block][layer] = (kept_K[:, None] * units_per_bundle + units).flatten()

    def _cut(self, block: str, layer: int, kept_K: torch.Tensor) -> dict[tuple[nn.Module, str], torch.Tensor]:
        """Return the narrow weights and biases of a block, by module and parameter name."""
        narrow = {}
        for projection in self.inputs[block]:
            module = self.layers[block][layer].get_submodule(projection.name)
            for key, tensor in module.named_parameters():
                pieces = zip(tensor.chunk(len(projection.units)), projection.units, strict=True)
                bundles = [self._bundles(piece, 0, projection, unit) for piece, unit in pieces]
                narrow[module, key] = torch.cat([_Select.apply(each, 0, kept_K).flatten(0, 1) for each in bundles])
        projection = self.outputs[block]
        output: Any = self.layers[block][layer].get_submodule(projection.name)  # its bias does not depend on units
        columns = self._bundles(output.weight, 1, projection, projection.units[0])
        narrow[output, "weight"] = _Select.apply(columns, 1, kept_K).flatten(1)
        return narrow

    def _bundles(self, tensor: torch.Tensor, axis: int, projection: Projection, unit: str) -> torch.Tensor:
        """Split an axis into [bundles, elements of a bundle]."""
        size = projection.unit_size(self.sizes.head_dim)
        return tensor.unflatten(axis, (-1, size * (self.sizes.queries_per_kv if unit == "query_head" else 1)))

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Replace the model's weights by the narrow ones inside the block."""
        trained = any(each.requires_grad for layers in self.layers.values() for each in layers[0].parameters())
        weights = {} if trained else self._weights
        for (block, layer), kept_K in self._bundles_kept.items():
            if (block, layer) not in weights:
                weights[block, layer] = self._cut(block, layer, kept_K)
        narrow = {parameter: tensor for cut in weights.values() for parameter, tensor in cut.items()}
        whole = {(module, name): module._parameters[name] for module, name in narrow}
        try:
            for (module, name), tensor in narrow.items():
                module._parameters[name] = tensor  # type: ignore[assignment]  # no leaf where weights are trained
            yield
        finally:
            for (module, name), parameter in whole.items():
                module._parameters[name] = parameter


def narrow_layers(
    gated: GatedModel, accelerator: Accelerator, num_sequences: int, seq_len: int, optimizer: str
) -> NarrowLayers | None:
    """Return narrow layers if their copies fit next to a pass; None for experts and sharded weights.

    A run that resumes with less memory may compute closed units again; then its sums round differently.
    """
    if "experts" in gated.shapes:
        return None
    narrow = NarrowLayers(gated)
    copies = narrow.copied_bytes()
    fits = copies is not None and fits_with_pass(copies, gated, num_sequences, seq_len, accelerator, optimizer)
    return narrow if fits else None


def block_losses(gated: GatedModel, masks: Masks | None, blocks: torch.Tensor) -> list[float]:
    """Return the `losses` of a gated model under `masks`; None: the dense model."""
    device = OutputHead.of(gated.model).weight.device
    with gated.masks(masks and {kind: mask.to(device) for kind, mask in masks.items()}):
        return losses(gated.model, blocks)
