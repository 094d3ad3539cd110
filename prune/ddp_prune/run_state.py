"""What a run keeps on disk while it learns, so that an interrupted run goes on where it was.

`<output>.run/` holds `state.safetensors` (replaced as a whole, never half written) and `metrics.jsonl` (one line a
step). The same command finds it and goes on; the folder is removed when the checkpoint is written. Another command
for the same output starts anew and keeps what it finds as `<output>.run.old`.
"""

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ddp_prune.recipe import Recipe

STATE_FILE, METRICS_FILE = "state.safetensors", "metrics.jsonl"
STATE_FORMAT = 2  # which tensors a saved state has; one of another format is put aside


class RunState:
    """The folder of one run; only the main process writes."""

    def __init__(self, output: Path, recipe: Recipe, *, writes: bool = True) -> None:
        self.folder, self.recipe, self.writes = output.with_name(f"{output.name}.run"), recipe, writes
        self.state, self.metrics = self.folder / STATE_FILE, self.folder / METRICS_FILE

    def load(self) -> tuple[int, dict[str, torch.Tensor], dict[str, Any]] | None:
        """Return (next step, tensors, extra) of an interrupted run with the same recipe, or None to start anew."""
        try:
            with safe_open(self.state, framework="pt") as file:
                header = json.loads((file.metadata() or {})["run"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        except (OSError, SafetensorError, KeyError, ValueError):
            return None
        if header.get("format") != STATE_FORMAT or _settings(header["recipe"]) != _settings(self.recipe.to_dict()):
            return None
        if self.writes:
            lines = self.metrics.read_text(encoding="utf-8").splitlines() if self.metrics.exists() else []
            self.metrics.write_text("".join(f"{line}\n" for line in lines[: header["step"]]), encoding="utf-8")
        return header["step"], tensors, header["extra"]

    def start(self) -> None:
        """Put an older run aside."""
        if not self.writes:
            return
        if self.state.exists():
            old = self.folder.with_name(f"{self.folder.name}.old")
            shutil.rmtree(old, ignore_errors=True)
            os.replace(self.folder, old)
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)

    def save(self, step: int, tensors: dict[str, torch.Tensor], extra: dict[str, Any]) -> None:
        """Replace the saved state; `step` is the next one to do."""
        if not self.writes:
            return
        header = {"format": STATE_FORMAT, "step": step, "recipe": self.recipe.to_dict(), "extra": extra}
        temporary = self.state.with_suffix(".tmp")
        save_file({name: value.contiguous() for name, value in tensors.items()}, temporary, {"run": json.dumps(header)})
        os.replace(temporary, self.state)

    def log(self, metrics: dict[str, float]) -> None:
        """Append one step's metrics."""
        if self.writes:
            with open(self.metrics, "a", encoding="utf-8") as file:
                file.write(json.dumps(metrics) + "\n")

    def remove(self) -> None:
        """Delete the folder, after the checkpoint is safe."""
        if self.writes:
            shutil.rmtree(self.folder, ignore_errors=True)


def _settings(recipe: dict[str, Any]) -> dict[str, Any]:
    """Return what decides a run; settings that an older version did not know have their defaults."""
    known = {field.name: field.default for field in dataclasses.fields(Recipe)}
    return known | recipe | {"save_every": None}
