"""Gates on a frozen stock model: z → m (what the forward sees) and s (what the budget sees).

Legend of shape suffixes: L layers, U units of a layer (heads, KV groups or channels), D head_dim; for mixtures of
experts, L layers with routed experts, E experts of a layer, C channels of an expert.
Equations are those of arXiv:2603.08065.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from ddp_prune.experts import IMPLEMENTATION, LayerGates
from ddp_prune.families import EXPERTS, Dimensions, Family
from ddp_prune.narrowing import NarrowLayers

STRETCH_LOW, STRETCH_HIGH = -0.1, 1.1  # l and r of Eq. 8 and 12
SHARPNESS = math.log(11.0)  # C0: makes s(0) = 0 and s(2μ) = 1 exactly; the paper rounds it to 2.4
Masks = dict[str, torch.Tensor]  # module type -> "attn" and "mlp" [L, U], or "experts" [L, E, C] alone


class _ClampStraightThrough(torch.autograd.Function):
    """Clamp forward, identity backward."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, low: float, high: float) -> torch.Tensor:
        return values.clamp(low, high)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradients[0], None, None


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


def gate(z_LU: torch.Tensor) -> torch.Tensor:
    """Return m = ReLU(z) with a straight-through gradient (Eq. 11); any shape, float32."""
    return _ClampStraightThrough.apply(z_LU, 0.0, math.inf)


def retention_score(z_LU: torch.Tensor, mu: float) -> torch.Tensor:
    """Return s = clamp(σ((z − μ)·C0/μ)(r − l) + l, 0, 1), straight-through at the clamp (Eq. 12); values in [0, 1].

    s(0) = 0, s(2μ) = 1, and s tends to the step function of z as μ falls.
    """
    stretched = torch.sigmoid((z_LU - mu) * (SHARPNESS / mu)) * (STRETCH_HIGH - STRETCH_LOW) + STRETCH_LOW
    return _ClampStraightThrough.apply(stretched, 0.0, 1.0)


def score_slope(z_LU: torch.Tensor, mu: float) -> torch.Tensor:
    """Return ∂s/∂z of Eq. 12, by the straight-through estimator also where s is clamped; same shape as z."""
    v = torch.sigmoid((z_LU - mu) * (SHARPNESS / mu))
    return (SHARPNESS / mu) * (STRETCH_HIGH - STRETCH_LOW) * v * (1.0 - v)


def sharpness_at(progress: float, mu_start: float, mu_end: float) -> float:
    """Return μ(t) = μ0 − (μ0 − μT)·√(t/T) for progress t/T in [0, 1] (Eq. 14)."""
    return mu_start - (mu_start - mu_end) * math.sqrt(progress)


def unit_shapes(sizes: Dimensions, head_unit: str) -> dict[str, tuple[int, ...]]:
    """Return [L, U] of every module type; [L, E, C] of the experts, which are all that a mixture of experts prunes."""
    if sizes.num_experts:
        return {"experts": (len(sizes.routed_layers), sizes.num_experts, sizes.expert_intermediate_size)}
    heads = sizes.num_kv_heads if head_unit == "kv-group" else sizes.num_query_heads
    return {"attn": (sizes.num_layers, heads), "mlp": (sizes.num_layers, sizes.intermediate_size)}


