"""Ragged experts worth testing, each with its reason, and how a result is judged; used on CPU, interpreter and GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from ddp_plugins import moe_experts
from ddp_plugins.moe_experts import ExpertLayout
from ddp_plugins.moe_reference import Expert, ragged_moe_reference, round_to_fp8

FORMATS = [(torch.float32, ""), (torch.float16, "tensor"), (torch.bfloat16, "channel")]  # dtype, kind of FP8 scales
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}  # of the norm of the exact result


@dataclass(frozen=True, kw_only=True)
class Case:
    widths: tuple[int, ...]
    num_tokens: int
    num_slots: int = 2
    hidden_size: int = 64
    only: tuple[int, ...] = field(default=())
    """Experts that are ever chosen; empty: all."""
    absent: float = 0.0
    """Fraction of ids that are -1."""
    mapped: bool = False
    """Ids are those of twice as many experts on two ranks; this rank has the odd ones."""
    limit: float | None = None
    """Of the products with gate and up, which are around 1."""


RAGGED = (0, 1, 17, 48, 16, 33, 5, 100)
CASES = {
    "one token": Case(widths=RAGGED, num_tokens=1, num_slots=5),
    "one token whose experts are all elsewhere": Case(widths=RAGGED, num_tokens=1, absent=1.0),
    "widths 0, 1 and no block multiple": Case(widths=RAGGED, num_tokens=21),
    "idle experts, whose tiles must not exist": Case(widths=RAGGED, num_tokens=9, only=(3, 7)),
    "all tokens to one expert": Case(widths=RAGGED, num_tokens=40, num_slots=1, only=(7,)),
    "all tokens to an expert that is gone": Case(widths=RAGGED, num_tokens=5, num_slots=1, only=(0,)),
    "all experts gone": Case(widths=(0, 0, 0, 0), num_tokens=3),
    "many tokens an expert, the wide tiles": Case(widths=(100, 0, 31), num_tokens=100),
    "tokens and channels past the widest tiles": Case(widths=(140, 20), num_tokens=140, num_slots=1, only=(0,)),
    "hidden size no multiple of a tile": Case(widths=RAGGED, num_tokens=13, hidden_size=160),
    "top-k no power of two": Case(widths=RAGGED, num_tokens=11, num_slots=6),
    "ids of -1": Case(widths=RAGGED, num_tokens=17, absent=0.4),
    "experts of another rank": Case(widths=RAGGED, num_tokens=17, mapped=True),
    "no token at all": Case(widths=RAGGED, num_tokens=0),
    "products that are clamped": Case(widths=RAGGED, num_tokens=21, limit=0.5),
}


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One case with its numbers drawn."""

    layout: ExpertLayout
    experts: list[Expert]
    w13: torch.Tensor
    w2: torch.Tensor
    x: torch.Tensor
    weights: torch.Tensor
    ids: torch.Tensor
    expert_map: torch.Tensor | None
    exact: torch.Tensor
    scales: Any = (None, None)
    """Of w13 and w2, which then are FP8."""
    limit: float | None = None

    def finished(self) -> tuple[torch.Tensor, torch.Tensor]:
        return moe_experts.finish_weights(self.layout, self.w13, self.w2)

    def run(self) -> torch.Tensor:
        """Run the operator, where all memory that it allocates is poisoned."""
        batch = (self.weights, self.ids, self.expert_map, self.scales, self.limit)
        with poisoned():
            return moe_experts.ragged_moe(self.x, *self.finished(), self.layout, *batch)

    def check(self, y: torch.Tensor) -> None:
        """Assert that y is the exact result, up to the rounding of its type."""
        assert y.shape == self.x.shape and y.dtype == self.x.dtype
        y = y.double().cpu()
        assert not y.isnan().any()
        size = self.exact.norm().item()
        error = (y - self.exact).norm().item()
        assert error <= TOLERANCE[self.x.dtype] * size, f"error {error:.2e} for a result of {size:.2e}"


def draw(case: Case, dtype: torch.dtype, device: str = "cpu", seed: int = 0, fp8: str = "") -> Problem:
    """fp8: tensor or channel quantizes the experts with one scale per matrix or per output."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    hidden, widths = case.hidden_size, case.widths
    layout = ExpertLayout.of(widths)
    experts = [
        tuple(m.to(dtype) for m in (normal(w, hidden) / 8, normal(w, hidden) / 8, normal(hidden, w) / max(w, 1) ** 0.5))
        for w in widths
    ]
    # vLLM reloads weights into memory that holds anything
    w13, w2 = (weight.fill_(torch.nan) for weight in moe_experts.empty_weights(layout, hidden, dtype, device))
    for number, matrices in enumerate(experts):
        moe_experts.pack_expert(layout, w13, w2, number, *matrices)
    scales: Any = (None, None)
    if fp8:
        w13, w2, *scales = moe_experts.quantize_weights(layout, w13, w2, per_tensor=fp8 == "tensor")
        experts = [tuple(round_to_fp8(m, per_tensor=fp8 == "tensor") for m in matrices) for matrices in experts]
    scores = normal(case.num_tokens, len(widths))
    if case.only:
        scores[:, list(case.only)] += 100
    weights, ids = scores.softmax(-1).topk(case.num_slots)
    ids = torch.where(torch.rand(ids.shape, generator=generator) < case.absent, -1, ids)
    x = normal(case.num_tokens, hidden).to(dtype)
    exact = ragged_moe_reference(x, experts, weights, ids, case.limit)
    expert_map = None
    if case.mapped:
        expert_map = torch.full((2 * len(widths),), -1, dtype=torch.int32)
        expert_map[1::2] = torch.arange(len(widths), dtype=torch.int32)
        ids[:, 0] = 2 * ids[:, 0]  # the first slot goes to the other rank
        ids[:, 1:] = 2 * ids[:, 1:] + 1
        exact = ragged_moe_reference(x, experts, weights[:, 1:], ids[:, 1:] // 2, case.limit)
        expert_map = expert_map.to(device)
    return Problem(
        layout=layout, experts=experts, w13=w13, w2=w2, x=x.to(device), weights=weights.to(device), ids=ids.to(device),
        expert_map=expert_map, exact=exact, scales=tuple(scales), limit=case.limit,
    )  # fmt: skip


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill whatever is allocated empty with NaN, integers with their largest value."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
        assert torch.zeros(1).new_empty(8).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)
