"""Whole experts go, the worst of a layer first: by how often they are chosen, by REAP's score, by both, or by NAEE's.

REAP's (arXiv:2510.13999) is the mean over an expert's tokens of π·‖output‖; both is the sum. NAEE (arXiv:2402.14800)
keeps the set S of experts with the smallest ‖MoE(X) − MoE_S(X)‖ in each layer. Here S loses one expert at a time, where
NAEE tries all sets, and X is the first 8,192 tokens. MoE_S routes as the evaluated model does: with `whole_experts` in
the recipe, the logits of removed experts are dropped before the softmax and the top-k, as in NAEE; without it, tokens
of a removed expert are not sent to another. The expert on which the budget ends loses its channels of least energy.
The others take one forward pass; NAEE takes one per layer, and the products of all experts' outputs for every token.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.func import functional_call

from ddp_prune.gates import GatedModel, Masks
from ddp_study.methods import even_widths
from ddp_study.methods.expert_use import ExpertUse, measure_experts
from ddp_study.methods.method import Score
from ddp_study.methods.observe import listen
from ddp_vllm.families import EXPERTS, ROUTER, WHOLE_EXPERT

NAEE_TOKENS = 8192
CHUNK = 256  # tokens for which the outputs of all experts are in memory
Worth = Callable[[ExpertUse], torch.Tensor]


def frequency(use: ExpertUse) -> torch.Tensor:
    """Return the tokens sent to each expert, [L, E]."""
    return use.counts


def reap(use: ExpertUse) -> torch.Tensor:
    """Return the mean of π·‖output‖ over an expert's tokens, [L, E]; 0 without any."""
    return use.output / use.counts.clamp_min(1)


def sum_of_outputs(use: ExpertUse) -> torch.Tensor:
    """Return the sum of π·‖output‖ over an expert's tokens, [L, E]."""
    return use.output


def nearest_layer(gated: GatedModel, blocks: torch.Tensor) -> torch.Tensor:
    """Return the place of each expert in the order of removal, [L, E]; first the one without which MoE_S is nearest."""
    blocks = blocks[: max(1, NAEE_TOKENS // blocks.shape[1])]
    return torch.stack([_removal_order(gated, index, blocks) for index in gated.sizes.routed_layers])


@torch.no_grad()
def _removal_order(gated: GatedModel, index: int, blocks: torch.Tensor) -> torch.Tensor:
    """Return the places of one layer's experts, [E]."""
    router, experts = (gated.layers[index].get_submodule(name) for name in (ROUTER, EXPERTS))
    inputs: list[torch.Tensor] = []
    listen(gated, blocks, {index: router}, lambda _index, x_TH, _logits_TE: inputs.append(x_TH))
    x_TH = torch.cat(inputs).to(next(experts.parameters()).dtype)
    products_TEE = torch.cat([_products(experts, part) for part in x_TH.split(CHUNK)])
    left = list(range(products_TEE.shape[-1]))
    dense_TE, num_chosen = _routing(router, x_TH, left, len(left))
    places = torch.zeros(len(left))

    def distance(removed: int) -> float:
        kept = [expert for expert in left if expert != removed]
        if gated.head_unit == WHOLE_EXPERT and len(kept) >= num_chosen:
            difference_TE = dense_TE - _routing(router, x_TH, kept, len(places))[0]
        else:
            difference_TE = dense_TE.index_fill(1, torch.tensor(kept, device=x_TH.device, dtype=torch.int64), 0.0)
        return float((torch.bmm(products_TEE, difference_TE[..., None])[..., 0] * difference_TE).sum())

    for place in range(len(places)):
        worst = min(left, key=distance)
        places[worst] = place
        left.remove(worst)
    return places


def _products(experts: Any, x_TH: torch.Tensor) -> torch.Tensor:
    """Return the inner products of all experts' outputs for each token, float32 [T, E, E]."""
    pairs = zip(experts.gate_up_proj, experts.down_proj, strict=True)
    y_TEH = torch.stack([F.linear(experts._apply_gate(F.linear(x_TH, up)), down) for up, down in pairs], 1).float()
    return y_TEH @ y_TEH.transpose(1, 2)


def _routing(router: Any, x_TH: torch.Tensor, kept: list[int], num_experts: int) -> tuple[torch.Tensor, int]:
    """Return the routing weights where a router chooses among `kept`, float32 [T, E]; and among how many per token."""
    rows = torch.tensor(kept, device=x_TH.device)
    _, weights_TK, ids_TK = functional_call(router, {"weight": router.weight[rows]}, (x_TH,))
    found_TE = torch.zeros(len(x_TH), num_experts, device=x_TH.device)
    return found_TE.scatter(1, rows[ids_TK], weights_TK.float()), ids_TK.shape[1]


def of(use: ExpertUse, worth: Worth) -> torch.Tensor:
    """Return a score by which experts go one by one, [L, E, C]."""
    channel_rank = even_widths.of(use).argsort(dim=-1, stable=True).argsort(dim=-1)
    expert_rank = worth(use).argsort(dim=-1, stable=True).argsort(dim=-1)
    return (expert_rank[..., None] * channel_rank.shape[-1] + channel_rank).float()


def _method(source: str, worth: Worth) -> Score:
    def score(gated: GatedModel, blocks: torch.Tensor) -> Masks:
        return {"experts": of(measure_experts(gated, blocks), worth)}

    return Score(source=source, score=score, scope="layer", suits="mixtures")


FREQUENCY = _method("arXiv:2206.00277", frequency)
REAP = _method("arXiv:2510.13999", reap)
NAEE = Score(
    source="arXiv:2402.14800, one expert at a time; tokens are routed anew where the evaluated model does so",
    score=lambda gated, blocks: {
        "experts": of(measure_experts(gated, blocks), lambda _use: nearest_layer(gated, blocks))
    },
    scope="layer",
    suits="mixtures",
)
USE = _method("a control: frequency × REAP", sum_of_outputs)
