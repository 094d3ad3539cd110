"""What was removed, as numbers and as a table in the terminal."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from rich.console import Console
from rich.table import Table

from ddp_vllm.checkpoint import Checkpoint


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Units of a pruned checkpoint beside those of its dense model."""

    kv_heads: int
    dense_kv_heads: int
    query_heads: int
    dense_query_heads: int
    channels: int
    dense_channels: int


def totals(checkpoint: Checkpoint) -> Totals:
    """Count what is left over all layers."""
    config, layers = checkpoint.config, checkpoint.layers
    num_heads = config["num_attention_heads"]
    return Totals(
        kv_heads=sum(layer.num_kv_heads for layer in layers),
        dense_kv_heads=len(layers) * (config.get("num_key_value_heads") or num_heads),
        query_heads=sum(layer.num_query_heads for layer in layers),
        dense_query_heads=len(layers) * num_heads,
        channels=sum(layer.intermediate_size for layer in layers),
        dense_channels=len(layers) * config["intermediate_size"],
    )


def removed_parameters(checkpoint: Checkpoint) -> int:
    """Return how many parameters of the dense model are gone, from the widths alone (biases included if kept ones are).

    A removed head takes head_dim rows of q and columns of o, a KV head head_dim rows of k and v, a channel a row of
    gate and up and a column of down; a removed block takes its norm and its output bias too.
    """
    hidden, counts = checkpoint.config["hidden_size"], totals(checkpoint)
    head_dim = checkpoint.head_dim
    biases = {name.split(".")[-2] for name in checkpoint.shapes if name.endswith(".bias")}
    per_query_head = head_dim * (2 * hidden + ("q_proj" in biases))
    per_kv_head = head_dim * (2 * hidden + ("k_proj" in biases) + ("v_proj" in biases))
    per_channel = 3 * hidden + ("gate_proj" in biases) + ("up_proj" in biases)
    per_attention, per_mlp = hidden * (1 + ("o_proj" in biases)), hidden * (1 + ("down_proj" in biases))
    return (
        (counts.dense_query_heads - counts.query_heads) * per_query_head
        + (counts.dense_kv_heads - counts.kv_heads) * per_kv_head
        + (counts.dense_channels - counts.channels) * per_channel
        + sum(not layer.num_kv_heads for layer in checkpoint.layers) * per_attention
        + sum(not layer.intermediate_size for layer in checkpoint.layers) * per_mlp
    )


def print_checkpoint(checkpoint: Checkpoint, console: Console) -> None:
    """Print the widths layer by layer, the totals and, if known, the quality."""
    config = checkpoint.config
    num_heads, width = config["num_attention_heads"], config["intermediate_size"]
    num_kv_heads = config.get("num_key_value_heads") or num_heads
    table = Table(title=f"{checkpoint.folder.name}: what is left, layer by layer")
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
            "█" * round(24 * share) + "░" * (24 - round(24 * share)),
        )
    console.print(table)
    counts = totals(checkpoint)
    console.print(_line("KV heads", counts.dense_kv_heads, counts.kv_heads))
    console.print(_line("query heads", counts.dense_query_heads, counts.query_heads))
    console.print(_line("MLP channels", counts.dense_channels, counts.channels))
    dense = checkpoint.num_parameters + removed_parameters(checkpoint)
    console.print(_line("parameters", dense, checkpoint.num_parameters))
    embeddings = sum(prod(shape) for name, shape in checkpoint.shapes.items() if "embed" in name or "lm_head" in name)
    console.print(_line("… without embeddings", dense - embeddings, checkpoint.num_parameters - embeddings))
    print_quality(checkpoint.provenance, console)


def _line(label: str, dense: int, kept: int) -> str:
    return f"{label:>22}  {kept:>13,} of {dense:>13,}   {1 - kept / dense:6.1%} removed"


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
