"""The verbs of pruning and recovery as functions of `ddp_vllm`.

Each function imports what it needs when it is called, so that importing this module does not import
torch.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ddp_vllm
from ddp_prune.cards import parse_cards
from ddp_prune.checks import check_suits
from ddp_prune.models.source import check_model
from ddp_prune.recipe import Recipe, load_recipes
from ddp_prune.recovery_recipe import RecoveryRecipe, load_recovery
from ddp_prune.run import schedule
from ddp_prune.run_folder import RECORD, clear_run, interrupted_run, run_folder
from ddp_prune.settings import FidelitySettings, TrainingSettings
from ddp_prune.text.rows import check_sources
from ddp_vllm.checkpoint import Checkpoint, read_checkpoint, read_config
from ddp_vllm.errors import CheckpointError, SettingError, line_printer
from ddp_vllm.evaluations import default_output
from ddp_vllm.masks import MASKS_FILE, read_provenance
from ddp_vllm.model_facts import describe_model
from ddp_vllm.output import check_output, clear
from ddp_vllm.provenance import local_provenance
from ddp_vllm.results import results_folder
from ddp_vllm.settings import documents, plain
from ddp_vllm.speed import find_profile

if TYPE_CHECKING:
    from ddp_prune.plan import Plan


@documents(Recipe)
def prune(
    model: str | Path,
    *,
    output: str | Path,
    recipe: str | Path | Recipe | None = None,
    overwrite: bool = False,
    tracker: str | None = None,
    verbose: bool = False,
    **settings: Any,
) -> Checkpoint:
    """Find the units a model needs least, remove them and write the pruned checkpoint.

    If the call is interrupted, the same call resumes it.

    model: a folder or a hub name. recipe: a TOML file with settings, or a `Recipe`, whose model is
    not used. overwrite: replace an existing pruned folder. tracker: also log to this tracker, such
    as `tensorboard`. verbose: print what the command line prints. settings: any field of a `Recipe`
    (`sparsity`, `data`, `steps`, …), which overrides that of `recipe`; these are the options of
    [`ddp-vllm prune`](commands.md#ddp-vllm-prune).
    """
    if (count := len(_recipes(model, recipe, settings))) > 1:
        raise SettingError(f"{count} sizes are given, but prune makes one; prune_sizes makes several")
    options: dict[str, Any] = {"overwrite": overwrite, "tracker": tracker, "verbose": verbose}
    return prune_sizes(model, output=output, recipe=recipe, **options, **settings)[0]


@documents(Recipe)
def prune_sizes(
    model: str | Path,
    *,
    output: str | Path,
    recipe: str | Path | Recipe | None = None,
    overwrite: bool = False,
    tracker: str | None = None,
    verbose: bool = False,
    **settings: Any,
) -> list[Checkpoint]:
    """Prune a model to several sizes in one search, such as `sparsity=[0.1, 0.2, 0.3]`.

    Each size is written into a folder inside `output`. The arguments are those of `prune`.
    """
    recipes, output = _recipes(model, recipe, settings), Path(output)
    clear(output)
    clear_run(output)
    if not interrupted_run(output, recipes, overwrite=overwrite) and len(recipes) == 1:
        check_output(output, overwrite=overwrite, reads=[model])
    _check_model(recipes[0])
    _check_texts(recipes[0])
    from ddp_prune import jobs
    from ddp_vllm.pages.terminal import SafeConsole

    return jobs.prune(
        recipes, output, overwrite=overwrite, tracker=tracker, console=SafeConsole.of(verbose),
        measure=partial(ddp_vllm.profile, verbose=verbose),
    )  # fmt: skip


@documents(Recipe)
def plan(
    model: str | Path,
    *,
    output: str | Path = "pruned",
    recipe: str | Path | Recipe | None = None,
    on: str | None = None,
    verbose: bool = False,
    **settings: Any,
) -> "Plan":
    """Return what `prune` would remove and the memory and time it would take; nothing is written.

    The result has `lines`, which `prune --dry-run` prints, and the numbers `removed`, `peak_bytes`
    and `seconds`.

    on: GPUs such as `h100-80gb` or `2xh100-80gb`, for which memory and time are estimated instead
        of for this machine.
    verbose: print what takes time.
    """
    recipes = _recipes(model, recipe, settings)
    if on:
        parse_cards(on)
    _check_model(recipes[0])
    from ddp_prune import plan as planning

    return planning.plan(recipes, Path(output), on, line_printer(verbose))


def _recipes(model: str | Path, recipe: str | Path | Recipe | None, settings: Mapping[str, Any]) -> list[Recipe]:
    """Return the recipe of each size. Raises: SettingError before anything expensive."""
    base = recipe.changed() if isinstance(recipe, Recipe) else Path(recipe) if recipe else None
    recipes = load_recipes(base, {**settings, "model": model})
    schedule(recipes)
    return recipes


def _check_texts(recipe: TrainingSettings) -> None:
    """Refuse a missing text before torch is imported. Raises: TextError."""
    check_sources(recipe.data, recipe.text_column)
    if recipe.watch:
        check_sources(recipe.watch, recipe.text_column)


def _check_model(recipe: Recipe) -> None:
    """Refuse a missing model or profile, and settings that do not suit the model, before torch is
    imported. Raises: ModelError, SettingError."""
    source = check_model(recipe.model)
    if recipe.profile and not Path(recipe.profile).is_file():
        raise SettingError(f"profile is {recipe.profile}, which is not a file; give one that ddp-vllm profile wrote")
    if source:
        check_suits(recipe, source.with_blocks(recipe.blocks))
        if recipe.profile:
            stock, elsewhere = read_config(source.folder), recipe.other_machine
            find_profile(
                recipe.profile, source.folder, stock, recipe.workload, ddp_vllm.profile, other_machine=elsewhere
            )


def apply(
    model: str | Path, masks: str | Path, *, output: str | Path, tp: int = 1, align: int = 1, overwrite: bool = False
) -> Checkpoint:
    """Prune a dense model by a published masks file, without text and without training.

    masks: a `ddp_masks.safetensors`. tp: refuse masks that do not split over this many devices.
    align: move channels between layers until all widths are multiples of this number.
    """
    output = Path(output)
    check_output(output, overwrite=overwrite, reads=[model])
    if not Path(masks).is_file():
        raise CheckpointError(f"{masks} is not a file; give the {MASKS_FILE} of a pruned folder")
    read_provenance(Path(masks))  # refuses another file
    check_model(str(model))
    from ddp_prune.export import apply_masks

    return apply_masks(str(model), Path(masks), output, tp=tp, align=align, overwrite=overwrite)


@documents(RecoveryRecipe)
def recover(
    model: str | Path,
    *,
    output: str | Path,
    recipe: str | Path | None = None,
    overwrite: bool = False,
    tracker: str | None = None,
    verbose: bool = False,
    **settings: Any,
) -> Checkpoint:
    """Train a pruned model on the dense model's outputs to recover quality, and write the better
    model.

    model: a pruned folder. settings: any field of a `RecoveryRecipe` (`minutes`, `data`, `teacher`,
    …); settings that are not passed are those of the pruning run. The other arguments are those of
    `prune`.
    """
    folder, output = Path(model), Path(output)
    clear(output)
    clear_run(output)
    if not (run_folder(output) / RECORD).exists():  # an interrupted run decides later
        check_output(output, overwrite=overwrite, reads=[folder])
    read_checkpoint(folder)
    provenance = local_provenance(folder / MASKS_FILE)
    dense = {"model": provenance["applied_to"]} if "applied_to" in provenance else {}
    pruned_with = provenance.get("recipe", {}) | dense
    resolved = load_recovery(Path(recipe) if recipe else None, {**settings, "model": model}, pruned_with)
    if not interrupted_run(output, [resolved], overwrite=overwrite):
        check_output(output, overwrite=overwrite, reads=[folder, resolved.teacher])
    if not provenance:
        raise CheckpointError(f"{folder} lacks {MASKS_FILE}, which lists removed units; copy the whole folder")
    check_model(resolved.teacher, with_tokenizer=False)
    _check_texts(resolved)
    from ddp_prune import recover as recovery
    from ddp_vllm.pages.terminal import SafeConsole

    console = SafeConsole.of(verbose)
    return recovery.recover(resolved, output, overwrite=overwrite, tracker=tracker, console=console)


def quantize(
    model: str | Path, scheme: str, *, output: str | Path, overwrite: bool = False, verbose: bool = False
) -> Path:
    """Quantize a pruned or dense folder with llm-compressor into a folder that vLLM serves, and
    return that folder.

    scheme: `W8A8` (8-bit integers), `FP8_DYNAMIC` or `W4A16` (4-bit weights), as llm-compressor
    names them. verbose: print which layers have widths that vLLM's faster kernels do not support.
    The other arguments are those of `prune`.
    """
    check_output(Path(output), overwrite=overwrite, reads=[model])
    read_checkpoint(Path(model), dense=True)
    from ddp_prune import quantize as quantizing

    quantizing.quantize(Path(model), scheme, Path(output), overwrite=overwrite, print_line=line_printer(verbose))
    return Path(output)


def evaluate_text(
    model: str | Path,
    texts: str | Path | Sequence[str | Path],
    *,
    output: str | Path | None = None,
    verbose: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """Compare a model with the dense one on text of your own: perplexity, KL divergence and top-1
    agreement.

    texts: files or hub datasets, as `prune` takes them. output: a folder, by default `eval` in the
    model's. settings: any field of `FidelitySettings` (`against`, `max_length`, …). `["texts"]` has
    the results of each text.
    """
    folder = Path(output) if output else default_output(str(model))
    names = [texts] if isinstance(texts, str | Path) else texts
    chosen = FidelitySettings(model=str(model), texts=tuple(map(str, names)), **plain(settings))
    chosen.check()
    for model_folder in filter(None, (chosen.model, chosen.against)):
        describe_model(model_folder)
    for name in chosen.texts:
        check_sources(name)
    from ddp_prune.fidelity import compare_on_text

    with results_folder(folder):
        return compare_on_text(chosen, folder, print_line=line_printer(verbose))
