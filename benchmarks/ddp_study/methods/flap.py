"""FLAP: how much an activation fluctuates, times ‖w‖², standardised in each layer (arXiv:2312.11983, WIFV).

One forward pass. Not here: the bias that makes up for the mean of what goes, which no gate can hold; and one budget for
heads and channels together, as every method here has one for each.
"""

import torch

from ddp_prune.gates import GatedModel, Masks
from ddp_study.methods.method import Score
from ddp_study.methods.observe import Place, by_columns, read


def score(gated: GatedModel, blocks: torch.Tensor) -> Masks:
    """Return Var(x_j)·‖w_j‖² less its mean in the layer, over its standard deviation; summed over a unit's inputs."""
    sums: dict[Place, torch.Tensor] = {}

    def note(place: Place, x_TI: torch.Tensor, _y_TO: torch.Tensor) -> None:
        x = x_TI.double()  # the variance is a difference of the two
        sums[place] = sums.get(place, 0.0) + torch.stack([x.sum(0), x.square().sum(0)])

    def value(place: Place, w_OI: torch.Tensor) -> torch.Tensor:
        mean, square = sums[place] / blocks.numel()
        fluctuation = (square - mean.square()).clamp_min(0.0).float() * w_OI.square().sum(0)
        return (fluctuation - fluctuation.mean()) / fluctuation.std().clamp_min(1e-12)

    read(gated, blocks, note)
    return by_columns(gated, value)


METHOD = Score(source="arXiv:2312.11983, without its bias", score=score, suits="dense")
