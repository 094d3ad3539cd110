"""Scores units by activations in forward passes of the dense model: Wanda-SP, FLAP, LoRAP, SlimLLM,
Týr and depth.

All methods except depth score heads and MLP channels of dense models. They use the inputs x of the
projections that write to the residual stream, with columns w_j.
"""

import torch
import torch.nn.functional as F

from ddp_prune.core.gates import GatedModel, Masks
from scores import Location, Score, by_columns, observe, observe_projections

EXEMPT = 0.01  # of a layer's channels
DAMPING = 0.01


def input_squares(gated: GatedModel, blocks: torch.Tensor) -> dict[Location, torch.Tensor]:
    """Return the mean square of every input of every projection over tokens, [I]."""
    sums: dict[Location, torch.Tensor] = {}

    def note(location: Location, x_TI: torch.Tensor, _y_TO: torch.Tensor) -> None:
        sums[location] = sums.get(location, 0.0) + x_TI.square().sum(0)

    observe_projections(gated, blocks, note)
    return {location: total / blocks.numel() for location, total in sums.items()}


def wanda_sp(gated: GatedModel, blocks: torch.Tensor) -> Masks:
    """Return Wanda (arXiv:2306.11695) summed over structures, as FLAP's authors compare with: Σ
    |w_j| · ‖x_j‖₂."""
    squares = input_squares(gated, blocks)
    return by_columns(gated, lambda location, w_OI: w_OI.abs().sum(0) * squares[location].sqrt())


def flap(gated: GatedModel, blocks: torch.Tensor) -> Masks:
    """Return FLAP's WIFV (arXiv:2312.11983): Var(x_j)·‖w_j‖², standardized per layer, summed over a
    unit's inputs.

    Not implemented: the bias that compensates for the mean of removed inputs, which a gate cannot
    represent; and one budget for heads and channels together, because every method of the study has
    one budget for each.
    """
    sums: dict[Location, torch.Tensor] = {}

    def note(location: Location, x_TI: torch.Tensor, _y_TO: torch.Tensor) -> None:
        x = x_TI.double()  # float64: the variance is a difference of two large sums
        sums[location] = sums.get(location, 0.0) + torch.stack([x.sum(0), x.square().sum(0)])

    def value(location: Location, w_OI: torch.Tensor) -> torch.Tensor:
        mean, square = sums[location] / blocks.numel()
        fluctuation = (square - mean.square()).clamp_min(0.0).float() * w_OI.square().sum(0)
        return (fluctuation - fluctuation.mean()) / fluctuation.std().clamp_min(1e-12)

    observe_projections(gated, blocks, note)
    return by_columns(gated, value)


def lorap(gated: GatedModel, blocks: torch.Tensor) -> Masks:
    """Return LoRAP's score of channels (arXiv:2404.09695): ‖W_gate[j]⊙x̂‖ + ‖W_up[j]⊙x̂‖ +
    ĥ_j‖w_j‖.

    x̂ and ĥ are root mean squares of the inputs of the MLP and of its output projection. LoRAP
    prunes layer by layer; here one pass of the dense model provides the inputs of all layers. As in
    LoRAP, the 1 % of lowest score is kept. LoRAP factorizes attention, which is not a mask, so
    heads are scored by Wanda-SP.
    """
    squares = input_squares(gated, blocks)
    outputs = by_columns(gated, lambda location, w_OI: (squares[location] * w_OI.square().sum(0)).sqrt())["mlp"]
    return {
        "attn": wanda_sp(gated, blocks)["attn"],
        "mlp": exempt_lowest(_input_norms(gated, squares) + outputs),
    }


