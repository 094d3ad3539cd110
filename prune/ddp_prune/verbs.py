"""The verbs plan and apply as functions of `ddp_vllm`; those that go on after pruning are in `ddp_recover`.

Each function imports what it needs when it is called, so that importing this module does not import torch.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddp_prune import read_recipe
from ddp_prune.recipe import Recipe
from ddp_vllm.checkpoint import Checkpoint
from ddp_vllm.output import check_output


def plan(
    model: str | Path, *, output: str | Path = "pruned", recipe: str | Path | None = None, **settings: Any
) -> list[str]:
    """Return what `prune` would remove and the memory and time it would take, a line each; nothing is written."""
    recipes = recipes_of(model, recipe, settings)
    from ddp_prune import plan as planning

    return planning.plan(recipes, Path(output))


def recipes_of(model: str | Path, recipe: str | Path | None, settings: Mapping[str, Any]) -> list[Recipe]:
    """Return the recipes, one per size, of a verb's arguments."""
    return read_recipe.load_recipes(Path(recipe) if recipe else None, as_recipe_values({**settings, "model": model}))


def as_recipe_values(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with every path as text, as recipes hold it."""
    return {name: str(value) if isinstance(value, Path) else value for name, value in settings.items()}


def apply(
    model: str | Path, masks: str | Path, *, output: str | Path, tp: int = 1, align: int = 1, overwrite: bool = False
) -> Checkpoint:
    """Prune a dense model by a published masks file, without text and without training.

    masks: a `ddp_masks.safetensors`. tp: refuse masks that do not split over this many devices. align: move channels
    between layers until all widths are multiples of this number.
    """
    output = Path(output)
    check_output(output, overwrite=overwrite)
    from ddp_prune.masks_file import apply_masks

    return apply_masks(str(model), Path(masks), output, tp=tp, align=align, overwrite=overwrite)
