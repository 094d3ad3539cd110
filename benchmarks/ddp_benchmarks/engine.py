"""Starts, drives and stops vLLM engines, and leaves no process running.

vLLM is never imported here. Each engine runs in its own process group, so that one signal ends the
front end, the engine core and the workers, and a crash of vLLM becomes an error message. If we are
killed, the engines end too.
"""

import importlib.metadata
import importlib.util
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from ddp_benchmarks.processes import end_group, held_interrupts, kill_with_us
from ddp_vllm.errors import ServingError
from ddp_vllm.machine import has_bfloat16, versions

HOST = "127.0.0.1"
CPU_DEFAULTS = {
    # otherwise vLLM binds every engine of a small machine to core 0
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB, the same for every model
    # offline runs: no second process that competes for the cores
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # stores weights in 2 MB huge pages, which speeds up decoding
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
_ERROR = re.compile(  # pydantic writes the reason to the next line
    r"(?:^|[\s.])(\w*(?:Error|Exception)): (\d+ validation errors? for .*\n[^\n]*\n[^\n]*|[^\n]+)", re.MULTILINE
)
_LOG_PREFIX = re.compile(r"\(\w+ pid=\d+\)")
_FACTS = {  # numbers that vLLM logs
    "kv_cache_tokens": re.compile(r"KV cache size: ([\d,]+) tokens"),
    "weights_gib": re.compile(r"Model loading took ([\d.]+) GiB"),
    "weights_load_seconds": re.compile(r"Loading weights took ([\d.]+) seconds"),
    "init_engine_seconds": re.compile(r"init engine \(.*?\) took ([\d.]+) s"),
}


def vllm_command() -> list[str]:
    """Return the command of this Python's vLLM, independent of PATH.

    Raises: ServingError if vLLM or its distribution named vllm is not installed.
    """
    if importlib.util.find_spec("vllm") is None:
        raise ServingError(
            f'vLLM is not installed in {sys.prefix}; on a machine with a GPU: pip install ".[serve]" in a clone of '
            "ddp-vllm; on a machine without one: vLLM's CPU build"
        )
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        raise ServingError(
            "vLLM's command line requires a distribution named vllm, and only vllm-cpu is installed; "
            "install an empty one, as in requirements/stubs of ddp-vllm's source"
        ) from None
    return [sys.executable, "-m", "vllm.entrypoints.cli.main"]


def runs_on_cpu() -> bool:
    """Return whether the installed vLLM is the CPU build, by its distribution's name or version."""
    installed = versions()
    return "vllm-cpu" in installed or "cpu" in installed.get("vllm", "")


def number_format(arguments: Sequence[str]) -> list[str]:
    """Return vLLM's option for float32 on a processor that does not compute in bfloat16, unless the
    user passed a dtype, or the command is a client without a model."""
    is_slow = runs_on_cpu() and not has_bfloat16() and list(arguments[:2]) != ["bench", "serve"]
    return ["--dtype", "float32"] if is_slow and not any(word.startswith("--dtype") for word in arguments) else []


def engine_environment(cpu_defaults: Mapping[str, str] = CPU_DEFAULTS) -> dict[str, str]:
    """Return the environment of an engine: the user's variables, and defaults for those not set."""
    environment = dict(os.environ)
    for name, value in (cpu_defaults if runs_on_cpu() else {}).items():
        environment.setdefault(name, value)
    # otherwise vLLM reports its use over the network during a measurement
    environment.setdefault("DO_NOT_TRACK", "1")
    for name in ("NO_PROXY", "no_proxy"):  # the client must reach our own server without a proxy
        environment[name] = ",".join(filter(None, [environment.get(name), HOST, "localhost"]))
    return environment


def free_port() -> int:
    """Return a port that no program uses."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


class Engine:
    """A vLLM process with its children and its log.

    A context manager: leaving the block, also by an error or Ctrl-C, stops the whole process group.
    """

    streams: int | None = None
    """`subprocess.PIPE` for an engine with commands on standard input; its log is then only
    standard error."""
    cpu_defaults: Mapping[str, str] = CPU_DEFAULTS

    def __init__(self, arguments: Sequence[str], *, log: Path, module: str = "") -> None:
        """module: a module of ours that imports vLLM, run instead of vLLM's command line."""
        words = [*arguments, *number_format(arguments)]
        self.command = [sys.executable, "-m", module, *words] if module else [*vllm_command(), *words]
        self.log = log

    def __enter__(self) -> Self:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        try:
            with held_interrupts(), open(self.log, "wb") as output:
                self.process = subprocess.Popen(
                    self.command,
                    stdin=self.streams or subprocess.DEVNULL,
                    stdout=self.streams or output,
                    stderr=output,
                    env=engine_environment(self.cpu_defaults),
                    # its own process group, which Ctrl-C in our terminal does not reach
                    start_new_session=True,
                )
                self._release = kill_with_us(self.process.pid)
        except KeyboardInterrupt:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End every process of the group; processes that do not end within seconds are killed."""
        try:
            end_group(self.process.pid, self.process.poll)
        finally:
            self._release()

    def wait(self) -> None:
        """Wait for a tool that ends by itself. Raises: ServingError if it fails."""
        if self.process.wait():
            raise ServingError(f"{self.describe()} {self.failure()}")

    def describe(self) -> str:
        return "vllm " + " ".join(self.command[3:5])

    def failure(self) -> str:
        """Return a phrase with the exit code, the first informative error and the path of the
        log."""
        code = self.process.poll()
        how = "stopped" if code is None else f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        errors = _ERROR.findall(_LOG_PREFIX.sub("", self.log.read_text(errors="replace")))
        informative = [error for error in errors if "See root cause above" not in error[1]]
        reason = f": {informative[0][0]}: {' '.join(informative[0][1].split())[:300]}" if informative else ""
        return f"{how}{reason}; the whole log is {self.log}"

    def facts(self) -> dict[str, float]:
        """Return KV-cache tokens, GiB of weights and seconds to load, from the log."""
        text = self.log.read_text(errors="replace")
        matches = {name: pattern.findall(text) for name, pattern in _FACTS.items()}
        return {name: float(values[-1].replace(",", "")) for name, values in matches.items() if values}


class Server(Engine):
    """`vllm serve MODEL`, ready for requests inside the block.

    Raises: ServingError if the server dies before it answers; vLLM limits the time of its start.
    """

    def __init__(self, model: str, *, arguments: Sequence[str] = (), log: Path) -> None:
        self.model = model
        self.port = free_port()
        self.address = f"http://{HOST}:{self.port}"
        super().__init__(["serve", model, "--host", HOST, "--port", str(self.port), *arguments], log=log)

    def __enter__(self) -> Self:
        start = time.monotonic()
        super().__enter__()
        try:
            while not self._is_healthy():
                if self.process.poll() is not None:
                    raise ServingError(f"vLLM did not start {self.model}; it {self.failure()}")
                time.sleep(0.25)
        except BaseException:
            self.stop()
            raise
        self.startup = time.monotonic() - start
        """Seconds from the start of the process to its first healthy answer."""
        return self

    def _is_healthy(self) -> bool:
        without_proxies = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            return bool(without_proxies.open(f"{self.address}/health", timeout=5))
        except OSError:
            return False

    def facts(self) -> dict[str, float]:
        return {**super().facts(), "startup_seconds": self.startup}
