"""One pruning run, in the order data flows: text → tokens → masks → widths → checkpoint."""

import math
import time
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.tracking import get_available_trackers
from accelerate.utils import set_seed
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ddp_prune.budget import Pool, describe, make_pools
from ddp_prune.devices import check_shares, failing_together, load_sharded
from ddp_prune.export import export
from ddp_prune.gates import GatedModel
from ddp_prune.loss import block_losses, perplexity_of
from ddp_prune.model import (
    Source,
    check_index,
    check_spares_source,
    load_model,
    open_source,
    weight_files,
    weight_shapes,
)
from ddp_prune.recipe import Recipe
from ddp_prune.run_state import RunState, check_run_folders, fingerprint
from ddp_prune.text import Blocks, load_blocks, load_tokenizer, sources_of
from ddp_prune.train import train
from ddp_prune.trainer import Learned
from ddp_vllm.checkpoint import read_checkpoint
from ddp_vllm.errors import ModelError, SettingError, TrainingError
from ddp_vllm.families import choose_head_unit
from ddp_vllm.pages.evidence import METRICS_FILE
from ddp_vllm.pages.report import write_report
from ddp_vllm.pages.terminal import print_checkpoint


def prune(recipe: Recipe, output: Path, *, overwrite: bool, tracker: str | None, console: Console) -> None:
    """Learn masks for `recipe.model` and write the pruned checkpoint to `output`.

    What a user can get wrong is checked before the model is loaded, the output by the command line.
    Raises: a child of DdpError.
    """
    check_run_folders(output)
    accelerator = _make_accelerator(output, tracker)
    if recipe.shard:
        check_shares(recipe.batch_size, accelerator.num_processes)
    for first in (True, False):  # of a machine's processes: what it downloads and caches, the others find
        with failing_together(accelerator):
            if accelerator.is_local_main_process == first:
                source, head_unit, pools, blocks = _prepare(recipe, output)
    if tracker:
        accelerator.init_trackers("ddp-vllm", config=recipe.to_dict())
    set_seed(recipe.seed)
    main = accelerator.is_main_process
    say = partial(console.print, markup=False)  # [ in the name of a file is a [
    if main:
        for line in _announce(recipe, source, head_unit, pools, blocks):
            say(line)
    learned_from = fingerprint([blocks.train, blocks.heldout], weight_files(source.folder)) if main else None
    run = RunState(output, recipe, learned_from=learned_from, writes=main, say=partial(say, soft_wrap=True))
    with ExitStack() as stack:
        with failing_together(accelerator):
            stack.enter_context(run.locked())
        progress = _Progress(console, recipe, 1.0 - pools[0].keep_ratio, main)
        try:
            if recipe.shard:
                model = load_sharded(source, recipe.dtype, accelerator.device, accelerator.num_processes)
            else:
                model = load_model(source, recipe.dtype, accelerator.device)
            gated = GatedModel(model, source.family, source.sizes, head_unit)
            learned, perplexity = _learn(gated, blocks, recipe, accelerator, run, progress)
        except torch.OutOfMemoryError as error:  # a step says it in words of its own
            raise TrainingError(
                f"{recipe.model} and a sequence of {recipe.seq_len:,} tokens do not fit into the memory of a device; "
                "free it of other processes, lower --seq-len, or cut the weights over more devices with --shard"
            ) from error
        accelerator.end_training()
        if not main:
            return
        export(
            source,
            learned.gates,
            output,
            head_unit=head_unit,
            provenance={
                "recipe": recipe.to_dict(),
                "search_steps": recipe.search_steps,
                "texts": sources_of(recipe.data),
                "rounding": learned.rounding,
                **routing(learned, source.sizes.routed_layers),
                "perplexity": perplexity,
            },
            evidence={"z": learned.z, "saliency": learned.saliency},
            overwrite=overwrite,
            extra_files={METRICS_FILE: run.metrics.read_text(encoding="utf-8")},
        )
        run.remove()
    checkpoint = read_checkpoint(output)
    print_checkpoint(checkpoint, console)
    page = write_report(checkpoint, output)
    say(
        f"\nwritten: {output}\nlook at it: {page}\nserve it:   vllm serve {output} --trust-remote-code"
        f"\nmeasure it: ddp-vllm bench sharegpt --dense {recipe.model} --pruned {output}"
    )


def _make_accelerator(output: Path, tracker: str | None) -> Accelerator:
    """Raises: SettingError if the tracker is not installed."""
    trackers = [str(name) for name in get_available_trackers()]
    if tracker and tracker not in trackers:
        known = ", ".join(trackers) or "none; for example pip install tensorboard"
        raise SettingError(f"tracker is {tracker!r}, which is unknown or not installed; installed: {known}")
    # not told that it is a CPU's, accelerate takes a process that torchrun started for the only one
    device = torch.accelerator.current_accelerator(check_available=True)
    on_cpu = device is None or device.type == "mps"  # a Mac's GPU has no float64, in which gradients are summed
    # other ranks wait while the first downloads and tokenises; torch would give up after ten minutes
    patience = InitProcessGroupKwargs(timeout=timedelta(hours=6))
    return Accelerator(cpu=on_cpu, log_with=tracker, project_dir=str(output.parent), kwargs_handlers=[patience])


