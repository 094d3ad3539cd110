"""One recovery, in the order data flows: pruned checkpoint and dense model → text → weights → checkpoint."""

import dataclasses
import json
import math
import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from rich.console import Console

from ddp_prune.batches import Batches
from ddp_prune.devices import (
    check_shares,
    failing_together,
    fit_attention,
    fits_learning,
    from_main,
    in_turn,
    load,
    make_accelerator,
)
from ddp_prune.exam import Exam, bos_warning
from ddp_prune.export import export_recovered, provenance_of
from ddp_prune.model import Source, check_index, check_spares_source, companions, open_pruned, open_source, weight_files
from ddp_prune.progress import StepProgress
from ddp_prune.recipe import RecoveryRecipe
from ddp_prune.run_state import RunState, check_run_folders, decisive, fingerprint, saved_header
from ddp_prune.text import Blocks, check_vocabulary, counting, load_blocks, load_tokenizer, sources_of
from ddp_prune.train import fit_batches, take_steps
from ddp_prune.weights import highest_rate, local_part
from ddp_recover.weight_trainer import WeightTrainer
from ddp_vllm.checkpoint import Checkpoint, read_checkpoint
from ddp_vllm.errors import CheckpointError, OutputError, SettingError, TextError, TrainingError
from ddp_vllm.masks import MASKS_FILE
from ddp_vllm.origins import local_provenance
from ddp_vllm.output import check_output, clear, is_unfinished
from ddp_vllm.pages.evidence import RECOVERY_FILE
from ddp_vllm.pages.written import show


def recover_alone(recipe: RecoveryRecipe, output: Path, *, overwrite: bool, console: Console) -> None:
    """Do what the verb does."""
    accelerator = make_accelerator(output, None)
    recover(recipe, output, accelerator, overwrite=overwrite, console=console)
    accelerator.wait_for_everyone()  # as in `pipeline.prune`
    accelerator.end_training()


def recover(
    recipe: RecoveryRecipe, output: Path, accelerator: Accelerator, *, overwrite: bool, console: Console
) -> None:
    """Train the weights of a pruned checkpoint on the dense model's output, write the result to `output` and show it.

    What a user can get wrong is checked before a model is loaded, whether the output exists by the command line. A
    command that was killed after it had written the output, which may be the pruned checkpoint itself, only shows it.
    Raises: a child of DdpError.
    """
    clear(output)
    check_run_folders(output)
    check_shares(recipe, accelerator.num_processes)
    if from_main(accelerator, _recovered_before(recipe, output)):
        run = RunState(output, recipe, writes=accelerator.is_main_process)
        with failing_together(accelerator), run.locked():
            _finish(run, output, recipe, console)
        return
    with failing_together(accelerator):
        if accelerator.is_main_process:
            check_output(output, overwrite=overwrite)
    found = in_turn(accelerator, lambda: _open(recipe, output))
    set_seed(recipe.seed)
    say = partial(console.print, markup=False, soft_wrap=True) if accelerator.is_main_process else lambda _: None
    try:
        recovery = Recovery(recipe, *found, accelerator, say)
        recovery.settle(output)
        recovery.read(output)
        with ExitStack() as stack:
            with failing_together(accelerator):
                stack.enter_context(recovery.run.locked())
            recovery.learn(console)
            with failing_together(accelerator):
                if accelerator.is_main_process:
                    recovery.write(output, overwrite=overwrite)
                _finish(recovery.run, output, recipe, console)
    except torch.OutOfMemoryError as error:  # a step says it in words of its own
        raise TrainingError(
            f"{recipe.model}, its dense model and a sequence of {recipe.seq_len:,} tokens do not fit into the memory "
            "of a device; free it of other processes, try --method lora, lower --seq-len, or --shard over more devices"
        ) from error


def _finish(run: RunState, output: Path, recipe: RecoveryRecipe, console: Console) -> None:
    """Show what was written, and delete the run; in the main process."""
    if run.writes:
        show(output, recipe.teacher, console)
        run.remove()


def _recovered_before(recipe: RecoveryRecipe, output: Path) -> bool:
    """Tell whether the same command has recovered `output`, and was killed before it had finished."""
    asked = (saved_header(output).get("learned_from") or {}).get("asked")
    return is_unfinished(output) and asked in (None, decisive(recipe.to_dict())) and "recovery" in provenance_of(output)


