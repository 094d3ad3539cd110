"""The commands of pruning and recovery. torch is imported when one of them runs, not before.

Every field of a `Recipe` is an option of `prune`, except those in `INSTEAD`.
"""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import click

from ddp_prune import verbs
from ddp_prune.recipe import Recipe
from ddp_prune.recovery_recipe import INHERITED, RecoveryRecipe
from ddp_vllm.cli import echo
from ddp_vllm.errors import SettingError
from ddp_vllm.masks import read_provenance
from ddp_vllm.options import (
    Grouped,
    given,
    json_option,
    lines_to_stderr,
    output_option,
    overwrite_option,
    quiet_option,
    recipe_option,
    settings_options,
)
from ddp_vllm.pages.summary import summary, trained_together

TARGETS = {  # budget -> help text of its option
    "params": "Parameters of the whole model after pruning, for example 5.5B. Replaces --sparsity.",
    "flops": "FLOPs per token of the whole model after pruning, at --context-length. Replaces --sparsity.",
    "kv-bytes": "Bytes of KV cache per token after pruning, at 16 bits. Replaces --sparsity.",
}
# field -> the options in its place: an argument, one per budget, a table, a setting for research
# only
INSTEAD = {
    "model": (), "alm": (),
    "target": [click.option(f"--target-{budget}", metavar="N", help=text) for budget, text in TARGETS.items()],
}  # fmt: skip
# of the options that are no fields
OUTPUT_HEADING = {"output": "Basic", "tracker": "Rarely needed"}
TARGET_OPTIONS = {budget: f"target_{budget.replace('-', '_')}" for budget in TARGETS}
HEADINGS = OUTPUT_HEADING | dict.fromkeys(TARGET_OPTIONS.values(), "Budget")

tracker_option = click.option("--tracker", help="Also log to an accelerate tracker: tensorboard, wandb, …")


def end_command() -> None:
    """End the group of processes that the verbs of a command share."""
    from ddp_prune.core.processes import leave_group

    leave_group()


