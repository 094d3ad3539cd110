"""Prints a checkpoint: the widths of its layers, its sizes, and statements about its quality and
training."""

from collections.abc import Iterable

from rich import table as rich_table
from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape
from rich.segment import Segment

from ddp_vllm.checkpoint import Checkpoint
from ddp_vllm.errors import printable
from ddp_vllm.pages.page import Table
from ddp_vllm.pages.summary import details, lead, sizes, width_table


class SafeConsole(Console):
    """A console that writes out the control characters of names, because a terminal would obey
    them."""

    @classmethod
    def of(cls, verbose: bool) -> "SafeConsole":
        """Return the console of a verb: silent unless `verbose`. Users copy lines, so they are not
        wrapped."""
        return cls(quiet=not verbose, soft_wrap=True)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else printable(text), style, control)


def print_checkpoint(checkpoint: Checkpoint, console: Console) -> None:
    """Print the main statements, the sizes, the widths layer by layer and all other statements."""
    for label, statement in lead(checkpoint):
        _print_line(console, label, statement)
    for label, dense, left in sizes(checkpoint):
        _print_line(console, label, f"{left:>15,} of {dense:>15,}   {1 - left / dense:6.1%} removed")
    print_table(width_table(checkpoint), console)
    for label, statement in details(checkpoint):
        _print_line(console, label, statement)


def print_table(table: Table, console: Console) -> None:
    """Print a table of a page; the first column is text, the others are numbers."""
    drawn = rich_table.Table()
    for number, heading in enumerate(table.headings):
        drawn.add_column(escape(printable(heading)), justify="right" if number else "left")
    for row in table.rows:
        drawn.add_row(*(escape(printable(str(cell))) for cell in row))
    console.print(drawn)


def _print_line(console: Console, label: str, text: str) -> None:
    """Print a line without interpreting markup or control characters: its words may come from a
    file."""
    console.print(escape(printable(f"{label:>24}  {text}")))
