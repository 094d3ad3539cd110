"""The Triton kernels in Triton's interpreter; `test_moe_kernel.py` runs this file with pytest in a process of its own,
since the interpreter takes over Triton's whole language when that is imported."""

from dataclasses import replace

import pytest
import torch
from commands import cases
from expert_cases import CASES, Problem, draw, poisoned

from ddp_plugins import moe_kernel
from ddp_plugins.moe_kernel import FEW, FOR_FP8, NARROW, SOME_IN_REGISTERS, Tiles

# several tiles even of small experts
SMALL = Tiles(pairs=16, columns=32, down_columns=32, depth=32, warps=1, stages=1, programs=1)


def run(problem: Problem, tiles: Tiles | None = None) -> torch.Tensor:
    """tiles: as they are chosen by the numbers of pairs and experts, if None."""
    experts = (*problem.finished(), problem.layout.table(problem.x.device), problem.layout.max_width)
    with poisoned():
        batch = (problem.weights, problem.ids, problem.expert_map, *problem.scales, problem.limit)
        return moe_kernel.ragged_moe(problem.x, *experts, *batch, tiles)


BY_DAY = (  # the last two of all widths; another rank's below
    ("one token", ""), ("one token", "channel"), ("ids of -1", ""), ("products that are clamped", ""),
)  # fmt: skip
PAIRS = [(name, fp8) for name in CASES for fp8 in ("", "channel")]


@pytest.mark.parametrize(
    ("name", "fp8"), [pytest.param(*p, marks=[pytest.mark.nightly] * (p not in BY_DAY)) for p in PAIRS]
)
def test_every_case(name: str, fp8: str) -> None:
    problem = draw(CASES[name], torch.float32, fp8=fp8)
    problem.check(run(problem, SMALL))


SIZES = {  # tiles, format of the weights
    "narrow": (NARROW, ""),
    "some in registers": (SOME_IN_REGISTERS, ""),
    "chosen": (None, ""),
    "FP8": (FOR_FP8[FEW], "channel"),
    "FP8 with a scale per matrix, chosen": (None, "tensor"),
}


@pytest.mark.parametrize("name", cases(SIZES, ["chosen"]))
def test_every_tile_size(name: str) -> None:
    tiles, fp8 = SIZES[name]
    problem = draw(CASES["tokens and channels past the widest tiles"], torch.bfloat16, fp8=fp8)
    problem.check(run(problem, tiles))


def test_32_bit_ids_and_more_pairs_than_the_sort_looks_at_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = draw(CASES["experts of another rank"], torch.float32)
    expected = run(problem)
    problem.check(expected)
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
