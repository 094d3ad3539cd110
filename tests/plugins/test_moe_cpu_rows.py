"""The CPU kernel over packed rows, compiled here and held against float64."""

import dataclasses
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from expert_cases import CASES, Case, Problem, draw, poisoned
from hypothesis import given
from hypothesis import strategies as st

from ddp_plugins import moe_cpu_rows
from ddp_plugins.moe_cpu_rows import HIDDEN_ALIGNMENT, kernel, serves
from ddp_plugins.moe_experts import ragged_moe

suited = torch.cpu._is_avx512_bf16_supported() and not torch.cpu._is_amx_tile_supported()
pytestmark = pytest.mark.skipif(not suited, reason="not the kernel of this processor")
SERVED = {name: case for name, case in CASES.items() if case.hidden_size % HIDDEN_ALIGNMENT == 0}


@pytest.fixture
def fresh(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, and no memory of what was compiled; what is compiled now is compiled quickly."""
    monkeypatch.setattr(moe_cpu_rows, "FLAGS", tuple(flag for flag in moe_cpu_rows.FLAGS if flag != "-O3"))
    kernel.cache_clear()
    moe_cpu_rows._warn_of_loop.cache_clear()
    yield cache
    kernel.cache_clear()


def _run(problem: Problem) -> torch.Tensor:
    w13, w2 = problem.finished()
    assert w13.shape == problem.w13.shape and serves(w2)
    with poisoned():
        return ragged_moe(problem.x, w13, w2, problem.layout, problem.weights, problem.ids, problem.expert_map)


@pytest.mark.parametrize("name", SERVED)
def test_every_ragged_case(name: str) -> None:
    problem = draw(SERVED[name], torch.bfloat16)
    problem.check(_run(problem))


@given(
    st.lists(st.integers(0, 150), min_size=1, max_size=6),
    st.integers(0, 40),
    st.integers(1, 4),
    st.sampled_from([32, 64, 96, 288]),
    st.integers(0, 99),
)
def test_any_widths(widths: list[int], num_tokens: int, num_slots: int, hidden_size: int, seed: int) -> None:
    case = Case(
        widths=tuple(widths), num_tokens=num_tokens, num_slots=min(num_slots, len(widths)), hidden_size=hidden_size
    )
    problem = draw(case, torch.bfloat16, seed=seed)
    problem.check(_run(problem))


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


def test_rows_of_a_wider_tensor_and_int32_ids() -> None:
    problem = draw(CASES["ids of -1"], torch.bfloat16)
    wide = torch.full((len(problem.x), 3 * problem.x.shape[1]), torch.nan, dtype=torch.bfloat16)
    wide[:, 7 : 7 + problem.x.shape[1]] = problem.x
    x = wide[:, 7 : 7 + problem.x.shape[1]]
    y = ragged_moe(x, *problem.finished(), problem.layout, problem.weights, problem.ids.int(), problem.expert_map)
    problem.check(y)


def test_a_token_of_no_number_spoils_no_other() -> None:
    problem = draw(CASES["many tokens an expert, the wide tiles"], torch.bfloat16)
    expected = _run(problem)
    problem.x[5] = torch.nan
    y = _run(problem)
    assert y[5].isnan().all()
    assert torch.equal(torch.cat([y[:5], y[6:]]), torch.cat([expected[:5], expected[6:]]))


def test_gates_far_from_zero_saturate() -> None:
    """silu(±1000) is 1000 and 0, not infinity over infinity."""
    problem = draw(CASES["a single expert"], torch.bfloat16)
    for scale in (300.0, 1e4):
        large = dataclasses.replace(problem, x=problem.x * scale)
        y = _run(large).double()
        gate, up, down = (matrix.double() for matrix in problem.experts[0])
        x = large.x.double()
        exact = torch.nn.functional.silu(x @ gate.t()) * (x @ up.t()) @ down.t() * problem.weights.double()
        torch.testing.assert_close(y, exact, rtol=0, atol=1.5e-2 * float(exact.abs().max()))


def test_it_is_compiled_once(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernel() is not None
    (library,) = (fresh / "kernels").iterdir()
    written = library.stat().st_mtime_ns
    kernel.cache_clear()
    assert kernel() is not None
    assert [file.stat().st_mtime_ns for file in (fresh / "kernels").iterdir()] == [written]
    monkeypatch.setattr(moe_cpu_rows, "FLAGS", (*moe_cpu_rows.FLAGS, "-DANOTHER"))
    kernel.cache_clear()
    assert kernel() is not None
    assert len(list((fresh / "kernels").iterdir())) == 2


def test_a_library_that_a_crash_cut_short_is_made_again(fresh: Path) -> None:
    """In a process that has not loaded it: the system's loader remembers names."""
    library = fresh / "kernels" / f"{moe_cpu_rows.SOURCE.stem}-cut.so"
    code = (
        "from ddp_plugins import moe_cpu_rows as m; import hashlib; m.hashlib.sha256 = lambda _: Key(); "
        f"m.FLAGS = {moe_cpu_rows.FLAGS!r}; assert m.kernel() is not None"
    )
    code = "class Key:\n    hexdigest = lambda self: 'cut'\n" + code
    library.parent.mkdir(parents=True)
    library.write_bytes(b"\x7fELF")
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )
    assert library.stat().st_size > 10_000


def test_a_library_that_others_could_have_written_is_not_loaded(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernel() is not None
    (library,) = (fresh / "kernels").iterdir()
    compile_it, compiled = moe_cpu_rows._compile, []
    monkeypatch.setattr(moe_cpu_rows, "_compile", lambda *to: compiled.append(to) or compile_it(*to))
    for path in (library, library.parent):
        path.chmod(0o777)
        kernel.cache_clear()
        assert kernel() is not None
    assert [path.is_relative_to(fresh) for _, path in compiled] == [True, False]  # then in a folder of its own


def test_ids_past_the_experts_are_refused() -> None:
    problem = draw(CASES["one token"], torch.bfloat16)
    w13, w2 = problem.finished()
    ids = problem.ids.clone()
    ids[0, 0] = len(CASES["one token"].widths)
    with pytest.raises(IndexError, match="is out of range"):
        ragged_moe(problem.x, w13, w2, problem.layout, problem.weights, ids, problem.expert_map)


@pytest.mark.parametrize("compiler", ["false", "no-such-compiler --fast", "g++ '"])
def test_without_a_compiler_experts_run_otherwise(
    compiler: str, fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    problem = draw(CASES["one token"], torch.bfloat16)
    assert not serves(problem.w2)
    problem.check(
        ragged_moe(problem.x, problem.w13, problem.w2, problem.layout, problem.weights, problem.ids, problem.expert_map)
    )
    (record,) = caplog.records
    assert "moe_cpu_rows.cpp cannot be used" in record.getMessage()
    assert not list(fresh.rglob("*.so"))


def test_other_types_and_sizes_are_not_its_own() -> None:
    assert serves(torch.zeros(16, 64, dtype=torch.bfloat16))
    assert not serves(torch.zeros(16, 80, dtype=torch.bfloat16))
    assert not serves(torch.zeros(16, 64)) and not serves(torch.zeros(16, 64, dtype=torch.float16))
