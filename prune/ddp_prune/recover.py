"""The job of recover: trains a pruned model on the dense model's outputs. Both checkpoints → text →
trained weights → checkpoint."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ddp_prune.core.batches import Batches
from ddp_prune.core.decoder import lent
from ddp_prune.core.loop import Learner, take_steps
from ddp_prune.core.processes import main_process_first, raise_on_all_ranks
from ddp_prune.core.weights import UpdatedWeights, highest_rate
from ddp_prune.devices import explained, start_tracker
from ddp_prune.export import copy_masks, warn_of_other_weights
from ddp_prune.jobs import Command, begin_job, evaluate_dense, read_text
from ddp_prune.models.evaluation import Evaluation, reference_of
from ddp_prune.models.source import Source, check_index, open_pruned, open_source
from ddp_prune.resolve import load_trained, resolve_runs, too_large
from ddp_prune.run_folder import RunFolder
from ddp_prune.settings import RecoveryRecipe
from ddp_prune.text.rows import sources_of
from ddp_prune.text.tokens import load_tokenizer
from ddp_vllm.checkpoint import Checkpoint, read_checkpoint
from ddp_vllm.errors import ModelError
from ddp_vllm.families import config_of_copy
from ddp_vllm.masks import MASKS_FILE, METRICS_FILE, RECOVERY_FILE
from ddp_vllm.model_facts import tokens_differ
from ddp_vllm.model_files import has_tokenizer, stored_tensors, write_model
from ddp_vllm.names import identity_of
from ddp_vllm.output import atomic_folder
from ddp_vllm.pages.progress import StepProgress
from ddp_vllm.pages.written import print_written, write_pages
from ddp_vllm.proof import Reference, prove
from ddp_vllm.provenance import local_provenance


def recover(recipe: RecoveryRecipe, command: Command) -> Checkpoint:
    """Train the weights of a pruned checkpoint, write the result to the output and return it.

    Errors of the user are raised before a model is loaded.
    Raises: a child of DdpError.
    """
    folders, reads = [command.output], [recipe.model, recipe.teacher]
    with begin_job(command, [recipe], folders, reads=reads) as (run_folder, left):
        if left:
            _recover(recipe, command, run_folder)
    return read_checkpoint(command.output)


def _recover(recipe: RecoveryRecipe, command: Command, run_folder: RunFolder) -> None:
    accelerator, print_line = run_folder.accelerator, run_folder.print_line
    checkpoint, pruned, dense = main_process_first(accelerator, _open, recipe)
    runs, _, loaded, _ = resolve_runs([recipe], [()], dense, run_folder.resolved, accelerator, print_line, pruned)
    tokenizer = load_tokenizer(str(pruned.folder))
    resolved = _with_defaults(runs[0].recipe, tokenizer, dense.sizes.hidden_size)
    run = replace(runs[0], recipe=resolved)
    start_tracker(accelerator, "ddp-vllm-recover", resolved)
    provenance = local_provenance(checkpoint.folder / MASKS_FILE)
    watched = _watched(recipe, provenance)
    text = main_process_first(accelerator, read_text, run, tokenizer, dense.vocab_size, watched, print_line)
    heldout = text.blocks.heldout
    print_line(
        f"text: {text.blocks.train.numel():,} tokens of {recipe.data} for {resolved.steps:,} steps of "
        f"{resolved.batch_size * resolved.seq_len:,}, {heldout.numel():,} held out; training mode {resolved.train} "
        f"with {resolved.optimizer}, learning rate up to {resolved.learning_rate:g}"
    )
    if not text.watched:
        print_line("no other text is evaluated; pass --watch FILE to detect a loss on other text")
    inputs = text.identity(pruned, dense)
    run_folder.begin(run.resolved(), inputs, shared_by=accelerator.num_processes if recipe.shard else 1)
    with explained(too_large(resolved)):
        trained = loaded.pop() if loaded else load_trained(run, dense, accelerator, pruned)
        model, _, weights, teacher = trained
        assert weights
        evaluation = evaluate_dense(teacher, resolved.teacher, resolved, text, tokenizer, print_line)
        evaluation.evaluate("pruned", model)
        progress = StepProgress(command.console, resolved.steps, _phase, accelerator.is_main_process)
        with progress as report, lent(model, teacher):
            batches = Batches(text.blocks.train, run.schedule, accelerator, text.loss_mask)
            take_steps(Learner(model, batches, run.schedule, trained.training()), run_folder, report)
        transform = weights.finish()
        evaluation.evaluate("recovered", model)
        reference = reference_of(model, tokenizer, heldout) if command.proof else None
    with raise_on_all_ranks(accelerator):
        if accelerator.is_main_process:
            results = _results(resolved, run_folder, evaluation, provenance.get("recovery"))
            written = _write(checkpoint, transform, run_folder, provenance | results, reference)
            for line in evaluation.recovery_summary():
                print_line(line)
            print_written(written, recipe.teacher, command.console)


def _with_defaults(recipe: RecoveryRecipe, tokenizer: Any, hidden_size: int) -> RecoveryRecipe:
    """Return a recipe with the tokens of its loss and its learning rate resolved."""
    learn_from = recipe.learn_from
    if learn_from == "auto":
        learn_from = "assistant" if tokenizer.chat_template else "all"
    rate = recipe.learning_rate or highest_rate(recipe.train, hidden_size)
    return replace(recipe, learn_from=learn_from, learning_rate=rate)


def _open(recipe: RecoveryRecipe) -> tuple[Checkpoint, Source, Source]:
    """Return the pruned checkpoint, its source and the dense source, checked against each other and
    the recipe."""
    checkpoint, dense = read_checkpoint(Path(recipe.model)), open_source(recipe.teacher)
    check_index(dense.folder)
    recipe.check_length(recipe.teacher, dense.text_config)
    pruned = open_pruned(checkpoint, dense)
    differing = has_tokenizer(dense.folder) and tokens_differ(dense.tokenizer, recipe.model, rows=dense.vocab_size)
    if differing:
        raise ModelError(f"{differing}; pass a teacher with the tokens of the model that it teaches")
    warn_of_other_weights(checkpoint.folder, dense)
    return checkpoint, pruned, dense


def _watched(recipe: RecoveryRecipe, provenance: Mapping[str, Any]) -> list[str]:
    """Return the texts to watch: those of the recipe, or those of the pruning run that this
    recovery does not train on.

    An inherited text that is missing here, or too short, is not watched.
    """
    trained_on = set(map(identity_of, sources_of(recipe.data)))
    named = recipe.watch or str(provenance.get("recipe", {}).get("data") or "")
    return [name for name in dict.fromkeys(sources_of(named)) if identity_of(name) not in trained_on] if named else []


def _phase(metrics: dict[str, float]) -> tuple[str, str]:
    return "recover", f"rate {metrics['learning_rate']:.1e} "


def _results(
    recipe: RecoveryRecipe, run_folder: RunFolder, evaluation: Evaluation, before: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the provenance of a recovery: quality before and after, and how it was trained.

    before: that of the recovery that this one continues.
    """
    earlier = [*before.get("earlier", []), {key: before[key] for key in ("tokens", "texts")}] if before else []
    trained_on, *watched = evaluation.texts
    steps = run_folder.metrics.read_text(encoding="utf-8").splitlines()
    recovery = {
        "recipe": recipe.to_dict(),
        "texts": sources_of(trained_on),
        **({"earlier": earlier} if earlier else {}),
        "tokens": len(steps) * recipe.batch_size * recipe.seq_len,
        "seconds": sum(json.loads(step)["seconds"] for step in steps),
        "watched": {name: evaluation.perplexity(name) for name in watched},
        **evaluation.samples(),
    }
    return {"run_id": run_folder.id, "perplexity": evaluation.perplexity(trained_on), "recovery": recovery}


def _write(
    checkpoint: Checkpoint,
    transform: UpdatedWeights,
    run_folder: RunFolder,
    provenance: Mapping[str, Any],
    reference: Reference | None,
) -> Checkpoint:
    """Write a pruned checkpoint again with its updated weights, each rounded once to the dtype it
    was stored in.

    Widths and gates are those of `checkpoint`. Folders inside it, such as its report, are not
    copied.
    """
    source = checkpoint.folder
    tensors = ((name, transform(name, tensor).to(tensor.dtype)) for name, tensor in stored_tensors(source))
    with atomic_folder(run_folder.output, overwrite=run_folder.record["overwrite"]) as folder:
        write_model(folder, source, config_of_copy(checkpoint.config, checkpoint.widths), tensors)
        transform.check_complete()
        copy_masks(source, folder, {**provenance, **prove(folder, reference)})
        if (source / METRICS_FILE).exists():
            shutil.copyfile(source / METRICS_FILE, folder / METRICS_FILE)
        shutil.copyfile(run_folder.metrics, folder / RECOVERY_FILE)
        return write_pages(folder, run_folder.output)
