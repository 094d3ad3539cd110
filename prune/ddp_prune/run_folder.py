"""The folder of a run, `<output>.run`: the only memory of a command that was interrupted.

| file | content |
|---|---|
| `run.json` | the run's id, the recipes, what was resolved from them, the identity of text, weights and profile, and which state is the latest |
| `state-<size>-<step>` | what the learner needs to take the next step, written by torch.distributed.checkpoint as safetensors; the hashes are in run.json |
| `metrics-<id>.jsonl` | a line per step of the size that is trained |
| `lock` | held by the process that works on the run |

| found | done |
|---|---|
| neither run nor output | a new run |
| an output alone | refused without `--overwrite` |
| a run of the same recipe and inputs | resumed with the values that were resolved in it |
| a run of another recipe or other inputs | refused, unless `--overwrite` starts anew |
| a run whose id stands in the masks file of its output | it was committed: the run is removed |

run.json is replaced by a rename after the state that it names is on the disk, and deleted last, so
a command may be killed at any time. All processes of a run read and write the same folder. torch is
imported only to save and load states.
"""  # noqa: E501

import hashlib
import itertools
import json
import math
import os
import secrets
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp_prune.core.processes import broadcast_from_main, raise_on_all_ranks
from ddp_prune.core.schedule import Like, Saved, Unsaved
from ddp_prune.settings import INDECISIVE, TrainingSettings
from ddp_vllm.errors import OutputError, Printer
from ddp_vllm.model_files import tokenizer_and_config_files
from ddp_vllm.output import atomic_file, check_name, locked, sync, writing
from ddp_vllm.provenance import provenance_of
from ddp_vllm.remote_code.files import read_bytes, weight_files

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator

RECORD, METRICS, LOCK = "run.json", "metrics*.jsonl", "lock"
FORMAT = 4  # of run.json
LARGEST_RECORD, LARGEST_METRICS = 1 << 28, 1 << 34  # bytes
FILE_BYTES = 1 << 30  # tensors per file of a state: a file is assembled in host memory
CHUNK = 4096  # bytes of a tensor that `inputs_of` reads
ANEW = "or pass --overwrite to start anew"


