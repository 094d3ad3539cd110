"""One-shot scores that pruning methods rank units by, computed through our gates so that budgets are equal.

Each returns a score a unit, [L, U] a module type ([L, E, C] for experts); the highest are kept. `magnitude` is Σ|W|²
over a unit's weights; `taylor` |Σ gradient| (LLM-Pruner's first order, at m = 1); `fisher` the squared gradient of each
token, summed (the diagonal of the empirical Fisher matrix). For routed experts also CAMERA-P, HEAPr, activation energy
and whole experts by use, all from one pass over text (`measure_experts`). `depth` drops whole layers.
Legend: L layers with routed experts, E experts, C channels of an expert, H hidden size, T tokens, K experts a token.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from ddp_prune.experts import IMPLEMENTATION
from ddp_prune.gates import GatedModel, Masks
from ddp_prune.loss import OutputHead, distilled_loss, final_hidden
from ddp_vllm.families import EXPERTS
from ddp_vllm.remote_code.tensors import LAYERS


def magnitude(gated: GatedModel) -> Masks:
    """Return the squared Frobenius norm of everything that goes with a unit; no text needed."""
    layers: list[Any] = list(gated.model.get_submodule(LAYERS).children())
    if "experts" in gated.shapes:
        return {"experts": torch.stack([_channel_energy(experts) for experts in _routed_experts(gated)])}
    return {
        block: torch.stack([_block_energy(layer, gated, block, shape[1]) for layer in layers])
        for block, shape in gated.shapes.items()
    }


def _routed_experts(gated: GatedModel) -> list[Any]:
    layers = list(gated.model.get_submodule(LAYERS).children())
    return [layers[index].get_submodule(EXPERTS) for index in gated.sizes.routed_layers]


def _channel_energy(experts: Any) -> torch.Tensor:
    """Return the sum of squares of each expert's channels, [E, C]."""
    made_EC = experts.gate_up_proj.float().square().sum(2).unflatten(1, (2, -1)).sum(1)
    return made_EC + experts.down_proj.float().square().sum(1)


def _block_energy(layer: Any, gated: GatedModel, block: str, num_gates: int) -> torch.Tensor:
    """Return the sum of squares of what goes with each gate of one layer's block, [U].

    What several gates share, as query heads do a KV head, is divided among them.
    """
    table, sizes = gated.family.tensors, gated.sizes
    energy_U = layer.get_submodule(table.output(block).name).weight.float().square().sum(0).view(num_gates, -1).sum(1)
    for projection in table.inputs(block):
        energy = layer.get_submodule(projection.name).weight.float().square().sum(1)
        counts = [sizes.units_in(unit) for unit in projection.units]
        size = sizes.head_dim if block == "attn" else 1  # of a unit
        for part, count in zip(energy.split([size * count for count in counts]), counts, strict=True):
            gates_each = max(1, num_gates // count)
            shares = part.view(count, -1).sum(1).repeat_interleave(gates_each) / gates_each
            energy_U = energy_U + shares.view(num_gates, -1).sum(1)
    return energy_U


def taylor_and_fisher(gated: GatedModel, blocks: Iterable[torch.Tensor]) -> tuple[Masks, Masks]:
    """Return (|Σ gradient|, Σ over tokens of its part's square) of the cross-entropy for the gates at 1.

    `blocks` yields int64 [1, seq_len].
    """
    model: Any = gated.model
    head = OutputHead.of(model)
    device = head.weight.device
    first = {kind: torch.zeros(shape, device=device) for kind, shape in gated.shapes.items()}
    second = {kind: torch.zeros(shape, device=device) for kind, shape in gated.shapes.items()}
    for tokens in blocks:
        tokens = tokens.to(device)
        leaves = {kind: torch.ones(shape, device=device, requires_grad=True) for kind, shape in gated.shapes.items()}
        with gated.masks(leaves, second):
            distilled_loss(final_hidden(model, tokens), None, head, tokens[:, 1:].reshape(-1), 0.0)[0].backward()
        for kind, leaf in leaves.items():
            assert leaf.grad is not None
            first[kind] += leaf.grad
    return {kind: value.abs() for kind, value in first.items()}, second


@torch.no_grad()
def block_influence(gated: GatedModel, blocks: Iterable[torch.Tensor]) -> Masks:
    """Return 1 − the mean cosine of what enters and leaves a layer, the same for all its units: whole layers go.

    ShortGPT's score (arXiv:2403.03853). `blocks` yields int64 [1, seq_len].
    """
    model: Any = gated.model
    layers = list(model.get_submodule(LAYERS).children())
    sums = torch.zeros(len(layers))

    def note(index: int, layer: Any, given: tuple[torch.Tensor], made: Any) -> None:
        made = made[0] if isinstance(made, tuple) else made
        sums[index] += 1.0 - F.cosine_similarity(given[0].float(), made.float(), dim=-1).mean().cpu()

    hooks = [layer.register_forward_hook(partial(note, index)) for index, layer in enumerate(layers)]
    try:
        for tokens in blocks:
            final_hidden(model, tokens.to(next(model.parameters()).device))
    finally:
        for hook in hooks:
            hook.remove()
    return {kind: sums.view(-1, *[1] * (len(shape) - 1)).expand(shape).clone() for kind, shape in gated.shapes.items()}


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

    def camera(self, alpha: float = 0.9) -> torch.Tensor:
        """Return CAMERA-P's ‖w‖²·((1 − α) Σ(π h)² + α max(π h)²); its budget holds in every layer."""
        return self.norms * ((1.0 - alpha) * self.energy + alpha * self.peak)

    def heapr(self) -> torch.Tensor:
        """Return HEAPr's mean(h²) · wᵀ mean(g gᵀ) w, means over routed tokens; one budget for all layers.

        Channels of experts that no token was sent to are worth 0.
        """
        counts_LE1 = self.counts.clamp_min(1)[..., None]
        return (self.squares / counts_LE1) * (self.slopes / counts_LE1)

    def channel_energy(self) -> torch.Tensor:
        """Return ‖w‖² Σ(π h)², to choose among the channels of one expert."""
        return self.norms * self.energy

    def whole_experts(self) -> torch.Tensor:
        """Return a score that drops experts one by one, least (frequency × mean π ‖output‖) of their layer first.

        The expert on which the budget ends loses its channels of least energy only.
        """
        channel_rank = self.channel_energy().argsort(dim=-1, stable=True).argsort(dim=-1)
        expert_rank = self.output.argsort(dim=-1, stable=True).argsort(dim=-1)
        return (expert_rank[..., None] * channel_rank.shape[-1] + channel_rank).float()


def measure_experts(gated: GatedModel, blocks: Iterable[torch.Tensor]) -> ExpertUse:
    """Run `blocks` (int64 [1, seq_len] each) forward and backward once and sum what the experts' channels do.

    The loss is the mean cross-entropy of a block.
    """
    model: Any = gated.model
    modules = _routed_experts(gated)
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
        for tokens in blocks:
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
