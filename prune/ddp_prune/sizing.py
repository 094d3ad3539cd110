"""Memory and hours of a run by formula: for this machine, or for GPUs that are not here.

The formulas are those by which a run chooses its training mode and its micro-batches (`memory.py`).
Hours are counted FLOPs at an assumed utilization.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import torch
from accelerate import Accelerator

from ddp_models.loading import check_sharding, loading_options
from ddp_models.source import AGAIN, Source
from ddp_prune.cards import CARDS, parse_cards
from ddp_prune.mode import Mode, allowed_modes, held_bytes
from ddp_prune.rate import trial_steps
from ddp_prune.recipe import Recipe
from ddp_prune.run import Run, schedule
from ddp_training.batches import sequences_at_once
from ddp_training.decoder import auto_class
from ddp_training.memory import (
    FROZEN,
    TRAINING_SHARE,
    SizedModel,
    checkpoint_layers,
    fit_attention,
    gigabytes,
    pass_bytes,
)
from ddp_vllm.costs import whole_model
from ddp_vllm.errors import ModelError, reading
from ddp_vllm.families import dense_layers

UTILIZATION = 0.4  # of the peak; assumed, not measured
ATTENTION_BACKWARD = 2.5  # products per forward product; flash attention computes the scores again


@dataclass(frozen=True)
class Devices:
    """The devices of a run; several share the weights if `is_sharded`."""

    number: int = 1
    type: str = "cpu"
    is_sharded: bool = False

    @property
    def accelerator(self) -> Accelerator:
        """Stands for the devices where a function asks for their number and type."""
        named = {"num_processes": self.number, "device": torch.device(self.type), "is_main_process": True}
        return cast(Accelerator, SimpleNamespace(**named))


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a run takes on given cards in one training mode."""

    mode: Mode
    peak_bytes: int
    """Per card."""
    num_sequences: int
    """Per forward pass."""
    tokens: float
    """To train on."""
    seconds: float
    fits: bool
    is_auto: bool
    """Whether `--train auto` takes this mode."""


def estimate(recipes: Sequence[Recipe], source: Source, cards: str) -> list[Estimate]:
    """Return what a run of these sizes takes on these cards, per training mode that the recipe
    allows.

    Several cards share the weights, as with `--shard`. Raises: SettingError; ModelError if the
    config is broken.
    """
    name, count = parse_cards(cards)
    recipe, devices = recipes[-1], Devices(count, "cuda", count > 1)
    check_sharding(dataclasses.replace(recipe, shard=count > 1), count)
    options, estimates = _options(recipe, source), list[Estimate]()
    for mode in allowed_modes(recipe):
        at_once = sequences_at_once(recipe, devices.accelerator)
        while True:
            checkpointed = recipe.activation_checkpointing != "off"
            peak = step_bytes(recipe, source, mode, at_once, devices, checkpointed=checkpointed)
            if peak <= CARDS[name].memory or at_once == 1 or recipe.micro_batch_size:
                break
            at_once //= 2
        card = CARDS[name]
        peak_rate = card.flops_of_float32 if options["dtype"] == torch.float32 else card.flops
        rate = UTILIZATION * peak_rate * count / flops_per_token(recipe, source, mode, checkpointed=checkpointed)
        runs = [Run(recipe=recipe, steps=steps, **mode._asdict()) for steps in schedule(recipes)]
        steps = trial_steps(runs[-1]) + sum(run.steps.last - run.steps.first for run in runs)
        tokens = rate * 60 * recipe.minutes if recipe.minutes else float(steps * recipe.batch_size * recipe.seq_len)
        held = held_bytes(recipe, source, mode, options["dtype"].itemsize, count)
        taken = any(earlier.is_auto for earlier in estimates)
        is_last = mode == allowed_modes(recipe)[-1]
        estimates.append(
            Estimate(
                mode=mode, peak_bytes=peak, num_sequences=at_once, tokens=tokens,
                seconds=60 * recipe.minutes or tokens / rate, fits=peak <= CARDS[name].memory,
                is_auto=not taken and (held <= TRAINING_SHARE * CARDS[name].memory or is_last),
            )
        )  # fmt: skip
    return estimates


