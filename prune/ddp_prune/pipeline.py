"""One pruning run, in the order data flows: text → tokens → masks → widths → checkpoint."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from ddp_models.loading import check_sharding
from ddp_models.source import Source, check_index, check_spares_source, open_source
from ddp_prune.budget import Pool, head_unit_of, suited_pools
from ddp_prune.export import export, layer_widths
from ddp_prune.masks_file import provenance_of
from ddp_prune.mode import earlier_run, is_same_recipe, resolve_training_mode, was_interrupted
from ddp_prune.recipe import Recipe
from ddp_prune.run import Run, make_runs
from ddp_prune.timing import settle
from ddp_prune.train import Inputs, Result, read_inputs, train_size
from ddp_text.rows import sources_of
from ddp_training.loop import NO_FAMILY, FamilyCheckpoints
from ddp_training.processes import (
    broadcast_from_main,
    describe_device,
    finish_run,
    main_process_first,
    make_accelerator,
    raise_on_all_ranks,
    start_tracker,
)
from ddp_training.run_state import RunState, check_run_folders, locked_run, saved_header
from ddp_vllm.checkpoint import Checkpoint, read_checkpoint
from ddp_vllm.latency import Profile
from ddp_vllm.masks import METRICS_FILE
from ddp_vllm.output import check_output, clear, is_unfinished
from ddp_vllm.pages.written import write_pages
from ddp_vllm.speed import Measure, find_profile, predicted_latency

FAMILY = ".branch"  # name of a size family's own run, next to its sizes; the dot keeps it apart from any output

Show = Callable[[Checkpoint, str, Console], None]
"""Prints a written checkpoint; takes the checkpoint, its dense model's name and a console."""


def prune(
    recipes: Sequence[Recipe],
    output: Path,
    *,
    overwrite: bool,
    tracker: str | None,
    console: Console,
    measure: Measure,
    show: Show,
) -> list[Checkpoint]:
    """Prune a model and write the checkpoint to `output`; several sizes are written into folders inside it.

    recipes: one per size, smallest cut first.
    measure: measures the latency profile that the budget `latency` requires, if there is none yet.
    Returns the written checkpoints. The caller has checked the output; other errors of the user are raised before the
    model is loaded. Raises: a child of DdpError.
    """
    first, family = recipes[0], output / FAMILY if len(recipes) > 1 else None
    folders = folders_of(recipes, output)
    for folder in folders:
        clear(folder)
    for folder in [*folders, family] if family else folders:
        check_run_folders(folder)
    accelerator = make_accelerator(output, tracker)
    show_line = partial(console.print, markup=False, soft_wrap=True)
    say: Callable[[str], None] = show_line if accelerator.is_main_process else lambda _: None
    say(describe_device(accelerator))
    check_sharding(first, accelerator.num_processes)
    with raise_on_all_ranks(accelerator):
        if accelerator.is_main_process:
            for recipe, folder in zip(recipes, folders, strict=True):
                if not is_same_recipe(provenance_of(folder).get("recipe", {}), recipe):
                    check_output(folder, overwrite=overwrite)
    done = broadcast_from_main(accelerator, searched_before(recipes, folders, family, overwrite=overwrite))
    source = main_process_first(accelerator, lambda: find_model(first, output))
    shapes = source.shapes
    profile = main_process_first(accelerator, partial(latency_profile, first, source, measure))
    pools = [suited_pools(recipe, source, shapes, profile)[1] for recipe in recipes]
    earlier = earlier_run(first, folders[0], accelerator, in_family=done > 0)
    mode = resolve_training_mode(first, source, earlier, accelerator, say)
    recipes = settle(recipes, earlier, mode, source, pools[-1], head_unit_of(first, source), accelerator, say)
    runs = make_runs(recipes, pools, mode, profile)
    start_tracker(accelerator, "ddp-vllm", recipes[-1])
    inputs = main_process_first(accelerator, partial(read_inputs, runs[-1], source, accelerator, console))
    inputs.announce(runs[-1])
    sizes = list(zip(runs, pools, folders, strict=True))
    with raise_on_all_ranks(accelerator):  # all folders, before the first size is trained
        if accelerator.is_main_process:
            for run, folder in zip(runs, folders, strict=True):
                if not is_written(inputs, run, folder, done):
                    check_output(folder, overwrite=overwrite)
    if family:
        prune_family(inputs, sizes, family, done, show, overwrite=overwrite)
    else:
        prune_size(inputs, *sizes[0], NO_FAMILY, done, show, overwrite=overwrite)
    finish_run(accelerator)
    return list(map(read_checkpoint, folders))


def folders_of(recipes: Sequence[Recipe], output: Path) -> list[Path]:
    """Return the folder that each size is written to."""
    return [output / f"{each.size_name}-{each.size:g}" for each in recipes] if len(recipes) > 1 else [output]


def searched_before(
    recipes: Sequence[Recipe], folders: Sequence[Path], family: Path | None, *, overwrite: bool
) -> float:
    """Return the steps of a size family's search whose sizes are kept if this command has written them before.

    These are all steps, but with `overwrite` only those of the interrupted command, if there is one. A family is also
    interrupted while its sizes are recovered. 0 for a single size.
    """
    if not family:
        return 0
    lacks_recovery = [
        bool(each.recover_minutes and (found := provenance_of(folder)) and "recovery" not in found)
        for each, folder in zip(recipes, folders, strict=True)
    ]
    return math.inf if not overwrite or any(lacks_recovery) else saved_header(family).get("step", 0)


