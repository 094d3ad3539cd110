"""The verbs prune, apply, inspect and report. torch is imported when one of them runs, not before."""

import os
from pathlib import Path
from typing import Any

import click

from ddp_prune.recipe import CHOICES, load_recipe
from ddp_vllm.checkpoint import check_output, read_checkpoint
from ddp_vllm.errors import SettingError


@click.command(context_settings={"show_default": False})
@click.argument("model")
@click.option(
    "--sparsity",
    type=float,
    help="Fraction to remove, between 0 and 1, of what can be pruned (not of embeddings, norms, routers, …).",
)
@click.option(
    "--budget",
    type=click.Choice(CHOICES["budget"]),
    help="What the fraction counts: units of each module type, or parameters, FLOPs or KV-cache bytes a token over all "
    "types together. [default: units]",
)
@click.option("--target-params", metavar="N", help="Instead of a fraction: parameters of the whole model, as 5.5B.")
@click.option("--target-flops", metavar="N", help="The same in FLOPs a token, at the recipe's context_length (2,048).")
@click.option("--target-kv-bytes", metavar="N", help="The same in bytes of KV cache a token, at 16 bits.")
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="Folder to write.")
@click.option(
    "--data",
    help="Hub dataset (name or name:configuration) or a .txt/.jsonl/.json/.parquet file; several, separated by commas, "
    "take turns. [default: HuggingFaceFW/fineweb-edu:sample-10BT]",
)
@click.option("--steps", type=int, help="Optimizer steps in all. [default: 1000]")
@click.option("--batch-size", type=int, help="Sequences a step. [default: 16]")
@click.option("--seq-len", type=int, help="Tokens a sequence. [default: 2048]")
@click.option("--seed", type=int, help="Orders the documents. [default: 0]")
@click.option("--head-unit", type=click.Choice(CHOICES["head_unit"]), help="What an attention unit is. [default: auto]")
@click.option("--group", type=click.Choice(CHOICES["group"]), help="Where the budget holds. [default: global]")
@click.option("--align", type=int, help="Make MLP widths multiples of this: 32, 64, 128. [default: 1]")
@click.option("--quant-friendly", is_flag=True, help="The same as --align 128.")
@click.option("--tp", type=int, help="Make every layer split over this many devices without padding. [default: 1]")
@click.option(
    "--controller", type=click.Choice(CHOICES["controller"]), help="How the budget is held. [default: gradual]"
)
@click.option("--shard", is_flag=True, default=None, help="Cut the frozen weights over all processes (FSDP2).")
@click.option("--recipe", "recipe_file", type=click.Path(path_type=Path), help="TOML file with any setting of a run.")
@click.option("--tracker", help="Also log to an accelerate tracker: tensorboard, wandb, …")
@click.option("--overwrite", is_flag=True, help="Replace an existing pruned folder.")
def prune(
    model: str, output: Path, recipe_file: Path | None, tracker: str | None, overwrite: bool, **settings: Any
) -> None:
    """Learn what MODEL can do without and write the pruned checkpoint.

    MODEL is a folder or a Hugging Face hub name. Its weights are frozen; gates on heads and channels are learned on
    text, those that close are removed. Interrupted, the same command goes on where it was. On several devices:
    accelerate launch -m ddp_vllm prune …
    """
    recipe = load_recipe(recipe_file, _settings(**settings) | {"model": model})
    check_output(output, overwrite=overwrite)
    # OpenMP threads that spin while they wait made a step 4.5 times slower beside one other busy process on 2 cores
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from rich.console import Console

    from ddp_prune.pipeline import prune as run

    run(recipe, output, overwrite=overwrite, tracker=tracker, console=Console())


def _settings(*, quant_friendly: bool, **settings: Any) -> dict[str, Any]:
    """Return the options as fields of a recipe. Raises: SettingError for two that contradict each other."""
    targets = {budget: settings.pop(f"target_{budget.replace('-', '_')}") for budget in CHOICES["budget"][1:]}
    given = {budget: target for budget, target in targets.items() if target is not None}
    if given:
        budget, target = given.popitem()
        if given or settings["budget"] not in (None, budget):
            other = next(iter(given), settings["budget"])
            raise SettingError(f"a target in {budget} and a budget in {other} are given; give one of them")
        settings |= {"budget": budget, "target": target}
    if quant_friendly:
        if settings["align"] not in (None, 128):
            raise SettingError(f"--quant-friendly is --align 128, but --align {settings['align']} is given; give one")
        settings["align"] = 128
    return settings


@click.command()
@click.argument("model")
@click.option("--masks", type=click.Path(path_type=Path), required=True, help="A ddp_masks.safetensors.")
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="Folder to write.")
@click.option("--tp", type=int, default=1, help="Refuse masks that do not split over this many devices. [default: 1]")
@click.option("--align", type=int, default=1, help="Move channels until widths are multiples of this. [default: 1]")
@click.option("--overwrite", is_flag=True, help="Replace an existing pruned folder.")
def apply(model: str, masks: Path, output: Path, tp: int, align: int, overwrite: bool) -> None:
    """Cut MODEL again from published masks alone; no text and no training needed."""
    check_output(output, overwrite=overwrite)
    from ddp_prune.export import apply_masks

    apply_masks(model, masks, output, tp=tp, align=align, overwrite=overwrite)
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
