"""Runs lm-eval on the paper's tasks, or any other that it knows, in one process.

`results_<date>.json` has lm-eval's results in its own format, and under `ddp_vllm` the answers to
each row, for the comparison with the dense model.
"""

import dataclasses
import hashlib
import json
import logging
import multiprocessing
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ddp_benchmarks.engine import engine_environment, runs_on_cpu, vllm_command
from ddp_benchmarks.processes import end_group, kill_with_us
from ddp_vllm.cache import cache_folder, is_own
from ddp_vllm.checkpoint import read_config
from ddp_vllm.cli import quiet_libraries
from ddp_vllm.dimensions import check_length
from ddp_vllm.errors import DdpError, ModelError, Printer, ServingError, SettingError, TextError, reading
from ddp_vllm.evaluations import ACCURACY, TASKS, mean_accuracy
from ddp_vllm.families import register_pruned
from ddp_vllm.formats import check_states_no_widths
from ddp_vllm.hub import hub_fault
from ddp_vllm.machine import has_bfloat16, versions
from ddp_vllm.model_facts import all_weight_files, describe_model, is_pruned, local_folder
from ddp_vllm.remote_code.widths import states_widths
from ddp_vllm.results import new_results, write_new_results, write_results
from ddp_vllm.settings import DTYPES, Settings, setting

OFFLINE = (
    "pass --include-path with tasks that read local files, or --text with text of your own, or restore the network"
)
ONLINE = "check the data of these tasks; for a gated dataset accept its terms on the hub and run: hf auth login"
SUITES = {
    # without c4, whose validation split on the Hub has 364,608 documents
    "paper": (*ACCURACY, "wikitext"),
    "generative": tuple(name for name, task in TASKS.items() if task.is_generated),
}
SET_HERE = {  # argument of lm-eval's model classes -> the argument or option that sets it
    "pretrained": "MODEL", "dtype": "--dtype", "batch_size": "--batch-size",
    **dict.fromkeys(("max_length", "max_model_len"), "--max-length"),
}  # fmt: skip
_PER_TASK = (
    *("results", "groups", "configs", "versions", "n-shot", "higher_is_better", "n-samples", "group_subtasks"),
    "samples",
)


def choose_tasks(text: str) -> tuple[str, ...]:
    """Return the tasks named by `paper` or `arc_easy,mmlu`. Raises: SettingError if there is none."""
    names = [part.strip() for part in text.split(",") if part.strip()]
    if not names:
        raise SettingError("tasks", "is empty; pass paper, or names such as arc_easy,piqa")
    return tuple(dict.fromkeys(task for name in names for task in SUITES.get(name, (name,))))


@dataclass(frozen=True, kw_only=True)
class EvalSettings(Settings):
    """Every setting of one evaluation."""

    model: str
    tasks: tuple[str, ...]
    backend: str = setting("hf", "Runs the tasks: transformers or vLLM.", choices=("hf", "vllm"))
    include_path: Path | None = setting(
        None, "Further tasks for lm-eval, such as local ones. They take precedence over its own.", metavar="FOLDER"
    )
    limit: int | None = setting(None, "Only the first rows of each task.", least=1)
    batch_size: int | None = setting(
        None,
        "Rows at once. lm-eval finds how many fit on a GPU.",
        least=1,
        shown="8; on a GPU as many as fit, up to 64",
    )
    dtype: str = setting("auto", "Of weights and activations.", choices=DTYPES)
    max_length: int = setting(
        2048, "Longest context, in tokens. Perplexity is computed in windows of this length.", least=16
    )
    model_args: tuple[str, ...] = setting(
        (), "Further arguments of lm-eval's model class. It converts True, None and numbers.", metavar="K=V,…"
    )
    output: Path = Path("eval")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not all("=" in argument for argument in self.model_args):
            raise SettingError("model_args", "requires name=value pairs, comma-separated, such as enforce_eager=True")
        names = [argument.partition("=")[0].strip() for argument in self.model_args]
        if taken := next((name for name in names if name in SET_HERE or names.count(name) > 1), None):
            remedy = f"pass {SET_HERE[taken]} instead" if taken in SET_HERE else "pass it once"
            raise SettingError("model_args", f"sets {taken}, which is set already; {remedy}")

    def check(self) -> None:
        """Check everything outside of the settings that does not require loading the model.

        Raises: SettingError; ServingError if vLLM is the backend and missing; ModelError.
        """
        if self.backend == "vllm":
            vllm_command()
        describe_model(self.model)
        folder = local_folder(self.model)
        if folder:
            check_length("max_length", self.max_length, self.model, read_config(folder))
        if self.backend == "hf" and folder and not is_pruned(folder):
            try:
                check_states_no_widths(read_config(folder))
            except ModelError as error:
                raise ModelError(f"{self.model}: {error}, or pass --backend vllm") from None
        if self.include_path and not self.include_path.is_dir():
            raise SettingError(
                "include_path", f"is {self.include_path}, which is not a folder; pass one with lm-eval's task files"
            )


