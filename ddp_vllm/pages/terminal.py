"""Prints a checkpoint: the widths of its layers, its sizes, and statements about its quality and
training."""

import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from rich import table as rich_table
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from ddp_vllm.checkpoint import Checkpoint
from ddp_vllm.errors import printable
from ddp_vllm.pages.page import Table
from ddp_vllm.pages.summary import details, lead, sizes, width_table

FILE_WIDTH = 200  # characters of a table outside of a terminal; rich's 80 cut off columns


class SafeConsole(Console):
    """A console that prints names as they are: neither [brackets] nor :colons: are markup, and
    control characters, which a terminal would obey, are written out. Users copy lines, so they are
    not wrapped."""

    def __init__(self, *, width: int | None = None, **options: Any) -> None:
        if not (width or sys.stdout.isatty() or "COLUMNS" in os.environ):
            width = FILE_WIDTH
        super().__init__(width=width, markup=False, emoji=False, highlight=False, soft_wrap=True, **options)

    def print(self, *objects: Any, **options: Any) -> None:
        with suppress(OSError):
            super().print(*objects, **options)

    def on_broken_pipe(self) -> None:
        """Go on; rich would end the process."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else printable(text), style, control)


def print_checkpoint(checkpoint: Checkpoint, console: Console) -> None:
    """Print the main statements, the sizes, the widths layer by layer and all other statements."""
    for label, statement in lead(checkpoint):
        console.print(f"{label:>24}  {statement}")
    for label, dense, left in sizes(checkpoint):
        console.print(f"{label:>24}  {left:>15,} of {dense:>15,}   {1 - left / dense:6.1%} removed")
    print_table(width_table(checkpoint), console)
    for label, statement in details(checkpoint):
        console.print(f"{label:>24}  {statement}")


def print_table(table: Table, console: Console) -> None:
    """Print a table of a page; the first column is text, the others are numbers."""
    drawn = rich_table.Table()
    for number, heading in enumerate(table.headings):
        drawn.add_column(heading, justify="right" if number else "left")
    for row in table.rows:
        drawn.add_row(*map(str, row))
    console.print(drawn, soft_wrap=False)
