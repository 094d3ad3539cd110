"""Several processes with one fate, whatever starts them: accelerate launch, or torchrun on a CPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object, get_max_memory

from ddp_prune.run_state import RunState
from ddp_vllm.errors import DdpError

CONTROL_GROUP = Path("/sys/fs/cgroup")  # of a container, as seen from inside
USABLE = 0.8  # of free memory: what a step takes is an estimate, and memory breaks into pieces


@contextmanager
def failing_together(accelerator: Accelerator) -> Iterator[None]:
    """Wait for all processes after the block, and raise in each the DdpError that any of them met there.

    Without it the others would wait for the failed one in their next exchange. The block itself must not wait for
    other processes. Any other exception ends its process at once, and what launched them ends the rest.
    """
    own: DdpError | None = None
    try:
        yield
    except DdpError as error:
        own = error
    met: list[DdpError | None] = gather_object([own])
    if first := own or next(filter(None, met), None):
        raise first


def load_run(run: RunState, accelerator: Accelerator) -> tuple[int, dict[str, torch.Tensor], dict[str, Any]] | None:
    """Return what the main process finds of an interrupted run; the others may not see its disk."""
    found = [run.load() if accelerator.is_main_process else None]
    return broadcast_object_list(found)[0] if accelerator.num_processes > 1 else found[0]


def free_memory(accelerator: Accelerator) -> int:
    """Return the bytes that are free for this process where it computes."""
    if (device := accelerator.device).type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # by torch, which reuses it
        return torch.cuda.mem_get_info(device)[0] + cached
    memory = get_max_memory()
    host = int(memory.get("cpu", memory.get("mps", 0)))  # a Mac's is counted once
    return min(host, _container_memory(host)) // accelerator.num_processes


def _container_memory(otherwise: int) -> int:
    """Return the bytes that a container may still take, `otherwise` outside one; psutil sees the host's.

    Version 2 of Linux control groups; what files are only cached, the kernel gives back.
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
