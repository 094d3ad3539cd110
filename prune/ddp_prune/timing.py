"""Time: how long a step takes on this machine, and the steps that fit into the minutes of a recipe."""

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from accelerate import Accelerator

from ddp_models.loading import load_teacher
from ddp_models.source import Source
from ddp_prune.budget import Pool
from ddp_prune.mode import Earlier, Mode
from ddp_prune.rate import trial_steps
from ddp_prune.recipe import Recipe
from ddp_prune.run import FAMILY_STEPS, Run
from ddp_prune.train import TRAINERS, load_trained, too_large
from ddp_training.batches import Batches, fit_batches, sequences_at_once
from ddp_training.memory import explained
from ddp_vllm.errors import SettingError

WANTED_STEPS = 400  # tokens per step are halved until so many steps fit
FEWEST_STEPS = 50  # a search in fewer steps closes too many gates at once
FEWEST_TOKENS = 512  # per step
SHORTEST, SHORTEST_OF_WEIGHTS = 256, 1024
"""Tokens of a sequence, unless the recipe has shorter ones: weights get worse in contexts longer than they train on."""

Shape = tuple[int, int, int]  # steps, batch size, sequence length


def settle(
    recipes: Sequence[Recipe],
    earlier: Earlier,
    mode: Mode,
    source: Source,
    pools: Sequence[Pool],
    head_unit: str,
    accelerator: Accelerator,
    say: Callable[[str], None],
) -> list[Recipe]:
    """Return the recipes with steps, batch size and sequence length that fit into their minutes, if they have minutes.

    A run that is resumed keeps what it had. pools: of the largest cut. Raises: SettingError if the minutes are too few.
    """
    last = recipes[-1]
    if not last.minutes:
        return list(recipes)
    shape: Shape = earlier[2:]
    if mode != earlier[:2]:
        run = Run.alone(last, **mode._asdict())
        shape = fit_minutes(run, len(recipes), lambda run: seconds_a_step(run, source, head_unit, pools, accelerator))
    steps, batch, seq_len = shape
    say(f"{last.minutes:g} minutes: {steps:,} steps of {batch} × {seq_len:,} tokens")
    return [dataclasses.replace(each, steps=steps, batch_size=batch, seq_len=seq_len) for each in recipes]


def fit_minutes(run: Run, num_sizes: int, measure: Callable[[Run], float]) -> Shape:
    """Return the steps, batch size and sequence length that fit into the minutes of a run.

    num_sizes: that share the search. measure: returns the seconds of a step of a run. Raises: SettingError.
    """
    recipe = run.recipe
    seconds = 60.0 * recipe.minutes
    each = measure(run)
    tokens = seconds / each * recipe.batch_size * recipe.seq_len
    most_tokens = recipe.batch_size * recipe.seq_len
    tokens_per_step = most_tokens
    while tokens_per_step > max(FEWEST_TOKENS, tokens / WANTED_STEPS):
        tokens_per_step //= 2
    shortest = SHORTEST if run.train == "masks" else SHORTEST_OF_WEIGHTS
    seq_len = min(recipe.seq_len, max(shortest, tokens_per_step // 2))
    batch = max(1, min(recipe.batch_size, tokens_per_step // seq_len))
    if batch * seq_len < most_tokens:  # shorter sequences take another time per token
        run = dataclasses.replace(run, recipe=dataclasses.replace(recipe, batch_size=batch, seq_len=seq_len))
        each = measure(run)
    num_trial_steps = trial_steps(run)
    steps = int((seconds / each - num_trial_steps) / (FAMILY_STEPS if num_sizes > 1 else 1.0))
    if steps < FEWEST_STEPS:
        least = (num_trial_steps + FEWEST_STEPS * (FAMILY_STEPS if num_sizes > 1 else 1.0)) * each / 60.0
        raise SettingError(
            f"minutes is {recipe.minutes:g}, enough for {max(0, steps)} steps of {batch} × {seq_len:,} tokens where "
            f"{FEWEST_STEPS} are needed; give at least {math.ceil(least)}, or --train masks, or a lower --seq-len"
        )
    return steps, batch, seq_len


def seconds_a_step(run: Run, source: Source, head_unit: str, pools: Sequence[Pool], accelerator: Accelerator) -> float:
    """Return the seconds of a step, of the slowest process.

    One forward and backward pass over random tokens with all gates open is timed, after a warm-up.
    """
    recipe = run.recipe
    with explained(too_large(recipe)):
        gated, weights = load_trained(run, source, head_unit, accelerator)
        share, at_once = -(-recipe.batch_size // accelerator.num_processes), sequences_at_once(recipe, accelerator)
        tried = dataclasses.replace(recipe, batch_size=at_once * accelerator.num_processes)
        model: Any = gated.model
        blocks = torch.randint(model.config.vocab_size, (2 * tried.batch_size, recipe.seq_len))
        batches = Batches(blocks, tried, accelerator)
        fit_batches(gated, batches, tried, accelerator, lambda _: None, run.optimizer)
        trainer = TRAINERS[recipe.controller](
            gated, batches, dataclasses.replace(run, recipe=tried), pools, accelerator
        )
        if weights:
            copied = run.train == "weights" and recipe.distillation > 0
            dense = load_teacher(source, recipe, accelerator, model) if copied else None
            trainer.train_weights(weights, dense, lambda: {"highest": 0.0})
        for step in range(2):
            began = time.perf_counter()
            trainer.step(step)
        seconds = torch.tensor([(time.perf_counter() - began) * share / at_once], device=accelerator.device)
        return float(accelerator.gather(seconds).max())