def find_model(recipe: Recipe, output: Path, *, load: bool = True) -> Source:
    """Return the dense model, to be loaded or only looked at; refuse an output that would replace it."""
    source = open_source(recipe.model, load=load)
    check_spares_source(output, source)
    if load:
        check_index(source.folder)
    return source


def latency_profile(recipe: Recipe, source: Source, measure: Measure) -> Profile | None:
    """Return the latency profile that the budget of a recipe requires, or None if it requires none."""
    if recipe.budget != "latency":
        return None
    return find_profile(
        recipe.profile, source.folder, source.config, recipe.workload, measure, other_machine=recipe.other_machine
    )


def prune_family(
    inputs: Inputs,
    sizes: Sequence[tuple[Run, Sequence[Pool], Path]],
    family: Path,
    done: float,
    show: Show,
    *,
    overwrite: bool,
) -> None:
    """Prune one size after the other; the search of each starts at the end of the previous size's search.

    family: the output of the family's own run. Its lock is held until all sizes are written, and its state is the end
    of the search of the latest size. done: as `searched_before` returns it.
    """
    last = sizes[-1][0]
    shared, resume_from = inputs.state(family, last), None
    with locked_run(shared, inputs.accelerator):
        for run, pools, folder in sizes:
            save_to = inputs.state(family, run) if run is not last else None
            checkpoints = FamilyCheckpoints(resume_from, save_to, run.steps.search)
            prune_size(inputs, run, pools, folder, checkpoints, done, show, overwrite=overwrite)
            resume_from = save_to
        shared.remove()


def prune_size(
    inputs: Inputs,
    run: Run,
    pools: Sequence[Pool],
    output: Path,
    family: FamilyCheckpoints,
    done: float,
    show: Show,
    *,
    overwrite: bool,
) -> None:
    """Write and show the pruned checkpoint of one size, and delete the run's folder.

    A checkpoint that an interrupted command wrote is not written again; one that will be recovered is shown later.
    done: as `searched_before` returns it.
    """
    accelerator = inputs.accelerator
    for pool in pools:
        inputs.say(pool.describe())
    state = inputs.state(output, run, inputs.say)
    with locked_run(state, accelerator):
        if broadcast_from_main(accelerator, is_written(inputs, run, output, done)):
            inputs.say(f"{output} was written before")
        else:
            with raise_on_all_ranks(accelerator):
                if accelerator.is_main_process:
                    check_output(output, overwrite=overwrite)
            result = train_size(inputs, run, pools, state, family)
            if accelerator.is_main_process:
                write(inputs, run, pools, result, state, overwrite=overwrite)
        with raise_on_all_ranks(accelerator):
            if accelerator.is_main_process:
                if not run.recipe.recover_minutes or "recovery" in provenance_of(output):
                    show(read_checkpoint(output), run.recipe.model, inputs.console)
                if is_unfinished(output):
                    state.remove()


def is_written(inputs: Inputs, run: Run, output: Path, done: float) -> bool:
    """Tell whether an interrupted command with this run, text and weights has already written `output`.

    done: as `searched_before` returns it.
    """
    found, recipe = provenance_of(output), run.recipe
    in_family = run.in_family and run.steps.search <= done
    if in_family and done < math.inf:  # a size whose run is saved is about to be replaced
        in_family = not inputs.state(output, run).state.exists()
    interrupted = was_interrupted(recipe, output, found, in_family=in_family)
    same_run = found.get("run") == run.to_dict() and found.get("learned_from") == inputs.learned_from
    return bool(interrupted and same_run and is_same_recipe(found.get("recipe", {}), recipe))


def write(inputs: Inputs, run: Run, pools: Sequence[Pool], result: Result, state: RunState, *, overwrite: bool) -> None:
    """Write the checkpoint of a run with its provenance."""
    recipe, source, learned = run.recipe, inputs.source, result.learned
    provenance: dict[str, Any] = {
        "recipe": recipe.to_dict(),
        "run": run.to_dict(),
        "search_steps": run.steps.search,
        "targets": {pool.name: 1.0 - pool.keep_ratio for pool in pools},
        "texts": sources_of(recipe.data),
        "rounding": learned.rounding,
        **({"learning_rate": learned.rate} if learned.rate else {}),
        **learned.routing(source.sizes.routed_layers),
    }
    if run.profile:
        widths = layer_widths(learned.gates, source.sizes)
        provenance |= {"latency": predicted_latency(run.profile, widths, recipe.workload)}
    export(
        source,
        learned.gates,
        state.output,
        head_unit=inputs.head_unit,
        provenance=provenance | result.evaluation | {"learned_from": inputs.learned_from},
        scores={"z": learned.z, "saliency": learned.saliency, **learned.snapshots},
        overwrite=overwrite,
        extra_files={METRICS_FILE: state.metrics.read_text(encoding="utf-8")},
        transform=result.transform,
        finish=write_pages,
    )
