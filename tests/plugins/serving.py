"""Real vLLM in a process of its own: what it is given to serve, and how its answers are judged."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

Serve = Callable[..., list[dict[str, Any]]]
LOGPROB_TOLERANCE = 1e-4
VLLM = find_spec("vllm")  # not imported in this process
RELOAD = "model_executor/model_loader/reload/inplace.py"  # an older vLLM updates weights in other ways
UPDATES = ("reload", "pieces") if VLLM and (Path(str(VLLM.origin)).parent / RELOAD).exists() else ()


def job(folder: Path, **options: Any) -> dict[str, Any]:
    """Return what `serve` is given to serve a folder with vLLM's options."""
    return {"folder": str(folder), "options": options}


def assert_same(result: dict[str, Any], reference: dict[str, Any]) -> None:
    assert "error" not in result, result
    assert_same_outputs(result["outputs"], reference["outputs"])


def assert_same_outputs(outputs: list[dict[str, Any]], references: list[dict[str, Any]]) -> None:
    for got, expected in zip(outputs, references, strict=True):
        assert got["tokens"] == expected["tokens"]
        assert got["logprobs"] == pytest.approx(expected["logprobs"], abs=LOGPROB_TOLERANCE)


def serve_in_new_process(
    jobs: Sequence[dict[str, Any]], folder: Path, cache: Path, script: str = "serve_tiny.py"
) -> list[Any]:
    """Return what `serve` of a script does with each job; no process is left behind.

    folder: for files of this run. cache: vLLM's.
    """
    (folder / "jobs.json").write_text(json.dumps(jobs))
    environment = {
        **os.environ,
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CACHE_ROOT": str(cache),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # lets the workers of a test count their parameters
    }
    path = Path(__file__).with_name(script)
    with open(folder / "log.txt", "w") as log:
        process = subprocess.Popen(
            [sys.executable, str(path), str(folder / "jobs.json"), str(folder / "results.json")],
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
        )
        try:
            process.wait(timeout=1800)
        finally:
            _end_group(process)
    assert process.returncode == 0, (folder / "log.txt").read_text()[-5000:]
    results: list[Any] = json.loads((folder / "results.json").read_text())
    return results


def _end_group(process: "subprocess.Popen[bytes]") -> None:
    """End whatever the session of this process still runs, such as workers of an engine that failed."""
    try:
        os.killpg(process.pid, 9)
    except ProcessLookupError:
        return
    process.wait()
