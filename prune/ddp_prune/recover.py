"""Trains a pruned model on the dense model's outputs: both checkpoints → text → trained weights →
checkpoint."""

import dataclasses
import json
import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from rich.console import Console

from ddp_prune.core.batches import Batches
from ddp_prune.core.loop import take_steps
from ddp_prune.core.passes import checkpoint_layers, explained, fit_attention
from ddp_prune.core.processes import (
    describe_device,
    finish_run,
    main_process_first,
    make_accelerator,
    raise_on_all_ranks,
    start_tracker,
)
from ddp_prune.core.weights import TrainedWeights, UpdatedWeights, highest_rate, obstacle_to_8_bits
from ddp_prune.fit import TRAINING_SHARE, Devices, Fit, Mode, allowed_modes, fit, held_bytes
from ddp_prune.masks_file import read_masks, read_scores, write_masks
from ddp_prune.models.evaluation import Evaluation, bos_warning
from ddp_prune.models.loading import check_sharding, load
from ddp_prune.models.source import (
    Source,
    check_index,
    open_pruned,
    open_source,
    weight_files,
)
from ddp_prune.models.writing import config_of, stored_tensors, write_model
from ddp_prune.recovery_recipe import RecoveryRecipe
from ddp_prune.run_folder import RunFolder, SizeFolder, inputs_of
from ddp_prune.text.blocks import select_loss_mask
from ddp_prune.text.rows import sources_of
from ddp_prune.text.tokens import load_tokenizer
from ddp_prune.texts import load_text, load_watched
from ddp_prune.weight_trainer import WeightTrainer
from ddp_vllm.checkpoint import Checkpoint, read_checkpoint
from ddp_vllm.errors import CheckpointError, SettingError, TextError
from ddp_vllm.families import Dimensions
from ddp_vllm.masks import MASKS_FILE, METRICS_FILE, RECOVERY_FILE
from ddp_vllm.model_files import tokenizer_and_config_files
from ddp_vllm.output import atomic_folder, check_output, clear
from ddp_vllm.pages.progress import StepProgress
from ddp_vllm.pages.written import print_written, write_pages
from ddp_vllm.provenance import identity_of, local_provenance

PrintLine = Callable[[str], None]
RESOLVED = ("train", "optimizer", "learn_from", "learning_rate", "tokens")
"""Settings that are resolved before the first step; a resumed run keeps them."""


@dataclass(frozen=True, kw_only=True)
class Models:
    """The pruned model, whose weights are trained, and the dense model that teaches it."""

    model: Any
    teacher: Any
    sizes: Dimensions
    """Of the dense model."""
    tokenizer: Any
    accelerator: Accelerator


class Text(NamedTuple):
    """Token blocks, int64 [num_blocks, seq_len]."""

    blocks: torch.Tensor
    """To train on."""
    loss_mask: torch.Tensor | None
    """Of these blocks, bool: tokens that contribute to the cross-entropy; None: all."""
    heldout: Mapping[str, torch.Tensor]
    """To evaluate on, by the name of the text: first the training text, then watched texts of other
    kinds."""


def recover_alone(
    recipe: RecoveryRecipe, output: Path, *, overwrite: bool, tracker: str | None, console: Console
) -> Checkpoint:
    """Make the accelerator, recover a pruned checkpoint, and return the written one."""
    accelerator = make_accelerator(output, tracker)
    start_tracker(accelerator, "ddp-vllm-recover", recipe)
    recover(recipe, output, accelerator, overwrite=overwrite, console=console)
    finish_run(accelerator)
    return read_checkpoint(output)


def recover(
    recipe: RecoveryRecipe, output: Path, accelerator: Accelerator, *, overwrite: bool, console: Console
) -> None:
    """Train the weights of a pruned checkpoint, write the result to `output` and show it.

    Errors of the user are raised before a model is loaded.
    Raises: a child of DdpError.
    """
    check_sharding(recipe, accelerator.num_processes)
    main = accelerator.is_main_process
    print_line: PrintLine = partial(console.print, markup=False, soft_wrap=True) if main else lambda _: None
    run = RunFolder(output, accelerator)
    with run.open([recipe], overwrite=overwrite):
        if run.written([output]):
            print_line(f"{output} was written before")
        else:
            with raise_on_all_ranks(accelerator):
                if main:
                    clear(output)
                    check_output(output, overwrite=run.record["overwrite"], reads=[recipe.model, recipe.teacher])
            _recover(recipe, run, print_line, console)
        run.remove()


