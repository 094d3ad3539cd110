"""Experts of different widths on a CPU by vLLM's kernel, which wants experts of one width: one call a bucket.

Experts whose widths are close share a bucket, padded to its widest; every bucket is a call of `cpu_fused_moe` over the
pairs that belong to it. Fewer buckets compute more padding, more of them cost more calls.

Letters: H hidden size, P (token, slot) pairs sorted by expert, B buckets. A place is an expert's position in
`ExpertLayout.order`: experts lie widest first, so a bucket is a run of places.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ddp_plugins.huge_pages import empty_on_huge_pages

Array = np.ndarray[Any, np.dtype[Any]]
BUCKET_ALIGNMENT = 32  # channels and hidden size, asked by cpu_fused_moe on every instruction set
CALL_BYTES = 500_000  # weights read in the time one more call costs: 25 µs at 20 GB/s, one core of an EPYC 9004


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Experts that share a call."""

    first: int
    """Place of the first of them."""
    last: int
    """One past the last."""
    width: int
    """Channels each is padded to."""
    row: int
    """Where it starts, in rows of the finished weights."""

    @property
    def num_rows(self) -> int:
        return (self.last - self.first) * self.width


@cache
def choose_buckets(widths: tuple[int, ...], call_rows: int) -> tuple[Bucket, ...]:
    """Split places, widest first, into runs whose padded rows plus `call_rows` a run are fewest.

    widths: rows of the expert at each place, falling; zeros at the end are left out.
    """
    widths = tuple(-(-width // BUCKET_ALIGNMENT) * BUCKET_ALIGNMENT for width in widths if width)
    best = [(0, 0)]  # for the first n places: (cost, start of their last run)
    for end in range(1, len(widths) + 1):
        best.append(min((best[start][0] + call_rows + (end - start) * widths[start], start) for start in range(end)))
    runs = []
    end = len(widths)
    while end:
        runs.append((best[end][1], end))
        end = best[end][1]
    buckets: list[Bucket] = []
    row = 0
    for first, last in reversed(runs):
        buckets.append(Bucket(first=first, last=last, width=widths[first], row=row))
        row += buckets[-1].num_rows
    return tuple(buckets)


def serves(w2: torch.Tensor) -> bool:
    """Return whether vLLM has the kernel and it takes experts with these rows, `[S, H]`."""
    return len(w2) > 0 and w2.shape[1] % BUCKET_ALIGNMENT == 0 and _operators() is not None


def finish_weights(
    widths: Sequence[int], offsets: Sequence[int], w13: torch.Tensor, w2: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return packed rows in buckets, in the order vLLM's kernel reads: `[2·R, H]` and `[R, H]`, flattened.

    R: rows of all buckets. Arguments as in `moe_cpu.finish_weights`, of weights that `serves`.
    """
    operators, hidden_size = _operators(), w2.shape[1]
    isa = _instruction_set(w2.dtype)
    buckets = choose_buckets(tuple(widths), _call_rows(w2))
    num_rows = buckets[-1].row + buckets[-1].num_rows
    new13, new2 = empty_on_huge_pages(2 * num_rows * hidden_size, w13), empty_on_huge_pages(num_rows * hidden_size, w2)
    for bucket in buckets:
        experts = bucket.last - bucket.first
        gate_up = w13.new_zeros(experts, 2, bucket.width, hidden_size)
        down = w2.new_zeros(experts, hidden_size, bucket.width)
        for i, place in enumerate(range(bucket.first, bucket.last)):
            rows = slice(offsets[place], offsets[place] + widths[place])
            gate_up[i, :, : widths[place]] = w13[:, rows]
            down[i, :, : widths[place]] = w2[rows].t()
        to13, to2 = _bucket_weights(bucket, new13, new2, hidden_size)
        to13.copy_(operators.cpu_prepack_moe_weight(gate_up.flatten(1, 2), isa))
        to2.copy_(operators.cpu_prepack_moe_weight(down, isa))
    return new13, new2


def run(
    terms_PH: torch.Tensor,
    x_PH: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    widths_E: Array,
    weights_P: torch.Tensor,
    places_P: Array,
) -> None:
    """Fill `terms_PH` with what each pair's expert makes of its row of `x_PH`, times its weight.

    w13, w2: as `finish_weights` returns them. widths_E: rows of the expert at each place. Rows of pairs at place -1,
    which come first, are left alone.
    """
    plan = _plan(w13, w2, widths_E, x_PH)
    isa = _instruction_set(x_PH.dtype)
    active, sizes, ids_P = _active_buckets(plan, places_P)
    first = len(places_P) - len(ids_P)
    tensors = (terms_PH[first:], x_PH[first:], weights_P[first:, None], ids_P[:, None])
    parts = [tensor.split(sizes) for tensor in tensors]  # all at once: between the calls the cache is cold
    for (w13, w2), terms, x, weights, ids in zip(active, *parts, strict=True):
        _run_vllm(terms, x, w13, w2, weights, ids, isa)


def run_one_token(
    x_1H: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, widths_E: Array, weights_P: torch.Tensor, places_P: Array
) -> torch.Tensor:
    """Return `y_1H`: one token's experts of a bucket are one row for vLLM's kernel, so nothing is gathered."""
    plan = _plan(w13, w2, widths_E, x_1H)
    isa = _instruction_set(x_1H.dtype)
    active, sizes, ids_P = _active_buckets(plan, places_P)
    sums_BH = x_1H.new_empty(len(active), x_1H.shape[1])
    weights_1P = weights_P[None, len(places_P) - len(ids_P) :]
    parts = (sums_BH.split(1), weights_1P.split(sizes, 1), ids_P[None].split(sizes, 1))
    for (w13, w2), sum_1H, weights, ids in zip(active, *parts, strict=False):  # of no bucket split gives one empty
        _run_vllm(sum_1H, x_1H, w13, w2, weights, ids, isa)
    return sums_BH.sum(0, keepdim=True)


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """What every call over the same finished weights needs; found at the first, since between calls caches are cold."""

    bounds: Array
    """First place of each bucket, and one past the last place of all."""
    weights: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    """Each bucket's part of the finished weights."""
    addresses: tuple[int, int]


_PLANS = WeakTensorKeyDictionary()  # of finished w13


def _plan(w13: torch.Tensor, w2: torch.Tensor, widths_E: Array, like: torch.Tensor) -> _Plan:
    addresses = (w13.data_ptr(), w2.data_ptr())
    plan: _Plan | None = _PLANS.get(w13)
    if plan is None or plan.addresses != addresses:  # someone may have given the parameters other storage
        hidden_size = like.shape[1]
        buckets = choose_buckets(tuple(widths_E.tolist()), _call_rows(like))
        plan = _Plan(
            bounds=np.array([bucket.first for bucket in buckets] + [buckets[-1].last], np.int32),
            weights=tuple(_bucket_weights(bucket, w13.detach(), w2.detach(), hidden_size) for bucket in buckets),
            addresses=addresses,
        )
        _PLANS[w13] = plan
    return plan


def _active_buckets(
    plan: _Plan, places_P: Array
) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], list[int], torch.Tensor]:
    """Return weights and number of pairs of each bucket that has any, and for those pairs the expert's number in it."""
    starts = places_P.searchsorted(plan.bounds)
    sizes = np.diff(starts)
    active = sizes.nonzero()[0]
    sizes = sizes[active]
    ids_P = places_P[starts[0] :] - plan.bounds[active].repeat(sizes)
    return [plan.weights[number] for number in active], sizes.tolist(), torch.from_numpy(ids_P)


def _run_vllm(
    out: torch.Tensor,
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    isa: str,
) -> None:
    """Fill `out` with what experts of one width make of `x`, without biases; vLLM 0.27 wraps the operator otherwise."""
    torch.ops._C.cpu_fused_moe(out, x, w13, w2, None, None, weights, ids, False, "silu", isa)


def _bucket_weights(
    bucket: Bucket, w13: torch.Tensor, w2: torch.Tensor, hidden_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bucket's part of the finished weights, `[n, 2·width, H]` and `[n, H, width]`."""
    experts, width, start = bucket.last - bucket.first, bucket.width, bucket.row * hidden_size
    size = width * hidden_size
    return (
        w13.as_strided((experts, 2 * width, hidden_size), (2 * size, hidden_size, 1), 2 * start),
        w2.as_strided((experts, hidden_size, width), (size, width, 1), start),
    )


def _call_rows(like_PH: torch.Tensor) -> int:
    """Return the channels whose three rows are read in the time of one call."""
    return CALL_BYTES // (3 * like_PH.shape[1] * like_PH.element_size())


@cache
def _operators() -> Any:
    """Return vLLM's operators, or None where it has no fused experts for the CPU."""
    try:
        from vllm import _custom_ops
    except ImportError:
        return None
    return _custom_ops if hasattr(torch.ops._C, "cpu_fused_moe") else None


def _instruction_set(dtype: torch.dtype) -> str:
    """Return what vLLM calls the kernel: its tiles of Intel AMX know bfloat16 only."""
    return "amx" if dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported() else "vec"
