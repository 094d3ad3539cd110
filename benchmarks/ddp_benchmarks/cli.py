"""The commands `bench`, `profile` and `eval`. torch and vLLM are imported when a command runs, not
before."""

import itertools
import json
import math
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource
from msgspec import convert

from ddp_benchmarks import verbs
from ddp_vllm.cli import echo
from ddp_vllm.errors import LimitError, SettingError
from ddp_vllm.machine import PHASES, Workload
from ddp_vllm.options import (
    choice_option,
    default_option,
    json_option,
    lines_to_stderr,
    list_option,
    quiet_option,
)

if TYPE_CHECKING:
    from ddp_vllm.results import Bench

_PATH = click.Path(path_type=Path)
_overwrite = click.option("--overwrite", is_flag=True, help="Replace the output file.")
_json = click.option("--json", "as_json", is_flag=True, help="Print the results as one line of JSON at the end.")
_seed = default_option("--seed", default=0, help="Of everything random.")
_dense = click.option(
    "--dense", required=True, metavar="MODEL", help="The model before pruning: a folder or a Hub name."
)
_pruned = list_option("--pruned", required=True, metavar="DIR,…", help="Pruned checkpoints.")


def _limit(text: str) -> int | None:
    return None if text == "none" else int(text)


@click.group()
def bench() -> None:
    """Compare the dense and the pruned model in real vLLM."""


@bench.command()
@_dense
@_pruned
@choice_option("--mode", ["offline", "serve"], "All prompts at once, or requests over HTTP.")
@default_option("--num-prompts", default=1000, help="Conversations to replay.")
@default_option("--pairs", default=5, help="Measurements of each model.")
@click.option(
    "--dataset-path",
    "--dataset",
    "dataset",
    type=_PATH,
    show_default="ShareGPT of the Hub",
    help="Conversations in any form that prune reads.",
)
@click.option("--output", "-o", type=_PATH, show_default="DIR/sharegpt-MODE.json", help="Results.")
@_overwrite
@_json
@_seed
@default_option("--max-model-len", default=2048, help="Context of the engines, in tokens.")
@list_option("--request-rate", of=float, default="inf", help="Requests/s.")
@list_option("--max-concurrency", of=_limit, default="none", metavar="N,…", help="Requests in flight.")
@list_option("--goodput", metavar="NAME:MS,…", help="Service levels such as ttft:500.")
@default_option("--num-warmups", "--warmups", "warmups", default=2, help="Requests before an engine is measured.")
@click.option("--no-warmup-round", is_flag=True, help="Skip the discarded round before the pairs.")
@click.option("--port", type=int, show_default="a free one", help="Port of the server.")
@default_option("--startup-seconds", type=float, default=1800, help="Time limit of a server's start.")
@click.argument("engine_arguments", nargs=-1)
def sharegpt(output: Path | None, overwrite: bool, as_json: bool, **options: Any) -> None:
    """Replay ShareGPT prompts through real vLLM and report how much faster the pruned model is.

    \b
    ddp-vllm bench sharegpt --dense MODEL --pruned ./pruned
    ddp-vllm bench sharegpt --dense MODEL --pruned ./pruned --mode serve --request-rate 1,4,inf
    ddp-vllm bench sharegpt --dense MODEL --pruned ./pruned --num-prompts 16 -- --enforce-eager

    ENGINE_ARGUMENTS after -- are passed to every vLLM engine.
    """
    from ddp_benchmarks.processes import terminable
    from ddp_benchmarks.sharegpt import Load, Settings, results_file, run_benchmark
    from ddp_benchmarks.tables import json_line, plain_console, print_report
    from ddp_vllm.remote_code.files import read_json
    from ddp_vllm.results import read_results

    if options["mode"] == "offline":
        _refuse_without("--mode serve", "request_rate", "max_concurrency", "goodput", "port", "startup_seconds")
    rates_and_limits = itertools.product(options.pop("request_rate"), options.pop("max_concurrency"))
    loads = tuple(Load(request_rate=rate, max_concurrency=limit) for rate, limit in rates_and_limits)
    settings = Settings(warmup_round=not options.pop("no_warmup_round"), loads=loads, **options)
    settings.check()
    output = results_file(settings, output, overwrite=overwrite)
    console = plain_console()
    before = output.stat().st_mtime_ns if output.exists() else None
    try:
        with terminable():
            run_benchmark(settings, output, print_line=partial(console.print, style="dim"))
    finally:  # an interrupted run prints its results so far
        written = output.exists() and output.stat().st_mtime_ns != before
        if written and (results := read_results(output)).runs:
            print_report(results, console)
            console.print(f"{output} has vLLM's raw results")
            console.print(_picture(results, output.with_suffix(".png")))
            if as_json:
                echo(json_line(results, read_json(output)))


def _picture(results: "Bench", path: Path) -> str:
    """Draw the results if matplotlib is installed; return a line with the picture's path or the
    remedy."""
    from ddp_benchmarks.tables import draw_speed

    if not find_spec("matplotlib"):
        return "no picture of the results: matplotlib is missing; pip install matplotlib"
    draw_speed(results, path)
    return f"{path} shows them"


