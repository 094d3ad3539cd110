"""One pruning run, in the order data flows: text → tokens → masks → widths → checkpoint."""

import dataclasses
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from rich.console import Console

from ddp_prune.budget import Pool, describe, make_pools
from ddp_prune.devices import (
    LEARNING_BYTES,
    check_shares,
    failing_together,
    fits_learning,
    from_main,
    in_turn,
    load,
    make_accelerator,
)
from ddp_prune.exam import Exam, bos_warning
from ddp_prune.export import Become, export, layer_widths, provenance_of
from ddp_prune.gates import GatedModel
from ddp_prune.model import (
    Source,
    check_index,
    check_spares_source,
    companions,
    open_source,
    weight_files,
    weight_shapes,
)
from ddp_prune.progress import StepProgress
from ddp_prune.recipe import Recipe
from ddp_prune.run_state import RunState, check_run_folders, decisive, fingerprint, saved_header
from ddp_prune.text import check_vocabulary, counting, load_blocks, load_tokenizer, sources_of
from ddp_prune.train import Branches, train
from ddp_prune.trainer import Learned
from ddp_prune.weights import LearningWeights
from ddp_vllm.errors import ModelError, SettingError, TrainingError
from ddp_vllm.families import WHOLE_EXPERT, choose_head_unit
from ddp_vllm.latency import Profile
from ddp_vllm.origins import published_recipe
from ddp_vllm.output import check_output, clear, is_unfinished
from ddp_vllm.pages.evidence import METRICS_FILE
from ddp_vllm.speed import Measure, find_profile, predicted_latency

BRANCH = ".branch"  # of the run that a family keeps among the folders of its sizes; no output begins with a dot


Show = Callable[[Path, str, Console], None]
"""Prints and draws what was written to a folder, of a dense model of this name."""
Recover = Callable[[Recipe, Path, Accelerator, Console], None]
"""Recovers the checkpoint in a folder, in place, for the minutes of the recipe."""


def prune(
    recipes: Sequence[Recipe],
    output: Path,
    *,
    overwrite: bool,
    tracker: str | None,
    console: Console,
    measure: Measure,
    recover: Recover,
    show: Show,
) -> list[Path]:
    """Learn masks for a model and write the pruned checkpoint to `output`; several sizes into folders inside it.

    What a user can get wrong is checked before the model is loaded, the output by `ddp_vllm.api`. measure: measures the
    latency profile that a speed budget requires, if there is none yet.
    Returns the folders that were written. Raises: a child of DdpError.
    """
    first, alone = recipes[0], len(recipes) == 1
    folders = [output if alone else output / f"{each.size_name}-{each.size:g}" for each in recipes]
    for folder in folders:
        clear(folder)
    for folder in folders if alone else [*folders, output / BRANCH]:
        check_run_folders(folder)
    accelerator = make_accelerator(output, tracker)
    check_shares(first, accelerator.num_processes)
    source, shapes = in_turn(accelerator, lambda: find_model(first, output))
    profile = in_turn(accelerator, partial(latency_profile, first, source, measure))
    if profile:
        first = dataclasses.replace(first, profile=str(profile.path))
    first = settled(first, shapes, folders[0], accelerator)
    recipes = [dataclasses.replace(each, profile=first.profile, learn=first.learn) for each in recipes]
    if tracker:
        accelerator.init_trackers("ddp-vllm", config=recipes[-1].to_dict())
    family = RunState(output / BRANCH, recipes[-1], writes=accelerator.is_main_process and not alone)
    start: dict[str, float] | None = None  # the keep ratios of the size before
    with ExitStack() as stack:
        for place, (recipe, folder) in enumerate(zip(recipes, folders, strict=True)):
            pruning = in_turn(
                accelerator,
                partial(Pruning, recipe, source, shapes, recipes[-1].steps, accelerator, console, profile, start),
            )
            if not place:  # model and text suit each other, so there will be something to write
                with failing_together(accelerator):
                    stack.enter_context(family.locked())
            start = {pool.name: pool.keep_ratio for pool in pruning.pools}
            before = pruning.state(output / BRANCH, recipes[place - 1]) if place else None
            after = pruning.state(output / BRANCH, recipe) if recipe is not recipes[-1] else None
            pruning.run(folder, (before, after), show, overwrite=overwrite)
            if recipe.recover and not from_main(accelerator, "recovery" in provenance_of(folder)):
                recover(recipe, folder, accelerator, console)
        family.remove()
    accelerator.wait_for_everyone()  # who asked reads what the main process wrote
    accelerator.end_training()
    return folders


