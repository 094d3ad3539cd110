"""What a folder that ddp-vllm wrote holds: `ddp_manifest.json` names every file with its SHA-256.

It is the first file of a folder, empty until the folder is whole: by its name ddp-vllm knows what it may replace.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from ddp_vllm.errors import CheckpointError
from ddp_vllm.remote_code.files import read_json
from ddp_vllm.schema import NAME, check

MANIFEST = "ddp_manifest.json"
OWN = {MANIFEST, "ddp_masks.safetensors"}  # the second: of versions without a manifest
RESULTS = ("eval", "sharegpt-*.json", "sharegpt-*.png")  # what `eval` and `bench` write later, no part of the model


def is_ours(folder: Path) -> bool:
    """Tell whether ddp-vllm wrote a folder, or nobody has written into it."""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() and not folder.is_symlink() else {""}
    return not names or bool(names & OWN)


def is_whole(folder: Path) -> bool:
    """Tell whether a folder was written to its end: its manifest is the last file that is written."""
    try:
        return bool(read_manifest(folder))
    except (OSError, ValueError):
        return False


def manifest_of(folder: Path) -> str:
    """Return the manifest of a folder as it is now."""
    return to_text({name: sha256(folder / name) for name in _files(folder)})


def amended(folder: Path, names: Iterable[str]) -> str | None:
    """Return the manifest of a folder after some of its files were written anew; None if it has none.

    Raises: ValueError as `read_manifest`.
    """
    if not (folder / MANIFEST).is_file():
        return None
    return to_text(read_manifest(folder) | {name: sha256(folder / name) for name in names})


def read_manifest(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file by its name. Raises: ValueError if the manifest is none; OSError."""
    found = read_json(folder / MANIFEST)
    check(found, {"sha256": {str: NAME}}, MANIFEST)
    return dict(found["sha256"])


def check_manifest(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file, all as they were written. Raises: CheckpointError, naming what is not."""
    try:
        hashes, wrong = read_manifest(folder), list(differences(folder))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder} has no manifest that can be read ({error}); write it with prune") from error
    if wrong:
        raise CheckpointError(f"{folder} is not as it was written: {'; '.join(wrong[:5])} ({len(wrong)} in all)")
    return hashes


def differences(folder: Path) -> Iterator[str]:
    """Yield what is not as the manifest says, a phrase a file. Raises: ValueError as `read_manifest`; OSError."""
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
        raise ValueError(f"{file.name} is no file")
    with open(file, "rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def to_text(hashes: dict[str, str]) -> str:
    """Return the manifest that holds these hashes."""
    return json.dumps({"sha256": dict(sorted(hashes.items()))}, indent=1) + "\n"
