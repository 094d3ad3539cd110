"""The verbs of pruning and recovery as functions of `ddp_vllm`.

Each function imports what it needs when it is called, so that importing this module does not import
torch.
"""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import ddp_vllm
from ddp_prune.models.source import check_model
from ddp_prune.recipe import Recipe, check_suits, load_recipes
from ddp_prune.run import steps_of
from ddp_prune.run_folder import interrupted_run
from ddp_prune.settings import FidelitySettings, RecoveryRecipe, TrainingSettings, load_recovery
from ddp_prune.text.rows import check_sources
from ddp_vllm.checkpoint import Checkpoint, read_checkpoint, read_stock_config
from ddp_vllm.errors import CheckpointError, SettingError, echo, line_printer
from ddp_vllm.evaluations import default_output
from ddp_vllm.latency import find_profile
from ddp_vllm.masks import MASKS_FILE, Provenance, read_provenance
from ddp_vllm.model_facts import describe_model
from ddp_vllm.output import check_output
from ddp_vllm.pages.summary import summary, trained_together
from ddp_vllm.proof import Proof
from ddp_vllm.provenance import local_provenance, provenance_of
from ddp_vllm.settings import Option, command, documents, typed

if TYPE_CHECKING:
    from ddp_prune.plan import Plan

Folder = Annotated[Path | str, Option("Folder to write the model to.", "-o", heading="Basic")]
File = Annotated[Path | str | None, Option("TOML file with any settings of a run.")]
Overwrite = Annotated[bool, Option("Replace an existing pruned model.")]
Tracker = Annotated[
    str | None, Option("Also log to an accelerate tracker, such as tensorboard or wandb.", heading="Rarely needed")
]


def _end(result: "list[Checkpoint] | Checkpoint | Plan", _: Mapping[str, Any]) -> None:
    """Print a plan, and end the group of processes that the verbs of a command share."""
    from ddp_prune.devices import leave_group

    if not isinstance(result, list | Checkpoint):
        echo("\n".join(result.lines))
    leave_group()


def _summaries(result: "list[Checkpoint] | Plan", _: Mapping[str, Any]) -> Any:
    return [summary(size) for size in result] if isinstance(result, list) else dataclasses.asdict(result)


@command("prune", settings=Recipe, show=_end, as_json=_summaries, has_quiet=True)
def _prune(
    model: str | Path,
    *,
    output: Annotated[Path | None, Option("Folder to write the model to.", "-o", heading="Basic")] = None,
    recipe: File = None,
    tracker: Tracker = None,
    overwrite: Overwrite = False,
    proof: Proof = True,
    dry_run: Annotated[
        bool, Option("Print what would be removed and the estimated memory and time, then exit.")
    ] = False,
    on: Annotated[
        str | None, Option("With --dry-run: estimate for GPUs such as h100-80gb or 2xh100.")
    ] = None,
    verbose: bool = False,
    **settings: Any,
) -> "list[Checkpoint] | Plan":  # fmt: skip
    """Prune MODEL and write the smaller checkpoint.

        ddp-vllm prune MODEL --speedup 1.25 --data my_chats.jsonl --minutes 60 -o ./pruned

    MODEL is a folder or a Hugging Face Hub name. Pruning trains a gate for every head and channel
    on text; units whose gates close are removed. The remaining weights are distilled from the dense
    model at the same time; ddp-vllm recover does that for longer. Several sizes, such as --sparsity
    0.1,0.2,0.3, come from one search and are written to one folder each. After an interruption, the
    same command resumes. On several devices: accelerate launch -m ddp_vllm prune …
    """
    if dry_run:
        if output:
            _check_output(output, _recipes(model, recipe, settings), overwrite=overwrite, reads=[model])
        return plan(model, output=output or "pruned", recipe=recipe, on=on, verbose=verbose, **settings)
    if on:
        raise SettingError("on", "estimates for other GPUs and trains nothing; add --dry-run")
    if output is None:
        raise SettingError("output", "is missing; pass the folder to write the model to")
    return prune_sizes(
        model, output=output, recipe=recipe, overwrite=overwrite, proof=proof, tracker=tracker, verbose=verbose,
        **settings,
    )  # fmt: skip


