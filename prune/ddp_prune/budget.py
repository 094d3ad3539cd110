"""The budget: two ways to hold it while searching, and the rounding that makes it exact.

Legend: L layers, U units of a layer, K = L·U units of one module type, P = round(ρK) of them kept.
"""

import torch
from torch import nn

from ddp_prune.gates import Masks, binarisation, retention_score
from ddp_vllm.errors import SettingError


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
    """Move z along −∂s/∂z, in the metric of the optimizer, until mean s(z) is `keep_ratio`; return the moved z.

    The paper lets a multiplier ascend until the budget holds, which takes about 1,000 steps. Here the multiplier is
    solved for after every step, by bisection. z moves by δ·w with w = (∂s/∂z)/√curvature: gates that are clearly open
    or that matter much hardly move, gates near the threshold that matter little do. `curvature_LU` is the running
    mean of squared gradients. Deterministic; the answer is within 1e-4 units of the budget unless bounds forbid it.
    """
    z_GU = z_LU if per_layer else z_LU.reshape(1, -1)
    curvature_GU = curvature_LU.reshape(z_GU.shape)
    with torch.enable_grad():
        leaf = z_GU.detach().requires_grad_()
        (slope_GU,) = torch.autograd.grad(retention_score(leaf, mu).sum(), leaf)
    weight_GU = slope_GU / (curvature_GU.sqrt() + 1e-3 * curvature_GU.mean(-1, keepdim=True).sqrt() + 1e-12)
    weight_GU = weight_GU / weight_GU.amax(-1, keepdim=True)
    low = z_GU.new_full((z_GU.shape[0], 1), -2.0)  # δ = 2 moves the least important gate twice its start
    high = -low
    for _ in range(40):
        middle = (low + high) / 2
        excess = retention_score((z_GU - middle * weight_GU).clamp_min(floor), mu).mean(-1, keepdim=True) - keep_ratio
        low, high = torch.where(excess > 0, middle, low), torch.where(excess > 0, high, middle)
    return (z_GU - (low + high) / 2 * weight_GU).clamp_min(floor).reshape(z_LU.shape)


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
