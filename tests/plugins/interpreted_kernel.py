"""The Triton kernels in Triton's interpreter; `test_moe_kernel.py` runs this file with pytest in a process of its own,
since the interpreter takes over Triton's whole language when that is imported."""

from dataclasses import replace

import pytest
import torch
from expert_cases import CASES, Problem, draw, poisoned

from ddp_plugins import moe_kernel
from ddp_plugins.moe_kernel import FEW, FOR_FP8, NARROW, SOME_IN_REGISTERS, Tiles

# several tiles even of small experts
SMALL = Tiles(pairs=16, columns=32, down_columns=32, depth=32, warps=1, stages=1, programs=1)


def run(problem: Problem, tiles: Tiles | None = None) -> torch.Tensor:
    experts = (problem.w13, problem.w2, problem.layout.table(problem.x.device), problem.layout.max_width)
    with poisoned():
        batch = (problem.weights, problem.ids, problem.expert_map, *problem.scales, problem.limit)
        return moe_kernel.ragged_moe(problem.x, *experts, *batch, tiles)


EVERY_TIME = (
    *("one token", "widths 0, 1 and no block multiple", "ids of -1", "experts of another rank"),
    "products that are clamped",
)


@pytest.mark.parametrize("fp8", ["", "channel"])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] * (name not in EVERY_TIME)) for name in CASES]
)
def test_every_case(name: str, fp8: str) -> None:
    problem = draw(CASES[name], torch.float32, fp8=fp8)
    problem.check(run(problem, SMALL))


NIGHTLY = pytest.mark.nightly


@pytest.mark.parametrize(
    "tiles", [pytest.param(NARROW, marks=NIGHTLY), pytest.param(SOME_IN_REGISTERS, marks=NIGHTLY), None], ids=str
)
def test_every_tile_size(tiles: Tiles | None) -> None:
    """None: as they are chosen by the numbers of pairs and experts."""
    problem = draw(CASES["tokens and channels past the widest tiles"], torch.bfloat16)
    problem.check(run(problem, tiles))


FORMATS = [(FOR_FP8[FEW], "channel"), pytest.param(None, "tensor", marks=NIGHTLY)]


@pytest.mark.parametrize(("tiles", "fp8"), FORMATS, ids=str)
def test_tile_sizes_of_fp8_weights(tiles: Tiles | None, fp8: str) -> None:
    problem = draw(CASES["tokens and channels past the widest tiles"], torch.bfloat16, fp8=fp8)
    problem.check(run(problem, tiles))


def test_32_bit_ids_and_more_pairs_than_the_sort_looks_at_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = draw(CASES["experts of another rank"], torch.float32)
    expected = run(problem)
    monkeypatch.setattr(moe_kernel, "SORT_BLOCK", 16)
    monkeypatch.setattr(moe_kernel, "WIDE_SORT_BLOCK", 32)
    assert problem.ids.numel() > 32
    assert torch.equal(run(replace(problem, ids=problem.ids.int())), expected)


def test_the_same_bits_whatever_shares_the_batch() -> None:
    """A token's result depends neither on the other tokens nor on their order, while the tiles are the same."""
    problem = draw(CASES["top-k no power of two"], torch.bfloat16)
    whole = run(problem, SMALL)
    for token in (0, 10):
        alone = slice(token, token + 1)
        single = replace(problem, x=problem.x[alone], weights=problem.weights[alone], ids=problem.ids[alone])
        assert torch.equal(run(single, SMALL), whole[alone])
