"""The folder of an interrupted run, `<output>.run`, from which the same command resumes.

It holds the state, the metrics of all steps and the lock of the process that works on it. A
different command for the same output starts anew and keeps the earlier run as `<output>.run.old`. A
folder of either name that holds any other file is refused.

1. A run saves its state by time, at the end of its search and after its last step.
2. One rename makes the output appear, with its report.
3. The run's folder is deleted last, after a rename to `<output>.run.tmp`. If a command is killed
    before that, the same
   command resumes after the last step, writes the output again and deletes the run.

A size family has one more run, `FAMILY/.family.run`. Its lock is held until all sizes are written,
and its state is the end of the search of the latest size. Each size saves its own state first, from
which the family's can be restored. While it exists, sizes that are written already are not trained
again (`pipeline.is_result`).
"""

import functools
import itertools
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import torch
from accelerate import Accelerator
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ddp_training.batches import Settings
from ddp_training.processes import broadcast_from_main, raise_on_all_ranks
from ddp_training.settings import decisive
from ddp_training.weights import LEARNED
from ddp_vllm.errors import OutputError
from ddp_vllm.masks import checksums
from ddp_vllm.output import (
    RUN_METRICS,
    RUN_STATE,
    atomic_file,
    locked,
    run_folders,
    sync,
)
from ddp_vllm.remote_code.files import read_bytes

LOCK_FILE = "lock"
LARGEST_METRICS = 1 << 34  # bytes
TEMPORARY = f".{RUN_STATE}.*.tmp"  # left by a killed process
STATE_FORMAT = 8  # of a saved state; a state of another format is put aside
# of a damaged state
UNREADABLE = (OSError, SafetensorError, KeyError, ValueError, TypeError, RecursionError)
Method = TypeVar("Method", bound=Callable[..., None])


class Saved(NamedTuple):
    """What a run resumes from."""

    step: int
    """The next step."""
    tensors: dict[str, torch.Tensor]
    extra: dict[str, Any]
    """Plain data, such as metrics of the rounding."""


def _writes(method: Method) -> Method:
    """Decorate a method that only the main process runs; failures to write raise OutputError."""

    @functools.wraps(method)
    def write(self: "RunState", *arguments: Any) -> None:
        if self.writes:
            with self.writing():
                method(self, *arguments)

    return cast(Method, write)