@documents(Recipe)
@typed(Recipe)
def prune(
    model: str | Path,
    *,
    output: str | Path,
    recipe: str | Path | Recipe | None = None,
    overwrite: bool = False,
    proof: bool = True,
    tracker: str | None = None,
    verbose: bool = False,
    **settings: Any,
) -> Checkpoint:
    """Find the units a model needs least, remove them and write the pruned checkpoint.

    If the call is interrupted, the same call resumes it.

    model: a folder or a hub name. recipe: a TOML file with settings, or a `Recipe`, whose model is
    not used. overwrite: replace an existing pruned folder. proof: compare the written folder, as a
    fresh process reads it, with the model that was measured. tracker: also log to this tracker, such
    as `tensorboard`. verbose: print what the command line prints. settings: any field of a `Recipe`
    (`sparsity`, `data`, `steps`, …), which overrides that of `recipe`; these are the options of
    [`ddp-vllm prune`](commands.md#ddp-vllm-prune).
    """
    if (count := len(_recipes(model, recipe, settings))) > 1:
        raise SettingError(f"{count} sizes are given, but prune makes one; prune_sizes makes several")
    (checkpoint,) = prune_sizes(
        model, output=output, recipe=recipe, overwrite=overwrite, proof=proof, tracker=tracker, verbose=verbose,
        **settings,
    )  # fmt: skip
    return checkpoint


@documents(Recipe)
@typed(Recipe)
def prune_sizes(
    model: str | Path,
    *,
    output: str | Path,
    recipe: str | Path | Recipe | None = None,
    overwrite: bool = False,
    proof: bool = True,
    tracker: str | None = None,
    verbose: bool = False,
    **settings: Any,
) -> list[Checkpoint]:
    """Prune a model to several sizes in one search, such as `sparsity=[0.1, 0.2, 0.3]`.

    Each size is written into a folder inside `output`. The arguments are those of `prune`.
    """
    recipes, output = _recipes(model, recipe, settings), Path(output)
    _check_output(output, recipes, overwrite=overwrite, reads=[model])
    _check_model(recipes[0])
    _check_texts(recipes[0])
    from ddp_prune import jobs
    from ddp_vllm.pages.terminal import SafeConsole

    given = jobs.Command(output, overwrite, proof, tracker, SafeConsole(quiet=not verbose))
    return jobs.prune(recipes, given, partial(ddp_vllm.profile, verbose=verbose))


@documents(Recipe)
@typed(Recipe)
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
    _check_model(recipes[0])
    _check_texts(recipes[0], of_hub=False)
    from ddp_prune import plan as planning

    return planning.plan(recipes, Path(output), on, line_printer(verbose))


def _recipes(model: str | Path, recipe: str | Path | Recipe | None, settings: Mapping[str, Any]) -> list[Recipe]:
    """Return the recipe of each size. Raises: SettingError before anything expensive."""
    base = recipe.changed() if isinstance(recipe, Recipe) else Path(recipe) if recipe else None
    recipes = load_recipes(base, {**settings, "model": model})
    steps_of(recipes)
    return recipes


def _check_output(
    output: Path, recipes: Sequence[TrainingSettings], *, overwrite: bool, reads: Sequence[str | Path]
) -> None:
    """Refuse an output that the run of these recipes cannot write. reads: as of `check_output`. Raises:
    OutputError.

    The first of several processes tells: each would find the lock of another one.
    """
    if os.environ.get("RANK", "0") != "0":
        return
    if not interrupted_run(output, recipes, overwrite=overwrite) and len(recipes) == 1:
        check_output(output, overwrite=overwrite, reads=reads)


