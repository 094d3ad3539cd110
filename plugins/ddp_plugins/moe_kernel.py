"""Experts of different widths on a GPU: four Triton launches whose grids depend on shapes only.

1. `sort_pairs`: one program an expert counts and lists the (token, slot) pairs that chose it.
2. `gate_up`: silu(gate x) · up x, over tiles of pairs and the channels each expert really has.
3. `down`: back to the hidden size, a ragged sum over channels, times the routing weight.
4. `add_slots`: the sum over a token's K experts, always in the same order.

No tile map is stored. Every program of 2 and 3 reads how many pairs each expert has, adds up the tiles before each and
so finds its own; tiles run from the widest expert to the narrowest. Nothing comes back to the host, and nothing is
added atomically: the same input gives the same bits, also inside a CUDA graph.

Letters: T tokens, H hidden size, K experts a token, P = T·K pairs, E experts, S packed rows, W rows of the widest
expert. A place is an expert's position in `ExpertLayout.order`.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# (a Triton function has no Python types)

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

SORT_BLOCK, WIDE_SORT_BLOCK = 1024, 8192  # pairs a program looks at at once: of a decode step all, of a prefill many
SUM_BLOCK = 256


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """Sizes of one launch; powers of two."""

    pairs: int
    """Pairs a tile: 16 is the least a tensor core takes."""
    columns: int
    """Channels a tile of `gate_up`, each of gate and up."""
    down_columns: int
    """Hidden units a tile of `down`; where tiles are reused twice as many, so that a step reads as much."""
    depth: int
    """Numbers a step of the inner sum reads."""
    warps: int
    stages: int
    programs: int
    """Programs a multiprocessor at most."""


# By what fits Hopper: accumulators in registers, the stages of all programs in shared memory. Never run on a GPU, not
# tuned. Where shared memory is smaller, two of FEW's programs fit at once and the others take their turn.
FEW = Tiles(pairs=16, columns=32, down_columns=32, depth=128, warps=4, stages=3, programs=4)
SOME = Tiles(pairs=64, columns=64, down_columns=128, depth=64, warps=4, stages=4, programs=2)
MANY = Tiles(pairs=128, columns=128, down_columns=256, depth=64, warps=8, stages=3, programs=1)
# Only Hopper's and B200's tensor cores read shared memory; others hold what they multiply in registers too.
SOME_IN_REGISTERS = Tiles(pairs=64, columns=64, down_columns=128, depth=32, warps=4, stages=4, programs=2)
MANY_IN_REGISTERS = Tiles(pairs=128, columns=64, down_columns=128, depth=32, warps=8, stages=4, programs=1)
FEW_PAIRS, SOME_PAIRS = 24, 96  # an expert, up to which they are taken
# float32 is for tests: no tensor cores
EXACT = Tiles(pairs=16, columns=32, down_columns=32, depth=32, warps=4, stages=2, programs=4)


def choose_tiles(num_pairs: int, num_experts: int, dtype: torch.dtype, major: int) -> Tiles:
    """Return the tiles for so many pairs over so many experts, were they spread evenly.

    With few pairs an expert the weights are read once whatever the tile, so narrow tiles fill the machine; with many
    the wide ones reuse what they read. major: the first number of the GPU's compute capability.
    """
    if dtype == torch.float32:
        return EXACT
    pairs_per_expert = num_pairs / max(num_experts, 1)
    if pairs_per_expert <= FEW_PAIRS:
        return FEW
    if major in (9, 10):
        return SOME if pairs_per_expert <= SOME_PAIRS else MANY
    return SOME_IN_REGISTERS if pairs_per_expert <= SOME_PAIRS else MANY_IN_REGISTERS


@triton.jit
def _place_of(ids, place_ptr, expert_map_ptr, HAS_MAP: tl.constexpr):
    """Place of each expert id; -1 for an id of -1, an expert of another rank or one without rows."""
    if HAS_MAP:
        ids = tl.load(expert_map_ptr + ids, mask=ids >= 0, other=-1)
    return tl.load(place_ptr + ids, mask=ids >= 0, other=-1)


@triton.jit(do_not_specialize=["num_pairs"])  # its batches are all sizes: else 1 and multiples of 16 compile anew
def sort_pairs(
    ids_ptr,  # [P] int32 or int64
    place_ptr,  # [E] int32
    expert_map_ptr,  # [global experts] int32, or anything where HAS_MAP is false
    order_ptr,  # out: [P] int32, pairs' numbers, sorted by place
    first_ptr,  # out: [E] int32, where the pairs of a place start in `order`
    count_ptr,  # out: [E] int32
    num_pairs,
    HAS_MAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a place: count the pairs of it and of those before it, then list its own in rising order."""
    mine = tl.program_id(0)
    before = 0
    count = 0
    for start in range(0, num_pairs, BLOCK):
        pair = start + tl.arange(0, BLOCK)
        ids = tl.load(ids_ptr + pair, mask=pair < num_pairs, other=-1).to(tl.int32)
        place = _place_of(ids, place_ptr, expert_map_ptr, HAS_MAP)
        before += tl.sum(((place >= 0) & (place < mine)).to(tl.int32))
        count += tl.sum((place == mine).to(tl.int32))
    tl.store(first_ptr + mine, before)
    tl.store(count_ptr + mine, count)
    listed = before
    for start in range(0, num_pairs, BLOCK):
        pair = start + tl.arange(0, BLOCK)
        ids = tl.load(ids_ptr + pair, mask=pair < num_pairs, other=-1).to(tl.int32)
        place = _place_of(ids, place_ptr, expert_map_ptr, HAS_MAP)
        found = (place == mine).to(tl.int32)
        slot = listed + tl.cumsum(found) - found
        tl.store(order_ptr + slot, pair, mask=place == mine)
        listed += tl.sum(found)


