"""One pruning run, in the order data flows: text → tokens → masks → widths → checkpoint."""

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

from ddp_models.evaluation import Evaluation, bos_warning
from ddp_models.loading import check_sharding, load
from ddp_models.source import (
    Source,
    check_index,
    check_spares_source,
    open_source,
    tokenizer_and_config_files,
    weight_files,
)
from ddp_prune.budget import Pool, make_pools
from ddp_prune.export import Transform, export, layer_widths
from ddp_prune.gates import GatedModel
from ddp_prune.masks_file import provenance_of
from ddp_prune.recipe import Recipe
from ddp_prune.run import Run, schedule
from ddp_prune.train import train
from ddp_prune.trainer import Learned
from ddp_text.blocks import check_vocabulary, load_blocks, select_loss_mask
from ddp_text.documents import sources_of
from ddp_text.tokens import load_tokenizer
from ddp_training.fingerprint import decisive, fingerprint
from ddp_training.loop import FamilyCheckpoints
from ddp_training.memory import TRAINING_BYTES, fits_training
from ddp_training.processes import broadcast_from_main, main_process_first, make_accelerator, raise_on_all_ranks
from ddp_training.run_state import RunState, check_run_folders, saved_header
from ddp_training.weights import TrainedWeights
from ddp_vllm.checkpoint import Checkpoint, read_checkpoint
from ddp_vllm.errors import ModelError, SettingError, TrainingError
from ddp_vllm.families import WHOLE_EXPERT, choose_head_unit
from ddp_vllm.latency import Profile
from ddp_vllm.masks import METRICS_FILE
from ddp_vllm.output import check_output, clear, is_unfinished
from ddp_vllm.pages.progress import StepProgress
from ddp_vllm.provenance import published_recipe
from ddp_vllm.speed import Measure, find_profile, predicted_latency

FAMILY = ".branch"  # name of a size family's own run, next to the folders of its sizes; no output begins with a dot

Show = Callable[[Checkpoint, str, Console], None]
"""Prints and draws a checkpoint that was written; the text names its dense model."""


def prune(
    recipes: Sequence[Recipe],
    output: Path,
    *,
    overwrite: bool,
    tracker: str | None,
    console: Console,
    measure: Measure,
    show: Show,
) -> list[Checkpoint]:
    """Prune a model and write the checkpoint to `output`; several sizes are written into folders inside it.

    recipes: one per size, smallest cut first. measure: measures the latency profile that a speed budget requires, if
    there is none yet. Errors of the user are raised before the model is loaded; the caller has checked the output.
    Returns the checkpoints that were written. Raises: a child of DdpError.
    """
    first, alone = recipes[0], len(recipes) == 1
    folders = [output if alone else output / f"{each.size_name}-{each.size:g}" for each in recipes]
    for folder in folders:
        clear(folder)
    for folder in folders if alone else [*folders, output / FAMILY]:
        check_run_folders(folder)
    accelerator = make_accelerator(output, tracker)
    check_sharding(first, accelerator.num_processes)
    source = main_process_first(accelerator, lambda: find_model(first, output))
    shapes = source.shapes
    profile = main_process_first(accelerator, partial(latency_profile, first, source, measure))
    pools = [suited_pools(recipe, source, shapes, profile)[1] for recipe in recipes]
    mode = resolve_training_mode(first, shapes, folders[0], accelerator)
    runs = make_runs(recipes, pools, mode, profile)
    if tracker:
        accelerator.init_trackers("ddp-vllm", config=recipes[-1].to_dict())
    pruning = main_process_first(accelerator, partial(Pruning, runs[-1], source, accelerator, console))
    pruning.announce(runs[-1])
    prune_sizes(pruning, runs, pools, folders, None if alone else output / FAMILY, show, overwrite=overwrite)
    accelerator.wait_for_everyone()  # the caller reads what the main process wrote
    accelerator.end_training()
    return list(map(read_checkpoint, folders))


def find_model(recipe: Recipe, output: Path) -> Source:
    """Return the dense model; refuse an output inside its folder."""
    source = open_source(recipe.model)
    check_spares_source(output, source)
    check_index(source.folder)
    return source


def latency_profile(recipe: Recipe, source: Source, measure: Measure) -> Profile | None:
    """Return the latency profile that the budget of a recipe requires, or None if it requires none."""
    if recipe.budget != "latency":
        return None
    return find_profile(
        recipe.profile, source.folder, source.config, recipe.workload, measure, other_machine=recipe.other_machine
    )


