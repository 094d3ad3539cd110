"""The latency profile of the budget `latency`: found or measured before a run, used for a
prediction after it."""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ddp_vllm.cache import cache_folder
from ddp_vllm.errors import SettingError
from ddp_vllm.latency import FORMAT, Profile, read_profile
from ddp_vllm.machine import Workload, hardware, versions
from ddp_vllm.output import make_folder
from ddp_vllm.remote_code.widths import LayerWidths

Measure = Callable[..., Profile]
"""`ddp_vllm.profile`, or a function with its arguments; this module does not import the benchmarks.
"""


def find_profile(
    path: str, model: Path, config: Mapping[str, Any], workload: Workload, measure: Measure, *, other_machine: bool
) -> Profile:
    """Return the latency profile of a model on this machine, checked.

    path: the file to read; if empty, the profile is looked up in the cache, and measured if it is
        not there.
    model, config: the folder of the dense model and its config.
    other_machine: accept a profile that was measured on another machine.

    Raises: SettingError for a profile of another model or machine; ServingError if measuring fails.
    """
    profile = read_profile(Path(path)) if path else _cached_profile(model, config, workload, measure)
    if not other_machine:
        profile.check_here(hardware())
    profile.check_suits(config)
    return profile


def _cached_profile(model: Path, config: Mapping[str, Any], workload: Workload, measure: Measure) -> Profile:
    """Return the profile from the cache, after measuring it if necessary.

    The key contains the config, not the folder, because engines for profiling are built from the
    config alone: a copy of the model in another folder has the same profile, and another model in
    the same folder has not.
    """
    here = hardware()
    key = json.dumps(
        [FORMAT, config, workload.batch, workload.context, here["cpu"], here["cores"], here["gpus"], versions()],
        sort_keys=True,
    )
    path = cache_folder() / "profiles" / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
    try:
        return read_profile(path)
    except SettingError:  # not measured yet, or not to its end
        make_folder(path.parent)
        grid = {"concurrency": (workload.batch,), "context_length": (workload.context,)}
        return measure(model, output=path, overwrite=True, **grid)


def predicted_latency(profile: Profile, layers: Sequence[LayerWidths], workload: Workload) -> dict[str, Any]:
    """Return the predicted speedup of a pruned model as the provenance records it, with its range
    and conditions."""
    speedup, low, high = profile.speedup(layers, workload)
    prediction = {"speedup": speedup, "low": low, "high": high, "workload": dataclasses.asdict(workload)}
    return prediction | {"hardware": profile.hardware, "versions": profile.versions}
