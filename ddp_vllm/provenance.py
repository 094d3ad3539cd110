"""What a checkpoint says of the models and texts it was made of: their names, never where they lie.

A folder that is published tells nothing of the machine it was made on. Where things are is kept in the cache of that
machine, by the hash of the masks, so that `recover` and `compare` find the dense model and the text again.
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

PLACES = ("model", "teacher", "data", "watch", "profile")  # settings that may hold paths, `data` and `watch` several


def is_hub_name(name: str) -> bool:
    """Tell whether this is a name on the hub, OWNER/NAME, and no path; either may have turns, `:3`."""
    here = any(map(os.path.exists, (name, name.rpartition(":")[0])))
    return name.count("/") == 1 and not name.startswith((".", "/", "~")) and not here


def bare_name(name: str) -> str:
    """Return the last part of a path; a name on the hub as it is. Of several by commas, each."""
    names = [name] if os.path.exists(name) else name.split(",")
    return ",".join(each if is_hub_name(each) else each.rstrip("/").rpartition("/")[2] for each in names)


def published_recipe(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe with names in place of paths."""
    names = {key for key, value in recipe.items() if key in PLACES and isinstance(value, str)}
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
    """Keep where the models and texts of a masks file are, unless it says so itself or nothing can be kept."""
    places = {part: provenance[part] for part in ("recipe", "texts", "applied_to") if part in provenance}
    if places != published(places):
        with suppress(OutputError):
            write_text(json.dumps(places), _kept(masks))


def local_provenance(masks: Path) -> dict[str, Any]:
    """Return what a masks file says about its making, with paths where this machine knows them."""
    provenance = read_provenance(masks)
    with suppress(OSError, ValueError, OutputError):
        return provenance | json.loads(_kept(masks).read_text(encoding="utf-8"))
    return provenance


def _kept(masks: Path) -> Path:
    return cache_folder() / "origins" / f"{sha256(masks)}.json"