@bench.command()
@_dense
@_pruned
@choice_option("--phase", PHASES, "The step to compare; decode also reports prefill.")
@default_option("--concurrency", default=8, help="Sequences served at once.")
@default_option("--context-length", default=2048, help="Tokens per sequence.")
@default_option("--rounds", default=5, help="Measurements of each model.")
@default_option("--steps", default=96, help="Decode steps per round, in turns.")
@click.option("--output", "-o", type=_PATH, show_default="not saved", help="Results.")
@_overwrite
@_json
@click.argument("engine_arguments", nargs=-1)
def steps(as_json: bool, **options: Any) -> None:
    """Compare a step of vLLM's engine on the dense and the pruned model, and with the speedup the
    budget predicted.

    \b
    ddp-vllm bench steps --dense MODEL --pruned ./pruned --concurrency 8 --context-length 1024

    All engines run at once and take turns, so memory must hold all of them. ENGINE_ARGUMENTS after
    -- are passed to every vLLM engine.
    """
    from ddp_benchmarks.processes import terminable
    from ddp_benchmarks.tables import plain_console

    with terminable():
        results = verbs.bench_steps(verbose=True, **options)
    console = plain_console()
    console.print(f"{Workload(**results['settings']['workload'])}:")
    for verdict in results["verdicts"]:
        name = f"{Path(verdict['pruned']).name}: " if len(results["verdicts"]) > 1 else ""
        console.print(f"{name}{verdict['sentence']}")
        if "predicted" in verdict:
            console.print(f"{name}predicted {verdict['predicted']:.2f}×")
        if options["phase"] == "decode":
            console.print(f"{name}prefill {verdict['prefill']['sentence']}")
    if as_json:
        echo(json.dumps(results))


@click.command()
@click.argument("model")
@list_option("--concurrency", of=int, default="8", help="Sequences served at once.")
@list_option("--context-length", of=int, default="2048", help="Tokens per sequence.")
@default_option("--rounds", default=2, help="Measurements of each shape.")
@default_option("--steps", default=96, help="Decode steps per round, in turns.")
@default_option("-o", "--output", type=_PATH, default="machine.json", help="The profile.")
@_overwrite
@click.argument("engine_arguments", nargs=-1)
def profile(output: Path, overwrite: bool, **options: Any) -> None:
    """Measure the time of a step of MODEL on this machine by the widths of its layers, for prune
    --speedup.

    \b
    ddp-vllm profile MODEL -o machine.json
    ddp-vllm prune MODEL --speedup 1.3 --profile machine.json -o ./pruned

    MODEL is a folder or a Hub name; its weights are not needed. An engine of the dense model and
    one of another shape take turns, so memory must hold both, and nothing heavy may run at the same
    time. After an interruption the same command resumes. ENGINE_ARGUMENTS after -- are passed to
    every vLLM engine.
    """
    from ddp_benchmarks.processes import terminable
    from ddp_benchmarks.profile import ProfileSettings, describe, run_profile
    from ddp_benchmarks.tables import plain_console

    console = plain_console()
    with terminable():
        run_profile(
            ProfileSettings(**options), output, overwrite=overwrite, print_line=partial(console.print, style="dim")
        )
    for line in describe(output):
        console.print(line)
    console.print(f"{output} has every measurement")


def _refuse_without(needed: str, *names: str) -> None:
    """Refuse options that have no effect without `needed`. Raises: SettingError."""
    context = click.get_current_context()
    for name in names:
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise SettingError(f"--{name.replace('_', '-')} has no effect without {needed}; add {needed} or omit it")


