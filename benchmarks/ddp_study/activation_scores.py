"""Scores by activations, from forward passes of the dense model: Wanda-SP, FLAP, LoRAP, SlimLLM, Týr and depth.

All but depth score heads and MLP channels of dense models by the inputs x of the projections that write to the residual
stream, of which w_j is column j.
"""

import torch
import torch.nn.functional as F

from ddp_prune.gates import GatedModel, Masks
from ddp_study.scores import Place, Score, by_columns, listen, read

EXEMPT = 0.01  # of a layer's channels
DAMPING = 0.01


def input_squares(gated: GatedModel, blocks: torch.Tensor) -> dict[Place, torch.Tensor]:
    """Return the mean square of every input of every projection over tokens, [I]."""
    sums: dict[Place, torch.Tensor] = {}

    def note(place: Place, x_TI: torch.Tensor, _y_TO: torch.Tensor) -> None:
        sums[place] = sums.get(place, 0.0) + x_TI.square().sum(0)

    read(gated, blocks, note)
    return {place: each / blocks.numel() for place, each in sums.items()}


def wanda_sp(gated: GatedModel, blocks: torch.Tensor) -> Masks:
    """Return Wanda (arXiv:2306.11695) summed over structures, as FLAP's authors compare with: Σ |w_j| · ‖x_j‖₂."""
    squares = input_squares(gated, blocks)
    return by_columns(gated, lambda place, w_OI: w_OI.abs().sum(0) * squares[place].sqrt())


def flap(gated: GatedModel, blocks: torch.Tensor) -> Masks:
    """Return FLAP's WIFV (arXiv:2312.11983): Var(x_j)·‖w_j‖², standardised in each layer, summed over a unit's inputs.

    Not implemented: the bias that makes up for the mean of removed inputs, which no gate can hold; and one budget for
    heads and channels together, as every method here has one for each.
    """
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


def lorap(gated: GatedModel, blocks: torch.Tensor) -> Masks:
    """Return LoRAP's score of channels (arXiv:2404.09695): ‖W_gate[j]⊙x̂‖ + ‖W_up[j]⊙x̂‖ + ĥ_j‖w_j‖.

    x̂ and ĥ are root mean squares of the inputs of the MLP and of its output projection. LoRAP prunes layer by layer;
    here one pass of the dense model gives all of them. It keeps the 1 % of lowest score, so this does. LoRAP factorises
    attention, which is no mask: heads are scored by Wanda-SP.
    """
    squares = input_squares(gated, blocks)
    outputs = by_columns(gated, lambda place, w_OI: (squares[place] * w_OI.square().sum(0)).sqrt())["mlp"]
    return {
        "attn": wanda_sp(gated, blocks)["attn"],
        "mlp": exempt_lowest(_made_norms(gated, squares) + outputs),
    }


def _made_norms(gated: GatedModel, squares: dict[Place, torch.Tensor]) -> torch.Tensor:
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


def slimllm(gated: GatedModel, blocks: torch.Tensor) -> Masks:
    """Return SlimLLM's scores (arXiv:2505.22689).

    A head costs Σ over outputs of |Pearson(O − O_h, O)|; heads with the largest cost are removed. A channel has LoRAP's
    first two norms, and ĥ_j·‖(w_jᵀV)⊙σ(λ/λ̄)‖ with V, λ the principal components of the MLP's output, which takes an
    eigendecomposition per layer. It shares LoRAP's exemption of 1 %. Not implemented: swaps of heads, ratios by layer,
    and the regression of outputs afterwards.
    """
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
        "mlp": exempt_lowest(_made_norms(gated, squares) + by_columns(gated, written)["mlp"]),
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


def tyr(gated: GatedModel, blocks: torch.Tensor) -> Masks:
    """Return Týr-the-Pruner's local score (arXiv:2503.09657): how removing a unit changes its projection's output.

    With H = XXᵀ of the inputs, damped by 1 % of its mean diagonal, and G = H·W, it is Σ W_g⊙(½[(H⁻¹)_gg]⁻¹·W_g + G_g),
    for all inputs g of a unit together. H of every layer is in memory (inputs squared), and each is inverted. Not
    implemented: refitted weights, rounds of removal, and the search for a budget of each layer.
    """
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


def depth(gated: GatedModel, blocks: torch.Tensor) -> Masks:
    """Return ShortGPT's influence (arXiv:2403.03853): 1 − the mean cosine of a layer's input and output.

    It is the same for all units of a layer, so whole layers are removed; the last one in part, to meet the budget.
    """
    sums = torch.zeros(len(gated.layers))

    def note(index: int, given_TH: torch.Tensor, made_TH: torch.Tensor) -> None:
        sums[index] += 1.0 - F.cosine_similarity(given_TH, made_TH, dim=-1).mean().cpu()

    listen(gated, blocks, dict(enumerate(gated.layers)), note)
    rows = {kind: sums[list(gated.sizes.routed_layers)] if kind == "experts" else sums for kind in gated.shapes}
    return {
        kind: rows[kind].view(-1, *[1] * (len(shape) - 1)).expand(shape).clone() for kind, shape in gated.shapes.items()
    }


METHODS = {
    "wanda-sp": Score(source="arXiv:2306.11695", score=wanda_sp, scope="layer", suits="dense"),
    "flap": Score(source="arXiv:2312.11983, without its bias", score=flap, suits="dense"),
    "lorap": Score(source="arXiv:2404.09695, channels; heads by Wanda-SP", score=lorap, scope="layer", suits="dense"),
    "slimllm": Score(source="arXiv:2505.22689, scores alone", score=slimllm, scope="layer", suits="dense"),
    "tyr": Score(source="arXiv:2503.09657, local scores alone", score=tyr, scope="layer", suits="dense"),
    "depth": Score(source="arXiv:2403.03853", score=depth),
}
