"""Time: how long a step takes on this machine, and the steps that fit into the minutes of a recipe."""

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from accelerate import Accelerator

from ddp_models.loading import check_sharding, load_teacher
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
    earlier: Earlier | None,
    mode: Mode,
    source: Source,
    pools: Sequence[Pool],
    head_unit: str,
    accelerator: Accelerator,
    say: Callable[[str], None],
) -> list[Recipe]:
    """Return the recipes with steps, batch size and sequence length that fit into their minutes, if they have minutes.

    A run that is resumed keeps what it had. pools: of the largest cut. Raises: SettingError if the minutes are too few,
    or if processes that share weights cannot divide the batch evenly.
    """
    last = recipes[-1]
    if not last.minutes:
        return list(recipes)
    if earlier and mode == earlier[:2]:
        shape: Shape = earlier[2:]
    else:
        run = Run.alone(last, **mode._asdict())
        fixed = source, head_unit, pools, accelerator
        shape = fit_minutes(run, len(recipes), lambda run: seconds_a_step(run, *fixed), accelerator.num_processes)
    steps, batch, seq_len = shape
    say(f"{last.minutes:g} minutes: {steps:,} steps of {batch} × {seq_len:,} tokens")
    settled = [dataclasses.replace(each, steps=steps, batch_size=batch, seq_len=seq_len) for each in recipes]
    check_sharding(settled[-1], accelerator.num_processes)  # a resumed run may have had fewer processes
    return settled


def fit_minutes(run: Run, num_sizes: int, measure: Callable[[Run], float], num_processes: int = 1) -> Shape:
    """Return the steps, batch size and sequence length that fit into the minutes of a run.

    Every process gets equally many sequences, at least one, unless the recipe has a smaller batch.
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
    seq_len, batch = recipe.seq_len, recipe.batch_size
    if tokens_per_step < most_tokens:
        seq_len = min(seq_len, max(shortest, tokens_per_step // max(2, num_processes)))
        per_process = max(1, tokens_per_step // seq_len // num_processes)
        batch = min(batch, per_process * num_processes)
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

    Steps of one and of two micro-batches over random tokens with all gates open are timed, after a warm-up. The
    difference is the time of a micro-batch; the rest, such as the optimizer of trained weights, counts once a step.
    """
    recipe = run.recipe
    with explained(too_large(recipe)):
        gated, weights = load_trained(run, source, head_unit, accelerator)
        share, at_once = -(-recipe.batch_size // accelerator.num_processes), sequences_at_once(recipe, accelerator)
        tried = dataclasses.replace(recipe, batch_size=at_once * accelerator.num_processes)
        model: Any = gated.model
        blocks = torch.randint(model.config.get_text_config().vocab_size, (4 * tried.batch_size, recipe.seq_len))
        batches = Batches(blocks, tried, accelerator)
        fit_batches(gated, batches, tried, accelerator, lambda _: None, run.optimizer)
        trainer = TRAINERS[recipe.controller](
            gated, batches, dataclasses.replace(run, recipe=tried), pools, accelerator
        )
        if weights:
            copied = run.train == "weights" and recipe.distillation > 0
            dense = load_teacher(source, recipe, accelerator, model) if copied else None
            trainer.train_weights(weights, dense, lambda: {"highest": 0.0})
        trainer.begin()
        seconds = list[float]()
        for size, step in ((1, 0), (1, 1), (2, 1)) if share > at_once else ((1, 0), (1, 1)):  # all on other blocks
            batches.size = size * tried.batch_size
            trainer.recipe = dataclasses.replace(tried, batch_size=batches.size)
            began = time.perf_counter()
            trainer.step(step)
            seconds.append(time.perf_counter() - began)
        another = max(0.0, seconds[-1] - seconds[1])
        total = torch.tensor([seconds[1] + another * (share / at_once - 1)], device=accelerator.device)
        return float(accelerator.gather(total).max())