def _input_norms(gated: GatedModel, squares: dict[Location, torch.Tensor]) -> torch.Tensor:
    """Return ‖W_gate[j]⊙x̂‖ + ‖W_up[j]⊙x̂‖ of every MLP channel, [L, U]."""
    sums = torch.zeros(gated.shapes["mlp"], device=next(iter(squares.values())).device)
    for projection in gated.widths.table.inputs("mlp"):
        for index, layer in enumerate(gated.layers):
            weight = layer.get_submodule(projection.name).weight.detach().float()  # type: ignore[operator]
            norms = (weight.square() @ squares[index, projection.name]).sqrt()
            sums[index] += norms.view(len(projection.units), -1).sum(0)
    return sums


def exempt_lowest(scores_LU: torch.Tensor) -> torch.Tensor:
    """Return the scores with the lowest 1 % of each layer above all others."""
    lowest = scores_LU.argsort(dim=1)[:, : round(EXEMPT * scores_LU.shape[1])]
    return scores_LU.scatter(1, lowest, torch.inf)


def slimllm(gated: GatedModel, blocks: torch.Tensor) -> Masks:
    """Return SlimLLM's scores (arXiv:2505.22689).

    A head has the cost Σ over outputs of |Pearson(O − O_h, O)|; heads with the largest cost are
    removed. The score of a channel is the sum of LoRAP's first two norms and ĥ_j·‖(w_jᵀV)⊙σ(λ/λ̄)‖,
    with V, λ the principal components of the MLP's output from one eigendecomposition per layer.
    The 1 % of lowest score is kept as in LoRAP. Not implemented: swaps of heads, ratios per layer,
    and the regression of outputs after pruning.
    """
    table, num_heads = gated.widths.table, gated.shapes["attn"][1]
    heads, mlp = table.output("attn").name, table.output("mlp").name
    squares: dict[Location, torch.Tensor] = {}
    moments: dict[Location, torch.Tensor] = {}  # per head, means of O, O², O_h, O_h², O_h·O
    outer: dict[Location, torch.Tensor] = {}  # mean of y yᵀ, and of y in the last row and column

    def note(location: Location, x_TI: torch.Tensor, y_TO: torch.Tensor) -> None:
        squares[location] = squares.get(location, 0.0) + x_TI.square().sum(0) / blocks.numel()
        if location[1] == heads:
            weight = gated.layers[location[0]].get_submodule(heads).weight.detach().float()  # type: ignore[operator]
            parts = zip(x_TI.chunk(num_heads, 1), weight.chunk(num_heads, 1), strict=True)
            sums = torch.stack([_products(x @ w.T, y_TO) for x, w in parts])
            moments[location] = moments.get(location, 0.0) + sums / blocks.numel()
        if location[1] == mlp:
            y = torch.cat([y_TO, torch.ones_like(y_TO[:, :1])], 1).double()
            outer[location] = outer.get(location, 0.0) + y.T @ y / blocks.numel()

    def output_norms(location: Location, w_OI: torch.Tensor) -> torch.Tensor:
        if location[1] != mlp:
            return torch.zeros_like(w_OI[0])
        mean = outer[location][:-1, -1]
        spread, vectors = torch.linalg.eigh(outer[location][:-1, :-1] - mean.outer(mean))
        weights = (spread / spread.mean().clamp_min(1e-12)).sigmoid()
        return squares[location].sqrt() * ((w_OI.T.double() @ vectors) * weights).norm(dim=1).float()

    observe_projections(gated, blocks, note)
    return {
        "attn": torch.stack([_dissimilarity(moments[index, heads]) for index in range(len(gated.layers))]),
        "mlp": exempt_lowest(_input_norms(gated, squares) + by_columns(gated, output_norms)["mlp"]),
    }


def _products(head_TO: torch.Tensor, all_TO: torch.Tensor) -> torch.Tensor:
    """Return sums over tokens, float64 [5, O]."""
    part, total = head_TO.double(), all_TO.double()
    return torch.stack([product.sum(0) for product in (total, total.square(), part, part.square(), part * total)])


