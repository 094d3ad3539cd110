"""The dry run, `prune --dry-run`: what a run would remove, and the memory and time it would take.
Text is not read."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from ddp_models.loading import check_sharding
from ddp_models.source import Source
from ddp_prune.budget import Pool, make_checked_pools
from ddp_prune.mode import Mode, mode_bytes
from ddp_prune.pipeline import find_model, latency_profile
from ddp_prune.rate import trial_steps
from ddp_prune.recipe import Recipe
from ddp_prune.resolve import resolve_runs, seconds_a_step
from ddp_prune.run import Run
from ddp_prune.sizing import Devices, describe, estimate, sized_model
from ddp_training.batches import sequences_at_once
from ddp_training.memory import USABLE, fit_activations, free_memory, gigabytes, pass_bytes
from ddp_training.processes import broadcast_from_main, describe_device, make_accelerator
from ddp_training.run_folder import find_record
from ddp_vllm.costs import prices, whole_model
from ddp_vllm.errors import SettingError
from ddp_vllm.families import dense_layers
from ddp_vllm.latency import Profile


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What `prune` would do."""

    lines: tuple[str, ...]
    """Description, as `prune --dry-run` prints it."""
    removed: tuple[float | None, ...]
    """Removed share of the whole model, one per size: of its FLOPs or KV cache with these budgets,
    else of its parameters. None for the budget `latency`, where it depends on the search."""
    peak_bytes: float | None = None
    """Memory of training per device, in the mode that the run takes."""
    seconds: float | None = None
    """Time of training; None if memory is too short to measure it."""


def plan(
    recipes: Sequence[Recipe], output: Path, on: str | None = None, print_line: Callable[[str], None] = lambda _: None
) -> Plan:
    """Describe what `prune` would do. Raises: as `prune` before it loads the model.

    print_line: prints a line before steps are timed, which takes minutes on a CPU.

    on: cards as `parse_cards` reads them; memory and time are then estimated for these, not
        for this machine, and the weights of a hub model are not downloaded.
    """
    first, last = recipes[0], recipes[-1]
    source = find_model(first, output, load=not on)
    profile = latency_profile(first, source, _refuse_to_measure)
    lines, removed, pools_of = list[str](), list[float | None](), []
    source.describe_rest(lines.append)
    for recipe in recipes:
        if len(recipes) > 1:
            lines.append(f"{recipe.size_name} {recipe.size:g}:")
        head_unit, pools = make_checked_pools(recipe, source, source.shapes, profile)
        pools_of.append(pools)
        lines += [pool.describe() for pool in pools]
        share, described = _removed_of_model(recipe, source, pools)
        removed.append(share)
        lines += described
    if on:
        estimates = estimate(recipes, source, on)
        lines += describe(last, estimates, on)
        taken = next(sized for sized in estimates if sized.is_auto)
        return Plan(lines=tuple(lines), removed=tuple(removed), peak_bytes=taken.peak_bytes, seconds=taken.seconds)
    accelerator = make_accelerator(output, None)
    print_line(describe_device(accelerator))
    check_sharding(first, accelerator.num_processes)
    record = broadcast_from_main(accelerator, find_record(output, recipes, overwrite=True))
    runs = resolve_runs(recipes, pools_of, source, profile, record.get("resolved", {}), accelerator, lines.append)
    last = runs[-1].recipe
    needed, memory = _memory(runs[-1], source, accelerator)
    steps = runs[-1].steps.last
    text = (
        f"text: {steps:,} steps of {last.batch_size:,} × {last.seq_len:,} tokens, "
        f"{steps * last.batch_size * last.seq_len:,} in all, from {last.data}"
    )
    lines += [memory, text]
    if needed > USABLE * free_memory(accelerator):
        lines.append("time: not measured, because memory is short")
        return Plan(lines=tuple(lines), removed=tuple(removed), peak_bytes=needed)
    print_line("timing steps on random tokens")
    seconds = seconds_a_step(runs[-1], source, head_unit, pools, accelerator)
    num_trials, steps = trial_steps(runs[-1]), sum(run.steps.last - run.steps.first for run in runs)
    trials = f" and trials of the learning rate that take as long as {num_trials}" * bool(num_trials)
    steps += num_trials
    lines.append(
        f"time: about {_duration(steps * seconds)}: {steps - num_trials:,} steps of {_duration(seconds)}{trials}, "
        "measured now on random tokens with all gates open; steps get faster as gates close"
    )
    return Plan(lines=tuple(lines), removed=tuple(removed), peak_bytes=needed, seconds=steps * seconds)


