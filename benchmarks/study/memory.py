"""Measures the most memory that a row of the study takes."""

import ctypes
import gc
import math
from pathlib import Path

import torch


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