class RunState:
    """The folder of one run; only the main process writes."""

    def __init__(
        self,
        output: Path,
        recipe: Settings,
        *,
        resolved: Mapping[str, Any] | None = None,
        fingerprint: Mapping[str, Any] | None = None,
        writes: bool = True,
        print_line: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Name the run's folder; nothing is written yet.

        resolved: as `Run.to_dict` returns it.
        fingerprint: the `fingerprint` of text and weights. A saved run is resumed only if
            `resolved`, `fingerprint` and the decisive settings of the recipe are the same.
        writes: False in processes other than the main one.
        print_line: prints a line for the user.
        """
        self.output = output
        self.folder, self.old, self.deleted = run_folders(output)
        self.state, self.metrics = self.folder / RUN_STATE, self.folder / RUN_METRICS
        self.made_by = {"recipe": recipe.to_dict(), "resolved": resolved or {}, "fingerprint": fingerprint or {}}
        self.writes, self.print_line = writes, print_line

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes away from the folder. The system releases the lock when the process
        ends.

        Raises: OutputError as `check_run_folders`, if another process works on it, or if it cannot
            be written to.
        """
        if not self.writes:
            yield
            return
        check_run_folders(self.output)
        taken = f"another process works on {self.folder}; wait for it, or choose another output"
        try:
            with ExitStack() as stack:
                with self.writing():
                    _make_private(self.folder)
                    stack.enter_context(locked(self.folder / LOCK_FILE, taken))
                yield
        finally:
            # there is something to resume from, or another process works on it
            with suppress(OSError):
                if self.folder.exists():  # not after `remove`
                    self.folder.rmdir()

    def load(self) -> Saved | None:
        """Return what an interrupted run saved, or None to start anew, with the reason printed.

        Raises: OutputError if the folder cannot be written to.
        """
        if not os.path.lexists(self.state):
            return None
        try:
            header, tensors = _read(self.state, with_tensors=True)
        except UNREADABLE:
            self.print_line(f"the saved run in {self.folder} is damaged, or of another version: starting anew")
            return None
        if changed := _changed(header, self.made_by):
            self.print_line(f"{', '.join(changed)} changed since the run in {self.folder} was saved: starting anew")
            return None
        self._forget_after(header["step"])
        self.print_line(f"resuming after step {header['step']}")
        return Saved(header["step"], tensors, header["extra"])

    def was_interrupted(self) -> bool:
        """Tell whether the saved state is of this run: of the same settings, text and weights."""
        header = saved_header(self.output)
        return bool(header) and not _changed(header, self.made_by)

    @_writes
    def _forget_after(self, step: int) -> None:
        """Cut off metrics of later steps, and a damaged line with those after it. This also works
        on a full disk."""
        if os.path.lexists(self.metrics):
            lines = read_bytes(self.metrics, LARGEST_METRICS).splitlines(keepends=True)
            done = itertools.takewhile(lambda line: (_step_of(line) or math.inf) <= step, lines)
            os.truncate(self.metrics, sum(map(len, done)))

    @_writes
    def start(self) -> None:
        """Begin an empty run; an older run is put aside. Raises: OutputError."""
        if self.state.exists():
            _make_private(self.old)
            _delete_files(self.old)
            for path in filter(_is_ours, list(self.folder.iterdir())):
                os.replace(path, self.old / path.name)
            self.print_line(f"another run was put aside in {self.old}")
        _make_private(self.folder)
        _delete_files(self.folder)
        _delete(self.deleted)

    @_writes
    def save(self, step: int, tensors: dict[str, torch.Tensor], extra: dict[str, Any]) -> None:
        """Replace the saved state; `step` is the next step. Raises: OutputError if it cannot be
        written."""
        text = json.dumps({"format": STATE_FORMAT, "step": step, "extra": extra, **self.made_by})
        contiguous = {name: value.cpu().contiguous() for name, value in tensors.items()}
        _make_private(self.folder)
        if self.metrics.exists():
            sync(self.metrics)  # a saved state requires the lines of all steps before it
        with atomic_file(self.state, private=True) as temporary:
            save_file(contiguous, temporary, {"run": text, "checksums": json.dumps(_checksums(text, contiguous))})

    @_writes
    def log(self, metrics: dict[str, float]) -> None:
        """Append one step's metrics. Raises: OutputError if they cannot be written."""
        with open(self.metrics, "a", encoding="utf-8") as file:
            file.write(json.dumps(metrics) + "\n")

    @_writes
    def remove(self) -> None:
        """Delete the run and its lock at the end of a command. After a kill, the same command
        deletes the rest."""
        if os.path.lexists(self.folder) and not os.path.lexists(self.deleted):
            os.rename(self.folder, self.deleted)
        _delete(self.folder)
        _delete(self.deleted)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Raise OutputError if a write inside the block fails."""
        try:
            yield
        except (OSError, SafetensorError) as error:
            reason = " ".join(str(error).split())
            remedy = "make room, and the same command resumes from there"
            raise OutputError(f"the run cannot be saved in {self.folder} ({reason}); {remedy}") from error


@contextmanager
def locked_run(run: RunState, accelerator: Accelerator) -> Iterator[None]:
    """Hold the lock of a run inside the block; if the main process cannot lock it, all processes
    raise its error."""
    with ExitStack() as stack:
        with raise_on_all_ranks(accelerator):
            stack.enter_context(run.locked())
        yield


def load_run(run: RunState, accelerator: Accelerator) -> Saved | None:
    """Return the result of `run.load` in the main process in all processes: the others may not see
    its disk.

    They get no trained weights, which `TrainedWeights.restore` sends one at a time. In the main
    process all tensors are views of the mapped file, so they take no memory until they are read.
    """
    with raise_on_all_ranks(accelerator):
        saved = run.load() if accelerator.is_main_process else None
    without_weights = saved
    if saved:
        kept = {name: value for name, value in saved.tensors.items() if not name.startswith(LEARNED)}
        without_weights = saved._replace(tensors=kept)
    received = broadcast_from_main(accelerator, without_weights)
    return saved or received


def saved_header(output: Path) -> dict[str, Any]:
    """Return recipe, step, `resolved` and `fingerprint` of the interrupted run for an output; {} if
    there is none."""
    with suppress(*UNREADABLE):
        return _read(run_folders(output)[0] / RUN_STATE, with_tensors=False)[0]
    return {}


def finish_deletion(output: Path) -> None:
    """Delete what remains of a run whose command was killed while it deleted the run."""
    with suppress(FileNotFoundError):  # another process deletes it
        _delete(run_folders(output)[2])


def check_run_folders(output: Path) -> None:
    """Refuse folders that have the name of a run's folder but hold other files.
    Raises: OutputError."""
    for folder in filter(os.path.lexists, run_folders(output)):
        paths = list(folder.iterdir()) if folder.is_dir() and not folder.is_symlink() else [folder]
        foreign = [path.name for path in paths if path.is_symlink() or not (_is_ours(path) or path.name == LOCK_FILE)]
        if foreign:
            raise OutputError(
                f"{folder} is where a run would be kept, but it holds {min(foreign)}, which is a link or not a file of "
                "a run; move it away or choose another output"
            )


def _read(path: Path, *, with_tensors: bool) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return header and tensors of a saved state. Raises: one of UNREADABLE if it is damaged or of
    another version."""
    if not path.is_file():
        raise OSError(f"{path} is not a file")  # a pipe would block
    with safe_open(path, framework="pt") as file:
        text, stored = file.metadata()["run"], json.loads(file.metadata()["checksums"])
        tensors = {name: file.get_tensor(name) for name in file.keys()} if with_tensors else {}  # noqa: SIM118
    computed, header = _checksums(text, tensors), json.loads(text)
    intact = computed == stored if with_tensors else computed["header"] == stored["header"]
    if not intact or header["format"] != STATE_FORMAT:
        raise ValueError(f"{path} is damaged, or of another format")
    return header, tensors


def _checksums(header: str, tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """Return hashes of the header and of all tensors with names and shapes; tensors are contiguous
    and on the CPU."""
    labeled = (
        (f"{name} {value.dtype} {list(value.shape)}", value.flatten().view(torch.uint8).numpy().data)
        for name, value in sorted(tensors.items())
    )
    return checksums(header, labeled)


def _step_of(line: bytes) -> int | None:
    """Return the step of a line of metrics; None if the line is incomplete or damaged."""
    try:
        metrics = json.loads(line) if line.endswith(b"\n") else None
    except (RecursionError, ValueError):
        return None
    step = metrics.get("step") if isinstance(metrics, dict) else None
    return step if isinstance(step, int) else None


def _changed(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Return the names of settings and inputs that differ between two runs."""
    first, second = (decisive(run["recipe"]) | run["resolved"] | run["fingerprint"] for run in (current, saved))
    return sorted(name for name in first.keys() | second.keys() if first.get(name) != second.get(name))


def _make_private(folder: Path) -> None:
    """Make a folder that only its owner can read, and its parents with default permissions."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)


def _is_ours(path: Path) -> bool:
    return path.name in (RUN_STATE, RUN_METRICS) or path.match(TEMPORARY)


def _delete_files(folder: Path) -> None:
    """Delete all files of a run except its lock."""
    for path in filter(_is_ours, list(folder.iterdir())):
        path.unlink()


def _delete(folder: Path) -> None:
    """Delete a run and its lock, if there is one; the state, which identifies the run, is deleted
    last."""
    if os.path.lexists(folder):
        for path in sorted(folder.iterdir()):
            path.unlink()
        folder.rmdir()
