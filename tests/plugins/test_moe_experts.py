"""The operator on a CPU, by the loop over experts and by the kernel over packed rows, compiled here; and on a GPU."""

import dataclasses
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from expert_cases import CASES, FORMATS, Case, Problem, draw

from ddp_plugins import moe_cpu_rows
from ddp_plugins.moe_cpu_rows import HIDDEN_ALIGNMENT, kernel, serves
from ddp_plugins.moe_experts import ragged_moe
from ddp_plugins.padding import share_channels

ALL_CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
ROWS = {name: case for name, case in CASES.items() if case.hidden_size % HIDDEN_ALIGNMENT == 0}
suited = pytest.mark.skipif(
    not torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported(),
    reason="not the kernel of this processor",
)


@pytest.mark.parametrize(("dtype", "fp8"), FORMATS)
@pytest.mark.parametrize("name", CASES)
def test_the_loop_over_experts(name: str, dtype: torch.dtype, fp8: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe_cpu_rows, "serves", lambda _: False)
    problem = draw(CASES[name], dtype, fp8=fp8)
    problem.check(problem.run())


@pytest.mark.parametrize("fp8", ["", "channel"])
def test_the_operator_keeps_its_promises_to_the_compiler(fp8: str) -> None:
    problem = draw(CASES["experts of another rank"], torch.float32, fp8=fp8)
    needs_no_mean = ("test_faketensor", "test_autograd_registration")  # of the weights, which torch lacks for FP8
    arguments = (problem.x, *problem.finished(), problem.layout.table(problem.x.device), problem.layout.max_width)
    torch.library.opcheck(
        torch.ops.ddp_vllm.ragged_moe.default,
        (*arguments, problem.weights, problem.ids, problem.expert_map, *problem.scales),
        test_utils=needs_no_mean if fp8 else ALL_CHECKS,
    )


def _run(problem: Problem) -> torch.Tensor:
    w13, w2 = problem.finished()
    assert w13.shape == problem.w13.shape and serves(w2)
    return problem.run()


@suited
@pytest.mark.parametrize("name", ROWS)
def test_the_kernel_over_packed_rows(name: str) -> None:
    problem = draw(ROWS[name], torch.bfloat16)
    problem.check(_run(problem))


@suited
@pytest.mark.parametrize(
    "case",
    [
        Case(widths=(33, 0, 20), num_tokens=2100),
        Case(widths=(1200, 40), num_tokens=30, hidden_size=512),
        Case(widths=(90, 30), num_tokens=20, hidden_size=4096),
    ],
    ids=["more tokens than run together", "more channels than a cache holds", "columns and rows in several pieces"],
)
def test_the_number_of_threads_changes_no_bit(case: Case) -> None:
    problem = draw(case, torch.bfloat16)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(_run(problem))
    finally:
        torch.set_num_threads(before)
    problem.check(results[0])
    assert all(torch.equal(results[0], result) for result in results)


@suited
def test_odd_inputs() -> None:
    """Rows of a wider tensor and int32 ids; a token of no number, or too large, spoils no other; no expert 5 of 5."""
    problem = draw(CASES["many tokens an expert, the wide tiles"], torch.bfloat16)
    hidden, expected = problem.x.shape[1], _run(problem)
    wide = torch.full((len(problem.x), 3 * hidden), torch.nan, dtype=torch.bfloat16)
    wide[:, 7 : 7 + hidden] = problem.x
    narrow = dataclasses.replace(problem, x=wide[:, 7 : 7 + hidden], ids=problem.ids.int())
    assert torch.equal(_run(narrow), expected)
    problem.x[5], problem.x[6] = torch.nan, problem.x[6] * 1e4  # silu(±1000) is 1000 and 0, not infinity over infinity
    y = _run(problem)
    assert y[5].isnan().all() and y[6].isfinite().all()
    assert torch.equal(torch.cat([y[:5], y[7:]]), torch.cat([expected[:5], expected[7:]]))
    problem.ids[0, 0] = len(problem.experts)
    with pytest.raises(IndexError, match="is out of range"):
        _run(problem)
    assert serves(torch.zeros(16, 64, dtype=torch.bfloat16)) and not serves(torch.zeros(16, 64, dtype=torch.float16))
    assert not serves(torch.zeros(16, 80, dtype=torch.bfloat16))


@pytest.fixture
def fresh(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return an empty cache folder; kernels that were compiled before are forgotten."""
    for function in (kernel, moe_cpu_rows._warn_of_loop):
        function.cache_clear()
    yield cache
    kernel.cache_clear()


@suited
@pytest.mark.parametrize("compiler", ["false", "no-such-compiler --fast"])
def test_without_a_compiler_experts_run_otherwise(
    compiler: str, fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    problem = draw(CASES["one token"], torch.bfloat16)
    assert not serves(problem.w2)
    problem.check(problem.run())
    (record,) = caplog.records
    assert "moe_cpu_rows.cpp cannot be used" in record.getMessage()
    assert not list(fresh.rglob("*.so"))


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
def test_ranks_share_the_channels_of_experts_evenly_and_pad_no_more_than_one_rank(num_ranks: int) -> None:
    expert_widths = [0, 1, 2, 5, 17, 31, 33, 64, 16, 48, 15, 512, 0]
    shares = [share_channels(expert_widths, rank, num_ranks, 16) for rank in range(num_ranks)]
    for expert, width in enumerate(expert_widths):
        assert sorted(channel for share in shares for channel in share[expert]) == list(range(width))
    blocks = [sum(-(-len(share) // 16) for share in of_rank) for of_rank in shares]
    assert sum(blocks) == sum(-(-width // 16) for width in expert_widths)
    assert max(blocks) - min(blocks) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("chosen", ["not nightly", pytest.param("nightly", marks=pytest.mark.nightly)])
def test_the_kernels_in_tritons_interpreter(chosen: str) -> None:
    """Of experts and of training, against float64 and plain PyTorch, in a process that never compiles."""
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    options = ["-q", "--noconftest", "-p", "no:cacheprovider", "-m", chosen]
    file = Path(__file__).with_name("interpreted_kernels.py")
    command = [sys.executable, "-m", "pytest", *options, str(file)]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=file.parents[2])
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
