"""The command `ddp-vllm study`. torch is imported when it runs, not before."""

from pathlib import Path
from typing import Any

import click

from ddp_study import verbs
from ddp_study.tables import TABLES
from ddp_vllm.cli import echo
from ddp_vllm.options import fraction, list_option


@click.command()
@click.argument("table", type=click.Choice([*TABLES]))
@click.argument("model")
@list_option("--data", join=",".join, help="Training text, named as for prune. [default: as prune]")
@list_option("--other-data", metavar="TEXT,…", help="Further texts; each adds rows that are trained on it instead.")
@click.option("--test", type=click.Path(path_type=Path), required=True, help="Text file to evaluate on.")
@list_option("--methods", metavar="ROW,…", help="Rows of the table. [default: all]")
@list_option("--sparsity", of=fraction, default="0.2,0.5", help="Fractions to remove.")
@list_option("--seeds", of=int, default="0", help="Seeds of the order of the text.")
@click.option("--steps", type=int, help="Optimizer steps of a method that trains. [default: 1000]")
@click.option("--batch-size", type=int, help="Sequences per optimizer step. [default: 16]")
@click.option("--seq-len", type=int, help="Tokens per sequence. [default: 2048]")
@click.option("--samples", type=int, default=64, show_default=True, help="Sequences to compute scores on.")
@click.option("--polish", is_flag=True, help="For each score, add a row with trained scales of the kept units.")
@click.option("--detokenize", is_flag=True, help="Undo WikiText's spacing in the test text, as lm-eval does.")
@click.option(
    "--test-length", default=512, show_default=True, help="Tokens per window of the test text; the paper uses 128."
)
@click.option("--recipe", "recipe_file", type=click.Path(path_type=Path), help="TOML file with settings of a run.")
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="Folder to write.")
def study(table: str, model: str, output: Path, recipe_file: Path | None, data: str, **settings: Any) -> None:
    """Reproduce a TABLE of the paper for MODEL, every row at the same exact budget.

    \b
    ddp-vllm study methods MODEL --data TEXT --test wiki.test.txt --sparsity 0.2,0.5 -o DIR

    The page DIR/TABLE.html reports the paper's finding, whether it holds for MODEL, and the command
    of every row. TABLE.md and TABLE.csv have the same numbers. A row is a method or a file of
    masks, followed by settings after plus
    signs: paper, ours+scope=layer, ours+steps=25%. After +scales or +recovered, the scales of the
    kept units or all weights are trained once the masks are final: wanda-sp+scales,
    lorap+recovered. After an interruption, or with more rows, sparsities, seeds or tables, the same
    command computes only the missing cells.
    """
    page = verbs.study(table, model, output=output, recipe=recipe_file, verbose=True, data=data or None, **settings)
    echo(f"written: {page}")
