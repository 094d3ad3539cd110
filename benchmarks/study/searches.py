"""Methods that train gates: hard concrete, the paper's search, and ours; a row of a table may
change their settings.

Each runs the recipe's number of steps. A step is a forward pass of the dense model, and a forward
and backward pass of the gated model.
"""

import math
from typing import Any

import torch

from ddp_prune.core.alm import STRETCH_HIGH, STRETCH_LOW, AlmTrainer, ClampStraightThrough
from ddp_prune.core.gates import Masks
from ddp_prune.core.learn import KEPT_FLOOR
from scores import Search, exact_support

START = 3.0  # initial log α


class HardConcrete(AlmTrainer):
    """Stochastic gates of L0 regularization (arXiv:1712.01312), by Eq. 8 and 9 of arXiv:2603.08065;
    z is log α.

    As in these equations, the temperature β is 1. Multipliers, learning rates, l = −0.1 and r = 1.1
    are those of the paper's search. The paper does not state the initial log α; here it is 3, so
    gates are open with probability 0.995. Gates are sampled during training. The deterministic gate
    is evaluated, and the highest gates are kept.
    """

    is_binarized = False  # by λ3

    def prepare(self) -> None:
        super().prepare()
        self.noise = torch.Generator().manual_seed(self.schedule.seed)
        for z in self.gates.z.values():
            z.data.fill_(START)
        for weight in self.multipliers.lambda3.values():
            weight.requires_grad_(self.is_binarized)

    def forward_masks(self) -> Masks:
        if self.polishing:
            gates = {kind: _stretch(torch.sigmoid(z.detach())) for kind, z in self.gates.z.items()}
            return {kind: gate.clamp_min(KEPT_FLOOR) * self.gates.support[kind] for kind, gate in gates.items()}
        return {kind: _stretch(torch.sigmoid(self._logistic(z) + z)) for kind, z in self.gates.z.items()}

    def _logistic(self, z: torch.Tensor) -> torch.Tensor:
        return torch.rand(z.shape, generator=self.noise).clamp(1e-6, 1 - 1e-6).logit().to(z.device)

    def score(self, z: torch.Tensor, mu: float) -> torch.Tensor:
        """Return the probability that a gate is open (Eq. 9)."""
        return torch.sigmoid(z - math.log(-STRETCH_LOW / STRETCH_HIGH))

    def bound(self) -> None:
        """Do nothing: log α has no lower bound."""

    def round(self) -> None:
        kept = {pool.name: round(pool.kept) for pool in self.pools}
        for kind, z in self.gates.z.items():
            self.gates.searched_z[kind] = z.detach().clone()
            self.gates.support[kind] = exact_support(z.detach(), kept[kind])

    def state(self) -> dict[str, torch.Tensor]:
        return super().state() | {"noise": self.noise.get_state()}

    def restore(self, step: int, tensors: dict[str, torch.Tensor], extra: dict[str, Any]) -> None:
        self.noise.set_state(tensors["noise"])
        super().restore(step, tensors, extra)


class DeterministicHardConcrete(HardConcrete):
    """Hard concrete without noise (second row of the paper's table 4): λ3 makes the trained gate
    binary.

    The gradient is straight-through at the clamp; otherwise open gates would receive no gradient.
    """

    is_binarized = True

    def forward_masks(self) -> Masks:
        if self.polishing:
            return super().forward_masks()
        return {kind: self.score(z, 0.0) for kind, z in self.gates.z.items()}

    def score(self, z: torch.Tensor, mu: float) -> torch.Tensor:
        """Return the gate itself."""
        return ClampStraightThrough.apply(_stretched(torch.sigmoid(z)), 0.0, 1.0)


def _stretched(gate: torch.Tensor) -> torch.Tensor:
    return gate * (STRETCH_HIGH - STRETCH_LOW) + STRETCH_LOW


def _stretch(gate: torch.Tensor) -> torch.Tensor:
    return _stretched(gate).clamp(0.0, 1.0)


_PAPERS = {"controller": "alm", "polish": 0.0}
_FROM = "arXiv:2603.08065, {}, with its β of 1 and its learning rates; it does not state the initial log α, here 3"
METHODS = {
    "hard-concrete": Search(source=_FROM.format("Eq. 8 and 9"), trainer=HardConcrete, settings=_PAPERS),
    "hard-concrete-deterministic": Search(
        source=_FROM.format("table 4"), trainer=DeterministicHardConcrete, settings=_PAPERS
    ),
    "paper": Search(source="arXiv:2603.08065", settings=_PAPERS),
    "ours": Search(source="ddp-vllm", settings={"controller": "gradual"}),
}
