"""The memory of devices: what is free, what was used at most, and what a model stores between forward and
backward."""

import ctypes
import gc
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import get_max_memory
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from ddp_vllm.errors import TrainingError

CONTROL_GROUP = Path("/sys/fs/cgroup")  # of a container, as seen from inside
EAGER_TOKENS = 512  # longest sequence for which eager attention is faster than SDPA on a CPU


def fit_attention(model: Any, seq_len: int, device: torch.device) -> None:
    """Use eager attention for short bfloat16 sequences on a CPU, where SDPA's backward is slow.

    Models whose keys have a bias, such as Qwen2, keep SDPA: their large products lose too much
    precision in bfloat16.
    """
    short = device.type == "cpu" and model.dtype == torch.bfloat16 and seq_len <= EAGER_TOKENS
    biased = any("k_proj" in name and name.endswith("bias") for name, _ in model.named_parameters())
    if short and not biased and model.config._attn_implementation == "sdpa":
        model.set_attn_implementation("eager")


def checkpoint_layers(model: torch.nn.Module, checkpointed: bool) -> None:
    """Switch checkpointing of the decoder layers on or off.

    transformers checkpoints layers in training mode only. The modules inside stay in eval mode, so
    dropout stays off. Reentrant checkpointing would lose gradients, because the gates are not
    arguments of the layers.
    """
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.gradient_checkpointing = layer.training = checkpointed
            layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)


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
        # torch reuses it
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free = torch.cuda.mem_get_info(device)[0] + cached
    else:
        memory = get_max_memory()
        host = int(memory.get("cpu", memory.get("mps", 0)))  # a Mac's memory is listed once
        free = min(host, _container_memory(host)) // accelerator.num_processes
    return _least(free, accelerator)


def _least(number: int, accelerator: Accelerator) -> int:
    return int(accelerator.gather(torch.tensor([number], device=accelerator.device)).min())


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


def reset_peak(device: torch.device) -> float:
    """Start measuring `peak_bytes`; return the bytes in use, or NaN on a CPU without Linux."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)  # memory that loading has freed
        Path("/proc/self/clear_refs").write_text("5")
    except (OSError, AttributeError):
        return math.nan
    return _resident("VmRSS")


def peak_bytes(device: torch.device) -> float:
    """Return the most bytes since `reset_peak`: of the GPU's allocator, or the whole process's
    resident memory."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _resident("VmHWM")


def _resident(field: str) -> float:
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return math.nan
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))
