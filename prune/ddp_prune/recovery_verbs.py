"""The verbs recover, quantize and evaluate_text as functions of `ddp_vllm`.

Each function imports what it needs when it is called, so that importing this module does not import
torch.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ddp_prune.fidelity_settings import FidelitySettings
from ddp_prune.models.source import check_model
from ddp_prune.recovery_recipe import RecoveryRecipe, load_recovery
from ddp_prune.run_folder import RECORD, interrupted_run, run_folder
from ddp_prune.text.rows import check_sources
from ddp_vllm.checkpoint import Checkpoint, read_checkpoint
from ddp_vllm.errors import CheckpointError, line_printer
from ddp_vllm.evaluations import default_output
from ddp_vllm.masks import MASKS_FILE
from ddp_vllm.model_facts import describe_model
from ddp_vllm.output import check_output, clear
from ddp_vllm.provenance import local_provenance
from ddp_vllm.results import results_folder
from ddp_vllm.settings import documents, plain


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
    check_sources(resolved.data, resolved.text_column)
    if resolved.watch:
        check_sources(resolved.watch, resolved.text_column)
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