@click.command()
@click.argument("model")
@list_option(
    "--tasks", default="paper", metavar="TASK,…", help="Tasks of lm-eval, or suites: paper, nine, llama, generative."
)
@choice_option("--backend", ["hf", "vllm"], "Runs the tasks: transformers or vLLM.")
@click.option("--include-path", type=_PATH, metavar="FOLDER", help="Further tasks for lm-eval, such as local ones.")
@list_option("--text", "texts", help="Compare with the dense model on these texts.")
@default_option("--tokens", default=16_384, help="Tokens of each --text, at least 8 blocks.")
@click.option("--max-ratio", type=float, help="With --text: exit with 9 if perplexity is above this × the dense one.")
@click.option(
    "--min-retained", type=float, help="With --against: exit with 9 if less of the dense model's accuracy is retained."
)
@click.option("--limit", type=int, help="Only the first rows of each task.")
@click.option("--against", metavar="MODEL", help="Evaluate this model too, and print the retained fraction.")
@click.option("--batch-size", type=int, show_default="8; on a GPU as many as fit, up to 64", help="Rows at once.")
@default_option("--dtype", default="auto", help="Of weights and activations.")
@default_option("--max-length", default=2048, help="Longest context, in tokens.")
@list_option("--model-args", metavar="K=V,…", help="Further arguments of lm-eval's model class.")
@click.option(
    "--output", "-o", type=_PATH, show_default="MODEL/eval; eval-NAME for a Hub model",
    help="Folder for the results; --against uses its subfolder against-NAME.",
)  # fmt: skip
@json_option
@quiet_option
def eval(
    model: str,
    tasks: tuple[str, ...],
    texts: tuple[str, ...],
    against: str | None,
    output: Path | None,
    as_json: bool,
    quiet: bool,
    max_ratio: float | None,
    min_retained: float | None,
    **options: Any,
) -> None:
    """Evaluate MODEL, a folder or a Hub name, on the paper's tasks through lm-eval.

    \b
    ddp-vllm eval ./pruned --against MODEL --min-retained 0.97
    ddp-vllm eval ./pruned --tasks arc_easy,piqa --limit 100
    ddp-vllm eval ./pruned --text test.jsonl --max-ratio 1.1

    --text measures perplexity, KL and top-1 agreement on your own text, compared with the dense
    model or --against. Give it text that pruning did not read. Tasks run only if --tasks is passed
    too. A task NAME_local of --include-path counts as lm-eval's NAME. An interrupted evaluation
    resumes from lm-eval's cache of responses.
    """
    from ddp_benchmarks.evaluate import EvalSettings, choose_tasks, evaluate
    from ddp_benchmarks.processes import terminable
    from ddp_benchmarks.tables import plain_console, print_quality
    from ddp_vllm.evaluations import Evaluation, against_output, check_min_retained, default_output, judge_retained
    from ddp_vllm.results import results_folder

    with_tasks = click.get_current_context().get_parameter_source("tasks") is ParameterSource.COMMANDLINE
    if texts:
        if not with_tasks:
            task_options = ("backend", "include_path", "limit", "batch_size", "model_args", "min_retained")
            _refuse_without("--tasks together with --text", *task_options)
        _evaluate_text(model, texts, against, output, options, as_json=as_json, quiet=quiet, max_ratio=max_ratio)
        if not with_tasks:
            return
    else:
        _refuse_without("--text", "tokens", "max_ratio")
    del options["tokens"]
    pairs = [tuple(part.split("=", 1)) for part in options.pop("model_args")]
    if any(len(pair) != 2 for pair in pairs):
        raise SettingError("--model-args requires name=value pairs, comma-separated, such as max_model_len=2048")
    names = choose_tasks(",".join(tasks))
    check_min_retained(min_retained, names, against)
    settings = []
    for evaluated in filter(None, (against, model)):
        chosen = output if output is None or evaluated == model else against_output(evaluated, output)
        folder = chosen or default_output(evaluated)
        settings.append(EvalSettings(model=evaluated, tasks=names, model_args=tuple(pairs), output=folder, **options))
        settings[-1].check()
    console = plain_console(as_json=as_json, quiet=quiet)
    with ExitStack() as stack:
        for one in settings:
            stack.enter_context(results_folder(one.output))
        stack.enter_context(terminable())
        results = [evaluate(one, print_line=partial(console.print, style="dim")) for one in settings]
    typed = [convert(one, Evaluation) for one in results]
    print_quality(typed[-1], typed[0] if against else None, console)
    console.print(f"lm-eval's results are in {output or default_output(model)}")
    if as_json:
        echo(json.dumps(results[-1]))
    judge_retained(typed[-1], typed[0], min_retained)


def _evaluate_text(
    model: str,
    texts: tuple[str, ...],
    against: str | None,
    output: Path | None,
    options: dict[str, Any],
    *,
    as_json: bool,
    quiet: bool,
    max_ratio: float | None,
) -> None:
    """Compare with the dense model on the user's text, and print the results.

    Raises: LimitError if perplexity on a text is above `max_ratio` times the dense model's.
    """
    if max_ratio is not None and not 0 < max_ratio < math.inf:
        raise SettingError(f"--max-ratio {max_ratio:g} is not a factor; give a number above 0, such as 1.1")
    from ddp_benchmarks.tables import plain_console
    from ddp_vllm import evaluate_text
    from ddp_vllm.evaluations import default_output, perplexity_ratio
    from ddp_vllm.intervals import with_interval
    from ddp_vllm.pages.summary import fidelity

    chosen = {name: options[name] for name in ("dtype", "max_length", "tokens")}
    console, missed = plain_console(as_json=as_json, quiet=quiet), list[str]()
    with lines_to_stderr(as_json):
        results = evaluate_text(
            model, texts, output=output, against=against or "", verbose=not quiet, **chosen
        )  # fmt: skip
    for name, quality in results["texts"].items():
        ratio = perplexity_ratio(quality)
        assert ratio
        if max_ratio is not None and not ratio[0] <= max_ratio:
            missed.append(f"{ratio[0]:.3g} on {name}")
        console.print(
            f"{name}: perplexity {quality['dense']:.2f} → {quality['pruned']:.2f}, {with_interval(*ratio)} the dense "
            f"model's; {fidelity(quality)} ({quality['tokens']:,} tokens)"
        )
    console.print(f"results are in {output or default_output(model)}")
    if as_json:
        echo(json.dumps(results))
    if missed:
        raise LimitError(
            f"perplexity is {' and '.join(missed)} times the dense model's, above --max-ratio {max_ratio:g}; train for "
            "longer with ddp-vllm recover, or remove less"
        )
