"""The dry run, `prune --dry-run`: what a run would remove, and the memory and time it would take.
Text is not read."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from operator import mul
from pathlib import Path
from typing import Any

from ddp_prune.core.budget import Pool
from ddp_prune.core.processes import broadcast_from_main
from ddp_prune.devices import describe_device, make_accelerator
from ddp_prune.fit import (
    CARDS,
    USABLE,
    Devices,
    Fit,
    allowed_modes,
    choose,
    fit,
    gigabytes,
    parse_cards,
    tokens_per_second,
)
from ddp_prune.models.loading import check_sharding
from ddp_prune.models.source import Source
from ddp_prune.pools import find_model, latency_profile, pools_of_sizes
from ddp_prune.recipe import Recipe
from ddp_prune.resolve import (
    SHORTEST,
    TIMING,
    load_trained,
    resolve_runs,
    resolve_training_mode,
    time_run,
    trial_steps_of,
)
from ddp_prune.run import steps_of
from ddp_prune.run_folder import find_record
from ddp_vllm.costs import experts_chosen, experts_read, numbers_read, prices, table_note, whole_model
from ddp_vllm.dimensions import attended
from ddp_vllm.errors import Printer, SettingError
from ddp_vllm.latency import Profile
from ddp_vllm.model_facts import dense_kv_of_layers

TOO_SHORT = "time: not measured, because memory is short"


@dataclass
class Plan:
    """What `prune` would do."""

    lines: list[str] = field(default_factory=list)
    """Description, as `prune --dry-run` prints it."""
    removed: list[float | None] = field(default_factory=list)
    """Removed share of the whole model, one per size: of its FLOPs or KV cache with these budgets,
    else of its parameters. None for the budget `latency`, where it depends on the search."""
    peak_bytes: float | None = None
    """Memory of training per device, in the mode that the run takes."""
    seconds: float | None = None
    """Time of training; None if memory is too short to measure it."""


def plan(recipes: Sequence[Recipe], output: Path, on: str | None = None, print_line: Printer = lambda _: None) -> Plan:
    """Describe what `prune` would do. Raises: as `prune` before it loads the model.

    print_line: prints a line before steps are timed, which takes minutes on a CPU.

    on: cards as `parse_cards` reads them; memory and time are then estimated for these, not
        for this machine, and the weights of a hub model are not downloaded.
    """
    first = recipes[0]
    source = find_model(first, load=not on)
    planned, profile, is_known = Plan(), None, True
    try:
        profile = latency_profile(first, source, _refuse_to_measure)
    except _UnmeasuredError as error:
        if not on:
            raise
        planned.lines.append(str(error))
        planned.removed, is_known = [None] * len(recipes), False
    source.describe_rest(planned.lines.append)
    if note := table_note(source.config, source.shapes):
        planned.lines.append(f"{note}; ddp-vllm trim, before pruning, removes tokens that your text does not use")
    pools_of = pools_of_sizes(recipes, source, profile) if is_known else []
    for recipe, pools in zip(recipes, pools_of, strict=False):
        if len(recipes) > 1:
            planned.lines.append(f"{recipe.size_name} {recipe.size:g}:")
        share, lines = _removed_of_model(recipe, source, pools)
        planned.removed.append(share)
        planned.lines += [*(pool.describe() for pool in pools), *lines]
    if on:
        _plan_on_cards(planned, recipes, source, pools_of, on)
    else:
        _plan_here(planned, recipes, source, pools_of, output, print_line)
    return planned


def _plan_here(
    planned: Plan,
    recipes: Sequence[Recipe],
    source: Source,
    pools_of: Sequence[Sequence[Pool]],
    output: Path,
    print_line: Printer,
) -> None:
    """Add memory, text and time on this machine, on which steps are timed."""
    first, last = recipes[0], recipes[-1]
    lines = planned.lines
    accelerator = make_accelerator(output, None)
    print_line(describe_device(accelerator))
    check_sharding(first, accelerator.num_processes)
    record = broadcast_from_main(accelerator, find_record(output, recipes, overwrite=True))
    resumed, seconds = record.get("resolved", {}), 0.0
    if last.minutes and not resumed:  # memory first: timing takes minutes
        devices = Devices.here(first, accelerator)
        mode = resolve_training_mode(last, source, resumed, devices, accelerator, lambda _: None)
        fitted = fit(replace(last, batch_size=1, seq_len=min(last.seq_len, SHORTEST)), source, devices, mode)
        if fitted.peak > USABLE * fitted.free:
            lines += [_memory(fitted, last), TOO_SHORT]
            planned.peak_bytes = fitted.peak
            return

    def print_soon(line: str) -> None:
        """Print at once what takes time, and everything else at the end."""
        (print_line if line == TIMING else lines.append)(line)

    runs, fitted, _, seconds = resolve_runs(recipes, pools_of, source, resumed, accelerator, print_soon)
    planned.peak_bytes, last, steps = fitted.peak, runs[-1].recipe, runs[-1].steps.last
    lines += [
        _memory(fitted, last),
        f"text: {steps:,} steps of {last.batch_size:,} × {last.seq_len:,} tokens, "
        f"{steps * last.batch_size * last.seq_len:,} in all, from {last.data}",
    ]
    if fitted.peak > USABLE * fitted.free and not seconds:
        lines.append(TOO_SHORT)
        return
    if not seconds:
        print_line(TIMING)
        model = load_trained(runs[-1], source, accelerator)
        seconds = time_run(runs[-1], model, pools_of[-1], accelerator)
    num_trials, steps = trial_steps_of(last, runs[-1].train), sum(run.steps.last - run.steps.first for run in runs)
    trials = f" and trials of the learning rate that take as long as {num_trials}" * bool(num_trials)
    planned.seconds = (steps + num_trials) * seconds
    lines.append(
        f"time: about {_duration(planned.seconds)}: {steps:,} steps of {_duration(seconds)}{trials}, "
        "measured now on random tokens with all gates open; steps get faster as gates close"
    )


def _memory(fitted: Fit, recipe: Recipe) -> str:
    held = "the model and its teacher" if recipe.holds_teacher(fitted.mode.train) else "the model"
    return (
        f"memory: about {gigabytes(fitted.peak)}: {gigabytes(fitted.held)} for {held}, {gigabytes(fitted.passing)} for "
        f"{fitted.num_sequences} × {recipe.seq_len:,} tokens per forward pass; {gigabytes(fitted.free)} are free"
    )


def _plan_on_cards(
    planned: Plan, recipes: Sequence[Recipe], source: Source, pools_of: Sequence[Sequence[Pool]], on: str
) -> None:
    """Add a line on decode steps, and one per training mode, from the one that takes least: memory,
    tokens and hours."""
    if recipes[-1].budget in ("units", "params"):
        planned.lines.append(_decode_bound(recipes[-1], source, pools_of[-1], on))
    recipe, devices = recipes[-1], Devices.of_cards(on)
    fits = estimate(recipes, source, devices)
    taken = choose([fitted for fitted, _, _ in fits])
    for fitted, tokens, seconds in reversed(fits):
        duration = f"the {recipe.minutes:g} minutes for about" if recipe.minutes else f"about {_duration(seconds)} for"
        planned.lines.append(
            f"{fitted.mode} on {on}: {'fits' if fitted.peak <= fitted.free else 'does not fit'}, "
            f"{gigabytes(fitted.peak)} of {gigabytes(fitted.free)} per card with {fitted.num_sequences} × "
            f"{recipe.seq_len:,} tokens per pass; {duration} "
            f"{tokens / 1e6:,.1f} M tokens"
            + " (--train auto takes this)"
            * (fitted is taken and recipe.train == "auto")
        )
        if fitted is taken:
            planned.peak_bytes, planned.seconds = fitted.peak, seconds


def _decode_bound(recipe: Recipe, source: Source, pools: Sequence[Pool], on: str) -> str:
    """Return a line about how much faster a decode step can be: by the bytes that it reads, weights
    and KV cache of the recipe's workload."""
    name, count = parse_cards(on)
    workload, config, layers = recipe.workload, source.config, source.widths.dense_layers
    keep_ratios = {kind: pool.keep_ratio for pool in pools for kind in pool.shapes}
    read, _ = numbers_read(config, source.shapes, layers, batch=workload.batch)
    chosen, saved = experts_chosen(config, source.widths), 0.0
    for kind, number in prunable_parameters(source, workload.context).items():
        ratio, share = keep_ratios.get(kind, 1.0), 1.0
        if kind == "experts":
            share = experts_read(chosen, workload.batch)
            if recipe.whole_experts:  # a token is sent to as many of fewer experts
                saved += number * (share - ratio * experts_read(chosen / ratio, workload.batch))
                continue
        saved += number * share * (1.0 - ratio)
    per_layer = dense_kv_of_layers(source.folder, value_bytes=2)
    cache = workload.batch * sum(map(mul, per_layer, attended(config, workload.context, len(layers))))
    kept_cache = cache * (keep_ratios.get("attn", 1.0) if pools[0].queries_per_kv == 1 else 1.0)
    dense, pruned = 2 * read + cache, 2 * (read - saved) + kept_cache  # weights have two bytes
    shared = ", if all kinds of units lose equal shares" * (len(pools[0].shapes) > 1)
    return (
        f"decode on {on}: at most {dense / pruned:.2f}× as fast with {workload.batch} sequences of "
        f"{workload.context:,} tokens, because a step reads {gigabytes(pruned)} instead of {gigabytes(dense)}"
        f"{shared}, which take {1e3 * pruned / count / CARDS[name].bandwidth:.2g} ms; a bound: an H100 reached two "
        "thirds of this gain with Qwen3-8B"
    )


