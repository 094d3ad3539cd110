"""Fixtures of several test folders: the real model from the package registry, a cache, and vLLM."""

import gc
import json
import os
import runpy
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from commands import VLLM_SETTINGS

from ddp_benchmarks import engine, sharegpt
from ddp_vllm import proof
from fetch import fetch_model

# transformers would import them, for a kind of generation and losses that nothing here uses, and with them pandas: 4 s
sys.modules |= dict.fromkeys(("sklearn", "scipy"))

LONGEST = (  # files that take a minute or more start first, so that no worker is left alone with one
    *("plugins/test_stock_classes.py", "recover/test_recover.py", "prune/test_resume.py", "plugins/test_dense.py"),
    *("prune/test_commands.py", "prune/test_settle.py", "benchmarks/test_real_vllm.py", "prune/test_processes.py"),
    *("plugins/test_moe.py", "plugins/test_convert.py", "plugins/test_moe_experts.py", "test_examples.py"),
)
VLLM_SOCKET = "ddp-vllm-tests-" + os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
PROVE, READ_BACK = proof.prove, proof.read_back
IS_PROVING = {"now": False}
"""Whether commands prove what they write: a fresh process takes seconds, so only in tests with `proving`."""


def _prove(folder: Path, reference: Any) -> dict[str, Any]:
    return PROVE(folder, reference if IS_PROVING["now"] else None)


def _read_back(*arguments: Any) -> Any:
    return READ_BACK(*arguments) if IS_PROVING["now"] else ({}, None)


proof.prove, proof.read_back = _prove, _read_back  # before other modules take their names


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {Path(__file__).parent / name: number for number, name in enumerate(LONGEST)}
    assert all(path.exists() for path in place)
    items.sort(key=lambda item: place.get(item.path, len(place)))


def pytest_unconfigure() -> None:
    gc.unfreeze()  # to be collected at the end, as libraries ask for


@pytest.fixture(scope="module", autouse=True)
def frozen() -> None:
    """What was imported before a file's tests is no garbage, which each load of a model looks for among all objects."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def proving(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands prove what they write, in a fresh process."""
    monkeypatch.setitem(IS_PROVING, "now", True)


@pytest.fixture
def proving_here(proving: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands prove what they write, in this process: for what a fresh one would not see otherwise."""

    def run(command: list[str], **_: Any) -> "subprocess.CompletedProcess[str]":
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", command[2:])
            runpy.run_path(command[2], run_name="__main__")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(proof, "subprocess", SimpleNamespace(run=run))


@pytest.fixture
def short_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples of one token: tiny models say nothing worth 64."""
    monkeypatch.setattr("seams.evaluation_module.SAMPLE_TOKENS", 1)


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """`prune` without its report: to draw that takes several times as long as six steps of the tiny model."""
    monkeypatch.setattr("ddp_vllm.pages.written.write_report", lambda *_: None)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Folder of SmolLM2-135M-Instruct, real weights, bfloat16."""
    return fetch_model("smollm2-135m")


@pytest.fixture
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of ddp-vllm, a folder of the test's own that does not exist yet, outside of `tmp_path`."""
    folder = tmp_path_factory.mktemp("cache") / "ddp-vllm"
    monkeypatch.setenv("DDP_VLLM_CACHE", str(folder))
    return folder


def connect_to_vllm(cache: Path) -> socket.socket:
    """Return a connection to the process of `vllm_forks.py`, which the workers of one run share.

    Whoever comes first listens at a name that is no file, and starts the process, which answers after seconds.
    """
    name = f"\0{VLLM_SOCKET}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener, suppress(OSError):  # another worker did
        listener.bind(name)
        listener.listen()
        settings = VLLM_SETTINGS | {"VLLM_CACHE_ROOT": str(cache)}  # nothing compiled yet
        command = [sys.executable, Path(__file__).with_name("vllm_forks.py"), str(listener.fileno())]
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        in_background = ["/bin/sh", "-c", '"$@" &', "sh", *command]  # it may outlive this worker
        subprocess.run(in_background, env=os.environ | settings, pass_fds=[listener.fileno()], check=True, **streams)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for _ in range(100):  # between the other's two calls nobody listens yet
        with suppress(ConnectionRefusedError):
            connection.connect(name)
            break
        time.sleep(0.1)
    return connection


@pytest.fixture(scope="session")
def run_in_vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., str]]:
    """Return a function that runs a script, a file or code, where vLLM is imported already, and returns its stdout.

    A process of its own per script, so that vLLM's state, and what a script changes of it, stay there.
    """
    connection = connect_to_vllm(tmp_path_factory.mktemp("vllm_cache"))

    def run(script: Path | str, *arguments: object, **environment: str) -> str:
        folder = tmp_path_factory.mktemp("in_vllm")
        if isinstance(script, str):
            (folder / "script.py").write_text(script)
            script = folder / "script.py"
        outputs = [folder / "stdout.txt", folder / "stderr.txt"]
        words = [*map(str, (script, *arguments))]
        request = {"words": words, "environment": environment, "outputs": [*map(str, outputs)]}
        connection.send(json.dumps(request).encode())
        code = connection.recv(64).decode()
        printed, errors = (path.read_text() if path.exists() else "" for path in outputs)
        assert code == "0", f"ended with {code or 'no code'}\n{printed[-3000:]}\n{errors[-3000:]}"
        return printed

    yield run
    connection.close()


@pytest.fixture
def commands_in_forks(run_in_vllm: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's command line runs where vLLM is imported already."""
    command = [sys.executable, str(Path(__file__).with_name("vllm_command.py")), VLLM_SOCKET]
    for module in (engine, sharegpt):
        monkeypatch.setattr(module, "vllm_command", lambda: command)


@pytest.fixture(scope="session")
def serve(run_in_vllm: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """Return a function that gives jobs of a kind to `serve_tiny.py` and returns all results."""

    def run(jobs: dict[str, dict[str, Any]], kind: str = "serve") -> dict[str, Any]:
        folder, script = tmp_path_factory.mktemp("serve"), Path(__file__).parent / "plugins" / "serve_tiny.py"
        (folder / "jobs.json").write_text(json.dumps(list(jobs.values())))
        run_in_vllm(script, kind, folder / "jobs.json", folder / "results.json")
        return dict(zip(jobs, json.loads((folder / "results.json").read_text()), strict=True))

    return run
