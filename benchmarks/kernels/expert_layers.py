"""Draws layers of routed experts to measure: real models' shapes, random widths and weights, tokens
and routing.

Letters: T tokens, H hidden size, K experts per token, w the width of an expert.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

Expert = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""gate `[w, H]`, up `[w, H]`, down `[H, w]`."""
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Tokens `[T, H]`, routing weights `[T, K]` float32 and expert ids `[T, K]` int32."""
Run = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""A kernel with its experts: maps the three tensors of a `Batch` to outputs `[T, H]`."""
CONCENTRATION = 4.0
POPULARITY = 0.5
"""Standard deviation of the experts' popularity; the preference of a token has 1."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The routed experts of one layer."""

    hidden_size: int
    intermediate_size: int
    num_experts: int
    num_experts_per_tok: int

    def scaled(self, scale: float, experts: int | None) -> "Shape":
        """Return a smaller layer with the same top-k: sizes times `scale` in steps of 64, at most
        `experts` experts."""

        def shrink(size: int) -> int:
            return max(64, round(size * scale / 64) * 64)

        return replace(
            self,
            hidden_size=shrink(self.hidden_size),
            intermediate_size=shrink(self.intermediate_size),
            num_experts=max(self.num_experts_per_tok, min(experts or self.num_experts, self.num_experts)),
        )


SHAPES = {  # from the config.json of each model
    "qwen3-30b-a3b": Shape(hidden_size=2048, intermediate_size=768, num_experts=128, num_experts_per_tok=8),
    "deepseekmoe-16b": Shape(hidden_size=2048, intermediate_size=1408, num_experts=64, num_experts_per_tok=6),
    "mixtral-8x7b": Shape(hidden_size=4096, intermediate_size=14336, num_experts=8, num_experts_per_tok=2),
    "olmoe-1b-7b": Shape(hidden_size=2048, intermediate_size=1024, num_experts=64, num_experts_per_tok=8),
}


def draw_widths(shape: Shape, sparsity: float, seed: int) -> list[int]:
    """Return a random width per expert, with exactly `sparsity` percent of the layer's channels
    removed.

    With one budget for the whole layer, experts keep very different shares. Each share is drawn
    from the Beta distribution whose mean is the kept share and whose parameters sum to
    `CONCENTRATION`. At 40 % removed the standard deviation is 0.22 and 7 % of the experts keep less
    than a quarter. The rounding error is divided evenly among the experts with room. The
    distribution is an assumption, not fitted to trained masks of these models.
    """
    keep = 1 - sparsity / 100
    budget = round(keep * shape.num_experts * shape.intermediate_size)
    if not sparsity:
        return [shape.intermediate_size] * shape.num_experts
    shares = np.random.default_rng(seed).beta(CONCENTRATION * keep, CONCENTRATION * (1 - keep), shape.num_experts)
    widths = [round(share * shape.intermediate_size) for share in shares]
    while missing := budget - sum(widths):
        step = 1 if missing > 0 else -1
        room = [e for e, width in enumerate(widths) if 0 <= width + step <= shape.intermediate_size]
        for expert in room[: abs(missing)]:
            widths[expert] += step
    return widths


def even_widths(widths: Sequence[int]) -> list[int]:
    """Return widths with the same sum that differ by at most one channel."""
    low, more = divmod(sum(widths), len(widths))
    return [low + (expert < more) for expert in range(len(widths))]


def draw_experts(shape: Shape, dtype: torch.dtype, device: str, generator: torch.Generator) -> list[Expert]:
    """Return random dense experts, scaled so that outputs are about as large as inputs."""
    hidden, width = shape.hidden_size, shape.intermediate_size

    def normal(rows: int, columns: int) -> torch.Tensor:
        values = torch.randn(rows, columns, generator=generator).div_(columns**0.5)
        return values.to(device=device, dtype=dtype)

    return [(normal(width, hidden), normal(width, hidden), normal(hidden, width)) for _ in range(shape.num_experts)]


def cut(experts: Sequence[Expert], widths: Sequence[int]) -> list[Expert]:
    """Return the first `widths` channels of each expert."""
    return [
        (gate[:width], up[:width], down[:, :width]) for (gate, up, down), width in zip(experts, widths, strict=True)
    ]


def draw_batch(
    shape: Shape, num_tokens: int, dtype: torch.dtype, device: str, generator: torch.Generator, popularity: torch.Tensor
) -> Batch:
    """Return random tokens; an expert's score is `popularity [E]` plus noise of standard deviation
    1."""
    x = torch.randn(num_tokens, shape.hidden_size, generator=generator)
    scores = torch.randn(num_tokens, shape.num_experts, generator=generator) + popularity
    weights, ids = scores.softmax(-1).topk(shape.num_experts_per_tok)
    weights /= weights.sum(-1, keepdim=True)
    return x.to(device=device, dtype=dtype), weights.to(device), ids.to(device, torch.int32)


def work(batches: Sequence[Batch], widths: Sequence[int], hidden_size: int, item_bytes: int) -> tuple[float, float]:
    """Return the mean bytes of chosen experts' weights and the mean floating-point operations per
    batch.

    Widths are without padding. A channel has three rows of H; a weight and token take two
    operations.
    """
    width = torch.tensor(widths)
    read = sum(int(width[ids.unique().cpu().long()].sum()) for _, _, ids in batches)
    computed = sum(int(width[ids.cpu().long()].sum()) for _, _, ids in batches)
    return 3 * hidden_size * item_bytes * read / len(batches), 6 * hidden_size * computed / len(batches)


def numbers(text: str) -> list[int]:
    """Parse an option such as `1,16,64`."""
    return [int(part) for part in text.split(",")]