def _recover(recipe: RecoveryRecipe, run: RunFolder, print_line: PrintLine, console: Console) -> None:
    accelerator = run.accelerator
    checkpoint, pruned, dense = main_process_first(accelerator, lambda: _open(recipe))
    set_seed(recipe.seed)
    print_line(describe_device(accelerator))
    too_large = (
        f"{recipe.model}, its dense model and a sequence of {recipe.seq_len:,} tokens do not fit into the memory "
        "of a device; free it of other processes, try --train lora, lower --seq-len, or --shard over more devices"
    )
    devices = Devices.here(recipe, accelerator)
    with explained(too_large):
        models = Models(
            model=load(pruned, recipe, accelerator),
            teacher=load(dense, recipe, accelerator),
            sizes=dense.sizes,
            tokenizer=load_tokenizer(str(pruned.folder)),
            accelerator=accelerator,
        )
        resolved = (
            dataclasses.replace(recipe, **run.resolved) if run.resolved else _resolved(recipe, dense, devices, models)
        )
        if resolved.optimizer == "adamw-8bit" and (obstacle := obstacle_to_8_bits(accelerator)):
            raise SettingError(obstacle)
        weights = TrainedWeights(models.model, accelerator, resolved.train, resolved.rank, resolved.optimizer)
        # the pruned model takes at most as much as the dense one
        found = fit(resolved, dense, devices, Mode(resolved.train, resolved.optimizer), teacher=True)
        resolved = resolved if resolved.tokens else _with_timed_tokens(resolved, found, models, weights)
        provenance = local_provenance(checkpoint.folder / MASKS_FILE)
        text = _load_text(resolved, provenance, models, print_line)
        values = {name: getattr(resolved, name) for name in RESOLVED}
        shared = accelerator.num_processes if recipe.shard else 1
        run.begin(values, _inputs(recipe, text, pruned.folder, dense.folder), shared_by=shared)
        progress = SizeFolder(run, print_line=print_line)
        evaluation, transform = _train(resolved, found, models, weights, text, progress, console)
        with raise_on_all_ranks(accelerator):
            if accelerator.is_main_process:
                provenance |= _results(resolved, run, evaluation)
                written = _write(checkpoint, transform, run, provenance)
                for line in evaluation.recovery_summary():
                    print_line(line)
                print_written(written, recipe.teacher, console)


def _open(recipe: RecoveryRecipe) -> tuple[Checkpoint, Source, Source]:
    """Return the pruned checkpoint, its source and the dense source, checked against each other and
    the recipe."""
    checkpoint, dense = read_checkpoint(Path(recipe.model)), open_source(recipe.teacher)
    check_index(dense.folder)
    longest = dense.text_config.get("max_position_embeddings") or math.inf
    if recipe.seq_len > longest:
        raise SettingError(f"seq_len is {recipe.seq_len}, but {recipe.teacher} takes {longest:,}; lower --seq-len")
    if not checkpoint.provenance:
        raise CheckpointError(f"{recipe.model} lacks {MASKS_FILE}, which lists removed units; copy the whole folder")
    return checkpoint, open_pruned(checkpoint, dense), dense


