"""What all steps of the kit share: results saved after every row, time on a GPU, and the dry run on
a CPU.

`LEASE_DRY=1` makes every step run on a CPU in tiny sizes, so that a change of the product that
breaks the kit is seen.
"""

import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

DRY = bool(os.environ.get("LEASE_DRY"))
DEVICE = "cpu" if DRY else "cuda"
# several engines, one after the other in a process
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
ENDS = float(os.environ.get("LEASE_ENDS", "inf"))  # of the wall clock, in seconds


class Results(dict[str, Any]):
    """A JSON file that is written again after every row, so that a step that is killed keeps its
    rows."""

    def __init__(self, path: Path | str, **facts: Any) -> None:
        name = "cpu (dry run)" if DRY else torch.cuda.get_device_name()
        super().__init__(device=name, torch=torch.__version__, **facts, complete=False)
        self.path = Path(path)

    def save(self, **facts: Any) -> None:
        """Add facts and write the file."""
        self.update(facts)
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(self, indent=1, default=str))
        partial.replace(self.path)

    @contextmanager
    def row(self, **facts: Any) -> Iterator[dict[str, Any]]:
        """Add a row; if the block fails, the row says why, and later rows still run. When the time of
        this step is over, end it instead."""
        if time.time() > ENDS:
            self.finish(complete=False)
        row, began = dict(facts), time.perf_counter()
        try:
            yield row
        except Exception as error:
            row["failed"] = f"{type(error).__name__}: {str(error)[:400]}"
            row["trace"] = traceback.format_exc()[-1500:]
        row["took_seconds"] = time.perf_counter() - began
        self.setdefault("rows", []).append(row)
        self.save()
        print({name: value for name, value in row.items() if len(str(value)) < 500}, flush=True)

    def finish(self, complete: bool = True) -> None:
        """Save and exit; with 1 if something was left out, failed or was wrong."""
        rows = self.get("rows", [])
        self.save(complete=complete and not any("failed" in row or row.get("right") is False for row in rows))
        sys.exit(not self["complete"])


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if not DRY:
        torch.cuda.synchronize()


def seconds_of(call: Callable[[], Any], rounds: int = 9, inner: int = 5) -> float:
    """Return the median time of a call, between events on the GPU."""
    if DRY:
        began = time.perf_counter()
        call()
        return time.perf_counter() - began
    times = []
    for _ in range(rounds):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        call()  # keeps the GPU busy while the next calls are launched
        start.record()
        for _ in range(inner):
            call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / inner)
    return statistics.median(times[1:] or times)


def error_of(values: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the norm of the difference over the norm of the expected values."""
    difference = values.double() - expected.double()
    return float(difference.norm() / expected.double().norm().clamp_min(1e-30))
