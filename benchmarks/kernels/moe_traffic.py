"""How far from its bound is the Triton kernel for experts on a GPU that is not here, and what holds
it back?

    python benchmarks/kernels/moe_traffic.py
    python benchmarks/kernels/moe_traffic.py --cards h200 --shapes qwen3-30b-a3b --tokens 256,384
    python benchmarks/kernels/moe_traffic.py --weights fp8 --tokens 1,8,32,128 --sparsity 0,40

A model, not a measurement. Exact are the tiles, bytes and operations of every launch, which follow
from the kernel's loops and from random routing. Estimated are the card's numbers (`Card`) and how
tiles share them (`simulate`): a tile waits for its first loads, then runs as fast as its stages
hide latency, while all tiles share HBM and L2 and the tiles of a multiprocessor share its tensor
cores. Weights come from HBM for an expert's first block of pairs, else from L2.

The bound is the larger of two times: the kept weights of the chosen experts, inputs and outputs
through HBM once, or the kept operations. Per workload it prints the time over the bound and, where
the installed vLLM has tuned tiles for the shape and card, how many times faster that is than vLLM's
kernel on the dense experts in bfloat16. A change of the kernel is judged by both. With FP8 weights
the inputs stay bfloat16; the time of converting weights in registers is not modeled. The last line
is JSON.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import numpy as np
import torch

from ddp_benchmarks.protocol import result_line, script_parser
from ddp_plugins.moe_experts import ROW_ALIGNMENT
from ddp_plugins.moe_few import MOST_PAIRS
from ddp_plugins.moe_kernel import Tiles, choose_tiles
from expert_layers import POPULARITY, SHAPES, Shape, draw_widths, numbers

ITEM = 2  # bytes of a bfloat16 number
WEIGHTS = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}


@dataclass(frozen=True, kw_only=True)
class Card:
    """A Hopper GPU; rates in bytes and operations per second, times in seconds."""

    name: str
    """As in the names of vLLM's tuned tiles."""
    hbm: float
    """Device copies on such cards."""
    l2: float = 7e12
    """From L2 to all multiprocessors; reports range from 5.5 to 8.5e12."""
    flops: float = 790e12
    """bfloat16 through wgmma, on such cards."""
    flops_of_mma: float = 500e12
    """Through mma.sync, which tiles of fewer than 64 rows use."""
    multiprocessors: int = 132
    hbm_latency: float = 0.8e-6
    l2_latency: float = 0.35e-6
    tile_start: float = 1.2e-6
    """Dependent loads before a program's first weights; its later tiles take 0.7 of it."""
    tile_end: float = 0.4e-6
    launch_gap: float = 1.3e-6
    """Between dependent launches of a CUDA graph; what programmatic dependent launch saves of it is
    not modeled."""
    sort: float = 3e-6
    """`sort_pairs` of up to 8,192 pairs."""
    add: float = 1.5e-6
    """`add_slots`, besides its bytes."""
    last_sum: float = 0.5e-6
    """The sum of a token's terms by the last program of `down_few`."""


CARDS = {"h100": Card(name="NVIDIA_H100_80GB_HBM3", hbm=3.0e12), "h200": Card(name="NVIDIA_H200", hbm=4.3e12)}
VLLM_LAUNCHES = 5


@dataclass(frozen=True, kw_only=True)
class Product:
    """The tiles of one launch in the kernel's order; arrays of one number per tile."""

    steps: np.ndarray
    l2_bytes: np.ndarray
    hbm_bytes: np.ndarray
    operations: np.ndarray
    """Issued ones, with those on padding."""
    programs: int
    """Per multiprocessor."""
    stages: int
    uses_wgmma: bool