def _resolved(recipe: RecoveryRecipe, dense: Source, devices: Devices, models: Models) -> RecoveryRecipe:
    """Return the recipe with training mode, optimizer, loss mask and learning rate resolved.

    The mode is the first that memory holds next to the dense model, or else the one that takes
    least. Raises: SettingError if its optimizer cannot run here.
    """
    modes, obstacle = [mode for mode in allowed_modes(recipe) if mode.train != "masks"], ""
    if any(mode.optimizer == "adamw-8bit" for mode in modes) and (obstacle := obstacle_to_8_bits(models.accelerator)):
        modes = [mode for mode in modes if mode.optimizer != "adamw-8bit"]
    if not modes:
        raise SettingError(obstacle)
    itemsize, shards = models.model.dtype.itemsize, devices.num_shards
    needed = {mode: held_bytes(dense, mode, itemsize, shards, teacher=True, rank=recipe.rank) for mode in modes}
    mode = next((mode for mode in modes if needed[mode] <= TRAINING_SHARE * devices.free), modes[-1])
    learn_from = recipe.learn_from
    if learn_from == "auto":
        learn_from = "assistant" if models.tokenizer.chat_template else "all"
    rate = recipe.learning_rate or highest_rate(mode.train, models.model.config.get_text_config().hidden_size)
    return dataclasses.replace(recipe, **mode._asdict(), learn_from=learn_from, learning_rate=rate)


def _with_timed_tokens(recipe: RecoveryRecipe, found: Fit, models: Models, weights: TrainedWeights) -> RecoveryRecipe:
    """Return the recipe with the number of tokens that fits into its minutes, after timing a step
    on random tokens."""
    generator = torch.Generator().manual_seed(recipe.seed)
    shape = (recipe.batch_size, recipe.seq_len)
    blocks = torch.randint(models.teacher.config.get_text_config().vocab_size, shape, generator=generator)
    trainer = _trainer(recipe, found, models, weights, blocks, None)
    steps = max(1, int(60.0 * recipe.minutes / trainer.seconds_a_step()))
    return dataclasses.replace(recipe, tokens=steps * blocks.numel())


def _load_text(recipe: RecoveryRecipe, provenance: Mapping[str, Any], models: Models, print_line: PrintLine) -> Text:
    """Load the text to train on, its held-out part, and the watched texts. Raises: as
    `load_text`."""
    known = recipe, models.tokenizer, recipe.model, models.teacher.config.get_text_config().vocab_size
    train_blocks = recipe.steps * recipe.batch_size
    read = partial(load_text, recipe.data, *known, train_blocks=train_blocks, min_train_blocks=recipe.batch_size)
    blocks = main_process_first(models.accelerator, read)
    heldout = {recipe.data: blocks.heldout}
    for name in _watched(recipe, provenance):
        try:
            watched = main_process_first(models.accelerator, partial(load_watched, [name], blocks, *known))[name]
            heldout[name] = watched.heldout
            for note in watched.notes:
                print_line(note)
        except TextError as error:
            if recipe.watch:
                raise
            print_line(f"{name} is not watched: {error}")
    print_line(
        f"text: {blocks.train.numel():,} tokens of {recipe.data} for {recipe.steps:,} steps of "
        f"{recipe.batch_size * recipe.seq_len:,}, {blocks.heldout.numel():,} held out; "
        f"training mode {recipe.train} with {recipe.optimizer}, learning rate up to {recipe.learning_rate:g}"
    )
    if len(heldout) == 1:
        print_line("no other text is evaluated; pass --watch FILE to detect a loss on other text")
    return Text(blocks.train, select_loss_mask(blocks, recipe.learn_from, recipe.data, print_line), heldout)


def _watched(recipe: RecoveryRecipe, provenance: Mapping[str, Any]) -> list[str]:
    """Return the texts to watch: those of the recipe, or those of the pruning run that this
    recovery does not train on.

    An inherited text that is missing here, or too short, is not watched.
    """
    trained_on = set(map(identity_of, sources_of(recipe.data)))
    named = recipe.watch or str(provenance.get("recipe", {}).get("data") or "")
    return [name for name in dict.fromkeys(sources_of(named)) if identity_of(name) not in trained_on] if named else []


def _inputs(recipe: RecoveryRecipe, text: Text, *folders: Path) -> dict[str, Any]:
    """Return the identity of text, weights and configs of a run."""
    weights, others = (
        [file for folder in folders for file in files(folder)] for files in (weight_files, tokenizer_and_config_files)
    )
    # a watched text decides nothing
    return inputs_of({"train": text.blocks, "heldout": text.heldout[recipe.data]}, weights, others)


