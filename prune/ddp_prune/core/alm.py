"""The paper's search, `controller = "alm"`: AdamW on z, a surrogate that sharpens, and multipliers
for the budget.

Equations are those of arXiv:2603.08065.
Legend: L layers, U units of a layer; G groups that share a budget, N units of a group.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ddp_prune.core.budget import Pool, kept_share
from ddp_prune.core.gates import Masks
from ddp_prune.core.learn import Trainer
from ddp_prune.core.schedule import AlmSettings, Schedule

STRETCH_LOW, STRETCH_HIGH = -0.1, 1.1  # l and r of Eq. 8 and 12
SHARPNESS = math.log(11.0)  # C0: makes s(0) = 0 and s(2μ) = 1 exactly; the paper rounds it to 2.4


class ClampStraightThrough(torch.autograd.Function):
    """Clamp forward, identity backward."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, low: float, high: float) -> Tensor:
        return values.clamp(low, high)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0], None, None


def gate(z_LU: Tensor) -> Tensor:
    """Return m = ReLU(z) with a straight-through gradient (Eq. 11); any shape, float32."""
    return ClampStraightThrough.apply(z_LU, 0.0, math.inf)


def retention_score(z_LU: Tensor, mu: float) -> Tensor:
    """Return s = clamp(σ((z − μ)·C0/μ)(r − l) + l, 0, 1), straight-through at the clamp (Eq. 12);
    values in [0, 1].

    s(0) = 0, s(2μ) = 1, and s tends to the step function of z as μ falls.
    """
    stretched = torch.sigmoid((z_LU - mu) * (SHARPNESS / mu)) * (STRETCH_HIGH - STRETCH_LOW) + STRETCH_LOW
    return ClampStraightThrough.apply(stretched, 0.0, 1.0)


def sharpness_at(progress: float, mu_start: float, mu_end: float) -> float:
    """Return μ(t) = μ0 − (μ0 − μT)·√(t/T) for progress t/T in [0, 1] (Eq. 14)."""
    return mu_start - (mu_start - mu_end) * math.sqrt(progress)


def learning_rate(step: int, schedule: Schedule, base: float) -> float:
    """Return AdamW's rate at a step of the search: linear warm-up to `base`, then cosine to 0."""
    search = schedule.steps.search
    warmup = max(1, round((schedule.alm or AlmSettings()).warmup * search))
    progress = max(0.0, (step - warmup) / max(1, search - warmup))
    return base * min(1.0, (step + 1) / warmup) * 0.5 * (1.0 + math.cos(math.pi * progress))


class AugmentedLagrangian(nn.Module):
    """The paper's penalty (Eq. 13 and 15). Its multipliers start at 0 and move by gradient ascent;
    one set per pool.

    A pool's budget holds in every group, and the penalty is the mean over groups (Eq. 19).
    """

    def __init__(self, keep_ratio: Mapping[str, float]) -> None:
        super().__init__()
        self.keep_ratio = keep_ratio
        self.lambda1 = nn.ParameterDict({name: nn.Parameter(torch.zeros(())) for name in keep_ratio})
        self.lambda2 = nn.ParameterDict({name: nn.Parameter(torch.zeros(())) for name in keep_ratio})
        self.lambda3 = nn.ParameterDict({name: nn.Parameter(torch.zeros(())) for name in keep_ratio})

    def forward(self, scores: Mapping[str, Tensor], costs: Mapping[str, Tensor]) -> Tensor:
        """Return Σ over pools of λ1(s̄−ρ) + λ2(s̄−ρ)² + λ3·mean s(1−s); a scalar that λ ascends and
        z descends.

        Means weight each unit by its cost; scores and costs are [G, N].
        """
        total = torch.zeros((), device=next(iter(scores.values())).device)
        for name, score_GN in scores.items():
            gap = kept_share(score_GN, costs[name]) - self.keep_ratio[name]
            total = total + (self.lambda1[name] * gap + self.lambda2[name] * gap.square()).mean()
            total = total + self.lambda3[name] * kept_share(score_GN * (1.0 - score_GN), costs[name]).mean()
        return total

    def values(self) -> dict[str, float]:
        """Return every multiplier by name, such as `attn_lambda1`."""
        named = {"lambda1": self.lambda1, "lambda2": self.lambda2, "lambda3": self.lambda3}
        return {f"{key}_{name}": float(v.detach()) for name, values in named.items() for key, v in values.items()}


