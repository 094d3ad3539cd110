"""Scores channels of routed experts (CAMERA-P, HEAPr, even widths) and whole experts (REAP, NAEE,
…).

Legend: L layers with routed experts, E experts, C channels of an expert, H hidden size, T tokens, K
    experts per token.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.func import functional_call
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from ddp_prune.core.experts import IMPLEMENTATION
from ddp_prune.core.gates import ROUTER, GatedModel
from ddp_prune.core.loss import OutputHead, distill
from ddp_vllm.dimensions import WHOLE_EXPERT
from scores import Score, observe, routed_experts

ALPHA = 0.9  # CAMERA-P's α
NAEE_TOKENS = 8192
CHUNK = 256  # tokens for which the outputs of all experts are stored at once


@dataclass(frozen=True, kw_only=True)
class ExpertUse:
    """Statistics of the channels of routed experts on text, summed over the tokens routed to their
    expert; float32.

    h is a channel's activation, π the routing weight, w its column of the down projection.
    """

    energy: torch.Tensor
    """Σ (π h)², [L, E, C]."""
    peak: torch.Tensor
    """max (π h)², [L, E, C]."""
    squares: torch.Tensor
    """Σ h², [L, E, C]."""
    slopes: torch.Tensor
    """Σ (∂loss/∂h)² = Σ (gᵀw)² with g the gradient of the expert's output, [L, E, C]."""
    norms: torch.Tensor
    """‖w‖², [L, E, C]."""
    counts: torch.Tensor
    """Number of tokens, [L, E]."""
    output: torch.Tensor
    """Σ π ‖expert's output‖, [L, E]."""


def measure_experts(gated: GatedModel, blocks: torch.Tensor) -> ExpertUse:
    """Collect the statistics in a forward and backward pass per block of its mean cross-entropy.

    blocks: int64 [num_blocks, seq_len].
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
            # the weights are frozen
            embedded = model.get_input_embeddings()(tokens).requires_grad_()
            hidden = model.get_decoder()(inputs_embeds=embedded, use_cache=False).last_hidden_state[:, :-1]
            distill(hidden.flatten(0, 1), None, head, tokens[:, 1:].reshape(-1), 0.0)[0].backward()
    finally:
        model.set_experts_implementation(IMPLEMENTATION)
        for module in modules:
            del module.ddp_use
    return use


def _add_squares(slopes_C: torch.Tensor, gradient_SC: torch.Tensor) -> None:
    slopes_C += gradient_SC.float().square().sum(0)


def _observed_experts(experts: Any, x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
    """Return the sum of the routed experts' outputs, and collect the statistics of
    `measure_experts`."""
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


_OBSERVED = "ddp_observed"  # its name in transformers' table of implementations
ALL_EXPERTS_FUNCTIONS.register(_OBSERVED, _observed_experts)


def camera(use: ExpertUse) -> torch.Tensor:
    """Return CAMERA-P's score of channels (arXiv:2508.02322), [L, E, C]: ‖w‖²·((1 − α) Σ(π h)² + α
    max(π h)²), α = 0.9.

    Not implemented: shared experts, and pruning one layer after the other.
    """
    return use.norms * ((1.0 - ALPHA) * use.energy + ALPHA * use.peak)


def heapr(use: ExpertUse) -> torch.Tensor:
    """Return HEAPr's score of channels (arXiv:2509.22299), [L, E, C]: mean(h²)·wᵀ mean(g gᵀ) w.

    Means are over routed tokens. Because wᵀ(g gᵀ)w = (gᵀw)², no matrix is stored. Channels of
    experts without tokens have score 0 and are removed first.
    """
    counts_LE1 = use.counts.clamp_min(1)[..., None]
    return (use.squares / counts_LE1) * (use.slopes / counts_LE1)


def energy(use: ExpertUse) -> torch.Tensor:
    """Return ‖w‖²·Σ(π h)², [L, E, C]; with equal widths it is the control for uneven ones."""
    return use.norms * use.energy


def frequency(use: ExpertUse) -> torch.Tensor:
    """Return the number of tokens routed to each expert, [L, E]."""
    return use.counts


def reap(use: ExpertUse) -> torch.Tensor:
    """Return REAP's score (arXiv:2510.13999), the mean of π·‖output‖ over an expert's tokens, [L,
    E]; 0 without any."""
    return use.output / use.counts.clamp_min(1)


def sum_of_outputs(use: ExpertUse) -> torch.Tensor:
    """Return the sum of π·‖output‖ over an expert's tokens, [L, E]."""
    return use.output


