"""Gates on a GPU: their backward in one pass over activations and gradients.

The plain forms in `gates._Scale` and `experts._ScaleExperts` are the references: about 40 bytes an
element, and one thread a segment of `segment_reduce`, where 6 bytes are needed. These kernels were
compiled and run in Triton's interpreter; no GPU has run them. Sums are deterministic: every program
writes a partial sum of its own.
Legend: T tokens or S slots, sorted by expert; U units of some columns each; E experts, C channels.
"""

import torch
import triton
import triton.language as tl

ROWS, WIDTH = 16, 128  # of a tile: tokens, and channels
STEPS = 16  # tiles of a program, one below the other
SPLITS = 8  # programs that share the slots of an expert


@triton.jit  # type: ignore[untyped-decorator]
def gate_backward_kernel(  # type: ignore[no-untyped-def]
    gradient_ptr, x_ptr, mask_ptr, out_ptr, sums_ptr, squares_ptr, num_tokens, width, num_units,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Write gradient · mask, and of g·x per token and unit the sum and the sum of squares over the
    block's tokens."""
    block, tile = tl.program_id(0), tl.program_id(1)
    if COLUMNS == 1:  # a program has WIDTH units
        columns = tile * WIDTH + tl.arange(0, WIDTH)
        inside = columns < width
        mask = tl.load(mask_ptr + columns, inside, 0.0)
        sums = tl.zeros([WIDTH], tl.float32)
        squares = tl.zeros([WIDTH], tl.float32)
    else:  # one unit
        columns = tile * COLUMNS + tl.arange(0, WIDTH)
        inside = tl.arange(0, WIDTH) < COLUMNS
        mask = tl.load(mask_ptr + tile) + tl.zeros([WIDTH], tl.float32)
        sums = 0.0
        squares = 0.0
    mask = mask.to(x_ptr.dtype.element_ty).to(tl.float32)  # rounded as in forward
    for step in range(STEPS):
        rows = ((block * STEPS + step) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        places = rows[:, None] * width + columns[None, :]
        here = (rows < num_tokens)[:, None] & inside[None, :]
        gradient = tl.load(gradient_ptr + places, here, 0.0).to(tl.float32)
        products = gradient * tl.load(x_ptr + places, here, 0.0).to(tl.float32)
        tl.store(out_ptr + places, (gradient * mask[None, :]).to(out_ptr.dtype.element_ty), here)
        if COLUMNS == 1:
            sums += tl.sum(products, 0)
            squares += tl.sum(products * products, 0)
        else:
            of_unit = tl.sum(products, 1)
            sums += tl.sum(of_unit)
            squares += tl.sum(of_unit * of_unit)
    if COLUMNS == 1:
        tl.store(sums_ptr + block * num_units + columns, sums, inside)
        tl.store(squares_ptr + block * num_units + columns, squares, inside)
    else:
        tl.store(sums_ptr + block * num_units + tile, sums)
        tl.store(squares_ptr + block * num_units + tile, squares)


def gate_backward(
    gradient: torch.Tensor, x: torch.Tensor, mask_U: torch.Tensor, columns: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradient of x, that of the mask [U], and the sum over tokens of its squared
    per-token gradients [U].

    gradient, x: [..., U·columns], of one dtype. mask_U: float32.
    """
    gradient, x = gradient.contiguous(), x.contiguous()
    width, num_units = x.shape[-1], len(mask_U)
    assert width == num_units * columns and x.shape == gradient.shape and mask_U.dtype == torch.float32
    num_tokens = x.numel() // width
    out, blocks = torch.empty_like(x), triton.cdiv(num_tokens, ROWS * STEPS)
    sums_BU, squares_BU = torch.empty(2, blocks, num_units, device=x.device).unbind()
    width_of_tile = WIDTH if columns == 1 else triton.next_power_of_2(columns)
    tiles = triton.cdiv(width, WIDTH) if columns == 1 else num_units
    gate_backward_kernel[(blocks, tiles)](
        gradient, x, mask_U.contiguous(), out, sums_BU, squares_BU, num_tokens, width, num_units,
        COLUMNS=columns, WIDTH=width_of_tile, ROWS=max(1, ROWS * WIDTH // max(WIDTH, width_of_tile)),
        STEPS=STEPS * max(WIDTH, width_of_tile) // WIDTH,
    )  # fmt: skip
    return out, sums_BU.sum(0), squares_BU.sum(0)


@triton.jit  # type: ignore[untyped-decorator]
def expert_gates_kernel(  # type: ignore[no-untyped-def]
    gradient_ptr, x_ptr, mask_ptr, ends_ptr, out_ptr, sums_ptr, squares_ptr, width, num_experts,
    BACKWARD: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Multiply the slots of an expert by its gates; in backward, also sum g·x and its square over a
    part of them."""
    expert, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    columns = tile * WIDTH + tl.arange(0, WIDTH)
    inside = columns < width
    mask = tl.load(mask_ptr + expert.to(tl.int64) * width + columns, inside, 0.0)
    mask = mask.to(x_ptr.dtype.element_ty).to(tl.float32)
    stop = tl.load(ends_ptr + expert)
    start = tl.load(ends_ptr + expert - 1, expert > 0, 0)
    share = tl.cdiv(tl.cdiv(stop - start, SPLITS), ROWS) * ROWS
    first = start + split * share
    last = tl.minimum(first + share, stop)
    sums = tl.zeros([WIDTH], tl.float32)
    squares = tl.zeros([WIDTH], tl.float32)
    for row in range(first, last, ROWS):
        rows = (row + tl.arange(0, ROWS)).to(tl.int64)
        places = rows[:, None] * width + columns[None, :]
        here = (rows < last)[:, None] & inside[None, :]
        gradient = tl.load(gradient_ptr + places, here, 0.0).to(tl.float32)
        tl.store(out_ptr + places, (gradient * mask[None, :]).to(out_ptr.dtype.element_ty), here)
        if BACKWARD:
            products = gradient * tl.load(x_ptr + places, here, 0.0).to(tl.float32)
            sums += tl.sum(products, 0)
            squares += tl.sum(products * products, 0)
    if BACKWARD:
        place = (split.to(tl.int64) * num_experts + expert) * width
        tl.store(sums_ptr + place + columns, sums, inside)
        tl.store(squares_ptr + place + columns, squares, inside)


def scale_experts(x_SC: torch.Tensor, mask_EC: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """Return each slot times the gates of its expert. The slots of expert e end before ends_E[e];
    float32 masks."""
    return _launch(x_SC, x_SC, mask_EC, ends_E, None, None)


def expert_gates_backward(
    gradient_SC: torch.Tensor, x_SC: torch.Tensor, mask_EC: torch.Tensor, ends_E: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradient of x, that of the mask [E, C], and the sum over slots of its squares [E,
    C]."""
    sums_PEC, squares_PEC = torch.empty(2, SPLITS, *mask_EC.shape, device=x_SC.device).unbind()
    out_SC = _launch(gradient_SC, x_SC, mask_EC, ends_E, sums_PEC, squares_PEC)
    return out_SC, sums_PEC.sum(0), squares_PEC.sum(0)


def _launch(
    gradient_SC: torch.Tensor, x_SC: torch.Tensor, mask_EC: torch.Tensor, ends_E: torch.Tensor,
    sums_PEC: torch.Tensor | None, squares_PEC: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    gradient_SC, x_SC, mask_EC = gradient_SC.contiguous(), x_SC.contiguous(), mask_EC.contiguous()
    num_experts, width = mask_EC.shape
    assert x_SC.shape[1] == width and mask_EC.dtype == torch.float32
    out_SC = torch.empty_like(x_SC)
    grid = num_experts, triton.cdiv(width, WIDTH), SPLITS
    expert_gates_kernel[grid](
        gradient_SC, x_SC, mask_EC, ends_E, out_SC, out_SC if sums_PEC is None else sums_PEC,
        out_SC if squares_PEC is None else squares_PEC, width, num_experts,
        BACKWARD=sums_PEC is not None, SPLITS=SPLITS, ROWS=ROWS, WIDTH=WIDTH,
    )  # fmt: skip
    return out_SC
