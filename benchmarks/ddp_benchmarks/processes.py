"""Ends process groups with all their children, also if we are killed."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

STOP_SECONDS = 10  # vLLM's own shutdown gives its workers 5 s
WATCH = 'read -r _; kill -KILL -"$0" || kill -KILL "$0"'  # read returns when the pipe has no writer


def kill_with_us(leader: int) -> Callable[[], None]:
    """Kill a process and its group when this process ends, even by SIGKILL; return the function
    that cancels this.

    A shell outside of both groups waits at a pipe that only we can write to, and the kernel closes
    it when we end. Call the returned function once the process has ended.
    """
    watcher = subprocess.Popen(
        ["/bin/sh", "-c", WATCH, str(leader)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )

    def cancel() -> None:
        watcher.kill()
        watcher.wait()
        assert watcher.stdin
        watcher.stdin.close()

    return cancel


def end_group(leader: int, reap: Callable[[], object]) -> None:
    """End every process of a group by SIGTERM, and after a few seconds or a second Ctrl-C by
    SIGKILL.

    reap: returns the exit code of the leader, our child, so that it does not remain a zombie; None
    while it runs.
    """
    try:
        _signal(leader, signal.SIGTERM)
        deadline = time.monotonic() + STOP_SECONDS
        while _alive(leader, reap) and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        _signal(leader, signal.SIGKILL)
        while _alive(leader, reap) or reap() is None:  # the exit code comes after the last thread
            time.sleep(0.05)


def _signal(leader: int, number: int) -> None:
    try:
        os.killpg(leader, number)
    except (ProcessLookupError, PermissionError):  # ended already
        return


def _alive(leader: int, reap: Callable[[], object]) -> bool:
    reap()
    return any(True for _ in group_members(leader))


def group_members(leader: int) -> Iterator[int]:
    """Yield the processes of a group, without zombies."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, group = path.read_text().rpartition(")")[2].split()[:3]
        except (OSError, ValueError):  # ended in the meantime
            continue
        if int(group) == leader and state not in "ZX":
            yield int(path.parent.name)


@contextmanager
def terminable() -> Iterator[None]:
    """Make SIGTERM and a closed terminal raise KeyboardInterrupt, so that the engines in the block
    are stopped too.

    SIGHUP remains ignored under nohup. Only the main thread may handle signals; in another one
    nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        # the shell sends a second one, which would interrupt the stopping
        if number == signal.SIGHUP:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    numbers = [signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def held_interrupts() -> Iterator[None]:
    """Hold back signals that raise an exception until the end of the block, in which one would
    orphan a new process."""
    numbers = [
        number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if callable(signal.getsignal(number))
    ]
    # signals interrupt only the main thread
    if threading.current_thread() is not threading.main_thread():
        numbers = []
    held: list[int] = []
    before = {number: signal.signal(number, lambda number, _: held.append(number)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if held:
            signal.raise_signal(held[0])
