"""The verbs prune, apply, inspect and report. torch is imported when one of them runs, not before."""

import os
from pathlib import Path
from typing import Any

import click

from ddp_prune.recipe import CHOICES, load_recipe
from ddp_vllm.checkpoint import check_output, read_checkpoint


@click.command(context_settings={"show_default": False})
@click.argument("model")
@click.option("--sparsity", type=float, help="Fraction of heads and channels to remove, between 0 and 1.")
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="Folder to write.")
@click.option("--data", help="Hub dataset (name or name:configuration) or a .txt/.jsonl/.json/.parquet file.")
@click.option("--steps", type=int, help="Optimizer steps in all. [default: 1000]")
@click.option("--batch-size", type=int, help="Sequences a step. [default: 16]")
@click.option("--seq-len", type=int, help="Tokens a sequence. [default: 2048]")
@click.option("--seed", type=int, help="Orders the documents. [default: 0]")
@click.option("--head-unit", type=click.Choice(CHOICES["head_unit"]), help="What an attention unit is. [default: auto]")
@click.option("--group", type=click.Choice(CHOICES["group"]), help="Where the budget holds. [default: global]")
@click.option("--align", type=int, help="Make MLP widths multiples of this: 32, 64, 128. [default: 1]")
@click.option("--budget", type=click.Choice(CHOICES["budget"]), help="How the budget is held. [default: feedback]")
@click.option("--recipe", "recipe_file", type=click.Path(path_type=Path), help="TOML file with any setting of a run.")
@click.option("--tracker", help="Also log to an accelerate tracker: tensorboard, wandb, …")
@click.option("--overwrite", is_flag=True, help="Replace an existing pruned folder.")
def prune(
    model: str, output: Path, recipe_file: Path | None, tracker: str | None, overwrite: bool, **settings: Any
) -> None:
    """Learn what MODEL can do without and write the pruned checkpoint.

    MODEL is a folder or a Hugging Face hub name. Its weights are frozen; gates on heads and channels are learned on
    text, those that close are removed. Interrupted, the same command goes on where it was.
    """
    recipe = load_recipe(recipe_file, settings | {"model": model})
    check_output(output, overwrite=overwrite)
    # OpenMP threads that spin while they wait made a step 4.5 times slower beside one other busy process on 2 cores
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from rich.console import Console

    from ddp_prune.pipeline import prune as run

    run(recipe, output, overwrite=overwrite, tracker=tracker, console=Console())


@click.command()
@click.argument("model")
@click.option("--masks", type=click.Path(path_type=Path), required=True, help="A ddp_masks.safetensors.")
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="Folder to write.")
@click.option("--overwrite", is_flag=True, help="Replace an existing pruned folder.")
def apply(model: str, masks: Path, output: Path, overwrite: bool) -> None:
    """Cut MODEL again from published masks alone; no text and no training needed."""
    check_output(output, overwrite=overwrite)
    from ddp_prune.export import apply_masks

    apply_masks(model, masks, output, overwrite=overwrite)
    click.echo(f"written: {output}")


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
def inspect(folder: Path) -> None:
    """Check a pruned checkpoint and show what each layer has left."""
    checkpoint = read_checkpoint(folder)
    from rich.console import Console

    from ddp_prune.summary import print_checkpoint

    print_checkpoint(checkpoint, Console())


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Where to write. [default: FOLDER itself]")
def report(folder: Path, output: Path | None) -> None:
    """Draw what was removed: report.html, and its pictures and numbers in report/.

    `prune` does this by itself; FOLDER is any pruned checkpoint.
    """
    checkpoint = read_checkpoint(folder)
    from ddp_prune.report import write_report

    click.echo(f"written: {write_report(checkpoint, output or folder)}")
