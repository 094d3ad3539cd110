"""The parts that all Triton kernels for experts share: an expert's position, and the product of one
tile.

Letters as in `moe_kernel.py`. A row of a tile is a pair, a column a channel or a hidden unit.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# (Triton functions have no Python types)

import triton
import triton.language as tl


@triton.jit
def start_after_the_launch_before(DEPENDENT: tl.constexpr):
    """Let the next launch start up meanwhile, and wait until the launch before has written its
    results.

    DEPENDENT: whether this is a programmatic dependent launch. Nothing may be read or written
        before.
    """
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def position_of(ids, position_ptr, expert_map_ptr, HAS_MAP: tl.constexpr):
    """Position of each expert id; -1 for an id of -1, an expert of another rank or one without
    rows."""
    if HAS_MAP:
        ids = tl.load(expert_map_ptr + ids, mask=ids >= 0, other=-1)
    return tl.load(position_ptr + ids, mask=ids >= 0, other=-1)


@triton.jit
def _multiply(a, b, sum_, UPCAST: tl.constexpr):
    """sum + a @ b in float32, without rounding float32 operands. An FP8 number of `b` is exact in
    the type of `a`.

    UPCAST: for Triton's interpreter, which multiplies the bits of bfloat16 as integers.
    """
    if UPCAST:
        a = a.to(tl.float32)
    b = b.to(a.dtype)
    return tl.dot(a, b, sum_, input_precision="ieee")


@triton.jit
def multiply_gate_up(
    x_ptr,  # [T, H]
    w13_ptr,  # [2, S, H]
    w13_scale_ptr,  # [2, S] float32, or None where the weights have no scales
    token,
    has_row,
    weight_row,  # of each column
    has_column,
    num_rows,  # S
    x_stride,
    H: tl.constexpr,
    PAIRS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    UPCAST: tl.constexpr,
    LIMIT: tl.constexpr,  # or None
):
    """silu(gate x) · up x of a tile, in float32; gate x is at most the limit, and up x between both
    limits."""
    depth = tl.arange(0, DEPTH)
    up_start = num_rows.to(tl.int64) * H
    x_ptrs = x_ptr + token.to(tl.int64)[:, None] * x_stride + depth[None, :]
    w_ptrs = w13_ptr + weight_row.to(tl.int64)[None, :] * H + depth[:, None]
    gate = tl.zeros((PAIRS, COLUMNS), tl.float32)
    up = tl.zeros((PAIRS, COLUMNS), tl.float32)
    for start in range(0, H, DEPTH):
        has_depth = start + depth < H
        x = tl.load(x_ptrs + start, mask=has_row[:, None] & has_depth[None, :], other=0.0)
        w_mask = has_depth[:, None] & has_column[None, :]
        gate = _multiply(x, tl.load(w_ptrs + start, mask=w_mask, other=0.0), gate, UPCAST)
        up = _multiply(x, tl.load(w_ptrs + up_start + start, mask=w_mask, other=0.0), up, UPCAST)
    if w13_scale_ptr is not None:
        gate *= tl.load(w13_scale_ptr + weight_row, mask=has_column, other=0.0)[None, :]
        up *= tl.load(w13_scale_ptr + num_rows + weight_row, mask=has_column, other=0.0)[None, :]
    if LIMIT is not None:
        gate, up = tl.minimum(gate, LIMIT), tl.clamp(up, -LIMIT, LIMIT)
    return gate * tl.sigmoid(gate) * up


@triton.jit
def multiply_down(
    hidden_ptr,  # [P, W]
    w2_ptr,  # [S, H]
    w2_scale_ptr,  # [E, H] float32, by position, or None
    position,
    row,  # of each pair in `hidden`
    has_row,
    column,
    has_column,
    first,  # the expert's first row in `w2`
    width,  # hinted as a multiple of 16, which lets the compiler use masked loads of 16 bytes
    hidden_stride,
    H: tl.constexpr,
    PAIRS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """The product of a tile with the transposed down projection, in float32; the sum ends at the
    expert's width."""
    depth = tl.arange(0, DEPTH)
    h_ptrs = hidden_ptr + row.to(tl.int64)[:, None] * hidden_stride + depth[None, :]
    w_ptrs = w2_ptr + (first + depth).to(tl.int64)[:, None] * H + column[None, :]
    total = tl.zeros((PAIRS, COLUMNS), tl.float32)
    for start in range(0, width, DEPTH):
        # mask both: beyond the width are another expert's rows and unwritten columns
        has_depth = start + depth < width
        h = tl.load(h_ptrs + start, mask=has_row[:, None] & has_depth[None, :], other=0.0)
        w = tl.load(w_ptrs, mask=has_depth[:, None] & has_column[None, :], other=0.0)
        total = _multiply(h, w, total, UPCAST)
        w_ptrs += DEPTH * H
    if w2_scale_ptr is not None:
        total *= tl.load(w2_scale_ptr + position * H + column, mask=has_column, other=0.0)[None, :]
    return total
