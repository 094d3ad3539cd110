"""Gates on a stock model: its projections scale units, and leave out units whose gates closed for
good.

Legend of shape suffixes: T tokens, L layers, U units of a layer (heads, KV groups or channels); for
mixtures of experts, L layers with routed experts, E experts of a layer, C channels of an expert. In
`NarrowLayers`, N bundles of units that are computed or left out together (a KV head with its query
heads, or a channel), K computed bundles.
"""

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ddp_prune.core.decoder import decoder_layers
from ddp_prune.core.experts import IMPLEMENTATION, LayerGates
from ddp_vllm.dimensions import WHOLE_EXPERT, Dimensions, unit_shapes
from ddp_vllm.remote_code.configuration_ddp_widths import renaming
from ddp_vllm.remote_code.tensors import Projection
from ddp_vllm.remote_code.widths import Widths

# module type -> "attn" and "mlp" [L, U], "experts" [L, E, C]; some of these
Masks = dict[str, Tensor]
# narrow MLPs have multiples of this: kernels prefer them, and a CPU compiles a kernel per width
CHANNEL_BLOCK = 64
DENSE_BLOCKS = ("attn", "mlp")
ROUTER = "mlp.gate"  # transformers' module of the router of a layer whose experts can be removed whole


class _Scale(torch.autograd.Function):
    """x[t] · mask, where each entry of the mask scales `columns` neighbors; backward also squares
    per-token gradients.

    The gradient of a mask is a sum over tokens, and its terms exist only in backward, which adds
    their squares to `squares_U`: the diagonal of the empirical Fisher. `kept` are the units that x
    has; None means all units.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        mask_U: Tensor,
        columns: int,
        squares_U: Tensor | None,
        kept: Tensor | None,
    ) -> Tensor:
        spread = mask_U.to(x.dtype).repeat_interleave(columns) if columns > 1 else mask_U.to(x.dtype)
        ctx.save_for_backward(x, spread)
        ctx.columns, ctx.dtype, ctx.squares_U, ctx.kept = columns, mask_U.dtype, squares_U, kept
        ctx.mask_U = mask_U.detach().float()
        return x * spread

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        x, spread = ctx.saved_tensors
        if x.is_cuda:
            from ddp_prune.core.kernels import gate_backward

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
    """x at the distinct indices `kept` of an axis. Backward copies; the backward of indexing adds,
    which is slower."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: int, kept: Tensor) -> Tensor:
        ctx.save_for_backward(kept)
        ctx.shape, ctx.axis = x.shape, axis
        return x.index_select(axis, kept)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (kept,) = ctx.saved_tensors
        return gradients[0].new_zeros(ctx.shape).index_copy_(ctx.axis, kept, gradients[0]), None, None


