"""Names of the models and texts that a checkpoint was made from, without their paths.

A published folder reveals nothing about the machine that made it. That machine keeps the paths in
its cache, by the hash of the masks, so that `recover` and `compare` find the dense model and the
text again.
"""

import json
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ddp_vllm import __version__
from ddp_vllm.cache import cache_folder, sha256
from ddp_vllm.errors import CheckpointError, OutputError
from ddp_vllm.masks import MASKS_FILE, masks_metadata, read_provenance
from ddp_vllm.output import write_text

# settings that may hold paths; `data` and `watch` several
PATHS = ("model", "teacher", "data", "watch", "profile")


def identity_of(source: str) -> str:
    """Return what two names of one text share: the real path of a file, or a hub dataset with its
    split."""
    if os.path.exists(source):
        return os.path.realpath(source)
    name, configuration, split = [*source.split(":", 2), "", ""][:3]
    return f"{name}:{configuration}:{split or 'train'}"


def split_sources(data: str) -> list[tuple[str, int]]:
    """Return each name in a comma-separated list of texts with its number of turns: 3 for `NAME:3`,
    1 for `NAME`.

    The name of an existing file may itself contain commas and colons.
    """
    names = [data] if os.path.exists(data) else [name.strip() for name in data.split(",")]
    sources = []
    for name in names:
        plain, _, turns = name.rpartition(":")
        has_turns = plain and re.fullmatch("[1-9][0-9]?", turns) and not os.path.exists(name)
        sources.append((plain, int(turns)) if has_turns else (name, 1))
    return sources


def is_hub_name(name: str) -> bool:
    """Tell whether this is a name on the hub, OWNER/NAME, and not a path."""
    return name.count("/") == 1 and not name.startswith((".", "/", "~")) and not os.path.exists(name)


def bare_name(name: str) -> str:
    """Return names as given, separated by commas, but paths without their folders."""
    return ",".join(
        (plain if is_hub_name(plain) else plain.rstrip("/").rpartition("/")[2]) + (f":{turns}" if turns > 1 else "")
        for plain, turns in split_sources(name)
    )


def published_recipe(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe with names in place of paths."""
    paths = {key: bare_name(value) for key, value in recipe.items() if key in PATHS and isinstance(value, str)}
    return {**recipe, **paths}


def published(provenance: Mapping[str, Any]) -> dict[str, Any]:
    """Return provenance with names in place of paths."""
    names: dict[str, Callable[[Any], Any]] = {
        "recipe": published_recipe,
        "texts": lambda texts: list(map(bare_name, texts)),
        "applied_to": bare_name,
        "watched": lambda texts: {bare_name(name): quality for name, quality in texts.items()},
        "recovery": published,
    }
    return {key: names[key](value) if key in names else value for key, value in provenance.items()}


def write_provenance(masks: Path, provenance: Mapping[str, Any]) -> None:
    """Write a masks file without masks, where it is not known which units were removed, or none
    were."""
    from safetensors.numpy import save_file

    header = {"ddp_vllm": __version__, **published(provenance)}
    save_file({}, masks, masks_metadata(header, {}))
    remember(masks, provenance)


def remember(masks: Path, provenance: Mapping[str, Any]) -> None:
    """Store the paths of a masks file's models and texts in the cache, if there are any and it can
    be written."""
    paths = {part: provenance[part] for part in ("recipe", "texts", "applied_to") if part in provenance}
    if paths != published(paths):
        with suppress(OutputError):
            write_text(json.dumps(paths), _paths_file(masks))


def local_provenance(masks: Path) -> dict[str, Any]:
    """Return the provenance in a masks file, with the paths that this machine stored."""
    provenance = read_provenance(masks)
    with suppress(OSError, ValueError, OutputError):
        return provenance | json.loads(_paths_file(masks).read_text(encoding="utf-8"))
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
