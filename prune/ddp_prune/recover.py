"""One recovery, in the order data flows: pruned checkpoint and dense model → text → weights → checkpoint."""

import dataclasses
import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, set_seed
from rich.console import Console

from ddp_prune.devices import check_shares, failing_together, fit_attention, free_memory, load, make_accelerator
from ddp_prune.exam import Exam
from ddp_prune.export import export_recovered
from ddp_prune.model import Source, check_index, check_spares_source, open_pruned, open_source, weight_files
from ddp_prune.progress import StepProgress, show
from ddp_prune.recipe import RecoveryRecipe
from ddp_prune.run_state import RunState, check_run_folders, fingerprint, saved_header
from ddp_prune.text import Blocks, load_blocks, load_tokenizer, sources_of
from ddp_prune.train import fit_batches, take_steps
from ddp_prune.trainer import Batches
from ddp_prune.weight_trainer import LEARNING_RATES, WeightTrainer
from ddp_vllm.checkpoint import MASKS_FILE, Checkpoint, read_checkpoint
from ddp_vllm.errors import CheckpointError, OutputError, SettingError, TextError, TrainingError
from ddp_vllm.families import Dimensions
from ddp_vllm.pages.evidence import RECOVERY_FILE

FULL_BYTES = 16  # a parameter that learns: weight and gradient, float32 master and its gradient, two moments
SHARE_OF_FREE = 0.7  # of memory, for these; the rest is for activations


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A pruned model and the dense one it learns from, loaded."""

    model: Any
    dense: Any
    sizes: Dimensions
    tokenizer: Any


def recover(
    recipe: RecoveryRecipe, output: Path, accelerator: Accelerator, *, overwrite: bool, console: Console
) -> None:
    """Let the weights of a pruned checkpoint learn from the dense model, and write what they become to `output`.

    What a user can get wrong is checked before a model is loaded, whether the output exists by the command line.
    Raises: a child of DdpError.
    """
    check_run_folders(output)
    if recipe.shard:
        check_shares(recipe.batch_size, accelerator.num_processes)
    for first in (True, False):  # of a machine's processes: what it downloads and caches, the others find
        with failing_together(accelerator):
            if accelerator.is_local_main_process == first:
                checkpoint, dense, pruned = _open(recipe, output)
    set_seed(recipe.seed)
    main = accelerator.is_main_process
    say = partial(console.print, markup=False, soft_wrap=True) if main else lambda _: None
    try:
        pair = Pair(
            model=load(pruned, recipe, accelerator),
            dense=load(dense, recipe, accelerator),
            sizes=dense.sizes,
            tokenizer=load_tokenizer(str(pruned.folder)),
        )
        trainer = WeightTrainer(pair.model, pair.dense, _chosen(recipe, pair, output, accelerator), accelerator)
        plan = _planned(trainer, pair, accelerator, say)
        blocks, watched = _read(plan, checkpoint, pair, accelerator, say)
        exam = Exam({plan.data: blocks.heldout} | watched, pair.tokenizer)
        exam.take("dense", pair.dense)
        exam.take("pruned", pair.model)
        _give(trainer, pair, blocks, plan, accelerator, say)
        learned_from = fingerprint(
            [blocks.train, blocks.scored, blocks.heldout], [*weight_files(pruned.folder), *weight_files(dense.folder)]
        ) | {"asked": recipe.to_dict()}
        run = RunState(output, plan, learned_from=learned_from, writes=main, say=say)
        with ExitStack() as stack:
            with failing_together(accelerator):
                stack.enter_context(run.locked())
            began = time.perf_counter()
            with StepProgress(console, plan.steps, _phase, main) as report:
                take_steps(trainer, plan, accelerator, run, report)
            about = {"recipe": plan.to_dict(), "texts": sources_of(plan.data), "seconds": time.perf_counter() - began}
            become = trainer.finish()
            exam.take("recovered", pair.model)
            if main:
                _write(checkpoint, become, output, exam, about, run, overwrite=overwrite)
                for line in exam.sentences():
                    say(line)
    except torch.OutOfMemoryError as error:  # a step says it in words of its own
        raise TrainingError(
            f"{recipe.model}, its dense model and a sequence of {recipe.seq_len:,} tokens do not fit into the memory "
            "of a device; free it of other processes, try --method lora, lower --seq-len, or --shard over more devices"
        ) from error


def _write(
    checkpoint: Checkpoint,
    become: Callable[[str, torch.Tensor], torch.Tensor],
    output: Path,
    exam: Exam,
    about: dict[str, Any],
    run: RunState,
    *,
    overwrite: bool,
) -> None:
    """Write the checkpoint with what is known of it, and forget the run."""
    learned_on, *watched = exam.texts
    recovery = about | {"watched": {name: exam.perplexity(name) for name in watched}} | exam.said()
    export_recovered(
        checkpoint,
        become,
        output,
        provenance={**checkpoint.provenance, "perplexity": exam.perplexity(learned_on), "recovery": recovery},
        extra_files={RECOVERY_FILE: run.metrics.read_text(encoding="utf-8")},
        overwrite=overwrite,
    )
    run.remove()


def recover_alone(recipe: RecoveryRecipe, output: Path, *, overwrite: bool, console: Console) -> None:
    """Do what the verb does: `recover`, then show what came of it."""
    accelerator = make_accelerator(output, None)
    recover(recipe, output, accelerator, overwrite=overwrite, console=console)
    accelerator.end_training()
    if accelerator.is_main_process:
        show(output, recipe.teacher, console)


def _open(recipe: RecoveryRecipe, output: Path) -> tuple[Checkpoint, Source, Source]:
    """Find the pruned checkpoint and its teacher, and check that they and the output suit each other."""
    checkpoint, dense = read_checkpoint(Path(recipe.model)), open_source(recipe.teacher)
    check_spares_source(output, dense)
    check_index(dense.folder)
    inside, folder = checkpoint.folder.resolve(), output.resolve()
    if inside != folder and inside.is_relative_to(folder):
        raise OutputError(f"{output} holds the pruned model, which would be lost; choose another folder")
    longest = dense.config.get("max_position_embeddings") or math.inf
    if recipe.seq_len > longest:
        raise SettingError(f"seq_len is {recipe.seq_len}, but {recipe.teacher} knows {longest:,}; lower --seq-len")
    if not checkpoint.provenance:
        raise CheckpointError(f"{recipe.model} lacks {MASKS_FILE}, which says what was removed; copy the folder whole")
    return checkpoint, dense, open_pruned(checkpoint, dense)


def _chosen(recipe: RecoveryRecipe, pair: Pair, output: Path, accelerator: Accelerator) -> RecoveryRecipe:
    """Return the recipe with all that it leaves open but `tokens`; or as an interrupted run for it had settled it."""
    header = saved_header(output) if accelerator.is_main_process else {}
    asked = (header.get("learned_from") or {}).get("asked")
    found: list[dict[str, Any] | None] = [header["recipe"] if asked == recipe.to_dict() else None]
    if accelerator.num_processes > 1:
        broadcast_object_list(found)
    if found[0] is not None:
        return RecoveryRecipe(**found[0])
    method, source = recipe.method, recipe.learn_from
    if method == "auto":
        needed = FULL_BYTES * sum(parameter.numel() for parameter in pair.model.parameters())
        free = accelerator.gather(torch.tensor([free_memory(accelerator)], device=accelerator.device)).min()
        share = accelerator.num_processes if recipe.shard else 1
        method = "full" if needed / share <= SHARE_OF_FREE * int(free) else "lora"
    if source == "auto":
        source = "assistant" if pair.tokenizer.chat_template else "all"
    rate = recipe.learning_rate or LEARNING_RATES[method]
    return dataclasses.replace(recipe, method=method, learn_from=source, learning_rate=rate)


def _planned(
    trainer: WeightTrainer, pair: Pair, accelerator: Accelerator, say: Callable[[str], None]
) -> RecoveryRecipe:
    """Return the trainer's recipe with the tokens that its minutes allow, by the time a step on chance text takes."""
    recipe = trainer.recipe
    if recipe.tokens:
        return recipe
    size = (recipe.batch_size, recipe.seq_len)
    chance = torch.randint(pair.dense.config.vocab_size, size, generator=torch.Generator().manual_seed(recipe.seed))
    blocks = Blocks(train=chance, scored=torch.ones_like(chance, dtype=torch.bool), heldout=chance, found=0)
    recipe = dataclasses.replace(recipe, tokens=chance.numel())
    _give(trainer, pair, blocks, recipe, accelerator, say)
    steps = max(1, int(60.0 * recipe.minutes / trainer.seconds_a_step()))
    return dataclasses.replace(recipe, tokens=steps * chance.numel())


