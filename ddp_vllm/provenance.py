"""Names of the models and texts that a checkpoint was made from, without their paths.

A published folder reveals nothing about the machine that made it. That machine keeps the paths in
its cache, by the hash of the masks, so that `recover` and `compare` find the dense model and the
text again.
"""

import json
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ddp_vllm import __version__
from ddp_vllm.cache import cache_folder, sha256
from ddp_vllm.errors import CheckpointError, OutputError
from ddp_vllm.masks import MASKS_FILE, masks_metadata, read_provenance
from ddp_vllm.names import absolute_name, bare_name
from ddp_vllm.output import write_text

# settings that may hold paths; `data` and `watch` several
PATHS = ("model", "teacher", "data", "watch", "profile")


def header_of(provenance: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """Return what a masks file states: provenance with names in place of paths, and a number of its own, by which
    folders that were made alike from models of one name do not share their paths."""
    return {**_renamed(provenance, bare_name), "ddp_vllm": __version__, **more, "file_id": secrets.token_hex(8)}


def _renamed(provenance: Mapping[str, Any], rename: Callable[[str], str]) -> dict[str, Any]:
    """Return provenance in which `rename` states each name of models and texts."""
    names: dict[str, Callable[[Any], Any]] = {
        "recipe": lambda recipe: {
            key: rename(value) if key in PATHS and isinstance(value, str) else value for key, value in recipe.items()
        },
        "texts": lambda texts: list(map(rename, texts)),
        "applied_to": rename,
        "watched": lambda texts: {rename(name): quality for name, quality in texts.items()},
        "recovery": lambda recovery: _renamed(recovery, rename),
    }
    return {key: names[key](value) if key in names else value for key, value in provenance.items()}


def write_provenance(masks: Path, provenance: Mapping[str, Any]) -> None:
    """Write a masks file without masks, where it is not known which units were removed, or none
    were."""
    from safetensors.numpy import save_file

    save_file({}, masks, masks_metadata(header_of(provenance), {}))
    remember(masks, provenance)


def remember(masks: Path, provenance: Mapping[str, Any]) -> None:
    """Store the absolute paths of a masks file's models and texts in the cache, if there are any and it can
    be written: further commands may run in another folder."""
    stored = {part: provenance[part] for part in ("recipe", "texts", "applied_to") if part in provenance}
    if "recipe" in provenance.get("recovery", {}):
        stored["recovery"] = {"recipe": provenance["recovery"]["recipe"]}
    if (paths := _renamed(stored, absolute_name)) != _renamed(stored, bare_name):
        with suppress(OutputError):
            write_text(json.dumps(paths), _paths_file(masks))


def local_provenance(masks: Path) -> dict[str, Any]:
    """Return the provenance in a masks file, with the paths that this machine stored."""
    provenance = read_provenance(masks)
    with suppress(OSError, ValueError, OutputError):
        paths = json.loads(_paths_file(masks).read_text(encoding="utf-8"))
        recovery = {name: provenance[name] | paths[name] for name in ("recovery",) if name in paths}
        return provenance | paths | recovery
    return provenance


def provenance_of(folder: Path) -> dict[str, Any]:
    """Return the provenance of a pruned folder; {} if there is no such folder or its masks file
    cannot be read."""
    try:
        return read_provenance(folder / MASKS_FILE)
    except CheckpointError:
        return {}


def _paths_file(masks: Path) -> Path:
    return cache_folder() / "origins" / f"{sha256(masks)}.json"
