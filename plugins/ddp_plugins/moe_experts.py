"""Packs routed experts of different widths in memory and defines the one operator that runs them.

Each channel is one row: gate, up and the *transposed* down projection of an expert are blocks of
rows. So every row has H numbers, whatever the width, and starts aligned. Widths are zero-padded to
multiples of 16, which adds nothing. Experts are stored widest first, so that a launch starts its
longest work first. An expert of width 0 has no rows and adds nothing to the tokens routed to it.

Weights may be FP8 (float8_e4m3fn) with a float32 scale per output of each matrix: per channel of
gate and up, per hidden unit of down. All kernels multiply FP8 weights by unquantized inputs and
then scale the product.

Letters of the shape suffixes: T tokens, H hidden size, K experts per token (top-k), E experts on
this rank, S rows of all experts together, w the width of one expert.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ddp_plugins import moe_cpu_rows
from ddp_vllm.huge_pages import on_huge_pages
from ddp_vllm.tensor_parallel import EXPERT_BLOCK

FP8 = torch.float8_e4m3fn


@dataclass(frozen=True, kw_only=True)
class ExpertLayout:
    """The rows of each expert in the packed weights. Build it with `ExpertLayout.of`."""

    widths: tuple[int, ...]
    """Width of each expert before padding, by expert id."""
    padded: tuple[int, ...]
    """Width of each expert, rounded up to `EXPERT_BLOCK`."""
    offsets: tuple[int, ...]
    """First row of each expert, by expert id; meaningless where the width is 0."""
    order: tuple[int, ...]
    """Ids of the experts that have rows, widest first: the order of the rows."""
    _tables: dict[torch.device, torch.Tensor] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, widths: Sequence[int]) -> "ExpertLayout":
        """Return the layout of experts with these widths, in channels."""
        assert all(width >= 0 for width in widths), widths
        padded = tuple(-(-width // EXPERT_BLOCK) * EXPERT_BLOCK for width in widths)
        order = sorted((e for e, width in enumerate(widths) if width), key=lambda e: (-padded[e], e))
        offsets = [0] * len(padded)
        end = 0
        for expert in order:
            offsets[expert] = end
            end += padded[expert]
        return cls(widths=tuple(widths), padded=padded, offsets=tuple(offsets), order=tuple(order))

    @property
    def num_experts(self) -> int:
        return len(self.widths)

    @property
    def num_rows(self) -> int:
        """S: the rows of all experts."""
        return sum(self.padded)

    @property
    def max_width(self) -> int:
        """Rows of the widest expert, which bound the buffers and grids of a launch."""
        return max(self.padded, default=0)

    def table(self, device: torch.device) -> torch.Tensor:
        """Return the table that the operator reads, `[3, E]` int32 on `device`; cached per device.

        Row 0: the position of each expert id in `order`, -1 for an expert without rows.
        Rows 1 and 2: first row and padded width of the expert at each position, then zeros.
        """
        if device not in self._tables:
            table = torch.zeros(3, self.num_experts, dtype=torch.int32)
            table[0] = -1
            for position, expert in enumerate(self.order):
                table[0, expert] = position
                table[1, position] = self.offsets[expert]
                table[2, position] = self.padded[expert]
            self._tables[device] = table.to(device)
        return self._tables[device]


def empty_weights(
    layout: ExpertLayout, hidden_size: int, dtype: torch.dtype, device: torch.device | str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return zeros: `w13 [2, S, H]` (gate rows, then up rows) and `w2 [S, H]` (down,
    transposed)."""
    w13 = torch.zeros(2, layout.num_rows, hidden_size, dtype=dtype, device=device)
    return w13, torch.zeros(layout.num_rows, hidden_size, dtype=dtype, device=device)


