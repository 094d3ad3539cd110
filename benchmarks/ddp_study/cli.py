"""The verb study. torch is imported when it runs, not before."""

from pathlib import Path
from typing import Any

import click

from ddp_prune.cli import Sizes
from ddp_study import verbs
from ddp_study.tables import TABLES
from ddp_vllm.cli import echo


@click.command()
@click.argument("table", type=click.Choice([*TABLES]))
@click.argument("model")
@click.option(
    "--data",
    "texts",
    multiple=True,
    help="Text to learn on, named as for prune; given again, for rows of their own. [default: that of prune]",
)
@click.option("--test", type=click.Path(path_type=Path), required=True, help="Text file to judge by.")
@click.option("--methods", "names", help="Rows by commas. [default: those of the table]")
@click.option("--sparsity", type=Sizes(), default="0.2,0.5", show_default=True, help="Fractions to remove, by commas.")
@click.option("--seeds", default="0", show_default=True, help="Numbers by commas; they order the text.")
@click.option("--steps", type=int, help="Optimizer steps of a method that learns. [default: 1000]")
@click.option("--batch-size", type=int, help="Sequences an optimizer step. [default: 16]")
@click.option("--seq-len", type=int, help="Tokens a sequence. [default: 2048]")
@click.option("--samples", type=int, default=64, show_default=True, help="Sequences that scores are computed on.")
@click.option("--polish", is_flag=True, help="Let the scales of what a score keeps learn too, in a row of its own.")
@click.option("--detokenise", is_flag=True, help="Undo WikiText's spacing in the test text, as lm-eval does.")
@click.option(
    "--test-length", default=512, show_default=True, help="Tokens of a window of the test text; the paper's are 128."
)
@click.option("--recipe", "recipe_file", type=click.Path(path_type=Path), help="TOML file with any setting of a run.")
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="Folder to write.")
def study(
    table: str, model: str, output: Path, recipe_file: Path | None, names: str | None, texts: tuple[str, ...],
    **settings: Any,
) -> None:  # fmt: skip
    """Fill a TABLE of the paper for MODEL, row by row at the same exact budget.

    \b
    ddp-vllm study methods MODEL --data TEXT --test wiki.test.txt --sparsity 0.2,0.5 -o DIR

    The page DIR/TABLE.html says what the paper found, whether it holds here, and the command of every row; TABLE.md and
    TABLE.csv have the same numbers. A row is a method or a file of masks, with settings after plus signs: paper,
    ours+scope=layer, ours+steps=25%, wanda-sp+scales or lorap+recovered, where scales or all weights learn when the
    masks are done. Interrupted, the same command goes on; asked for more rows, sparsities, seeds or tables, it fills in
    what is not there yet.
    """
    if names:
        settings["methods"] = names.split(",")
    if texts:
        settings |= {"data": texts[0], "other_data": texts[1:]}
    page = verbs.study(table, model, output=output, recipe=recipe_file, verbose=True, **settings)
    echo(f"written: {page}")
