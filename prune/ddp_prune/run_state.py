"""The folder in which a run is saved, so that an interrupted run resumes where it was.

`<output>.run/` holds `state.safetensors` (replaced as a whole, never half written), `metrics.jsonl` (one line per step)
and, while a process works on it, `lock`. The same command on the same text and weights finds it and resumes. Another
command for the same output starts anew and keeps what it finds as `<output>.run.old`. A folder of that name that
holds any other file is refused.

1. A run saves its state by time, at the end of its search and after its last step.
2. The output appears by one rename, then the report is drawn into it.
3. The run's folder is deleted last, by a rename to `<output>.run.tmp`. Until then the same command finds that its
   output is written (`output.is_unfinished`), draws the report again and deletes the run.

A size family has one more run, `FAMILY/.branch.run`: its lock is held for the whole family, and its state is the end of
the search of the latest size. Each size saves its own state first, so the family's state can be written again from it.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ddp_prune.distributed import broadcast_from_main, raise_on_all_ranks
from ddp_prune.recipe import Recipe, RecoveryRecipe
from ddp_prune.weights import LEARNED
from ddp_vllm.errors import OutputError
from ddp_vllm.manifest import sha256
from ddp_vllm.masks import checksums
from ddp_vllm.output import (
    LARGEST_METRICS,
    RUN_METRICS,
    RUN_STATE,
    atomic_file,
    is_unfinished,
    locked,
    run_folders,
    sync,
)
from ddp_vllm.remote_code.files import read_bytes

STATE_FILE, METRICS_FILE, LOCK_FILE = RUN_STATE, RUN_METRICS, "lock"
TEMPORARY = f".{STATE_FILE}.*.tmp"  # left by a killed process
INDECISIVE = (  # settings that do not change what is learned, or are compared by what was resolved of them
    *("save_every", "micro_batch_size", "activation_checkpointing", "shard", "recover", "train", "profile"),
)
STATE_FORMAT = 5  # of the tensors in a saved state; a state of another format is put aside
UNREADABLE = (OSError, SafetensorError, KeyError, ValueError, TypeError, RecursionError)  # of a damaged state
PAGES, PAGE = 64, 4096  # number and bytes of the pages of a weight file, evenly spread, that a fingerprint reads


class RunState:
    """The folder of one run; only the main process writes."""

    def __init__(
        self,
        output: Path,
        recipe: Recipe | RecoveryRecipe,
        *,
        resolved: Mapping[str, Any] | None = None,
        learned_from: Mapping[str, Any] | None = None,
        writes: bool = True,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Name the run's folder; nothing is written yet.

        resolved: as of `Run.to_dict`. learned_from: the `fingerprint` of text and weights. A saved run is resumed only
        if both, and the decisive settings of the recipe, are the same.
        writes: False in processes other than the main one.
        say: takes a line for the user.
        """
        self.output = output
        self.folder, self.old, self.deleted = run_folders(output)
        self.state, self.metrics = self.folder / STATE_FILE, self.folder / METRICS_FILE
        self.made_by = {"recipe": recipe.to_dict(), "resolved": resolved or {}, "learned_from": learned_from or {}}
        self.writes, self.say = writes, say

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes away from the folder. The system releases the lock when the process ends.

        Raises: OutputError as `check_run_folders`, if another process works on it, or if nothing can be written.
        """
        if not self.writes:
            yield
            return
        check_run_folders(self.output)
        taken = f"another process works on {self.folder}; wait for it, or choose another output"
        try:
            with ExitStack() as stack:
                with self._writing():
                    _make_private(self.folder)
                    stack.enter_context(locked(self.folder / LOCK_FILE, taken))
                yield
        finally:
            with suppress(OSError):  # there is something to resume from, or another process works on it
                if self.folder.exists():  # not after `remove`
                    self.folder.rmdir()

    def load(self) -> tuple[int, dict[str, torch.Tensor], dict[str, Any]] | None:
        """Return (next step, tensors, extra) of an interrupted run, or None to start anew, with the reason printed.

        Raises: OutputError if the folder cannot be written to.
        """
        if not os.path.lexists(self.state):
            return None
        try:
            with _opened(self.state) as file:
                header = _header(file)
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
                whole = _checksums(file.metadata()["run"], tensors) == json.loads(file.metadata()["seals"])
        except UNREADABLE:
            whole = False
        if not whole:
            self.say(f"the saved run in {self.folder} is damaged, or of another version: starting anew")
            return None
        if changed := _changed(header, self.made_by):
            self.say(f"{', '.join(changed)} changed since the run in {self.folder} was saved: starting anew")
            return None
        if self.writes:
            with self._writing():
                self._forget_after(header["step"])
            self.say(f"resuming after step {header['step']}")
        return header["step"], tensors, header["extra"]

    def _forget_after(self, step: int) -> None:
        """Cut off the metrics of later steps, and an unfinished line; this takes no space on the disk."""
        if os.path.lexists(self.metrics):
            lines = read_bytes(self.metrics, LARGEST_METRICS).splitlines(keepends=True)
            done = [line for line in lines if line.endswith(b"\n") and json.loads(line)["step"] <= step]
            os.truncate(self.metrics, sum(map(len, done)))

    def start(self) -> None:
        """Begin an empty run; an older run is put aside, unless its output is written. Raises: OutputError."""
        if not self.writes:
            return
        with self._writing():
            if self.state.exists() and not is_unfinished(self.output):
                _make_private(self.old)
                _delete_files(self.old)
                for path in self.folder.iterdir():
                    if path.name != LOCK_FILE:
                        os.replace(path, self.old / path.name)
                self.say(f"another run was put aside in {self.old}")
            _make_private(self.folder)
            _delete_files(self.folder)
            _delete(self.deleted)

    def save(self, step: int, tensors: dict[str, torch.Tensor], extra: dict[str, Any]) -> None:
        """Replace the saved state; `step` is the next one to do. Raises: OutputError if it cannot be written."""
        if not self.writes:
            return
        text = json.dumps({"format": STATE_FORMAT, "step": step, "extra": extra, **self.made_by})
        contiguous = {name: value.cpu().contiguous() for name, value in tensors.items()}
        with self._writing():
            _make_private(self.folder)
            if self.metrics.exists():
                sync(self.metrics)  # a saved state requires the lines of all steps before it
            with atomic_file(self.state, private=True) as temporary:
                save_file(contiguous, temporary, {"run": text, "seals": json.dumps(_checksums(text, contiguous))})

    def log(self, metrics: dict[str, float]) -> None:
        """Append one step's metrics. Raises: OutputError if they cannot be written."""
        if not self.writes:
            return
        with self._writing(), open(self.metrics, "a", encoding="utf-8") as file:
            file.write(json.dumps(metrics) + "\n")

    def remove(self) -> None:
        """Delete the run and its lock as the last act of a command; after a kill, the same command deletes the rest."""
        if not self.writes:
            return
        with self._writing():
            if os.path.lexists(self.folder) and not os.path.lexists(self.deleted):
                os.rename(self.folder, self.deleted)
            _delete(self.folder)
            _delete(self.deleted)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Raise OutputError for what cannot be written inside the block."""
        try:
            yield
        except (OSError, SafetensorError) as error:
            reason = " ".join(str(error).split())
            remedy = "make room, and the same command resumes from there"
            raise OutputError(f"the run cannot be saved in {self.folder} ({reason}); {remedy}") from error


def load_run(run: RunState, accelerator: Accelerator) -> tuple[int, dict[str, torch.Tensor], dict[str, Any]] | None:
    """Return in all processes what `run.load` finds in the main process; the others may not see its disk.

    The other processes do not get trained weights, which `TrainedWeights.restore` sends one at a time. In the main
    process all tensors are views of the mapped file, so they take no memory until they are read.
    """
    with raise_on_all_ranks(accelerator):
        saved = run.load() if accelerator.is_main_process else None
    if saved is None or accelerator.num_processes == 1:
        return broadcast_from_main(accelerator, saved)
    step, tensors, extra = saved
    small = {name: value for name, value in tensors.items() if not name.startswith(LEARNED)}
    broadcast_from_main(accelerator, (step, small, extra))
    return saved


def saved_header(output: Path) -> dict[str, Any]:
    """Return recipe, step, resolved and learned_from of the interrupted run for an output; {} if there is none."""
    run, _, deleted = run_folders(output)
    for folder in (run, deleted):
        with suppress(*UNREADABLE), _opened(folder / STATE_FILE) as file:
            return _header(file)
    return {}


def _opened(path: Path) -> Any:
    """Open a saved state. Raises: one of UNREADABLE, also for a pipe, which would block."""
    if not path.is_file():
        raise OSError(f"{path} is no file")
    return safe_open(path, framework="pt")


def _header(file: Any) -> dict[str, Any]:
    """Return the header of a saved state. Raises: one of UNREADABLE if it is damaged or of another version."""
    text = file.metadata()["run"]
    if json.loads(file.metadata()["seals"])["header"] != hashlib.sha256(text.encode()).hexdigest():
        raise ValueError("the header is damaged")
    header = dict(json.loads(text))
    if header["format"] != STATE_FORMAT:
        raise ValueError("another format")
    return header


def _checksums(header: str, tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """Return hashes of the header and of all tensors with names and shapes; tensors are contiguous and on the CPU."""
    labelled = (
        (f"{name} {value.dtype} {list(value.shape)}", value.flatten().view(torch.uint8).numpy().data)
        for name, value in sorted(tensors.items())
    )
    return checksums(header, labelled)


def _make_private(folder: Path) -> None:
    """Make a folder that only its owner can read; its parent may be readable by others."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)