def list_product(
    experts: Iterable[tuple[int, int, int]], pairs: int, columns: int, depth: int, matrices: int, *, programs: int,
    stages: int, item: int = ITEM,
) -> Product:  # fmt: skip
    """List the tiles of a product.

    experts: per expert, widest first, its pairs, its columns and the length of its inner sum.
    matrices: weights that share the tile's rows: 2 in `gate_up`, which writes nothing worth
        counting; `down` has 1.
    item: bytes of a weight.
    """
    tiles: list[tuple[float, ...]] = []
    for count, width, length in experts:
        for start in range(0, width, columns):
            weights = matrices * min(columns, width - start)
            for first in range(0, count, pairs):
                rows = min(pairs, count - first)
                written = rows * weights if matrices == 1 else 0
                num_steps = -(-length // depth)
                tiles.append((
                    num_steps, ITEM * (length * rows + written) + item * length * weights,
                    item * length * weights * (first == 0),
                    2 * num_steps * depth * pairs * matrices * columns,
                ))  # fmt: skip
    steps, l2_bytes, hbm_bytes, operations = np.array(tiles, float).reshape(-1, 4).T
    return Product(
        steps=steps, l2_bytes=l2_bytes, hbm_bytes=hbm_bytes, operations=operations, programs=programs, stages=stages,
        uses_wgmma=pairs >= 64,
    )  # fmt: skip


def simulate(launch: Product, card: Card, *, is_persistent: bool) -> float:
    """Return the seconds of a launch.

    is_persistent: each program takes every n-th tile, as in our kernel, else the next one when it
        ends, as in vLLM's.
    """
    num_tiles = len(launch.steps)
    if not num_tiles:
        return 0.0
    num_programs = min(card.multiprocessors * launch.programs, num_tiles)
    processor = np.arange(num_programs) % card.multiprocessors
    tensor_cores = (card.flops if launch.uses_wgmma else card.flops_of_mma) / card.multiprocessors
    latency = np.where(launch.hbm_bytes > 0, card.hbm_latency, card.l2_latency)
    # tiles per second
    alone = 1 / (launch.steps * latency / max(1, launch.stages - 1) + card.tile_end)
    tile, queued = np.arange(num_programs), num_programs
    waiting, remaining = np.full(num_programs, card.tile_start), np.ones(num_programs)
    seconds = 0.0
    while len(tile):
        runs = waiting <= 0
        tile_of, on = tile[runs], processor[runs]
        load = np.bincount(on, alone[tile_of] * launch.operations[tile_of], minlength=card.multiprocessors)
        rate = alone[tile_of] * np.minimum(1, tensor_cores / np.maximum(load, 1))[on]
        rate *= min(1, card.l2 / max(1, (rate * launch.l2_bytes[tile_of]).sum()))
        from_hbm = (rate * launch.hbm_bytes[tile_of]).sum()
        if from_hbm > card.hbm:
            rate[launch.hbm_bytes[tile_of] > 0] *= card.hbm / from_hbm
        until = waiting.copy()
        until[runs] = remaining[runs] / rate
        first = until.min()
        # events that are close count as one
        step = max(first, min(np.quantile(until, 0.02), 1.05 * first + 2e-8))
        seconds += step
        waiting -= step
        remaining[runs] -= rate * step
        ended = runs & (remaining <= 1e-9)
        num_ended = int(ended.sum())
        if is_persistent:
            tile[ended] += num_programs
            waiting[ended] = 0.7 * card.tile_start
        else:
            tile[ended] = queued + np.arange(num_ended)
            queued += num_ended
            waiting[ended] = card.tile_start
        remaining[ended] = 1.0
        stay = tile < num_tiles
        tile, processor, waiting, remaining = tile[stay], processor[stay], waiting[stay], remaining[stay]
    return seconds


def draw_counts(shape: Shape, num_tokens: int, seed: int) -> np.ndarray:
    """Return the number of pairs of each expert, with the routing of `expert_layers.draw_batch`."""
    generator = torch.Generator().manual_seed(seed)
    popularity = POPULARITY * torch.randn(shape.num_experts, generator=generator)
    scores = torch.randn(num_tokens, shape.num_experts, generator=generator) + popularity
    ids = scores.topk(shape.num_experts_per_tok).indices.flatten()
    return np.asarray(ids.bincount(minlength=shape.num_experts))


def predict(
    shape: Shape, num_tokens: int, widths: Sequence[int], counts: np.ndarray, card: Card, tiles: Tiles, item: int = ITEM
) -> dict[str, float]:
    """Return microseconds and waste of our kernel: bytes from L2 and issued operations over the
    kept ones."""
    hidden, num_pairs = shape.hidden_size, num_tokens * shape.num_experts_per_tok
    padded = [-(-width // ROW_ALIGNMENT) * ROW_ALIGNMENT for width in widths]
    order = sorted((expert for expert in range(len(padded)) if padded[expert]), key=lambda expert: -padded[expert])
    running = {"programs": tiles.programs, "stages": tiles.stages, "item": item}
    gate_up = list_product(
        [(int(counts[e]), padded[e], hidden) for e in order], tiles.pairs, tiles.columns, tiles.depth, 2, **running
    )
    down = list_product(
        [(int(counts[e]), hidden, padded[e]) for e in order], tiles.pairs, tiles.down_columns, tiles.depth, 1, **running
    )
    parts = [simulate(launch, card, is_persistent=True) for launch in (gate_up, down)]
    if num_pairs <= MOST_PAIRS:
        around = 2 * card.launch_gap + card.last_sum
    else:
        sort = card.sort * max(1.0, num_pairs / 8192)
        around = 4 * card.launch_gap + sort + card.add + ITEM * hidden * (num_pairs + num_tokens) / card.hbm
    total = sum(parts) + around
    kept = 6 * hidden * float(counts @ np.array(widths))
    return {
        "us": 1e6 * total, "gate_up_us": 1e6 * parts[0], "down_us": 1e6 * parts[1],
        "l2_gb": (gate_up.l2_bytes.sum() + down.l2_bytes.sum()) / 1e9,
        "issued_over_kept": (gate_up.operations.sum() + down.operations.sum()) / max(kept, 1.0),
    }  # fmt: skip


def bound(
    shape: Shape, num_tokens: int, widths: Sequence[int], counts: np.ndarray, card: Card, item: int = ITEM
) -> float:
    """Return the least microseconds that any kernel takes."""
    channels = np.array(widths)
    read = item * 3 * channels[counts > 0].sum() + ITEM * 2 * num_tokens
    computed = 6 * shape.hidden_size * float(counts @ channels)
    return 1e6 * max(shape.hidden_size * read / card.hbm, computed / card.flops)


def vllm_tiles(shape: Shape, num_tokens: int, card: Card) -> dict[str, int] | None:
    """Return vLLM's tuned tiles for the nearest number of tokens; None if it has no file for the
    shape and card."""
    spec = find_spec("vllm")
    folder = Path((spec.submodule_search_locations or [""])[0]) if spec else Path()
    name = f"E={shape.num_experts},N={shape.intermediate_size},device_name={card.name}.json"
    file = folder / "model_executor/layers/fused_moe/configs" / name
    if not file.is_file():
        return None
    tuned = {int(key): value for key, value in json.loads(file.read_text()).items() if key.isdigit()}
    return dict(tuned[min(tuned, key=lambda key: abs(key - num_tokens))])


def predict_vllm(shape: Shape, num_tokens: int, counts: np.ndarray, card: Card, tuned: dict[str, int]) -> float:
    """Return the microseconds of vLLM's kernel on the dense experts: gate and up are one product of
    2·w columns."""
    pairs, columns, depth = (tuned[f"BLOCK_SIZE_{letter}"] for letter in "MNK")
    hidden, width, warps, stages = shape.hidden_size, shape.intermediate_size, tuned["num_warps"], tuned["num_stages"]
    shared = ITEM * depth * (pairs + columns) * (stages if pairs >= 64 else max(1, stages - 1)) + 1024
    registers = 32 * warps * (128 if pairs * columns >= 16384 else 96)
    programs = max(1, min(228 * 1024 // shared, 65536 // registers, 8))
    seconds = sum(
        simulate(
            list_product(
                [(int(count), size, length) for count in counts], pairs, columns, depth, 1, programs=programs,
                stages=max(stages, 2),
            ),
            card, is_persistent=False,
        )
        for size, length in ((2 * width, hidden), (hidden, width))
    )  # fmt: skip
    around = card.sort + card.add + ITEM * counts.sum() * (3 * width + hidden) / card.hbm
    return 1e6 * float(seconds + around + VLLM_LAUNCHES * card.launch_gap)


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--cards", default=",".join(CARDS))
    parser.add_argument("--shapes", default="qwen3-30b-a3b,deepseekmoe-16b,mixtral-8x7b")
    parser.add_argument("--tokens", type=numbers, default="1,4,8,32,64,128,256,384,512,1024,2048,4096")
    parser.add_argument("--sparsity", type=numbers, default="0,20,40,60", help="percent removed")
    parser.add_argument("--align", type=int, default=1, help="widths are rounded to multiples, as by prune --align")
    parser.add_argument("--weights", choices=WEIGHTS, default="bf16", help="number format of our experts' weights")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    rows, dtype = [], WEIGHTS[args.weights]
    for card_name, name, tokens in product(args.cards.split(","), args.shapes.split(","), args.tokens):
        card, shape = CARDS[card_name], SHAPES[name]
        counts = draw_counts(shape, tokens, args.seed)
        tuned = vllm_tiles(shape, tokens, card)
        dense = predict_vllm(shape, tokens, counts, card, tuned) if tuned else None
        cells = []
        for sparsity in args.sparsity:
            widths = [round(width / args.align) * args.align for width in draw_widths(shape, sparsity, 0)]
            tiles = choose_tiles(tokens * shape.num_experts_per_tok, shape.num_experts, dtype, 9)
            row = predict(shape, tokens, widths, counts, card, tiles, dtype.itemsize)
            row["over_bound"] = row["us"] / bound(shape, tokens, widths, counts, card, dtype.itemsize)
            row |= {"over_vllm_dense": dense / row["us"]} if dense else {}
            row = {key: round(value, 3) for key, value in row.items()}
            rows.append({"card": card_name, "shape": name, "tokens": tokens, "removed": sparsity} | row)
            speed = f" {row['over_vllm_dense']:.2f}×" if dense else ""
            cells.append(f"{sparsity} %: {row['us']:.0f} µs {row['over_bound']:.2f}{speed}")
        print(f"{card_name} {name} {tokens:4d} tokens | {' | '.join(cells)}", flush=True)
    cards = {name: asdict(CARDS[name]) for name in args.cards.split(",")}
    print(result_line(__doc__, vars(args), seed=args.seed, cards=cards, rows=rows))


if __name__ == "__main__":
    main()
