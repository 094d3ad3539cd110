"""Writes files and folders that appear whole or not at all: under a temporary name first, then by a
rename.

| a killed process may leave | content | removed by |
|---|---|---|
| `.NAME.tmp` | a folder that was being written | `clear`, in every later command |
| `.NAME.old` | the folder that it was to replace | `clear`, which puts it back if there is no other |
| `.NAME.lock` | the lock of the folder's writer | `clear` |
| `.NAME.<8 hex digits>.tmp` | a file that was being written, locked by its writer | `clear_file`, in later writers |
| `NAME.run` | the state of an interrupted run (`ddp_prune.run_folder`) | the run, at the end of its command |

A folder whose proof failed (`ddp_vllm.proof`) becomes `NAME.unproved`, and replaces an older one of that name.

No link is followed, and only folders of ours (`is_ours`) are removed. Nothing here imports torch.
"""

import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ddp_vllm.errors import CheckpointError, OutputError
from ddp_vllm.masks import MASKS_FILE, Provenance, read_provenance

# on some network file systems; filelock itself handles ENOSYS
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP)
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def writing(output: Path, remedy: str = "") -> Iterator[None]:
    """Raise OutputError for any OSError inside the block. remedy: ends the message; "": by the error."""
    try:
        yield
    except OSError as error:
        # numpy's tofile, which states no errno
        is_full = error.errno in FULL or "requested and" in str(error)
        remedy = remedy or ("make room there, or choose another output" if is_full else "choose another output")
        raise OutputError(f"{output} cannot be written ({error}); {remedy}") from error


def is_ours(folder: Path) -> bool:
    """Tell whether ddp-vllm wrote a folder, which then has a masks file, or the folder is empty."""
    if not folder.is_dir() or folder.is_symlink():
        return False
    names = {path.name for path in folder.iterdir()}
    return not names or MASKS_FILE in names


def check_name(output: Path) -> None:
    """Refuse the current folder, its parent and the root, which an unset variable gives too. Raises:
    OutputError."""
    if output.name in ("", ".."):
        raise OutputError(f"the output {str(output)!r} has no name of its own; give one, such as ./pruned")


def check_output(output: Path, *, overwrite: bool, reads: Iterable[str | Path] = ()) -> None:
    """Refuse an output folder that exists, before any work is done, after a `clear`.

    reads: models that the command reads, folders or hub names; a folder in `output` would be lost.
    Raises: OutputError if `output` exists and `overwrite` is off, if ddp-vllm did not write it or
        cannot rename it, if it holds a folder of `reads` or of any other model, or if nothing can be
        written there.
    """
    check_name(output)
    for folder in map(Path, reads):
        if folder.is_dir() and folder.resolve().is_relative_to(output.resolve()):
            raise OutputError(f"{output} holds {folder}, which this command reads; choose another folder")
    clear(output)
    with writing(output):
        if output.is_symlink() or os.path.ismount(output):
            raise OutputError(f"{output} is a link or a mount point, so a finished folder cannot replace it")
        parent = next(folder for folder in output.absolute().parents if folder.exists())
        # os.access trusts root, whom some mounts refuse
        tempfile.TemporaryFile(dir=parent).close()
        if output.exists() and not is_ours(output):
            raise OutputError(f"{output} exists, and ddp-vllm did not write it; choose another folder")
        if output.exists() and not overwrite:
            raise OutputError(f"{output} exists; choose another folder or pass --overwrite")
        if inside := next(output.glob("*/**/config.json"), None):
            raise OutputError(f"{output} holds another model, {inside.parent}, which would be lost; move it away")


def check_file(output: Path, *, overwrite: bool, begins: str) -> None:
    """Refuse an output file that exists, before any work is done, after a `clear_file`.

    begins: the first characters of a file of ours; only such a file, or an empty one, is replaced.
    Raises: OutputError.
    """
    check_name(output)
    clear_file(output)
    if output.is_dir():
        raise OutputError(f"{output} is a folder; give the name of a file")
    if output.exists() and not overwrite:
        raise OutputError(f"{output} exists; choose another --output or pass --overwrite")
    if output.exists():
        with writing(output), open(output, "rb") as file:
            if (first := file.read(len(begins))) and first != begins.encode():
                raise OutputError(f"{output} exists, and this command did not write it; choose another --output")