def check_run_folders(output: Path) -> None:
    """Refuse folders named like those of a run that hold other files, which would be lost. Raises: OutputError."""
    for folder in run_folders(output):
        if not os.path.lexists(folder):
            continue
        paths = list(folder.iterdir()) if folder.is_dir() and not folder.is_symlink() else [folder]
        known = [path for path in paths if (_is_ours(path) or path.name == LOCK_FILE) and not path.is_symlink()]
        if foreign := [path.name for path in paths if path not in known]:
            raise OutputError(
                f"{folder} is where a run would be kept, but it holds {min(foreign)}, which is a link or not a file of "
                "a run; move it away or choose another output"
            )


def fingerprint(
    text: Iterable[torch.Tensor], weights: Iterable[Path], companions: Iterable[Path], *, profile: str = ""
) -> dict[str, Any]:
    """Return the training-data fingerprint: hashes of text blocks, weights, config, tokenizer files and profile.

    The hash of a weight file covers name, size, time and some of its pages, which differ after any training.
    profile: path of the latency profile that decides the budget, if any.
    """
    digest = hashlib.sha256()
    for blocks in text:
        digest.update(f"{list(blocks.shape)}".encode())
        digest.update(blocks.contiguous().numpy().data)
    files = [(path.name, path.stat(), _hash_of_pages(path)) for path in weights]
    hashes = [(path.name, hashlib.sha256(path.read_bytes()).hexdigest()) for path in companions]
    return {
        "text": digest.hexdigest(),
        "weights": [[name, status.st_size, status.st_mtime_ns, pages] for name, status, pages in files],
        "config": [each for name, each in hashes if name == "config.json"],
        "tokenizer": [[name, each] for name, each in hashes if name != "config.json"],
        **({"profile": sha256(Path(profile))} if profile else {}),
    }


def _hash_of_pages(path: Path) -> str:
    size, digest = path.stat().st_size, hashlib.sha256()
    with open(path, "rb") as file:
        for number in range(PAGES):
            file.seek(max(0, size - PAGE) * number // (PAGES - 1))
            digest.update(file.read(PAGE))
    return digest.hexdigest()


def _is_ours(path: Path) -> bool:
    return path.name in (STATE_FILE, METRICS_FILE) or path.match(TEMPORARY)


def _delete_files(folder: Path) -> None:
    """Delete all files of a run except its lock."""
    for path in filter(_is_ours, list(folder.iterdir())):
        path.unlink()


def _delete(folder: Path) -> None:
    """Delete a run and its lock if there is one; its state, which identifies the run, is the last of its files."""
    if os.path.lexists(folder):
        for path in sorted(folder.iterdir()):
            path.unlink()
        folder.rmdir()


def decisive(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a recipe that decide what is learned."""
    return {name: value for name, value in recipe.items() if name not in INDECISIVE}


def _changed(saved: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    """Return the names of settings and inputs that differ between two runs."""
    mine, theirs = (decisive(each["recipe"]) | each["resolved"] | each["learned_from"] for each in (ours, saved))
    return sorted(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name))