def _refuse_to_measure(*_: Any, **__: Any) -> Profile:
    raise SettingError(
        "the removed units depend on measured time, and this model was not profiled on this machine; pass --profile "
        "with a file that ddp-vllm profile wrote"
    )


def _removed_of_model(recipe: Recipe, source: Source, pools: Sequence[Pool]) -> tuple[float | None, list[str]]:
    """Return which share of the whole model is removed, and lines about it and the option that
    removes that share."""
    config, layers = source.config, dense_layers(source.config)
    if recipe.budget not in ("units", "params"):
        share: float | None = None
        lines: list[str] = []
        if recipe.budget != "latency":
            (pool,) = pools
            model_cost = whole_model(recipe.budget, config, layers, source.shapes, recipe.context_length)
            left = model_cost - pool.total + pool.kept
            share = 1 - left / model_cost
            lines = [
                f"removed: {1 - pool.keep_ratio:.1%} of the prunable {recipe.budget} = {share:.1%} of the model: "
                f"{model_cost:,.0f} → {left:,.0f} per token"
            ]
        return share, [*lines, "parameters: how many are removed depends on which units the search removes"]
    model_cost = whole_model("params", config, layers, source.shapes, recipe.context_length)
    prunable = {"attn": 0.0, "mlp": 0.0, "experts": 0.0}
    for price, layer in zip(prices("params", config, source.shapes, recipe.context_length), layers, strict=True):
        prunable["attn"] += price.query_head * layer.num_query_heads + price.kv_head * layer.num_kv_heads
        prunable["mlp"] += price.channel * layer.intermediate_size
        prunable["experts"] += price.expert_channel * sum(layer.expert_intermediate_sizes or ())
    prunable = {kind: number for kind, number in prunable.items() if kind in source.sizes.blocks}
    total = sum(prunable.values())
    removed = sum((pool.total - pool.kept) * sum(prunable[kind] for kind in pool.shapes) / pool.total for pool in pools)
    line = (
        f"removed: {removed / total:.1%} of the prunable parameters = {removed / model_cost:.1%} of the model: "
        f"{short(model_cost)} → {short(model_cost - removed)}"
    )
    target = (1.0 - recipe.sparsity) * model_cost
    if recipe.sparsity and target > model_cost - total:
        line += f"; to remove {recipe.sparsity:.0%} of the model: --target-params {short(target)}"
    return removed / model_cost, [line]


def _memory(run: Run, source: Source, accelerator: Accelerator) -> tuple[float, str]:
    """Return the bytes that the weights and a forward and backward pass take, and a line that says
    so."""
    recipe, mode = run.recipe, Mode(run.train, run.optimizer)
    devices = Devices(accelerator.num_processes, accelerator.device.type, recipe.shard)
    has_teacher = run.train == "weights" and recipe.distillation > 0  # a second model
    weights = mode_bytes(recipe, source, mode, accelerator)
    sized = sized_model(recipe, source, mode, devices, checkpointed=False)
    at_once, setting = sequences_at_once(recipe, accelerator), recipe.activation_checkpointing
    fitting = fit_activations(
        sized,
        setting,
        at_once,
        recipe.seq_len,
        accelerator,
        "",
        held=weights,
        is_fixed=bool(recipe.micro_batch_size),
    )
    at_once = at_once if recipe.micro_batch_size else fitting
    passing = pass_bytes(sized, at_once, recipe.seq_len, accelerator.device)
    return weights + passing, (
        f"memory: about {gigabytes(weights + passing)}: {gigabytes(weights)} for "
        f"{'the model and its teacher' if has_teacher else 'the model'}, {gigabytes(passing)} for {at_once} × "
        f"{recipe.seq_len:,} tokens per forward pass; {gigabytes(free_memory(accelerator))} are free"
    )


def _duration(seconds: float) -> str:
    for unit, name in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 1.5 * unit:
            return f"{seconds / unit:.2g} {name}"
    return f"{seconds:.2g} seconds"


def short(number: float) -> str:
    """Write a number as `parse_amount` reads it."""
    for scale, suffix in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= scale:
            return f"{number / scale:.4g}{suffix}"
    return f"{number:.0f}"
