"""Computes experts of different widths in plain PyTorch without packing: the oracle of every kernel test.

Letters: T tokens, H hidden size, K experts per token, w the width of one expert.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

Expert = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""gate_wH, up_wH, down_Hw: the matrices as they are in a checkpoint; w may be 0."""


def ragged_moe_reference(
    x_TH: torch.Tensor, experts: Sequence[Expert], topk_weights_TK: torch.Tensor, topk_ids_TK: torch.Tensor
) -> torch.Tensor:
    """Return Σ_k weight · down(silu(gate x) · up x) for each token, in float64 for inputs of any dtype.

    An id of -1 or an expert of width 0 adds nothing (Eq. 18, arXiv:2603.08065, with the gates folded in).
    """
    x = x_TH.double()
    y_TH = torch.zeros_like(x)
    for expert, (gate, up, down) in enumerate(experts):
        tokens, slots = (topk_ids_TK == expert).nonzero(as_tuple=True)
        hidden = F.silu(x[tokens] @ gate.double().t()) * (x[tokens] @ up.double().t())
        terms = hidden @ down.double().t() * topk_weights_TK[tokens, slots, None].double()
        y_TH.index_add_(0, tokens, terms)
    return y_TH
