"""Three ways to hold a budget while searching: gates that close for good, the paper's multipliers, a solved multiplier.

Legend: G rows on each of which the budget holds, N units of a row.
"""

from collections.abc import Mapping

import torch
from torch import nn

from ddp_prune.gates import retention_score, score_slope

METRIC_POWER = 1.0  # of the curvature: 1 is Newton's metric, 0.5 Adam's, which did worse (LOG, 147.0 against 142.5)
FLOW_STEPS = 4  # Euler steps of the flow; its field changes along the way


class AugmentedLagrangian(nn.Module):
    """The paper's penalty (Eq. 13 and 15), multipliers by gradient ascent from 0; one set a constraint.

    A constraint holds in every row of its scores, and the penalty is the mean over rows (Eq. 19).
    """

    def __init__(self, keep_ratio: Mapping[str, float]) -> None:
        super().__init__()
        self.keep_ratio = keep_ratio
        self.lambda1 = nn.ParameterDict({name: nn.Parameter(torch.zeros(())) for name in keep_ratio})
        self.lambda2 = nn.ParameterDict({name: nn.Parameter(torch.zeros(())) for name in keep_ratio})
        self.lambda3 = nn.ParameterDict({name: nn.Parameter(torch.zeros(())) for name in keep_ratio})

    def forward(self, scores: Mapping[str, torch.Tensor], costs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return Σ over constraints of λ1(s̄−ρ) + λ2(s̄−ρ)² + λ3·mean s(1−s); a scalar that λ ascends and z descends.

        Means weight each unit by its cost; scores and costs are [G, N], a row for each place where a constraint holds.
        """
        total = torch.zeros((), device=next(iter(scores.values())).device)
        for name, score_GN in scores.items():
            gap = kept_share(score_GN, costs[name]) - self.keep_ratio[name]
            total = total + (self.lambda1[name] * gap + self.lambda2[name] * gap.square()).mean()
            total = total + self.lambda3[name] * kept_share(score_GN * (1.0 - score_GN), costs[name]).mean()
        return total


def kept_share(score_GN: torch.Tensor, cost_GN: torch.Tensor) -> torch.Tensor:
    """Return Σ c·s / Σ c of each row, [G]; the plain mean (Eq. 6) where all costs are equal."""
    return (score_GN * cost_GN).sum(-1) / cost_GN.sum(-1)


def keep_schedule(progress: float, keep_ratio: float) -> float:
    """Return the keep ratio asked for at `progress` in [0, 1]: 1 at the start, ρ from 0.85 on, quadratic between.

    As in gradual pruning (arXiv:1710.01878): much while the rest can still adapt, little near the end. Its cubic closes
    too much before the first tokens have told what matters.
    """
    left = max(0.0, 1.0 - progress / 0.85)
    return keep_ratio + (1.0 - keep_ratio) * left**2


def highest_worth(worth_GN: torch.Tensor, cost_GN: torch.Tensor, keep_ratio: float) -> torch.Tensor:
    """Return which units each row keeps, bool [G, N]: by worth for their cost, for as long as `keep_ratio` allows.

    What the kept cost is at most `keep_ratio` of what all cost, and short of it by less than one unit.
    """
    ratio_GN = torch.where(cost_GN > 0, worth_GN.double() / cost_GN, torch.inf)
    order_GN = ratio_GN.argsort(dim=-1, descending=True, stable=True)
    spent_GN = cost_GN.double().gather(-1, order_GN).cumsum(-1)
    affordable_GN = spent_GN <= (keep_ratio + 1e-9) * spent_GN[:, -1:]
    return torch.zeros_like(affordable_GN).scatter(-1, order_GN, affordable_GN)


def share_leftover(
    kept_GN: torch.Tensor, worth_GN: torch.Tensor, cost_GN: torch.Tensor, keep_ratio: float
) -> torch.Tensor:
    """Return `highest_worth` with one unit more in rows where it is worth most, while all rows together allow it.

    A row's share is seldom a whole number of units: of 3 heads 80 % are 2.4, of one head none. Of a single row nothing
    is left over.
    """
    ratio_GN = torch.where(cost_GN > 0, worth_GN.double() / cost_GN, torch.inf).masked_fill(kept_GN, -torch.inf)
    best_G1 = ratio_GN.argmax(-1, keepdim=True)
    full_G1 = kept_GN.gather(-1, best_G1)  # nothing of the row is left out
    order_G = ratio_GN.gather(-1, best_G1)[:, 0].argsort(descending=True, stable=True)
    spent_G = cost_GN.double().gather(-1, best_G1).masked_fill(full_G1, 0.0)[order_G, 0].cumsum(0)
    left = (keep_ratio + 1e-9) * cost_GN.double().sum() - (cost_GN.double() * kept_GN).sum()
    more_G = torch.zeros_like(full_G1[:, 0]).scatter(0, order_G, spent_G <= left)
    return kept_GN.scatter(-1, best_G1, full_G1 | more_G[:, None])


@torch.no_grad()
def hold_budget(
    z_GN: torch.Tensor,
    curvature_GN: torch.Tensor,
    cost_GN: torch.Tensor,
    mu: float,
    keep_ratio: float,
    *,
    floor: float,
    count_open: bool = False,
) -> torch.Tensor:
    """Let z flow along −c·∂s/∂z, slowed where the loss is curved, until each row keeps `keep_ratio`; return moved z.

    The paper lets a multiplier ascend until the budget holds, which takes about 1,000 steps. Here the multiplier is
    solved for after every step, by bisection over the length of the flow dz/dδ = −c·(∂s/∂z)/curvature^METRIC_POWER.
    Gates that are clearly open or matter much hardly move; gates near the threshold that matter little for what they
    cost do. A row is a place where the budget holds: the model, a layer or an expert. `curvature_GN` is the running
    mean of squared gradients (diagonal Fisher), `cost_GN` what the units cost. Deterministic; Σ c·s / Σ c ends within
    1e-3 of `keep_ratio` unless `floor` forbids it. With `count_open`, for the end of a search, open gates (z > 0) are
    counted instead of scores, which are below 1 where z is below 2μ: gates are closed until the cost of those still
    open is at most `keep_ratio`, and none is opened.
    """
    metric_GN = curvature_GN.pow(METRIC_POWER)
    speed_GN = mu * cost_GN / (metric_GN + 1e-3 * metric_GN.mean(-1, keepdim=True) + 1e-30)
    speed_GN = speed_GN / speed_GN.amax(-1, keepdim=True)
    least_slope = 1e-3 * float(score_slope(z_GN.new_tensor(mu), mu))

    def flow(length_G1: torch.Tensor) -> torch.Tensor:
        moved = z_GN
        for _ in range(FLOW_STEPS):
            slope_GN = score_slope(moved, mu) + least_slope  # wide open gates must be able to move too
            moved = (moved - length_G1 / FLOW_STEPS * speed_GN * slope_GN).clamp_min(floor)
        return moved

    def excess(length_G1: torch.Tensor) -> torch.Tensor:
        moved = flow(length_G1)
        score_GN = (moved > 0).float() if count_open else retention_score(moved, mu)
        slack = 1e-6 if count_open else 0.0  # float32 does not know every share exactly
        return kept_share(score_GN, cost_GN)[:, None] - keep_ratio - slack

    low = z_GN.new_zeros(z_GN.shape[0], 1)
    sign = torch.where(excess(low) > 0, 1.0, 0.0 if count_open else -1.0)
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
    return flow(sign * high)
