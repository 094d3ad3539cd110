"""The paper's search: gates move through a surrogate that sharpens, by AdamW, under multipliers or a solved one.

Legend: L layers, U units of a layer; G rows on each of which the budget holds, N units of a row.
"""

import math

import torch
from accelerate import Accelerator

from ddp_prune.batches import Batches
from ddp_prune.budget import AugmentedLagrangian, hold_budget, keep_schedule
from ddp_prune.gates import GatedModel, Masks, gate, retention_score, sharpness_at
from ddp_prune.recipe import Recipe
from ddp_prune.trainer import Trainer


class AnnealedTrainer(Trainer):
    """Search with `controller="alm"` or `"feedback"`; rounding and polish are those of every search."""

    def __init__(self, gated: GatedModel, batches: Batches, recipe: Recipe, accelerator: Accelerator) -> None:
        super().__init__(gated, batches, recipe, accelerator)
        keep_ratios = {pool.name: pool.keep_ratio for pool in self.pools}
        self.multipliers = multipliers = AugmentedLagrangian(keep_ratios).to(accelerator.device)
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [*self.z.values()], "base": recipe.learning_rate},
                {
                    "params": [*multipliers.lambda1.values(), *multipliers.lambda3.values()],
                    "base": recipe.lambda_learning_rate,
                    "maximize": True,
                },
                {"params": [*multipliers.lambda2.values()], "base": recipe.lambda2_learning_rate, "maximize": True},
            ],
            betas=(0.9, 0.999),
            weight_decay=0.0,
        )

    def forward_masks(self) -> Masks:
        """Return m [L, U] of every module type, differentiable in z."""
        return super().forward_masks() if self.polishing else {kind: gate(z) for kind, z in self.z.items()}

    def score(self, z: torch.Tensor, mu: float) -> torch.Tensor:
        """Return s, what the multipliers count a unit as; shaped as z."""
        return retention_score(z, mu)

    def _search(self, step: int, masks: Masks, gradients: Masks) -> None:
        """Give AdamW the gradients of z (and λ) and let it step; keep z within its bounds and on the budget."""
        mu = self._sharpness(step)
        self.optimizer.zero_grad()
        for kind, mask in masks.items():
            mask.backward(gradients[kind])
        if self.recipe.controller == "alm":
            scores = {pool.name: self.score(pool.rows(dict(self.z)), mu) for pool in self.pools}
            self.multipliers(scores, self.costs).backward()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(step, self.recipe, group["base"])
        self.optimizer.step()
        self._hold(self._progress(step), mu)

    def _hold(self, progress: float, mu: float) -> None:
        """Keep z within its bounds, and on the budget if that is ours to do."""
        floor = self.recipe.gate_floor
        if self.recipe.controller == "alm":
            for z in self.z.values():
                z.data.clamp_(min=floor)
            return
        for pool in self.pools:
            target = keep_schedule(progress, pool.keep_ratio)
            z_GN = pool.rows({kind: self.z[kind].detach() for kind in pool.shapes})
            curvature_GN = pool.rows({kind: self._saliency(kind) for kind in pool.shapes})
            moved = hold_budget(z_GN, curvature_GN, self.costs[pool.name], mu, target, floor=floor)
            if progress == 1.0:
                cost_GN = self.costs[pool.name]
                moved = hold_budget(moved, curvature_GN, cost_GN, mu, target, floor=floor, count_open=True)
            for kind, values in pool.unrows(moved).items():
                self.z[kind].data.copy_(values)

    def _sharpness(self, step: int) -> float:
        return sharpness_at(self._progress(step), self.recipe.mu_start, self.recipe.mu_end)

    def _alive(self) -> Masks:
        return super()._alive() if self.polishing else {kind: z > 0 for kind, z in self.z.items()}

    def _measure(self, step: int) -> dict[str, float]:
        values = super()._measure(step)
        if not self.polishing:
            mu = self._sharpness(step)
            values |= {"mu": mu}
            values |= {f"{kind}_score": float(self.score(z.detach(), mu).mean()) for kind, z in self.z.items()}
        if self.recipe.controller == "alm":
            for name in ("lambda1", "lambda2", "lambda3"):
                values |= {f"{key}_{name}": float(v.detach()) for key, v in getattr(self.multipliers, name).items()}
        return values

    def state(self) -> dict[str, torch.Tensor]:
        """Return everything the next step depends on, as named tensors."""
        named = {f"multipliers.{name}": value.cpu() for name, value in self.multipliers.state_dict().items()}
        for index, values in self.optimizer.state_dict()["state"].items():
            named |= {f"optimizer.{index}.{name}": value.cpu() for name, value in values.items()}
        return super().state() | named

    def restore(self, tensors: dict[str, torch.Tensor], rounding: dict[str, dict[str, float]]) -> None:
        """Take back what `state` returned."""
        rest: dict[str, torch.Tensor] = {}
        moments: dict[int, dict[str, torch.Tensor]] = {}
        for name, value in tensors.items():
            group, _, key = name.partition(".")
            if group == "multipliers":
                self.multipliers.get_parameter(key).data.copy_(value)
            elif group == "optimizer":
                index, _, key = key.partition(".")
                moments.setdefault(int(index), {})[key] = value
            else:
                rest[name] = value
        self.optimizer.load_state_dict(self.optimizer.state_dict() | {"state": moments})
        super().restore(rest, rounding)


def learning_rate(step: int, recipe: Recipe, base: float) -> float:
    """Return AdamW's rate at a step of the search: linear warm-up to `base`, then cosine to 0."""
    warmup = max(1, round(recipe.warmup * recipe.search_steps))
    progress = max(0.0, (step - warmup) / max(1, recipe.search_steps - warmup))
    return base * min(1.0, (step + 1) / warmup) * 0.5 * (1.0 + math.cos(math.pi * progress))
