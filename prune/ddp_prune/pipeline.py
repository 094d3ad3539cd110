"""One pruning run, in the order data flows: text → tokens → masks → widths → checkpoint."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from ddp_models.loading import check_sharding
from ddp_models.source import Source, check_index, check_spares_source, open_source
from ddp_prune.budget import Pool, make_checked_pools
from ddp_prune.export import export, layer_widths
from ddp_prune.recipe import Recipe
from ddp_prune.resolve import Earlier, earlier_run, resolve_runs
from ddp_prune.run import Run
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
from ddp_training.run_state import RunState, check_run_folders, finish_deletion, locked_run, saved_header
from ddp_training.settings import is_same_recipe
from ddp_vllm.checkpoint import Checkpoint, read_checkpoint, read_config
from ddp_vllm.errors import SettingError
from ddp_vllm.families import FAMILIES, MIXTURES, dimensions_of
from ddp_vllm.latency import Profile
from ddp_vllm.masks import METRICS_FILE
from ddp_vllm.output import check_output, clear
from ddp_vllm.pages.written import print_written, write_pages
from ddp_vllm.provenance import provenance_of
from ddp_vllm.speed import Measure, find_profile, predicted_latency

# name of a size family's own run, next to its sizes; the dot keeps it apart from any output
FAMILY = ".family"


def prune(
    recipes: Sequence[Recipe],
    output: Path,
    *,
    overwrite: bool,
    tracker: str | None,
    console: Console,
    measure: Measure,
) -> list[Checkpoint]:
    """Prune a model and write the checkpoint to `output`; several sizes are written into folders
    inside it.

    recipes: one per size, smallest cut first.
    measure: measures the latency profile that the budget `latency` requires, if there is none yet.
    Returns the written checkpoints. Errors of the user are raised before the model is loaded.
    Raises: a child of DdpError.
    """
    first, folders, family = recipes[0], folders_of(recipes, output), family_run(recipes, output)
    for folder in folders:
        clear(folder)
    for folder in [*folders, family] if family else folders:
        check_run_folders(folder)
    accelerator = make_accelerator(output, tracker)
    show_line = partial(console.print, markup=False, soft_wrap=True)
    print_line: Callable[[str], None] = show_line if accelerator.is_main_process else lambda _: None
    print_line(describe_device(accelerator))
    check_sharding(first, accelerator.num_processes)
    resumed: list[Earlier | None] = []
    with raise_on_all_ranks(accelerator):
        for recipe, folder in zip(recipes, folders, strict=True) if accelerator.is_main_process else ():
            finish_deletion(folder)
            resumed.append(earlier_run(recipe, folder, family))
            check_output(folder, overwrite=overwrite or resumed[-1] is not None)
    earlier, searched = broadcast_from_main(
        accelerator, (resumed[:1], saved_header(family).get("step", 0) if family else 0)
    )
    source = main_process_first(accelerator, lambda: find_model(first, output))
    source.describe_rest(print_line)
    profile = main_process_first(accelerator, partial(latency_profile, first, source, measure))
    pools = [make_checked_pools(recipe, source, source.shapes, profile)[1] for recipe in recipes]
    runs = resolve_runs(recipes, pools, source, profile, earlier[0], accelerator, print_line)
    start_tracker(accelerator, "ddp-vllm", runs[-1].recipe)
    inputs = main_process_first(accelerator, partial(read_inputs, runs[-1], source, accelerator, console))
    inputs.announce(runs[-1])
    sizes = list(zip(runs, pools, folders, strict=True))
    with raise_on_all_ranks(accelerator):  # all folders, before the first size is trained
        for run, _, folder in sizes if accelerator.is_main_process else ():
            check_output(folder, overwrite=overwrite or may_replace(inputs, run, folder))
    if family:
        prune_family(inputs, sizes, family, searched, overwrite=overwrite)
    else:
        prune_size(inputs, *sizes[0], NO_FAMILY, overwrite=overwrite)
    finish_run(accelerator)
    return list(map(read_checkpoint, folders))


def folders_of(recipes: Sequence[Recipe], output: Path) -> list[Path]:
    """Return the folder that each size is written to."""
    if len(recipes) == 1:
        return [output]
    return [output / f"{recipe.size_name}-{recipe.size:g}" for recipe in recipes]


def family_run(recipes: Sequence[Recipe], output: Path) -> Path | None:
    """Return the output that names the run of a size family; None for a single size."""
    return output / FAMILY if len(recipes) > 1 else None


def find_model(recipe: Recipe, output: Path, *, load: bool = True) -> Source:
    """Return the dense model, to be loaded or only looked at; refuse an output that would replace
    it."""
    source = open_source(recipe.model, load=load).with_blocks(recipe.blocks)
    check_spares_source(output, source)
    if load:
        check_index(source.folder)
    return source


def latency_profile(recipe: Recipe, source: Source, measure: Measure) -> Profile | None:
    """Return the latency profile that the budget of a recipe requires, or None if it requires
    none."""
    if recipe.budget != "latency":
        return None
    stock = read_config(source.folder)
    has_times = stock["model_type"] in {*FAMILIES, *MIXTURES}
    if not has_times or source.sizes.blocks != dimensions_of(stock).blocks:
        raise SettingError(
            "a speedup requires times by heads and channels, which ddp-vllm profile measures of models with a row in "
            "docs/families.md that are pruned whole; give a sparsity or a target"
        )
    return find_profile(
        recipe.profile, source.folder, stock, recipe.workload, measure, other_machine=recipe.other_machine
    )


def prune_family(
    inputs: Inputs,
    sizes: Sequence[tuple[Run, Sequence[Pool], Path]],
    family: Path,
    searched: int,
    *,
    overwrite: bool,
) -> None:
    """Prune one size after the other; the search of each starts at the end of the previous size's
    search.

    family: the output that names the family's own run. Its lock is held until all sizes are
    written, and its state is the end of the search of the latest size.
    searched: the steps of the search in the state that an interrupted command left; 0 without one.
    """
    last = sizes[-1][0]
    shared, resume_from = inputs.state(family, last), None
    with locked_run(shared, inputs.accelerator):
        for run, pools, folder in sizes:
            save_to = inputs.state(family, run) if run is not last else None
            is_done = bool(searched) and (run is last or run.steps.search <= searched)
            is_done = is_done and not inputs.state(folder, run).folder.exists() and is_result(inputs, run, folder)
            if broadcast_from_main(inputs.accelerator, is_done):
                inputs.print_line(f"{folder} was written before")
            else:
                checkpoints = FamilyCheckpoints(resume_from, save_to, run.steps.search)
                prune_size(inputs, run, pools, folder, checkpoints, overwrite=overwrite)
            resume_from = save_to
        shared.remove()


def may_replace(inputs: Inputs, run: Run, output: Path) -> bool:
    """Tell whether `output` may be replaced without the user's word: by the run that wrote it, or
    by one that the user has started with it."""
    return inputs.state(output, run).was_interrupted() or is_result(inputs, run, output)


def is_result(inputs: Inputs, run: Run, output: Path) -> bool:
    """Tell whether `output` holds the result of this run on this text and these weights."""
    provenance = provenance_of(output)
    if "recovery" in provenance or "applied_to" in provenance:
        return False
    same_run = provenance.get("run") == run.to_dict() and provenance.get("fingerprint") == inputs.fingerprint
    return same_run and is_same_recipe(provenance.get("recipe", {}), run.recipe)


def prune_size(
    inputs: Inputs, run: Run, pools: Sequence[Pool], output: Path, family: FamilyCheckpoints, *, overwrite: bool
) -> None:
    """Train one size, write its checkpoint with its report, and delete the run's folder."""
    accelerator = inputs.accelerator
    for pool in pools:
        inputs.print_line(pool.describe())
    state = inputs.state(output, run, inputs.print_line)
    with locked_run(state, accelerator):
        overwrite = overwrite or may_replace(inputs, run, output)  # before the run saves a state
        result = train_size(inputs, run, pools, state, family)
        with raise_on_all_ranks(accelerator):
            if accelerator.is_main_process:
                checkpoint = write(inputs, run, pools, result, state, overwrite=overwrite)
                print_written(checkpoint, run.recipe.model, inputs.console)
                state.remove()


def write(
    inputs: Inputs, run: Run, pools: Sequence[Pool], result: Result, state: RunState, *, overwrite: bool
) -> Checkpoint:
    """Write the checkpoint of a run with its provenance and its report."""
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
    return export(
        source,
        learned.gates,
        state.output,
        head_unit=inputs.head_unit,
        provenance=provenance | result.evaluation | {"fingerprint": inputs.fingerprint},
        scores={"z": learned.z, "saliency": learned.saliency},
        overwrite=overwrite,
        extra_files={METRICS_FILE: state.metrics.read_text(encoding="utf-8")},
        transform=result.transform,
        finish=write_pages,
    )
