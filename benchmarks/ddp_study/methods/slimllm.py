"""SlimLLM: heads without which attention says the same go first, and channels outside what the MLP mostly writes.

A head costs Σ over outputs of |Pearson(O − O_h, O)|, the largest go. A channel is LoRAP's first two norms, and
ĥ_j·‖(w_jᵀV)⊙σ(λ/λ̄)‖ with V, λ the principal components of what the MLP writes (arXiv:2505.22689). One forward pass and
an eigendecomposition a layer. Not here: swaps of heads, ratios by layer, and the regression of outputs afterwards.
"""

import torch

from ddp_prune.gates import GatedModel, Masks
from ddp_study.methods.lorap import exempt_lowest, made_norms
from ddp_study.methods.method import Score
from ddp_study.methods.observe import Place, by_columns, read


def score(gated: GatedModel, blocks: torch.Tensor) -> Masks:
    """Return the scores of heads and channels."""
    table, num_heads = gated.family.tensors, gated.shapes["attn"][1]
    heads, mlp = table.output("attn").name, table.output("mlp").name
    squares: dict[Place, torch.Tensor] = {}
    moments: dict[Place, torch.Tensor] = {}  # of heads: Σ of O, O², O_h, O_h², O_h·O
    outer: dict[Place, torch.Tensor] = {}  # Σ of y yᵀ, and of y below

    def note(place: Place, x_TI: torch.Tensor, y_TO: torch.Tensor) -> None:
        squares[place] = squares.get(place, 0.0) + x_TI.square().sum(0) / blocks.numel()
        if place[1] == heads:
            weight = gated.layers[place[0]].get_submodule(heads).weight.detach().float()  # type: ignore[operator]
            parts = zip(x_TI.chunk(num_heads, 1), weight.chunk(num_heads, 1), strict=True)
            sums = torch.stack([_products(x @ w.T, y_TO) for x, w in parts])
            moments[place] = moments.get(place, 0.0) + sums / blocks.numel()
        if place[1] == mlp:
            y = torch.cat([y_TO, torch.ones_like(y_TO[:, :1])], 1).double()
            outer[place] = outer.get(place, 0.0) + y.T @ y / blocks.numel()

    def written(place: Place, w_OI: torch.Tensor) -> torch.Tensor:
        if place[1] != mlp:
            return torch.zeros_like(w_OI[0])
        mean = outer[place][:-1, -1]
        spread, vectors = torch.linalg.eigh(outer[place][:-1, :-1] - mean.outer(mean))
        weights = (spread / spread.mean().clamp_min(1e-12)).sigmoid()
        return squares[place].sqrt() * ((w_OI.T.double() @ vectors) * weights).norm(dim=1).float()

    read(gated, blocks, note)
    return {
        "attn": torch.stack([_unlike(moments[index, heads]) for index in range(len(gated.layers))]),
        "mlp": exempt_lowest(made_norms(gated, squares) + by_columns(gated, written)["mlp"]),
    }


def _products(head_TO: torch.Tensor, all_TO: torch.Tensor) -> torch.Tensor:
    """Return sums over tokens, float64 [5, O]."""
    part, whole = head_TO.double(), all_TO.double()
    return torch.stack([each.sum(0) for each in (whole, whole.square(), part, part.square(), part * whole)])


def _unlike(means_U5O: torch.Tensor) -> torch.Tensor:
    """Return −Σ |Pearson(O − O_h, O)|, [U]."""
    whole, whole_square, part, part_square, product = means_U5O.unbind(1)
    variance, covariance = whole_square - whole.square(), product - part * whole
    rest = variance - 2 * covariance + part_square - part.square()
    return -((variance - covariance) / (variance * rest).clamp_min(1e-24).sqrt()).abs().sum(1).float()


METHOD = Score(source="arXiv:2505.22689, scores alone", score=score, scope="layer", suits="dense")