def estimate(recipes: Sequence[Recipe], source: Source, devices: Devices) -> list[tuple[Fit, float, float]]:
    """Return how each training mode that the recipe allows fits cards, its tokens and its
    seconds.

    Several cards share the weights, as with `--shard`. Raises: SettingError; ModelError if the
    config is broken.
    """
    recipe, estimates = recipes[-1], list[tuple[Fit, float, float]]()
    check_sharding(replace(recipe, shard=devices.num_shards > 1), devices.number)
    for mode in allowed_modes(recipe):
        fitted = fit(recipe, source, devices, mode)
        rate = tokens_per_second(recipe, source, devices, fitted)
        steps = trial_steps_of(recipe, mode.train) + sum(size.last - size.first for size in steps_of(recipes))
        tokens = rate * 60 * recipe.minutes if recipe.minutes else float(steps * recipe.batch_size * recipe.seq_len)
        estimates.append((fitted, tokens, 60 * recipe.minutes if recipe.minutes else tokens / rate))
    return estimates


class _UnmeasuredError(SettingError):
    """A budget in time without a profile."""


def _refuse_to_measure(*_: Any, **__: Any) -> Profile:
    raise _UnmeasuredError(
        "the removed units depend on measured time, and this model was not profiled on this machine; pass --profile "
        "with a file that ddp-vllm profile wrote"
    )