class AlmTrainer(Trainer):
    """Search with `controller="alm"`; rounding and polish are those of every search."""

    def prepare(self) -> None:
        self.alm = self.schedule.alm or AlmSettings()
        for z in self.gates.z.values():
            z.requires_grad_()
        keep_ratios = {pool.name: pool.keep_ratio for pool in self.pools}
        self.costs = {pool.name: self._cost(pool) for pool in self.pools}
        self.multipliers = multipliers = AugmentedLagrangian(keep_ratios).to(self.accelerator.device)
        alm, lambdas_1_3 = self.alm, [*multipliers.lambda1.values(), *multipliers.lambda3.values()]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [*self.gates.z.values()], "base": alm.learning_rate},
                {"params": lambdas_1_3, "base": alm.lambda_learning_rate, "maximize": True},
                {"params": [*multipliers.lambda2.values()], "base": alm.lambda2_learning_rate, "maximize": True},
            ],
            betas=(0.9, 0.999),
            weight_decay=0.0,
        )

    def forward_masks(self) -> Masks:
        """Return m [L, U] of every module type, differentiable in z."""
        as_searched = not self.polishing or self.alm.raw_masks
        return {kind: gate(z) for kind, z in self.gates.z.items()} if as_searched else super().forward_masks()

    def open_gates(self) -> Masks:
        return super().open_gates() if self.polishing else {kind: z > 0 for kind, z in self.gates.z.items()}

    def choose(self, saliency: Masks, is_open: Masks) -> Masks:
        return is_open if self.alm.raw_masks else super().choose(saliency, is_open)

    def score(self, z: Tensor, mu: float) -> Tensor:
        """Return the retention score s of each unit, shaped as z."""
        return retention_score(z, mu)

    def bound(self) -> None:
        """Clamp z to its floor."""
        for z in self.gates.z.values():
            z.data.clamp_(min=self.alm.gate_floor)

    def remedy(self, step: int) -> str:
        searching = step < self.schedule.steps.search
        return "try a lower learning_rate in the recipe's table [alm]" if searching else super().remedy(step)

    def search(self, step: int, masks: Masks, gradients: Masks) -> None:
        """Take AdamW's step on z and λ."""
        mu = self._sharpness(step)
        self.optimizer.zero_grad()
        for kind, mask in masks.items():
            mask.backward(gradients[kind])
        scores = {pool.name: self.score(pool.join(self.gates.z), mu) for pool in self.pools}
        self.multipliers(scores, self.costs).backward()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(step, self.schedule, group["base"])
        self.optimizer.step()
        self.bound()

    def measure(self, step: int) -> dict[str, float]:
        values = super().measure(step)
        if not self.polishing:
            mu = self._sharpness(step)
            values["mu"] = mu
            values |= {f"{kind}_score": float(self.score(z.detach(), mu).mean()) for kind, z in self.gates.z.items()}
        return values | self.multipliers.values()

    def _sharpness(self, step: int) -> float:
        progress = min(1.0, (step + 1) / self.schedule.steps.search)  # it prunes to one size only
        return sharpness_at(progress, self.alm.mu_start, self.alm.mu_end)

    def _cost(self, pool: Pool) -> Tensor:
        """Return the cost of each unit of a pool, float32 [G, N], scaled to at most 1: only ratios
        matter."""
        cost_GN = pool.joined_costs()
        return (cost_GN / cost_GN.max()).float().to(self.accelerator.device)

    def state(self) -> dict[str, Tensor]:
        """Return everything the next step depends on, as named tensors."""
        named = {f"multipliers.{name}": value.cpu() for name, value in self.multipliers.state_dict().items()}
        for index, values in self.optimizer.state_dict()["state"].items():
            named |= {f"optimizer.{index}.{name}": value.cpu() for name, value in values.items()}
        return super().state() | named

    def restore(self, step: int, tensors: dict[str, Tensor], extra: dict[str, Any]) -> None:
        """Restore the `state` and `extra` that were saved before `step`."""
        self.multipliers.load_state_dict(_under("multipliers.", tensors))
        moments: dict[int, dict[str, Tensor]] = {}
        for name, value in _under("optimizer.", tensors).items():
            index, _, key = name.partition(".")
            moments.setdefault(int(index), {})[key] = value
        self.optimizer.load_state_dict(self.optimizer.state_dict() | {"state": moments})
        super().restore(step, tensors, extra)


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors whose names begin with `prefix`, by the rest of their names."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