def _check_texts(recipe: TrainingSettings, *, of_hub: bool = True) -> None:
    """Refuse a missing text before torch is imported. Raises: TextError."""
    for data in filter(None, (recipe.data, recipe.watch)):
        check_sources(data, recipe.text_column, of_hub=of_hub)


def _check_model(recipe: Recipe) -> None:
    """Refuse a missing model or profile, and settings that do not suit the model, before torch is
    imported. Raises: ModelError, SettingError."""
    source = check_model(recipe.model)
    if recipe.profile and not Path(recipe.profile).is_file():
        raise SettingError("profile", f"is {recipe.profile}, which is not a file; give one that ddp-vllm profile wrote")
    if source:
        check_suits(recipe, source.with_blocks(recipe.blocks))
        if recipe.profile:
            stock, elsewhere = read_stock_config(source.folder), recipe.other_machine
            find_profile(
                recipe.profile, source.folder, stock, recipe.workload, ddp_vllm.profile, other_machine=elsewhere
            )


def _warn_of_weights(applied: Checkpoint, values: Mapping[str, Any]) -> None:
    provenance, folder = Provenance.of(read_provenance(values["masks"])), applied.folder
    if (together := trained_together(provenance)) or provenance.recovery:
        when = "together with" if together else "after"
        echo(
            f"warning: weights were trained {when} these masks, which do not hold them; {folder} has the dense model's "
            f"weights and is worse until ddp-vllm recover {quote(str(folder))} -o NEW trains them",
            err=True,
        )
    _announce(folder)


def _announce(folder: Path) -> None:
    echo(f"read back: {Provenance.of(provenance_of(folder)).proof.statement}\nwritten: {folder}")


@command("apply", show=_warn_of_weights)
def apply(
    model: str | Path,
    masks: Annotated[Path | str, Option("Masks file, ddp_masks.safetensors.")],
    *,
    output: Folder,
    overwrite: Overwrite = False,
    proof: Proof = True,
) -> Checkpoint:
    """Prune MODEL by published masks; this requires no text and no training.

    A masks file holds no weights. If weights were trained together with the masks (prune --train
    weights or lora) or after them (recover), the written model has the dense model's weights
    instead and is worse; ddp-vllm recover trains them.
    """
    output = Path(output)
    check_output(output, overwrite=overwrite, reads=[model])
    if not Path(masks).is_file():
        raise CheckpointError(f"{masks} is not a file; give the {MASKS_FILE} of a pruned folder")
    read_provenance(Path(masks))  # refuses another file
    check_model(str(model))
    from ddp_prune.export import apply_masks

    return apply_masks(str(model), Path(masks), output, overwrite=overwrite, proof=proof)


@documents(RecoveryRecipe)
@command("recover", settings=RecoveryRecipe, show=_end, as_json=lambda recovered, _: summary(recovered), has_quiet=True)
def recover(
    model: str | Path,
    *,
    output: Folder,
    recipe: File = None,
    overwrite: Overwrite = False,
    proof: Proof = True,
    tracker: Tracker = None,
    verbose: bool = False,
    **settings: Any,
) -> Checkpoint:
    """Train the weights of the pruned MODEL on the dense model's output and write the better model.

    Widths, speed and serving do not change. Teacher, text and batch size are those of the pruning
    run unless they are passed. After an interruption, the same command resumes. On several devices:
    accelerate launch -m ddp_vllm recover …

    In Python `settings` are any fields of a `RecoveryRecipe`. verbose: print what the command prints.
    """
    folder, output = Path(model), Path(output)
    read_checkpoint(folder)
    provenance = local_provenance(folder / MASKS_FILE)
    dense = {"model": provenance["applied_to"]} if "applied_to" in provenance else {}
    pruned_with = provenance.get("recipe", {}) | dense
    resolved = load_recovery(Path(recipe) if recipe else None, {**settings, "model": model}, pruned_with)
    _check_output(output, [resolved], overwrite=overwrite, reads=[folder, resolved.teacher])
    if not provenance:
        raise CheckpointError(f"{folder} lacks {MASKS_FILE}, which lists removed units; copy the whole folder")
    check_model(resolved.teacher, with_tokenizer=False)
    _check_texts(resolved)
    from ddp_prune import jobs
    from ddp_prune import recover as recovery
    from ddp_vllm.pages.terminal import SafeConsole

    given = jobs.Command(output, overwrite, proof, tracker, SafeConsole(quiet=not verbose))
    return recovery.recover(resolved, given)


