"""The devices of a run: the accelerator and its tracker, and their free memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.tracking import get_available_trackers
from accelerate.utils import get_max_memory
from torch import distributed

from ddp_vllm.errors import SettingError, TrainingError
from ddp_vllm.settings import Settings

CONTROL_GROUP = Path("/sys/fs/cgroup")  # of a container, as seen from inside


def make_accelerator(output: Path, tracker: str | None) -> Accelerator:
    """Return the accelerator, which knows this process's device and rank. Raises: SettingError
    without the tracker."""
    trackers = [str(name) for name in get_available_trackers()]
    if tracker and tracker not in trackers:
        known = ", ".join(trackers) or "none; for example pip install tensorboard"
        raise SettingError("tracker", f"is {tracker!r}, which is unknown or not installed; installed: {known}")
    # Without cpu=True, accelerate treats a CPU process that torchrun started as the only process.
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is not None and device.type not in ("cuda", "mps"):
        raise TrainingError(
            f"torch computes on {device.type}, which ddp-vllm does not support; use an environment with torch for CUDA "
            "or CPUs"
        )
    # Apple GPUs lack float64, in which gradients are summed
    on_cpu = device is None or device.type == "mps"
    # Other ranks wait while the first one downloads and tokenizes; torch's default timeout is ten
    # minutes.
    timeout = InitProcessGroupKwargs(timeout=timedelta(hours=6))
    return Accelerator(cpu=on_cpu, log_with=tracker, project_dir=str(output.parent), kwargs_handlers=[timeout])


def describe_device(accelerator: Accelerator) -> str:
    """Return a line that names the device, and says when no GPU was found."""
    if accelerator.device.type == "cpu":
        return f"device: CPU, {torch.get_num_threads()} threads: torch {torch.__version__} found no GPU; this is slow"
    gib = torch.cuda.get_device_properties(accelerator.device).total_memory / 2**30
    return f"device: {accelerator.num_processes} × {torch.cuda.get_device_name(accelerator.device)}, {gib:.0f} GiB each"


def start_tracker(accelerator: Accelerator, project: str, settings: Settings) -> None:
    """Open the accelerator's tracker, if it has one, with settings as flat values, as trackers
    require."""
    values: dict[str, Any] = {}
    for name, value in settings.to_dict().items():
        if isinstance(value, dict):
            values |= {f"{name}.{key}": setting for key, setting in value.items()}
        else:
            values[name] = value
    accelerator.init_trackers(project, config=values)


def finish_run(accelerator: Accelerator) -> None:
    """Close the trackers. The process group stays: the next verb uses it too."""
    for tracker in accelerator.trackers:
        tracker.finish()


def leave_group() -> None:
    """End the process group, at the end of a command that succeeded.

    After a failure torch may wait here for the other processes; then the launcher ends all of them.
    """
    if distributed.is_initialized():
        distributed.destroy_process_group()


@contextmanager
def explained(message: str) -> Iterator[None]:
    """Turn a lack of memory in the block, outside of a step, into an error of the user.
    Raises: TrainingError."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise TrainingError(message) from error


def free_memory(accelerator: Accelerator) -> int:
    """Return the free bytes per process, of the process with the least. All processes must call
    this together."""
    if (device := accelerator.device).type == "cuda":
        # torch reuses memory that it keeps
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free = torch.cuda.mem_get_info(device)[0] + cached
    else:
        memory = get_max_memory()
        host = int(memory.get("cpu", memory.get("mps", 0)))  # a Mac's memory is listed once
        free = min(host, _container_memory(host)) // accelerator.num_processes
    return int(accelerator.gather(torch.tensor([free], device=device)).min())


def _container_memory(otherwise: int) -> int:
    """Return the bytes that a container (Linux control groups, version 2) may still use; psutil
    sees only the host.

    The page cache counts as free, because the kernel reclaims it. Outside a container this is
    `otherwise`.
    """
    try:
        limit, used = ((CONTROL_GROUP / name).read_text(encoding="utf-8") for name in ("memory.max", "memory.current"))
        statistics = (CONTROL_GROUP / "memory.stat").read_text(encoding="utf-8")
        if limit.strip() == "max":
            return otherwise
        cached = dict(line.split() for line in statistics.splitlines())["inactive_file"]
        return max(0, int(limit) - int(used) + int(cached))
    except (OSError, KeyError, ValueError):
        return otherwise