def evaluate(settings: EvalSettings, *, print_line: Printer = print) -> dict[str, Any]:
    """Evaluate a model by checked settings and return lm-eval's results of all tasks in one dict.

    The results are also written to `settings.output/results_<date>.json`, with ours under the key
    `ddp_vllm`. After an interruption, lm-eval reuses the responses that it has cached.
    Raises: ModelError, TextError, SettingError; ServingError if vLLM fails.
    """
    print_line(f"{settings.model}: {', '.join(settings.tasks)}")
    facts = describe_model(settings.model).to_json()
    results = run_alone(_evaluate_tasks, settings)
    file = write_new_results(results, settings.output, "results")  # before anything is derived from them
    samples = results.pop("samples")
    plain_settings = json.loads(json.dumps(dataclasses.asdict(settings), default=str))
    results["ddp_vllm"] = new_results("ddp-vllm eval 1", plain_settings) | {
        "model": facts,
        "data": {name: _digest(row["doc_hash"] for row in rows) for name, rows in samples.items()}
        if settings.include_path
        else "hub",
        "mean_accuracy": mean_accuracy(results["results"]),
        "answers": {  # task -> its metric for each row: 1 right, 0 wrong
            name: [float(row[TASKS[name].metric]) for row in rows if row["filter"] == TASKS[name].filter]
            for name, rows in samples.items()
            if name in TASKS and TASKS[name].higher_is_better and all(TASKS[name].metric in row for row in rows)
        },
    }
    write_results(results, file)
    if responses := _responses(settings):  # what an interrupted evaluation would read
        for path in responses.parent.glob(f"{responses.name}*"):
            path.unlink(missing_ok=True)
    return results


def _digest(parts: Iterable[object]) -> str:
    return hashlib.sha256(json.dumps(list(parts), default=str).encode()).hexdigest()


def _responses(settings: EvalSettings) -> Path | None:
    """Return lm-eval's cache of responses, named by a hash of everything but the request that
    could change one; None where it cannot be trusted.

    It is pickled, so another user who wrote it could run code here. It is not in the folder of a
    model, which may be foreign. Of a model that is not on this machine nothing can be hashed.
    """
    folder, place = local_folder(settings.model), cache_folder() / "eval"
    with suppress(OSError):
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
    files = sorted({*folder.iterdir(), *all_weight_files(folder)}) if folder else []
    parts = [
        [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files if path.is_file()],
        [settings.model, settings.backend, settings.dtype, settings.max_length, settings.model_args],
        versions(),
    ]
    name = _digest(parts)[:16]
    is_private = place.is_dir() and all(map(is_own, (place, *place.glob(f"{name}*"))))
    return place / name if folder and is_private else None


