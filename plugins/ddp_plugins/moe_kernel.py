"""Runs experts of different widths on a GPU in four Triton launches whose grids depend on shapes
only.

1. `sort_pairs`: one program per expert counts and lists the (token, slot) pairs routed to it.
2. `gate_up`: silu(gate x) · up x, over tiles of pairs and of each expert's own channels.
3. `down`: projects back to the hidden size, a ragged sum over channels, times the routing weight.
4. `add_slots`: sums over a token's K experts, always in the same order.

No tile map is stored. Every program of 2 and 3 reads the number of pairs of each expert, computes
prefix sums of the experts' tiles and so finds its own tiles, from the widest expert to the
narrowest. Nothing is copied to the host and no number is added atomically, so the same input
produces the same bits, also inside a CUDA graph.

Letters: T tokens, H hidden size, K experts per token, P = T·K pairs, E experts, S packed rows, W
rows of the widest expert. A position is an expert's index in `ExpertLayout.order`.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# (Triton functions have no Python types)

import math
from dataclasses import dataclass, replace
from functools import cache

import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

from ddp_plugins.moe_experts import FP8
from ddp_plugins.moe_products import multiply_down, multiply_gate_up, position_of, start_after_the_launch_before

# pairs per block: all pairs of a decode step, many of a prefill
SORT_BLOCK, WIDE_SORT_BLOCK = 1024, 8192
SUM_BLOCK = 256


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """Tile sizes of one launch; powers of two."""

    pairs: int
    """Pairs per tile; tensor cores require at least 16."""
    columns: int
    """Channels per tile of `gate_up`, both of gate and of up."""
    down_columns: int
    """Hidden units per tile of `down`: twice `columns` in large tiles, so that both launches read
    as much per step."""
    depth: int
    """Numbers per step of the inner sum."""
    warps: int
    stages: int
    programs: int
    """Maximum number of programs per multiprocessor."""


# Sized to fit Hopper: accumulators in registers, the stages of all programs in shared memory.
# Chosen by times on an H100 (benchmarks/results/gpu/h100.json).
FEW = Tiles(pairs=16, columns=64, down_columns=128, depth=128, warps=4, stages=3, programs=3)
SOME = Tiles(pairs=64, columns=64, down_columns=128, depth=64, warps=4, stages=4, programs=2)
MANY = Tiles(pairs=128, columns=128, down_columns=256, depth=64, warps=8, stages=4, programs=1)
# Two of these programs fit the shared memory of any GPU.
NARROW = Tiles(pairs=16, columns=32, down_columns=32, depth=128, warps=4, stages=3, programs=4)
# Only the tensor cores of Hopper and B200 read shared memory; other GPUs need registers for the
# operands too.
SOME_IN_REGISTERS = Tiles(pairs=64, columns=64, down_columns=128, depth=32, warps=4, stages=4, programs=2)
MANY_IN_REGISTERS = Tiles(pairs=128, columns=64, down_columns=128, depth=32, warps=8, stages=4, programs=1)
# FP8 weights take registers while they are converted, and half of the shared memory.
FOR_FP8 = {NARROW: replace(NARROW, programs=3), FEW: replace(FEW, down_columns=64, depth=64, stages=4)}
# for float32, which only tests use: no tensor cores
EXACT = Tiles(pairs=16, columns=32, down_columns=32, depth=32, warps=4, stages=2, programs=4)
# The mean number of pairs per expert up to which tiles are chosen. A tile of 16 rows reads the
# weights again for every 16 pairs: with more than 8, random routing gives many experts a second
# tile, and the reads from L2 take longer than those from HBM. The limits of other GPUs were not
# modeled.
HOPPER_TILES = ((8, FEW), (48, SOME), (math.inf, MANY))
OTHER_TILES = ((24, NARROW), (96, SOME_IN_REGISTERS), (math.inf, MANY_IN_REGISTERS))


def tiles_of(dtype: torch.dtype, major: int) -> tuple[tuple[float, Tiles], ...]:
    """Return all tiles of a GPU, each with the pairs per expert up to which it is chosen.

    dtype: of the weights. major: the first number of the GPU's compute capability.
    """
    if dtype == torch.float32:
        return ((math.inf, EXACT),)
    rows = HOPPER_TILES if major in (9, 10) else OTHER_TILES
    return tuple((limit, FOR_FP8.get(tiles, tiles) if dtype == FP8 else tiles) for limit, tiles in rows)


def choose_tiles(num_pairs: int, num_experts: int, dtype: torch.dtype, major: int) -> Tiles:
    """Choose tile sizes by the mean number of pairs per expert.

    With few pairs per expert, every tile size reads the weights once, and small tiles occupy the
    whole GPU. With many, wide tiles reuse the weights they read. dtype, major: as in `tiles_of`.
    """
    return next(tiles for limit, tiles in tiles_of(dtype, major) if num_pairs <= limit * max(num_experts, 1))


@triton.jit(do_not_specialize=["num_pairs"])  # otherwise 1 and multiples of 16 recompile
def sort_pairs(
    ids_ptr,  # [P] int32 or int64
    position_ptr,  # [E] int32
    expert_map_ptr,  # [global experts] int32, or anything where HAS_MAP is false
    order_ptr,  # out: [P] int32, pair indices, sorted by position
    first_ptr,  # out: [E] int32, start of each position's pairs in `order`
    count_ptr,  # out: [E] int32
    num_pairs,
    HAS_MAP: tl.constexpr,
    DEPENDENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per position: count its pairs and the pairs of earlier positions, then list its
    own in order."""
    start_after_the_launch_before(DEPENDENT)
    mine = tl.program_id(0)
    before = 0
    count = 0
    for start in range(0, num_pairs, BLOCK):
        pair = start + tl.arange(0, BLOCK)
        ids = tl.load(ids_ptr + pair, mask=pair < num_pairs, other=-1).to(tl.int32)
        position = position_of(ids, position_ptr, expert_map_ptr, HAS_MAP)
        before += tl.sum(((position >= 0) & (position < mine)).to(tl.int32))
        count += tl.sum((position == mine).to(tl.int32))
    tl.store(first_ptr + mine, before)
    tl.store(count_ptr + mine, count)
    listed = before
    for start in range(0, num_pairs, BLOCK):
        pair = start + tl.arange(0, BLOCK)
        ids = tl.load(ids_ptr + pair, mask=pair < num_pairs, other=-1).to(tl.int32)
        position = position_of(ids, position_ptr, expert_map_ptr, HAS_MAP)
        found = (position == mine).to(tl.int32)
        slot = listed + tl.cumsum(found) - found
        tl.store(order_ptr + slot, pair, mask=position == mine)
        listed += tl.sum(found)