class RunFolder(Unsaved):
    """One command's run. All processes make it; only the main one writes its record and metrics."""

    def __init__(self, output: Path, accelerator: "Accelerator", print_line: Printer = lambda _: None) -> None:
        self.output, self.accelerator, self.print_line = output, accelerator, print_line
        self.folder = run_folder(output)
        self.size = 0  # number of the size that is trained, in its family
        self.overwrite = False  # whether this command may give up a run of other text or weights
        self.gives_up = False  # whether the folder holds another run, until the first state of this one
        self.record: dict[str, Any] = {}

    @property
    def id(self) -> str:
        return str(self.record["id"])

    @property
    def metrics(self) -> Path:
        """The lines of this run; those of one that it gives up stay until its first state."""
        return self.folder / f"metrics-{self.id}.jsonl"

    @property
    def resolved(self) -> dict[str, Any]:
        """What an interrupted command had resolved before its first step; {} of a new run."""
        return dict(self.record["resolved"])

    @contextmanager
    def open(self, recipes: Sequence[TrainingSettings], *, overwrite: bool) -> Iterator[None]:
        """Lock the folder, and read or make the record of a command.

        recipes: one per size, as the user gave them. overwrite: the user's.
        Raises: OutputError if another process works on the run, as `find_record`, or if the folder
            cannot be written to.
        """
        with ExitStack() as stack:
            stack.callback(self._remove_if_empty)
            with raise_on_all_ranks(self.accelerator):
                if self.accelerator.is_main_process:
                    check_run_folder(self.output)
                    with self._writing():
                        self.folder.parent.mkdir(parents=True, exist_ok=True)
                        self.folder.mkdir(mode=0o700, exist_ok=True)
                        stack.enter_context(_locked(self.folder))
                    saved = find_record(self.output, recipes, overwrite=overwrite)
                    self.gives_up = not saved and os.path.lexists(self.folder / RECORD)
                    self.record = saved or self._new_record(recipes)
                    self.record["overwrite"] |= overwrite  # the output, also when the run is resumed
            self.record, self.gives_up = broadcast_from_main(self.accelerator, (self.record, self.gives_up))
            self.overwrite = overwrite
            yield

    def _new_record(self, recipes: Sequence[TrainingSettings]) -> dict[str, Any]:
        fixed = {"format": FORMAT, "id": secrets.token_hex(8), "recipes": [recipe.to_dict() for recipe in recipes]}
        return fixed | {"resolved": {}, "inputs": {}, "overwrite": False, "states": {}, "latest": "", "search": ""}

    def written(self, outputs: Sequence[Path]) -> list[Path]:
        """Return the first of the outputs, as many as this run has written; all processes call this
        together."""
        is_written = [provenance_of(output).get("run_id") == self.id for output in outputs]
        return broadcast_from_main(self.accelerator, list(outputs[: [*is_written, False].index(False)]))

    def begin(self, resolved: Mapping[str, Any], inputs: Mapping[str, Any], *, shared_by: int) -> bool:
        """Store what was resolved, and the `inputs_of` text and weights; of a run that is resumed,
        compare them. Return whether it starts anew, because they changed.

        shared_by: how many processes share the weights.
        Raises: OutputError if the inputs have changed since the run was started, or if its 8-bit
            moments belong to the rows of other processes.
        """
        before = self.record["inputs"]
        if changed := [name for name in inputs if name in before and inputs[name] != before[name]]:
            if not self.overwrite:
                raise OutputError(
                    f"the {changed[0]} changed since the run in {self.folder} was started; restore it and give the "
                    f"command again, {ANEW}"
                )
            kept = {key: self.record[key] for key in ("recipes", "overwrite")}
            self.record, self.gives_up = self._new_record([]) | kept, True
        saved_by = self.record.get("shared_by", shared_by)
        if resolved.get("optimizer") == "adamw-8bit" and saved_by != shared_by:
            raise OutputError(
                f"the run in {self.folder} shares weights and their 8-bit moments among {saved_by} processes, not "
                f"{shared_by}; start as many, {ANEW}"
            )
        self.record |= {"resolved": dict(resolved), "inputs": dict(inputs), "shared_by": shared_by}
        if not self.gives_up:
            self._store()
        return bool(changed)

    @property
    def where(self) -> str:  # type: ignore[override]
        """Where the last state is, in words."""
        return f"the last save is in {self.folder}" if self.record["latest"] else "nothing was saved yet"

    def resume(self, like: Like) -> Saved | None:
        """Return the state from which the size starts or resumes: its own latest one, or else the end
        of the previous size's search. None at the start of the first size.

        like: as of `_read_state`. Raises: OutputError if the state is damaged.
        """
        states, latest, search = (self.record[name] for name in ("states", "latest", "search"))
        is_own = bool(latest) and states[latest]["size"] == self.size
        self._forget_after(states[latest]["step"] if is_own else -1)
        if not is_own and not self.size:
            return None
        if not is_own and (not search or states[search]["size"] != self.size - 1):
            raise OutputError(
                f"the previous size's search is not in {self.folder}, because a finished size was removed; {ANEW}"
            )
        name = latest if is_own else search
        state, folder = states[name], self.folder / name
        with raise_on_all_ranks(self.accelerator):
            if self.accelerator.is_main_process:
                try:
                    intact = _hashes(folder) == state["sha256"]
                except OSError:
                    intact = False
                if not intact:
                    raise OutputError(f"the run in {self.folder} is damaged ({name}); delete it, {ANEW}")
        saved = Saved(state["step"], _read_state(folder, like), state["extra"])
        if is_own:
            self.print_line(f"resuming after step {saved.step}")
        return saved

    def save(self, step: int, tensors: "dict[str, torch.Tensor]", extra: dict[str, Any]) -> None:
        """Replace the latest state. All processes call this together.

        step: the next one. tensors: named; whole ones are equal in all processes, sharded ones are
            written by the processes that hold them. extra: plain data.
        Raises: OutputError if it cannot be written.
        """
        record, name, is_main = self.record, f"state-{self.size}-{step}", self.accelerator.is_main_process
        folder = self.folder / name
        with raise_on_all_ranks(self.accelerator):
            if is_main:
                with self._writing():
                    if self.metrics.exists():
                        sync(self.metrics)  # a saved state requires the lines of all steps before it
                    shutil.rmtree(folder, ignore_errors=True)
                    folder.mkdir(mode=0o700)
        with raise_on_all_ranks(self.accelerator), self._writing():
            _write_state(folder, tensors)
        with raise_on_all_ranks(self.accelerator):
            if is_main:
                with self._writing():
                    for path in (*folder.iterdir(), folder, self.folder):
                        sync(path)
                state = {"size": self.size, "step": step, "extra": extra, "sha256": _hashes(folder)}
                search = name if step == self.search else record["search"]
                states = {key: value for key, value in record["states"].items() if key == search} | {name: state}
                record |= {"states": states, "latest": name, "search": search}
                self._store()  # from here on, a run that is given up is gone
                for path in self.folder.glob("state-*"):
                    if path.name not in states:
                        shutil.rmtree(path)
                for path in {*self.folder.glob(METRICS)} - {self.metrics}:
                    path.unlink()
        self.record, self.gives_up = broadcast_from_main(self.accelerator, record), False

    def log(self, metrics: dict[str, float]) -> None:
        """Append one step's metrics. Raises: OutputError if they cannot be written."""
        if self.accelerator.is_main_process:
            with self._writing(), open(self.metrics, "a", encoding="utf-8") as file:
                file.write(json.dumps(metrics) + "\n")

    def remove(self) -> None:
        """Delete the run at the end of its command; the record goes last."""
        if self.accelerator.is_main_process:
            for path in self.folder.glob("state-*"):
                shutil.rmtree(path)
            for path in (*self.folder.glob(METRICS), self.folder / RECORD):
                path.unlink(missing_ok=True)

    def _store(self) -> None:
        """Replace run.json."""
        if self.accelerator.is_main_process:
            with self._writing(), atomic_file(self.folder / RECORD, private=True) as temporary:
                stored = {"record": self.record, "sha256": _hash_of(self.record)}
                temporary.write_text(json.dumps(stored), encoding="utf-8")

    def _forget_after(self, step: int) -> None:
        """Cut off metrics of later steps, and a damaged line with those after it. This also works
        on a full disk."""
        if self.accelerator.is_main_process and os.path.lexists(self.metrics):
            with self._writing():
                lines = read_bytes(self.metrics, LARGEST_METRICS).splitlines(keepends=True)
                done = itertools.takewhile(lambda line: (_step_of(line) or math.inf) <= step, lines)
                os.truncate(self.metrics, sum(map(len, done)))

    def _remove_if_empty(self) -> None:
        """Leave nothing behind if no state was saved, as after an error before the first step."""
        if not self.record.get("states", True):
            if self.gives_up:
                self.metrics.unlink(missing_ok=True)
            else:
                self.remove()
        with suppress(OSError):  # there is something to resume from, or another process works on it
            self.folder.rmdir()

    def _writing(self) -> AbstractContextManager[None]:
        """Raise OutputError if a write inside the block fails."""
        return writing(self.folder, "make room, and the same command resumes from there")


