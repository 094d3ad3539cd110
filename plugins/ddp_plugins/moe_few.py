"""Runs experts on few (token, slot) pairs in two launches instead of four, because launches
dominate there.

1. `gate_up_few`: as `moe_kernel.gate_up`, but each program compares all pairs with each other
   instead of reading a sorted list.
2. `down_few`: as `moe_kernel.down`, but the program that writes the last term of a token also sums
   the token's terms, always in the order of its slots. So the same input produces the same bits.

Letters as in `moe_kernel.py`. The first pair with a position stands for all pairs with it: it has
all of their tiles.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# (Triton functions have no Python types)

import triton
import triton.language as tl

from ddp_plugins.moe_products import multiply_down, multiply_gate_up, position_of, start_after_the_launch_before

MOST_PAIRS = 64  # they are compared with each other in registers


@triton.jit
def _group(ids_ptr, position_ptr, expert_map_ptr, num_pairs, HAS_MAP: tl.constexpr, MOST: tl.constexpr):
    """Position of each pair, and the numbers of earlier pairs and of all pairs with the same
    position."""
    pair = tl.arange(0, MOST)
    ids = tl.load(ids_ptr + pair, mask=pair < num_pairs, other=-1).to(tl.int32)
    position = position_of(ids, position_ptr, expert_map_ptr, HAS_MAP)
    same = (position[:, None] == position[None, :]).to(tl.int32)
    earlier = tl.sum(tl.where(pair[None, :] < pair[:, None], same, 0), 1)
    return position, earlier, tl.sum(same, 1)


@triton.jit
def _find_tile(tile, tiles, position, earlier, count, PAIRS: tl.constexpr, COLUMNS: tl.constexpr, MOST: tl.constexpr):
    """The position a tile belongs to, its pairs, which of its rows are in use, its block of columns
    and its columns."""
    pair = tl.arange(0, MOST)
    ends = tl.cumsum(tiles)
    first = tl.sum((ends <= tile).to(tl.int32))
    mine = tl.sum(tl.where(pair == first, position, 0))
    number = tl.sum(tl.where(pair == first, count, 0))
    within = tile - tl.sum(tl.where(ends <= tile, tiles, 0))
    pair_blocks = (number + PAIRS - 1) // PAIRS
    row = within % pair_blocks * PAIRS + tl.arange(0, PAIRS)
    is_row = (position[None, :] == mine) & (earlier[None, :] == row[:, None])
    block = within // pair_blocks
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    return mine, tl.sum(tl.where(is_row, pair[None, :], 0), 1), row < number, block, column


@triton.jit(do_not_specialize=["num_pairs"])
def gate_up_few(
    x_ptr,  # [T, H]
    w13_ptr,  # [2, S, H]
    w13_scale_ptr,  # [2, S] float32, or None where the weights have no scales
    hidden_ptr,  # out: [P, W], rows by pair index
    written_ptr,  # out: [T, NUM_BLOCKS] int32, zeros
    ids_ptr,  # [P] int32 or int64
    position_ptr,  # [E] int32
    expert_map_ptr,  # [global experts] int32, or anything where HAS_MAP is false
    offset_ptr,  # [E] int32, by position
    width_ptr,  # [E] int32, by position
    num_pairs,
    num_rows,  # S
    x_stride,
    hidden_stride,  # W
    NUM_SLOTS: tl.constexpr,  # K
    NUM_BLOCKS: tl.constexpr,  # of hidden units, in `down_few`
    HAS_MAP: tl.constexpr,
    MOST: tl.constexpr,
    DEPENDENT: tl.constexpr,
    H: tl.constexpr,
    PAIRS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    UPCAST: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """Each program computes every n-th tile of pairs × channels; an expert's tiles end at its own
    width."""
    start_after_the_launch_before(DEPENDENT)
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    num_counts = num_pairs // NUM_SLOTS * NUM_BLOCKS
    for start in range(program * MOST, num_counts, num_programs * MOST):
        written = start + tl.arange(0, MOST)
        tl.store(written_ptr + written, tl.zeros_like(written), mask=written < num_counts)
    position, earlier, count = _group(ids_ptr, position_ptr, expert_map_ptr, num_pairs, HAS_MAP, MOST)
    widths = tl.load(width_ptr + position, mask=(position >= 0) & (earlier == 0), other=0)
    tiles = (count + PAIRS - 1) // PAIRS * ((widths + COLUMNS - 1) // COLUMNS)
    for tile in range(program, tl.sum(tiles), num_programs):
        mine, pair, has_row, _, column = _find_tile(tile, tiles, position, earlier, count, PAIRS, COLUMNS, MOST)
        has_column = column < tl.multiple_of(tl.load(width_ptr + mine), 16)
        value = multiply_gate_up(
            x_ptr, w13_ptr, w13_scale_ptr, pair // NUM_SLOTS, has_row, tl.load(offset_ptr + mine) + column, has_column,
            num_rows, x_stride, H, PAIRS, COLUMNS, DEPTH, UPCAST, LIMIT,
        )  # fmt: skip
        out = hidden_ptr + pair.to(tl.int64)[:, None] * hidden_stride + column[None, :]
        tl.store(out, value.to(hidden_ptr.dtype.element_ty), mask=has_row[:, None] & has_column[None, :])


@triton.jit(do_not_specialize=["num_pairs"])
def down_few(
    hidden_ptr,  # [P, W]
    w2_ptr,  # [S, H]
    w2_scale_ptr,  # [E, H] float32, by position, or None
    terms_ptr,  # out: [P, H], rows by pair index
    y_ptr,  # out: [T, H]
    written_ptr,  # [T, NUM_BLOCKS] int32: terms of a token that are written, zeros at first
    weight_ptr,  # [P] float32
    ids_ptr,
    position_ptr,
    expert_map_ptr,
    offset_ptr,
    width_ptr,
    num_pairs,
    hidden_stride,
    NUM_SLOTS: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    HAS_MAP: tl.constexpr,
    MOST: tl.constexpr,
    DEPENDENT: tl.constexpr,
    H: tl.constexpr,
    PAIRS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Each program computes every n-th tile of pairs × hidden units, and sums the tokens that it
    completes."""
    start_after_the_launch_before(DEPENDENT)
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    position, earlier, count = _group(ids_ptr, position_ptr, expert_map_ptr, num_pairs, HAS_MAP, MOST)
    token_of = tl.arange(0, MOST) // NUM_SLOTS
    for row in range(program, num_pairs // NUM_SLOTS, num_programs):
        if tl.sum(((token_of == row) & (position >= 0)).to(tl.int32)) == 0:  # a token without terms
            for start in range(0, H, 16 * MOST):
                unit = start + tl.arange(0, 16 * MOST)
                tl.store(y_ptr + row * H + unit, tl.zeros((16 * MOST,), y_ptr.dtype.element_ty), mask=unit < H)
    tiles = tl.where((position >= 0) & (earlier == 0), (count + PAIRS - 1) // PAIRS * NUM_BLOCKS, 0)
    for tile in range(program, tl.sum(tiles), num_programs):
        mine, pair, has_row, block, column = _find_tile(tile, tiles, position, earlier, count, PAIRS, COLUMNS, MOST)
        has_column = column < H
        total = multiply_down(
            hidden_ptr, w2_ptr, w2_scale_ptr, mine, pair, has_row, column, has_column, tl.load(offset_ptr + mine),
            tl.multiple_of(tl.load(width_ptr + mine), 16), hidden_stride, H, PAIRS, COLUMNS, DEPTH, UPCAST,
        )  # fmt: skip
        total *= tl.load(weight_ptr + pair, mask=has_row, other=0.0)[:, None]
        mask = has_row[:, None] & has_column[None, :]
        out = terms_ptr + pair.to(tl.int64)[:, None] * H + column[None, :]
        tl.store(out, total.to(terms_ptr.dtype.element_ty), mask=mask)
        tl.debug_barrier()  # every thread's terms are written before this program counts them
        token = pair // NUM_SLOTS
        others = (token_of[None, :] == token[:, None]) & (position >= 0)[None, :]
        num_before = tl.atomic_add(written_ptr + token * NUM_BLOCKS + block, 1, mask=has_row, sem="acq_rel")
        is_last = has_row & (num_before + 1 == tl.sum(others.to(tl.int32), 1))
        tl.debug_barrier()  # no thread reads terms before all terms are counted
        if tl.sum(is_last.to(tl.int32)) > 0:
            sum_ = tl.zeros((PAIRS, COLUMNS), tl.float32)
            for slot in range(NUM_SLOTS):
                other = token * NUM_SLOTS + slot
                ids = tl.load(ids_ptr + other, mask=is_last, other=-1).to(tl.int32)
                has_term = position_of(ids, position_ptr, expert_map_ptr, HAS_MAP) >= 0
                terms = terms_ptr + other.to(tl.int64)[:, None] * H + column[None, :]
                sum_ += tl.load(
                    terms, mask=has_term[:, None] & has_column[None, :], other=0.0, cache_modifier=".cg"
                ).to(tl.float32)
            y_ptrs = y_ptr + token.to(tl.int64)[:, None] * H + column[None, :]
            tl.store(y_ptrs, sum_.to(y_ptr.dtype.element_ty), mask=is_last[:, None] & has_column[None, :])