class GatedModel:
    """A stock transformers model whose heads and channels can be scaled from outside.

    Pre-hooks on the projections that write to the residual stream multiply their input by the current masks; routed
    experts are run by our implementation of transformers' experts interface (`experts.py`). The weights are not
    changed, and without masks nothing is scaled, so the same model is the dense teacher.
    """

    def __init__(self, model: nn.Module, family: Family, sizes: Dimensions, head_unit: str) -> None:
        self.model, self.family, self.sizes, self.head_unit = model, family, sizes, head_unit
        self.shapes = unit_shapes(sizes, head_unit)
        self._masks: dict[str, Sequence[torch.Tensor]] | None = None  # of every layer
        self._squares: Mapping[str, torch.Tensor] | None = None
        self._counts_LE: torch.Tensor | None = None
        self._kept: Mapping[str, Sequence[torch.Tensor | None]] | None = None  # units that are computed; None: all
        if sizes.num_experts:
            self._attach_to_experts(family)
        else:
            self._attach_to_projections(family)

    def _attach_to_experts(self, family: Family) -> None:
        layers = list(self.model.get_submodule(family.layers).children())
        for row, index in enumerate(self.sizes.routed_layers):
            layers[index].get_submodule(EXPERTS).ddp_gates = partial(self._expert_gates, row)  # type: ignore[assignment]
        model: Any = self.model
        model.set_experts_implementation(IMPLEMENTATION)
        assert model.config._experts_implementation == IMPLEMENTATION  # transformers is silent where it fails

    def _expert_gates(self, row: int) -> LayerGates:
        if self._masks is None:
            return LayerGates(None, None, None)
        squares = None if self._squares is None else self._squares["experts"][row]
        return LayerGates(
            self._masks["experts"][row], squares, None if self._counts_LE is None else self._counts_LE[row]
        )

    def _attach_to_projections(self, family: Family) -> None:
        sizes, head_unit = self.sizes, self.head_unit
        units = sizes.num_kv_heads if head_unit == "kv-group" else sizes.num_query_heads
        columns = {"attn": sizes.num_query_heads * sizes.head_dim // units, "mlp": 1}  # input columns a unit spans
        for index, layer in enumerate(self.model.get_submodule(family.layers).children()):
            for kind, name in (("attn", family.attention_output), ("mlp", family.mlp_output)):
                projection = layer.get_submodule(name)
                projection.register_forward_pre_hook(self._hook(kind, index, columns[kind]))
                if projection.bias is not None:
                    projection.register_forward_hook(self._drop_bias(kind, index))

    def _hook(self, kind: str, index: int, columns: int) -> Callable[[nn.Module, Any], Any]:
        def scale_input(_module: nn.Module, args: Any) -> Any:
            if self._masks is None:
                return None
            squares = None if self._squares is None else self._squares[kind][index]
            kept = None if self._kept is None else self._kept[kind][index]
            return (_Scale.apply(args[0], self._masks[kind][index], columns, squares, kept), *args[1:])

        return scale_input

    def _drop_bias(self, kind: str, index: int) -> Callable[[nn.Module, Any, torch.Tensor], torch.Tensor | None]:
        """A block with no unit left is gone, and its output bias with it, as in the exported model."""

        def subtract_bias(module: Any, _args: Any, output: torch.Tensor) -> torch.Tensor | None:
            if self._masks is None:
                return None
            gone = ~(self._masks[kind][index] > 0).any(-1, keepdim=True)
            return output - module.bias * gone

        return subtract_bias

    @contextmanager
    def masks(
        self,
        masks: Mapping[str, torch.Tensor] | None,
        squares: Mapping[str, torch.Tensor] | None = None,
        narrow: NarrowLayers | None = None,
    ) -> Iterator[None]:
        """Apply `masks` (their shapes are those of `shapes`, any float dtype) to every forward inside the block.

        None is the dense model. `backward()` adds to float32 `squares`, where given, the sum over tokens of
        (∂loss/∂mask at that token)². Checkpointed layers run again in backward, so it belongs inside the block too.
        With `narrow`, units that it leaves out are not computed; their masks must be 0, and get no gradient.
        """
        assert self._kept is None  # inside, the weights are not those of the dense model
        previous = self._masks, self._squares, self._kept
        self._masks, self._squares, self._kept = None, squares, narrow.kept if narrow else None
        if masks is not None:  # taken apart once: a slice a layer would make a gradient of all layers in each
            self._masks = {kind: mask.unbind() for kind, mask in masks.items()}
            for kind, kept_of in (self._kept or {}).items():
                rows = zip(self._masks[kind], kept_of, strict=True)
                self._masks[kind] = [mask if kept is None else mask[kept] for mask, kept in rows]
        try:
            with narrow.computed() if narrow else nullcontext():
                yield
        finally:
            self._masks, self._squares, self._kept = previous

    @contextmanager
    def counting(self, counts_LE: torch.Tensor | None) -> Iterator[None]:
        """Add to int64 `counts_LE` how often each expert is chosen by forwards with masks inside the block."""
        previous, self._counts_LE = self._counts_LE, counts_LE
        try:
            yield
        finally:
            self._counts_LE = previous