def make_folder(folder: Path) -> None:
    """Make a folder and try to write to it, before any work is done. Raises: OutputError."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()


def clear(output: Path) -> None:
    """Undo the writing of a folder by a killed process, unless another process is writing it now.

    Raises: OutputError if a link or files of others have the names of our temporary folders.
    """
    paths = _working_paths(output)
    if any(map(os.path.lexists, paths)):
        with writing(output), suppress(_TakenError), locked(paths[2], ""):
            _clear(output, *paths[:2])


def _working_paths(output: Path) -> list[Path]:
    """Return the paths of the new folder while it is written, of the folder that it replaces, and
    of the lock."""
    return [output.parent / f".{output.name}.{kind}" for kind in ("tmp", "old", "lock")]


def _clear(output: Path, temporary: Path, old: Path) -> None:
    for path in (temporary, old):
        if os.path.lexists(path) and not is_ours(path):
            raise OutputError(f"{path} is a link or holds files that ddp-vllm did not write; move it away")
    # killed between the two renames of `atomic_folder`
    if old.exists() and not os.path.lexists(output):
        os.rename(old, output)
    for path in (temporary, old):
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def atomic_folder(output: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield a temporary folder in the same parent, which becomes `output` when the block ends
    without an error.

    Files are synced before the rename, so a crash leaves the old folder or the new one. The block
    writes the masks file, by which the folder can be replaced later.
    Raises: OutputError as `check_output`, if another process writes the same output, if a link or
        files of others have the name of the temporary folder, and for any OSError of the block;
        CheckpointError if the masks file states that the folder's proof failed.
    """
    check_output(output, overwrite=overwrite)
    temporary, old, lock = _working_paths(output)
    with writing(output):
        output.parent.mkdir(parents=True, exist_ok=True)
    with writing(output), locked(lock, f"another process writes {output}; wait for it, or choose another folder"):
        _clear(output, temporary, old)
        temporary.mkdir()
        (temporary / MASKS_FILE).touch()  # if it is killed, the folder is still known as ours
        try:
            yield temporary
            if not (temporary / MASKS_FILE).stat().st_size:
                (temporary / MASKS_FILE).unlink()
            for path in temporary.rglob("*"):
                if path.is_file():
                    # safetensors writes files for their owner alone
                    path.chmod(temporary.stat().st_mode & 0o666)
                sync(path)
            sync(temporary)
            if fault := Provenance.of(read_provenance(temporary / MASKS_FILE)).proof.fault:
                unproved = output.with_name(f"{output.name}.unproved")
                check_output(unproved, overwrite=True)
                shutil.rmtree(unproved, ignore_errors=True)
                os.rename(temporary, unproved)
                raise CheckpointError(
                    f"the written model is not the one that was measured: {fault}; it is kept as {unproved}, do not "
                    "serve it; please report this, or pass --no-proof to write it all the same"
                )
            if output.exists():
                os.rename(output, old)
            os.rename(temporary, output)
            sync(output.parent)
        finally:
            _clear(output, temporary, old)


@contextmanager
def atomic_file(output: Path, *, private: bool = False) -> Iterator[Path]:
    """Yield the path of a temporary file in the same folder that replaces `output` when the block
    ends without error.

    Readers see either the old or the new file. private: only the owner may read it. The folder must
    exist.
    Raises: OSError, also from the block.
    """
    clear_file(output)
    temporary = output.with_name(f".{output.name}.{secrets.token_hex(4)}.tmp")
    descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600 if private else 0o666)
    try:
        # a disk without locks: there `clear_file` cannot lock either, and removes nothing
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield temporary
        sync(temporary)
        os.replace(temporary, output)
        sync(output.parent)
    finally:
        temporary.unlink(missing_ok=True)
        os.close(descriptor)


def clear_file(output: Path) -> None:
    """Remove the temporary files of `output` that killed processes left; a living process has
    locked its file."""
    pattern = re.compile(rf"\.{re.escape(output.name)}\.[0-9a-f]{{8}}\.tmp")
    # the folder is missing or unreadable, or another process removed the file
    with suppress(OSError):
        for name in filter(pattern.fullmatch, os.listdir(output.parent)):
            path = output.with_name(name)
            if not stat.S_ISREG(path.lstat().st_mode):
                continue
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                with suppress(OSError):
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()
            finally:
                os.close(descriptor)


def write_text(text: str, output: Path) -> None:
    """Replace a text file in one step, and make its folder. Raises: OutputError."""
    with writing(output):
        output.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(output) as temporary:
            temporary.write_bytes(text.encode())


class _TakenError(OutputError):
    """Another process holds a lock."""


@contextmanager
def locked(path: Path, taken: str, *, wait: bool = False) -> Iterator[None]:
    """Hold the lock file `path` inside the block, then remove it. The system releases it when the
    process ends.

    wait: wait until another process has released it. On a disk without locks the block runs
        unlocked.
    Raises: OutputError(taken) if another process holds it; OSError.
    """
    from filelock import FileLock, Timeout

    # other users may wait for it
    lock = FileLock(path, timeout=-1 if wait else 0, mode=0o666 if wait else 0o644)
    try:
        lock.acquire()
    except Timeout:
        raise _TakenError(taken) from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
    identity = _identity(path)
    try:
        yield
    finally:
        # the block may have moved it, and another process made a new one
        if _identity(path) == identity:
            # before the release: a waiting process notices and creates a new file
            path.unlink(missing_ok=True)
        lock.release()


def _identity(path: Path) -> tuple[int, int] | None:
    """Return the device and the inode of a file; None if there is no file."""
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def sync(path: Path) -> None:
    """Wait until a file, or the list of a folder's files, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
