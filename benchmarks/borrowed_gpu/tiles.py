"""How far from its bound is the kernel for experts on this GPU, and would other tiles or four
launches be faster?

    python tiles.py OUT.json

Each row is first compared with float32. Tiles of the product and a few candidates; the most
informative rows come first, until the time is over. `moe_traffic.py` predicts the same rows without
a GPU.
"""

import os
import sys
import time
from collections.abc import Iterator
from functools import partial

from lease import DEVICE, DRY, Results, error_of, graph_seconds, is_over

if DRY:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import torch

from ddp_plugins import moe_kernel
from ddp_plugins.moe_experts import ExpertLayout
from ddp_plugins.moe_kernel import Tiles
from expert_layers import SHAPES, Batch, draw_batch, draw_widths, work
from kernel_speed import measure_ceilings

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


class Layer:
    """The random packed experts of one layer."""

    def __init__(self, name: str, removed: int) -> None:
        self.shape = SHAPES[name].scaled(0.01, 8) if DRY else SHAPES[name]
        self.widths = draw_widths(self.shape, removed, 0)
        self.layout = layout = ExpertLayout.of(self.widths)
        size = (layout.num_rows, self.shape.hidden_size)
        self.w13 = torch.randn(2, *size, device=DEVICE, dtype=torch.bfloat16).mul_(size[1] ** -0.5)
        self.w2 = torch.randn(size, device=DEVICE, dtype=torch.bfloat16).mul_(self.shape.intermediate_size**-0.5)
        for start, width, padded in zip(layout.offsets, layout.widths, layout.padded, strict=True):
            self.w13[:, start + width : start + padded] = 0
            self.w2[start + width : start + padded] = 0
        self.table = layout.table(torch.device(DEVICE))

    def run(self, batch: Batch, tiles: Tiles) -> torch.Tensor:
        x, weights, ids = batch
        experts = self.w13, self.w2, self.table, self.layout.max_width
        return moe_kernel.ragged_moe(x, *experts, weights, ids, None, tiles=tiles)

    def expected(self, batch: Batch) -> torch.Tensor:
        """Return the result in float32, expert by expert."""
        x, weights, ids = batch
        y = torch.zeros(x.shape, device=x.device)
        for expert, (start, width) in enumerate(zip(self.layout.offsets, self.layout.padded, strict=True)):
            token, slot = (ids == expert).nonzero(as_tuple=True)
            if width and len(token):
                rows, inputs = slice(start, start + width), x[token].float()
                gate, up = (inputs @ self.w13[half, rows].float().t() for half in (0, 1))
                terms = (torch.nn.functional.silu(gate) * up) @ self.w2[rows].float()
                y.index_add_(0, token, terms * weights[token, slot, None])
        return y


def tried(tokens: int, today: Tiles, named: dict[str, Tiles]) -> Iterator[tuple[str, Tiles, int]]:
    """Yield names, tiles, and the most pairs that run in two launches: today's choice first."""
    name = next(name for name, tiles in named.items() if tiles == today)
    yield name, today, moe_kernel.MOST_PAIRS
    yield f"{name}, four launches", today, 0
    for other in next(names for limit, names in ALTERNATIVES if tokens <= limit):
        if other in named and other != name and not DRY:  # the interpreter is slow
            yield other, named[other], moe_kernel.MOST_PAIRS


def main() -> None:
    named = {name: tiles for name, tiles in vars(moe_kernel).items() if isinstance(tiles, Tiles)}
    named |= {name: Tiles(**dict(zip(FIELDS, sizes, strict=True))) for name, sizes in CANDIDATES.items()}
    ceilings = {"copy_gb_per_s": 1.0, "matmul_gflop_per_s": 1.0}
    if not DRY:
        ceilings = measure_ceilings(DEVICE, torch.bfloat16, time.perf_counter)
    results = Results(sys.argv[1], tiles={name: vars(tiles) for name, tiles in named.items()}, ceilings=ceilings)
    major = 9 if DRY else torch.cuda.get_device_capability()[0]
    layers = [("qwen3-30b-a3b", 40, (1,))] if DRY else LAYERS
    for shape_name, removed, batch_sizes in layers:
        layer = Layer(shape_name, removed)
        shape = layer.shape
        for tokens in batch_sizes:
            generator = torch.Generator().manual_seed(tokens)
            popularity = 0.5 * torch.randn(shape.num_experts, generator=generator)
            draws = range(4 if tokens <= 64 and not DRY else 1)
            batches = [draw_batch(shape, tokens, torch.bfloat16, DEVICE, generator, popularity) for _ in draws]
            read, computed = work(batches, layer.widths, shape.hidden_size, 2)
            bound = max(read / ceilings["copy_gb_per_s"], computed / ceilings["matmul_gflop_per_s"]) / 1e9
            num_pairs, expected = tokens * shape.num_experts_per_tok, layer.expected(batches[0])
            today = moe_kernel.choose_tiles(num_pairs, shape.num_experts, torch.bfloat16, major)
            most_pairs = moe_kernel.MOST_PAIRS
            for name, tiles, limit in tried(tokens, today, named):
                if is_over():
                    results.finish(complete=False)
                if limit == 0 and num_pairs > most_pairs:
                    continue  # these run in four launches in any case
                moe_kernel.MOST_PAIRS = limit
                facts = {"shape": shape_name, "removed": removed, "tokens": tokens, "tiles": name}
                with results.row(**facts, today=tiles == today and limit > 0) as row:
                    row["error"] = error_of(layer.run(batches[0], tiles), expected)
                    row["right"] = row["error"] < 2e-2
                    seconds = graph_seconds([partial(layer.run, batch, tiles) for batch in batches])
                    row |= {"us": 1e6 * seconds, "bound_us": 1e6 * bound, "over_bound": seconds / bound}
                    row |= {"gb_per_s": read / seconds / 1e9, "tflop_per_s": computed / seconds / 1e12}
                moe_kernel.MOST_PAIRS = most_pairs
    results.finish()


if __name__ == "__main__":
    main()