def _removed_of_model(recipe: Recipe, source: Source, pools: Sequence[Pool]) -> tuple[float | None, list[str]]:
    """Return which share of the whole model is removed, and lines about it and the option that
    removes that share."""
    config, layers = source.config, source.widths.dense_layers
    least, most = ("at least ", "at most ") if any(pool.is_limit for pool in pools) else ("", "")
    if recipe.budget not in ("units", "params"):
        share: float | None = None
        lines: list[str] = []
        if recipe.budget != "latency":
            (pool,) = pools
            model_cost = whole_model(recipe.budget, config, layers, source.shapes, recipe.context_length)
            left = model_cost - pool.total + pool.kept
            share = 1 - left / model_cost
            lines = [
                f"removed: {least}{1 - pool.keep_ratio:.1%} of the prunable {recipe.budget} = {share:.1%} of the "
                f"model: {model_cost:,.0f} → {most}{left:,.0f} per token"
            ]
        return share, [*lines, "parameters: how many are removed depends on which units the search removes"]
    model_cost = whole_model("params", config, layers, source.shapes, recipe.context_length)
    prunable = prunable_parameters(source, recipe.context_length)
    total = sum(prunable.values())
    removed = sum((pool.total - pool.kept) * sum(prunable[kind] for kind in pool.shapes) / pool.total for pool in pools)
    line = (
        f"removed: {least}{removed / total:.1%} of the prunable parameters = {removed / model_cost:.1%} of the model: "
        f"{short(model_cost)} → {most}{short(model_cost - removed)}"
    )
    target = (1.0 - recipe.sparsity) * model_cost
    if recipe.sparsity and target > model_cost - total:
        line += f"; to remove {recipe.sparsity:.0%} of the model: --target {short(target)}"
    return removed / model_cost, [line]


def prunable_parameters(source: Source, context: int) -> dict[str, float]:
    """Return the number of parameters of the units of each module type that can be pruned."""
    layers, prunable = source.widths.dense_layers, {"attn": 0.0, "mlp": 0.0, "experts": 0.0}
    for price, layer in zip(prices("params", source.config, source.shapes, context), layers, strict=True):
        prunable["attn"] += price.query_head * layer.num_query_heads + price.kv_head * layer.num_kv_heads
        prunable["mlp"] += price.channel * layer.intermediate_size
        prunable["experts"] += price.expert_channel * sum(layer.expert_intermediate_sizes or ())
    return {kind: number for kind, number in prunable.items() if kind in source.sizes.blocks}


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
