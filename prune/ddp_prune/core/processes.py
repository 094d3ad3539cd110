"""Several processes in one run: which runs first, errors that all of them raise, and tensors
sharded over them.

Processes are started by accelerate launch or torchrun.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.tracking import get_available_trackers
from accelerate.utils import broadcast_object_list, gather_object
from torch import distributed
from torch.distributed.tensor import DTensor

from ddp_vllm.errors import DdpError, SettingError
from ddp_vllm.settings import Settings

Found = TypeVar("Found")


def make_accelerator(output: Path, tracker: str | None) -> Accelerator:
    """Return the accelerator, which knows this process's device and rank. Raises: SettingError
    without the tracker."""
    trackers = [str(name) for name in get_available_trackers()]
    if tracker and tracker not in trackers:
        known = ", ".join(trackers) or "none; for example pip install tensorboard"
        raise SettingError(f"tracker is {tracker!r}, which is unknown or not installed; installed: {known}")
    # Without cpu=True, accelerate treats a CPU process that torchrun started as the only process.
    device = torch.accelerator.current_accelerator(check_available=True)
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
        table = value if isinstance(value, dict) else None
        values |= {name: value} if table is None else {f"{name}.{key}": setting for key, setting in table.items()}
    accelerator.init_trackers(project, config=values)


def finish_run(accelerator: Accelerator) -> None:
    """Close the trackers after all processes are done. The process group stays: the next verb uses
    it too."""
    accelerator.wait_for_everyone()  # the caller reads what the main process wrote
    for tracker in accelerator.trackers:
        tracker.finish()


def leave_group() -> None:
    """End the process group, at the end of a command that succeeded.

    After a failure torch may wait here for the other processes; then the launcher ends all of them.
    """
    if distributed.is_initialized():
        distributed.destroy_process_group()


@contextmanager
def raise_on_all_ranks(accelerator: Accelerator) -> Iterator[None]:
    """Wait for all processes after the block, and raise a DdpError in all of them if any of them
    raised one.

    Without this, the other processes would wait forever for the failed one. The block itself must
    not communicate. Any other exception ends its process at once, and the launcher ends the rest.
    """
    local: DdpError | None = None
    try:
        yield
    except DdpError as error:
        local = error
    raised: list[DdpError | None] = gather_object([local])
    if first := local or next(filter(None, raised), None):
        raise first


def main_process_first(accelerator: Accelerator, find: Callable[[], Found]) -> Found:
    """Return `find()` of each process. The first process of each machine runs it before the others,
    to fill the caches.

    Errors are raised as by `raise_on_all_ranks`.
    """
    for first in (True, False):
        with raise_on_all_ranks(accelerator):
            if accelerator.is_local_main_process == first:
                value = find()
    return value


def broadcast_from_main(accelerator: Accelerator, value: Found) -> Found:
    """Return the main process's `value` in all processes."""
    return broadcast_object_list([value])[0] if accelerator.num_processes > 1 else value


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the rows of a tensor that this process holds: all of them unless it is sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
