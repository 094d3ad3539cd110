"""What was removed from a checkpoint: units, parameters, FLOPs and KV cache, and what to know about its routing."""

from collections.abc import Callable, Mapping, Sequence
from math import exp, prod
from typing import Any

from ddp_vllm.checkpoint import Checkpoint
from ddp_vllm.costs import prices, whole_model
from ddp_vllm.evaluations import mean_loss
from ddp_vllm.families import dense_layers
from ddp_vllm.latency import Workload
from ddp_vllm.pages.page import Table
from ddp_vllm.remote_code.widths import LayerWidths
from ddp_vllm.results import measured_on, with_interval

Size = tuple[str, int, int]
"""What is counted, how much of it the dense model has, how much is left."""
CONTEXT_LENGTH = 2048  # tokens a FLOP count attends to, where the recipe states none

_UNITS: dict[str, Callable[[LayerWidths], int]] = {
    "KV heads": lambda layer: layer.num_kv_heads,
    "query heads": lambda layer: layer.num_query_heads,
    "MLP channels": lambda layer: layer.intermediate_size,
}
_UNITS_OF_EXPERTS: dict[str, Callable[[LayerWidths], int]] = {
    "experts": lambda layer: sum(map(bool, layer.expert_intermediate_sizes or ())),
    "expert channels": lambda layer: sum(layer.expert_intermediate_sizes or ()),
}