class Pruning:
    """One size on its way from text to checkpoint."""

    def __init__(
        self,
        recipe: Recipe,
        source: Source,
        shapes: Mapping[str, list[int]],
        num_steps: int,
        accelerator: Accelerator,
        console: Console,
        profile: Profile | None,
        start: Mapping[str, float] | None,
    ) -> None:
        """Find text for `num_steps`, and check that recipe, text and model suit each other.

        Raises: SettingError, TextError.
        ."""
        self.recipe, self.source, self.accelerator, self.console = recipe, source, accelerator, console
        self.profile, self.start = profile, start
        self.head_unit, self.pools = suited_pools(recipe, source, shapes, profile)
        self.tokenizer = load_tokenizer(str(source.folder))
        self.blocks = load_blocks(
            recipe.data,
            self.tokenizer,
            seq_len=recipe.seq_len,
            train_blocks=num_steps * recipe.batch_size,
            heldout_blocks=recipe.heldout_blocks,
            min_train_blocks=recipe.batch_size,
            seed=recipe.seed,
            text_column=recipe.text_column,
        )
        check_vocabulary(self.blocks, source.config.get("vocab_size", sys.maxsize), recipe.model)
        files = weight_files(source.folder), companions(source.folder)
        self.scored = counting(self.blocks, recipe.learn_from, recipe.data, self.say)
        path = str(profile.path) if profile else ""
        self.learned_from = fingerprint([self.blocks.train, self.blocks.heldout], *files, profile=path)

    def say(self, line: str) -> None:
        """Print a line, from one process."""
        if self.accelerator.is_main_process:
            self.console.print(line, markup=False, soft_wrap=True)  # [ in the name of a file is a [

    def state(self, output: Path, recipe: Recipe, say: Callable[[str], None] = lambda _: None) -> RunState:
        """Return the folder of a run on this text that writes `output`."""
        writes = self.accelerator.is_main_process
        return RunState(output, recipe, learned_from=self.learned_from, writes=writes, say=say)

    def run(self, output: Path, branches: Branches, show: Show, *, overwrite: bool) -> None:
        """Learn masks and write the pruned checkpoint, unless this was done before; draw its report unless it will be
        recovered; and delete the run."""
        self.announce()
        run = self.state(output, self.recipe, self.say)
        with ExitStack() as stack:
            with failing_together(self.accelerator):
                stack.enter_context(run.locked())
            if from_main(self.accelerator, _learned_before(self.recipe, output, self.learned_from)):
                self.say(f"{output} was learned before")
            else:
                self.learn_and_write(output, run, branches, overwrite=overwrite)
            with failing_together(self.accelerator):
                if self.accelerator.is_main_process:
                    if not self.recipe.recover or "recovery" in provenance_of(output):
                        show(output, self.recipe.model, self.console)
                    if is_unfinished(output):
                        run.remove()

    def learn_and_write(self, output: Path, run: RunState, branches: Branches, *, overwrite: bool) -> None:
        """Do both. Raises: OutputError before anything is learned, as `check_output`; TrainingError."""
        with failing_together(self.accelerator):
            if self.accelerator.is_main_process:
                check_output(output, overwrite=overwrite)
        set_seed(self.recipe.seed)
        try:
            learned, judged, become = self.learn(run, branches)
        except torch.OutOfMemoryError as error:  # a step says it in words of its own
            raise TrainingError(
                f"{self.recipe.model} and a sequence of {self.recipe.seq_len:,} tokens do not fit into the memory "
                "of a device; free it of other processes, lower --seq-len, or cut the weights over more devices "
                "with --shard"
            ) from error
        if self.accelerator.is_main_process:
            self.write(output, run, learned, judged, become, overwrite=overwrite)

    def announce(self) -> None:
        """Say what the run is about to do, a line each."""
        recipe, source, blocks = self.recipe, self.source, self.blocks
        passes = recipe.steps * recipe.batch_size / len(blocks.train)
        unit = "expert channel" if source.sizes.num_experts and not recipe.whole_experts else self.head_unit
        what = "all weights learn" if recipe.learn == "full" else "scales learn"
        self.say(
            f"text: {blocks.found:,} tokens of {recipe.data}, {blocks.train.numel():,} to learn on "
            f"({passes:.2g} passes), {blocks.heldout.numel():,} held out"
        )
        layers = source.sizes.num_layers
        self.say(f"model: {source.config['model_type']}, {layers} layers, unit {unit}; {what} while gates close")
        for pool in self.pools:
            self.say(describe(pool))

    def learn(self, run: RunState, branches: Branches) -> tuple[Learned, dict[str, Any], Become | None]:
        """Return what was learned, what both models made of their exam, and what weights have become.

        Raises: ModelError if the dense model cannot read.
        """
        recipe, source, accelerator = self.recipe, self.source, self.accelerator
        gated = GatedModel(load(source, recipe, accelerator), source.family, source.sizes, self.head_unit)
        full = recipe.learn == "full"
        weights = LearningWeights(gated.model, accelerator) if full else None  # before any forward pass
        exam = Exam({recipe.data: self.blocks.heldout}, self.tokenizer)
        exam.take("dense", gated.model)
        if not math.isfinite(dense := exam.perplexity(recipe.data)["dense"]):
            raise ModelError(
                f"{recipe.model} has perplexity {dense} before pruning; its weights are broken, or dtype is too small"
            )
        if warning := bos_warning(gated.model, recipe.model, self.tokenizer, self.blocks.heldout):
            self.say(warning)
        dense_model = load(source, recipe, accelerator) if full and recipe.distillation > 0 else None
        phase = partial(_phase, recipe, {pool.name: 1.0 - pool.keep_ratio for pool in self.pools})
        with StepProgress(self.console, recipe.steps, phase, accelerator.is_main_process) as report:
            learned = train(
                gated, self.blocks.train, recipe, self.pools, accelerator, run, report, weights, dense_model, branches,
                scored=self.scored, start=self.start,
            )  # fmt: skip
        become = weights.finish() if weights else None
        with gated.masks({kind: values.to(accelerator.device) for kind, values in learned.gates.items()}):
            exam.take("pruned", gated.model)
        return learned, {"perplexity": exam.perplexity(recipe.data), **exam.said()}, become

    def write(
        self,
        output: Path,
        run: RunState,
        learned: Learned,
        judged: dict[str, Any],
        become: Become | None,
        *,
        overwrite: bool,
    ) -> None:
        """Write the checkpoint with all that is known of it."""
        recipe, source, latency = self.recipe, self.source, {}
        if self.profile:
            widths = layer_widths(learned.gates, source, self.head_unit)
            latency["latency"] = predicted_latency(self.profile, widths, recipe.workload)
        export(
            source,
            learned.gates,
            output,
            head_unit=self.head_unit,
            provenance={
                "recipe": recipe.to_dict(),
                "search_steps": recipe.search_steps,
                "texts": sources_of(recipe.data),
                "rounding": learned.rounding,
                **routing(learned, source.sizes.routed_layers),
                **latency,
                **judged,
                "learned_from": self.learned_from,
            },
            evidence={"z": learned.z, "saliency": learned.saliency, **learned.passed},
            overwrite=overwrite,
            extra_files={METRICS_FILE: run.metrics.read_text(encoding="utf-8")},
            become=become,
        )


