"""Gates on routed experts (Eq. 18): one implementation of transformers' experts interface, for all
families.

Every expert's intermediate activation is multiplied by its own gates before the down projection.
Gates are not folded into the weights during training, because that would make a gradient as large
as the weights. A layer keeps 4·C + H numbers per slot for backward.
Legend: T tokens, K experts per token, S = T·K slots sorted by expert; E experts, C channels of an
expert, I and O input and output features, L layers with experts.
"""

from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

IMPLEMENTATION = "ddp"  # the name under which transformers finds `gated_experts`


class LayerGates(NamedTuple):
    """How a layer computes its routed experts (masks [E, C]), or its heads or channels (masks [U]).

    Without a mask the layer is that of the dense model.
    """

    mask: Tensor | None = None
    """The gates of the computed units."""
    squares: Tensor | None = None
    """Float32 [U] or [E, C]; backward adds Σ over tokens (slots) of (∂loss/∂mask at that token)² to
    it."""
    counts: Tensor | None = None
    """Int64 [E]; forward adds the number of slots of each expert to it; None: not counted."""
    kept: Tensor | None = None
    """Int64: the computed heads or channels; None: all."""
    bundles: Tensor | None = None
    """Int64: the same in bundles of units that are computed together, such as a KV head with its
    query heads."""
    columns: int = 1
    """Inputs of the output projection per unit."""
    routed: Tensor | None = None
    """Int64: the experts among which the router chooses; None: all."""


