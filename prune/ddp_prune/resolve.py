"""Resolves everything that a recipe leaves open, before the first step: training mode, optimizer,
steps and batch, and how the run fits into memory.

Values of the interrupted run of the same command are kept. Otherwise the mode is chosen by the
memory that it requires, and minutes become steps by timing a step.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import Any, Generic, NamedTuple

from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor

from ddp_prune.core.batches import Batches
from ddp_prune.core.budget import Pool
from ddp_prune.core.decoder import fuse_elementwise
from ddp_prune.core.gates import GatedModel
from ddp_prune.core.learn import trainer_of
from ddp_prune.core.loop import Learner, Training, seconds_a_step
from ddp_prune.core.rate import trial_steps
from ddp_prune.core.schedule import Schedule
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
    rank_of,
    sequences_at_once,
    suited_modes,
)
from ddp_prune.models.loading import check_sharding, load, load_teacher
from ddp_prune.models.source import Source, loading_options
from ddp_prune.pools import head_unit_of
from ddp_prune.recipe import Recipe
from ddp_prune.run import FAMILY_STEPS, Run, Settled, steps_of
from ddp_prune.settings import RecoveryRecipe, TrainingSettings
from ddp_vllm.errors import Printer, SettingError

WANTED_STEPS = 400  # tokens per step are halved until so many steps fit
FEWEST_STEPS = 20  # a search in fewer steps closes too many gates at once
SHORT_RUN = 50  # steps; weights get shorter sequences, so that more fit
FEWEST_TOKENS = 512  # per step
SHORTEST, SHORTEST_OF_WEIGHTS = 256, 1024
"""Tokens of a sequence, unless the recipe has shorter ones: weights get worse in contexts longer
than they train on. In a short run they get shorter ones all the same."""
TIMING = "timing steps on random tokens"


class Shape(NamedTuple):
    """The steps that fit into the minutes of a run."""

    steps: int
    batch_size: int
    seq_len: int
    seconds: float
    """Of a step."""
    minutes: int
    """At least required for FEWEST_STEPS."""


class Loaded(NamedTuple):
    """What a run trains, in memory."""

    model: Any
    gated: GatedModel | None
    """The model with its gates; None for a recovery, whose gates are fixed."""
    weights: TrainedWeights | None
    """Trained besides the gates."""
    teacher: Any
    """The dense model, loaded in addition; None where the model itself is the teacher too."""

    def training(self, **trials: Any) -> Training | None:
        """Return how the weights are trained, if they are. trials: fields of `Training` on the learning rate."""
        return Training(self.weights, teacher=self.teacher, **trials) if self.weights else None


class Resolved(NamedTuple, Generic[Settled]):
    runs: list[Run[Settled]]
    """One per size."""
    fit: Fit
    """How they fit into memory."""
    loaded: list[Loaded]
    """The model of the runs, if their steps were timed."""
    seconds: float
    """Of a step, if they were timed."""


def resolve_runs(
    recipes: Sequence[Settled],
    pools: Sequence[Sequence[Pool]],
    source: Source,
    resumed: Mapping[str, Any],
    accelerator: Accelerator,
    print_line: Printer,
    pruned: Source | None = None,
) -> Resolved[Settled]:
    """Return the run of each size, and how they fit into memory.

    The search of a size begins at the keep ratios of the previous size.

    pools: of each size; without any for a recovery.
    source: the dense model.
    resumed: what the interrupted command had resolved; {} of a new one.
    pruned: the model of a recovery.
    All processes must call this together. Raises: SettingError if memory does not hold the mode that
        the user passed, if its optimizer cannot run here, if the minutes are too few, or if
        processes that share weights cannot divide the batch evenly.
    """
    last, devices = recipes[-1], Devices.here(recipes[0], accelerator)
    mode = resolve_training_mode(last, source, resumed, devices, accelerator, print_line)
    loaded, seconds = list[Loaded](), 0.0
    if last.minutes:

        def open_mode(mode: Mode) -> Callable[[Settled], float]:
            def alone(recipe: Settled) -> Run[Settled]:
                return Run.alone(recipe, **fit(recipe, source, devices, mode).resolved())

            # the teacher of a pruning shares weights with its model
            teacher = loaded[0].teacher if loaded and pruned else None
            loaded.clear()
            loaded.append(load_trained(alone(last), source, accelerator, pruned, teacher))
            return lambda recipe: time_run(alone(recipe), loaded[0], pools[-1], accelerator)

        if resumed:
            steps, batch, seq_len = resumed["steps"], resumed["batch_size"], resumed["seq_len"]
            print_line(f"{last.minutes:g} minutes: {steps:,} steps of {batch} × {seq_len:,} tokens")
        else:
            mode, (steps, batch, seq_len, seconds, _) = choose_in_minutes(
                last, mode, open_mode, print_line, accelerator.num_processes, len(recipes)
            )
        taken: dict[str, Any] = {"tokens": steps * batch * seq_len} if pruned else {"steps": steps, "minutes": None}
        recipes = [replace(recipe, batch_size=batch, seq_len=seq_len, **taken) for recipe in recipes]
        # a resumed run may have had fewer processes
        check_sharding(recipes[-1], accelerator.num_processes)
    # so that the recipe in a checkpoint repeats the run
    chosen = {"optimizer": mode.optimizer or last.optimizer, **last.without_effect(train=mode.train)}
    recipes = [replace(recipe, train=mode.train, **chosen) for recipe in recipes]
    fitted = fit(recipes[-1], source, devices, mode)
    usual = sequences_at_once(recipes[-1], devices)
    if fitted.num_sequences < usual:
        print_line(f"memory is short: the micro-batch size is {fitted.num_sequences} instead of {usual} sequences")
    starts = [{}, *({pool.name: pool.keep_ratio for pool in sizes} for sizes in pools[:-1])]
    in_family = len(recipes) > 1
    runs = [
        Run(recipe=recipe, steps=steps, start=start, in_family=in_family, **fitted.resolved())
        for recipe, steps, start in zip(recipes, steps_of(recipes), starts, strict=True)
    ]
    return Resolved(runs, fitted, loaded, seconds)


def resolve_training_mode(
    recipe: Recipe | RecoveryRecipe,
    source: Source,
    resumed: Mapping[str, Any],
    devices: Devices,
    accelerator: Accelerator,
    print_line: Printer,
) -> Mode:
    """Return the training mode: that of the interrupted run, or the first that memory holds now.

    print_line: prints the chosen mode, and the memory that the next mode up would require.
    """
    if resumed:
        mode = Mode(resumed["train"], resumed["optimizer"])
        if mode.optimizer == "adamw-8bit" and (obstacle := obstacle_to_8_bits(accelerator)):
            raise SettingError(obstacle)
        return mode
    modes, obstacle = allowed_modes(recipe), ""
    itemsize = loading_options(source, recipe.dtype, accelerator.device)["dtype"].itemsize
    needed = {mode: held_bytes(recipe, source, mode, itemsize, devices.num_shards) for mode in suited_modes(recipe)}
    needs = {mode: f"{name_of(mode, recipe)} requires {gigabytes(number)}" for mode, number in needed.items()}
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
    # a mode that the user passed may take all memory
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


def choose_in_minutes(
    recipe: Settled,
    mode: Mode,
    open_mode: Callable[[Mode], Callable[[Settled], float]],
    print_line: Printer,
    num_processes: int = 1,
    num_sizes: int = 1,
) -> tuple[Mode, Shape]:
    """Return the best training mode that fits FEWEST_STEPS into the minutes of a recipe, from `mode`
    on, and its steps.

    open_mode: loads a mode, and returns what times a step of a recipe. Raises: SettingError if no
    mode that the recipe allows fits.
    """
    print_line(TIMING)
    modes = allowed_modes(recipe)
    shapes: dict[Mode, Shape] = {}
    simpler: list[Mode] = [other for other in modes[modes.index(mode) + 1 :] if other.train != mode.train]
    chosen: Mode
    for chosen in (mode, *simpler):
        shape = shapes[chosen] = fit_minutes(recipe, chosen, open_mode(chosen), num_processes, num_sizes)
        if shape.steps >= FEWEST_STEPS:
            break
    better = [*shapes][:-1]
    others = "".join(f"; {name_of(other, recipe)} requires --minutes {shapes[other].minutes}" for other in better)
    steps, tokens, trained = shape.steps, f"{shape.batch_size} × {shape.seq_len:,} tokens", name_of(chosen, recipe)
    if steps < FEWEST_STEPS:
        remedy = ", or leave out --train" * (recipe.train not in ("auto", "masks"))
        remedy += ", or a lower --seq-len" * (shape.seq_len > FEWEST_TOKENS // 2)
        raise SettingError(
            "minutes",
            f"is {recipe.minutes:g}, enough for {steps} steps of {tokens} where {FEWEST_STEPS} are needed; give at "
            f"least {shape.minutes} for {trained}{remedy}{others}",
        )
    print_line(f"{recipe.minutes:g} minutes: {steps:,} steps of {tokens}, {trained}{others}")
    if steps < WANTED_STEPS // 2:
        enough = math.ceil((recipe.minutes or 0.0) * WANTED_STEPS / steps)
        print_line(f"so few steps are a demonstration; --minutes {enough} allows {WANTED_STEPS}, a better model")
    return chosen, shape


def fit_minutes(
    recipe: Settled, mode: Mode, measure: Callable[[Settled], float], num_processes: int, num_sizes: int = 1
) -> Shape:
    """Return the steps of a mode that fit into the minutes of a recipe; shorter sequences if they
    are few.

    Every process gets equally many sequences, at least one, unless the recipe has a smaller batch.
    measure: returns the seconds of a step. num_sizes: that share the search.
    """
    seconds, sizes = 60.0 * (recipe.minutes or 0.0), FAMILY_STEPS if num_sizes > 1 else 1.0
    usual = recipe.batch_size, recipe.seq_len

    def shaped(tokens_per_step: int, shortest: int) -> tuple[int, int]:
        if tokens_per_step >= math.prod(usual):
            return usual
        seq_len = min(recipe.seq_len, max(shortest, tokens_per_step // max(2, num_processes)))
        sequences = max(1, tokens_per_step // seq_len // num_processes) * num_processes
        return min(recipe.batch_size, sequences), seq_len

    @cache
    def timed(batch: int, seq_len: int) -> float:
        return measure(replace(recipe, batch_size=batch, seq_len=seq_len))

    # from the smallest step up, because a larger one takes less time per token but minutes on a CPU
    tokens_per_step, shape = 0, shaped(FEWEST_TOKENS, SHORTEST)
    while math.prod(shape) > tokens_per_step:
        tokens_per_step, tokens = math.prod(shape), seconds / timed(*shape) * math.prod(shape)
        fitting = math.prod(usual)
        while fitting > max(FEWEST_TOKENS, tokens / WANTED_STEPS):
            fitting //= 2
        shape = shaped(fitting, SHORTEST)
    tokens_per_step = fitting
    for shortest in (SHORTEST,) if mode.train == "masks" else (SHORTEST_OF_WEIGHTS, SHORTEST):
        batch, seq_len = shaped(tokens_per_step, shortest)
        step = timed(batch, seq_len)
        trials = trial_steps_of(replace(recipe, batch_size=batch, seq_len=seq_len), mode.train)
        steps = max(0, int((seconds / step - trials) / sizes))
        if steps >= SHORT_RUN:
            break
    return Shape(steps, batch, seq_len, step, math.ceil((trials + FEWEST_STEPS * sizes) * step / 60.0))


def trial_steps_of(recipe: TrainingSettings, train: str) -> int:
    """Return about how many steps the trials of a run's learning rate take at most."""
    return trial_steps(train, recipe.batch_size, recipe.seq_len) if recipe.finds_rate(train) else 0


