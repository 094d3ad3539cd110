"""Whatever kills a command, by SIGKILL too, nothing that it started lives on."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PATIENCE = 600  # seconds, for a busy machine
ENGINE = """
import sys, time
from ddp_benchmarks.engine import Engine
with Engine([], module="started"):
    time.sleep(3600)
"""
EVAL = """
import runpy, sys
from ddp_benchmarks.evaluate import run_alone
if __name__ == "__main__":
    run_alone(runpy.run_module, "started")
"""
STARTED = """
import os, subprocess, time
child = subprocess.Popen(["/bin/sleep", "3600"])  # as an engine has its core
with open(os.environ["STARTED"], "w") as file:
    file.write(f"{os.getpid()} {child.pid}")
time.sleep(3600)
"""


def wait_for(condition: Callable[[], Any]) -> Any:
    """Return a condition's value once it holds; what waits here sleeps six times as long unless it is killed."""
    deadline = time.monotonic() + PATIENCE
    while not (value := condition()):
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.05)
    return value


def is_alive(process: str) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.parametrize("parent", [ENGINE, EVAL], ids=["an engine", "eval"])
def test_what_a_killed_command_started_is_killed_too(
    parent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = tmp_path / "pids"
    (tmp_path / "started.py").write_text(STARTED)
    (tmp_path / "parent.py").write_text(parent)  # a process that is spawned reads it again
    monkeypatch.setenv("STARTED", str(note))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    process = subprocess.Popen([sys.executable, str(tmp_path / "parent.py")])
    try:
        leader, child = wait_for(lambda: note.exists() and note.read_text()).split()
        assert is_alive(leader) and is_alive(child)
    finally:
        process.kill()
        process.wait()
    try:
        wait_for(lambda: not is_alive(leader) and not is_alive(child))
    finally:
        for number in filter(is_alive, (leader, child)):
            os.kill(int(number), signal.SIGKILL)
