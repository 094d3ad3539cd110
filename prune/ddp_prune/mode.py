"""The training modes: what is trained besides the masks, and the memory that it requires."""

import math
from typing import NamedTuple

from accelerate import Accelerator

from ddp_models.loading import loading_options
from ddp_models.source import Source
from ddp_prune.recipe import Recipe
from ddp_training.memory import FROZEN, adapter_bytes, model_bytes
from ddp_training.settings import optimizer_suits
from ddp_training.weights import RANK


class Mode(NamedTuple):
    """The training mode and its optimizer."""

    train: str
    """`masks`, `lora` or `weights`."""
    optimizer: str
    """Optimizer of the weights or of the low-rank additions; "" for masks only."""

    def __str__(self) -> str:
        besides = {"masks": "only", "lora": "and low-rank additions", "weights": f"and weights with {self.optimizer}"}
        return f"masks {besides[self.train]}"


MODES = (Mode("weights", "adamw"), Mode("weights", "adamw-8bit"), Mode("lora", "adamw"), Mode("masks", ""))
"""Ordered from the best quality to the least memory."""


def allowed_modes(recipe: Recipe) -> list[Mode]:
    """Return the training modes that a recipe allows, from the one that recovers the most."""
    train = "masks" if recipe.train == "auto" and recipe.controller == "alm" else recipe.train
    return [
        mode
        for mode in suited_modes(recipe)
        if train in ("auto", mode.train) and (mode.train != "weights" or recipe.optimizer in ("auto", mode.optimizer))
    ]


def suited_modes(recipe: Recipe) -> list[Mode]:
    """Return the training modes that can train weights of a recipe's dtype."""
    return [mode for mode in MODES if optimizer_suits(mode.optimizer, recipe.dtype)]


def mode_bytes(recipe: Recipe, source: Source, mode: Mode, accelerator: Accelerator) -> int:
    """Return the bytes per process of the models and of what training them keeps, without a forward
    pass."""
    itemsize = loading_options(source, recipe.dtype, accelerator.device)["dtype"].itemsize
    return held_bytes(recipe, source, mode, itemsize, accelerator.num_processes if recipe.shard else 1)


def held_bytes(recipe: Recipe, source: Source, mode: Mode, itemsize: int, num_shards: int) -> int:
    """Return the same for weights of `itemsize` bytes that `num_shards` devices share."""
    teacher = mode.train == "weights" and recipe.distillation > 0
    shapes = source.memory_shapes
    num_bytes = model_bytes(shapes, itemsize, mode.optimizer if mode.train == "weights" else "", teacher=teacher)
    if mode.train == "lora":
        num_bytes += adapter_bytes(shapes, itemsize, RANK)
    frozen = itemsize * sum(math.prod(shape) for name, shape in shapes.items() if name.startswith(FROZEN))
    return num_bytes if num_shards == 1 else frozen + (num_bytes - frozen) // num_shards