class _ScaleExperts(torch.autograd.Function):
    """y[s] = x[s] · mask[expert of s], with a gradient for the mask that sums over the slots of
    each expert.

    Neither the mask of every slot nor its gradient is kept from forward to backward. The sums are
    deterministic: the slots of an expert are neighbors, so no atomic additions are needed.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_SC: Tensor,
        mask_EC: Tensor,
        squares_EC: Tensor | None,
        experts_S: Tensor,
        sizes_E: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(x_SC, mask_EC, experts_S, sizes_E)
        ctx.squares_EC = squares_EC
        if x_SC.is_cuda:
            from ddp_prune.core.kernels import scale_experts

            return scale_experts(x_SC, mask_EC.float(), sizes_E.cumsum(0, dtype=torch.int32))
        return x_SC * mask_EC.to(x_SC.dtype)[experts_S]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        x_SC, mask_EC, experts_S, sizes_E = ctx.saved_tensors
        if x_SC.is_cuda:
            from ddp_prune.core.kernels import expert_gates_backward

            ends_E = sizes_E.cumsum(0, dtype=torch.int32)
            out_SC, sums_EC, squares_EC = expert_gates_backward(gradients[0], x_SC, mask_EC.float(), ends_E)
            if ctx.squares_EC is not None:
                ctx.squares_EC += squares_EC
            return out_SC, sums_EC.to(mask_EC.dtype), None, None, None
        products = gradients[0].to(mask_EC.dtype) * x_SC  # summed in the masks' float32
        sums = _sums(products, sizes_E)
        if ctx.squares_EC is not None:
            ctx.squares_EC += _sums(products.square_(), sizes_E)
        return gradients[0] * mask_EC.to(x_SC.dtype)[experts_S], sums, None, None, None


def _sums(rows_SC: Tensor, sizes_E: Tensor) -> Tensor:
    """Return the sum of each expert's rows, [E, C]; `unsafe` skips checks that would synchronize a
    GPU."""
    return torch.segment_reduce(rows_SC, "sum", lengths=sizes_E, axis=0, unsafe=True, initial=0.0)


def gated_experts(experts: Any, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Return the output of the routed experts, [T, H]; an implementation of transformers' experts
    interface.

    experts: the family's module of stacked dense experts; its attribute `gates` holds the layer's
        `LayerGates`.
    ids_TK, weights_TK: the router's choices.
    """
    gates: LayerGates = experts.gates
    if gates.routed is not None:
        ids_TK = gates.routed[ids_TK]
    num_tokens, num_chosen = ids_TK.shape
    experts_S, order_S = ids_TK.flatten().sort(stable=True)
    # bincount would synchronize a GPU to find the largest number
    ends_E = torch.searchsorted(experts_S, torch.arange(experts.num_experts, device=experts_S.device), right=True)
    sizes_E = ends_E.diff(prepend=ends_E.new_zeros(1))
    if gates.counts is not None:
        gates.counts.add_(sizes_E)
    ends_E = ends_E.to(torch.int32)
    y = grouped_linear(x_TH[order_S // num_chosen], experts.gate_up_proj, ends_E)
    y = experts._apply_gate(y)
    if gates.mask is not None:
        y = _ScaleExperts.apply(y, gates.mask, gates.squares, experts_S, sizes_E)
    y = grouped_linear(y, experts.down_proj, ends_E) * weights_TK.flatten()[order_S, None]
    inverse_S = torch.empty_like(order_S)
    inverse_S[order_S] = torch.arange(len(order_S), device=order_S.device)
    return y[inverse_S].view(num_tokens, num_chosen, -1).sum(1).to(x_TH.dtype)


def grouped_linear(x_SI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    """Return [S, O]: each slot's row times its expert's weight. The slots of expert e end before
    ends_E[e]."""
    return (grouped if can_group(weight_EOI) else looped)(x_SI, weight_EOI, ends_E)


def can_group(weight_EOI: Tensor) -> bool:
    """Tell whether torch has a kernel for this weight: bfloat16, rows of 16 bytes, compute
    capability 9 or 10.

    For other weights torch's grouped matmul is also a loop, but one that includes idle experts
    (GroupedMMUtils.h).
    """
    return (
        weight_EOI.is_cuda
        and weight_EOI.dtype == torch.bfloat16
        and all(size % 8 == 0 for size in weight_EOI.shape[1:])
        and torch.cuda.get_device_capability(weight_EOI.device)[0] in (9, 10)
    )


def grouped(x_SI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    """`grouped_linear` in one kernel.

    On Blackwell its backward leaves the gradient of experts without slots uninitialized (pytorch
    issue 172439).
    """
    weight_EIO = weight_EOI.transpose(-2, -1)
    if weight_EIO.requires_grad:
        is_idle_E = ends_E.diff(prepend=ends_E.new_zeros(1)) == 0
        weight_EIO.register_hook(lambda gradient_EIO: gradient_EIO.masked_fill_(is_idle_E[:, None, None], 0.0))
    return F.grouped_mm(x_SI.to(weight_EOI.dtype), weight_EIO, offs=ends_E)


def looped(x_SI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    """`grouped_linear` as a loop over the experts that have slots.

    Rows are split and not sliced: the gradient of a slice would be as large as all rows.
    """
    sizes = [b - a for a, b in pairwise([0, *ends_E.tolist()])]
    pairs = zip(x_SI.split(sizes), weight_EOI.unbind(), strict=True)
    return torch.cat([F.linear(piece, weight_OI) for piece, weight_OI in pairs if len(piece)])


def neutral_where_idle(saliency_LEC: Tensor, counts_LE: Tensor) -> Tensor:
    """Return the saliency; experts that no token was sent to get the mean of their layer.

    counts_LE: the slots of each expert so far.
    Idle experts get no gradient, but they may matter on other text. With saliency 0 they would be
    removed first; if they were always kept, busy experts would be removed instead. A few channels
    carry most of the mean, so a channel of mean saliency is removed late.
    """
    active_LE1 = (counts_LE > 0).unsqueeze(-1)
    mean_L = (saliency_LEC * active_LE1).sum((1, 2)) / (active_LE1.sum((1, 2)) * saliency_LEC.shape[-1]).clamp_min(1)
    return torch.where(active_LE1, saliency_LEC, mean_L[:, None, None])


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, gated_experts)
