"""The training mode: what is trained besides the masks, chosen by the memory it needs or by the run that is resumed."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from accelerate import Accelerator

from ddp_models.loading import loading_options
from ddp_models.source import Source
from ddp_prune.recipe import Recipe
from ddp_training.memory import FROZEN, TRAINING_SHARE, adapter_bytes, fits, free_memory, gigabytes, model_bytes
from ddp_training.run_state import saved_header
from ddp_training.settings import is_same_recipe, optimizer_suits
from ddp_training.weights import RANK, obstacle_to_8_bits
from ddp_vllm.errors import SettingError
from ddp_vllm.provenance import provenance_of


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
    """Return the bytes per process of the models and of what training them keeps, without a forward pass."""
    itemsize = loading_options(source, recipe.dtype, accelerator.device)["dtype"].itemsize
    return held_bytes(recipe, source, mode, itemsize, accelerator.num_processes if recipe.shard else 1)


def held_bytes(recipe: Recipe, source: Source, mode: Mode, itemsize: int, num_shards: int) -> int:
    """Return the same for weights of `itemsize` bytes that `num_shards` devices share."""
    teacher = mode.train == "weights" and recipe.distillation > 0
    shapes = source.memory_shapes
    whole = model_bytes(shapes, itemsize, mode.optimizer if mode.train == "weights" else "", teacher=teacher)
    if mode.train == "lora":
        whole += adapter_bytes(shapes, itemsize, RANK)
    frozen = itemsize * sum(math.prod(shape) for name, shape in shapes.items() if name.startswith(FROZEN))
    return whole if num_shards == 1 else frozen + (whole - frozen) // num_shards


class Earlier(NamedTuple):
    """The values that an interrupted command had resolved before its first step."""

    train: str
    optimizer: str
    steps: int
    batch_size: int
    seq_len: int


def earlier_run(recipe: Recipe, folder: Path, family: Path | None) -> Earlier | None:
    """Return what the interrupted command with these settings had resolved; None if there is none.

    folder: the output of one size. family: the output of the size family's own run, whose state remains until all
    sizes are written; then a written size holds the values.
    """
    saved = saved_header(folder)
    if not saved and family and saved_header(family):
        provenance = provenance_of(folder)
        saved = {"recipe": provenance.get("recipe", {}), "resolved": provenance.get("run", {})}
    if not saved or not is_same_recipe(saved["recipe"], recipe):
        return None
    shape = (saved["recipe"][name] for name in ("steps", "batch_size", "seq_len"))
    return Earlier(saved["resolved"]["train"], saved["resolved"]["optimizer"], *shape)


def resolve_training_mode(
    recipe: Recipe, source: Source, earlier: Earlier | None, accelerator: Accelerator, say: Callable[[str], None]
) -> Mode:
    """Return the training mode: that of the interrupted run, or the first that memory holds now.

    say: prints the chosen mode, and the memory that the next mode up would require.
    Raises: SettingError if memory does not hold the mode that the user passed, or if its optimizer cannot run here.
    """
    modes, obstacle = allowed_modes(recipe), ""
    if earlier and (resumed := Mode(earlier.train, earlier.optimizer)) in modes:
        if resumed.optimizer == "adamw-8bit" and (obstacle := obstacle_to_8_bits(accelerator)):
            raise SettingError(obstacle)
        return resumed
    free = free_memory(accelerator)
    needed = {each: mode_bytes(recipe, source, each, accelerator) for each in suited_modes(recipe)}
    needs = {each: f"{each} requires {gigabytes(number)}" for each, number in needed.items()}
    usable = list[Mode]()
    for mode in modes:
        if mode.optimizer == "adamw-8bit" and (obstacle := obstacle_to_8_bits(accelerator)):
            continue
        usable.append(mode)
        if fits(needed[mode], accelerator):
            break
    if not usable:
        raise SettingError(obstacle)
    chosen = usable[-1]
    if recipe.train != "auto" and not fits(needed[chosen], accelerator, 1.0):  # passed by the user: all memory may do
        fitting = "; ".join(needs[each] for each in needed if needed[each] <= TRAINING_SHARE * free)
        raise SettingError(
            f"{needs[chosen]} for weights, optimizer and teacher, and {gigabytes(free)} are free; "
            + (f"what fits: {fitting}" if fitting else "pass --shard on more devices")
        )
    above = modes[modes.index(chosen) - 1 : modes.index(chosen)]
    say(
        f"training mode: {needs[chosen]} of {gigabytes(free)} before activations"
        + "".join(f"; {needs[each]}" for each in above)
        + (f"; {obstacle}" if obstacle else "")
    )
    return chosen