def pack_expert(
    layout: ExpertLayout,
    w13: torch.Tensor,
    w2: torch.Tensor,
    expert: int,
    gate_wH: torch.Tensor | None = None,
    up_wH: torch.Tensor | None = None,
    down_Hw: torch.Tensor | None = None,
) -> None:
    """Copy the given matrices of one expert into the packed weights."""
    start, width = layout.offsets[expert], layout.widths[expert]
    rows = slice(start, start + width)
    if gate_wH is not None:
        assert gate_wH.shape == (width, w13.shape[2]), (expert, gate_wH.shape, width)
        w13[0, rows] = gate_wH
    if up_wH is not None:
        assert up_wH.shape == (width, w13.shape[2]), (expert, up_wH.shape, width)
        w13[1, rows] = up_wH
    if down_Hw is not None:
        assert down_Hw.shape == (w2.shape[1], width), (expert, down_Hw.shape, width)
        w2[rows] = down_Hw.t()


def quantize_weights(
    layout: ExpertLayout, w13: torch.Tensor, w2: torch.Tensor, *, per_tensor: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Round packed weights to the nearest FP8 number; return w13, w2 and the float32 scales of
    their outputs.

    The scales of w13 are `[2, S]`, those of w2 `[E, H]` with rows in the order of
    `ExpertLayout.order`.
    per_tensor: all outputs of one expert's matrix have the same scale.
    """
    quantized = empty_weights(layout, w2.shape[1], FP8, w2.device)
    # stated, because vLLM sets another default dtype while it loads
    w13_scale = torch.ones(2, layout.num_rows, dtype=torch.float32, device=w2.device)
    w2_scale = torch.ones(layout.num_experts, w2.shape[1], dtype=torch.float32, device=w2.device)
    top = torch.finfo(FP8).max
    for position, expert in enumerate(layout.order):
        rows = slice(layout.offsets[expert], layout.offsets[expert] + layout.widths[expert])
        for weight, fp8, scales, axis in (
            (w13[0, rows], quantized[0][0, rows], w13_scale[0, rows], 1),
            (w13[1, rows], quantized[0][1, rows], w13_scale[1, rows], 1),
            (w2[rows], quantized[1][rows], w2_scale[position], 0),
        ):
            matrix = weight.float()
            largest = matrix.abs().amax((0, 1) if per_tensor else axis, keepdim=True)
            scale = (largest / top).clamp_min(torch.finfo(torch.float32).tiny)
            fp8.copy_((matrix / scale).clamp_(-top, top))
            scales.copy_(scale.flatten())
    return *quantized, w13_scale, w2_scale


def finish_weights(layout: ExpertLayout, w13: torch.Tensor, w2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Prepare the packed weights for `ragged_moe`; call it once, after loading all experts.

    Returns the same tensors on a GPU, copies in huge pages on a CPU. Padding rows are set to zero,
    because vLLM reloads weights into uninitialized memory.
    """
    for start, width, padded in zip(layout.offsets, layout.widths, layout.padded, strict=True):
        w13[:, start + width : start + padded] = 0
        w2[start + width : start + padded] = 0
    if w13.device.type != "cpu":
        return w13, w2
    moe_cpu_rows.serves(w2)  # compile the kernel now, or log why the loop runs instead
    return on_huge_pages(w13), on_huge_pages(w2)


def ragged_moe(
    x_TH: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    layout: ExpertLayout,
    topk_weights_TK: torch.Tensor,
    topk_ids_TK: torch.Tensor,
    expert_map: torch.Tensor | None = None,
    scales: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
    limit: float | None = None,
) -> torch.Tensor:
    """Run the experts of each token: `y_TH` = Σ over its experts of weight · down(silu(gate x) · up
    x).

    x_TH: bf16, fp16 or fp32, rows contiguous.
    w13, w2: packed, of the same dtype or FP8; faster on a CPU after `finish_weights`.
    topk_weights_TK: float32.
    topk_ids_TK: int32 or int64; an id of -1 adds nothing.
    expert_map: int32 `[global experts]`, the id on this rank or -1; None: the ids are this rank's
        own.
    scales: of w13 and w2 in FP8, as from `quantize_weights`.
    limit: clamps gate x from above and up x on both sides, as some models do; None: they are not
        clamped.
    Matrix products and the sum over K are computed in float32. As in vLLM's own kernels, the terms
    of the sum over K are rounded to x's dtype; the kernel of `moe_cpu_rows` does not round them.
    """
    table = layout.table(x_TH.device)
    return torch.ops.ddp_vllm.ragged_moe(
        x_TH, w13, w2, table, layout.max_width, topk_weights_TK, topk_ids_TK, expert_map, *scales, limit
    )


def _launch(
    x_TH: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    layout_3E: torch.Tensor,
    max_width: int,
    topk_weights_TK: torch.Tensor,
    topk_ids_TK: torch.Tensor,
    expert_map: torch.Tensor | None = None,
    w13_scale: torch.Tensor | None = None,
    w2_scale: torch.Tensor | None = None,
    limit: float | None = None,
) -> torch.Tensor:
    """Check the kernels' assumptions and choose the implementation; arguments as in `ragged_moe`.

    layout_3E: `ExpertLayout.table`. max_width: `ExpertLayout.max_width`, known without reading the
        table.
    """
    assert x_TH.ndim == 2 and x_TH.stride(1) == 1, (x_TH.shape, x_TH.stride())
    assert w13.dtype == w2.dtype == (x_TH.dtype if w2_scale is None else FP8), (w13.dtype, w2.dtype, x_TH.dtype)
    for scale, shape in ((w13_scale, w13.shape[:2]), (w2_scale, (layout_3E.shape[1], w2.shape[1]))):
        assert (scale is None) == (w13_scale is None)
        assert scale is None or (scale.dtype == torch.float32 and scale.shape == shape and scale.is_contiguous())
    assert w13.shape == (2, *w2.shape) and x_TH.shape[1] == w2.shape[1], (x_TH.shape, w13.shape, w2.shape)
    assert w13.is_contiguous() and w2.is_contiguous() and layout_3E.is_contiguous()
    assert layout_3E.dtype == torch.int32 and layout_3E.shape[0] == 3, (layout_3E.dtype, layout_3E.shape)
    assert topk_weights_TK.dtype == torch.float32 and topk_weights_TK.shape == topk_ids_TK.shape
    assert topk_ids_TK.shape[0] == x_TH.shape[0], (topk_ids_TK.shape, x_TH.shape)
    assert expert_map is None or expert_map.dtype == torch.int32, expert_map.dtype
    assert {t.device for t in (w13, w2, layout_3E, topk_weights_TK, topk_ids_TK)} == {x_TH.device}
    if x_TH.device.type == "cpu":
        arguments = (x_TH, w13, w2, layout_3E, topk_weights_TK, topk_ids_TK, expert_map, limit)
        if moe_cpu_rows.serves(w2):
            return moe_cpu_rows.ragged_moe(*arguments)
        return moe_cpu_rows.loop_over_experts(*arguments, w13_scale, w2_scale)
    from ddp_plugins import moe_kernel  # Triton is not installed with every CPU version of torch

    return moe_kernel.ragged_moe(
        x_TH, w13, w2, layout_3E, max_width, topk_weights_TK, topk_ids_TK, expert_map, w13_scale, w2_scale, limit
    )


def _fake(x_TH: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty(x_TH.shape, dtype=x_TH.dtype, device=x_TH.device)


# not torch.library.custom_op, whose checks per call take a large part of a small layer's time
LIBRARY = torch.library.Library("ddp_vllm", "FRAGMENT")
LIBRARY.define("ragged_moe" + torch.library.infer_schema(_launch, mutates_args=()))
LIBRARY.impl("ragged_moe", _launch, "CompositeExplicitAutograd")
torch.library.register_fake("ddp_vllm::ragged_moe", _fake, lib=LIBRARY)
