"""The Triton kernels of experts and of training in Triton's interpreter, against float64 and their plain forms.

`test_moe_experts.py` runs this file with pytest in a process of its own, since the interpreter takes over Triton's
whole language when that is imported.
"""

import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from commands import cases
from expert_cases import CASES, Problem, draw, poisoned
from seams import OutputHead, distill, triton_kernels

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


kernels = triton_kernels()


@pytest.fixture
def filled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Empties are NaN. A block of the vocabulary is shorter than it."""
    empty, empty_like = torch.empty, torch.empty_like
    monkeypatch.setattr(torch, "empty", lambda *size, **options: empty(*size, **options).fill_(float("nan")))
    monkeypatch.setattr(torch, "empty_like", lambda tensor: empty_like(tensor).fill_(float("nan")))
    monkeypatch.setattr(kernels, "BLOCK", 64)


@pytest.mark.usefixtures("filled")
@pytest.mark.parametrize(
    ("eta", "masked", "cap", "divisor"), [(2.0, False, None, 1.0), (0.0, True, None, 8.0), (1.0, True, 30.0, 1.0)]
)
def test_the_distilled_head(eta: float, masked: bool, cap: float | None, divisor: float) -> None:
    generator = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(5, 16, generator=generator) for _ in range(2))
    weight, teacher_weight = (torch.randn(150, 16, generator=generator) for _ in range(2))
    labels = torch.tensor([0, 149, 63, 64, 5])
    mask = torch.tensor([0.0, 2.5, 0.0, 2.5, 0.0]) if masked else None
    head, teacher_head = (OutputHead(weight=w, cap=cap, divisor=divisor) for w in (weight, teacher_weight))
    student.requires_grad_()
    loss, metrics = distill(student, teacher, head, labels, eta, teacher_head, mask)
    loss.backward()
    scale = 1.0 if masked else 1.0 / (1.0 + eta)
    product = F.linear(student.detach(), weight)
    sums = kernels.distill_chunk(
        product, F.linear(teacher, teacher_weight) if eta else None, labels, mask, eta, scale,
        divisors=(divisor, divisor), caps=(cap, cap),
    )  # fmt: skip
    torch.testing.assert_close(sums / 5, metrics, atol=1e-5, rtol=1e-5)
    assert student.grad is not None
    torch.testing.assert_close(product @ weight / divisor / (scale * 5), student.grad, atol=1e-6, rtol=1e-4)


@pytest.mark.usefixtures("filled")
@pytest.mark.parametrize(("tokens", "units", "columns"), [(40, 140, 1), (37, 5, 24), (20, 2, 300)])
def test_the_backward_of_gates(tokens: int, units: int, columns: int) -> None:
    generator = torch.Generator().manual_seed(0)
    gradient, x = (torch.randn(tokens, units * columns, generator=generator) for _ in range(2))
    mask = torch.rand(units, generator=generator)
    out, sums, squares = kernels.gate_backward(gradient[None], x[None], mask, columns)
    products = (gradient * x).view(tokens, units, columns).sum(-1)
    torch.testing.assert_close(out[0], gradient * mask.repeat_interleave(columns))
    torch.testing.assert_close(sums, products.sum(0), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(squares, products.square().sum(0), atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("filled")
@pytest.mark.parametrize(
    ("sizes", "channels"), [([0, 20, 1, 0, 40], 33), ([7, 0, 0, 0, 0], 140), ([0, 0, 0, 0, 0], 128)]
)
def test_the_gates_of_experts(sizes: list[int], channels: int) -> None:
    generator = torch.Generator().manual_seed(0)
    gradient, x = (torch.randn(sum(sizes), channels, generator=generator) for _ in range(2))
    mask = torch.rand(len(sizes), channels, generator=generator)
    ends = torch.tensor(list(itertools.accumulate(sizes)), dtype=torch.int32)
    experts = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    torch.testing.assert_close(kernels.scale_experts(x, mask, ends), x * mask[experts])
    out, sums, squares = kernels.expert_gates_backward(gradient, x, mask, ends)
    torch.testing.assert_close(out, gradient * mask[experts])
    for found, rows in ((sums, gradient * x), (squares, (gradient * x).square())):
        expected = torch.zeros_like(mask).index_add_(0, experts, rows)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert kernels.SPLITS > 1