def run_folder(output: Path) -> Path:
    """Return the folder of the run that writes `output`. Raises: OutputError if it has no name."""
    check_name(output)
    return output.with_name(f"{output.name}.run")


def interrupted_run(output: Path, recipes: Sequence[TrainingSettings], *, overwrite: bool) -> bool:
    """Tell whether there is an interrupted run of a command, before anything expensive; remove the
    empty folder of one that was killed when it had removed all else of its run.

    Raises: OutputError if another process works on it, or as `find_record`.
    """
    folder = run_folder(output)
    with suppress(OSError):
        if set(os.listdir(folder)) <= {LOCK}:
            with _locked(folder):
                pass
            folder.rmdir()
    if not (folder / RECORD).exists():
        return False
    with _locked(folder):
        return bool(find_record(output, recipes, overwrite=overwrite))


def _locked(folder: Path) -> AbstractContextManager[None]:
    return locked(folder / LOCK, f"another process works on {folder}; wait for it, or choose another output")


def find_record(output: Path, recipes: Sequence[TrainingSettings], *, overwrite: bool) -> dict[str, Any]:
    """Return the record of the interrupted run of a command; {} if there is none.

    Raises: OutputError if it is of another recipe or damaged, unless `overwrite` gives it up.
    """
    folder = run_folder(output)
    if not os.path.lexists(folder / RECORD):
        return {}
    try:
        stored = json.loads(read_bytes(folder / RECORD, LARGEST_RECORD))
        record = stored["record"]
        if stored["sha256"] != _hash_of(record) or record["format"] != FORMAT:
            raise ValueError("damaged, or another format")
        changed = _changed(record, recipes)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if overwrite:
            return {}
        raise OutputError(f"the run in {folder} is damaged, or of another version; delete it, {ANEW}") from error
    if changed and not overwrite:
        raise OutputError(f"{folder} holds an interrupted run with {changed}; give that command to finish it, {ANEW}")
    return {} if changed else record


