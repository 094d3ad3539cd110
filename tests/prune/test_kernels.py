"""The GPU kernels of training: their arithmetic in Triton's interpreter, and their machine code for an H100."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

pytest.importorskip("triton")
HERE = Path(__file__).parent
POINTERS = {"student_ptr": "bf16", "teacher_ptr": "bf16", "gradient_ptr": "bf16", "x_ptr": "bf16", "out_ptr": "bf16",
            "labels_ptr": "i64", "ends_ptr": "i32"}  # fmt: skip
NUMBERS = {"eta", "scale", "divisor", "cap", "teacher_divisor", "teacher_cap"}
KERNELS: dict[str, dict[str, Any]] = {
    "distill_kernel": {"DISTILLED": True, "MASKED": True, "CAPPED": False, "BLOCK": 4096},
    "gate_backward_kernel": {"COLUMNS": 1, "WIDTH": 128, "ROWS": 16, "STEPS": 16},
    "expert_gates_kernel": {"BACKWARD": True, "SPLITS": 8, "ROWS": 16, "WIDTH": 128},
}


def test_the_kernels_in_tritons_interpreter() -> None:
    """In a process that never compiles."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    options = ["-q", "--noconftest", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, str(HERE / "interpreted_kernels.py")]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=HERE.parent.parent)
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
    assert int(re.search(r"(\d+) passed", result.stdout)[1]) == 9  # type: ignore[index]


@pytest.mark.nightly
@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_compiles_without_spilling(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # unset, Triton 3.9 warns
    import triton
    from seams import triton_kernels
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    gate_kernels, loss_kernel = triton_kernels()

    kernel = getattr(loss_kernel if name.startswith("distill") else gate_kernels, name)
    constants, names = KERNELS[name], kernel.arg_names
    signature = {
        argument: "constexpr" if argument in constants
        else f"*{POINTERS.get(argument, 'fp32')}" if argument.endswith("_ptr")
        else "fp32" if argument in NUMBERS else "i32"
        for argument in names
    }  # fmt: skip
    values = {(names.index(argument),): value for argument, value in constants.items()}
    compiled = triton.compile(ASTSource(kernel, signature, values), target=GPUTarget("cuda", 90, 32))
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    usage = subprocess.run(
        [tools / "cuobjdump", "--dump-resource-usage", cubin], capture_output=True, text=True, check=True
    )
    assert re.search(r"STACK:0\b", usage.stdout) and re.search(r"LOCAL:0\b", usage.stdout), usage.stdout
