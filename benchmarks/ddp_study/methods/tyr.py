"""Týr-the-Pruner's local score: what a unit's removal changes of its projection's output (arXiv:2503.09657).

With H = XXᵀ of the inputs of o_proj and down_proj, damped by 1 % of its mean diagonal, and G = H·W, it is
Σ W_g⊙(½[(H⁻¹)_gg]⁻¹·W_g + G_g). One forward pass, H of every layer in memory (as many numbers as inputs squared), and
an inverse each. Not here: refitted weights, rounds of removal, and the search for a budget of each layer.
"""

import torch

from ddp_prune.gates import GatedModel, Masks
from ddp_study.methods.method import Score
from ddp_study.methods.observe import Place, by_columns, read

DAMPING = 0.01


def score(gated: GatedModel, blocks: torch.Tensor) -> Masks:
    """Return the score of removing each unit at once, all its inputs together."""
    table = gated.family.tensors
    units = {table.output(block).name: shape[1] for block, shape in gated.shapes.items()}
    hessians: dict[Place, torch.Tensor] = {}

    def note(place: Place, x_TI: torch.Tensor, _y_TO: torch.Tensor) -> None:
        if place[1] in units:
            hessians[place] = hessians.get(place, 0.0) + x_TI.T @ x_TI / blocks.numel()

    def value(place: Place, w_OI: torch.Tensor) -> torch.Tensor:
        hessian_II = hessians[place].double()
        damping = DAMPING * hessian_II.diagonal().mean().clamp_min(1e-12)
        hessian_II = hessian_II + damping * torch.eye(len(hessian_II), device=w_OI.device)
        num, w_IO = units[place[1]], w_OI.T.double()
        inverse_USS = torch.linalg.inv(hessian_II).unflatten(1, (num, -1)).unflatten(0, (num, -1))
        inverse_USS = inverse_USS.diagonal(dim1=0, dim2=2).permute(2, 0, 1)
        curved = torch.linalg.solve(inverse_USS, w_IO.unflatten(0, (num, -1))).flatten(0, 1)
        return (w_IO * (0.5 * curved + hessian_II @ w_IO)).sum(1).float()

    read(gated, blocks, note)
    return by_columns(gated, value)


METHOD = Score(source="arXiv:2503.09657, local scores alone", score=score, scope="layer", suits="dense")
