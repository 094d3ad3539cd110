"""What was removed, as numbers and as a table in the terminal."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ddp_prune.costs import dense_layers, prices, whole_model
from ddp_prune.families import FAMILIES
from ddp_prune.recipe import Recipe
from ddp_vllm.checkpoint import MODEL_TYPE_PREFIX, Checkpoint
from ddp_vllm.errors import CheckpointError
from ddp_vllm.remote_code.widths import dense_expert_size, dense_kv_heads


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Units of a pruned checkpoint beside those of its dense model."""

    kv_heads: int
    dense_kv_heads: int
    query_heads: int
    dense_query_heads: int
    channels: int
    dense_channels: int
    expert_channels: int
    dense_expert_channels: int
    experts: int
    dense_experts: int

    @property
    def rows(self) -> list[tuple[str, int, int]]:
        """Return (label, dense, left) of each kind of unit that can be pruned in such a model."""
        if self.dense_experts:
            return [
                ("experts", self.dense_experts, self.experts),
                ("expert channels", self.dense_expert_channels, self.expert_channels),
            ]
        return [
            ("KV heads", self.dense_kv_heads, self.kv_heads),
            ("query heads", self.dense_query_heads, self.query_heads),
            ("MLP channels", self.dense_channels, self.channels),
        ]


def totals(checkpoint: Checkpoint) -> Totals:
    """Count what is left over all layers."""
    config, layers = checkpoint.config, checkpoint.layers
    num_heads = config["num_attention_heads"]
    routed = [layer.expert_intermediate_sizes for layer in layers if layer.expert_intermediate_sizes is not None]
    experts = [size for sizes in routed for size in sizes]
    return Totals(
        expert_channels=sum(experts),
        dense_expert_channels=len(experts) * dense_expert_size(config),
        experts=sum(size > 0 for size in experts),
        dense_experts=len(experts),
        kv_heads=sum(layer.num_kv_heads for layer in layers),
        dense_kv_heads=len(layers) * dense_kv_heads(config),
        query_heads=sum(layer.num_query_heads for layer in layers),
        dense_query_heads=len(layers) * num_heads,
        channels=sum(layer.intermediate_size for layer in layers),
        dense_channels=(len(layers) - len(routed)) * config["intermediate_size"],
    )


def routing_notes(checkpoint: Checkpoint) -> list[str]:
    """Return a sentence for each thing about the routing that a reader should know; none for a dense model."""
    notes, chosen = [], checkpoint.config.get("num_experts_per_tok", 0)
    counts = checkpoint.provenance.get("routing", {}).get("chosen", {})
    idle = {index: row.count(0) for index, row in counts.items() if 0 in row}
    if idle:
        layers = ", ".join(f"{index} ({number} of {len(counts[index])})" for index, number in idle.items())
        notes.append(
            f"experts that no token of the text was sent to, in layers {layers}; nothing was learned about "
            "them and they counted as average, so other text may miss what they lost"
        )
    few = {
        index: sum(size > 0 for size in layer.expert_intermediate_sizes)
        for index, layer in enumerate(checkpoint.layers)
        if layer.expert_intermediate_sizes is not None and sum(map(bool, layer.expert_intermediate_sizes)) < chosen
    }
    if few:
        layers = ", ".join(f"{index} ({left} left)" for index, left in few.items())
        notes.append(
            f"fewer experts left than the {chosen} each token is sent to, in layers {layers}; the router still scores "
            "removed ones, and what it sends there adds nothing"
        )
    return notes


def removed_parameters(checkpoint: Checkpoint) -> int:
    """Return how many parameters of the dense model are gone, from the widths alone (biases included if kept ones are).

    Beside what units cost, a removed block takes its norms and its output bias. Raises: CheckpointError for a family
    without a row.
    """
    config, shapes = checkpoint.config, checkpoint.shapes
    family = FAMILIES.get(str(config.get("model_type")).removeprefix(MODEL_TYPE_PREFIX))
    if family is None:
        raise CheckpointError(
            f"{checkpoint.folder}: model_type {config.get('model_type')!r} is unknown; a newer ddp-vllm wrote it?"
        )
    biases = {name.split(".")[-2] for name in shapes if name.endswith(".bias")}
    of_heads = {
        name.split(".")[-2]: prod(shape) for name, shape in shapes.items() if ".self_attn." in name and "_norm." in name
    }
    attention = config["hidden_size"] * (len(family.attention_norms) + ("o_proj" in biases)) + sum(of_heads.values())
    mlp = config["hidden_size"] * (len(family.mlp_norms) + ("down_proj" in biases))
    without_mlp = [
        not layer.intermediate_size and layer.expert_intermediate_sizes is None for layer in checkpoint.layers
    ]
    without_attention = [not layer.num_kv_heads for layer in checkpoint.layers]
    return int(_removed("params", checkpoint)) + attention * sum(without_attention) + mlp * sum(without_mlp)