@triton.jit
def _ends_of_tiles(count_ptr, columns, NUM_EXPERTS: tl.constexpr, EXPERTS: tl.constexpr, PAIRS: tl.constexpr):
    """For each place, the number of tiles up to its last; the tiles of a place are pair blocks × `columns`."""
    place = tl.arange(0, EXPERTS)
    count = tl.load(count_ptr + place, mask=place < NUM_EXPERTS, other=0)
    tiles = (count + PAIRS - 1) // PAIRS * columns
    return tiles, tl.cumsum(tiles)


@triton.jit
def _find_tile(tile, tiles, ends, first_ptr, count_ptr, PAIRS: tl.constexpr, COLUMNS: tl.constexpr):
    """The place a tile belongs to, its slots in `order` and which of them are that place's, and its columns."""
    place = tl.sum((ends <= tile).to(tl.int32))
    within = tile - tl.sum(tl.where(ends <= tile, tiles, 0))
    count = tl.load(count_ptr + place)
    pair_blocks = (count + PAIRS - 1) // PAIRS
    # neighbours in time share a tile of weights: the pairs run fastest
    row = within % pair_blocks * PAIRS + tl.arange(0, PAIRS)
    column = within // pair_blocks * COLUMNS + tl.arange(0, COLUMNS)
    return place, tl.load(first_ptr + place) + row, row < count, column


@triton.jit
def _multiply(a, b, sum_, UPCAST: tl.constexpr):
    """sum + a @ b in float32; float32 operands keep all their bits.

    UPCAST: Triton's interpreter multiplies the bits of bfloat16 as if they were integers.
    """
    if UPCAST:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, sum_, input_precision="ieee")


