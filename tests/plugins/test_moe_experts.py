"""Layout, packing and the operator on a CPU: the loop over experts, our kernel, and vLLM's in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from expert_cases import CASES, draw, poisoned
from hypothesis import given
from hypothesis import strategies as st

from ddp_plugins import huge_pages, moe_cpu_buckets, moe_cpu_rows
from ddp_plugins.moe_cpu_buckets import BUCKET_ALIGNMENT, choose_buckets
from ddp_plugins.moe_experts import ROW_ALIGNMENT, ExpertLayout, empty_weights, finish_weights, pack_expert, ragged_moe

WIDTHS = st.lists(st.integers(0, 200), max_size=12)


@given(WIDTHS)
def test_rows_are_aligned_disjoint_and_widest_first(widths: list[int]) -> None:
    layout = ExpertLayout.of(widths)
    end = 0
    for expert in layout.order:
        assert layout.offsets[expert] == end and end % ROW_ALIGNMENT == 0
        assert 0 <= layout.padded[expert] - widths[expert] < ROW_ALIGNMENT
        end += layout.padded[expert]
    assert end == layout.num_rows
    assert sorted(layout.order) == [expert for expert, width in enumerate(widths) if width]
    assert [layout.padded[e] for e in layout.order] == sorted(filter(None, layout.padded), reverse=True)


def test_an_expert_is_packed_between_its_neighbours() -> None:
    layout = ExpertLayout.of((3, 0, 20))
    w13, w2 = empty_weights(layout, 4, torch.float32)
    gate, up, down = torch.rand(3, 4), torch.rand(3, 4), torch.rand(4, 3)
    pack_expert(layout, w13, w2, 0, gate, up, down)
    assert layout.offsets[0] == 32 and layout.num_rows == 48
    assert torch.equal(w13[:, 32:35], torch.stack([gate, up])) and torch.equal(w2[32:35], down.t())
    assert w13[:, :32].count_nonzero() == w13[:, 35:].count_nonzero() == w2[35:].count_nonzero() == 0


def test_rows_that_pad_an_expert_end_as_zeros() -> None:
    """vLLM reloads weights into memory that holds anything."""
    layout = ExpertLayout.of((3, 0, 20, 16))
    w13, w2 = (weight.fill_(torch.nan) for weight in empty_weights(layout, 4, torch.float32))
    for expert, width in enumerate(layout.widths):
        pack_expert(layout, w13, w2, expert, torch.ones(width, 4), torch.ones(width, 4), torch.ones(4, width))
    w13, w2 = finish_weights(layout, w13, w2)  # of a hidden size that is not put into buckets
    assert w13.sum() == 2 * 4 * 39 and w2.sum() == 4 * 39


def test_a_matrix_of_another_width_is_not_packed() -> None:
    layout = ExpertLayout.of((3, 5))
    w13, w2 = empty_weights(layout, 4, torch.float32)
    with pytest.raises(AssertionError):
        pack_expert(layout, w13, w2, 1, gate_wH=torch.rand(3, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_the_loop_over_experts(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe_cpu_rows, "serves", lambda _: False)
    problem = draw(CASES[name], dtype)
    with poisoned():
        y = ragged_moe(
            problem.x, problem.w13, problem.w2, problem.layout, problem.weights, problem.ids, problem.expert_map
        )
    problem.check(y)


def test_the_operator_keeps_its_promises_to_the_compiler() -> None:
    problem = draw(CASES["experts of another rank"], torch.float32)
    arguments = (problem.x, problem.w13, problem.w2, problem.layout.table(problem.x.device), problem.layout.max_width)
    torch.library.opcheck(
        torch.ops.ddp_vllm.ragged_moe.default, (*arguments, problem.weights, problem.ids, problem.expert_map)
    )


def test_weights_of_another_type_are_refused() -> None:
    problem = draw(CASES["one token"], torch.float32)
    with pytest.raises(AssertionError):
        ragged_moe(problem.x.bfloat16(), problem.w13, problem.w2, problem.layout, problem.weights, problem.ids)


@given(WIDTHS, st.integers(0, 300))
def test_buckets_cover_every_expert_and_cost_least(widths: list[int], call_rows: int) -> None:
    widths = sorted(filter(None, widths), reverse=True)[:8]
    buckets = choose_buckets((*widths, 0, 0), call_rows)
    assert [place for b in buckets for place in range(b.first, b.last)] == list(range(len(widths)))
    row = 0
    for bucket in buckets:
        assert bucket.row == row and bucket.width % BUCKET_ALIGNMENT == 0
        assert all(width <= bucket.width for width in widths[bucket.first : bucket.last])
        row += bucket.num_rows
    assert row + call_rows * len(buckets) == _least_cost(tuple(widths), call_rows)


def _least_cost(widths: tuple[int, ...], call_rows: int) -> int:
    """Try every way to cut the list."""
    if not widths:
        return 0
    width = -(-widths[0] // BUCKET_ALIGNMENT) * BUCKET_ALIGNMENT
    return min(n * width + call_rows + _least_cost(widths[n:], call_rows) for n in range(1, len(widths) + 1))


@pytest.mark.vllm
def test_buckets_over_vllms_kernel() -> None:
    """In a process of its own: vLLM changes logging and threads where it is imported."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    root = Path(__file__).parents[2]
    environment["PYTHONPATH"] = os.pathsep.join([str(root), str(root / "plugins"), str(Path(__file__).parent)])
    code = "import test_moe_experts; test_moe_experts.check_buckets()"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr[-5000:]
    served = [case for case in CASES.values() if case.hidden_size % BUCKET_ALIGNMENT == 0 and any(case.widths)]
    assert f"BUCKETED {2 * 3 * len(served)}\n" in result.stdout


def check_buckets() -> None:
    """Run every case through vLLM's `cpu_fused_moe`, a second time with other weights in the same parameters.

    Prints how many went that way.
    """
    bucketed = 0
    moe_cpu_rows.serves = lambda _: False
    for call_rows in (0, 40):  # a bucket for each width, and some in common; so small experts would all be in one
        moe_cpu_buckets._call_rows = lambda _, rows=call_rows: rows
        huge_pages.HUGE_PAGE = 1 if call_rows else 1 << 30  # with and without
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            for case in CASES.values():
                problem = draw(case, dtype)
                w13, w2 = problem.finished()
                bucketed += w13.ndim == 1
                rest = (problem.layout, problem.weights, problem.ids, problem.expert_map)
                with poisoned():
                    y = ragged_moe(problem.x, w13, w2, *rest)
                problem.check(y)
                w13.data, w2.data = torch.zeros_like(w13), torch.zeros_like(w2)
                assert not ragged_moe(problem.x, w13, w2, *rest).any()  # nothing of the old weights is remembered
    print("BUCKETED", bucketed)
