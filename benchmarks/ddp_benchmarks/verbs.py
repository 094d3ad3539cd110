"""The verbs profile, bench, bench_steps and evaluate as functions. Each imports what it needs when
it is called."""

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ddp_vllm.errors import line_printer
from ddp_vllm.evaluations import default_output
from ddp_vllm.latency import Profile, read_profile
from ddp_vllm.machine import Workload
from ddp_vllm.results import results_folder


def profile(
    model: str | Path,
    *,
    output: str | Path = "machine.json",
    overwrite: bool = False,
    verbose: bool = False,
    **settings: Any,
) -> Profile:
    """Measure in vLLM how long a step of a model takes here by the widths of its layers, for
    `prune(speedup=…)`.

    settings: any field of `ProfileSettings` (`concurrency` and `context_length`, each one number or
    several, `steps`, `rounds`, `engine_arguments`). Returns the `Profile` that was written.
    """
    from ddp_benchmarks.profile import ProfileSettings, run_profile

    for name in {"concurrency", "context_length"} & settings.keys():
        settings[name] = (settings[name],) if isinstance(settings[name], int) else tuple(settings[name])
    chosen, file = ProfileSettings(model=str(model), **settings), Path(output)
    run_profile(chosen, file, overwrite=overwrite, print_line=line_printer(verbose))
    return read_profile(file)


def bench(
    dense: str | Path,
    pruned: str | Path | Iterable[str | Path],
    *,
    output: str | Path | None = None,
    overwrite: bool = False,
    verbose: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """Replay ShareGPT prompts through real vLLM, with the dense model and the pruned ones in turn.

    settings: any field of `Settings` (`mode`, `num_prompts`, `pairs`, `engine_arguments`, …).
    Returns the results as they are written to `output`, by default `sharegpt-MODE.json` in the
    pruned folder; `["verdicts"]` states how much faster each pruned model is.
    """
    from ddp_benchmarks.sharegpt import Settings, results_file, run_benchmark

    if settings.get("dataset"):
        settings["dataset"] = Path(settings["dataset"])
    chosen = Settings(dense=str(dense), pruned=tuple(map(str, _several(pruned))), **settings)
    file = results_file(chosen, Path(output) if output else None, overwrite=overwrite)
    return dict(run_benchmark(chosen, file, print_line=line_printer(verbose)))


def bench_steps(
    dense: str | Path,
    pruned: str | Path | Iterable[str | Path],
    *,
    phase: str = "decode",
    concurrency: int = 8,
    context_length: int = 2048,
    output: str | Path | None = None,
    overwrite: bool = False,
    verbose: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """Compare a step of vLLM's engine on the dense model and the pruned ones, which run at once and
    take turns.

    phase: `decode` or `prefill`. concurrency: sequences served at once. context_length: tokens per
    sequence. settings: `rounds`, `steps`, `engine_arguments`. Returns the results as they are
    written to `output`, if that is given; `["verdicts"]` states how much faster each pruned model
    is, and was predicted to be if this workload was its budget.
    """
    from ddp_benchmarks.side_by_side import StepSettings, compare_steps
    from ddp_vllm.masks import MASKS_FILE, read_provenance
    from ddp_vllm.model_facts import is_pruned
    from ddp_vllm.output import check_file
    from ddp_vllm.results import write_results

    if output:
        check_file(Path(output), overwrite=overwrite)
    workload = Workload(phase=phase, batch=concurrency, context=context_length)
    chosen = StepSettings(dense=str(dense), pruned=tuple(map(str, _several(pruned))), workload=workload, **settings)
    # also of a folder without weights, for `-- --load-format dummy`
    provenances = [
        read_provenance(Path(folder) / MASKS_FILE) if is_pruned(Path(folder)) else {} for folder in chosen.pruned
    ]
    predictions = [provenance.get("latency", {}) for provenance in provenances]
    results = compare_steps(chosen, print_line=line_printer(verbose))
    for prediction, verdict in zip(predictions, results["verdicts"], strict=True):
        if prediction.get("workload") == asdict(workload):
            verdict["predicted"] = prediction["speedup"]
    if output:
        write_results(results, Path(output))
    return results


def evaluate(
    model: str | Path,
    *,
    tasks: str = "paper",
    output: str | Path | None = None,
    verbose: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """Evaluate a pruned or dense model on the paper's tasks through lm-eval, and return lm-eval's
    results.

    tasks: lm-eval's names separated by commas, or one of the suites `paper`, `nine`, `llama`, `generative`.
    output: a folder, by default `eval` in the model's. settings: any field of `EvalSettings`
    (`limit`, `include_path`, `backend`, …). `["ddp_vllm"]["mean_accuracy"]` is the mean.
    """
    from ddp_benchmarks import evaluate as evaluating

    folder = Path(output) if output else default_output(str(model))
    if settings.get("include_path"):
        settings["include_path"] = Path(settings["include_path"])
    chosen = evaluating.EvalSettings(model=str(model), tasks=evaluating.choose_tasks(tasks), output=folder, **settings)
    chosen.check()
    with results_folder(folder):
        return dict(evaluating.evaluate(chosen, print_line=line_printer(verbose)))


def _several(paths: str | Path | Iterable[str | Path]) -> Iterable[str | Path]:
    return (paths,) if isinstance(paths, str | Path) else paths
