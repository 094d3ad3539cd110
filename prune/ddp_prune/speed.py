"""What a budget in measured time needs before a run, a profile of the machine, and what it promises afterwards."""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from ddp_prune.model import open_source
from ddp_prune.recipe import Recipe
from ddp_vllm import profile as measure
from ddp_vllm.cache import cache_folder
from ddp_vllm.errors import SettingError
from ddp_vllm.latency import FORMAT, read_profile
from ddp_vllm.machine import hardware, versions
from ddp_vllm.output import make_folder
from ddp_vllm.remote_code.widths import LayerWidths


def with_profile(recipe: Recipe, *, verbose: bool) -> Recipe:
    """Return the recipe with the profile that its budget needs; without one it is measured, and kept for other runs.

    It is kept by the model's config, which is all that an engine without weights is built from: a copy elsewhere finds
    it again, and a folder that holds another model since does not.
    Raises: ModelError; SettingError for a profile of another machine; ServingError if measuring fails.
    """
    if recipe.budget != "latency":
        return recipe
    if not recipe.profile:
        work, here, source = recipe.workload, hardware(), open_source(recipe.model)
        facts = json.dumps(
            [FORMAT, source.config, work.batch, work.context, here["cpu"], here["cores"], here["gpus"], versions()],
            sort_keys=True,
        )
        path = cache_folder() / "profiles" / f"{hashlib.sha256(facts.encode()).hexdigest()[:16]}.json"
        if not _is_measured(path):
            make_folder(path.parent)
            there = {"batches": (work.batch,), "contexts": (work.context,)}
            measure(source.folder, output=path, overwrite=True, verbose=verbose, **there)
        recipe = dataclasses.replace(recipe, profile=str(path))
    profile = read_profile(Path(recipe.profile))
    if not recipe.other_machine:
        profile.check_here(hardware())
    return recipe


def _is_measured(path: Path) -> bool:
    """Tell whether a profile was measured before, to its end, and can be read."""
    try:
        return bool(read_profile(path))
    except SettingError:
        return False


def predicted(recipe: Recipe, widths: list[LayerWidths]) -> dict[str, Any]:
    """Return what a budget in measured time promises, for the provenance; {} for another budget."""
    if recipe.budget != "latency":
        return {}
    profile = read_profile(Path(recipe.profile))
    speedup, low, high = profile.speedup(widths, recipe.workload)
    where = {"hardware": profile.content["hardware"], "versions": profile.content["versions"]}
    workload = dataclasses.asdict(recipe.workload)
    return {"latency": {"speedup": speedup, "low": low, "high": high, "workload": workload, **where}}
