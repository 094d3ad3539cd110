"""Process groups: end one with all its children, whatever ends us, and know how much memory it takes."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

STOP_SECONDS = 10  # vLLM's own shutdown gives its workers 5 s
WATCH = 'read -r _; kill -KILL -"$0" || kill -KILL "$0"'  # read ends when nobody can write any more


def leash(leader: int) -> Callable[[], None]:
    """Let a process and its group die when we do, though it be by SIGKILL; return what takes the leash off.

    A shell outside of both groups waits at a pipe that only we can write to, and that the kernel closes when we are
    gone. Once off, the process is nobody's to kill: call it after the process has ended.
    """
    watcher = subprocess.Popen(
        ["/bin/sh", "-c", WATCH, str(leader)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )

    def take_off() -> None:
        watcher.kill()
        watcher.wait()
        assert watcher.stdin
        watcher.stdin.close()

    return take_off


def end_group(leader: int, reap: Callable[[], object]) -> None:
    """End every process of a group: politely, and after a few seconds or a second Ctrl-C by force.

    `reap` collects the exit code of the leader, our child, so that it does not stay behind as a zombie; None: not yet.
    """
    try:
        _signal(leader, signal.SIGTERM)
        deadline = time.monotonic() + STOP_SECONDS
        while _alive(leader, reap) and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        _signal(leader, signal.SIGKILL)
        while _alive(leader, reap) or reap() is None:  # a dead leader waits for its last thread
            time.sleep(0.05)


def _signal(leader: int, number: int) -> None:
    try:
        os.killpg(leader, number)
    except (ProcessLookupError, PermissionError):  # gone already
        return


def _alive(leader: int, reap: Callable[[], object]) -> bool:
    reap()
    return any(True for _ in group_members(leader))


def group_members(leader: int) -> Iterator[int]:
    """Yield the living processes of a group; those that wait to be reaped don't count."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, group = path.read_text().rpartition(")")[2].split()[:3]
        except (OSError, ValueError):  # ended while we looked
            continue
        if int(group) == leader and state not in "ZX":
            yield int(path.parent.name)


def resident_bytes(process: int) -> int:
    """Return the resident memory of a process in bytes; 0 if it has ended."""
    try:
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


@contextmanager
def terminable() -> Iterator[None]:
    """Let SIGTERM and a lost terminal end the block as Ctrl-C does, so that the engine inside is stopped too.

    SIGHUP stays ignored where it is, as under nohup.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:  # the kernel sends one and the shell another, which would cut the stopping short
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
