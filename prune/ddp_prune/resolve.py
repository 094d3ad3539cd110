"""Resolves everything that a recipe leaves open, before the first step: training mode, optimizer,
steps and batch, and how the run fits into memory.

Values of the interrupted run of the same command are kept. Otherwise the mode is chosen by the
memory that it requires, and minutes become steps by timing a step.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from accelerate import Accelerator

from ddp_prune.core.batches import Batches, sequences_at_once
from ddp_prune.core.budget import Pool
from ddp_prune.core.fusion import fuse_elementwise
from ddp_prune.core.gates import GatedModel
from ddp_prune.core.learn import Joint, prepare_passes, trainer_class
from ddp_prune.core.rate import trial_steps
from ddp_prune.core.weights import TrainedWeights, obstacle_to_8_bits
from ddp_prune.devices import explained
from ddp_prune.fit import (
    TRAINING_SHARE,
    Devices,
    Fit,
    Mode,
    allowed_modes,
    fit,
    gigabytes,
    held_bytes,
    suited_modes,
)
from ddp_prune.models.loading import check_sharding, load, load_teacher, loading_options
from ddp_prune.models.source import Source
from ddp_prune.pools import head_unit_of
from ddp_prune.recipe import Recipe
from ddp_prune.run import FAMILY_STEPS, Run, schedule
from ddp_prune.settings import RecoveryRecipe
from ddp_vllm.errors import SettingError
from ddp_vllm.latency import Profile

WANTED_STEPS = 400  # tokens per step are halved until so many steps fit
FEWEST_STEPS = 20  # a search in fewer steps closes too many gates at once
SHORT_RUN = 50  # steps; weights get shorter sequences, so that more fit
FEWEST_TOKENS = 512  # per step
SHORTEST, SHORTEST_OF_WEIGHTS = 256, 1024
"""Tokens of a sequence, unless the recipe has shorter ones: weights get worse in contexts longer
than they train on. In a short run they get shorter ones all the same."""

Shape = tuple[int, int, int]  # steps, batch size, sequence length


def resolve_runs(
    recipes: Sequence[Recipe],
    pools: Sequence[Sequence[Pool]],
    source: Source,
    profile: Profile | None,
    resumed: Mapping[str, Any],
    accelerator: Accelerator,
    print_line: Callable[[str], None],
) -> tuple[list[Run], Fit]:
    """Return the run of each size, and how they fit into memory.

    The search of a size begins at the keep ratios of the previous size.

    resumed: what the interrupted command had resolved; {} of a new one.
    All processes must call this together. Raises: SettingError if memory does not hold the mode that
        the user passed, if its optimizer cannot run here, if the minutes are too few, or if
        processes that share weights cannot divide the batch evenly.
    """
    last, devices = recipes[-1], Devices.here(recipes[0], accelerator)
    mode = resolve_training_mode(last, source, resumed, devices, accelerator, print_line)
    fits = lambda recipe: fit(recipe, source, devices, mode)  # noqa: E731
    if last.minutes:
        if resumed:
            shape: Shape = (resumed["steps"], resumed["batch_size"], resumed["seq_len"])
        else:
            fixed = source, head_unit_of(last, source), pools[-1], accelerator
            run = Run.alone(last, **fits(last).resolved())
            shape = fit_minutes(
                run,
                len(recipes),
                lambda run: seconds_a_step(run, *fixed),
                accelerator.num_processes,
                lambda recipe: fits(recipe).resolved(),
            )
        steps, batch, seq_len = shape
        print_line(f"{last.minutes:g} minutes: {steps:,} steps of {batch} × {seq_len:,} tokens")
        if steps < WANTED_STEPS // 2:
            enough = math.ceil(last.minutes * WANTED_STEPS / steps)
            print_line(f"so few steps are a demonstration; --minutes {enough} allows {WANTED_STEPS}, a better model")
        recipes = [dataclasses.replace(recipe, steps=steps, batch_size=batch, seq_len=seq_len) for recipe in recipes]
        # a resumed run may have had fewer processes
        check_sharding(recipes[-1], accelerator.num_processes)
    fitted = fits(recipes[-1])
    usual = sequences_at_once(recipes[-1], devices.number, devices.type)
    if fitted.num_sequences < usual:
        print_line(f"memory is short: the micro-batch size is {fitted.num_sequences} instead of {usual} sequences")
    starts = [{}, *({pool.name: pool.keep_ratio for pool in sizes} for sizes in pools[:-1])]
    in_family = len(recipes) > 1
    runs = [
        Run(recipe=recipe, steps=steps, **fitted.resolved(), profile=profile, start=start, in_family=in_family)
        for recipe, steps, start in zip(recipes, schedule(recipes), starts, strict=True)
    ]
    return runs, fitted


def resolve_training_mode(
    recipe: Recipe | RecoveryRecipe,
    source: Source,
    resumed: Mapping[str, Any],
    devices: Devices,
    accelerator: Accelerator,
    print_line: Callable[[str], None],
) -> Mode:
    """Return the training mode: that of the interrupted run, or the first that memory holds now.

    print_line: prints the chosen mode, and the memory that the next mode up would require.
    """
    modes, obstacle = allowed_modes(recipe), ""
    if resumed:
        modes = [Mode(resumed["train"], resumed["optimizer"])]
        if modes[0].optimizer == "adamw-8bit" and (obstacle := obstacle_to_8_bits(accelerator)):
            raise SettingError(obstacle)
        return modes[0]
    itemsize = loading_options(source, recipe.dtype, accelerator.device)["dtype"].itemsize
    needed = {mode: held_bytes(recipe, source, mode, itemsize, devices.num_shards) for mode in suited_modes(recipe)}
    is_recovery = isinstance(recipe, RecoveryRecipe)  # which trains no masks
    trained = {mode: str(mode).removeprefix("masks and ") if is_recovery else str(mode) for mode in needed}
    needs = {mode: f"{trained[mode]} requires {gigabytes(number)}" for mode, number in needed.items()}
    usable = list[Mode]()
    for mode in modes:
        if mode.optimizer == "adamw-8bit" and (obstacle := obstacle_to_8_bits(accelerator)):
            continue
        usable.append(mode)
        if needed[mode] <= TRAINING_SHARE * devices.free:
            break
    if not usable:
        raise SettingError(obstacle)
    chosen = usable[-1]
    # passed by the user: all memory may do
    if recipe.train != "auto" and needed[chosen] > devices.free:
        fitting = "; ".join(needs[mode] for mode in needed if needed[mode] <= TRAINING_SHARE * devices.free)
        raise SettingError(
            f"{needs[chosen]} for weights, optimizer and teacher, and {gigabytes(devices.free)} are free; "
            + (f"what fits: {fitting}" if fitting else "pass --shard on more devices")
        )
    above = modes[modes.index(chosen) - 1 : modes.index(chosen)]
    print_line(
        f"training mode: {needs[chosen]} of {gigabytes(devices.free)} before activations"
        + "".join(f"; {needs[mode]}" for mode in above)
        + (f"; {obstacle}" if obstacle else "")
    )
    return chosen


def fit_minutes(
    run: Run,
    num_sizes: int,
    measure: Callable[[Run], float],
    num_processes: int = 1,
    fits: Callable[[Recipe], Mapping[str, Any]] = lambda _: {},
) -> Shape:
    """Return the steps, batch size and sequence length that fit into the minutes of a run.

    Every process gets equally many sequences, at least one, unless the recipe has a smaller batch.
    num_sizes: that share the search. measure: returns the seconds of a step of a run. fits: fits
        smaller steps into memory.
    Raises: SettingError.
    """
    recipe = run.recipe
    seconds = 60.0 * recipe.minutes
    batch, seq_len = recipe.batch_size, recipe.seq_len
    step_seconds = measure(run)
    tokens = seconds / step_seconds * batch * seq_len
    tokens_per_step = batch * seq_len
    while tokens_per_step > max(FEWEST_TOKENS, tokens / WANTED_STEPS):
        tokens_per_step //= 2
    sizes = FAMILY_STEPS if num_sizes > 1 else 1.0
    steps = int((seconds / step_seconds - trial_steps(run)) / sizes)
    for shortest in (SHORTEST,) if run.train == "masks" else (SHORTEST_OF_WEIGHTS, SHORTEST):
        if tokens_per_step < recipe.batch_size * recipe.seq_len:
            seq_len = min(recipe.seq_len, max(shortest, tokens_per_step // max(2, num_processes)))
            batch = min(recipe.batch_size, max(1, tokens_per_step // seq_len // num_processes) * num_processes)
        if (batch, seq_len) != (run.recipe.batch_size, run.recipe.seq_len):
            smaller = dataclasses.replace(recipe, batch_size=batch, seq_len=seq_len)
            run = dataclasses.replace(run, recipe=smaller, **fits(smaller))
            step_seconds = measure(run)
            steps = int((seconds / step_seconds - trial_steps(run)) / sizes)
        if steps >= SHORT_RUN:
            break
    if steps < FEWEST_STEPS:
        least = (trial_steps(run) + FEWEST_STEPS * sizes) * step_seconds / 60.0
        raise SettingError(
            "minutes",
            f"is {recipe.minutes:g}, enough for {max(0, steps)} steps of {batch} × {seq_len:,} tokens where "
            f"{FEWEST_STEPS} are needed; give at least {math.ceil(least)}, or --train masks, or a lower --seq-len",
        )
    return steps, batch, seq_len


def seconds_a_step(run: Run, source: Source, head_unit: str, pools: Sequence[Pool], accelerator: Accelerator) -> float:
    """Return the seconds of a step, of the slowest process.

    Steps of one and of two micro-batches over random tokens with all gates open are timed, after a
    warm-up. The difference is the time of a micro-batch; the rest, such as the optimizer of trained
    weights, counts once a step.
    """
    recipe = run.recipe
    with explained(too_large(recipe)):
        gated, weights = load_trained(run, source, head_unit, accelerator)
        number = accelerator.num_processes
        share = -(-recipe.batch_size // number)
        at_once = run.num_sequences or sequences_at_once(recipe, number, accelerator.device.type)
        tried = dataclasses.replace(recipe, batch_size=at_once * number)
        model: Any = gated.model
        blocks = torch.randint(model.config.get_text_config().vocab_size, (4 * tried.batch_size, recipe.seq_len))
        batches = prepare_passes(model, Batches(blocks, tried, accelerator), run)
        joint = Joint(weights) if weights else None
        if joint and run.train == "weights" and recipe.distillation > 0:
            joint = joint._replace(teacher=load_teacher(source, recipe, accelerator, model))
        run = dataclasses.replace(run, recipe=tried)
        trainer = trainer_class(recipe.controller)(gated, batches, run, pools, accelerator, joint)
        trainer.rate = {"highest": 0.0}
        seconds = list[float]()
        # all on other blocks
        for size, step in ((1, 0), (1, 1), (2, 1)) if share > at_once else ((1, 0), (1, 1)):
            batches.size = size * tried.batch_size
            trainer.recipe = dataclasses.replace(tried, batch_size=batches.size)
            began = time.perf_counter()
            trainer.step(step)
            seconds.append(time.perf_counter() - began)
        another = max(0.0, seconds[-1] - seconds[1])
        total = torch.tensor([seconds[1] + another * (share / at_once - 1)], device=accelerator.device)
        return float(accelerator.gather(total).max())


def load_trained(
    run: Run, source: Source, head_unit: str, accelerator: Accelerator
) -> tuple[GatedModel, TrainedWeights | None]:
    """Load the model of a run with its gates, and what is trained besides the gates; it must not
    have run forward."""
    model, weights = load(source, run.recipe, accelerator), None
    if run.train != "masks":  # gates scale the input of adapters too, so these are added first
        weights = TrainedWeights(model, accelerator, run.train, optimizer=run.optimizer)
    if accelerator.device.type == "cuda":
        with suppress(Exception):  # without a C compiler, eager mode is slower and right
            fuse_elementwise(model)
    return GatedModel(model, source.widths, source.sizes, head_unit), weights


def too_large(recipe: Recipe | RecoveryRecipe) -> str:
    """Return the message for a model and a sequence that do not fit a device."""
    return (
        f"{recipe.model} and a sequence of {recipe.seq_len:,} tokens do not fit into the memory of a device; free it "
        "of other processes, lower --seq-len, or distribute the weights over more devices with --shard"
    )
