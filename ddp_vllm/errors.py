"""Every error a user can cause, with the exit code the command line gives it.

DdpError                    1
├── SettingError            2   a setting out of range (the code click gives to wrong options)
├── ModelError              3   model unknown, family unsupported, tokenizer missing
├── TextError               4   text unreadable, empty, malformed or too short
├── OutputError             5   the output folder exists, or cannot be written
├── TrainingError           6   the loss is not a number, or memory ran out
├── CheckpointError         7   a pruned checkpoint whose widths, tensors or files disagree
├── ServingError            8   vLLM missing, a server that died, a port in use
└── LimitError              9   a model misses a limit on its quality that the user set

A message is one line: the value, its place, the fault and the remedy.
Only `ddp_vllm.cli` turns errors into exit codes.
"""

import io
import os
import select
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

Printer = Callable[[str], None]
"""Prints a line for the user."""
LOST = set[int]()
"""File descriptors of streams to which something could not be written."""


class _Forgiving(io.FileIO):
    """A file that drops what it cannot write: a terminal that is gone, a full disk, a closed
    pipe."""

    def write(self, data: Any) -> int:
        try:
            while (written := super().write(data)) is None:  # its reader is slow, and it does not block
                select.select([], [self], [])
        except OSError:
            LOST.add(self.fileno())
            return memoryview(data).nbytes
        return written


def forgive_streams() -> None:
    """Let no line that cannot be printed end this process, which may have trained for days.

    A terminal without UTF-8 shows ? for the characters that it lacks.
    """
    for name, original in (("stdout", sys.__stdout__), ("stderr", sys.__stderr__)):
        stream = getattr(sys, name)
        if stream is None:  # closed by the shell; the next file that is opened must not get its number
            stream = open(os.devnull, "w")  # noqa: SIM115
        elif stream is original and isinstance(stream, io.TextIOWrapper):
            buffer = io.BufferedWriter(_Forgiving(stream.fileno(), "wb", closefd=False))
            stream = io.TextIOWrapper(buffer, stream.encoding, stream.errors, line_buffering=stream.line_buffering)
        if isinstance(stream, io.TextIOWrapper) and stream.errors != "backslashreplace":
            stream.reconfigure(errors="replace")
        setattr(sys, name, stream)


def printable(text: str) -> str:
    """Return a text with its control characters written out, because a terminal would obey them."""
    return "".join(
        character if character.isprintable() or character == "\n" else ascii(character)[1:-1] for character in text
    )


def echo(text: object, *, err: bool = False) -> None:
    """Print a line with its control characters written out, because the terminal would obey
    them. It appears at once in a file or pipe too: a profile takes minutes between two lines."""
    with suppress(OSError):
        print(printable(str(text)), file=sys.stderr if err else sys.stdout, flush=True)


def line_printer(verbose: bool) -> Printer:
    """Return a function that prints a line if `verbose`, and does nothing otherwise."""
    return echo if verbose else lambda _line: None


def is_utf8(name: str) -> bool:
    """Tell whether the bytes of a name are UTF-8, as files require."""
    return not any("\ud800" <= character <= "\udfff" for character in name)


class DdpError(Exception):
    """An error that the user can correct; the message states the remedy."""

    exit_code = 1


class SettingError(DdpError):
    """A setting is out of its documented range: `SettingError("seed", "is -1; it must be …")`.

    All arguments but the last one are names of settings, which begin the message. The command line
    writes them as options.
    """

    exit_code = 2

    def spelled(self, options: Mapping[str, str]) -> str:
        """Return the message with settings written as options, where they are options."""
        *names, text = self.args
        return " ".join(filter(None, [" and ".join(options.get(name, name) for name in names), text]))

    def __str__(self) -> str:
        return self.spelled({})


class ModelError(DdpError):
    """The model to prune cannot be used."""

    exit_code = 3


class TextError(DdpError):
    """Text or conversations cannot be read, or there are too few of them."""

    exit_code = 4


class OutputError(DdpError):
    """The output cannot be written without destroying something."""

    exit_code = 5


class TrainingError(DdpError):
    """Training cannot continue."""

    exit_code = 6


class CheckpointError(DdpError):
    """The files of a pruned checkpoint contradict each other."""

    exit_code = 7


class ServingError(DdpError):
    """vLLM cannot be started, or stopped answering."""

    exit_code = 8


class LimitError(DdpError):
    """A model misses a limit on its quality that the user set; its results were written."""

    exit_code = 9


@contextmanager
def reading(
    place: object, kind: type[DdpError], remedy: str, *, how: str = "", but: tuple[type[Exception], ...] = ()
) -> Iterator[None]:
    """Turn any error that a library raises while it reads `place` in the block into one of class
    `kind`.

    place: begins the message. remedy: ends it. how: added after "cannot be read", such as " as
    text". but: errors that are passed on unchanged.
    """
    try:
        yield
    except BaseException as error:
        # a panic of a Rust library is not an Exception
        is_of_a_library = isinstance(error, Exception) or type(error).__name__ == "PanicException"
        if isinstance(error, (DdpError, ModuleNotFoundError, *but)) or not is_of_a_library:
            raise
        message = " ".join(str(error.__cause__ or error).split())
        reason = message if " " in message else f"{type(error).__name__}: {message}"
        raise kind(f"{place} cannot be read{how} ({reason[:200]}); {remedy}") from error