def describe(recipe: Recipe, estimates: Sequence[Estimate], cards: str) -> Iterator[str]:
    """Yield a line per training mode, from the one that takes least: memory, tokens and hours on
    the cards."""
    name, _ = parse_cards(cards)
    for sized in reversed(estimates):
        hours = sized.seconds / 3600
        duration = f"{hours:.2g}" if hours < 10 else f"{hours:.0f}"
        limit = f"the {recipe.minutes:g} minutes" if recipe.minutes else f"about {duration} hours"
        memory = f"{gigabytes(sized.peak_bytes)} of {gigabytes(CARDS[name].memory)} per card"
        yield (
            f"{sized.mode} on {cards}: {'fits' if sized.fits else 'does not fit'}, {memory} with "
            f"{sized.num_sequences} × {recipe.seq_len:,} tokens per pass; "
            f"{limit} for {'about ' * bool(recipe.minutes)}{sized.tokens / 1e6:,.1f} M tokens"
            + " (--train auto takes this)"
            * (sized.is_auto and recipe.train == "auto")
        )


def flops_per_token(recipe: Recipe, source: Source, mode: Mode, *, checkpointed: bool) -> float:
    """Return the FLOPs of training per token of a sequence: of the teacher's forward, forward,
    forward again of checkpointed layers, gradients of activations, and gradients of trained
    weights."""
    fixed = "flops", source.config, dense_layers(source.config), source.shapes
    products = whole_model(*fixed, 0)
    attention = whole_model(*fixed, recipe.seq_len // 2) - products  # a token attends to half of the others
    forwards = (recipe.distillation > 0) + 1 + checkpointed
    return products * (forwards + 1 + (mode.train == "weights")) + attention * (forwards + ATTENTION_BACKWARD)


def step_bytes(
    recipe: Recipe, source: Source, mode: Mode, num_sequences: int, devices: Devices, *, checkpointed: bool
) -> int:
    """Estimate the peak bytes per device of a training step.

    Sharded: two gathered layers in the model's dtype, and a layer's gradient in that and in
    float32. On one device: the gradient of the largest trained tensor, in both.
    """
    is_trained, itemsize = mode.train == "weights", _options(recipe, source)["dtype"].itemsize
    held = held_bytes(recipe, source, mode, itemsize, devices.number if devices.is_sharded else 1)
    layers, tensors = Counter[str](), Counter[str]()
    for name, shape in source.memory_shapes.items():
        if not name.startswith(FROZEN):
            layer, _, tensor = name.removeprefix("model.layers.").partition(".")
            layers[layer] += math.prod(shape)
            # one tensor in memory
            stacked = tensor.partition(".experts.")[0] if ".experts." in tensor else tensor
            tensors[f"{layer}.{stacked}"] += math.prod(shape) * 2 // 3 if ".experts." in tensor else math.prod(shape)
    if devices.is_sharded:
        transient = max(layers.values()) * (2 * itemsize + is_trained * (itemsize + 4))
    else:
        transient = is_trained * (itemsize + 4) * max(tensors.values())
    sized = sized_model(recipe, source, mode, devices, checkpointed=checkpointed)
    passing = pass_bytes(sized, num_sequences, recipe.seq_len, torch.device(devices.type))
    return held + transient + passing


def sized_model(recipe: Recipe, source: Source, mode: Mode, devices: Devices, *, checkpointed: bool) -> SizedModel:
    """Return the model of a run without weights, with the attention that the run uses."""
    from transformers import AutoConfig

    with reading(source.folder, ModelError, AGAIN), torch.device("meta"):
        config = AutoConfig.from_pretrained(source.folder, trust_remote_code=False)
        model: Any = auto_class(config).from_config(config, trust_remote_code=False, **_options(recipe, source))
    model.requires_grad_(mode.train != "masks")
    fit_attention(model, recipe.seq_len, torch.device(devices.type))
    checkpoint_layers(model, checkpointed)
    return cast(SizedModel, SimpleNamespace(model=model, sizes=source.sizes))


def _options(recipe: Recipe, source: Source) -> dict[str, Any]:
    """Return dtype and attention of a run, on a device that has bfloat16."""
    return loading_options(source, recipe.dtype, None)