def _train(
    recipe: RecoveryRecipe,
    found: Fit,
    models: Models,
    weights: TrainedWeights,
    text: Text,
    progress: SizeFolder,
    console: Console,
) -> tuple[Evaluation, UpdatedWeights]:
    """Train the pruned model; return the evaluation of all three models, and the updated
    weights."""
    print_line, accelerator = progress.print_line, models.accelerator
    evaluation = Evaluation(text.heldout, models.tokenizer, print_line=print_line)
    evaluation.evaluate("dense", models.teacher)
    if warning := bos_warning(models.teacher, recipe.model, models.tokenizer, text.heldout[recipe.data]):
        print_line(warning)
    evaluation.evaluate("pruned", models.model)
    trainer = _trainer(recipe, found, models, weights, text.blocks, text.loss_mask)
    with StepProgress(console, recipe.steps, _phase, accelerator.is_main_process) as report:
        take_steps(trainer, recipe, recipe.steps, accelerator, progress, report)
    transform = weights.finish()
    evaluation.evaluate("recovered", models.model)
    return evaluation, transform


def _trainer(
    recipe: RecoveryRecipe,
    found: Fit,
    models: Models,
    weights: TrainedWeights,
    blocks: torch.Tensor,
    loss_mask: torch.Tensor | None,
) -> WeightTrainer:
    """Return a trainer on these blocks, whose passes fit into memory as found."""
    batches = Batches(blocks, recipe, models.accelerator, loss_mask, found.num_sequences)
    checkpoint_layers(models.model, found.checkpointed)
    for model in (models.model, models.teacher):
        fit_attention(model, recipe.seq_len, models.accelerator.device)
    return WeightTrainer(models.model, models.teacher, weights, batches, recipe)


def _phase(metrics: dict[str, float]) -> tuple[str, str]:
    return "recover", f"rate {metrics['learning_rate']:.1e} "


def _results(recipe: RecoveryRecipe, run: RunFolder, evaluation: Evaluation) -> dict[str, Any]:
    """Return the provenance of a recovery: quality before and after, and how it was trained."""
    trained_on, *watched = evaluation.texts
    steps = run.metrics.read_text(encoding="utf-8").splitlines()
    recovery = {
        "recipe": recipe.to_dict(),
        "texts": sources_of(trained_on),
        "seconds": sum(json.loads(step)["seconds"] for step in steps),
        "watched": {name: evaluation.perplexity(name) for name in watched},
        **evaluation.samples(),
    }
    return {"run_id": run.id, "perplexity": evaluation.perplexity(trained_on), "recovery": recovery}


def _write(
    checkpoint: Checkpoint, transform: UpdatedWeights, run: RunFolder, provenance: Mapping[str, Any]
) -> Checkpoint:
    """Write a pruned checkpoint again with its updated weights, each rounded once to the dtype it
    was stored in.

    Widths and gates are those of `checkpoint`. Folders inside it, such as its report, are not
    copied.
    """
    source = checkpoint.folder
    tensors = ((name, transform(name, tensor).to(tensor.dtype)) for name, tensor in stored_tensors(source))
    # of a model that another tool pruned only the widths are known
    has_masks = "converted" not in provenance
    gates, scores = (read_masks(source / MASKS_FILE)[0], read_scores(source / MASKS_FILE)) if has_masks else ({}, {})
    head_unit = str(provenance.get("head_unit", "kv-group"))
    provenance = {name: value for name, value in provenance.items() if name not in ("ddp_vllm", "head_unit")}
    with atomic_folder(run.output, overwrite=run.record["overwrite"]) as folder:
        write_model(folder, source, config_of(checkpoint), tensors)
        transform.check_complete()
        write_masks(gates, folder / MASKS_FILE, head_unit=head_unit, provenance=provenance, scores=scores)
        if (source / METRICS_FILE).exists():
            shutil.copyfile(source / METRICS_FILE, folder / METRICS_FILE)
        shutil.copyfile(run.metrics, folder / RECOVERY_FILE)
        return write_pages(folder, run.output)
