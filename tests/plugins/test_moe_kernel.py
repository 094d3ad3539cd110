"""The GPU kernels: their arithmetic in Triton's interpreter, their machine code for sm_90, and both on a GPU."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from expert_cases import CASES, draw, poisoned

pytestmark = pytest.mark.slow

pytest.importorskip("triton")
HERE = Path(__file__).parent
SHARED_BYTES = 228 * 1024  # of one sm_90 multiprocessor, for all programs on it
RESERVED_BYTES = 1024  # of that, taken by CUDA for each program
REGISTERS = 64 * 1024
BF16_TILES = ("NARROW", "FEW", "SOME", "MANY")
KERNELS = [(stage, name) for name in BF16_TILES for stage in ("gate_up", "down")]
EVERY_TIME = [("gate_up", "MANY", False), ("down", "FEW", False), ("down", "FEW", True)]
FORMATS = [(torch.float32, ""), (torch.float16, "tensor"), (torch.bfloat16, "channel")]


@pytest.mark.parametrize("chosen", ["not nightly", pytest.param("nightly", marks=pytest.mark.nightly)])
def test_the_kernels_in_tritons_interpreter(chosen: str) -> None:
    """Against float64, in a process that never compiles."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    options = ["-q", "--noconftest", "-p", "no:cacheprovider", "-m", chosen]
    command = [sys.executable, "-m", "pytest", *options, str(HERE / "interpreted_kernel.py")]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=HERE.parent.parent)
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
    assert int(re.search(r"(\d+) passed", result.stdout)[1]) > 11  # type: ignore[index]
    assert "skipped" not in result.stdout


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of the kernels, which compile into a cache of the test's own."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # unset, Triton 3.9 warns
    from ddp_plugins import moe_kernel

    return moe_kernel


def _compile(
    kernel: Any, tiles: Any, folder: Path, capability: int = 90, *, fp8: bool = False, **constants: Any
) -> tuple[Any, dict[str, int]]:
    """Compile a kernel for a GPU at the shapes of Qwen3-30B-A3B and read registers and stack from its machine code.

    capability: 90 is Hopper's 9.0.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    known = {"H": 2048, "NUM_EXPERTS": 128, "EXPERTS": 128, "UPCAST": False, "HAS_MAP": False, "NUM_SLOTS": 8}
    known |= {"PAIRS": tiles.pairs, "DEPTH": tiles.depth}
    known["COLUMNS"] = tiles.down_columns if kernel.__name__.startswith("down") else tiles.columns
    known |= {"DEPENDENT": capability >= 90, "LIMIT": 10.0 if capability == 90 else None}
    known |= {} if fp8 else {"w13_scale_ptr": None, "w2_scale_ptr": None}
    constants = {name: value for name, value in (known | constants).items() if name in kernel.arg_names}
    floats = dict.fromkeys(("x_ptr", "w13_ptr", "w2_ptr", "hidden_ptr", "terms_ptr", "y_ptr"), "bf16") | {
        "weight_ptr": "fp32"
    }
    if fp8:
        floats |= dict.fromkeys(("w13_ptr", "w2_ptr"), "fp8e4nv")
        floats |= dict.fromkeys(("w13_scale_ptr", "w2_scale_ptr"), "fp32")
    signature = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        else:
            signature[name] = f"*{floats.get(name, 'i32')}" if name.endswith("_ptr") else "i32"
    hinted = ("_ptr", "_stride", "num_rows")
    aligned = [i for i, name in enumerate(kernel.arg_names) if name.endswith(hinted) and name not in constants]
    compiled = triton.compile(
        ASTSource(
            kernel,
            signature,
            {(i,): constants[name] for i, name in enumerate(kernel.arg_names) if name in constants},
            {(i,): [["tt.divisibility", 16]] for i in aligned},
        ),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": tiles.warps, "num_stages": tiles.stages, "launch_pdl": capability >= 90},
    )
    binary = folder / "kernel.cubin"
    binary.write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    usage = subprocess.run([tool, "-res-usage", binary], capture_output=True, text=True, check=True).stdout
    return compiled, {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}


@pytest.mark.parametrize(
    ("stage", "name", "fp8"),
    [
        pytest.param(*kernel, fp8, marks=[] if (*kernel, fp8) in EVERY_TIME else pytest.mark.nightly)
        for kernel in KERNELS
        for fp8 in (False, True)
    ],
)
def test_the_machine_code_fits_hopper(stage: str, name: str, fp8: bool, tmp_path: Path, compiler: Any) -> None:
    tiles = getattr(compiler, name)
    tiles = compiler.FOR_FP8.get(tiles, tiles) if fp8 else tiles
    compiled, usage = _compile(getattr(compiler, stage), tiles, tmp_path, fp8=fp8)
    assert usage["STACK"] == usage["LOCAL"] == 0, f"registers are spilled: {usage}"
    assert tiles.programs * (compiled.metadata.shared + RESERVED_BYTES) <= SHARED_BYTES
    assert tiles.programs * tiles.warps * 32 * usage["REG"] <= REGISTERS
    multiply = "wgmma.mma_async" if tiles.pairs >= 64 else "mma.sync"
    assert compiled.asm["ptx"].count(multiply) >= 4, "the tensor cores are not used"
    assert compiled.asm["ptx"].count("cp.async.cg") >= tiles.stages, "weights are not read ahead"
    assert not re.search(r"(ld|st)\.global\S*\.b16", compiled.asm["ptx"]), "two bytes at a time"
    assert "griddepcontrol.wait" in compiled.asm["ptx"], "the launch does not wait for the one before"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(("dtype", "fp8"), FORMATS)
@pytest.mark.parametrize("name", CASES)
def test_every_case_on_the_gpu(name: str, fp8: str, dtype: torch.dtype) -> None:
    from ddp_plugins.moe_experts import ragged_moe

    if dtype is torch.bfloat16 and not torch.cuda.is_bf16_supported(False):
        pytest.skip("a GPU without bfloat16")
    if fp8 and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("a GPU without FP8")
    problem = draw(CASES[name], dtype, device="cuda", fp8=fp8)
    batch = (problem.weights, problem.ids, problem.expert_map, problem.scales, problem.limit)
    with poisoned():
        y = ragged_moe(problem.x, *problem.finished(), problem.layout, *batch)
    problem.check(y)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_cuda_graph_follows_new_routing() -> None:
    """Nothing of the routing is frozen at capture: replayed with other ids, the graph gives the other result."""
    from ddp_plugins.moe_experts import ragged_moe

    name = "widths 0, 1 and no block multiple"
    first, second = draw(CASES[name], torch.float16, "cuda"), draw(CASES[name], torch.float16, "cuda", seed=1)
    arguments = (first.x, *first.finished(), first.layout, first.weights, first.ids)
    ragged_moe(*arguments)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ragged_moe(*arguments)
    for tensor, other in ((first.w13, second.w13), (first.w2, second.w2), (first.x, second.x)):
        tensor.copy_(other)
    first.weights.copy_(second.weights)
    first.ids.copy_(second.ids)
    graph.replay()
    second.check(y)