def facts(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return what `inspect` shows, as plain data: widths by layer, what is left of what, quality, and how it was made.

    Names are those of the checkpoint's own files.
    """
    sizes = (*units(checkpoint), *footprint(checkpoint), without_embeddings(checkpoint))
    made = {key: checkpoint.provenance.get(key) for key in ("recipe", "perplexity", "latency", "recovery")}
    return {
        "name": checkpoint.folder.resolve().name,
        "model_type": checkpoint.config["model_type"],
        "parameters": checkpoint.num_parameters,
        "layers": checkpoint.config["ddp_layers"],
        "sizes": [{"what": label, "dense": dense, "pruned": left} for label, dense, left in sizes],
        "notes": routing_notes(checkpoint),
        **made,
    }


def has_experts(checkpoint: Checkpoint) -> bool:
    """Say whether routed experts were pruned, and nothing else."""
    return checkpoint.widths.table.has_experts


def units(checkpoint: Checkpoint) -> list[Size]:
    """Count each kind of unit that can be pruned in such a model, over all layers."""
    dense = dense_layers(checkpoint.config)
    kinds = _UNITS_OF_EXPERTS if has_experts(checkpoint) else _UNITS
    return [(label, sum(map(count, dense)), sum(map(count, checkpoint.layers))) for label, count in kinds.items()]


def footprint(checkpoint: Checkpoint) -> list[Size]:
    """Count the whole model's parameters, a token's FLOPs, and a token's bytes of KV cache at 16 bits."""
    context = _context(checkpoint)
    parameters = checkpoint.num_parameters
    found = [("parameters", parameters + removed_parameters(checkpoint), parameters)]
    for budget, label in (("flops", f"FLOPs a token at {context:,}"), ("kv-bytes", "KV-cache bytes a token")):
        config = checkpoint.stock or checkpoint.config
        left = whole_model(budget, config, checkpoint.layers, checkpoint.shapes, context)
        found.append((label, round(left + _removed(budget, checkpoint)), round(left)))
    return found


def conclusion(checkpoint: Checkpoint) -> str:
    """Say in one sentence what is gone and what that cost."""
    _, dense, left = footprint(checkpoint)[0]
    gone = f"{1 - left / dense:.1%} of the parameters are gone"
    quality = checkpoint.provenance.get("perplexity")
    if not quality:
        return f"{gone}."
    return " ".join([f"{gone}; perplexity on held-out text: {perplexities(quality)}.", *adaptation(quality)])


def without_embeddings(checkpoint: Checkpoint) -> Size:
    """Count the parameters that are no embeddings."""
    embeddings = sum(prod(shape) for name, shape in checkpoint.shapes.items() if "embed" in name or "lm_head" in name)
    left = checkpoint.num_parameters - embeddings
    return "… without embeddings", left + removed_parameters(checkpoint), left


def removed_parameters(checkpoint: Checkpoint) -> int:
    """Return how many parameters of the dense model are gone, from the widths alone (biases included if kept ones are).

    Beside what units cost, a removed block takes its norms and its output bias.
    """
    priced = int(_removed("params", checkpoint))
    if has_experts(checkpoint):
        _, dense, left = units(checkpoint)[0]
        return priced + (int(checkpoint.config["hidden_size"]) * (dense - left) if checkpoint.stock else 0)
    without_attention = sum(not layer.num_kv_heads for layer in checkpoint.layers)
    without_mlp = sum(not layer.intermediate_size for layer in checkpoint.layers)
    of_heads = {
        name.split(".")[-2]: prod(shape)
        for name, shape in checkpoint.shapes.items()
        if ".self_attn." in name and "_norm." in name
    }
    attention = _vectors("attn", checkpoint) + sum(of_heads.values())
    return priced + attention * without_attention + _vectors("mlp", checkpoint) * without_mlp


def _vectors(block: str, checkpoint: Checkpoint) -> int:
    """Return the parameters in a block's norms and output bias."""
    table = checkpoint.widths.table
    bias = f".{table.output(block).name}.bias"
    count = len(table.norms[block]) + any(name.endswith(bias) for name in checkpoint.shapes)
    return int(checkpoint.config["hidden_size"]) * count


def _removed(budget: str, checkpoint: Checkpoint) -> float:
    """Return what the units that are gone cost, as `budget` counts; whole experts leave a token as many as before."""
    if checkpoint.stock and budget == "flops":
        return 0.0
    config = checkpoint.config
    layers = prices(budget, config, checkpoint.shapes, _context(checkpoint))
    pairs = zip(layers, dense_layers(config), checkpoint.layers, strict=True)
    return sum(price.of(dense) - price.of(kept) for price, dense, kept in pairs)


def _context(checkpoint: Checkpoint) -> int:
    return int(checkpoint.provenance.get("recipe", {}).get("context_length", CONTEXT_LENGTH))


def size_table(checkpoint: Checkpoint) -> Table:
    """Return what is left of each kind of unit, and of what they cost."""
    rows = [
        [label, f"{dense:,}", f"{left:,}", f"{1 - left / dense:.1%}"]
        for label, dense, left in (*units(checkpoint), *footprint(checkpoint))
    ]
    return Table(headings=["", "dense", "pruned", "removed"], rows=rows)


def routing_notes(checkpoint: Checkpoint) -> list[str]:
    """Return a sentence for each thing about the routing that a reader should know; none for a dense model."""
    notes, chosen = [], checkpoint.config.get("num_experts_per_tok", 0)
    counts = times_chosen(checkpoint.provenance)
    idle = {index: row.count(0) for index, row in counts.items() if 0 in row}
    if idle:
        layers = ", ".join(f"{index} ({number} of {len(counts[index])})" for index, number in idle.items())
        notes.append(
            f"experts that no token of the text was sent to, in layers {layers}; nothing was learned about "
            "them and they counted as average, so other text may miss what they lost"
        )
    left = {
        index: sum(map(bool, layer.expert_intermediate_sizes))
        for index, layer in enumerate(checkpoint.layers)
        if layer.expert_intermediate_sizes is not None
    }
    if few := [f"{index} ({number} left)" for index, number in left.items() if number < chosen]:
        notes.append(
            f"fewer experts left than the {chosen} each token is sent to, in layers {', '.join(few)}; the router still "
            "scores removed ones, and what it sends there adds nothing"
        )
    return notes


def times_chosen(provenance: Mapping[str, Any]) -> dict[int, list[int]]:
    """Return how often each expert was chosen while learning, layer -> counts; {} if unknown."""
    return {int(layer): counts for layer, counts in provenance.get("routing", {}).get("chosen", {}).items()}


def trained_together(provenance: Mapping[str, Any]) -> bool:
    """Say whether the weights were trained together with the masks; a masks file alone does not hold these weights."""
    return bool(provenance.get("run", {}).get("train") == "weights")


def learning(provenance: Mapping[str, Any]) -> str:
    """Say what became of the weights."""
    recovery, together = provenance.get("recovery"), trained_together(provenance)
    at_first = "Weights learned with the masks" if together else "Weights were frozen"
    if together and "applied_to" in provenance:
        at_first = (
            f"The masks were learned while weights trained; this folder {'started from' if recovery else 'holds'} the "
            "dense model's weights"
        )
    if not recovery:
        return f"{at_first}." if together else f"{at_first} throughout."
    recipe = recovery.get("recipe", {})
    what = "low-rank additions to the weights" if recipe.get("method") == "lora" else "the weights that stay"
    tokens = f"{recipe.get('tokens', 0):,} tokens of {texts_of(provenance)}"
    return f"{at_first}{'' if together else ' meanwhile'}; then {what} learned from the dense model on {tokens}."


def prediction(provenance: Mapping[str, Any]) -> str:
    """Say what a budget in measured time promises; "" for another budget."""
    if not (latency := provenance.get("latency")):
        return ""
    speed = with_interval(latency["speedup"], latency["low"], latency["high"])
    return f"{speed} the dense model's speed ({Workload(**latency['workload'])}; {measured_on(latency)})"


def texts_of(provenance: Mapping[str, Any]) -> str:
    """Return the names of the texts that were learned on last, each once and without folders."""
    learned_on = provenance.get("recovery") or provenance
    return bare_names(learned_on.get("texts") or ["unknown origin"])


def bare_names(names: Sequence[str]) -> str:
    """Return the names of texts, each once and without the folders of whoever had them."""
    return ", ".join(dict.fromkeys(name.rsplit("/", 1)[-1] for name in names))


def perplexities(quality: Mapping[str, Any]) -> str:
    """Return the held-out perplexity of each model that a checkpoint went through, in their order."""
    return " → ".join(f"{who} {quality[who]:.2f}" for who in ("dense", "pruned", "recovered") if who in quality)


def adaptation(quality: Mapping[str, Any]) -> list[str]:
    """Return a sentence if the model reads the held-out text better than the dense one does; [] if not."""
    last = next(who for who in ("recovered", "pruned", "dense") if who in quality)
    if not quality[last] < quality["dense"]:
        return []
    return [
        f"The {last} model reads this text better than the dense one because it was trained on text of the same kind: "
        "it adapted to that text, so these figures do not show what pruning cost on other text."
    ]


def perplexity_table(losses: Mapping[str, Sequence[float]], quality: Mapping[str, Any]) -> Table:
    """Return perplexities with standard errors over the held-out blocks; ratios' from the blocks' differences.

    losses: of each block, by model. quality: what `prune` and `recover` store of the text: the tokens of each block,
    and the agreement of each model with the dense one (KL in nats per token, and how often the likeliest is the same).
    """
    agreement = quality.get("agreement")
    rows, lines = [], dict(losses)
    for name in list(losses)[1:]:
        pairs = zip(losses["dense"], losses[name], strict=True)
        lines[f"{name} / dense"] = [after - before for before, after in pairs]
    for label, values in lines.items():
        mean, error = mean_loss(values, quality.get("block_tokens"))
        value = exp(mean)
        found = (agreement or {}).get(label)
        near = [f"{found['kl']:.3f}", f"{found['top1']:.1%}"] if found else ["–", "–"]
        spread = "–" if error is None else f"± {value * error:.2f}"
        rows.append([label, f"{value:.2f}", spread, *(near if agreement else [])])
    headings = [
        "",
        "perplexity",
        "standard error",
        *(["KL to dense, nats", "same likeliest token"] if agreement else []),
    ]
    return Table(headings=headings, rows=rows)
