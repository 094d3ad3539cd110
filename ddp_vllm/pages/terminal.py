"""What `inspect` prints of a checkpoint: widths layer by layer, totals, and the quality it states."""

import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from rich import table as rich_table
from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape
from rich.segment import Segment

from ddp_vllm.checkpoint import Checkpoint
from ddp_vllm.errors import printable
from ddp_vllm.evaluations import fidelity
from ddp_vllm.pages.page import Table
from ddp_vllm.pages.summary import (
    Size,
    adaptation,
    footprint,
    has_experts,
    perplexities,
    prediction,
    routing_notes,
    times_chosen,
    units,
    without_embeddings,
)
from ddp_vllm.remote_code.widths import dense_expert_size, dense_kv_heads

BAR = 24  # characters


class SafeConsole(Console):
    """A console that shows the control characters of names in what it prints; a terminal would obey them."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else printable(text), style, control)


def print_checkpoint(checkpoint: Checkpoint, console: Console) -> None:
    """Print the widths layer by layer, the totals and, if known, the quality."""
    config, name = checkpoint.config, escape(printable(checkpoint.folder.name))
    if has_experts(checkpoint):
        width = dense_expert_size(config)
        console.print(
            _rich(_expert_widths(checkpoint), f"{name}: what is left of the experts, of {width:,} channels each")
        )
    else:
        console.print(_rich(_layer_widths(checkpoint), f"{name}: what is left, layer by layer"))
    for size in (*units(checkpoint), *footprint(checkpoint), without_embeddings(checkpoint)):
        console.print(_line(size))
    _print_quality(checkpoint.provenance, console)
    for note in routing_notes(checkpoint):
        _say(console, "note", note)


def _layer_widths(checkpoint: Checkpoint) -> Table:
    config = checkpoint.config
    width = config["intermediate_size"]
    headings = [f"KV heads\nof {dense_kv_heads(config)}", f"query heads\nof {config['num_attention_heads']}"]
    rows = []
    for index, layer in enumerate(checkpoint.layers):
        counts = (layer.num_kv_heads, layer.num_query_heads, layer.intermediate_size)
        rows.append(
            [index, *(f"{count:,}" if count else "–" for count in counts), _bar(layer.intermediate_size / width)]
        )
    return Table(headings=["layer", *headings, f"MLP channels\nof {width:,}", ""], rows=rows)


def _expert_widths(checkpoint: Checkpoint) -> Table:
    width, chosen = dense_expert_size(checkpoint.config), times_chosen(checkpoint.provenance)
    rows = []
    for index, layer in enumerate(checkpoint.layers):
        if (sizes := layer.expert_intermediate_sizes) is None:
            continue
        left = [size for size in sizes if size]
        spread = (min(left), statistics.median_low(left), max(left)) if left else (0, 0, 0)
        idle = chosen[index].count(0) if index in chosen else "–"
        share = sum(sizes) / (len(sizes) * width)
        row = (f"{len(left)}/{len(sizes)}", *(f"{size:,}" for size in spread), idle, f"{share:.0%}", _bar(share))
        rows.append([index, *row])
    headings = ["experts\nleft", "narrowest\nleft", "median", "widest", "never\nchosen", "channels\nleft"]
    return Table(headings=["layer", *headings, ""], rows=rows)


def _rich(table: Table, title: str) -> rich_table.Table:
    """Return a table as rich draws it; the last column is a bar."""
    drawn = rich_table.Table(title=title)
    for heading in table.headings:
        drawn.add_column(heading, justify="right", min_width=None if heading else BAR)
    for row in table.rows:
        drawn.add_row(*map(str, row))
    return drawn


def _bar(share: float) -> str:
    return "█" * round(BAR * share) + "░" * (BAR - round(BAR * share))


def _line(size: Size) -> str:
    label, dense, left = size
    return f"{label:>22}  {left:>15,} of {dense:>15,}   {1 - left / dense:6.1%} removed"


def _print_quality(provenance: Mapping[str, Any], console: Console) -> None:
    """Print held-out perplexities and what rounding changed, if the checkpoint says so."""
    if quality := provenance.get("perplexity"):
        _say(console, "held-out perplexity", f"{perplexities(quality)} ({quality['tokens']:,} tokens)")
        for sentence in adaptation(quality):
            _say(console, "note", sentence)
        if near := fidelity(quality):
            _say(console, "beside dense", near)
    if promised := prediction(provenance):
        _say(console, "predicted", promised)
    for kind, change in provenance.get("rounding", {}).items():
        _say(
            console,
            f"rounding of {kind}",
            f"sparsity was {change['raw_sparsity']:.1%} before; {change['dropped']:,} more dropped, "
            f"{change['revived']:,} revived",
        )


def _say(console: Console, label: str, text: str) -> None:
    """Print a line whose words may be from a file: neither markup nor control characters."""
    console.print(escape(printable(f"{label:>22}  {text}")))