def suited_pools(
    recipe: Recipe, source: Source, shapes: Mapping[str, list[int]], profile: Profile | None = None
) -> tuple[str, Sequence[Pool]]:
    """Return the head unit and the budget pools. Raises: SettingError if recipe and model do not suit each other."""
    longest = source.config.get("max_position_embeddings") or math.inf
    if recipe.seq_len > longest:
        raise SettingError(f"seq_len is {recipe.seq_len}, but {recipe.model} knows {longest:,}; lower --seq-len")
    if recipe.scope == "expert" and not source.sizes.num_experts:
        raise SettingError(f"scope is 'expert', but {recipe.model} is no mixture of experts; choose global or layer")
    if recipe.whole_experts and not source.sizes.num_experts:
        raise SettingError(f"{recipe.model} is no mixture of experts, so it has no whole experts to remove")
    unit = head_unit_of(recipe, source)
    return unit, make_pools(source.config, shapes, source.sizes, unit, recipe, profile)


def head_unit_of(recipe: Recipe, source: Source) -> str:
    """Return the attention unit that a recipe means for this model."""
    return WHOLE_EXPERT if recipe.whole_experts else choose_head_unit(recipe.head_unit, source.sizes)


def resolve_training_mode(
    recipe: Recipe, shapes: Mapping[str, list[int]], output: Path, accelerator: Accelerator
) -> str:
    """Return `masks` or `weights`: as asked, as the interrupted run for this output had it, or as memory allows now."""
    if recipe.train != "auto":
        return recipe.train
    for saved in (saved_header(output), provenance_of(output)):
        same = accelerator.is_main_process and _is_same_recipe(saved.get("recipe", {}), recipe)
        resolved = saved.get("resolved") or saved.get("run") or {}
        if mode := broadcast_from_main(accelerator, resolved.get("train") if same else None):
            return str(mode)
    num_weights = sum(math.prod(shape) for shape in shapes.values())
    held = num_weights // (accelerator.num_processes if recipe.shard else 1)
    models = 2 if recipe.distillation > 0 else 1  # not loaded yet
    fits = fits_training(held, accelerator, TRAINING_BYTES + 2 * models)
    return "weights" if fits and recipe.controller == "gradual" else "masks"


def make_runs(
    recipes: Sequence[Recipe], pools: Sequence[Sequence[Pool]], mode: str, profile: Profile | None
) -> list[Run]:
    """Return the run of each size; each begins at the keep ratios of the size before."""
    starts = [{}, *({pool.name: pool.keep_ratio for pool in each} for each in pools)]
    return [
        Run(recipe=recipe, steps=steps, train=mode, profile=profile, start=start, in_family=len(recipes) > 1)
        for recipe, steps, start in zip(recipes, schedule(recipes), starts[:-1], strict=True)
    ]


def _is_same_recipe(saved: dict[str, Any], recipe: Recipe) -> bool:
    """Tell whether the decisive settings are the same; checkpoints hold names instead of paths."""
    ours = published_recipe(json.loads(json.dumps(recipe.to_dict())))
    return decisive(published_recipe(saved)) == decisive(ours)


def prune_sizes(
    pruning: "Pruning",
    runs: Sequence[Run],
    pools: Sequence[Sequence[Pool]],
    folders: Sequence[Path],
    family: Path | None,
    show: Show,
    *,
    overwrite: bool,
) -> None:
    """Prune one size after the other.

    family: the output of the family's own run, whose lock is held meanwhile and whose state is the end of the search of
    the latest size; None for a single size.
    """
    accelerator = pruning.accelerator
    with ExitStack() as stack:
        if family:
            shared = RunState(family, runs[-1].recipe, writes=accelerator.is_main_process)
            with raise_on_all_ranks(accelerator):
                stack.enter_context(shared.locked())
        for place, (run, folder) in enumerate(zip(runs, folders, strict=True)):
            before = pruning.state(family, runs[place - 1]) if family and place else None
            after = pruning.state(family, run) if family and run is not runs[-1] else None
            checkpoints = FamilyCheckpoints(before, after, run.steps.search)
            pruning.prune_size(run, pools[place], folder, checkpoints, show, overwrite=overwrite)
        if family:
            shared.remove()