def nearest_layer(gated: GatedModel, blocks: torch.Tensor) -> torch.Tensor:
    """Return the position of each expert in NAEE's order of removal (arXiv:2402.14800), [L, E].

    NAEE keeps the set S of experts with the smallest ‖MoE(X) − MoE_S(X)‖ in each layer, and tries
    all sets. Here one expert at a time is removed from S, and X is the first 8,192 tokens. MoE_S
    routes as the evaluated model does: with `whole_experts` in the recipe the logits of removed
    experts are dropped before the softmax and the top-k, as in NAEE; without it, tokens of a
    removed expert are not routed to another one. Each layer requires one forward pass and the inner
    products of all experts' outputs for every token.
    """
    blocks = blocks[: max(1, NAEE_TOKENS // blocks.shape[1])]
    return torch.stack([_removal_order(gated, index, blocks) for index in gated.sizes.routed_layers])


@torch.no_grad()
def _removal_order(gated: GatedModel, index: int, blocks: torch.Tensor) -> torch.Tensor:
    """Return the positions of one layer's experts in the order of removal, [E]."""
    router, experts = (
        gated.layers[index].get_submodule(name) for name in (ROUTER, gated.names[gated.widths.table.output("experts")])
    )
    inputs: list[torch.Tensor] = []
    observe(gated, blocks, {index: router}, lambda _index, x_TH, _logits_TE: inputs.append(x_TH))
    x_TH = torch.cat(inputs).to(next(experts.parameters()).dtype)
    products_TEE = torch.cat([_products(experts, part) for part in x_TH.split(CHUNK)])
    remaining = list(range(products_TEE.shape[-1]))
    dense_TE, num_chosen = _routing(router, x_TH, remaining, len(remaining))
    positions = torch.zeros(len(remaining))

    def distance(removed: int) -> float:
        kept = [expert for expert in remaining if expert != removed]
        if gated.head_unit == WHOLE_EXPERT and len(kept) >= num_chosen:
            difference_TE = dense_TE - _routing(router, x_TH, kept, len(positions))[0]
        else:
            difference_TE = dense_TE.index_fill(1, torch.tensor(kept, device=x_TH.device, dtype=torch.int64), 0.0)
        return float((torch.bmm(products_TEE, difference_TE[..., None])[..., 0] * difference_TE).sum())

    for position in range(len(positions)):
        least = min(remaining, key=distance)
        positions[least] = position
        remaining.remove(least)
    return positions


def _products(experts: Any, x_TH: torch.Tensor) -> torch.Tensor:
    """Return the inner products of all experts' outputs for each token, float32 [T, E, E]."""
    pairs = zip(experts.gate_up_proj, experts.down_proj, strict=True)
    y_TEH = torch.stack([F.linear(experts._apply_gate(F.linear(x_TH, up)), down) for up, down in pairs], 1).float()
    return y_TEH @ y_TEH.transpose(1, 2)


def _routing(router: Any, x_TH: torch.Tensor, kept: list[int], num_experts: int) -> tuple[torch.Tensor, int]:
    """Return the weights of a router that chooses among `kept`, float32 [T, E], and its number of
    choices per token."""
    rows = torch.tensor(kept, device=x_TH.device)
    _, weights_TK, ids_TK = functional_call(router, {"weight": router.weight[rows]}, (x_TH,))
    found_TE = torch.zeros(len(x_TH), num_experts, device=x_TH.device)
    return found_TE.scatter(1, rows[ids_TK], weights_TK.float()), ids_TK.shape[1]


def one_by_one(use: ExpertUse, experts_LE: torch.Tensor) -> torch.Tensor:
    """Return channel scores that remove whole experts, the lowest of each layer first, [L, E, C].

    The last expert to be removed may lose only its channels of least energy, to meet the budget.
    """
    channel_rank = energy(use).argsort(dim=-1, stable=True).argsort(dim=-1)
    expert_rank = experts_LE.argsort(dim=-1, stable=True).argsort(dim=-1)
    return (expert_rank[..., None] * channel_rank.shape[-1] + channel_rank).float()


def _channels(source: str, of: Callable[[ExpertUse], torch.Tensor], scope: str) -> Score:
    """Return the method with a score of channels."""
    return Score(
        source=source, score=lambda gated, blocks: {"experts": of(measure_experts(gated, blocks))}, scope=scope,
        suits="mixtures",
    )  # fmt: skip


def _whole(source: str, of: Callable[[ExpertUse], torch.Tensor]) -> Score:
    """Return the method with a score of whole experts."""
    return _channels(source, lambda use: one_by_one(use, of(use)), "layer")


METHODS = {
    "camera": _channels("arXiv:2508.02322", camera, "layer"),
    "heapr": _channels("arXiv:2509.22299", heapr, "global"),
    "even-widths": _channels("a control", energy, "expert"),
    "experts-frequency": _whole("arXiv:2206.00277", frequency),
    "experts-reap": _whole("arXiv:2510.13999", reap),
    "experts-use": _whole("a control: frequency × REAP", sum_of_outputs),
    "experts-naee": Score(
        source="arXiv:2402.14800, one expert at a time; tokens are rerouted if the evaluated model reroutes them",
        score=lambda gated, blocks: {
            "experts": one_by_one(measure_experts(gated, blocks), nearest_layer(gated, blocks))
        },
        scope="layer",
        suits="mixtures",
    ),
}