def _announce(recipe: Recipe, source: Source, head_unit: str, pools: list[Pool], blocks: Blocks) -> list[str]:
    """Return what the run is about to do, a line each."""
    passes = recipe.steps * recipe.batch_size / len(blocks.train)
    unit = "expert channel" if source.sizes.num_experts else head_unit
    return [
        f"text: {blocks.found:,} tokens of {recipe.data}, {blocks.train.numel():,} to learn on "
        f"({passes:.2g} passes), {blocks.heldout.numel():,} held out",
        f"model: {source.config['model_type']}, {source.sizes.num_layers} layers, unit {unit}",
        *map(describe, pools),
    ]


def _learn(
    gated: GatedModel, blocks: Blocks, recipe: Recipe, accelerator: Accelerator, run: RunState, progress: "_Progress"
) -> tuple[Learned, dict[str, Any]]:
    """Return what was learned, and the perplexity of held-out text before and after. Raises: ModelError."""
    dense_losses = block_losses(gated, None, blocks.heldout)
    dense = perplexity_of(dense_losses)
    if not math.isfinite(dense):
        raise ModelError(
            f"{recipe.model} has perplexity {dense} before pruning; its weights are broken, or dtype is too small"
        )
    with progress as report:
        learned = train(gated, blocks.train, recipe, accelerator, run, report)
    pruned_losses = block_losses(gated, learned.gates, blocks.heldout)
    return learned, {
        "dense": dense,
        "pruned": perplexity_of(pruned_losses),
        "tokens": blocks.heldout.numel(),
        "block_losses": {"dense": dense_losses, "pruned": pruned_losses},
    }


def _prepare(recipe: Recipe, output: Path) -> tuple[Source, str, list[Pool], Blocks]:
    """Find the model and the text, and check that the recipe suits them."""
    source = open_source(recipe.model)
    check_spares_source(output, source)
    check_index(source.folder)
    if recipe.seq_len > (longest := source.config.get("max_position_embeddings") or math.inf):
        raise SettingError(f"seq_len is {recipe.seq_len}, but {recipe.model} knows {longest:,}; lower --seq-len")
    head_unit = choose_head_unit(recipe.head_unit, source.sizes)
    if recipe.scope == "expert" and not source.sizes.num_experts:
        raise SettingError(f"scope is 'expert', but {recipe.model} is no mixture of experts; choose global or layer")
    pools = make_pools(source.config, weight_shapes(source), source.sizes, head_unit, recipe)
    blocks = load_blocks(
        recipe.data,
        load_tokenizer(str(source.folder)),
        seq_len=recipe.seq_len,
        train_blocks=recipe.steps * recipe.batch_size,
        heldout_blocks=recipe.heldout_blocks,
        min_train_blocks=recipe.batch_size,
        seed=recipe.seed,
    )
    highest = max(int(part.max()) for part in (blocks.train, blocks.heldout))
    vocabulary = source.config.get("vocab_size", math.inf)
    if highest >= vocabulary:
        raise ModelError(
            f"the tokenizer of {recipe.model} makes token {highest} of the text, but the model knows 0 to "
            f"{vocabulary - 1}; put the tokenizer that belongs to the model beside it"
        )
    return source, head_unit, pools, blocks


def routing(learned: Learned, routed_layers: tuple[int, ...]) -> dict[str, Any]:
    """Return how often each expert was chosen while learning, layer number -> counts; {} for a dense model."""
    counts = {kind: values.tolist() for kind, values in learned.routed.items()}
    return {"routing": {"chosen": dict(zip(routed_layers, counts["experts"], strict=True))}} if counts else {}


class _Progress:
    """A progress bar that takes a step's metrics; silent away from the main process."""

    def __init__(self, console: Console, recipe: Recipe, wanted: float, shown: bool) -> None:
        self.wanted = wanted
        self.recipe, self.console, self.lines = recipe, console, not console.is_terminal and shown
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[text]}"),
            console=console,
            disable=not shown or not console.is_terminal,
        )

    def __enter__(self) -> Any:
        self.bar.start()
        self.task = self.bar.add_task("search", total=self.recipe.steps, text="")
        self.began, self.first = time.perf_counter(), 0
        return self.report

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def report(self, metrics: dict[str, float]) -> None:
        step = int(metrics["step"])
        phase = "search" if step <= self.recipe.search_steps else "polish"
        shares = {name: value for name, value in metrics.items() if name.endswith("_sparsity")}
        sparsity = ", ".join(f"{name.removesuffix('_sparsity')} {value:.1%}" for name, value in shares.items())
        divergence = f"kl {metrics['kl']:.3f} " if "kl" in metrics else ""
        annealed = f"μ {metrics['mu']:.3f} " if "mu" in metrics else ""
        text = (
            f"loss {metrics['loss']:.3f} {divergence}sparsity {sparsity} of {self.wanted:.0%} "
            f"{annealed}{metrics['tokens'] / metrics['seconds']:,.0f} tok/s"
        )
        self.bar.update(self.task, completed=step, description=phase, text=text)
        self.first = self.first or step
        every = max(1, self.recipe.steps // 40)
        if self.lines and (step % every == 0 or step == self.recipe.steps):
            spent = time.perf_counter() - self.began
            left = spent / (step - self.first + 1) * (self.recipe.steps - step)
            self.console.print(
                f"{phase} {step}/{self.recipe.steps} {text}, {left:.0f} s left", highlight=False, soft_wrap=True
            )
