"""The question: what does a step of vLLM cost on this machine, by the widths of a model's layers?

Models of other widths are made without weights (`ddp_vllm/latency.py` says which, and what follows from them), and each
is served by an engine of its own, alone, as a pruned model would be. All take turns in every round, each round
beginning with the next, so a slow minute slows none of them alone. What is measured is written after every engine; the
same command goes on from there.
"""

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ddp_benchmarks.engine import Engine, model_arguments, vllm_command
from ddp_benchmarks.protocol import check_lowest, new_results, rotated
from ddp_vllm.checkpoint import read_config
from ddp_vllm.errors import ModelError, ServingError, SettingError
from ddp_vllm.facts import local_folder
from ddp_vllm.families import pruned_config
from ddp_vllm.latency import FORMAT, Workload, dimensions_in, read_profile, seconds_of, shapes_of
from ddp_vllm.output import check_file
from ddp_vllm.remote_code import FILES
from ddp_vllm.remote_code.widths import LayerWidths
from ddp_vllm.results import judge, write_results

STEPS_FORMAT = "ddp-vllm bench steps 1"
UNREST = 0.11  # between rounds, above which a profile says that it is unsure
NARROWEST = 128  # what the plugin may fill MLPs up to; timed widths are multiples


@dataclass(frozen=True, kw_only=True)
class ProfileSettings:
    """Every setting of a profile; saved in it."""

    model: str
    batches: tuple[int, ...] = (8,)
    """Sequences served at once."""
    contexts: tuple[int, ...] = (2048,)
    """Tokens of each."""
    steps: int = 32
    """Decode steps of a measurement; their median counts."""
    rounds: int = 3
    engine_arguments: tuple[str, ...] = ()
    """Passed to every vLLM engine as they are."""

    def check(self) -> None:
        """Raises: SettingError naming the value and its range."""
        check_lowest(self, steps=4, rounds=1)
        for name, values, low in (("batch", self.batches, 1), ("context", self.contexts, 2 * self.steps)):
            if not values or min(values) < low:
                raise SettingError(f"--{name} {','.join(map(str, values))} goes below {low}")


def run_profile(settings: ProfileSettings, output: Path, *, overwrite: bool, say: Callable[[str], None]) -> None:
    """Time every shape in every round and write the profile to `output`.

    Raises: ServingError when an engine fails, after what was measured is written; SettingError, ModelError, OutputError
    before any engine starts.
    """
    settings.check()
    vllm_command()
    folder = local_folder(settings.model) or _downloaded(settings.model)
    config = read_config(folder)
    shapes = shapes_of(config, NARROWEST if config.get("intermediate_size", 0) >= 4 * NARROWEST else 1)
    results = _begun(settings, config, shapes, output, overwrite=overwrite)
    done = {(run["round"], run["shape"]) for run in results["times"]}
    scratch = Path(tempfile.mkdtemp(prefix="ddp-vllm-profile-"))
    for turn in range(settings.rounds):
        for name in rotated(list(shapes), turn):
            if (turn, name) in done:
                continue
            say(f"round {turn + 1} of {settings.rounds}: {name}")
            model = _without_weights(folder, config, shapes[name], scratch / name.replace(" ", "-"))
            found = measure_steps(
                model, settings.batches, settings.contexts, settings.steps, scratch,
                ["--load-format", "dummy", "--skip-tokenizer-init", *settings.engine_arguments],
            )  # fmt: skip
            results["times"].append({"round": turn, "shape": name, "cells": found["cells"]})
            if shapes[name]:  # the dense model's own classes fill nothing up
                results["multiple"] = found["multiple"]
            results |= {key: found[key] for key in ("compiled", "dtype")}
            results["complete"] = len(results["times"]) == settings.rounds * len(shapes)
            write_results(results, output)
    shutil.rmtree(scratch, ignore_errors=True)


def _begun(
    settings: ProfileSettings,
    config: Mapping[str, Any],
    shapes: Mapping[str, Sequence[LayerWidths] | None],
    output: Path,
    *,
    overwrite: bool,
) -> dict[str, Any]:
    """Return an unfinished profile of the same settings on this machine, or a new one. Raises: OutputError."""
    new = new_results(FORMAT, asdict(settings))
    new |= {"complete": False, "multiple": 1, "model": dimensions_in(config), "config": dict(config), "times": []}
    new["shapes"] = list(shapes)
    new = json.loads(json.dumps(new))
    try:
        found = json.loads(output.read_text(encoding="utf-8"))
        same = all(found[key] == new[key] for key in ("format", "settings", "model", "versions", "shapes"))
        if same and not found["complete"] and found["hardware"]["cpu"] == new["hardware"]["cpu"]:
            return dict(found)
    except (OSError, ValueError, KeyError, TypeError):
        pass
    check_file(output, overwrite=overwrite)
    return dict(new)