def time_run(run: Run[Any], loaded: Loaded, pools: Sequence[Pool], accelerator: Accelerator) -> float:
    """Return the seconds of a step over random tokens with all gates open, of the slowest process."""
    model, gated, _, teacher = loaded
    training = loaded.training()

    def make(blocks: Tensor, schedule: Schedule) -> Learner:
        batches = Batches(blocks, schedule, accelerator)
        if gated:
            return trainer_of(schedule)(gated, batches, schedule, pools, training)
        return Learner(model, batches, schedule, training)

    models = [model] if teacher is None else [model, teacher]
    with explained(too_large(run.recipe)):
        return seconds_a_step(models, make, run.schedule, run.recipe.seq_len, accelerator)


def load_trained(
    run: Run[Any], source: Source, accelerator: Accelerator, pruned: Source | None = None, teacher: Any = None
) -> Loaded:
    """Load the model of a run with its gates, and what is trained besides the gates; it must not
    have run forward.

    source: the dense model. pruned: the model of a recovery, whose gates are fixed. teacher: the dense
    model, if it is in memory already.
    Raises: TrainingError if a device cannot hold it.
    """
    recipe, weights, gated = run.recipe, None, None
    set_seed(recipe.seed)  # of additions
    with explained(too_large(recipe)):
        model = load(pruned or source, recipe, accelerator)
        if run.train != "masks":  # gates scale the input of adapters too, so these are added first
            weights = TrainedWeights(model, accelerator, run.train, rank_of(recipe), run.optimizer)
        if not pruned:
            if accelerator.device.type == "cuda":
                with suppress(Exception):  # without a C compiler, eager mode is slower and right
                    fuse_elementwise(model)
            gated = GatedModel(model, source.widths, source.sizes, head_unit_of(recipe, source))
        if teacher is None and recipe.holds_teacher(run.train):
            teacher = load_teacher(source, recipe, accelerator, model)
    return Loaded(model, gated, weights, teacher)


def name_of(mode: Mode, recipe: TrainingSettings) -> str:
    """Return what a mode trains, in words; a recovery trains no masks."""
    return str(mode).removeprefix("masks and ") if isinstance(recipe, RecoveryRecipe) else str(mode)


def too_large(recipe: Recipe | RecoveryRecipe) -> str:
    """Return the message for a model and a sequence that do not fit a device."""
    return (
        f"{recipe.model} and a sequence of {recipe.seq_len:,} tokens do not fit into the memory of a device; free it "
        "of other processes, lower --seq-len, or distribute the weights over more devices with --shard"
    )
