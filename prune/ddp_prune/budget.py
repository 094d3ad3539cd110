"""The budget: two ways to hold it while searching, and the rounding that makes it exact.

Legend: L layers, U units of a layer, K = L·U units of one module type, P = round(ρK) of them kept.
"""

import torch
from torch import nn

from ddp_prune.gates import Masks, binarisation, retention_score, score_slope
from ddp_vllm.errors import SettingError

METRIC_POWER = 1.0  # of the curvature: 1 is Newton's metric, 0.5 Adam's; not compared on a real model yet
FLOW_STEPS = 4  # Euler steps of the flow; its field changes along the way


def kept_units(num_units: int, sparsity: float) -> int:
    """Return P, the exact number of units kept. Raises: SettingError if none or all would be."""
    kept = round((1.0 - sparsity) * num_units)
    if not 0 < kept < num_units:
        raise SettingError(
            f"sparsity {sparsity} keeps {kept} of {num_units} units; choose one that keeps some and removes some"
        )
    return kept


class AugmentedLagrangian(nn.Module):
    """The paper's penalty (Eq. 13 and 15), multipliers by gradient ascent from 0; one set a module type.

    With `per_layer` the keep ratio is a layer's own and the penalty the mean over layers (Eq. 19).
    """

    def __init__(self, module_types: list[str], keep_ratio: dict[str, float], per_layer: bool) -> None:
        super().__init__()
        self.keep_ratio, self.per_layer = keep_ratio, per_layer
        self.lambda1 = nn.ParameterDict({kind: nn.Parameter(torch.zeros(())) for kind in module_types})
        self.lambda2 = nn.ParameterDict({kind: nn.Parameter(torch.zeros(())) for kind in module_types})
        self.lambda3 = nn.ParameterDict({kind: nn.Parameter(torch.zeros(())) for kind in module_types})

    def forward(self, scores: Masks) -> torch.Tensor:
        """Return Σ over types of λ1(s̄−ρ) + λ2(s̄−ρ)² + λ3·mean s(1−s); a scalar that λ ascends and z descends."""
        total = torch.zeros((), device=next(iter(scores.values())).device)
        for kind, score_LU in scores.items():
            mean = score_LU.mean(-1) if self.per_layer else score_LU.mean()
            gap = mean - self.keep_ratio[kind]
            total = total + (self.lambda1[kind] * gap + self.lambda2[kind] * gap.square()).mean()
            total = total + self.lambda3[kind] * binarisation(score_LU)
        return total


def keep_schedule(progress: float, keep_ratio: float) -> float:
    """Return the keep ratio asked for at `progress` in [0, 1]: 1 at the start, ρ from 0.7 on, cubic between.

    The cubic of gradual pruning (arXiv:1710.01878): much while the rest can still adapt, little near the end.
    """
    left = max(0.0, 1.0 - progress / 0.7)
    return keep_ratio + (1.0 - keep_ratio) * left**3


@torch.no_grad()
def hold_budget(
    z_LU: torch.Tensor, curvature_LU: torch.Tensor, mu: float, keep_ratio: float, *, floor: float, per_layer: bool
) -> torch.Tensor:
    """Let z flow along −∂s/∂z, slowed where the loss is curved, until mean s(z) is `keep_ratio`; return the moved z.

    The paper lets a multiplier ascend until the budget holds, which takes about 1,000 steps. Here the multiplier is
    solved for after every step, by bisection over the length of the flow dz/dδ = −(∂s/∂z)/curvature^METRIC_POWER.
    Gates that are clearly open or matter much hardly move; gates near the threshold that matter little do.
    `curvature_LU` is the running mean of squared gradients (diagonal Fisher). Deterministic; mean s ends within 1e-3
    of `keep_ratio` unless `floor` forbids it.
    """
    z_GU = z_LU if per_layer else z_LU.reshape(1, -1)
    metric_GU = curvature_LU.reshape(z_GU.shape).pow(METRIC_POWER)
    speed_GU = mu / (metric_GU + 1e-3 * metric_GU.mean(-1, keepdim=True) + 1e-30)
    speed_GU = speed_GU / speed_GU.amax(-1, keepdim=True)
    least_slope = 1e-3 * float(score_slope(z_GU.new_tensor(mu), mu))

    def flow(length_G1: torch.Tensor) -> torch.Tensor:
        moved = z_GU
        for _ in range(FLOW_STEPS):
            slope_GU = score_slope(moved, mu) + least_slope  # wide open gates must be able to move too
            moved = (moved - length_G1 / FLOW_STEPS * speed_GU * slope_GU).clamp_min(floor)
        return moved

    def excess(length_G1: torch.Tensor) -> torch.Tensor:
        return retention_score(flow(length_G1), mu).mean(-1, keepdim=True) - keep_ratio

    low = z_GU.new_zeros(z_GU.shape[0], 1)
    sign = torch.where(excess(low) > 0, 1.0, -1.0)
    high = torch.full_like(low, 1e-3)
    for _ in range(40):  # double until the budget is passed
        short = excess(sign * high) * sign > 0
        if not short.any():
            break
        low, high = torch.where(short, high, low), torch.where(short, 2 * high, high)
    for _ in range(30):
        middle = (low + high) / 2
        short = excess(sign * middle) * sign > 0
        low, high = torch.where(short, middle, low), torch.where(short, high, middle)
    return flow(sign * high).reshape(z_LU.shape)


