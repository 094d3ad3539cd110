"""LoRAP's score of MLP channels: ‖W_gate[j]⊙x̂‖ + ‖W_up[j]⊙x̂‖ + ĥ_j‖w_j‖, x̂ and ĥ root mean squares (arXiv:2404.09695).

One forward pass of the dense model, where LoRAP prunes layer by layer. It keeps the 1 % of lowest score, so this does.
LoRAP factorises attention, which is no mask: heads go by Wanda-SP.
"""

import torch

from ddp_prune.gates import GatedModel, Masks
from ddp_study.methods import wanda_sp
from ddp_study.methods.method import Score
from ddp_study.methods.observe import Place, by_columns, input_squares

EXEMPT = 0.01  # of a layer's channels


def score(gated: GatedModel, blocks: torch.Tensor) -> Masks:
    """Return the sum of three norms for channels, Wanda-SP's for heads."""
    squares = input_squares(gated, blocks)
    outputs = by_columns(gated, lambda place, w_OI: (squares[place] * w_OI.square().sum(0)).sqrt())["mlp"]
    return {
        "attn": wanda_sp.score(gated, blocks)["attn"],
        "mlp": exempt_lowest(made_norms(gated, squares) + outputs),
    }


def made_norms(gated: GatedModel, squares: dict[Place, torch.Tensor]) -> torch.Tensor:
    """Return ‖W_gate[j]⊙x̂‖ + ‖W_up[j]⊙x̂‖ of every MLP channel, [L, U]."""
    found = torch.zeros(gated.shapes["mlp"], device=next(iter(squares.values())).device)
    for projection in gated.family.tensors.inputs("mlp"):
        for index, layer in enumerate(gated.layers):
            weight = layer.get_submodule(projection.name).weight.detach().float()  # type: ignore[operator]
            norms = (weight.square() @ squares[index, projection.name]).sqrt()
            found[index] += norms.view(len(projection.units), -1).sum(0)
    return found


def exempt_lowest(scores_LU: torch.Tensor) -> torch.Tensor:
    """Return the scores with the lowest 1 % of each layer above all others."""
    lowest = scores_LU.argsort(dim=1)[:, : round(EXEMPT * scores_LU.shape[1])]
    return scores_LU.scatter(1, lowest, torch.inf)


METHOD = Score(source="arXiv:2404.09695, channels; heads by Wanda-SP", score=score, scope="layer", suits="dense")
