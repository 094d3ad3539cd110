"""Runs lm-eval on the paper's tasks, one task after the other, and caches each finished task.

`results_<date>.json` has lm-eval's results in its own format. This room adds the choice of tasks
and metrics (tasks.py), local data, the cache, and the comparison with the dense model.
"""

import dataclasses
import hashlib
import json
import logging
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ddp_benchmarks.engine import engine_environment, runs_on_cpu, vllm_command
from ddp_benchmarks.processes import end_group, kill_with_us
from ddp_benchmarks.protocol import check_lowest, new_results
from ddp_benchmarks.tasks import file_sha256, find_files, write_task
from ddp_vllm.checkpoint import read_config
from ddp_vllm.cli import quiet_libraries
from ddp_vllm.errors import DdpError, ModelError, ServingError, SettingError, TextError
from ddp_vllm.evaluations import TASKS, mean_accuracy
from ddp_vllm.families import register_pruned
from ddp_vllm.formats import check_states_no_widths
from ddp_vllm.hub import hub_fault
from ddp_vllm.machine import versions
from ddp_vllm.model_facts import describe_model, is_pruned, local_folder, model_id, weight_files
from ddp_vllm.remote_code.files import read_json
from ddp_vllm.remote_code.module_widths import states_widths
from ddp_vllm.results import write_new_results, write_results
from ddp_vllm.schema import ANY, NUMBER, check

LOCAL_ROWS = "pass --rows with local files, or --text with text of your own, or restore the network"
_PER_TASK = (
    *("results", "configs", "versions", "n-shot"),
    *("higher_is_better", "n-samples", "group_subtasks", "batch_sizes"),
)
_PART = {f"{name}?": {str: ANY} for name in _PER_TASK} | {"results": {str: {str: ANY}}, "answers?": {str: [NUMBER]}}


@dataclass(frozen=True, kw_only=True)
class EvalSettings:
    """Every setting of one evaluation."""

    model: str
    tasks: tuple[str, ...]
    backend: str = "hf"
    """`hf` (transformers) or `vllm`."""
    rows: tuple[Path, ...] = ()
    """Local files and folders; if not empty, no rows are taken from the Hub."""
    limit: int | None = None
    """Evaluate only the first rows of each task; None: all."""
    batch_size: int | None = None
    """Rows at once; None: 8 on a CPU, on a GPU as many as lm-eval finds to fit, at most 64 (all
    rows with vLLM)."""
    dtype: str = "auto"
    max_length: int = 2048
    """Longest context in tokens; perplexity is computed in windows of this length."""
    model_args: tuple[tuple[str, str], ...] = ()
    """Further arguments of lm-eval's model class, which converts True, None and numbers."""
    output: Path = Path("eval")

    def check(self) -> None:
        """Check everything that does not require loading the model.

        Raises: SettingError naming the value and its range; ServingError if vLLM is the backend and
            missing; ModelError; TextError.
        """
        if self.limit is not None and self.limit < 1:
            raise SettingError(f"--limit {self.limit} is below 1; omit it to evaluate every row")
        check_lowest(self, batch_size=1, max_length=16)
        if self.backend == "vllm":
            vllm_command()
        describe_model(self.model)
        folder = local_folder(self.model)
        if self.backend == "hf" and folder and not is_pruned(folder):
            try:
                check_states_no_widths(read_config(folder))
            except ModelError as error:
                raise ModelError(f"{self.model}: {error}, or pass --backend vllm") from None
        self.files()
        home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
        cache = Path(os.environ.get("HF_DATASETS_CACHE", home / "datasets"))
        is_cached = cache.is_dir() and any(cache.iterdir())  # perhaps the rows of these tasks
        if not (self.rows or is_cached) and (fault := hub_fault()):
            raise TextError(f"the rows of the tasks cannot be read from the hub ({fault}); {LOCAL_ROWS}")

    def files(self) -> dict[str, Path]:
        """Return the local file of each task; {} if rows come from the Hub. Raises: TextError if
        one is missing."""
        files = find_files(self.tasks, self.rows)
        if self.rows and (missing := [name for name in self.tasks if name not in files]):
            names = ", ".join(f"{TASKS[name].file}.jsonl" for name in missing)
            folders = ", ".join(map(str, self.rows))
            raise TextError(
                f"no local file for {', '.join(missing)} ({names}) in {folders}; add it, or choose other --tasks"
            )
        return files


