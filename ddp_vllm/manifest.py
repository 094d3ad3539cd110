"""The manifest of a folder that ddp-vllm wrote: `ddp_manifest.json` lists every file of the model
with its SHA-256.

It is created first and filled last. A folder that has it may be replaced. Pages and results, which
are written again later, are not listed: the model card, the report, and what `eval` and `bench`
add.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from ddp_vllm.errors import CheckpointError
from ddp_vllm.remote_code.files import read_json
from ddp_vllm.schema import NAME, check

MANIFEST = "ddp_manifest.json"
CARD, REPORT_FILE, PICTURE_FOLDER = "README.md", "report.html", "report"
# a folder that holds one of them was written by ddp-vllm
MARKS = {MANIFEST, "ddp_masks.safetensors"}
NOT_LISTED = (MANIFEST, CARD, REPORT_FILE, PICTURE_FOLDER, "eval", "sharegpt-*.json", "sharegpt-*.png")


def is_ours(folder: Path) -> bool:
    """Tell whether ddp-vllm wrote a folder, or the folder is empty."""
    if not folder.is_dir() or folder.is_symlink():
        return False
    names = {path.name for path in folder.iterdir()}
    return not names or bool(names & MARKS)


def manifest_of(folder: Path) -> str:
    """Return the manifest for the current content of a folder."""
    return json.dumps({"sha256": {name: sha256(folder / name) for name in _files(folder)}}, indent=1) + "\n"


def read_manifest(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file by its name. Raises: ValueError if the file is not a
    manifest; OSError."""
    content = read_json(folder / MANIFEST)
    check(content, {"sha256": {str: NAME}}, MANIFEST)
    return dict(content["sha256"])


def check_manifest(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file. Raises: CheckpointError if a file is missing, added or
    changed."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder; check the path")
    try:
        hashes, wrong = read_manifest(folder), list(differences(folder))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder} has no manifest that can be read ({error}); write it with prune") from error
    if wrong:
        raise CheckpointError(
            f"{folder} is not as it was written: {'; '.join(wrong[:5])} ({len(wrong)} in all); copy the folder again"
        )
    return hashes


def differences(folder: Path) -> Iterator[str]:
    """Yield a phrase per file that differs from the manifest. Raises: ValueError as
    `read_manifest`; OSError."""
    hashes, present = read_manifest(folder), set(_files(folder))
    yield from (f"{name} is missing" for name in sorted(hashes.keys() - present))
    yield from (f"{name} was added" for name in sorted(present - hashes.keys()))
    kept = sorted(present & hashes.keys())
    yield from (f"{name} was changed" for name in kept if sha256(folder / name) != hashes[name])


def _files(folder: Path) -> Iterator[str]:
    """Yield the files of a folder that belong to the model, relative to it."""
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if not path.is_dir() and not any(map(Path(name.parts[0]).match, NOT_LISTED)):
            yield name.as_posix()


def sha256(file: Path) -> str:
    """Return the SHA-256 of a file."""
    if not file.is_file():  # a pipe or a device never ends
        raise ValueError(f"{file.name} is not a file")
    with open(file, "rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