def run_alone(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what `function` returns in a new process, whose memory is free before the next model is
    loaded.

    Raises: the DdpError or ModuleNotFoundError of the function; ServingError if the process dies.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe()
    process = context.Process(target=_call, args=(sender, function, arguments))
    process.start()
    release = kill_with_us(process.pid or 0)
    sender.close()
    try:
        outcome = receiver.recv()
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
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def _call(connection: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.setsid()  # its own process group: Ctrl-C reaches only the parent, which ends the whole group
    try:
        connection.send(function(*arguments))
    except (DdpError, ModuleNotFoundError) as error:
        connection.send(error)


def _evaluate_tasks(settings: EvalSettings) -> dict[str, Any]:
    """Load the model once and return lm-eval's results; tasks are found and read before."""
    fault = hub_fault()
    if fault:  # no retries; set before the first import that reads them
        os.environ |= dict.fromkeys(("HF_DATASETS_OFFLINE", "HF_HUB_OFFLINE"), "1")
    os.environ.update(engine_environment())
    quiet_libraries()
    from lm_eval import evaluator
    from lm_eval.tasks import TaskManager

    # it warns about defaults of its own task files
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    # it describes the working folder, not this program
    evaluator.get_git_commit_hash = lambda: None
    manager = TaskManager(include_path=settings.include_path)
    if unknown := [name for name in settings.tasks if not manager.match_tasks([name])]:
        raise SettingError(
            f"lm-eval has no task {', '.join(unknown)}; pass one that `lm-eval ls tasks` lists, --include-path, or a "
            f"suite: {', '.join(SUITES)}"
        )
    with reading(f"the rows of {', '.join(settings.tasks)}", TextError, OFFLINE if fault else ONLINE):
        built = {name: manager.load([name])["tasks"].values() for name in settings.tasks}  # several of a group
    is_generated = {name: all(task.OUTPUT_TYPE == "generate_until" for task in built[name]) for name in built}
    model, arguments = _load_model(settings)
    responses = _responses(settings)  # afterwards: loading may have downloaded the model
    merged: dict[str, Any] = {}
    for generated in (False, True):  # a chat template is for all tasks of a call, and only these use one
        names = [name for name in settings.tasks if is_generated[name] is generated]
        if not names:
            continue
        as_chat = generated and bool(model.tokenizer.chat_template)
        results = evaluator.simple_evaluate(
            model=model, tasks=names, batch_size=_batch_size(settings), limit=settings.limit,
            task_manager=manager, apply_chat_template=as_chat, fewshot_as_multiturn=as_chat,
            use_cache=str(responses) if responses else None,
        )  # fmt: skip
        merged = results | {key: merged.get(key, {}) | results.get(key, {}) for key in _PER_TASK}
    merged["config"] |= {"model": settings.backend, "model_args": arguments}
    return dict(json.loads(json.dumps(merged, default=str)))


def _load_model(settings: EvalSettings) -> tuple[Any, dict[str, Any]]:
    """Return lm-eval's model object and its arguments. Raises: ModelError."""
    import torch
    from lm_eval.api.registry import get_model
    from lm_eval.utils import handle_arg_string
    from transformers import PretrainedConfig

    length = "max_length" if settings.backend == "hf" else "max_model_len"
    dtype = settings.dtype
    if dtype == "auto" and not torch.cuda.is_available() and not has_bfloat16():
        dtype = "float32"  # bfloat16 would be emulated
    arguments: dict[str, Any] = {"pretrained": settings.model, "dtype": dtype, length: settings.max_length}
    common: dict[str, Any] = {"batch_size": _batch_size(settings)}
    if settings.backend == "hf":
        common["device"] = "cuda" if torch.cuda.is_available() else "cpu"
    remedy = "try the other --backend, or, if you trust its code, pass --model-args trust_remote_code=True"
    with reading(settings.model, ModelError, remedy, how=f" by lm-eval's {settings.backend} backend"):
        config = PretrainedConfig.get_config_dict(settings.model)[0]
        register_pruned(config)
        if settings.backend == "hf" and config.get("attn_logit_softcapping"):
            arguments["attn_implementation"] = "eager"  # other implementations omit Gemma-2's cap
        pairs = (argument.partition("=") for argument in settings.model_args)
        arguments |= {name: handle_arg_string(value) for name, _, value in pairs}
        # the installed classes load pruned models, also if the user trusts other code
        if "ddp_layers" in config or states_widths(config):
            arguments["trust_remote_code"] = False
        return get_model(settings.backend).create_from_arg_obj(arguments, common), arguments


def _batch_size(settings: EvalSettings) -> int | str:
    """Return lm-eval's batch size; its `auto` searches for a GPU's out-of-memory error, so a CPU
    gets a number."""
    if settings.batch_size is not None:
        return settings.batch_size
    if settings.backend == "vllm":  # torch must not initialize CUDA before vLLM does
        return 8 if runs_on_cpu() else "auto"
    import torch

    return "auto" if torch.cuda.is_available() else 8