@triton.jit
def _ends_of_tiles(count_ptr, columns, NUM_EXPERTS: tl.constexpr, EXPERTS: tl.constexpr, PAIRS: tl.constexpr):
    """Tiles of each position (pair blocks × `columns`), and their prefix sums, its own included."""
    position = tl.arange(0, EXPERTS)
    count = tl.load(count_ptr + position, mask=position < NUM_EXPERTS, other=0)
    tiles = (count + PAIRS - 1) // PAIRS * columns
    return tiles, tl.cumsum(tiles)


@triton.jit
def _find_tile(tile, tiles, ends, first_ptr, count_ptr, PAIRS: tl.constexpr, COLUMNS: tl.constexpr):
    """The position a tile belongs to, its slots in `order`, which slots are in use, and its
    columns."""
    position = tl.sum((ends <= tile).to(tl.int32))
    within = tile - tl.sum(tl.where(ends <= tile, tiles, 0))
    count = tl.load(count_ptr + position)
    pair_blocks = (count + PAIRS - 1) // PAIRS
    # consecutive tiles share a tile of weights: pairs vary fastest
    row = within % pair_blocks * PAIRS + tl.arange(0, PAIRS)
    column = within // pair_blocks * COLUMNS + tl.arange(0, COLUMNS)
    return position, tl.load(first_ptr + position) + row, row < count, column