def exact_support(saliency_LU: torch.Tensor, kept: int, *, per_layer: bool) -> torch.Tensor:
    """Return the bool mask [L, U] of the `kept` units of highest saliency; ties go to the lower index.

    With `per_layer`, the units are spread over the layers as evenly as integers allow, earlier layers first.
    """
    if per_layer:
        layers = saliency_LU.shape[0]
        counts = [kept // layers + (index < kept % layers) for index in range(layers)]
        return torch.cat(
            [exact_support(row[None], n, per_layer=False) for row, n in zip(saliency_LU, counts, strict=True)]
        )
    order = saliency_LU.flatten().argsort(descending=True, stable=True)
    support = torch.zeros(saliency_LU.numel(), dtype=torch.bool, device=saliency_LU.device)
    support[order[:kept]] = True
    return support.reshape(saliency_LU.shape)


def keeping_worth(saliency: torch.Tensor, alive: torch.Tensor) -> torch.Tensor:
    """Return the saliency, scaled down for closed gates until every open one is worth more; float64, same shape.

    What the search has closed comes back only where too little is open, or in place of gates without any saliency.
    """
    worth = saliency.double()  # in float32 saliencies that differ by more than 1e7 leave no room below them
    open_worth, closed_worth = worth[alive & (worth > 0)], worth[~alive]
    if len(open_worth) and len(closed_worth):
        scale = 0.5 * open_worth.min() / closed_worth.max().clamp_min(open_worth.min())
        worth = torch.where(alive, worth, worth * scale)
    return worth


def aligned_budget(kept: int, rows: int, units: int, align: int) -> int:
    """Return the most units, at most `kept`, that `rows` of `units` can keep if each keeps a multiple of `align`.

    Raises: SettingError if that is none.
    """
    most = min(kept // align, rows * (units // align)) * align
    if most == 0:
        raise SettingError(f"align is {align}, but {kept:,} units of {rows} × {units:,} are kept; choose a smaller one")
    return most


def aligned_support(worth: torch.Tensor, kept: int, align: int, *, groups: int = 1) -> torch.Tensor:
    """Return the bool mask of highest total worth in which every row keeps a multiple of `align` units; worth's shape.

    A row is the last axis: the channels of a layer, or of an expert. `aligned_budget` units are kept in all, spread as
    evenly as blocks allow over `groups` of equally many rows. A row keeps its best units; cut into blocks of `align`
    from the best down, its blocks are worth less and less, so taking the best blocks of all rows is optimal. A row
    worth little may keep none.
    """
    units = worth.shape[-1]
    num_blocks = aligned_budget(kept, worth.numel() // units, units, align) // align
    ranked, order = worth.sort(dim=-1, descending=True, stable=True)
    blocks = ranked[..., : units // align * align].double().unflatten(-1, (-1, align)).sum(-1)
    chosen = exact_support(blocks.reshape(groups, -1), num_blocks, per_layer=True).view_as(blocks)
    kept_first = torch.arange(units, device=worth.device) < align * chosen.sum(-1, keepdim=True)
    return torch.zeros_like(kept_first).scatter(-1, order, kept_first)
