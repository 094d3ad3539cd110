"""Everything that is written appears whole or not at all: files and folders beside their place, then a rename.

What a killed process leaves of a folder is called `.NAME.tmp`, `.NAME.old` or `.NAME.lock`; the next call for the same
output removes it. Of a file it is `.NAME.<random>.tmp`. No link is followed, and nothing is removed that is not ours by
`manifest.is_ours`. Nothing here imports torch.
"""

import errno
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from ddp_vllm.errors import OutputError, is_utf8
from ddp_vllm.manifest import MANIFEST, amended, is_ours, manifest_of

LONGEST_NAME = 200  # bytes of a folder's name, to which endings are added; file systems allow 255
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP)  # of some network file systems; for ENOSYS filelock has a way of its own


def check_output(output: Path, *, overwrite: bool) -> None:
    """Refuse an output folder that exists, before any work is done.

    Raises: OutputError if `output` exists and `overwrite` is off, if it is no folder we could have written or could
        rename, or if nothing can be written there.
    """
    with writing(output):
        _check_output(output, overwrite=overwrite)


def _check_output(output: Path, *, overwrite: bool) -> None:
    if output.is_symlink():
        raise OutputError(f"{output} is a link, which a finished folder would replace; give the folder it points to")
    if output.name in ("", "..") or os.path.ismount(output) or Path.cwd().is_relative_to(output.resolve()):
        raise OutputError(
            f"{output} is a mount point, or the folder you are in or above, and cannot be replaced; "
            "choose a folder inside it"
        )
    if len(os.fsencode(output.name)) > LONGEST_NAME or not is_utf8(output.name):
        raise OutputError(f"{output.name} is no name of at most {LONGEST_NAME} bytes of UTF-8; choose a shorter one")
    parent = next(folder for folder in output.absolute().parents if folder.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise OutputError(f"{output} cannot be written: {parent} is no folder you may write to; choose another folder")
    if not output.exists():
        return
    if not overwrite:
        raise OutputError(f"{output} exists; choose another folder or pass --overwrite")
    if not is_ours(output):
        raise OutputError(
            f"{output} was not written by ddp-vllm, so --overwrite leaves it alone; choose another folder"
        )


def check_file(output: Path, *, overwrite: bool) -> None:
    """Refuse an output file that exists, before any work is done. Raises: OutputError."""
    if output.is_dir():
        raise OutputError(f"{output} is a folder; give the name of a file")
    if output.exists() and not overwrite:
        raise OutputError(f"{output} exists; choose another --output or pass --overwrite")


def make_folder(folder: Path) -> None:
    """Make a folder and try to write to it, before any work is done. Raises: OutputError."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()


@contextmanager
def atomic_folder(output: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield a temporary folder beside `output` that becomes `output` when the block ends without an error.

    Files are synced before the rename, so a crash leaves the old folder, the new one or none, never half of one.
    Its manifest is written last. Raises: OutputError as `check_output`, if another process writes the same output, if a
        link or files of others lie where the temporary folder would, and of any OSError of the block.
    """
    check_output(output, overwrite=overwrite)
    temporary, old, lock = (output.with_name(f".{output.name}.{kind}") for kind in ("tmp", "old", "lock"))
    with writing(output):
        output.parent.mkdir(parents=True, exist_ok=True)
    with writing(output), locked(lock, f"another process writes {output}; wait for it, or choose another folder"):
        for path in (temporary, old):
            if os.path.lexists(path) and not is_ours(path):
                raise OutputError(f"{path} is a link or holds files of others, which are not ours; move it away")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        (temporary / MANIFEST).touch()
        try:
            yield temporary
            (temporary / MANIFEST).write_text(manifest_of(temporary), encoding="utf-8")
            for path in temporary.rglob("*"):
                if path.is_file():
                    path.chmod(temporary.stat().st_mode & 0o666)  # safetensors writes files for their owner alone
                sync(path)
            sync(temporary)
            if output.exists():
                shutil.rmtree(old, ignore_errors=True)  # not before: without `output` it is all there is
                os.rename(output, old)
            os.rename(temporary, output)
            shutil.rmtree(old, ignore_errors=True)
            sync(output.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def atomic_file(output: Path, *, private: bool = False) -> Iterator[Path]:
    """Yield the path of a temporary file beside `output` that replaces it when the block ends without an error.

    Readers see the old file or the new one; where it is `private` they are its owner alone. The folder must exist.
    Raises: OSError, of the block too.
    """
    temporary = output.with_name(f".{output.name}.{secrets.token_hex(4)}.tmp")
    os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600 if private else 0o666))
    try:
        yield temporary
        sync(temporary)
        os.replace(temporary, output)
        sync(output.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(text: str, output: Path) -> None:
    """Replace a text file in one step, and make its folder. Raises: OutputError."""
    with writing(output):
        output.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(output) as temporary:
            temporary.write_text(text, encoding="utf-8")


def write_into(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files into a folder, by their names in it; its manifest stays true. Raises: OutputError."""
    with writing(folder):
        for name, content in files.items():
            path = folder / name
            if path.parent != folder and path.parent.is_symlink():
                raise OutputError(f"{path.parent} is a link, which is not ours to follow; remove it")
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_file(path) as temporary:
                temporary.write_bytes(content)
        try:
            manifest = amended(folder, files)
        except ValueError as error:
            raise OutputError(f"{folder}: {error}; write the model again") from error
        if manifest is not None:
            write_text(manifest, folder / MANIFEST)


@contextmanager
def writing(output: Path) -> Iterator[None]:
    """Raise OutputError for what the system refuses inside the block."""
    try:
        yield
    except OSError as error:
        remedy = "make room there, or choose another output"
        raise OutputError(f"{output} cannot be written ({error}); {remedy}") from error


@contextmanager
def locked(path: Path, taken: str, *, wait: bool = False) -> Iterator[None]:
    """Hold the lock file `path` inside the block, and remove it after; the system lets go when the process ends.

    wait: until whoever holds it has finished. On a disk that has no locks it does without.
    Raises: OutputError(taken) if another process holds it; OSError.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(path, timeout=-1 if wait else 0, mode=0o666 if wait else 0o644)  # others wait for it too
    try:
        lock.acquire()
    except Timeout:
        raise OutputError(taken) from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # while it is held: who waits for it sees that it is gone, and makes a new one
        lock.release()


def sync(path: Path) -> None:
    """Wait until a file, or what a folder lists, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
