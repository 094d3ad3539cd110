"""Computes experts of different widths in plain PyTorch without packing: the oracle of every kernel
test.

Letters: T tokens, H hidden size, K experts per token, w the width of one expert.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

Expert = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""gate_wH, up_wH, down_Hw: the matrices as they are in a checkpoint; w may be 0."""


def round_to_fp8(matrix: torch.Tensor, *, per_tensor: bool) -> torch.Tensor:
    """Return the matrix, `[outputs, inputs]`, rounded to float8_e4m3fn times a float32 scale per
    output, in float64.

    The largest number of an output, or of the matrix, becomes the largest FP8 number.
    """
    if not matrix.numel():
        return matrix.double()
    largest = matrix.float().abs().amax((0, 1) if per_tensor else 1, keepdim=True)
    scale = largest / torch.finfo(torch.float8_e4m3fn).max
    return (matrix.float() / scale).to(torch.float8_e4m3fn).double() * scale.double()


def ragged_moe_reference(
    x_TH: torch.Tensor,
    experts: Sequence[Expert],
    topk_weights_TK: torch.Tensor,
    topk_ids_TK: torch.Tensor,
    limit: float | None = None,
) -> torch.Tensor:
    """Return Σ_k weight · down(silu(gate x) · up x) for each token, in float64 for inputs of any
    dtype.

    limit: of gate x from above, and of up x from both sides.

    An id of -1 or an expert of width 0 adds nothing (Eq. 18, arXiv:2603.08065, with the gates
    folded in).
    """
    x = x_TH.double()
    y_TH = torch.zeros_like(x)
    for expert, (gate, up, down) in enumerate(experts):
        tokens, slots = (topk_ids_TK == expert).nonzero(as_tuple=True)
        gates, ups = x[tokens] @ gate.double().t(), x[tokens] @ up.double().t()
        if limit is not None:
            gates, ups = gates.clamp(max=limit), ups.clamp(-limit, limit)
        hidden = F.silu(gates) * ups
        terms = hidden @ down.double().t() * topk_weights_TK[tokens, slots, None].double()
        y_TH.index_add_(0, tokens, terms)
    return y_TH
