"""What the verb `prune` does: the core prunes, then `--recover MINUTES` trains the smaller model, then it is shown."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from rich.console import Console

from ddp_prune import pipeline
from ddp_prune.recipe import Recipe, RecoveryRecipe, TrainingSettings
from ddp_recover.recover import recover
from ddp_vllm.pages.written import show
from ddp_vllm.speed import Measure


def prune(
    recipes: Sequence[Recipe], output: Path, *, overwrite: bool, tracker: str | None, console: Console, measure: Measure
) -> list[Path]:
    """Prune a model, recover each size for the minutes of its recipe, and draw its report; as `pipeline.prune`."""
    return pipeline.prune(
        recipes, output, overwrite=overwrite, tracker=tracker, console=console, measure=measure,
        recover=recover_pruned, show=show,
    )  # fmt: skip


def recover_pruned(recipe: Recipe, folder: Path, accelerator: Accelerator, console: Console) -> None:
    """Recover a pruned checkpoint in place, with the pruning recipe's text, memory settings and minutes."""
    shared: dict[str, Any] = {each.name: getattr(recipe, each.name) for each in dataclasses.fields(TrainingSettings)}
    recovery = RecoveryRecipe(model=str(folder), teacher=recipe.model, minutes=recipe.recover, **shared)
    recover(recovery, folder, accelerator, overwrite=True, console=console)