class Pruning:
    """The dense model, the text and the devices that all sizes share."""

    def __init__(self, run: Run, source: Source, accelerator: Accelerator, console: Console) -> None:
        """Read the text for the steps of `run`, the longest one. Raises: TextError, SettingError."""
        self.source, self.accelerator, self.console = source, accelerator, console
        recipe, self.head_unit = run.recipe, head_unit_of(run.recipe, source)
        self.tokenizer = load_tokenizer(str(source.folder))
        self.blocks = load_blocks(
            recipe.data,
            self.tokenizer,
            seq_len=recipe.seq_len,
            train_blocks=run.steps.last * recipe.batch_size,
            heldout_blocks=recipe.heldout_blocks,
            min_train_blocks=recipe.batch_size,
            seed=recipe.seed,
            text_column=recipe.text_column,
        )
        check_vocabulary(self.blocks, source.config.get("vocab_size", sys.maxsize), recipe.model)
        self.loss_mask = select_loss_mask(self.blocks, recipe.learn_from, recipe.data, self.say)
        files = weight_files(source.folder), tokenizer_and_config_files(source.folder)
        profile = str(run.profile.path) if run.profile else ""
        self.learned_from = fingerprint([self.blocks.train, self.blocks.heldout], *files, profile=profile)

    def say(self, line: str) -> None:
        """Print a line, from one process."""
        if self.accelerator.is_main_process:
            self.console.print(line, markup=False, soft_wrap=True)  # a file's name may contain [

    def state(self, output: Path, run: Run, say: Callable[[str], None] = lambda _: None) -> RunState:
        """Return the folder of a run on this text that writes `output`."""
        writes = self.accelerator.is_main_process
        same: dict[str, Any] = {"resolved": run.to_dict(), "learned_from": self.learned_from}
        return RunState(output, run.recipe, **same, writes=writes, say=say)

    def announce(self, run: Run) -> None:
        """Print what the run is about to do, before the model is loaded."""
        recipe, source, blocks = run.recipe, self.source, self.blocks
        passes = run.steps.last * recipe.batch_size / len(blocks.train)
        unit = "expert channel" if source.sizes.num_experts and not recipe.whole_experts else self.head_unit
        trained = {"weights": "masks and weights are trained together", "masks": "only masks are trained"}[run.train]
        self.say(
            f"text: {blocks.found:,} tokens of {recipe.data}, {blocks.train.numel():,} to train on "
            f"({passes:.2g} passes), {blocks.heldout.numel():,} held out"
        )
        self.say(f"model: {source.config['model_type']}, {source.sizes.num_layers} layers, unit {unit}; {trained}")

    def prune_size(
        self, run: Run, pools: Sequence[Pool], output: Path, family: FamilyCheckpoints, show: Show, *, overwrite: bool
    ) -> None:
        """Write the pruned checkpoint of one size unless an earlier command did, show it unless it will be recovered,
        and delete the run's folder."""
        for pool in pools:
            self.say(pool.describe())
        state = self.state(output, run, self.say)
        with ExitStack() as stack:
            with raise_on_all_ranks(self.accelerator):
                stack.enter_context(state.locked())
            if broadcast_from_main(self.accelerator, self._is_written(run, output)):
                self.say(f"{output} was written before")
            else:
                self._learn_and_write(run, pools, output, state, family, overwrite=overwrite)
            with raise_on_all_ranks(self.accelerator):
                if self.accelerator.is_main_process:
                    if not run.recipe.recover or "recovery" in provenance_of(output):
                        show(read_checkpoint(output), run.recipe.model, self.console)
                    if is_unfinished(output):
                        state.remove()

    def _is_written(self, run: Run, output: Path) -> bool:
        """Tell whether `output` is the result of this run on this text and these weights, and the command resumes."""
        found, recipe = provenance_of(output), run.recipe
        unrecovered = recipe.recover and found.get("recipe", {}).get("recover") and "recovery" not in found
        resumes = run.in_family or unrecovered or is_unfinished(output)
        same_run = found.get("run") == run.to_dict() and found.get("learned_from") == self.learned_from
        return bool(resumes and same_run and _is_same_recipe(found.get("recipe", {}), recipe))

    def _learn_and_write(
        self,
        run: Run,
        pools: Sequence[Pool],
        output: Path,
        state: RunState,
        family: FamilyCheckpoints,
        *,
        overwrite: bool,
    ) -> None:
        """Learn masks and write the checkpoint. Raises: OutputError before anything is learned; TrainingError."""
        recipe = run.recipe
        with raise_on_all_ranks(self.accelerator):
            if self.accelerator.is_main_process:
                check_output(output, overwrite=overwrite)
        set_seed(recipe.seed)
        try:
            learned, judged, transform = self.learn(run, pools, state, family)
        except torch.OutOfMemoryError as error:  # outside of a step, which has a message of its own
            raise TrainingError(
                f"{recipe.model} and a sequence of {recipe.seq_len:,} tokens do not fit into the memory "
                "of a device; free it of other processes, lower --seq-len, or distribute the weights over more devices "
                "with --shard"
            ) from error
        if self.accelerator.is_main_process:
            self.write(run, output, learned, judged, transform, state.metrics, overwrite=overwrite)

    def learn(
        self, run: Run, pools: Sequence[Pool], state: RunState, family: FamilyCheckpoints
    ) -> tuple[Learned, dict[str, Any], Transform | None]:
        """Return the masks, the evaluation of the dense and the pruned model, and the updated weights if trained.

        Raises: ModelError if the dense model cannot read.
        """
        recipe, source, accelerator = run.recipe, self.source, self.accelerator
        gated = GatedModel(load(source, recipe, accelerator), source.family, source.sizes, self.head_unit)
        joint = run.train == "weights"
        weights = TrainedWeights(gated.model, accelerator) if joint else None  # before any forward pass
        evaluation = Evaluation({recipe.data: self.blocks.heldout}, self.tokenizer)
        evaluation.evaluate("dense", gated.model)
        if not math.isfinite(dense := evaluation.perplexity(recipe.data)["dense"]):
            raise ModelError(
                f"{recipe.model} has perplexity {dense} before pruning; its weights are broken, or dtype is too small"
            )
        if warning := bos_warning(gated.model, recipe.model, self.tokenizer, self.blocks.heldout):
            self.say(warning)
        teacher = load(source, recipe, accelerator) if joint and recipe.distillation > 0 else None
        phase = partial(_phase, run, {pool.name: 1.0 - pool.keep_ratio for pool in pools})
        with StepProgress(self.console, run.steps.last, phase, accelerator.is_main_process) as report:
            learned = train(
                gated, self.blocks.train, run, pools, accelerator, state, report, weights, teacher, family,
                loss_mask=self.loss_mask,
            )  # fmt: skip
        transform = weights.finish() if weights else None
        with gated.masks({kind: values.to(accelerator.device) for kind, values in learned.gates.items()}):
            evaluation.evaluate("pruned", gated.model)
        return learned, {"perplexity": evaluation.perplexity(recipe.data), **evaluation.samples()}, transform

    def write(
        self,
        run: Run,
        output: Path,
        learned: Learned,
        judged: dict[str, Any],
        transform: Transform | None,
        metrics: Path,
        *,
        overwrite: bool,
    ) -> None:
        """Write the checkpoint with its provenance."""
        recipe, source, latency = run.recipe, self.source, {}
        if run.profile:
            widths = layer_widths(learned.gates, source.sizes)
            latency["latency"] = predicted_latency(run.profile, widths, recipe.workload)
        export(
            source,
            learned.gates,
            output,
            head_unit=self.head_unit,
            provenance={
                "recipe": recipe.to_dict(),
                "run": run.to_dict(),
                "search_steps": run.steps.search,
                "texts": sources_of(recipe.data),
                "rounding": learned.rounding,
                **routing(learned, source.sizes.routed_layers),
                **latency,
                **judged,
                "learned_from": self.learned_from,
            },
            scores={"z": learned.z, "saliency": learned.saliency, **learned.snapshots},
            overwrite=overwrite,
            extra_files={METRICS_FILE: metrics.read_text(encoding="utf-8")},
            transform=transform,
        )


def routing(learned: Learned, routed_layers: tuple[int, ...]) -> dict[str, Any]:
    """Return how often each expert was chosen during training, layer number -> counts; {} for a dense model."""
    counts = {kind: values.tolist() for kind, values in learned.routed.items()}
    return {"routing": {"chosen": dict(zip(routed_layers, counts["experts"], strict=True))}} if counts else {}


def _phase(run: Run, wanted: Mapping[str, float], metrics: dict[str, float]) -> tuple[str, str]:
    """Return the phase of a step and the sparsity it reached, for the progress bar."""
    shares = {name.removesuffix("_sparsity"): value for name, value in metrics.items() if name.endswith("_sparsity")}
    goals = {name: f" of {share:.0%}" for name, share in wanted.items()}
    sparsity = ", ".join(f"{name} {value:.1%}{goals.get(name, '')}" for name, value in shares.items())
    annealed = f"μ {metrics['mu']:.3f} " if "mu" in metrics else ""
    phase = "search" if metrics["step"] <= run.steps.search else "polish"
    return phase, f"sparsity {sparsity} {annealed}"