def evaluate(settings: EvalSettings, *, print_line: Callable[[str], None] = print) -> dict[str, Any]:
    """Evaluate a model on every task that is not in the cache; return lm-eval's results of all
    tasks in one dict.

    The results are also written to `settings.output/results_<date>.json`, with ours under the key
    `ddp_vllm`.
    Raises: ModelError, TextError, SettingError before the model is loaded; ServingError if vLLM
    fails.
    """
    settings.check()
    files = settings.files()
    cached = {name: _cache_file(settings, name, files.get(name)) for name in settings.tasks}
    todo = [name for name, file in cached.items() if _finished(file) is None]
    if done := len(settings.tasks) - len(todo):
        print_line(f"{settings.model}: reusing {done} of {len(settings.tasks)} tasks from the cache")
    if todo:
        run_alone(_evaluate_tasks, settings, todo, files)
        # now a Hub model is downloaded
        cached |= {name: _cache_file(settings, name, files.get(name)) for name in todo}
    parts = [_finished(cached[name]) or {} for name in settings.tasks]
    answers = {name: row for part in parts for name, row in part.pop("answers", {}).items()}
    merged = _merge(parts)
    plain_settings = json.loads(json.dumps(dataclasses.asdict(settings), default=str))
    merged["ddp_vllm"] = new_results("ddp-vllm eval 1", plain_settings) | {
        "model": describe_model(settings.model).to_json(),
        "data": {name: file_sha256(file) for name, file in files.items()} or "hub",
        "mean_accuracy": mean_accuracy(merged),
        "answers": answers,  # task -> its metric for each row: 1 right, 0 wrong
    }
    write_new_results(merged, settings.output, "results", merged["ddp_vllm"]["started"])
    return merged


def _cache_file(settings: EvalSettings, name: str, data: Path | None) -> Path:
    """Return a task's cache file, whose name is a hash of everything that could change the
    result."""
    folder = local_folder(settings.model)
    weights = map(Path.stat, weight_files(folder)) if folder else ()
    parts = [
        model_id(folder) if folder else settings.model,
        [weight.st_mtime_ns for weight in weights],  # the id covers samples of them
        [(path.name, file_sha256(path)) for path in sorted(folder.glob("*.py"))] if folder else [],
        [settings.backend, settings.limit, settings.dtype, settings.max_length, settings.model_args],
        dataclasses.asdict(TASKS[name]),
        file_sha256(data) if data else "hub",
        versions(),
    ]
    digest = hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()[:16]
    return settings.output / "tasks" / f"{name}-{digest}.json"


def _finished(file: Path) -> dict[str, Any] | None:
    """Return a task's cached results; None if there are none or the file is damaged."""
    try:
        saved = read_json(file)
        check(saved, _PART, file.name)
    except (OSError, ValueError):
        return None
    return dict(saved)


