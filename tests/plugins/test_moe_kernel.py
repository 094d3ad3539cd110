"""The GPU kernels of experts and of training: their arithmetic in Triton's interpreter, and on a GPU."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from expert_cases import CASES, FORMATS, draw

from ddp_plugins.moe_experts import ragged_moe

pytestmark = pytest.mark.slow

pytest.importorskip("triton")
HERE = Path(__file__).parent


@pytest.mark.parametrize("chosen", ["not nightly", pytest.param("nightly", marks=pytest.mark.nightly)])
def test_the_kernels_in_tritons_interpreter(chosen: str) -> None:
    """Against float64 and plain PyTorch, in a process that never compiles."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    options = ["-q", "--noconftest", "-p", "no:cacheprovider", "-m", chosen]
    files = HERE / "interpreted_kernel.py", HERE.parent / "prune" / "interpreted_kernels.py"
    command = [sys.executable, "-m", "pytest", *options, *map(str, files)]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=HERE.parent.parent)
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
    assert int(re.search(r"(\d+) passed", result.stdout)[1]) > 15  # type: ignore[index]
    assert "skipped" not in result.stdout


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(("dtype", "fp8"), FORMATS)
@pytest.mark.parametrize("name", CASES)
def test_every_case_on_the_gpu(name: str, fp8: str, dtype: torch.dtype) -> None:
    if dtype is torch.bfloat16 and not torch.cuda.is_bf16_supported(False):
        pytest.skip("a GPU without bfloat16")
    if fp8 and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("a GPU without FP8")
    problem = draw(CASES[name], dtype, device="cuda", fp8=fp8)
    problem.check(problem.run())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_cuda_graph_follows_new_routing() -> None:
    """Nothing of the routing is frozen at capture: replayed with other ids, the graph gives the other result."""
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
