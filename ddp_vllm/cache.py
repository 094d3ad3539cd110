"""The folder of downloads, tokens and compiled kernels. It imports quickly, because vLLM's workers
import it."""

import hashlib
import os
import stat
import tempfile
from pathlib import Path

from ddp_vllm.errors import OutputError


def cache_folder() -> Path:
    """Return the cache: $DDP_VLLM_CACHE, or ddp-vllm in the user's cache folder.

    Raises: OutputError where the user has no home folder.
    """
    if chosen := os.environ.get("DDP_VLLM_CACHE"):
        return Path(chosen)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ddp-vllm"
    except RuntimeError as error:
        raise unwritable_cache("ddp-vllm", error) from error


def check_cache() -> None:
    """Try to write to the cache, before any work is done. Raises: OutputError."""
    folder = cache_folder()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise unwritable_cache(folder, error) from error


def is_own(path: Path) -> bool:
    """Tell whether only this user can have written a file or folder, which is not a link."""
    status = path.lstat()
    return not stat.S_ISLNK(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022


def sha256(file: Path) -> str:
    """Return the SHA-256 of a file. Raises: ValueError for a pipe or a device, which never ends;
    OSError."""
    if not file.is_file():
        raise ValueError(f"{file.name} is not a file")
    with open(file, "rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def unwritable_cache(folder: Path | str, error: Exception) -> OutputError:
    """Return the error to raise instead of `error`."""
    return OutputError(
        f"the cache {folder} cannot be written ({error}); make room there, or set DDP_VLLM_CACHE to another folder"
    )
