"""How long does a step of vLLM take on this machine, by the widths of a model's layers?

`ddp_vllm/latency.py` defines the models of other widths, which have no weights, and derives costs
from their times. Each is served as a pruned model would be, by an engine that takes turns with an
engine of the dense model (`side_by_side.py`). Results are saved after every engine, and the same
command resumes.
"""

import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ddp_benchmarks.engine import vllm_command
from ddp_benchmarks.protocol import check_engine_arguments
from ddp_benchmarks.side_by_side import TURN, StepEngine, largest_of, take_turns
from ddp_vllm.checkpoint import read_stock_config
from ddp_vllm.dimensions import widths_of
from ddp_vllm.errors import ModelError, Printer, SettingError
from ddp_vllm.families import check_supported, code_of, pruned_config
from ddp_vllm.latency import FORMAT, read_profile, shapes_of
from ddp_vllm.machine import Workload
from ddp_vllm.model_facts import local_folder
from ddp_vllm.output import check_file
from ddp_vllm.remote_code.tensors import Config
from ddp_vllm.remote_code.widths import LayerWidths
from ddp_vllm.results import BEGINS, new_results, write_results
from ddp_vllm.settings import Settings, setting

UNREST = 0.05  # spread between rounds above which `describe` adds a note


@dataclass(frozen=True, kw_only=True)
class ProfileSettings(Settings):
    """Every setting of a profile; saved in it."""

    model: str
    concurrency: tuple[int, ...] = setting((8,), "Sequences served at once.", least=1)
    context_length: tuple[int, ...] = setting((2048,), "Tokens per sequence.")
    rounds: int = setting(2, "Measurements of each shape.", least=1)
    steps: int = setting(96, f"Decode steps per round, in turns of {TURN}; a remainder is left out.", least=TURN)
    engine_arguments: tuple[str, ...] = setting((), "Passed to every vLLM engine.", is_argument=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_engine_arguments(self.engine_arguments, "--model", "--load-format")
        if not self.concurrency:
            raise SettingError("concurrency", "is empty; pass a number")
        if min(self.context_length, default=0) < self.steps:
            lengths = ",".join(map(str, self.context_length))
            raise SettingError("context_length", f"is {lengths}; it must be at least the {self.steps} steps of a round")


def run_profile(settings: ProfileSettings, output: Path, *, overwrite: bool, print_line: Printer) -> None:
    """Time every shape in every round and write the profile to `output`.

    Raises: ServingError if an engine fails, after saving the results so far; SettingError,
    ModelError, OutputError before any engine starts.
    """
    vllm_command()
    folder = local_folder(settings.model) or _downloaded(settings.model)
    config = read_stock_config(folder)
    check_supported(config)
    shapes = shapes_of(config)
    results = _resumed(settings, config, shapes, output, overwrite=overwrite)
    done = {run["shape"] for run in results["times"]}
    if missing := [name for name in shapes if name not in done]:
        scratch = Path(tempfile.mkdtemp(prefix="ddp-vllm-profile-"))
        arguments = ["--load-format", "dummy", *settings.engine_arguments]
        largest = largest_of(settings.concurrency, settings.context_length, settings.steps)
        print_line("starting the engine of the dense model")
        model = _without_weights(folder, config, None, scratch / "dense")
        with StepEngine(model, arguments, largest=largest, log=scratch / "dense.log") as dense:
            dense.wait_for_model()
            for name in missing:
                print_line(f"{len(done) + missing.index(name) + 1} of {len(shapes)}: {name}")
                model = _without_weights(folder, config, shapes[name], scratch / name.replace(" ", "-"))
                with StepEngine(model, arguments, largest=largest, log=scratch / "engine.log") as other:
                    results["times"] += _rounds(name, {"dense": dense, name: other.wait_for_model()}, settings)
                results |= other.model_facts
                results["complete"] = len(results["times"]) == settings.rounds * len(shapes)
                write_results(results, output)
        shutil.rmtree(scratch, ignore_errors=True)


def _rounds(name: str, engines: Mapping[str, StepEngine], settings: ProfileSettings) -> list[dict[str, Any]]:
    """Time a shape and the dense model in turns; return every round after a warm-up round."""
    rounds = []
    for turn in range(-1, settings.rounds):
        cells = [
            take_turns(engines, Workload(phase="decode", batch=batch, context=context), settings.steps, max(turn, 0))
            for batch in settings.concurrency
            for context in settings.context_length
        ]
        dense, other = ([cell[one] for cell in cells] for one in engines)
        rounds.append({"round": turn, "shape": name, "cells": other, "dense": dense})
    return rounds[1:]


def _resumed(
    settings: ProfileSettings, config: Config, shapes: Mapping[str, Sequence[LayerWidths]], output: Path,
    *, overwrite: bool,
) -> dict[str, Any]:  # fmt: skip
    """Return an unfinished profile of the same settings on this machine, or a new one. Raises:
    OutputError."""
    new = new_results(FORMAT, asdict(settings))
    new |= {"complete": False, "multiple": 1, "config": dict(config), "times": []}
    new["shapes"] = list(shapes)
    new = json.loads(json.dumps(new))
    try:
        saved = json.loads(output.read_text(encoding="utf-8"))
        same = ("format", "settings", "config", "hardware", "versions", "shapes")
        if all(saved[key] == new[key] for key in same) and not saved["complete"]:
            return dict(saved)
    except (OSError, ValueError, KeyError, TypeError):
        pass
    check_file(output, overwrite=overwrite, begins=BEGINS)
    return dict(new)


def _without_weights(dense: Path, config: Config, widths: Sequence[LayerWidths] | None, folder: Path) -> str:
    """Write a folder without weights from which vLLM can build a model of these widths."""
    folder.mkdir(exist_ok=True)
    content = pruned_config(config, replace(widths_of(config), layers=tuple(widths))) if widths else config
    (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")
    for file in code_of(content):
        shutil.copyfile(file, folder / file.name)
    return str(folder)


def _downloaded(model: str) -> Path:
    """Return a folder with the config of a model on the Hub. Raises: ModelError."""
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(model, "config.json")).parent
    except Exception as error:  # many kinds of errors of the Hub
        raise ModelError(f"{model} is not a folder, and its config cannot be downloaded ({error})") from error


def describe(path: Path) -> list[str]:
    """Summarize a profile in one line per workload, with a note where rounds differ."""
    profile = read_profile(path)
    lines = []
    for cell in profile.runs[0].cells:
        work = Workload(phase="decode", batch=cell.batch, context=cell.context)
        times = profile.times(work)
        layers = len(times.sizes.routed_layers) or times.sizes.num_layers
        shares = (f"{layers * curve.points[-1][1] / times.dense:.0%} {name}" for name, curve in times.curves.items())
        most = times.max_speedup(times.curves)
        lines.append(f"{work}: {times.dense * 1e3:.2f} ms per step; {', '.join(shares)}; at most {most:.2f}×")
        if times.mixture:
            lines.append(
                f"layers that differ take longer than they do alone: {times.mixture / times.dense:.1%} of a step for "
                "each further number of KV heads"
            )
        if (unrest := profile.spread(work)) > UNREST:
            lines.append(
                f"note: rounds differ by up to {unrest:.0%} of a step, and so may predicted speedups; measure again "
                "with nothing else running, or with --rounds 5"
            )
    return lines