def _hash_of(record: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record).encode()).hexdigest()


def _changed(record: Mapping[str, Any], recipes: Sequence[TrainingSettings]) -> str:
    """Return the first setting in which a command differs from that of a saved run, in words; ""
    for the same command."""
    before = record["recipes"]
    if len(before) != len(recipes):
        return f"{len(before)} sizes instead of {len(recipes)}"
    for saved, recipe in zip(before, recipes, strict=True):
        requested = json.loads(json.dumps(recipe.to_dict()))
        for name in sorted((saved.keys() | requested.keys()) - {*INDECISIVE}):
            if saved.get(name) != requested.get(name):
                return f"{name} {saved.get(name)!r} instead of {requested.get(name)!r}"
        for name in ("train", "optimizer"):  # `auto` is whatever was resolved
            resolved = record["resolved"].get(name)
            if resolved is not None and requested[name] not in ("auto", resolved) and (name == "train" or resolved):
                return f"{name} {resolved!r} instead of {requested[name]!r}"
    return ""


def check_run_folder(output: Path) -> None:
    """Refuse a folder that has the name of a run's folder but holds other files. Raises:
    OutputError."""
    folder = run_folder(output)
    if not os.path.lexists(folder):
        return
    paths = list(folder.iterdir()) if folder.is_dir() and not folder.is_symlink() else [folder]
    foreign = [path.name for path in paths if path.is_symlink() or not _is_ours(path)]
    if foreign:
        raise OutputError(
            f"{folder} is where a run would be kept, but it holds {min(foreign)}, which is a link or not a file of a "
            "run; move it away or choose another output"
        )


def _is_ours(path: Path) -> bool:
    names = path.name in (RECORD, LOCK) or path.match(METRICS) or path.match(f".{RECORD}.*.tmp")
    return names or (path.match("state-*-*") and path.is_dir())


