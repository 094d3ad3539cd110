"""Experts of different widths on a CPU with AVX-512 BF16: one call over the packed rows, by a kernel of our own.

The kernel is `moe_cpu_rows.cpp`, which says how it works. It is compiled where it runs, in seconds, by the GCC (11 or
newer) that `$CXX` names, else g++, which vLLM on a CPU needs anyway, and kept in the cache of ddp-vllm. It reads the
rows as they were packed, so widths cost what their bytes cost. Where it cannot serve (other processors and types, no
compiler) `moe_cpu` loops over the experts; so too on Intel's AMX, whose tiles PyTorch uses and this kernel does not.
"""

import contextlib
import ctypes
import hashlib
import logging
import os
import shlex
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ddp_vllm.cache import cache_folder, is_own
from ddp_vllm.errors import OutputError
from ddp_vllm.output import atomic_file

SOURCE = Path(__file__).with_suffix(".cpp")
FLAGS = ("-O3", "-std=c++17", "-march=x86-64-v4", "-mavx512bf16", "-fopenmp", "-fPIC")
POINTER, INTEGER = ctypes.c_void_p, ctypes.c_int64
ARGUMENTS = (
    POINTER, INTEGER, INTEGER, INTEGER, POINTER, POINTER, INTEGER, POINTER, INTEGER, POINTER, POINTER, INTEGER, POINTER,
    INTEGER, ctypes.c_int, POINTER,
)  # fmt: skip
OUT_OF_MEMORY, NO_SUCH_EXPERT = 1, 2  # what the kernel returns instead of 0
HIDDEN_ALIGNMENT = 32  # numbers of a vector
logger = logging.getLogger(f"vllm.{__name__}")  # vLLM shows what its own loggers say, and those below them


def serves(w2: torch.Tensor) -> bool:
    """Return whether the kernel can run experts with these rows, `[S, H]`, and log once why not.

    The first rows of a type and size it takes make it compile.
    """
    if w2.dtype != torch.bfloat16:
        _tell_loop(f"the kernel takes torch.bfloat16, and these are {w2.dtype}")
    elif w2.shape[1] % HIDDEN_ALIGNMENT:
        _tell_loop(f"the kernel takes hidden sizes in steps of {HIDDEN_ALIGNMENT}, and this is {w2.shape[1]}")
    else:
        return kernel() is not None
    return False


def ragged_moe(
    x_TH: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    layout_3E: torch.Tensor,
    topk_weights_TK: torch.Tensor,
    topk_ids_TK: torch.Tensor,
    expert_map: torch.Tensor | None,
) -> torch.Tensor:
    """Return `y_TH`; arguments as in `moe_experts.ragged_moe`, packed rows for which `serves` is true.

    Sums are float32 throughout, those over the experts of a token too, and rounded once; the same for any number of
    threads. Raises: IndexError of an id past the experts; MemoryError.
    """
    run = kernel()
    assert run is not None
    ids_TK = topk_ids_TK.long().contiguous()
    weights_TK = topk_weights_TK.contiguous()
    y_TH = x_TH.new_empty(x_TH.shape)
    num_experts = layout_3E.shape[1]
    map_pointer, num_ids = (None, num_experts) if expert_map is None else (expert_map.data_ptr(), len(expert_map))
    failed = run(
        x_TH.data_ptr(), x_TH.stride(0), *x_TH.shape, w13.data_ptr(), w2.data_ptr(), len(w2),
        layout_3E.data_ptr(), num_experts, weights_TK.data_ptr(), ids_TK.data_ptr(), ids_TK.shape[1], map_pointer,
        num_ids, torch.get_num_threads(), y_TH.data_ptr(),
    )  # fmt: skip
    if failed == NO_SUCH_EXPERT:
        raise IndexError(f"an expert id of {int(ids_TK.max())} where there are {num_ids} experts")
    if failed == OUT_OF_MEMORY:
        raise MemoryError(f"no room for the hidden activations of {len(x_TH)} tokens")
    return y_TH


@cache
def kernel() -> Callable[..., Any] | None:
    """Return the compiled kernel, or None where it does not suit the processor or cannot be compiled and loaded."""
    if not torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported():
        _tell_loop("the kernel is for processors with AVX-512 BF16 and without AMX")
        return None
    try:
        run = _load().ragged_moe
    except (OSError, OutputError, ValueError) as error:  # also of no home folder, of a $CXX with half a quotation
        _tell_loop(f"{SOURCE.name} cannot be used ({str(error).splitlines()[0]})")
        return None
    run.argtypes, run.restype = ARGUMENTS, ctypes.c_int
    return run


@cache
def _tell_loop(reason: str) -> None:
    logger.warning("experts run one by one in PyTorch, which is slower: %s", reason)


def _load() -> ctypes.CDLL:
    """Load the shared library, from the cache if it was compiled before from the same source in the same way.

    It needs an OpenMP and names none, so it finds torch's, which is global in the process: a second one would start
    threads of its own beside it. Raises: OSError, OutputError, ValueError.
    """
    compiler = shlex.split(os.environ.get("CXX") or "g++")
    key = hashlib.sha256(SOURCE.read_bytes() + repr((compiler, FLAGS)).encode()).hexdigest()[:16]
    folder = cache_folder() / "kernels"
    library = folder / f"{SOURCE.stem}-{key}.so"
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    private = folder.is_dir() and is_own(folder)  # else what lies there may be anyone's code
    if private and library.is_file() and is_own(library):
        with contextlib.suppress(OSError):  # of a machine with another C library: compile again
            return ctypes.CDLL(str(library))
    if private and os.access(folder, os.W_OK):
        with atomic_file(library, private=True) as temporary:
            loaded = _compile(compiler, temporary)
            temporary.chmod(0o700)  # the linker makes a file of its own
            return loaded
    with tempfile.TemporaryDirectory() as work:
        return _compile(compiler, Path(work) / library.name)


def _compile(compiler: Sequence[str], library: Path) -> ctypes.CDLL:
    """Compile and load the library, which stays in memory when the file is renamed or goes. Raises: OSError."""
    with tempfile.TemporaryDirectory() as work:
        unlinked = Path(work) / "kernel.o"
        _run([*compiler, *FLAGS, "-c", str(SOURCE), "-o", str(unlinked)])
        _run([*compiler, "-shared", str(unlinked), "-o", str(library)])
    return ctypes.CDLL(str(library))


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OSError(done.stderr.strip() or f"{command[0]} ended with {done.returncode}")
