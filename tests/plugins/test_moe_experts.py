"""Layout, packing and the operator on a CPU, there by the loop over experts; `test_moe_cpu_rows.py` has our kernel."""

import pytest
import torch
from expert_cases import CASES, draw, poisoned
from hypothesis import given
from hypothesis import strategies as st

from ddp_plugins import moe_cpu_rows
from ddp_plugins.moe_experts import (
    ROW_ALIGNMENT,
    ExpertLayout,
    empty_weights,
    finish_weights,
    pack_expert,
    ragged_moe,
)

ALL_CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
WIDTHS = st.lists(st.integers(0, 200), max_size=12)
FORMATS = [(torch.float32, ""), (torch.float16, "tensor"), (torch.bfloat16, "channel")]


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


def test_rows_that_pad_an_expert_end_as_zeros() -> None:
    """vLLM reloads weights into memory that holds anything."""
    layout = ExpertLayout.of((3, 0, 20, 16))
    assert layout.offsets[0] == 32 and layout.num_rows == 64
    w13, w2 = (weight.fill_(torch.nan) for weight in empty_weights(layout, 4, torch.float32))
    for expert, width in enumerate(layout.widths):
        pack_expert(layout, w13, w2, expert, torch.ones(width, 4), torch.ones(width, 4), torch.ones(4, width))
    gate, up, down = torch.rand(3, 4), torch.rand(3, 4), torch.rand(4, 3)
    pack_expert(layout, w13, w2, 0, gate, up, down)
    w13, w2 = finish_weights(layout, w13, w2)
    assert torch.equal(w13[:, 32:35], torch.stack([gate, up])) and torch.equal(w2[32:35], down.t())
    assert not w13[:, 35:48].any() and not w2[35:48].any()
    assert w13[:, :32].sum() + w13[:, 48:].sum() == 2 * 4 * 36 and w2[:32].sum() + w2[48:].sum() == 4 * 36


@pytest.mark.parametrize(("dtype", "fp8"), FORMATS)
@pytest.mark.parametrize("name", CASES)
def test_the_loop_over_experts(name: str, dtype: torch.dtype, fp8: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe_cpu_rows, "serves", lambda _: False)
    problem = draw(CASES[name], dtype, fp8=fp8)
    batch = (problem.weights, problem.ids, problem.expert_map, problem.scales, problem.limit)
    with poisoned():
        y = ragged_moe(problem.x, *problem.finished(), problem.layout, *batch)
    problem.check(y)


@pytest.mark.parametrize("fp8", ["", "channel"])
def test_the_operator_keeps_its_promises_to_the_compiler(fp8: str) -> None:
    problem = draw(CASES["experts of another rank"], torch.float32, fp8=fp8)
    needs_no_mean = ("test_faketensor", "test_autograd_registration")  # of the weights, which torch lacks for FP8
    arguments = (problem.x, problem.w13, problem.w2, problem.layout.table(problem.x.device), problem.layout.max_width)
    torch.library.opcheck(
        torch.ops.ddp_vllm.ragged_moe.default,
        (*arguments, problem.weights, problem.ids, problem.expert_map, *problem.scales),
        test_utils=needs_no_mean if fp8 else ALL_CHECKS,
    )
