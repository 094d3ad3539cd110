"""The verbs prune, prune_sizes, recover, quantize and evaluate_text as functions of `ddp_vllm`.

Each function imports what it needs when it is called, so that importing this module does not import torch.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ddp_vllm
from ddp_prune import read_recipe
from ddp_prune.recipe import Recipe
from ddp_prune.verbs import as_recipe_values, recipes_of
from ddp_vllm.checkpoint import Checkpoint, read_checkpoint
from ddp_vllm.errors import SettingError, line_printer
from ddp_vllm.evaluations import default_output
from ddp_vllm.masks import MASKS_FILE
from ddp_vllm.output import check_output, clear, is_unfinished
from ddp_vllm.provenance import local_provenance
from ddp_vllm.results import results_folder

if TYPE_CHECKING:
    from rich.console import Console


def prune(
    model: str | Path,
    *,
    output: str | Path,
    recipe: str | Path | None = None,
    overwrite: bool = False,
    tracker: str | None = None,
    verbose: bool = False,
    **settings: Any,
) -> Checkpoint:
    """Find the units a model needs least, remove them and write the pruned checkpoint.

    If the call is interrupted, the same call resumes where it stopped.

    model: a folder or a hub name. recipe: a TOML file with settings. overwrite: replace an existing pruned folder.
    tracker: also log to this tracker, such as `tensorboard`. verbose: print what the command line prints. settings: any
    field of a `Recipe` (`sparsity`, `data`, `steps`, …); these are the options of
    [`ddp-vllm prune`](commands.md#ddp-vllm-prune).
    """
    recipes = recipes_of(model, recipe, settings)
    if len(recipes) > 1:
        raise SettingError(f"{len(recipes)} sizes are given, but prune makes one; prune_sizes makes several")
    return _prune(recipes, Path(output), overwrite=overwrite, tracker=tracker, verbose=verbose)[0]


def prune_sizes(
    model: str | Path,
    *,
    output: str | Path,
    recipe: str | Path | None = None,
    overwrite: bool = False,
    tracker: str | None = None,
    verbose: bool = False,
    **settings: Any,
) -> list[Checkpoint]:
    """Prune a model to several sizes in one search, such as `sparsity=[0.1, 0.2, 0.3]`.

    Each size is written into a folder inside `output`. The arguments are those of `prune`.
    """
    recipes = recipes_of(model, recipe, settings)
    return _prune(recipes, Path(output), overwrite=overwrite, tracker=tracker, verbose=verbose)


def _prune(
    recipes: Sequence[Recipe], output: Path, *, overwrite: bool, tracker: str | None, verbose: bool
) -> list[Checkpoint]:
    clear(output)
    resumes = output.is_dir() and (recipes[0].recover or len(recipes) > 1 or is_unfinished(output))
    if not resumes:
        check_output(output, overwrite=overwrite)
    from ddp_prune import pipeline
    from ddp_recover.recover import recover_pruned
    from ddp_vllm.pages.written import show

    return pipeline.prune(
        recipes,
        output,
        overwrite=overwrite,
        tracker=tracker,
        console=_console(verbose),
        measure=partial(ddp_vllm.profile, verbose=verbose),
        recover=recover_pruned,
        show=show,
    )


def recover(
    model: str | Path,
    *,
    output: str | Path,
    recipe: str | Path | None = None,
    overwrite: bool = False,
    verbose: bool = False,
    **settings: Any,
) -> Checkpoint:
    """Train a pruned model on the dense model's outputs to recover quality, and write the better model.

    model: a pruned folder. settings: any field of a `RecoveryRecipe` (`minutes`, `data`, `teacher`, …); those that are
    not given are as in the run that pruned the model. The other arguments are those of `prune`.
    """
    folder, output = Path(model), Path(output)
    clear(output)
    check_output(output, overwrite=overwrite or is_unfinished(output))
    read_checkpoint(folder)
    provenance = local_provenance(folder / MASKS_FILE)
    dense = {"model": provenance["applied_to"]} if "applied_to" in provenance else {}
    pruned_with = provenance.get("recipe", {}) | dense
    values = as_recipe_values({**settings, "model": model})
    found = read_recipe.load_recovery(Path(recipe) if recipe else None, values, pruned_with)
    from ddp_recover.recover import recover_alone

    return recover_alone(found, output, overwrite=overwrite, console=_console(verbose))


def quantize(
    model: str | Path, scheme: str, *, output: str | Path, overwrite: bool = False, verbose: bool = False
) -> Path:
    """Quantize a pruned or dense folder with llm-compressor into a folder that vLLM serves, and return that folder.

    scheme: `W8A8` (8-bit integers), `FP8` or `W4A16` (4-bit weights). verbose: print which layers have widths that
    vLLM's faster kernels do not support. The other arguments are those of `prune`.
    """
    from ddp_recover import quantize as quantizing

    quantizing.quantize(Path(model), scheme, Path(output), overwrite=overwrite, say=line_printer(verbose))
    return Path(output)


def evaluate_text(
    model: str | Path,
    texts: str | Path | Sequence[str | Path],
    *,
    output: str | Path | None = None,
    verbose: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """Compare a model with the dense one on text of your own: perplexity, KL divergence and top-1 agreement.

    texts: files or hub datasets, as `prune` takes them. output: a folder, by default `eval` in the model's. settings:
    any field of `FidelitySettings` (`against`, `max_length`, …). `["texts"]` has the results of each text.
    """
    from ddp_recover.fidelity import FidelitySettings, compare_on_text

    folder = Path(output) if output else default_output(str(model))
    names = [texts] if isinstance(texts, str | Path) else texts
    chosen = FidelitySettings(model=str(model), texts=tuple(map(str, names)), **as_recipe_values(settings))
    chosen.check()
    with results_folder(folder):
        return compare_on_text(chosen, folder, say=line_printer(verbose))


def _console(verbose: bool) -> "Console":
    from ddp_vllm.pages.terminal import SafeConsole

    return SafeConsole(quiet=not verbose, soft_wrap=True)  # lines are copied, so never wrapped
