"""What the channels of routed experts do on text, noted in one forward and backward pass.

Legend: L layers with routed experts, E experts, C channels of an expert, H hidden size, T tokens, K experts a token.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from ddp_prune.experts import IMPLEMENTATION
from ddp_prune.gates import GatedModel
from ddp_prune.loss import OutputHead, distilled_loss
from ddp_study.methods.observe import routed_experts


@dataclass(frozen=True, kw_only=True)
class ExpertUse:
    """What the channels of routed experts do on text; sums over the tokens sent to their expert; float32.

    h is a channel's activation, π the routing weight, w its column of the down projection.
    """

    energy: torch.Tensor
    """Σ (π h)², [L, E, C]."""
    peak: torch.Tensor
    """max (π h)², [L, E, C]."""
    squares: torch.Tensor
    """Σ h², [L, E, C]."""
    slopes: torch.Tensor
    """Σ (∂loss/∂h)² = Σ (gᵀw)², where g is the gradient of the expert's output, [L, E, C]."""
    norms: torch.Tensor
    """‖w‖², [L, E, C]."""
    counts: torch.Tensor
    """Tokens, [L, E]."""
    output: torch.Tensor
    """Σ π ‖expert's output‖, [L, E]."""


def measure_experts(gated: GatedModel, blocks: torch.Tensor) -> ExpertUse:
    """Run `blocks`, int64 [num_blocks, seq_len], forward and back and sum what the experts' channels do.

    The loss is the mean cross-entropy of a block.
    """
    model: Any = gated.model
    modules = routed_experts(gated)
    shape, device = gated.shapes["experts"], modules[0].down_proj.device
    use = ExpertUse(
        **{name: torch.zeros(shape, device=device) for name in ("energy", "peak", "squares", "slopes")},
        **{name: torch.zeros(shape[:2], device=device) for name in ("counts", "output")},
        norms=torch.stack([module.down_proj.detach().float().square().sum(1) for module in modules]),
    )
    head = OutputHead.of(model)
    for index, module in enumerate(modules):
        module.ddp_use = {name: values[index] for name, values in vars(use).items()}
    model.set_experts_implementation(_OBSERVED)
    try:
        for tokens in blocks.split(1):
            tokens = tokens.to(device)
            embedded = model.get_input_embeddings()(tokens).requires_grad_()  # the weights are frozen
            hidden = model.get_decoder()(inputs_embeds=embedded, use_cache=False).last_hidden_state[:, :-1]
            distilled_loss(hidden.flatten(0, 1), None, head, tokens[:, 1:].reshape(-1), 0.0)[0].backward()
    finally:
        model.set_experts_implementation(IMPLEMENTATION)
        for module in modules:
            del module.ddp_use
    return use


def _add_squares(slopes_C: torch.Tensor, gradient_SC: torch.Tensor) -> None:
    slopes_C += gradient_SC.float().square().sum(0)


def _observed_experts(experts: Any, x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
    """Return what the routed experts add, expert by expert, and note what `measure_experts` is after."""
    sum_TH = torch.zeros_like(x_TH, dtype=torch.float32)
    for expert in ids_TK.unique().tolist():
        use = {name: values[expert] for name, values in experts.ddp_use.items()}
        tokens, slots = torch.where(ids_TK == expert)
        h = experts._apply_gate(F.linear(x_TH[tokens], experts.gate_up_proj[expert]))
        y = F.linear(h, experts.down_proj[expert]) * weights_TK[tokens, slots, None]
        h.register_hook(partial(_add_squares, use["slopes"]))
        with torch.no_grad():
            squares = h.float().square()
            weighted = squares * weights_TK[tokens, slots, None].float().square()
            use["squares"] += squares.sum(0)
            use["energy"] += weighted.sum(0)
            use["peak"].copy_(torch.maximum(use["peak"], weighted.amax(0)))
            use["counts"] += len(tokens)
            use["output"] += y.float().norm(dim=1).sum()
        sum_TH = sum_TH.index_add(0, tokens, y.float())
    return sum_TH.to(x_TH.dtype)


_OBSERVED = "ddp_observed"  # the name under which transformers finds it
ALL_EXPERTS_FUNCTIONS.register(_OBSERVED, _observed_experts)
