"""Runs experts of different widths on a CPU: with our kernel for AVX-512 BF16, or in a PyTorch loop
over the experts.

`moe_cpu_rows.cpp` describes the kernel. It is compiled on the machine it runs on, in seconds, by
`$CXX` (GCC 11 or newer) or else g++, which vLLM on a CPU requires anyway, and cached. It reads the
packed rows directly, so its time is proportional to their bytes. The loop serves where the kernel
does not run (other processors and dtypes, no compiler), and processors with Intel's AMX, whose
tiles PyTorch uses and this kernel does not.

Letters: T tokens, H hidden size, K experts per token. A position is an expert's index in
    `ExpertLayout.order`.
"""

import contextlib
import ctypes
import hashlib
import logging
import math
import os
import shlex
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from ddp_vllm.cache import cache_folder, is_own
from ddp_vllm.errors import OutputError
from ddp_vllm.output import atomic_file

SOURCE = Path(__file__).with_suffix(".cpp")
FLAGS = ("-O3", "-std=c++17", "-march=x86-64-v4", "-mavx512bf16", "-fopenmp", "-fPIC")
POINTER, INTEGER = ctypes.c_void_p, ctypes.c_int64
ARGUMENTS = (
    POINTER, INTEGER, INTEGER, INTEGER, POINTER, POINTER, INTEGER, POINTER, INTEGER, POINTER, POINTER, INTEGER, POINTER,
    INTEGER, ctypes.c_float, ctypes.c_int, POINTER,
)  # fmt: skip
OUT_OF_MEMORY, NO_SUCH_EXPERT = 1, 2  # the kernel's error codes
HIDDEN_ALIGNMENT = 32  # bfloat16 numbers per vector register
logger = logging.getLogger(f"vllm.{__name__}")  # vLLM prints only its own loggers' records


def serves(w2: torch.Tensor) -> bool:
    """Return whether the kernel can run experts with these rows, `[S, H]`; log once why not.

    The first call with a supported dtype and size compiles the kernel.
    """
    if w2.dtype == torch.float8_e4m3fn:
        _warn_of_loop("FP8 experts are dequantized at every call on a CPU")
    elif w2.dtype != torch.bfloat16:
        _warn_of_loop(f"the kernel requires torch.bfloat16, and the weights are {w2.dtype}")
    elif w2.shape[1] % HIDDEN_ALIGNMENT:
        _warn_of_loop(f"the kernel requires a hidden size in multiples of {HIDDEN_ALIGNMENT}, and it is {w2.shape[1]}")
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
    limit: float | None = None,
) -> torch.Tensor:
    """Return `y_TH`; arguments as in `moe_experts.ragged_moe`, packed rows for which `serves` is
    true.

    All sums, including the sum over a token's experts, are float32 and rounded once. The result
    does not depend on the number of threads. Raises: IndexError for an expert id out of range;
    MemoryError.
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
        num_ids, math.inf if limit is None else limit, torch.get_num_threads(), y_TH.data_ptr(),
    )  # fmt: skip
    if failed == NO_SUCH_EXPERT:
        raise IndexError(f"expert id {int(ids_TK.max())} is out of range: there are {num_ids} experts")
    if failed == OUT_OF_MEMORY:
        raise MemoryError(f"not enough memory for the hidden activations of {len(x_TH)} tokens")
    return y_TH


def loop_over_experts(
    x_TH: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    layout_3E: torch.Tensor,
    topk_weights_TK: torch.Tensor,
    topk_ids_TK: torch.Tensor,
    expert_map: torch.Tensor | None,
    limit: float | None = None,
    w13_scale: torch.Tensor | None = None,
    w2_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return `y_TH`; arguments as in `moe_experts.ragged_moe`. The sum over K is float32, rounded
    once.

    FP8 weights are dequantized to float32, expert by expert, at every call.
    """
    ids_TK = topk_ids_TK if expert_map is None else torch.where(topk_ids_TK < 0, -1, expert_map[topk_ids_TK])
    # reading at -1 is harmless: the result is masked
    positions_TK = torch.where(ids_TK < 0, -1, layout_3E[0, ids_TK])
    _, offsets, widths = layout_3E.tolist()
    y_TH = torch.zeros(x_TH.shape, dtype=torch.float32)
    for position in positions_TK.unique().tolist():
        if position < 0:  # not an expert of this rank, or one without rows
            continue
        rows = slice(offsets[position], offsets[position] + widths[position])
        tokens, slots = (positions_TK == position).nonzero(as_tuple=True)
        x, gate, up, down = x_TH[tokens], w13[0, rows], w13[1, rows], w2[rows]
        if w13_scale is not None and w2_scale is not None:
            gate_scale, up_scale = w13_scale[:, rows, None]
            x, gate, up = x.float(), gate.float() * gate_scale, up.float() * up_scale
            down = down.float() * w2_scale[position]
        gates, ups = x @ gate.t(), x @ up.t()
        if limit is not None:
            gates, ups = gates.clamp_(max=limit), ups.clamp_(-limit, limit)
        hidden = F.silu(gates) * ups
        y_TH.index_add_(0, tokens, (hidden @ down) * topk_weights_TK[tokens, slots, None])
    return y_TH.to(x_TH.dtype)