@triton.jit
def gate_up(
    x_ptr,  # [T, H]
    w13_ptr,  # [2, S, H]
    w13_scale_ptr,  # [2, S] float32, or None where the weights have no scales
    # out: [P, W], rows sorted as `order`; columns beyond an expert's width are not written
    hidden_ptr,
    offset_ptr,  # [E] int32, by position
    width_ptr,  # [E] int32, by position
    order_ptr,
    first_ptr,
    count_ptr,
    num_rows,  # S
    x_stride,
    hidden_stride,  # W
    num_slots,  # K
    H: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,  # next power of two
    DEPENDENT: tl.constexpr,
    PAIRS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    UPCAST: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """Each program computes every n-th tile of pairs × channels; an expert's tiles end at its own
    width."""
    start_after_the_launch_before(DEPENDENT)
    every = tl.arange(0, EXPERTS)
    widths = tl.load(width_ptr + every, mask=every < NUM_EXPERTS, other=0)
    tiles, ends = _ends_of_tiles(count_ptr, (widths + COLUMNS - 1) // COLUMNS, NUM_EXPERTS, EXPERTS, PAIRS)
    for tile in range(tl.program_id(0), tl.sum(tiles), tl.num_programs(0)):
        position, slot, has_row, column = _find_tile(tile, tiles, ends, first_ptr, count_ptr, PAIRS, COLUMNS)
        # the hint that widths are multiples of 16 lets the compiler use masked loads of 16 bytes
        has_column = column < tl.multiple_of(tl.load(width_ptr + position), 16)
        token = tl.load(order_ptr + slot, mask=has_row, other=0) // num_slots
        value = multiply_gate_up(
            x_ptr, w13_ptr, w13_scale_ptr, token, has_row, tl.load(offset_ptr + position) + column, has_column,
            num_rows, x_stride, H, PAIRS, COLUMNS, DEPTH, UPCAST, LIMIT,
        )  # fmt: skip
        out = hidden_ptr + slot.to(tl.int64)[:, None] * hidden_stride + column[None, :]
        tl.store(out, value.to(hidden_ptr.dtype.element_ty), mask=has_row[:, None] & has_column[None, :])


@triton.jit
def down(
    hidden_ptr,  # [P, W]
    w2_ptr,  # [S, H]
    w2_scale_ptr,  # [E, H] float32, by position, or None
    # out: [P, H], rows by pair index; pairs without an expert on this rank are not written
    terms_ptr,
    weight_ptr,  # [P] float32
    offset_ptr,
    width_ptr,
    order_ptr,
    first_ptr,
    count_ptr,
    hidden_stride,
    H: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    DEPENDENT: tl.constexpr,
    PAIRS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Each program computes every n-th tile of pairs × hidden units; the inner sum ends at the
    expert's width."""
    start_after_the_launch_before(DEPENDENT)
    tiles, ends = _ends_of_tiles(count_ptr, (H + COLUMNS - 1) // COLUMNS, NUM_EXPERTS, EXPERTS, PAIRS)
    for tile in range(tl.program_id(0), tl.sum(tiles), tl.num_programs(0)):
        position, slot, has_row, column = _find_tile(tile, tiles, ends, first_ptr, count_ptr, PAIRS, COLUMNS)
        has_column = column < H
        total = multiply_down(
            hidden_ptr, w2_ptr, w2_scale_ptr, position, slot, has_row, column, has_column,
            tl.load(offset_ptr + position), tl.multiple_of(tl.load(width_ptr + position), 16),
            hidden_stride, H, PAIRS, COLUMNS, DEPTH, UPCAST,
        )  # fmt: skip
        pair = tl.load(order_ptr + slot, mask=has_row, other=0)
        total *= tl.load(weight_ptr + pair, mask=has_row, other=0.0)[:, None]
        out = terms_ptr + pair.to(tl.int64)[:, None] * H + column[None, :]
        tl.store(out, total.to(terms_ptr.dtype.element_ty), mask=has_row[:, None] & has_column[None, :])


@triton.jit
def add_slots(
    terms_ptr,  # [P, H]
    ids_ptr,  # [P]
    position_ptr,
    expert_map_ptr,
    y_ptr,  # out: [T, H]
    NUM_SLOTS: tl.constexpr,  # K
    H: tl.constexpr,
    HAS_MAP: tl.constexpr,
    DEPENDENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per token and block of hidden units: sum the written terms in float32, in the
    order of the slots."""
    start_after_the_launch_before(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    sum_ = tl.zeros((BLOCK,), tl.float32)
    for slot in tl.static_range(NUM_SLOTS):
        pair = token * NUM_SLOTS + slot + tl.zeros_like(column)  # a vector, as position_of requires
        has_term = position_of(tl.load(ids_ptr + pair).to(tl.int32), position_ptr, expert_map_ptr, HAS_MAP) >= 0
        sum_ += tl.load(terms_ptr + pair * H + column, mask=has_term & (column < H), other=0.0).to(tl.float32)
    tl.store(y_ptr + token * H + column, sum_.to(y_ptr.dtype.element_ty), mask=column < H)


def ragged_moe(
    x_TH: torch.Tensor,
    w13_2SH: torch.Tensor,
    w2_SH: torch.Tensor,
    layout_3E: torch.Tensor,
    max_width: int,
    topk_weights_TK: torch.Tensor,
    topk_ids_TK: torch.Tensor,
    expert_map: torch.Tensor | None,
    w13_scale_2S: torch.Tensor | None = None,
    w2_scale_EH: torch.Tensor | None = None,
    limit: float | None = None,
    tiles: Tiles | None = None,
) -> torch.Tensor:
    """Return `y_TH`; arguments as in `moe_experts.ragged_moe`. tiles: None for `choose_tiles`."""
    (num_tokens, num_slots), hidden_size = topk_ids_TK.shape, x_TH.shape[1]
    num_pairs, num_experts = num_tokens * num_slots, layout_3E.shape[1]
    y_TH = torch.empty((num_tokens, hidden_size), dtype=x_TH.dtype, device=x_TH.device)
    if not num_tokens:
        return y_TH
    if not max_width:
        return y_TH.zero_()
    # topk_ids include the experts of all ranks
    all_experts = num_experts if expert_map is None else len(expert_map)
    major, multiprocessors = _machine(x_TH.device)
    tiles = tiles or choose_tiles(num_pairs, all_experts, w2_SH.dtype, major)
    ids, weights = topk_ids_TK.contiguous(), topk_weights_TK.contiguous()
    position, offset, width = layout_3E
    mapping = position if expert_map is None else expert_map
    has_map = expert_map is not None
    hidden_PW, terms_PH = x_TH.new_empty(num_pairs, max_width), x_TH.new_empty(num_pairs, hidden_size)
    # upper bound for any routing
    pair_blocks = min(num_pairs, num_pairs // tiles.pairs + num_experts)
    machine, num_blocks = multiprocessors * tiles.programs, triton.cdiv(hidden_size, tiles.down_columns)
    gate_up_grid = (min(machine, pair_blocks * triton.cdiv(max_width, tiles.columns)),)
    down_grid = (min(machine, pair_blocks * num_blocks),)
    # Programmatic dependent launch: a launch starts up while the one before ends.
    dependent = x_TH.is_cuda and torch.version.cuda is not None and major >= 9
    launch = {"DEPENDENT": dependent} | ({"launch_pdl": True} if dependent else {})
    constants = launch | {
        "H": hidden_size, "PAIRS": tiles.pairs, "DEPTH": tiles.depth, "UPCAST": isinstance(down, InterpretedFunction),
        "num_warps": tiles.warps, "num_stages": tiles.stages,
    }  # fmt: skip
    order, (first, count) = ids.new_empty(num_pairs, dtype=torch.int32), position.new_empty(2, num_experts)
    block, warps = (SORT_BLOCK, 4) if num_pairs <= SORT_BLOCK else (WIDE_SORT_BLOCK, 16)
    sort_pairs[(num_experts,)](
        ids, position, mapping, order, first, count, num_pairs, HAS_MAP=has_map, BLOCK=block, num_warps=warps, **launch
    )
    constants |= {"NUM_EXPERTS": num_experts, "EXPERTS": triton.next_power_of_2(num_experts)}
    gate_up[gate_up_grid](
        x_TH, w13_2SH, w13_scale_2S, hidden_PW, offset, width, order, first, count,
        w2_SH.shape[0], x_TH.stride(0), max_width, num_slots, COLUMNS=tiles.columns, LIMIT=limit, **constants,
    )  # fmt: skip
    down[down_grid](
        hidden_PW, w2_SH, w2_scale_EH, terms_PH, weights, offset, width, order, first, count, max_width,
        COLUMNS=tiles.down_columns, **constants,
    )  # fmt: skip
    add_slots[(num_tokens, triton.cdiv(hidden_size, SUM_BLOCK))](
        terms_PH, ids, position, mapping, y_TH,
        NUM_SLOTS=num_slots, H=hidden_size, HAS_MAP=has_map, BLOCK=SUM_BLOCK, **launch,
    )  # fmt: skip
    return y_TH


def warm_up(
    w13_2SH: torch.Tensor,
    w2_SH: torch.Tensor,
    layout_3E: torch.Tensor,
    max_width: int,
    num_slots: int,
    expert_map: torch.Tensor | None,
    scales: tuple[torch.Tensor | None, torch.Tensor | None],
    limit: float | None,
    dtype: torch.dtype,
) -> None:
    """Compile the kernels for batches of every size now, so that no later batch waits.

    num_slots: K. scales: of w13 and w2. dtype: of the batches.
    """
    major, _ = _machine(w2_SH.device)
    for num_tokens in (1, SORT_BLOCK // num_slots + 1):
        x_TH = w2_SH.new_zeros(num_tokens, w2_SH.shape[1], dtype=dtype)
        weights_TK = torch.zeros(num_tokens, num_slots, device=x_TH.device)
        ids_TK = torch.zeros_like(weights_TK, dtype=torch.int32)
        for _, tiles in tiles_of(w2_SH.dtype, major):
            ragged_moe(
                x_TH, w13_2SH, w2_SH, layout_3E, max_width, weights_TK, ids_TK, expert_map, *scales, limit, tiles
            )


@cache
def _machine(device: torch.device) -> tuple[int, int]:
    """Return the first number of a GPU's compute capability, and its number of multiprocessors.

    The interpreter simulates a Hopper GPU with 3, so that each program computes several tiles.
    """
    if device.type != "cuda":
        return 9, 3
    properties = torch.cuda.get_device_properties(device)
    return properties.major, properties.multi_processor_count