def run_alone(function: Callable[..., None], *arguments: Any) -> None:
    """Call `function` in a new process, so that its memory is free before the next model is loaded.

    Raises: the DdpError or ModuleNotFoundError of the function; ServingError if the process dies.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe()
    process = context.Process(target=_call, args=(sender, function, arguments))
    process.start()
    release = kill_with_us(process.pid or 0)
    sender.close()
    try:
        answer = receiver.recv()
        process.join(timeout=10)
    except EOFError:
        process.join()
        raise ServingError(
            f"the evaluation died with exit code {process.exitcode}; see the lines above, or lower --batch-size if "
            "memory ran out"
        ) from None
    finally:
        process.terminate()
        try:
            end_group(process.pid or 0, lambda: process.exitcode)
        finally:
            release()
        receiver.close()
    if answer is not None:
        raise answer


def _call(connection: Connection, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    os.setsid()  # its own process group: Ctrl-C reaches only the parent, which ends the whole group
    try:
        function(*arguments)
        connection.send(None)
    except (DdpError, ModuleNotFoundError) as error:
        connection.send(error)


def _evaluate_tasks(settings: EvalSettings, names: list[str], files: Mapping[str, Path]) -> None:
    """Load the model once and run lm-eval's tasks in turn; each result is saved before the next
    task starts."""
    if settings.rows:  # set before the first import that reads them
        os.environ.update(HF_DATASETS_OFFLINE="1", HF_HUB_OFFLINE="1" if local_folder(settings.model) else "0")
    is_offline = not settings.rows and bool(hub_fault())
    if is_offline:  # take what is cached, without retries
        os.environ.update(HF_DATASETS_OFFLINE="1", HF_HUB_OFFLINE="1")
    os.environ.update(engine_environment())
    quiet_libraries()
    from lm_eval import evaluator
    from lm_eval.tasks import TaskManager, get_task_dict
    from rich.console import Console

    # it warns about defaults of its own task files
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    # it describes the working folder, not this program
    evaluator.get_git_commit_hash = lambda: None
    console = Console(stderr=True, highlight=False)
    with tempfile.TemporaryDirectory(prefix="ddp-vllm-tasks-") as temporary:
        for name in names if settings.rows else ():
            write_task(name, files[name], Path(temporary))
        manager = TaskManager(include_path=temporary, include_defaults=False) if settings.rows else TaskManager()
        if is_offline:
            with _reading_rows(names):
                get_task_dict(names, manager)  # before the model is loaded
        model, arguments = _load_model(settings)
        for number, name in enumerate(names, 1):
            console.print(f"[bold]{TASKS[name].heading}[/bold], task {number} of {len(names)}")
            as_chat = TASKS[name].is_generated and bool(model.tokenizer.chat_template)
            with _reading_rows([name]):
                results = evaluator.simple_evaluate(
                    model=model, tasks=[name], batch_size=_batch_size(settings), limit=settings.limit,
                    task_manager=manager, apply_chat_template=as_chat, fewshot_as_multiturn=as_chat,
                )  # fmt: skip
            results["config"] |= {"model": settings.backend, "model_args": arguments}
            results["batch_sizes"] = {name: results["config"].get("batch_sizes")}
            samples = results.pop("samples")[name]
            if TASKS[name].higher_is_better:
                metric, kept = TASKS[name].metric, TASKS[name].filter
                results["answers"] = {name: [float(sample[metric]) for sample in samples if sample["filter"] == kept]}
            write_results(json.loads(json.dumps(results, default=str)), _cache_file(settings, name, files.get(name)))


@contextmanager
def _reading_rows(names: Sequence[str]) -> Iterator[None]:
    """Turn errors of `datasets` and of the hub's client into a TextError; the models of lm-eval
    read no files then."""
    try:
        yield
    except OSError as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise TextError(f"the rows of {', '.join(names)} cannot be read ({reason}); {LOCAL_ROWS}") from error


def _load_model(settings: EvalSettings) -> tuple[Any, dict[str, Any]]:
    """Return lm-eval's model object and its arguments. Raises: ModelError."""
    import torch
    from lm_eval.api.registry import get_model
    from lm_eval.utils import handle_arg_string
    from transformers import PretrainedConfig

    length = "max_length" if settings.backend == "hf" else "max_model_len"
    arguments: dict[str, Any] = {"pretrained": settings.model, "dtype": settings.dtype, length: settings.max_length}
    common: dict[str, Any] = {"batch_size": _batch_size(settings)}
    if settings.backend == "hf":
        common["device"] = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        config = PretrainedConfig.get_config_dict(settings.model)[0]
        register_pruned(config)
        if settings.backend == "hf" and config.get("attn_logit_softcapping"):
            arguments["attn_implementation"] = "eager"  # other implementations omit Gemma-2's cap
        arguments |= {name: handle_arg_string(value) for name, value in settings.model_args}
        # the installed classes load pruned models, also if the user trusts other code
        if "ddp_layers" in config or states_widths(config):
            arguments["trust_remote_code"] = False
        return get_model(settings.backend).create_from_arg_obj(arguments, common), arguments
    except (DdpError, ModuleNotFoundError):
        raise
    except Exception as error:  # errors of transformers, tokenizers, safetensors, lm-eval and vLLM
        own_code = "trust_remote_code" in str(error)
        remedy = "if you trust it, pass --model-args trust_remote_code=True" if own_code else "try the other --backend"
        raise ModelError(
            f"{settings.model} cannot be loaded by lm-eval's {settings.backend} backend "
            f"({str(error).splitlines()[0] if str(error) else type(error).__name__}); {remedy}"
        ) from error


def _batch_size(settings: EvalSettings) -> int | str:
    """Return lm-eval's batch size; its `auto` searches for a GPU's out-of-memory error, so a CPU
    gets a number."""
    if settings.batch_size is not None:
        return settings.batch_size
    if settings.backend == "vllm":  # torch must not initialize CUDA before vLLM does
        return 8 if runs_on_cpu() else "auto"
    import torch

    return "auto" if torch.cuda.is_available() else 8


def _merge(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge lm-eval's results of single tasks into the form of its results for all tasks."""
    merged = dict(parts[0])
    for key in _PER_TASK:
        merged[key] = {name: value for part in parts for name, value in part.get(key, {}).items()}
    return merged