def _dissimilarity(means_U5O: torch.Tensor) -> torch.Tensor:
    """Return −Σ |Pearson(O − O_h, O)|, [U]."""
    total, total_square, part, part_square, product = means_U5O.unbind(1)
    variance, covariance = total_square - total.square(), product - part * total
    rest = variance - 2 * covariance + part_square - part.square()
    return -((variance - covariance) / (variance * rest).clamp_min(1e-24).sqrt()).abs().sum(1).float()


def tyr(gated: GatedModel, blocks: torch.Tensor) -> Masks:
    """Return Týr-the-Pruner's local score (arXiv:2503.09657): the change of a projection's output
    without the unit.

    With H = XXᵀ of the inputs, damped by 1 % of its mean diagonal, and G = H·W, the score of a unit
    with inputs g is Σ W_g⊙(½[(H⁻¹)_gg]⁻¹·W_g + G_g). H of every layer is stored (inputs squared)
    and inverted. Not implemented: refitted weights, rounds of removal, and the search for the
    budget of each layer.
    """
    table = gated.widths.table
    units = {table.output(block).name: shape[1] for block, shape in gated.shapes.items()}
    hessians: dict[Location, torch.Tensor] = {}

    def note(location: Location, x_TI: torch.Tensor, _y_TO: torch.Tensor) -> None:
        if location[1] in units:
            hessians[location] = hessians.get(location, 0.0) + x_TI.T @ x_TI / blocks.numel()

    def value(location: Location, w_OI: torch.Tensor) -> torch.Tensor:
        hessian_II = hessians[location].double()
        damping = DAMPING * hessian_II.diagonal().mean().clamp_min(1e-12)
        hessian_II = hessian_II + damping * torch.eye(len(hessian_II), device=w_OI.device)
        num, w_IO = units[location[1]], w_OI.T.double()
        inverse_USS = torch.linalg.inv(hessian_II).unflatten(1, (num, -1)).unflatten(0, (num, -1))
        inverse_USS = inverse_USS.diagonal(dim1=0, dim2=2).permute(2, 0, 1)
        curved = torch.linalg.solve(inverse_USS, w_IO.unflatten(0, (num, -1))).flatten(0, 1)
        return (w_IO * (0.5 * curved + hessian_II @ w_IO)).sum(1).float()

    observe_projections(gated, blocks, note)
    return by_columns(gated, value)


def depth(gated: GatedModel, blocks: torch.Tensor) -> Masks:
    """Return ShortGPT's influence (arXiv:2403.03853): 1 − the mean cosine of a layer's input and
    output.

    All units of a layer have the same score, so whole layers are removed, and part of one layer to
    meet the budget.
    """
    sums = torch.zeros(len(gated.layers))

    def note(index: int, input_TH: torch.Tensor, output_TH: torch.Tensor) -> None:
        sums[index] += 1.0 - F.cosine_similarity(input_TH, output_TH, dim=-1).mean().cpu()

    observe(gated, blocks, dict(enumerate(gated.layers)), note)
    rows = {kind: sums[list(gated.sizes.routed_layers)] if kind == "experts" else sums for kind in gated.shapes}
    return {
        kind: rows[kind].view(-1, *[1] * (len(shape) - 1)).expand(shape).clone() for kind, shape in gated.shapes.items()
    }


METHODS = {
    "wanda-sp": Score(source="arXiv:2306.11695", score=wanda_sp, scope="layer", suits="dense"),
    "flap": Score(source="arXiv:2312.11983, without its bias", score=flap, suits="dense"),
    "lorap": Score(source="arXiv:2404.09695, channels; heads by Wanda-SP", score=lorap, scope="layer", suits="dense"),
    "slimllm": Score(source="arXiv:2505.22689, only its scores", score=slimllm, scope="layer", suits="dense"),
    "tyr": Score(source="arXiv:2503.09657, only its local scores", score=tyr, scope="layer", suits="dense"),
    "depth": Score(source="arXiv:2403.03853", score=depth),
}