def _with_target(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings with the fields `budget` and `target` in place of a --target option.
    Raises: SettingError."""
    budgets = [budget for budget, option in TARGET_OPTIONS.items() if option in settings]
    if not budgets:
        return settings
    if len({*budgets, settings.get("budget", budgets[0])}) > 1:
        other = next(name for name in (*budgets[1:], settings.get("budget")) if name)
        raise SettingError(f"a target in {budgets[0]} and a budget in {other} are given; give one of them")
    return settings | {"budget": budgets[0], "target": settings.pop(TARGET_OPTIONS[budgets[0]])}


@click.command(cls=Grouped, settings=Recipe, headings=HEADINGS)
@click.argument("model")
@settings_options(Recipe, instead=INSTEAD)
@recipe_option
@tracker_option
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Folder to write the model to.")
@overwrite_option
@click.option(
    "--dry-run", is_flag=True, help="Print what would be removed and the estimated memory and time, then exit."
)
@json_option
@quiet_option
@click.option("--on", help="With --dry-run: estimate for these GPUs, for example h100-80gb or 2xh100-80gb.")
def prune(
    model: str,
    output: Path | None,
    recipe_file: Path | None,
    tracker: str | None,
    overwrite: bool,
    dry_run: bool,
    as_json: bool,
    quiet: bool,
    on: str | None,
    **settings: Any,
) -> None:
    """Prune MODEL and write the smaller checkpoint.

    \b
    ddp-vllm prune MODEL --speedup 1.25 --data my_chats.jsonl --minutes 60 -o ./pruned

    MODEL is a folder or a Hugging Face Hub name. Pruning trains a gate for every head and channel
    on text; units whose gates close are removed. The remaining weights are distilled from the dense
    model at the same time; ddp-vllm recover does that for longer. Several sizes, such as --sparsity
    0.1,0.2,0.3, come from one search and are written to one folder each. After an interruption, the
    same command resumes. On several devices: accelerate launch -m ddp_vllm prune …
    """
    # of several processes
    settings, is_main = _with_target(given(settings)), os.environ.get("RANK", "0") == "0"
    if dry_run:
        with lines_to_stderr(as_json):
            plan = verbs.plan(
                model, output=output or "pruned", recipe=recipe_file, on=on, verbose=is_main and not quiet, **settings
            )
        if is_main:
            echo(json.dumps(dataclasses.asdict(plan)) if as_json else "\n".join(plan.lines))
        end_command()
        return
    if on:
        raise SettingError("--on estimates for other GPUs and trains nothing; add --dry-run")
    if output is None:
        raise click.MissingParameter(param_type="option", param_hint="'-o' / '--output'")
    settings |= {"overwrite": overwrite, "tracker": tracker}
    with lines_to_stderr(as_json):
        pruned = verbs.prune_sizes(model, output=output, recipe=recipe_file, verbose=not quiet, **settings)
    if as_json and is_main:
        echo(json.dumps([summary(checkpoint) for checkpoint in pruned]))
    end_command()


@click.command()
@click.argument("model")
@click.option("--masks", type=click.Path(path_type=Path), required=True, help="Masks file, ddp_masks.safetensors.")
@output_option
@click.option("--tp", default=1, show_default=True, help="Refuse masks that do not split over this many devices.")
@click.option("--align", default=1, show_default=True, help="Move channels until widths are multiples of this.")
@overwrite_option
def apply(model: str, masks: Path, output: Path, tp: int, align: int, overwrite: bool) -> None:
    """Prune MODEL by published masks; this requires no text and no training.

    A masks file holds no weights. If weights were trained together with the masks (prune --train
    weights or lora) or after them (recover), the written model has the dense model's weights
    instead and is worse; ddp-vllm recover trains them.
    """
    verbs.apply(model, masks, output=output, tp=tp, align=align, overwrite=overwrite)
    provenance = read_provenance(masks)
    if (together := trained_together(provenance)) or "recovery" in provenance:
        when = "together with" if together else "after"
        echo(
            f"warning: weights were trained {when} these masks, which do not hold them; {output} has the dense model's "
            f"weights and is worse until ddp-vllm recover {output} trains them",
            err=True,
        )
    echo(f"written: {output}")


@click.command(cls=Grouped, settings=RecoveryRecipe, headings=OUTPUT_HEADING)
@click.argument("model")
@settings_options(RecoveryRecipe, instead={"model": ()}, inherited=INHERITED)
@recipe_option
@tracker_option
@output_option
@overwrite_option
@json_option
@quiet_option
def recover(
    model: str,
    output: Path,
    recipe_file: Path | None,
    tracker: str | None,
    overwrite: bool,
    as_json: bool,
    quiet: bool,
    **settings: Any,
) -> None:
    """Train the weights of the pruned MODEL on the dense model's output and write the better model.

    Widths, speed and serving do not change. Teacher, text and batch size are those of the pruning
    run unless they are passed. After an interruption, the same command resumes. On several devices:
    accelerate launch -m ddp_vllm recover …
    """
    options = given(settings) | {"overwrite": overwrite, "tracker": tracker}
    with lines_to_stderr(as_json):
        recovered = verbs.recover(model, output=output, recipe=recipe_file, verbose=not quiet, **options)
    if as_json and os.environ.get("RANK", "0") == "0":
        echo(json.dumps(summary(recovered)))
    end_command()


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--scheme", type=click.Choice(["W8A8", "FP8_DYNAMIC", "W4A16"]), required=True,
    help="8-bit integers, 8-bit floats, or 4-bit weights alone, by llm-compressor's names.",
)  # fmt: skip
@output_option
@overwrite_option
def quantize(folder: Path, scheme: str, output: Path, overwrite: bool) -> None:
    """Quantize the pruned or dense model in FOLDER with llm-compressor; vLLM serves it as before.

    This requires an environment separate from vLLM's: pip install ".[prune,quantize]" in a clone of
    ddp-vllm. Weights are rounded to the nearest value, so no text is required. The command first
    prints the layers whose widths suit no fast kernel, and how to avoid that.
    """
    echo(f"written: {verbs.quantize(folder, scheme, output=output, overwrite=overwrite, verbose=True)}")