def _removed(budget: str, checkpoint: Checkpoint) -> float:
    """Return what the units that are gone cost, as `budget` counts."""
    config = checkpoint.config
    layers = prices(budget, config, checkpoint.shapes, _context(checkpoint))
    pairs = zip(layers, dense_layers(config), checkpoint.layers, strict=True)
    return sum(price.of(dense) - price.of(kept) for price, dense, kept in pairs)


def _context(checkpoint: Checkpoint) -> int:
    return int(checkpoint.provenance.get("recipe", {}).get("context_length", Recipe.context_length))


def footprint(checkpoint: Checkpoint) -> list[tuple[str, int, int]]:
    """Return (label, dense, left) of the whole model: parameters; a token's FLOPs, and its KV cache at 16 bits."""
    context = _context(checkpoint)
    parameters = checkpoint.num_parameters
    rows = [("parameters", parameters + removed_parameters(checkpoint), parameters)]
    for budget, label in (
        ("flops", f"FLOPs a token at {context:,}"),
        ("kv-bytes", "KV-cache bytes a token"),
    ):
        left = whole_model(budget, checkpoint.config, checkpoint.layers, checkpoint.shapes, context)
        rows.append((label, round(left + _removed(budget, checkpoint)), round(left)))
    return rows


def print_checkpoint(checkpoint: Checkpoint, console: Console) -> None:
    """Print the widths layer by layer, the totals and, if known, the quality."""
    counts = totals(checkpoint)
    console.print(_expert_table(checkpoint) if counts.dense_experts else _layer_table(checkpoint))
    for label, dense, kept in counts.rows:
        console.print(_line(label, dense, kept))
    for label, dense, kept in footprint(checkpoint):
        console.print(_line(label, dense, kept))
    dense = checkpoint.num_parameters + removed_parameters(checkpoint)
    embeddings = sum(prod(shape) for name, shape in checkpoint.shapes.items() if "embed" in name or "lm_head" in name)
    console.print(_line("… without embeddings", dense - embeddings, checkpoint.num_parameters - embeddings))
    print_quality(checkpoint.provenance, console)
    for note in routing_notes(checkpoint):
        console.print(f"{'note':>22}  {note}")


def _layer_table(checkpoint: Checkpoint) -> Table:
    config = checkpoint.config
    num_heads, width = config["num_attention_heads"], config["intermediate_size"]
    num_kv_heads = dense_kv_heads(config)
    table = Table(title=f"{escape(checkpoint.folder.name)}: what is left, layer by layer")
    table.add_column("layer", justify="right")
    table.add_column(f"KV heads\nof {num_kv_heads}", justify="right")
    table.add_column(f"query heads\nof {num_heads}", justify="right")
    table.add_column(f"MLP channels\nof {width:,}", justify="right")
    table.add_column("", min_width=24)
    for index, layer in enumerate(checkpoint.layers):
        share = layer.intermediate_size / width
        table.add_row(
            str(index),
            str(layer.num_kv_heads or "–"),
            str(layer.num_query_heads or "–"),
            f"{layer.intermediate_size:,}" if layer.intermediate_size else "–",
            _bar(share),
        )
    return table


def _expert_table(checkpoint: Checkpoint) -> Table:
    width = dense_expert_size(checkpoint.config)
    chosen = checkpoint.provenance.get("routing", {}).get("chosen", {})
    table = Table(title=f"{escape(checkpoint.folder.name)}: what is left of the experts, of {width:,} channels each")
    for heading in ("layer", "experts\nleft", "narrowest\nleft", "median", "widest", "never\nchosen", "channels\nleft"):
        table.add_column(heading, justify="right")
    table.add_column("", min_width=24)
    for index, layer in enumerate(checkpoint.layers):
        sizes = layer.expert_intermediate_sizes
        if sizes is None:
            continue
        left = [size for size in sizes if size]
        spread = (min(left), statistics.median_low(left), max(left)) if left else (0, 0, 0)
        idle = str(chosen[str(index)].count(0)) if str(index) in chosen else "–"
        share = sum(sizes) / (len(sizes) * width)
        row = (f"{len(left)}/{len(sizes)}", *(f"{size:,}" for size in spread), idle, f"{share:.0%}", _bar(share))
        table.add_row(str(index), *row)
    return table


def _bar(share: float) -> str:
    return "█" * round(24 * share) + "░" * (24 - round(24 * share))


def _line(label: str, dense: int, kept: int) -> str:
    return f"{label:>22}  {kept:>15,} of {dense:>15,}   {1 - kept / dense:6.1%} removed"


def print_quality(provenance: Mapping[str, Any], console: Console) -> None:
    """Print held-out perplexities and what rounding changed, if the checkpoint says so."""
    if quality := provenance.get("perplexity"):
        console.print(
            f"{'held-out perplexity':>22}  dense {quality['dense']:.2f} → pruned {quality['pruned']:.2f} "
            f"({quality['tokens']:,} tokens)"
        )
    for kind, change in provenance.get("rounding", {}).items():
        console.print(
            f"{f'rounding of {kind}':>22}  sparsity was {change['raw_sparsity']:.1%} before; "
            f"{change['dropped']:,} more dropped, {change['revived']:,} revived"
        )
