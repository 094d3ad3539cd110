"""The verbs profile, bench, bench_steps and evaluate, and what their commands print. Each imports
what draws or prints when it is called."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from msgspec import convert

from ddp_benchmarks.evaluate import EvalSettings, choose_tasks
from ddp_benchmarks.evaluate import evaluate as evaluate_tasks
from ddp_benchmarks.processes import terminable
from ddp_benchmarks.profile import ProfileSettings, describe, run_profile
from ddp_benchmarks.sharegpt import BenchSettings, results_file, run_benchmark
from ddp_benchmarks.side_by_side import StepSettings, compare_steps
from ddp_vllm import evaluate_text
from ddp_vllm.checkpoint import read_stock_config
from ddp_vllm.dimensions import quantization_of
from ddp_vllm.errors import LimitError, SettingError, echo, line_printer
from ddp_vllm.evaluations import (
    UNDEFINED,
    Bits,
    Evaluation,
    against_output,
    bits_ratio,
    check_min_retained,
    default_output,
    judge_retained,
    perplexity_ratio,
)
from ddp_vllm.intervals import with_interval
from ddp_vllm.latency import Profile, dimensions_in, read_profile
from ddp_vllm.machine import Hardware, Workload
from ddp_vllm.masks import MASKS_FILE, Latency, Provenance, Quality, read_provenance
from ddp_vllm.model_facts import is_pruned, known_folder
from ddp_vllm.output import check_file, make_folder
from ddp_vllm.pages.summary import MIN_AGREEMENT, agrees, fidelity, lowest_agreement
from ddp_vllm.remote_code.widths import METHOD
from ddp_vllm.results import BEGINS, write_results
from ddp_vllm.settings import Option, Values, command, typed

UNITS = ("tokens", "characters")
Dense = Annotated[str | Path, Option("The model before pruning: a folder or a Hub name.", metavar="MODEL")]
Pruned = Annotated[str | Path | Iterable[str | Path], Option("Pruned checkpoints.", metavar="DIR,…", join=tuple)]
Overwrite = Annotated[bool, Option("Replace the output file.")]


def _describe(_: Profile, values: Values) -> None:
    for line in [*describe(values["output"]), f"{values['output']} has every measurement"]:
        echo(line)


@command("profile", settings=ProfileSettings, show=_describe)
@terminable()
def profile(
    model: str | Path,
    *,
    output: Annotated[Path | str, Option("The profile.", "-o")] = "machine.json",
    overwrite: Overwrite = False,
    verbose: bool = False,
    **settings: Any,
) -> Profile:
    """Measure the time of a step of MODEL on this machine by the widths of its layers, for prune
    --speedup.

        ddp-vllm profile MODEL -o machine.json
        ddp-vllm prune MODEL --speedup 1.3 --profile machine.json -o ./pruned

    MODEL is a folder or a Hub name; its weights are not needed. An engine of the dense model and
    one of another shape take turns, so memory must hold both, and nothing heavy may run at the same
    time. After an interruption the same command resumes. ENGINE_ARGUMENTS after -- are passed to
    every vLLM engine.

    In Python `settings` are any fields of `ProfileSettings`; the profile that was written is
    returned.
    """
    settings |= {"model": model}
    chosen, file = ProfileSettings(**settings), Path(output)
    run_profile(chosen, file, overwrite=overwrite, print_line=line_printer(verbose))
    return read_profile(file)


def _without_runs(results: Mapping[str, Any], _: Values) -> dict[str, Any]:
    return {name: value for name, value in results.items() if name != "runs"}


@command("bench sharegpt", settings=BenchSettings, show=lambda *_: None, as_json=_without_runs, json_is_last_line=True)
@terminable()
def bench(
    dense: Dense,
    pruned: Pruned,
    *,
    output: Annotated[Path | str | None, Option("Results.", "-o", shown="DIR/sharegpt-MODE.json")] = None,
    overwrite: Overwrite = False,
    verbose: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """Replay ShareGPT prompts through real vLLM and report how much faster the pruned model is.

        ddp-vllm bench sharegpt --dense MODEL --pruned ./pruned
        ddp-vllm bench sharegpt --dense MODEL --pruned ./pruned --mode serve --request-rate 1,4,inf
        ddp-vllm bench sharegpt --dense MODEL --pruned ./pruned --num-prompts 16 -- --enforce-eager

    ENGINE_ARGUMENTS after -- are passed to every vLLM engine.

    In Python `settings` are any fields of `BenchSettings`. The results are returned as they are
    written to `output`; `["verdicts"]` states how much faster each pruned model is.
    """
    if settings.get("mode", "offline") == "offline":
        _refuse(settings, ("request_rate", "max_concurrency"), "without --mode serve")
    settings |= {"dense": dense, "pruned": pruned}
    chosen = BenchSettings(**settings)
    file = results_file(chosen, Path(output) if output else None, overwrite=overwrite)
    return run_benchmark(chosen, file, verbose=verbose)


def _print_verdicts(results: Mapping[str, Any], values: Values) -> None:
    echo(f"{Workload(**results['settings']['workload'])}:")
    for verdict in results["verdicts"]:
        name = f"{Path(verdict['pruned']).name}: " if len(results["verdicts"]) > 1 else ""
        echo(f"{name}{verdict['sentence']}")
        if by_text := verdict.get("characters"):
            pairs = {unit: [by_text[who][f"{unit}_per_second"] for who in ("dense", "pruned")] for unit in UNITS}
            speeds = (f"{before:,.0f} → {after:,.0f} {unit}/s" for unit, (before, after) in pairs.items())
            echo(f"{name}by characters {by_text['sentence']} ({', '.join(speeds)})")
        if "predicted" in verdict:
            place = f" for {verdict['predicted_for']}" if "predicted_for" in verdict else ""
            echo(f"{name}predicted {verdict['predicted']:.2f}×{place}")
        if values["phase"] == "decode":
            echo(f"{name}prefill {verdict['prefill']['sentence']}")


def _prediction(folder: Path | None, base: Path | None) -> Latency | None:
    """Return the speedup that the budget predicted over a dense model of these sizes; None if it did so over
    another one, as before tokens or whole experts were removed, or if a model was quantized since."""
    if not folder or not is_pruned(folder):
        return None
    configs = [read_stock_config(model) for model in (folder, base) if model]
    methods = {(quantization_of(config) or {"quant_method": METHOD}).get("quant_method") for config in configs}
    if methods != {METHOD} or dimensions_in(configs[0]) != dimensions_in(configs[-1]):
        return None
    return Provenance.of(read_provenance(folder / MASKS_FILE)).latency


@command(
    "bench steps", settings=StepSettings, show=_print_verdicts, as_json=lambda results, _: results,
    json_is_last_line=True,
)  # fmt: skip
@terminable()
def bench_steps(
    dense: Dense,
    pruned: Pruned,
    *,
    output: Annotated[Path | str | None, Option("Results.", "-o", shown="not saved")] = None,
    overwrite: Overwrite = False,
    verbose: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """Compare a step of vLLM's engine on the dense and the pruned model, and with the speedup the
    budget predicted.

        ddp-vllm bench steps --dense MODEL --pruned ./pruned --concurrency 8 --context-length 1024

    All engines run at once and take turns, so memory must hold all of them. ENGINE_ARGUMENTS after
    -- are passed to every vLLM engine.

    Each round is written to the output and its ratio printed, so a stop loses at most one round. In
    Python `settings` are any fields of `StepSettings`. The results are returned as they are written
    to `output`; `["verdicts"]` states how much faster each pruned model is, and was
    predicted to be if this workload was its budget. `predicted_for` names another machine or other engine
    arguments.
    """
    if output:
        check_file(Path(output), overwrite=overwrite, begins=BEGINS)
    settings |= {"dense": dense, "pruned": pruned}
    chosen = StepSettings(**settings)
    # also of a folder without weights, for `-- --load-format dummy`
    *folders, base = map(known_folder, (*chosen.pruned, chosen.dense))
    predictions = [_prediction(folder, base) for folder in folders]

    def save(results: dict[str, Any]) -> None:
        for prediction, verdict in zip(predictions, results["verdicts"], strict=True):
            if prediction and prediction.workload == chosen.workload:
                verdict["predicted"] = prediction.speedup
                here = convert(results["hardware"], Hardware), [*chosen.engine_arguments]
                if (prediction.hardware, prediction.engine_arguments) != here:
                    verdict["predicted_for"] = prediction.place
        if output:
            write_results(results, Path(output))

    return compare_steps(chosen, print_line=line_printer(verbose), save=save)


@typed(EvalSettings)
def evaluate(
    model: str | Path,
    *,
    tasks: str | Iterable[str] = "paper",
    output: str | Path | None = None,
    verbose: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """Evaluate a pruned or dense model on the paper's tasks through lm-eval, and return lm-eval's
    results.

    tasks: lm-eval's names, in a list or separated by commas, or one of the suites `paper` and `generative`.
    output: a folder, by default `eval` in the model's. settings: any field of `EvalSettings`
    (`limit`, `include_path`, `backend`, …). `["ddp_vllm"]["mean_accuracy"]` is the mean.
    """
    folder = Path(output) if output else default_output(str(model))
    settings |= {
        "model": model,
        "tasks": choose_tasks(tasks if isinstance(tasks, str) else ",".join(tasks)),
        "output": folder,
    }
    return _evaluate([EvalSettings(**settings)], verbose)[0]


def _evaluate(models: Sequence[EvalSettings], verbose: bool) -> list[dict[str, Any]]:
    """Evaluate models one after the other, after all settings and folders were checked."""
    for settings in models:
        settings.check()
        make_folder(settings.output)
    with terminable():
        return [evaluate_tasks(settings, print_line=line_printer(verbose)) for settings in models]


def _print_quality(results: Mapping[str, Any], values: Values) -> None:
    """Raises: LimitError if the model misses --max-ratio or --min-retained."""
    from ddp_benchmarks.tables import print_quality

    missed = [*_print_texts(results["text"], values)]
    echo(f"results are in {values['output'] or default_output(values['model'])}")
    typed = [convert(one, Evaluation) for one in results["tasks"]]
    if typed:
        print_quality(typed[-1], typed[0] if values["against"] else None)
    if missed:
        raise LimitError(f"{' and '.join(missed)}; train for longer with ddp-vllm recover, or remove less")
    if typed:
        judge_retained(typed[-1], typed[0], values["min_retained"])


def _print_texts(results: Mapping[str, Any], values: Values) -> Iterator[str]:
    """Print a line for each text; yield the limits that were missed."""
    limit, least = values["max_ratio"], lowest_agreement(values["max_ratio"], values["min_agreement"])
    measured: dict[str, Quality | Bits] = convert(results.get("texts", {}), dict[str, Quality])
    bits = convert(results.get("bits", {}), dict[str, Bits])
    for name, result in (measured | bits).items():
        ratio = perplexity_ratio(result)
        assert ratio
        if limit is not None and not ratio[0] <= limit:
            yield f"perplexity on {name} is {ratio[0]:.3g} times the dense model's, above --max-ratio {limit:g}"
        if isinstance(result, Quality):
            near = result.last_agreement
            if near and not agrees(result, least):
                yield f"top-1 agreement on {name} is {near.top1:.1%}, below --min-agreement {least:g}"
            echo(
                f"{name}: perplexity {result.dense:.2f} → {result.pruned:.2f}, {with_interval(*ratio)} the dense "
                f"model's; {fidelity(result)} ({result.tokens:,} tokens)"
            )
        else:
            per_byte = {"bits": result["bits_per_byte"], "tokens": result["tokens_per_byte"]}
            changes = {key: f"{key} per byte {of['dense']:.4f} → {of['pruned']:.4f}" for key, of in per_byte.items()}
            echo(
                f"{name}: {changes['bits']}, {with_interval(*bits_ratio(result))} the dense model's; "
                f"{changes['tokens']}; perplexity per token of the dense model, {with_interval(*ratio)}"
            )
    if bits:
        echo(UNDEFINED)
    if bits and values["min_agreement"] is not None:
        yield "top-1 agreement is not defined (omit --min-agreement)"


def _as_json(results: Mapping[str, Any], _: Values) -> dict[str, Any]:
    evaluated = results["tasks"] or [{}]
    return results["text"] | evaluated[-1] | ({"dense": evaluated[0]} if len(evaluated) > 1 else {})


@command("eval", settings=EvalSettings, show=_print_quality, as_json=_as_json, has_quiet=True)
def _eval(
    model: str,
    *,
    tasks: Annotated[
        str | None,
        Option(
            "Tasks of lm-eval, or suites: paper, generative.",
            metavar="TASK,…", shown="paper", join=",".join,
        ),
    ] = None,
    text: Annotated[tuple[str, ...], Option("Compare with the dense model on these texts.")] = (),
    tokens: Annotated[int | None, Option("Tokens of each --text, at least 8 blocks.", shown="16,384", least=1)] = None,
    max_ratio: Annotated[
        float | None,
        Option("With --text: exit with 9 if perplexity is above this × the dense one.", least=0.01),
    ] = None,
    min_agreement: Annotated[float | None, MIN_AGREEMENT] = None,
    min_retained: Annotated[
        float | None,
        Option("With --against: exit with 9 if less of the dense model's accuracy is retained."),
    ] = None,
    against: Annotated[
        str | None, Option("Evaluate this model too, and print the retained fraction.", metavar="MODEL")
    ] = None,
    output: Annotated[
        Path | None,
        Option(
            "Folder for the results; --against uses its subfolder against-NAME.",
            "-o", shown="MODEL/eval; eval-NAME for a Hub model",
        ),
    ] = None,
    verbose: bool = False,
    **settings: Any,
) -> dict[str, Any]:  # fmt: skip
    """Evaluate MODEL, a folder or a Hub name, on the paper's tasks through lm-eval.

        ddp-vllm eval ./pruned --against MODEL --min-retained 0.97
        ddp-vllm eval ./pruned --tasks arc_easy,piqa --limit 100
        ddp-vllm eval ./pruned --text test.jsonl --max-ratio 1.1

    --text measures perplexity, KL and top-1 agreement on your own text, compared with the dense
    model or --against. Give it text that pruning did not read, and run tasks by another command. If
    the models have different tokens, as after trim, bits per byte are compared instead, and perplexity
    is per token of the dense model.
    An interrupted evaluation resumes from lm-eval's cache of responses.
    """
    given = settings | {"tasks": tasks, "tokens": tokens, "max_ratio": max_ratio, "min_agreement": min_agreement}
    given |= {"min_retained": min_retained}
    if text:
        of_tasks = ("tasks", "backend", "include_path", "limit", "batch_size", "model_args", "min_retained")
        _refuse(given, of_tasks, "with --text")
        shared: dict[str, Any] = {name: settings[name] for name in ("dtype", "max_length") if name in settings}
        shared |= {"tokens": tokens} if tokens else {}
        results = evaluate_text(model, text, output=output, against=against or "", verbose=verbose, **shared)
        return {"text": results, "tasks": []}
    _refuse(given, ("tokens", "max_ratio", "min_agreement"), "without --text")
    names = choose_tasks(tasks or "paper")
    if not against:
        _refuse(given, ("min_retained",), "without --against")
    check_min_retained(min_retained, names)
    models = []
    for evaluated in filter(None, (against, model)):
        chosen = output or default_output(model)
        folder = chosen if evaluated == model else against_output(evaluated, chosen)
        models.append(EvalSettings(model=evaluated, tasks=names, output=folder, **settings))
    return {"text": {}, "tasks": _evaluate(models, verbose)}


def _refuse(given: Mapping[str, Any], names: Iterable[str], where: str) -> None:
    """Refuse settings that have no effect. Raises: SettingError."""
    for name in names:
        if given.get(name) is not None:
            raise SettingError(name, f"has no effect {where}; omit it")