@cache
def kernel() -> Callable[..., Any] | None:
    """Return the compiled kernel, or None where the processor lacks AVX-512 BF16, has AMX, or
    compiling fails."""
    if not torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported():
        _warn_of_loop("the kernel is for processors with AVX-512 BF16 and without AMX")
        return None
    try:
        run = _load().ragged_moe
    except (OSError, OutputError, ValueError) as error:  # ValueError: an unclosed quotation mark in $CXX
        _warn_of_loop(f"{SOURCE.name} cannot be used ({str(error).splitlines()[0]})")
        return None
    run.argtypes, run.restype = ARGUMENTS, ctypes.c_int
    return run


@cache
def _warn_of_loop(reason: str) -> None:
    logger.warning("experts run one by one in PyTorch, which is slower: %s", reason)


def _load() -> ctypes.CDLL:
    """Load the shared library, from the cache if the same source was compiled with the same
    compiler and flags.

    The library links to no OpenMP of its own and so uses torch's, which is global in the process: a
    second OpenMP would start additional threads. Raises: OSError, OutputError, ValueError.
    """
    compiler = shlex.split(os.environ.get("CXX") or "g++")
    key = hashlib.sha256(SOURCE.read_bytes() + repr((compiler, FLAGS)).encode()).hexdigest()[:16]
    folder = cache_folder() / "kernels"
    library = folder / f"{SOURCE.stem}-{key}.so"
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    # a folder of another user may contain foreign code
    private = folder.is_dir() and is_own(folder)
    if private and library.is_file() and is_own(library):
        with contextlib.suppress(OSError):  # compiled for another C library: compile again
            return ctypes.CDLL(str(library))
    if private and os.access(folder, os.W_OK):
        with atomic_file(library, private=True) as temporary:
            loaded = _compile(compiler, temporary)
            temporary.chmod(0o700)  # the linker replaced the file, with default permissions
            return loaded
    with tempfile.TemporaryDirectory() as work:
        return _compile(compiler, Path(work) / library.name)


def _compile(compiler: Sequence[str], library: Path) -> ctypes.CDLL:
    """Compile and load the library, which stays loaded when its file is renamed or removed.
    Raises: OSError."""
    with tempfile.TemporaryDirectory() as work:
        unlinked = Path(work) / "kernel.o"
        _run([*compiler, *FLAGS, "-c", str(SOURCE), "-o", str(unlinked)])
        _run([*compiler, "-shared", str(unlinked), "-o", str(library)])
    return ctypes.CDLL(str(library))


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OSError(done.stderr.strip() or f"{command[0]} ended with {done.returncode}")
