"""How far from its bound is the kernel for experts on this GPU, and would other tiles or four
launches be faster?

    python tiles.py OUT.json

Each row is first compared with the plain reference. Tiles of the product and a few candidates; the
most informative rows come first, until the time is over. `moe_traffic.py` predicts the same rows
without a GPU.
"""

import os
import sys
import time
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any
from unittest.mock import patch

from lease import DEVICE, DRY, Results, error_of

if DRY:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import torch

from ddp_plugins import moe_kernel
from ddp_plugins.moe_experts import ExpertLayout, pack_expert
from ddp_plugins.moe_kernel import Tiles
from ddp_plugins.moe_reference import Expert, ragged_moe_reference
from expert_layers import POPULARITY, SHAPES, Run, draw_batch, draw_widths, work
from kernel_speed import measure_ceilings, time_interleaved

FIELDS = ("pairs", "columns", "down_columns", "depth", "warps", "stages", "programs")
CANDIDATES = {  # all compile for sm_90 without spilled registers
    "DEEP": (16, 64, 128, 128, 4, 3, 3),
    "TINY": (16, 16, 32, 256, 4, 3, 4),
    "MIDDLE": (32, 64, 128, 64, 4, 4, 3),
    "MIDDLE_WIDE": (32, 128, 256, 64, 4, 4, 2),
    "MANY_3_STAGES": (128, 128, 256, 64, 8, 3, 1),
}
ALTERNATIVES = (  # up to how many tokens which tiles are also tried
    (8, ("NARROW", "FEW", "TINY")),
    (64, ("NARROW", "FEW", "SOME", "DEEP")),
    (512, ("FEW", "SOME", "MANY", "MIDDLE", "MIDDLE_WIDE")),
    (10**9, ("SOME", "MANY", "MANY_3_STAGES")),
)
ALL_TOKENS = (1, 8, 384, 32, 128, 256, 4096, 64, 512, 1024, 2048)
FEWER_TOKENS = (1, 32, 128, 256, 4096)
LAYERS = (  # shape, percent removed, batches
    ("qwen3-30b-a3b", 40, ALL_TOKENS),
    ("qwen3-30b-a3b", 0, ALL_TOKENS),
    ("deepseekmoe-16b", 40, FEWER_TOKENS),
    ("mixtral-8x7b", 40, FEWER_TOKENS),
    ("qwen3-30b-a3b", 60, FEWER_TOKENS),
    ("qwen3-30b-a3b", 20, FEWER_TOKENS),
)


def tried(tokens: int, today: Tiles, named: dict[str, Tiles]) -> Iterator[tuple[str, Tiles, int]]:
    """Yield names, tiles, and the most pairs that run in two launches: today's choice first."""
    name = next(name for name, tiles in named.items() if tiles == today)
    yield name, today, moe_kernel.MOST_PAIRS
    yield f"{name}, four launches", today, 0
    for other in next(names for limit, names in ALTERNATIVES if tokens <= limit):
        if other in named and other != name and not DRY:  # the interpreter is slow
            yield other, named[other], moe_kernel.MOST_PAIRS


def run_with(tiles: Tiles, packed: Sequence[Any]) -> Run:
    return lambda x, weights, ids: moe_kernel.ragged_moe(x, *packed, weights, ids, None, tiles=tiles)


def main() -> None:
    named = {name: tiles for name, tiles in vars(moe_kernel).items() if isinstance(tiles, Tiles)}
    named |= {name: Tiles(**dict(zip(FIELDS, sizes, strict=True))) for name, sizes in CANDIDATES.items()}
    ceilings = {"copy_gb_per_s": 1.0, "matmul_gflop_per_s": 1.0}
    if not DRY:
        ceilings = measure_ceilings(DEVICE, torch.bfloat16, time.perf_counter)
    results = Results(sys.argv[1], tiles={name: vars(tiles) for name, tiles in named.items()}, ceilings=ceilings)
    major = 9 if DRY else torch.cuda.get_device_capability()[0]
    for shape_name, removed, batch_sizes in [("qwen3-30b-a3b", 40, (1,))] if DRY else LAYERS:
        shape = SHAPES[shape_name].scaled(0.01, 8) if DRY else SHAPES[shape_name]
        hidden, layout = shape.hidden_size, ExpertLayout.of(draw_widths(shape, removed, 0))
        w13 = torch.zeros(2, layout.num_rows, hidden, device=DEVICE, dtype=torch.bfloat16)
        w2, experts = torch.zeros_like(w13[0]), list[Expert]()
        for number, width in enumerate(layout.widths):
            gate, up, down = (torch.randn(width, hidden, device=DEVICE, dtype=w2.dtype) for _ in range(3))
            experts.append((gate * hidden**-0.5, up * hidden**-0.5, (down * shape.intermediate_size**-0.5).t()))
            pack_expert(layout, w13, w2, number, *experts[-1])
        packed = w13, w2, layout.table(torch.device(DEVICE)), layout.max_width

        for tokens in batch_sizes:
            generator = torch.Generator().manual_seed(tokens)
            popularity = POPULARITY * torch.randn(shape.num_experts, generator=generator)
            draws = range(4 if tokens <= 64 and not DRY else 1)
            batches = [draw_batch(shape, tokens, torch.bfloat16, DEVICE, generator, popularity) for _ in draws]
            read, computed = work(batches, list(layout.widths), hidden, 2)
            bound = max(read / ceilings["copy_gb_per_s"], computed / ceilings["matmul_gflop_per_s"]) / 1e9
            x, weights, ids = batches[0]
            expected, num_pairs = ragged_moe_reference(x, experts, weights, ids), tokens * shape.num_experts_per_tok
            today = moe_kernel.choose_tiles(num_pairs, shape.num_experts, torch.bfloat16, major)
            for name, tiles, limit in tried(tokens, today, named):
                if limit == 0 and num_pairs > moe_kernel.MOST_PAIRS:
                    continue  # these run in four launches in any case
                facts = {"shape": shape_name, "removed": removed, "tokens": tokens, "tiles": name}
                with (
                    patch.object(moe_kernel, "MOST_PAIRS", limit),
                    results.row(**facts, today=tiles == today and limit > 0) as row,
                ):
                    run = run_with(tiles, packed)
                    row["error"] = error_of(run(*batches[0]), expected)
                    row["right"] = row["error"] < 2e-2
                    seconds = median(time_interleaved({name: run}, batches, rounds=1 if DRY else 5)[name])
                    row |= {"us": 1e6 * seconds, "bound_us": 1e6 * bound, "over_bound": seconds / bound}
                    row |= {"gb_per_s": read / seconds / 1e9, "tflop_per_s": computed / seconds / 1e12}
    results.finish()


if __name__ == "__main__":
    main()