def latency_profile(recipe: Recipe, source: Source, measure: Measure) -> Profile | None:
    """Return the latency profile that the budget of a recipe requires, if it does."""
    if recipe.budget != "latency":
        return None
    return find_profile(
        recipe.profile, source.folder, source.config, recipe.workload, measure, other_machine=recipe.other_machine
    )


def suited_pools(
    recipe: Recipe, source: Source, shapes: Mapping[str, list[int]], profile: Profile | None = None
) -> tuple[str, list[Pool]]:
    """Return the head unit and the constraints of a recipe, where recipe and model suit each other.

    Raises: SettingError.
    """
    longest = source.config.get("max_position_embeddings") or math.inf
    if recipe.seq_len > longest:
        raise SettingError(f"seq_len is {recipe.seq_len}, but {recipe.model} knows {longest:,}; lower --seq-len")
    if recipe.scope == "expert" and not source.sizes.num_experts:
        raise SettingError(f"scope is 'expert', but {recipe.model} is no mixture of experts; choose global or layer")
    if recipe.whole_experts and not source.sizes.num_experts:
        raise SettingError(f"{recipe.model} is no mixture of experts, so it has no whole experts to remove")
    head_unit = WHOLE_EXPERT if recipe.whole_experts else choose_head_unit(recipe.head_unit, source.sizes)
    return head_unit, make_pools(source.config, shapes, source.sizes, head_unit, recipe, profile)