def inputs_of(
    text: Mapping[str, "torch.Tensor"], folders: Sequence[Path], *, profile: Path | None = None
) -> dict[str, Any]:
    """Return the identity of a run's inputs: hashes of text blocks, of weights, config and tokenizer of the models
    in folders, and of the latency profile."""
    digest = hashlib.sha256()
    for blocks in text.values():
        digest.update(f"{list(blocks.shape)}".encode())
        digest.update(blocks.contiguous().numpy().data)
    files = itertools.chain(*map(tokenizer_and_config_files, folders))
    hashes = [(path.name, hashlib.sha256(path.read_bytes()).hexdigest()) for path in files]
    return {
        "text": digest.hexdigest(),
        "weights": identity_of_weights(*folders),
        "config": [value for name, value in hashes if name == "config.json"],
        "tokenizer": [[name, value] for name, value in hashes if name != "config.json"],
        **({"profile": hashlib.sha256(profile.read_bytes()).hexdigest()} if profile else {}),
    }


def identity_of_weights(*folders: Path) -> list[list[Any]]:
    """Return the identity of the weights in folders: of each file its name, size and header, and a part of each
    tensor, which differs after any training. Its time is left out: the same weights can be downloaded again."""
    files = itertools.chain(*map(weight_files, folders))
    return [[path.name, path.stat().st_size, _hash_of_parts(path)] for path in files]


def _hash_of_parts(path: Path) -> str:
    """Return a hash of a safetensors file's header, and of the middle of each tensor."""
    with open(path, "rb") as file:
        header = file.read(int.from_bytes(file.read(8), "little"))
        digest, start = hashlib.sha256(header), file.tell()
        spans = [entry["data_offsets"] for name, entry in json.loads(header).items() if name != "__metadata__"]
        for first, end in sorted(spans):
            file.seek(start + max(first, (first + end - CHUNK) // 2))
            digest.update(file.read(min(CHUNK, end - first)))
    return digest.hexdigest()


def _write_state(folder: Path, tensors: "dict[str, torch.Tensor]") -> None:
    """Write named tensors, of which sharded ones are written by the processes that hold them.
    Raises: OSError."""
    from accelerate.utils import gather_object
    from torch import distributed
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    files, held = dict[str, int](), 0
    for name, tensor in tensors.items():
        held += tensor.numel() * tensor.element_size()
        files[name] = 1 + held // FILE_BYTES
    files = {name: file for part in gather_object([files]) for name, file in part.items()}
    writer = HuggingFaceStorageWriter(str(folder), fqn_to_index_mapping=files, save_distributed=True)
    try:
        with alone():
            save(dict(tensors), storage_writer=writer, no_dist=not distributed.is_initialized())
    except CheckpointException as error:  # of any process
        reason = next(iter(error.failures.values()))[0]
        raise OSError(" ".join(str(reason).split())) from error


def _read_state(folder: Path, like: Like) -> "dict[str, torch.Tensor]":
    """Return the tensors that `_write_state` wrote."""
    import torch
    from torch import distributed
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    reader, tensors = HuggingFaceStorageReader(str(folder)), dict[str, torch.Tensor]()
    stored: Any
    for name, stored in reader.read_metadata().state_dict_metadata.items():
        tensor = like(name)
        tensors[name] = torch.empty(stored.size, dtype=stored.properties.dtype) if tensor is None else tensor
    with alone():
        load(tensors, storage_reader=reader, no_dist=not distributed.is_initialized())
    return tensors


@contextmanager
def alone() -> Iterator[None]:
    """Suppress torch's warning that a single process saves and loads on its own."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def _hashes(folder: Path) -> dict[str, str]:
    hashes = dict[str, str]()
    for path in sorted(folder.iterdir()):
        if not path.is_file():
            raise OSError(f"{path} is not a file")  # a pipe would block
        with open(path, "rb") as file:
            hashes[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return hashes


def _step_of(line: bytes) -> int | None:
    """Return the step of a line of metrics; None if the line is incomplete or damaged."""
    try:
        metrics = json.loads(line) if line.endswith(b"\n") else None
    except (RecursionError, ValueError):
        return None
    step = metrics.get("step") if isinstance(metrics, dict) else None
    return step if isinstance(step, int) else None