class GatedProjection(nn.Module):
    """Mixed into a linear layer: its input is scaled by gates, and it may compute a part of its
    rows or columns.

    The class of the model's own layer is replaced, so parameters keep their names. Outside of
    `GatedModel.masks` it is the layer that it was.
    """

    weight: Tensor
    bias: Tensor | None
    gates: LayerGates = LayerGates()
    projection: Projection
    bundle_sizes: tuple[int, ...]
    """Rows or columns of a bundle, for each kind of units."""
    removes_bias: bool
    """Whether the output bias falls away with the last unit, as in the exported model."""
    narrow: tuple[Tensor, Tensor, Tensor | None] | None = None
    """Of frozen weights: the computed bundles, and weight and bias at these."""

    def forward(self, x: Tensor) -> Tensor:
        gates, scales_input = self.gates, self.projection.axis == 1
        if scales_input and gates.mask is not None:
            x = _Scale.apply(x, gates.mask, gates.columns, gates.squares, gates.kept)
        y: Tensor = super().forward(x) if gates.bundles is None else F.linear(x, *self.weights_at(gates.bundles))
        if self.removes_bias and gates.mask is not None:
            assert self.bias is not None
            y = y - self.bias * ~(gates.mask > 0).any(-1, keepdim=True)
        return y

    def weights_at(self, kept_K: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias of the kept bundles. Gradients of trained weights flow back to all
        of them."""
        if self.narrow is not None and self.narrow[0] is kept_K:
            return self.narrow[1:]
        axis = self.projection.axis

        def select(tensor: Tensor) -> Tensor:
            parts = zip(tensor.chunk(len(self.bundle_sizes), axis), self.bundle_sizes, strict=True)
            bundles = [_Select.apply(part.unflatten(axis, (-1, size)), axis, kept_K) for part, size in parts]
            return torch.cat([bundle.flatten(axis, axis + 1) for bundle in bundles], axis)

        bias = select(self.bias) if self.bias is not None and axis == 0 else self.bias
        weights = select(self.weight), bias  # the bias of an output does not depend on units
        self.narrow = None if self.weight.requires_grad else (kept_K, *weights)
        return weights


@functools.cache
def gated_class(kind: Any) -> type[nn.Module]:
    """Return the class of a gated layer, for `nn.Linear` and its children, and for adapters of
    peft."""
    return type(f"Gated{kind.__name__}", (GatedProjection, kind), {})


class GatedModel:
    """A stock transformers model whose heads, channels or experts can be masked.

    The projections that write to the residual stream scale their input by the current masks
    (`GatedProjection`). Routed experts run through our implementation of transformers' experts
    interface (`experts.py`). When whole experts are pruned, routers choose among the open ones. The
    weights are not changed and without masks nothing is scaled, so the same model is the dense
    teacher.
    """

    def __init__(self, model: nn.Module, widths: Widths, sizes: Dimensions, head_unit: str) -> None:
        """widths: of the dense model; sizes: with the blocks that get gates."""
        self.model, self.widths, self.sizes, self.head_unit = model, widths, sizes, head_unit
        self.shapes, self.is_masked = unit_shapes(sizes, head_unit), False
        self.layers, rename = list(decoder_layers(model)[1]), renaming(model)
        weights = {part: f"{widths.layers_module}.0.{part.name.format(0)}.weight" for part in widths.table.projections}
        self.names = {part: rename(name)[0].partition(".0.")[2].rpartition(".")[0] for part, name in weights.items()}
        """Projection -> the module of a layer that holds it in transformers."""
        self.modules: dict[str, list[list[Any]]] = {}
        """The modules that read the gates, per module type and row of its masks."""
        if "experts" in self.shapes:
            self._attach_to_experts()
        for block in (block for block in DENSE_BLOCKS if block in self.shapes):
            projections = (*widths.table.inputs(block), widths.table.output(block))
            self.modules[block] = [
                [self._gated(layer.get_submodule(self.names[part]), part) for part in projections]
                for layer in self.layers_of(block)
            ]

    def layers_of(self, block: str) -> list[nn.Module]:
        """Return the layer of each row of a module type's masks."""
        return [self.layers[layer] for layer in self.sizes.layers_of(block)]

    def _attach_to_experts(self) -> None:
        rows = self.modules["experts"] = []
        for layer in self.layers_of("experts"):
            experts: Any = layer.get_submodule(self.names[self.widths.table.output("experts")])
            experts.gates = LayerGates()
            rows.append([experts])
            if self.head_unit == WHOLE_EXPERT:
                router: Any = layer.get_submodule(ROUTER)
                router.gates = LayerGates()
                # by a weak reference: a cycle would keep the weights in memory
                router.forward = partial(_route, weakref.ref(router))
                rows[-1].append(router)
        model: Any = self.model
        model.set_experts_implementation(IMPLEMENTATION)
        # transformers keeps another implementation silently
        assert experts.config._experts_implementation == IMPLEMENTATION

    def _gated(self, module: Any, projection: Projection) -> Any:
        """Let a projection compute with gates, and return it."""
        if not isinstance(module, GatedProjection):
            kind: Any = type(module)
            module.__class__ = gated_class(kind)
        size = projection.unit_size(self.sizes.head_dim)
        # query heads are computed or left out with their KV head
        queries = self.sizes.queries_per_kv
        module.projection = projection
        module.bundle_sizes = tuple(size * (queries if unit == "query_head" else 1) for unit in projection.units)
        module.removes_bias = projection.axis == 1 and module.bias is not None and self.widths.is_family
        return module

    @contextmanager
    def masks(
        self,
        masks: Mapping[str, Tensor] | None,
        squares: Mapping[str, Tensor] | None = None,
        narrow: "NarrowLayers | None" = None,
    ) -> Iterator[None]:
        """Apply masks to every forward inside the block, and to backward, where checkpointed layers
        run again.

        masks: of the shapes `self.shapes`, any float dtype; None is the dense model.
        squares: float32; backward adds the sum over tokens of (∂loss/∂mask at that token)².
        narrow: leaves closed units out; their masks must be 0, and get no gradient.
        """
        assert not self.is_masked  # the teacher of frozen weights is the same model
        self.is_masked = masks is not None
        try:
            for block, mask in (masks or {}).items():
                rows = self._layer_gates(block, mask, squares[block] if squares else None, narrow)
                for gates, modules in zip(rows, self.modules[block], strict=True):
                    for module in modules:
                        module.gates = gates
            yield
        finally:
            self.is_masked = False
            for modules in (modules for rows in self.modules.values() for modules in rows):
                for module in modules:
                    module.gates = LayerGates()

    def _layer_gates(
        self, block: str, mask: Tensor, squares: Tensor | None, narrow: "NarrowLayers | None"
    ) -> Iterator[LayerGates]:
        """Yield how each layer is computed, from the rows of mask and squares, both [L, …]."""
        routed: list[Tensor | None] = [None] * len(mask)
        heads = self.sizes.num_query_heads * self.sizes.head_dim
        columns = heads // self.shapes[block][1] if block == "attn" else 1
        if self.head_unit == WHOLE_EXPERT:
            open_LE = (mask > 0).any(-1).cpu()  # a GPU is waited for once, not in every layer
            routed = [open_E.nonzero().flatten().to(mask.device) for open_E in open_LE]
        # The mask is unbound once: a slice per layer would make a gradient as large as all layers
        # in each of them.
        for row, scales in enumerate(mask.unbind()):
            kept = narrow.kept[block][row] if narrow else None
            yield LayerGates(
                mask=scales if kept is None else scales[kept],
                columns=columns,
                squares=None if squares is None else squares[row],
                kept=kept,
                bundles=None if kept is None or narrow is None else narrow.bundles[block][row],
                routed=routed[row],
            )

    @contextmanager
    def counting(self, counts_LE: Tensor | None) -> Iterator[None]:
        """Inside `masks`: add to int64 `counts_LE`, if given, how often forwards in this block
        choose each expert."""
        modules = [] if counts_LE is None else [experts for experts, *_ in self.modules["experts"]]
        before = [experts.gates for experts in modules]
        for experts, counts_E in zip(modules, () if counts_LE is None else counts_LE, strict=True):
            experts.gates = experts.gates._replace(counts=counts_E)
        try:
            yield
        finally:
            for experts, gates in zip(modules, before, strict=True):
                experts.gates = gates


def _route(router_of: Callable[[], Any], *args: Any) -> Any:
    """Let a router choose among the open experts: in this call its weight has only their rows, as
    when exported."""
    router = router_of()
    forward, open_E = partial(type(router).forward, router), router.gates.routed
    if open_E is None:
        return forward(*args)
    weight = router._parameters["weight"]
    router._parameters["weight"] = weight.index_select(0, open_E)
    try:
        return forward(*args)
    finally:
        router._parameters["weight"] = weight


class NarrowLayers:
    """Chooses the heads and channels that a gated model still computes; those of closed gates need
    not be.

    A gate that closed for good has neither output nor gradient. The dense teacher computes all
    units, also where it is the same model.
    """

    def __init__(self, gated: GatedModel) -> None:
        self.modules = {block: rows for block, rows in gated.modules.items() if block in DENSE_BLOCKS}
        self.num_bundles = {"attn": gated.sizes.num_kv_heads, "mlp": gated.sizes.intermediate_size}
        inputs = gated.widths.table.inputs("attn") if "attn" in self.modules else ()
        # transformers splits fused heads by the config, whatever their widths
        is_split = all(len(projection.units) == 1 for projection in inputs)
        self.blocks = [block for block in self.modules if block == "mlp" or is_split]
        self.kept: dict[str, list[Tensor | None]] = {block: [None] * len(rows) for block, rows in self.modules.items()}
        """The computed units, ascending, int64; one tensor per row of the masks, None where all
        units are computed."""
        self.bundles: dict[str, list[Tensor | None]] = {block: [*rows] for block, rows in self.kept.items()}
        """The same in bundles."""
        self._open: dict[str, Tensor] = {}  # bool [L, N], bundles with an open unit

    def follow(self, is_open: Mapping[str, Tensor]) -> None:
        """Compute only the open units (bool [L, U] per module type) from now on."""
        rows, open_LN = [], {}
        for block in self.blocks:
            open_LN[block] = is_open[block].unflatten(1, (self.num_bundles[block], -1)).any(-1)
            changed_L = (open_LN[block] != self._open.get(block, True)).any(1)
            # -1: the layer has not changed
            rows.append(torch.where(changed_L, open_LN[block].sum(1), -1))
        # the one wait for the device
        for block, counts in zip(open_LN, torch.stack(rows).tolist(), strict=True):
            multiple = {"attn": 1, "mlp": CHANNEL_BLOCK}[block]
            for row, num_open in enumerate(counts):
                if num_open < 0:
                    continue
                # the open bundles, and closed ones up to the next multiple
                num_kept, open_N = max(1, -(-num_open // multiple)) * multiple, open_LN[block][row]
                if num_kept >= len(open_N):
                    self.kept[block][row] = self.bundles[block][row] = None
                    continue
                kept_K = open_N.int().argsort(descending=True, stable=True)[:num_kept].sort().values
                units = torch.arange(is_open[block].shape[1] // len(open_N), device=kept_K.device)
                self.bundles[block][row] = kept_K
                self.kept[block][row] = (kept_K[:, None] * len(units) + units).flatten()
        self._open = open_LN


def narrow_layers(gated: GatedModel) -> NarrowLayers | None:
    """Return narrow layers; None for experts, and for sharded weights or adapters, whose layers are
    not plain.

    A run that resumes with less memory may compute closed units again; then its sums round
    differently.
    """
    modules = [module for rows in gated.modules.values() for row in rows for module in row]
    is_plain = all(
        type(module) is gated_class(nn.Linear)
        and not any(isinstance(tensor, DTensor) for tensor in module.parameters())
        for module in modules
    )
    return NarrowLayers(gated) if is_plain else None
