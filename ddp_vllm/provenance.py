"""The provenance in a checkpoint names models and texts without their paths.

A published folder tells nothing about the machine it was made on. The cache of that machine keeps the paths, by the
hash of the masks file, so that `recover` and `compare` find the dense model and the text again.
"""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ddp_vllm.cache import cache_folder
from ddp_vllm.errors import OutputError
from ddp_vllm.manifest import sha256
from ddp_vllm.masks import read_provenance
from ddp_vllm.output import write_text

PATHS = ("model", "teacher", "data", "watch", "profile")  # settings that may hold paths; `data` and `watch` several


def is_hub_name(name: str) -> bool:
    """Tell whether this is a name on the hub, OWNER/NAME, and not a path; both may end with a weight such as `:3`."""
    here = any(map(os.path.exists, (name, name.rpartition(":")[0])))
    return name.count("/") == 1 and not name.startswith((".", "/", "~")) and not here


def bare_name(name: str) -> str:
    """Return a path's last part, and a name on the hub unchanged; of several names separated by commas, each."""
    names = [name] if os.path.exists(name) else name.split(",")
    return ",".join(each if is_hub_name(each) else each.rstrip("/").rpartition("/")[2] for each in names)


def published_recipe(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe with names in place of paths."""
    names = {key for key, value in recipe.items() if key in PATHS and isinstance(value, str)}
    return {key: bare_name(value) if key in names else value for key, value in recipe.items()}


def published(provenance: Mapping[str, Any]) -> dict[str, Any]:
    """Return provenance with names in place of paths."""
    found = dict(provenance)
    if "recipe" in found:
        found["recipe"] = published_recipe(found["recipe"])
    if "texts" in found:
        found["texts"] = list(map(bare_name, found["texts"]))
    if "applied_to" in found:
        found["applied_to"] = bare_name(found["applied_to"])
    if "watched" in found:
        found["watched"] = {bare_name(name): quality for name, quality in found["watched"].items()}
    if "recovery" in found:
        found["recovery"] = published(found["recovery"])
    return found


def remember(masks: Path, provenance: Mapping[str, Any]) -> None:
    """Keep the paths of models and texts in the cache, if the masks file leaves them out and the cache is writable."""
    places = {part: provenance[part] for part in ("recipe", "texts", "applied_to") if part in provenance}
    if places != published(places):
        with suppress(OutputError):
            write_text(json.dumps(places), _kept(masks))


def local_provenance(masks: Path) -> dict[str, Any]:
    """Return the provenance in a masks file, with the paths that this machine knows."""
    provenance = read_provenance(masks)
    with suppress(OSError, ValueError, OutputError):
        return provenance | json.loads(_kept(masks).read_text(encoding="utf-8"))
    return provenance


def _kept(masks: Path) -> Path:
    return cache_folder() / "origins" / f"{sha256(masks)}.json"