def settled(recipe: Recipe, shapes: Mapping[str, list[int]], output: Path, accelerator: Accelerator) -> Recipe:
    """Return the recipe with `learn` chosen: as an interrupted run for this output had it, or as memory allows now."""
    if recipe.learn != "auto":
        return recipe
    for saved in (saved_header(output).get("recipe", {}), provenance_of(output).get("recipe", {})):
        asked = dataclasses.replace(recipe, learn=saved.get("learn", "auto"))
        same = accelerator.is_main_process and _is_by(saved, asked)
        if found := from_main(accelerator, saved["learn"] if same else None):
            return dataclasses.replace(recipe, learn=found)
    num_weights = sum(math.prod(shape) for shape in shapes.values())
    held = num_weights // (accelerator.num_processes if recipe.shard else 1)
    models = 2 if recipe.distillation > 0 else 1  # not loaded yet
    fits = fits_learning(held, accelerator, LEARNING_BYTES + 2 * models)
    return dataclasses.replace(recipe, learn="full" if fits and recipe.controller == "gradual" else "scales")


def _is_by(saved: dict[str, Any], recipe: Recipe) -> bool:
    """Tell whether saved settings are those of a recipe, where they decide; of paths, checkpoints keep names."""
    ours = published_recipe(json.loads(json.dumps(recipe.to_dict())))
    return decisive(published_recipe(saved)) == decisive(ours)


def _learned_before(recipe: Recipe, output: Path, learned_from: dict[str, Any]) -> bool:
    """Tell whether `output` holds what this recipe made of these texts and weights, and the command has more to do."""
    found = provenance_of(output)
    learned_by = found.get("recipe", {})
    same = _is_by(learned_by, recipe)
    unrecovered = recipe.recover and learned_by.get("recover") and "recovery" not in found
    more = recipe.in_family or unrecovered or is_unfinished(output)
    return bool(more and same and found.get("learned_from") == learned_from)


def find_model(recipe: Recipe, output: Path) -> tuple[Source, dict[str, list[int]]]:
    """Find the model and the shapes of its weights, and check that the output spares it."""
    source = open_source(recipe.model)
    check_spares_source(output, source)
    check_index(source.folder)
    return source, weight_shapes(source)


def routing(learned: Learned, routed_layers: tuple[int, ...]) -> dict[str, Any]:
    """Return how often each expert was chosen while learning, layer number -> counts; {} for a dense model."""
    counts = {kind: values.tolist() for kind, values in learned.routed.items()}
    return {"routing": {"chosen": dict(zip(routed_layers, counts["experts"], strict=True))}} if counts else {}


def _phase(recipe: Recipe, wanted: Mapping[str, float], metrics: dict[str, float]) -> tuple[str, str]:
    """Return what a step was part of, and how far the gates are."""
    shares = {name.removesuffix("_sparsity"): value for name, value in metrics.items() if name.endswith("_sparsity")}
    goals = {name: f" of {share:.0%}" for name, share in wanted.items()}
    sparsity = ", ".join(f"{name} {value:.1%}{goals.get(name, '')}" for name, value in shares.items())
    annealed = f"μ {metrics['mu']:.3f} " if "mu" in metrics else ""
    phase = "search" if metrics["step"] <= recipe.search_steps else "polish"
    return phase, f"sparsity {sparsity} {annealed}"