def measure_steps(
    model: str, batches: Sequence[int], contexts: Sequence[int], steps: int, scratch: Path, arguments: Sequence[str]
) -> dict[str, Any]:
    """Return what an engine of a model measured of its steps (`steps.py`). Raises: ServingError."""
    cells = ",".join(f"{batch}x{context}" for batch in batches for context in contexts)
    output = scratch / "steps.json"
    output.unlink(missing_ok=True)
    # a batch is read at once where vLLM's own limit allows, and all of it runs together
    engine = ["--max-model-len", str(max(contexts)), "--max-num-seqs", str(max(batches)), "--no-enable-prefix-caching"]
    words = [model, "--cells", cells, "--steps", str(steps), "--output", str(output), *engine, *arguments]
    with Engine(words, log=scratch / "engine.log", module="ddp_benchmarks.steps") as process:
        process.wait()
    try:
        return dict(json.loads(output.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise ServingError(f"the engine of {model} measured nothing; its log is {scratch / 'engine.log'}") from error


def _without_weights(dense: Path, config: Mapping[str, Any], widths: Sequence[LayerWidths] | None, folder: Path) -> str:
    """Write a folder that vLLM can build a model of these widths from, but for its weights."""
    folder.mkdir(exist_ok=True)
    content = pruned_config(config, widths) if widths else config
    (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")
    if widths:
        for file in FILES:
            shutil.copyfile(file, folder / file.name)
    return str(folder)


def _downloaded(model: str) -> Path:
    """Return a folder with the config of a model on the hub. Raises: ModelError."""
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(model, "config.json")).parent
    except Exception as error:  # each of the hub's own kinds
        raise ModelError(f"{model} is no folder, and its config cannot be fetched ({error})") from error


def describe(path: Path) -> list[str]:
    """Return what a profile says, a line each."""
    profile = read_profile(path)
    cells = profile.content["times"][0]["cells"]
    lines = []
    for cell in cells:
        work = Workload(phase="decode", batch=cell["batch"], context=cell["context"])
        times = profile.undisturbed(work)
        rest = times.dense - times.prunable
        parts = [f"{rest / times.dense:.0%} outside the blocks"]
        for name in ("attention", "mlp", "experts"):
            if curve := getattr(times, name):
                fixed = curve.fixed / curve.points[-1][1] if curve.points[-1][1] else 0.0
                layers = len(times.sizes.routed_layers) or times.sizes.num_layers
                share = layers * curve.points[-1][1] / times.dense
                parts.append(f"{share:.0%} {name} (of it {fixed:.0%} whatever the width)")
        each = [one.dense for one in profile.times(work)]
        spread = f" [{min(each) * 1e3:.2f}, {max(each) * 1e3:.2f}]" if len(each) > 1 else ""
        lines.append(
            f"{work}: {times.dense * 1e3:.2f} ms{spread} a step; {', '.join(parts)}; at most {times.most:.2f}×"
        )
        if (unrest := profile.unrest(work)) > UNREST:
            lines.append(
                f"note: rounds differ by up to {unrest:.0%}, so a promise may be off by as much; measure again with "
                "nothing else running, or --rounds 5"
            )
    return lines


def compare_steps(
    dense: str, pruned: str, workload: Workload, pairs: int, arguments: Sequence[str], *, say: Callable[[str], None]
) -> dict[str, Any]:
    """Return how much faster a step of a pruned model is than the dense one's, from engines that take turns.

    Raises: ServingError if an engine fails.
    """
    vllm_command()
    scratch = Path(tempfile.mkdtemp(prefix="ddp-vllm-steps-"))
    seconds: dict[str, list[float]] = {"dense": [], "pruned": []}
    for turn in range(-1, pairs):  # the first round warms disk and compile caches
        for name, model in rotated([("dense", dense), ("pruned", pruned)], max(turn, 0)):
            say(f"{'warm-up' if turn < 0 else f'pair {turn + 1} of {pairs}'}: {name}")
            more = [*model_arguments(model), "--skip-tokenizer-init", *arguments]
            found = measure_steps(model, [workload.batch], [workload.context], 32, scratch, more)
            if turn >= 0:
                seconds[name].append(seconds_of(found["cells"], workload))
    shutil.rmtree(scratch, ignore_errors=True)
    settings = {"dense": dense, "pruned": pruned, "engine_arguments": list(arguments), "pairs": pairs}
    results = new_results(STEPS_FORMAT, settings) | {"workload": asdict(workload), "seconds": seconds}
    return results | judge(seconds["pruned"], seconds["dense"]).to_json()