@triton.jit
def gate_up(
    x_ptr,  # [T, H]
    w13_ptr,  # [2, S, H]
    hidden_ptr,  # out: [P, W], rows in the order of `order`; columns beyond an expert's width are not written
    offset_ptr,  # [E] int32, by place
    width_ptr,  # [E] int32, by place
    order_ptr,
    first_ptr,
    count_ptr,
    num_rows,  # S
    x_stride,
    hidden_stride,  # W
    num_slots,  # K
    H: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,  # the power of two above
    PAIRS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Each program takes every n-th tile of pairs × channels; an expert's tiles end with its own width."""
    every = tl.arange(0, EXPERTS)
    widths = tl.load(width_ptr + every, mask=every < NUM_EXPERTS, other=0)
    tiles, ends = _ends_of_tiles(count_ptr, (widths + COLUMNS - 1) // COLUMNS, NUM_EXPERTS, EXPERTS, PAIRS)
    up_start = num_rows.to(tl.int64) * H
    for tile in range(tl.program_id(0), tl.sum(tiles), tl.num_programs(0)):
        place, slot, has_row, column = _find_tile(tile, tiles, ends, first_ptr, count_ptr, PAIRS, COLUMNS)
        # told that widths are padded to 16, the compiler moves 16 bytes at a time where it masks with them
        has_column = column < tl.multiple_of(tl.load(width_ptr + place), 16)
        pair = tl.load(order_ptr + slot, mask=has_row, other=0)
        depth = tl.arange(0, DEPTH)
        x_ptrs = x_ptr + (pair // num_slots).to(tl.int64)[:, None] * x_stride + depth[None, :]
        w_ptrs = w13_ptr + (tl.load(offset_ptr + place) + column).to(tl.int64)[None, :] * H + depth[:, None]
        gate = tl.zeros((PAIRS, COLUMNS), tl.float32)
        up = tl.zeros((PAIRS, COLUMNS), tl.float32)
        for start in range(0, H, DEPTH):
            has_depth = start + depth < H
            x = tl.load(x_ptrs + start, mask=has_row[:, None] & has_depth[None, :], other=0.0)
            w_mask = has_depth[:, None] & has_column[None, :]
            gate = _multiply(x, tl.load(w_ptrs + start, mask=w_mask, other=0.0), gate, UPCAST)
            up = _multiply(x, tl.load(w_ptrs + up_start + start, mask=w_mask, other=0.0), up, UPCAST)
        value = gate * tl.sigmoid(gate) * up
        out = hidden_ptr + slot.to(tl.int64)[:, None] * hidden_stride + column[None, :]
        tl.store(out, value.to(hidden_ptr.dtype.element_ty), mask=has_row[:, None] & has_column[None, :])


@triton.jit
def down(
    hidden_ptr,  # [P, W]
    w2_ptr,  # [S, H]
    terms_ptr,  # out: [P, H], rows by the pairs' own numbers; pairs without an expert here are not written
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
    PAIRS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Each program takes every n-th tile of pairs × hidden units; the inner sum ends with the expert's width."""
    tiles, ends = _ends_of_tiles(count_ptr, (H + COLUMNS - 1) // COLUMNS, NUM_EXPERTS, EXPERTS, PAIRS)
    for tile in range(tl.program_id(0), tl.sum(tiles), tl.num_programs(0)):
        place, slot, has_row, column = _find_tile(tile, tiles, ends, first_ptr, count_ptr, PAIRS, COLUMNS)
        width = tl.multiple_of(tl.load(width_ptr + place), 16)
        has_column = column < H
        depth = tl.arange(0, DEPTH)
        h_ptrs = hidden_ptr + slot.to(tl.int64)[:, None] * hidden_stride + depth[None, :]
        w_ptrs = w2_ptr + (tl.load(offset_ptr + place) + depth).to(tl.int64)[:, None] * H + column[None, :]
        total = tl.zeros((PAIRS, COLUMNS), tl.float32)
        for start in range(0, width, DEPTH):
            # both sides: beyond the width stand another expert's rows and columns nobody wrote
            has_depth = start + depth < width
            h = tl.load(h_ptrs + start, mask=has_row[:, None] & has_depth[None, :], other=0.0)
            w = tl.load(w_ptrs, mask=has_depth[:, None] & has_column[None, :], other=0.0)
            total = _multiply(h, w, total, UPCAST)
            w_ptrs += DEPTH * H
        pair = tl.load(order_ptr + slot, mask=has_row, other=0)
        total *= tl.load(weight_ptr + pair, mask=has_row, other=0.0)[:, None]
        out = terms_ptr + pair.to(tl.int64)[:, None] * H + column[None, :]
        tl.store(out, total.to(terms_ptr.dtype.element_ty), mask=has_row[:, None] & has_column[None, :])


@triton.jit
def add_slots(
    terms_ptr,  # [P, H]
    ids_ptr,  # [P]
    place_ptr,
    expert_map_ptr,
    y_ptr,  # out: [T, H]
    NUM_SLOTS: tl.constexpr,  # K
    SLOTS: tl.constexpr,  # the power of two above
    H: tl.constexpr,
    HAS_MAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a token and block of hidden units: sum the terms that were written, in float32."""
    slot = tl.arange(0, SLOTS)
    pair = tl.program_id(0).to(tl.int64) * NUM_SLOTS + slot
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + pair, mask=slot < NUM_SLOTS, other=-1).to(tl.int32)
    written = _place_of(ids, place_ptr, expert_map_ptr, HAS_MAP) >= 0
    mask = written[:, None] & (column < H)[None, :]
    terms = tl.load(terms_ptr + pair[:, None] * H + column[None, :], mask=mask, other=0.0).to(tl.float32)
    y_ptrs = y_ptr + tl.program_id(0).to(tl.int64) * H + column
    tl.store(y_ptrs, tl.sum(terms, 0).to(y_ptr.dtype.element_ty), mask=column < H)


def ragged_moe(
    x_TH: torch.Tensor,
    w13_2SH: torch.Tensor,
    w2_SH: torch.Tensor,
    layout_3E: torch.Tensor,
    max_width: int,
    topk_weights_TK: torch.Tensor,
    topk_ids_TK: torch.Tensor,
    expert_map: torch.Tensor | None,
    tiles: Tiles | None = None,
) -> torch.Tensor:
    """Return `y_TH`; arguments as in `moe_experts.ragged_moe`. tiles: None lets `choose_tiles` choose."""
    (num_tokens, num_slots), hidden_size = topk_ids_TK.shape, x_TH.shape[1]
    num_pairs, num_experts = num_tokens * num_slots, layout_3E.shape[1]
    y_TH = torch.empty((num_tokens, hidden_size), dtype=x_TH.dtype, device=x_TH.device)
    if not num_tokens:
        return y_TH
    if not max_width:
        return y_TH.zero_()
    # pairs of all ranks' experts are given
    all_experts = num_experts if expert_map is None else len(expert_map)
    major, multiprocessors = _machine(x_TH.device)
    tiles = tiles or choose_tiles(num_pairs, all_experts, x_TH.dtype, major)
    ids, weights = topk_ids_TK.contiguous(), topk_weights_TK.contiguous()
    place, offset, width = layout_3E
    mapping = place if expert_map is None else expert_map
    has_map = expert_map is not None
    order, (first, count) = ids.new_empty(num_pairs, dtype=torch.int32), place.new_empty(2, num_experts)
    block, warps = (SORT_BLOCK, 4) if num_pairs <= SORT_BLOCK else (WIDE_SORT_BLOCK, 16)
    sort_pairs[(num_experts,)](
        ids, place, mapping, order, first, count, num_pairs, HAS_MAP=has_map, BLOCK=block, num_warps=warps
    )
    hidden_PW, terms_PH = x_TH.new_empty(num_pairs, max_width), x_TH.new_empty(num_pairs, hidden_size)
    pair_blocks = min(num_pairs, num_pairs // tiles.pairs + num_experts)  # at most, whatever the routing
    machine = multiprocessors * tiles.programs
    constants = {
        "H": hidden_size,
        "NUM_EXPERTS": num_experts,
        "EXPERTS": triton.next_power_of_2(num_experts),
        "PAIRS": tiles.pairs,
        "DEPTH": tiles.depth,
        "UPCAST": isinstance(down, InterpretedFunction),
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
    }
    gate_up[(min(machine, pair_blocks * triton.cdiv(max_width, tiles.columns)),)](
        x_TH, w13_2SH, hidden_PW, offset, width, order, first, count,
        w2_SH.shape[0], x_TH.stride(0), max_width, num_slots, COLUMNS=tiles.columns, **constants,
    )  # fmt: skip
    down[(min(machine, pair_blocks * triton.cdiv(hidden_size, tiles.down_columns)),)](
        hidden_PW, w2_SH, terms_PH, weights, offset, width, order, first, count, max_width,
        COLUMNS=tiles.down_columns, **constants,
    )  # fmt: skip
    add_slots[(num_tokens, triton.cdiv(hidden_size, SUM_BLOCK))](
        terms_PH, ids, place, mapping, y_TH,
        NUM_SLOTS=num_slots, SLOTS=triton.next_power_of_2(num_slots), H=hidden_size, HAS_MAP=has_map, BLOCK=SUM_BLOCK,
    )  # fmt: skip
    return y_TH


def warm_up(
    w13_2SH: torch.Tensor,
    w2_SH: torch.Tensor,
    layout_3E: torch.Tensor,
    max_width: int,
    num_slots: int,
    expert_map: torch.Tensor | None,
) -> None:
    """Compile all that a batch of any size asks for, or a first one of a new size would wait for it.

    num_slots: K.
    """
    major, _ = _machine(w2_SH.device)
    every_tiles = {choose_tiles(num_pairs, 1, w2_SH.dtype, major) for num_pairs in (1, FEW_PAIRS + 1, SOME_PAIRS + 1)}
    for num_tokens in (1, SORT_BLOCK // num_slots + 1):
        x_TH = w2_SH.new_zeros(num_tokens, w2_SH.shape[1])
        weights_TK = torch.zeros(num_tokens, num_slots, device=x_TH.device)
        ids_TK = torch.zeros_like(weights_TK, dtype=torch.int32)
        for tiles in every_tiles:
            ragged_moe(x_TH, w13_2SH, w2_SH, layout_3E, max_width, weights_TK, ids_TK, expert_map, tiles)


@cache
def _machine(device: torch.device) -> tuple[int, int]:
    """Return the first number of a GPU's compute capability, and how many multiprocessors it has.

    In the interpreter a Hopper with a few stands for it, so that programs take several tiles.
    """
    if device.type != "cuda":
        return 9, 3
    properties = torch.cuda.get_device_properties(device)
    return properties.major, properties.multi_processor_count