def _open(recipe: RecoveryRecipe, output: Path) -> tuple[Checkpoint, Source, Source]:
    """Find the pruned checkpoint and its teacher, and check that they and the output suit each other."""
    checkpoint, dense = read_checkpoint(Path(recipe.model)), open_source(recipe.teacher)
    check_spares_source(output, dense)
    check_index(dense.folder)
    inside, folder = checkpoint.folder.resolve(), output.resolve()
    if inside != folder and (inside.is_relative_to(folder) or folder.is_relative_to(inside)):
        raise OutputError(f"{output} and the pruned model are one in the other; choose another folder")
    longest = dense.config.get("max_position_embeddings") or math.inf
    if recipe.seq_len > longest:
        raise SettingError(f"seq_len is {recipe.seq_len}, but {recipe.teacher} knows {longest:,}; lower --seq-len")
    if not checkpoint.provenance:
        raise CheckpointError(f"{recipe.model} lacks {MASKS_FILE}, which says what was removed; copy the folder whole")
    return checkpoint, dense, open_pruned(checkpoint, dense)


class Recovery:
    """One recovery on its way: both models, the recipe as far as it is settled, text, and what was found."""

    def __init__(
        self,
        recipe: RecoveryRecipe,
        checkpoint: Checkpoint,
        dense: Source,
        pruned: Source,
        accelerator: Accelerator,
        say: Callable[[str], None],
    ) -> None:
        """Load both models. `say` takes a line for the user."""
        self.asked, self.checkpoint, self.accelerator, self.say = recipe, checkpoint, accelerator, say
        self.provenance = local_provenance(checkpoint.folder / MASKS_FILE)
        folders = (pruned.folder, dense.folder)
        self.files = [[file for folder in folders for file in files(folder)] for files in (weight_files, companions)]
        self.model, self.sizes = load(pruned, recipe, accelerator), dense.sizes
        self.dense, self.tokenizer = load(dense, recipe, accelerator), load_tokenizer(str(pruned.folder))

    def settle(self, output: Path) -> None:
        """Choose all that the recipe leaves open; or take what an interrupted run for this output had chosen."""
        header = saved_header(output) if self.accelerator.is_main_process else {}
        asked = self.asked.to_dict()
        same = (header.get("learned_from") or {}).get("asked") == decisive(asked)
        found = from_main(self.accelerator, decisive(header["recipe"]) if same else None)
        self.recipe = RecoveryRecipe(**asked | found) if found else self._chosen()
        self.trainer = WeightTrainer(self.model, self.dense, self.recipe, self.accelerator)
        if not self.recipe.tokens:
            self.recipe = self._timed()

    def _chosen(self) -> RecoveryRecipe:
        recipe = self.asked
        method, source = recipe.method, recipe.learn_from
        if method == "auto":
            held = sum(local_part(parameter).numel() for parameter in self.model.parameters())
            method = "full" if fits_learning(held, self.accelerator) else "lora"
        if source == "auto":
            source = "assistant" if self.tokenizer.chat_template else "all"
        rate = recipe.learning_rate or highest_rate(method, self.model.config.hidden_size)
        return dataclasses.replace(recipe, method=method, learn_from=source, learning_rate=rate)

    def _timed(self) -> RecoveryRecipe:
        """Return the recipe with the tokens that its minutes allow, by the time a step on chance text takes."""
        size = (self.recipe.batch_size, self.recipe.seq_len)
        chance = torch.Generator().manual_seed(self.recipe.seed)
        blocks = torch.randint(self.dense.config.vocab_size, size, generator=chance)
        self._give(blocks, None)
        steps = max(1, int(60.0 * self.recipe.minutes / self.trainer.seconds_a_step()))
        return dataclasses.replace(self.recipe, tokens=steps * blocks.numel())

    def read(self, output: Path) -> None:
        """Load the text to learn on, held-out text of it and of another kind; open the run. Raises: TextError."""
        recipe = self.recipe
        watch = self._watched()
        blocks = self._load(recipe.data, recipe.steps * recipe.batch_size, recipe.batch_size)
        texts = {recipe.data: blocks.heldout}
        try:
            if watch:
                texts[watch] = self._load(watch, 1, 0).heldout
        except TextError:
            if recipe.watch:
                raise
        self.exam = Exam(texts, self.tokenizer)
        self.say(
            f"text: {blocks.train.numel():,} tokens of {recipe.data} for {recipe.steps:,} steps of "
            f"{recipe.batch_size * recipe.seq_len:,}, {blocks.heldout.numel():,} held out; "
            f"{recipe.method} weights learn at up to {recipe.learning_rate:g}"
        )
        if len(texts) == 1:
            self.say("no text of another kind is watched; --watch names one, to hear if the model gets worse there")
        self.blocks = blocks.train, counting(blocks, recipe.learn_from, recipe.data, self.say)
        learned_from = fingerprint([blocks.train, *texts.values()], *self.files)
        learned_from["asked"] = decisive(self.asked.to_dict())
        main = self.accelerator.is_main_process
        self.run = RunState(output, recipe, learned_from=learned_from, writes=main, say=self.say)

    def _watched(self) -> str:
        """Return the text to watch: what the recipe names, or what masks learned on and weights will not."""
        mine = {os.path.realpath(name) for name in sources_of(self.recipe.data)}
        named = self.recipe.watch or str(self.provenance.get("recipe", {}).get("data") or "")
        others = [name for name in sources_of(named) if os.path.realpath(name) not in mine] if named else []
        if self.recipe.watch and others != sources_of(named):
            raise SettingError(f"watch is {named}, of which data learns a part; name text that data does not")
        return ",".join(others)

    def _load(self, data: str, train_blocks: int, min_train_blocks: int) -> Blocks:
        recipe = self.recipe
        same: dict[str, Any] = {
            name: getattr(recipe, name) for name in ("seq_len", "heldout_blocks", "seed", "text_column")
        }
        sizes: dict[str, Any] = {"train_blocks": train_blocks, "min_train_blocks": min_train_blocks}
        blocks = in_turn(self.accelerator, lambda: load_blocks(data, self.tokenizer, **sizes, **same))
        check_vocabulary(blocks, self.dense.config.vocab_size, recipe.model)
        return blocks

    def learn(self, console: Console) -> None:
        """Judge both models, let the pruned one learn, and judge it again."""
        self.exam.take("dense", self.dense)
        if warning := bos_warning(self.dense, self.recipe.model, self.tokenizer, next(iter(self.exam.texts.values()))):
            self.say(warning)
        self.exam.take("pruned", self.model)
        self._give(*self.blocks)
        with StepProgress(console, self.recipe.steps, _phase, self.accelerator.is_main_process) as report:
            take_steps(self.trainer, self.recipe, self.accelerator, self.run, report)
        self.become = self.trainer.weights.finish()
        self.exam.take("recovered", self.model)

    def _give(self, blocks: torch.Tensor, scored: torch.Tensor | None) -> None:
        """Let the trainer learn from these blocks, as many at once as memory holds."""
        batches = Batches(blocks, self.recipe, self.accelerator, scored)
        fit_batches(self, batches, self.recipe, self.accelerator, self.say)
        fit_attention(self.dense, self.recipe.seq_len, self.accelerator.device)
        self.trainer.read(batches, self.recipe)

    def write(self, output: Path, *, overwrite: bool) -> None:
        """Write the checkpoint with what is known of it, and say what came of it."""
        learned_on, *watched = self.exam.texts
        metrics = self.run.metrics.read_text(encoding="utf-8")
        recovery = {
            "recipe": self.recipe.to_dict(),
            "texts": sources_of(learned_on),
            "seconds": sum(json.loads(line)["seconds"] for line in metrics.splitlines()),
            "watched": {name: self.exam.perplexity(name) for name in watched},
            **self.exam.said(),
        }
        perplexity = self.exam.perplexity(learned_on)
        export_recovered(
            self.checkpoint,
            self.become,
            output,
            provenance={**self.provenance, "perplexity": perplexity, "recovery": recovery},
            extra_files={RECOVERY_FILE: metrics},
            overwrite=overwrite,
        )
        for line in self.exam.sentences():
            self.say(line)


def _phase(metrics: dict[str, float]) -> tuple[str, str]:
    return "recover", f"rate {metrics['learning_rate']:.1e} "