@command("quantize", show=lambda folder, _: _announce(folder))
def quantize(
    folder: str | Path,
    scheme: Annotated[
        str,
        Option(
            "8-bit integers, 8-bit floats, or 4-bit weights alone, by llm-compressor's names.",
            choices=("W8A8", "FP8_DYNAMIC", "W4A16"),
        ),
    ],
    *,
    output: Folder,
    overwrite: Overwrite = False,
    proof: Proof = True,
    verbose: bool = False,
) -> Path:
    """Quantize the pruned or dense model in FOLDER with llm-compressor; vLLM serves it as before.

    This requires an environment separate from vLLM's: pip install ".[prune,quantize]" in a clone of
    ddp-vllm. Weights are rounded to the nearest value, so no text is required. The command first
    prints the layers whose widths suit no fast kernel, and how to avoid that.

    In Python the written folder is returned. verbose: print these layers.
    """
    check_output(Path(output), overwrite=overwrite, reads=[folder])
    read_checkpoint(Path(folder), dense=True)
    from ddp_prune import quantize as quantizing

    quantizing.quantize(
        Path(folder), scheme, Path(output), overwrite=overwrite, proof=proof, print_line=line_printer(verbose)
    )
    return Path(output)


@command("trim", show=lambda folder, _: _announce(folder))
def trim(
    model: str | Path,
    *,
    tokens: Annotated[
        int, Option("Most tokens to keep, rounded down to a multiple of 128.", heading="Budget", least=1)
    ],
    data: Annotated[
        str | Path, Option("Text whose tokens are counted: hub datasets or files.", heading="Text", join=",".join)
    ],
    keep: Annotated[
        str | Path | None,
        Option("Further text whose tokens stay before those of --data.", heading="Text", join=",".join),
    ] = None,
    output: Folder,
    overwrite: Overwrite = False,
    proof: Proof = True,
    verbose: bool = False,
) -> Path:
    """Remove the tokens that text uses least from the dense MODEL, with their rows of the embedding
    and the head.

        ddp-vllm trim MODEL --tokens 65536 --data chats.jsonl,code.jsonl -o ./trimmed
        vllm serve ./trimmed

    The result is a stock dense model, which vLLM, transformers and all commands take as any other.
    Text of kept tokens gives the same tokens and logits as before. Other text becomes longer.

    In Python the written folder is returned. verbose: print what was removed and how much longer
    held-out text becomes.
    """
    check_output(Path(output), overwrite=overwrite, reads=[model])
    for texts in filter(None, (data, keep)):
        check_sources(str(texts))
    from ddp_prune import trim as trimming

    trimming.trim(
        str(model), str(data), str(keep or ""), Path(output),
        num_tokens=tokens, overwrite=overwrite, proof=proof, print_line=line_printer(verbose),
    )  # fmt: skip
    return Path(output)


@typed(FidelitySettings)
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
    settings |= {"model": model, "texts": texts}
    chosen = FidelitySettings(**settings)
    for model_folder in filter(None, (chosen.model, chosen.against)):
        describe_model(model_folder)
    for name in chosen.texts:
        check_sources(name)
    from ddp_prune.fidelity import compare_on_text

    return compare_on_text(chosen, folder, print_line=line_printer(verbose))
