"""One pruning run, in the order data flows: text → tokens → masks → widths → checkpoint."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from ddp_prune.core.budget import Pool
from ddp_prune.core.processes import (
    describe_device,
    finish_run,
    main_process_first,
    make_accelerator,
    raise_on_all_ranks,
    start_tracker,
)
from ddp_prune.export import export, layer_widths
from ddp_prune.models.loading import check_sharding
from ddp_prune.models.source import Source, check_index, open_source
from ddp_prune.pools import make_checked_pools
from ddp_prune.recipe import Recipe
from ddp_prune.resolve import resolve_runs
from ddp_prune.run import Run
from ddp_prune.run_folder import RunFolder, SizeFolder
from ddp_prune.text.rows import sources_of
from ddp_prune.train import Inputs, Result, read_inputs, train_size
from ddp_vllm.checkpoint import Checkpoint, read_checkpoint, read_config
from ddp_vllm.errors import SettingError
from ddp_vllm.families import FAMILIES, MIXTURES, dimensions_of
from ddp_vllm.latency import Profile
from ddp_vllm.masks import METRICS_FILE
from ddp_vllm.output import check_output, clear
from ddp_vllm.pages.written import print_written, write_pages
from ddp_vllm.speed import Measure, find_profile, predicted_latency


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
    first, folders = recipes[0], folders_of(recipes, output)
    accelerator = make_accelerator(output, tracker)
    show_line = partial(console.print, markup=False, soft_wrap=True)
    print_line: Callable[[str], None] = show_line if accelerator.is_main_process else lambda _: None
    print_line(describe_device(accelerator))
    check_sharding(first, accelerator.num_processes)
    run = RunFolder(output, accelerator)
    with run.open(recipes, overwrite=overwrite):
        written = run.written(folders)
        for folder in folders[: len(written)]:
            print_line(f"{folder} was written before")
        if len(written) < len(folders):
            with raise_on_all_ranks(accelerator):
                for folder in folders[len(written) :] if accelerator.is_main_process else ():
                    clear(folder)
                    check_output(folder, overwrite=run.record["overwrite"], reads=[first.model])
            _prune_sizes(recipes, run, folders, console, print_line, measure)
        run.remove()
    finish_run(accelerator)
    return list(map(read_checkpoint, folders))


def _prune_sizes(
    recipes: Sequence[Recipe],
    run: RunFolder,
    folders: Sequence[Path],
    console: Console,
    print_line: Callable[[str], None],
    measure: Measure,
) -> None:
    """Resolve the sizes, read the text, and train and write each size that is not written yet."""
    first, accelerator = recipes[0], run.accelerator
    source = main_process_first(accelerator, lambda: find_model(first))
    source.describe_rest(print_line)
    profile = main_process_first(accelerator, partial(latency_profile, first, source, measure))
    pools = [make_checked_pools(recipe, source, source.shapes, profile)[1] for recipe in recipes]
    runs, _ = resolve_runs(recipes, pools, source, profile, run.resolved, accelerator, print_line)
    last = runs[-1]
    start_tracker(accelerator, "ddp-vllm", last.recipe)
    inputs = main_process_first(accelerator, partial(read_inputs, last, source, accelerator, console))
    inputs.announce(last)
    shared = accelerator.num_processes if first.shard else 1
    run.begin(last.resolved(), inputs.fingerprint, shared_by=shared)
    for number in range(len(run.written(folders)), len(runs)):
        size = runs[number]
        for pool in pools[number]:
            print_line(pool.describe())
        progress = SizeFolder(run, number, size.steps.search if size is not last else None, print_line)
        result = train_size(inputs, size, pools[number], progress)
        with raise_on_all_ranks(accelerator):
            if accelerator.is_main_process:
                checkpoint = write(inputs, size, pools[number], result, run, folders[number])
                print_written(checkpoint, size.recipe.model, console)


def folders_of(recipes: Sequence[Recipe], output: Path) -> list[Path]:
    """Return the folder that each size is written to."""
    if len(recipes) == 1:
        return [output]
    return [output / f"{recipe.size_name}-{recipe.size:g}" for recipe in recipes]


def find_model(recipe: Recipe, *, load: bool = True) -> Source:
    """Return the dense model, to be loaded or only looked at."""
    source = open_source(recipe.model, load=load).with_blocks(recipe.blocks)
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
            "docs/models.md that are pruned whole; give a sparsity or a target"
        )
    return find_profile(
        recipe.profile, source.folder, stock, recipe.workload, measure, other_machine=recipe.other_machine
    )


def write(inputs: Inputs, size: Run, pools: Sequence[Pool], result: Result, run: RunFolder, output: Path) -> Checkpoint:
    """Write the checkpoint of a size with its provenance and its report."""
    recipe, source, learned = size.recipe, inputs.source, result.learned
    provenance: dict[str, Any] = {
        "run_id": run.id,
        "recipe": recipe.to_dict(),
        "run": size.to_dict(),
        "search_steps": size.steps.search,
        "targets": {pool.name: 1.0 - pool.keep_ratio for pool in pools},
        "texts": sources_of(recipe.data),
        "rounding": learned.rounding,
        **({"learning_rate": learned.rate} if learned.rate else {}),
        **learned.routing(source.sizes.routed_layers),
    }
    if size.profile:
        widths = layer_widths(learned.gates, source.sizes)
        provenance |= {"latency": predicted_latency(size.profile, widths, recipe.workload)}
    return export(
        source,
        learned.gates,
        output,
        head_unit=inputs.head_unit,
        provenance=provenance | result.evaluation | {"fingerprint": inputs.fingerprint},
        scores={"z": learned.z, "saliency": learned.saliency},
        overwrite=run.record["overwrite"],
        extra_files={METRICS_FILE: run.metrics.read_text(encoding="utf-8")},
        transform=result.transform,
        finish=write_pages,
    )