def _read(
    plan: RecoveryRecipe, checkpoint: Checkpoint, pair: Pair, accelerator: Accelerator, say: Callable[[str], None]
) -> tuple[Blocks, dict[str, torch.Tensor]]:
    """Return the text to learn on, and held-out blocks of text of another kind by its name."""
    learned_on = str(checkpoint.provenance.get("recipe", {}).get("data", ""))
    watch = plan.watch or (learned_on if learned_on != plan.data else "")
    options = {"seq_len": plan.seq_len, "heldout_blocks": plan.heldout_blocks, "seed": plan.seed}
    watched: dict[str, torch.Tensor] = {}
    for first in (True, False):
        with failing_together(accelerator):
            if accelerator.is_local_main_process == first:
                wanted = plan.steps * plan.batch_size
                blocks = load_blocks(
                    plan.data, pair.tokenizer, train_blocks=wanted, min_train_blocks=plan.batch_size, **options
                )
                try:
                    if watch:
                        other = load_blocks(watch, pair.tokenizer, train_blocks=1, min_train_blocks=0, **options)
                        watched = {watch: other.heldout}
                except TextError:
                    if plan.watch:
                        raise
    say(
        f"text: {blocks.train.numel():,} tokens of {plan.data} for {plan.steps:,} steps of "
        f"{plan.batch_size * plan.seq_len:,}, {blocks.heldout.numel():,} held out; "
        f"{plan.method} weights learn at up to {plan.learning_rate:g}"
    )
    if not watched:
        say("no text of another kind is watched; name one with --watch to hear if the model gets worse there")
    if plan.learn_from == "all":
        return dataclasses.replace(blocks, scored=torch.ones_like(blocks.scored)), watched
    with_answers = blocks.scored[:, 1:].any(1)
    if int(with_answers.sum()) < plan.batch_size:
        raise TextError(f"{plan.data} holds hardly anything that an assistant says; try --learn-from all")
    if blocks.scored.all() and pair.tokenizer.chat_template:
        say(f"{plan.model} answers in conversations, but {plan.data} holds none; add some, separated by a comma")
    return dataclasses.replace(blocks, train=blocks.train[with_answers], scored=blocks.scored[with_answers]), watched


def _give(
    trainer: WeightTrainer,
    pair: Pair,
    blocks: Blocks,
    plan: RecoveryRecipe,
    accelerator: Accelerator,
    say: Callable[[str], None],
) -> None:
    """Let the trainer learn from these blocks, as many at once as memory holds."""
    batches = Batches(blocks.train, plan, accelerator)
    fit_batches(pair, batches, plan, accelerator, say)
    fit_attention(pair.dense, plan.seq_len, accelerator.device)
    trainer.read(batches, blocks.scored, plan)


def _phase(metrics: dict[str, float]) -> tuple[str, str]:
    return "recover", f"rate {metrics['learning_rate']:.1e} "
