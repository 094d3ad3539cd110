"""The manifest of a folder that ddp-vllm wrote: `ddp_manifest.json` lists every file with its SHA-256.

It is created first and filled last. A folder that has it may be replaced; a folder with an empty one is not complete.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from ddp_vllm.errors import CheckpointError
from ddp_vllm.remote_code.files import read_json
from ddp_vllm.schema import NAME, check

MANIFEST = "ddp_manifest.json"
OWN = {MANIFEST, "ddp_masks.safetensors"}  # the second identifies folders of versions without a manifest
RESULTS = ("eval", "sharegpt-*.json", "sharegpt-*.png")  # files that `eval` and `bench` add; not part of the model


def is_ours(folder: Path) -> bool:
    """Tell whether ddp-vllm wrote a folder, or the folder is empty."""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() and not folder.is_symlink() else {""}
    return not names or bool(names & OWN)


def is_whole(folder: Path) -> bool:
    """Tell whether a folder is complete: its manifest is written last."""
    try:
        return bool(read_manifest(folder))
    except (OSError, ValueError):
        return False


def manifest_of(folder: Path) -> str:
    """Return the manifest for the current content of a folder."""
    return to_text({name: sha256(folder / name) for name in _files(folder)})


def amended(folder: Path, names: Iterable[str]) -> str | None:
    """Return the manifest of a folder with new hashes for the files `names`; None without one, or while it is empty.

    Raises: ValueError as `read_manifest`.
    """
    path = folder / MANIFEST
    if not path.is_file() or not path.stat().st_size:  # the folder is being written
        return None
    return to_text(read_manifest(folder) | {name: sha256(folder / name) for name in names})


def read_manifest(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file by its name. Raises: ValueError if the file is not a manifest; OSError."""
    found = read_json(folder / MANIFEST)
    check(found, {"sha256": {str: NAME}}, MANIFEST)
    return dict(found["sha256"])


def check_manifest(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file. Raises: CheckpointError if a file is missing, added or changed."""
    try:
        hashes, wrong = read_manifest(folder), list(differences(folder))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder} has no manifest that can be read ({error}); write it with prune") from error
    if wrong:
        raise CheckpointError(f"{folder} is not as it was written: {'; '.join(wrong[:5])} ({len(wrong)} in all)")
    return hashes


def differences(folder: Path) -> Iterator[str]:
    """Yield a phrase per file that differs from the manifest. Raises: ValueError as `read_manifest`; OSError."""
    hashes, present = read_manifest(folder), set(_files(folder))
    yield from (f"{name} is missing" for name in sorted(hashes.keys() - present))
    yield from (f"{name} was added" for name in sorted(present - hashes.keys()))
    yield from (
        f"{name} was changed" for name in sorted(present & hashes.keys()) if sha256(folder / name) != hashes[name]
    )


def _files(folder: Path) -> Iterator[str]:
    """Yield the files of a folder that belong to the model, relative to it."""
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if not path.is_dir() and name.as_posix() != MANIFEST and not any(map(Path(name.parts[0]).match, RESULTS)):
            yield name.as_posix()


def sha256(file: Path) -> str:
    """Return the SHA-256 of a file."""
    if not file.is_file():  # a pipe or a device never ends
        raise ValueError(f"{file.name} is not a file")
    with open(file, "rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def to_text(hashes: dict[str, str]) -> str:
    """Return the manifest that holds these hashes."""
    return json.dumps({"sha256": dict(sorted(hashes.items()))}, indent=1) + "\n"
