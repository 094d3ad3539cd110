"""The kernels of training in Triton's interpreter, against their plain forms; run by `test_moe_kernel.py`.

Empties are poisoned with NaN. Cases: a block of the vocabulary that is not whole, no teacher, a loss mask, caps and
divisors; units of one, of some and of more columns than a tile; experts without slots, and all slots on one expert.
"""

import itertools

import pytest
import torch
import torch.nn.functional as F
from seams import OutputHead, distill, triton_kernels

kernels = triton_kernels()


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    empty, empty_like = torch.empty, torch.empty_like
    monkeypatch.setattr(torch, "empty", lambda *size, **options: empty(*size, **options).fill_(float("nan")))
    monkeypatch.setattr(torch, "empty_like", lambda tensor: empty_like(tensor).fill_(float("nan")))
    monkeypatch.setattr(kernels, "BLOCK", 64)


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
