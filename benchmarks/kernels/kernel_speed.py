"""How fast are experts of different widths, and what do the different widths themselves cost?

    python benchmarks/kernels/kernel_speed.py --shape all
    python benchmarks/kernels/kernel_speed.py --shape olmoe-1b-7b --experts 16 --scale 0.5 --tokens 1,16

One layer's routed experts run alone, in five variants on the same tokens and routing:

    ragged        our kernel at the drawn widths
    dense         vLLM's fused experts before pruning
    padded        vLLM's fused experts, zero-padded to the widest: the alternative without our kernel
    uniform       our kernel with every expert at the mean width: the same bytes in equal widths
    vllm_uniform  vLLM's fused experts at the mean width: the same bytes in vLLM's kernel

Rounds are interleaved in rotating order, so that a slow minute affects all variants, and ratios are
paired within rounds. Before timing, ragged must equal padded. On a CPU the weights of every variant
are in 2 MB huge pages, and the results state the bytes of each that really are. The results also
name the kernel that vLLM's own oracle chooses on this machine, and its tile sizes. Copy bandwidth
and matrix throughput, measured in the same run, are the ceilings of the achieved numbers. With
--clock cpu and OMP_NUM_THREADS=1 other work on a busy machine does not count. Widths are random,
not from trained masks. The results are saved to --output after every shape and sparsity, and are
the last line on stdout.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from ddp_benchmarks.protocol import rotated
from ddp_plugins.moe_experts import ExpertLayout, empty_weights, finish_weights, pack_expert, ragged_moe
from ddp_vllm.intervals import judge
from ddp_vllm.results import new_results
from expert_layers import (
    POPULARITY,
    SHAPES,
    Batch,
    Expert,
    Run,
    Shape,
    cut,
    draw_batch,
    draw_experts,
    draw_widths,
    even_widths,
    numbers,
    work,
)
from fused_experts import FusedExperts, build_vllm
from scripts import result_line, script_parser

FORMAT = "ddp-vllm bench kernel 1"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
# share of the norm; both round every term
AGREE = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-4}
BASELINES = ("dense", "padded", "uniform", "vllm_uniform")
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
_MEMORY = Path("/proc/self/smaps_rollup")
REPLAYS = 10  # of a CUDA graph per round
FEW_TOKENS, DRAWS = 64, 4
"""Batches of up to FEW_TOKENS run DRAWS routings in turn, so that caches do not hold the same few
experts."""


def huge_page_bytes() -> int:
    """Return the bytes of this process in huge pages; 0 if the system does not tell."""
    try:
        lines = _MEMORY.read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("AnonHugePages:"))


def run_kernel_benchmark(args: argparse.Namespace) -> None:
    """Measure every shape and sparsity, and save the results so far after each."""
    dtype, clock = DTYPES[args.dtype], CLOCKS[args.clock]
    settings = {name: value for name, value in vars(args).items() if name != "output"}
    results = new_results(FORMAT, settings) | {
        "threads": torch.get_num_threads(),
        "ceilings": measure_ceilings(args.device, dtype, clock),
        "complete": False,
        "rows": [],
    }
    print("copy {copy_gb_per_s:.1f} GB/s, matmul {matmul_gflop_per_s:,.0f} GFLOP/s".format(**results["ceilings"]))
    for name in args.shape:
        shape = SHAPES[name].scaled(args.scale, args.experts)
        dense = draw_experts(shape, dtype, args.device, torch.Generator().manual_seed(args.seed))
        for sparsity in args.sparsity:
            widths = draw_widths(shape, sparsity, args.seed)
            print(f"{name} {asdict(shape)}, {sparsity} % removed: widths {min(widths)} to {max(widths)}")
            runs, pages = _variants(shape, dense, widths)
            of_vllm = {variant: run for variant, run in runs.items() if isinstance(run, FusedExperts)}
            for variant, run in of_vllm.items():
                print(f"vLLM runs {variant} by {run}")
            layer = {"shape": name, **asdict(shape), "sparsity": sparsity, "huge_page_bytes": pages}
            layer |= {"vllm": {variant: run.choice for variant, run in of_vllm.items()}, "widths": widths}
            for row in _measure(runs, shape, widths, args, results["ceilings"]):
                over = ", ".join(f"{v['ratio']:.2f}× {baseline}" for baseline, v in row["speedup_over"].items())
                print(
                    f"{row['tokens']:5d} tokens: {1000 * row['seconds']['ragged']['median']:.3g} ms, as fast as "
                    f"{over}; {100 * row['over_proportional']:.0f} % of dense time × kept share; "
                    f"{row['gb_per_s']:,.1f} GB/s, {row['gflop_per_s']:,.0f} GFLOP/s",
                    flush=True,
                )
                results["rows"].append(layer | row)
            args.output.write_text(json.dumps(results, indent=1, default=str))
    results["complete"] = True
    args.output.write_text(json.dumps(results, indent=1, default=str))
    if args.scale != 1 or args.experts:
        print("The shapes are smaller than the real ones, by --scale or --experts.")
    answers = {key: results[key] for key in ("rows", "complete", "threads", "ceilings")}
    print(result_line(__doc__, settings, seed=args.seed, where=results, **answers))


def build_experts(experts: Sequence[Expert]) -> Run:
    """Pack experts and return our operator with them."""
    layout = ExpertLayout.of([len(gate) for gate, _, _ in experts])
    like = experts[0][0]
    w13, w2 = empty_weights(layout, like.shape[1], like.dtype, like.device)
    for expert, matrices in enumerate(experts):
        pack_expert(layout, w13, w2, expert, *matrices)
    w13, w2 = finish_weights(layout, w13, w2)
    return lambda x_TH, weights_TK, ids_TK: ragged_moe(x_TH, w13, w2, layout, weights_TK, ids_TK)


def _variants(shape: Shape, dense: Sequence[Expert], widths: list[int]) -> tuple[dict[str, Run], dict[str, int]]:
    """Return each variant, and the bytes of its weights in huge pages."""
    even, by_vllm = even_widths(widths), partial(build_vllm, num_slots=shape.num_experts_per_tok)
    builders: dict[str, tuple[Callable[[Sequence[Expert]], Run], Sequence[Expert]]] = {
        "ragged": (build_experts, cut(dense, widths)),
        "dense": (by_vllm, dense),
        "padded": (by_vllm, cut(dense, widths)),
        "uniform": (build_experts, cut(dense, even)),
        "vllm_uniform": (by_vllm, cut(dense, even)),
    }
    runs, pages = dict[str, Run](), {}
    for name, (build, experts) in builders.items():
        before = huge_page_bytes()
        runs[name] = build(experts)
        pages[name] = huge_page_bytes() - before
    return runs, pages


def _measure(
    runs: Mapping[str, Run], shape: Shape, widths: list[int], args: argparse.Namespace, ceilings: Mapping[str, float]
) -> Iterator[dict[str, Any]]:
    """Yield the results of each batch size."""
    generator = torch.Generator().manual_seed(args.seed + 1)
    popularity = POPULARITY * torch.randn(shape.num_experts, generator=generator)
    for tokens in args.tokens:
        draws = range(DRAWS if tokens <= FEW_TOKENS else 1)
        batches = [draw_batch(shape, tokens, DTYPES[args.dtype], args.device, generator, popularity) for _ in draws]
        _check_agreement(runs, batches[0])
        seconds = time_interleaved(runs, batches, args.rounds, CLOCKS[args.clock])
        tiles = {name: run.tiles_of(tokens) for name, run in runs.items() if isinstance(run, FusedExperts)}
        yield {"tokens": tokens, "draws": len(draws), "vllm_tiles": tiles} | _judge(
            seconds, batches, widths, shape, ceilings
        )


def _check_agreement(runs: Mapping[str, Run], batch: Batch) -> None:
    """Compare the kernels on the same experts, and end the script if they disagree."""
    for name, reference in (("ragged", "padded"), ("uniform", "vllm_uniform")):
        expected = runs[reference](*batch).double()
        error = ((runs[name](*batch).double() - expected).norm() / expected.norm()).item()
        if not error <= AGREE[batch[0].dtype]:  # also true for NaN
            raise SystemExit(f"{name} and {reference} differ by {error:.2e} of the result's norm; nothing was timed")


def time_interleaved(
    runs: Mapping[str, Run], batches: Sequence[Batch], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Return each variant's seconds per batch in each round; an additional first round is
    discarded."""
    cuda = batches[0][0].is_cuda
    timers = {
        name: _graph_timer(run, batches) if cuda else _call_timer(run, batches, clock) for name, run in runs.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds + 1):
        for name in rotated(list(runs), turn):
            seconds[name].append(timers[name]() / len(batches))
    return {name: values[1:] for name, values in seconds.items()}


def _call_timer(run: Run, batches: Sequence[Batch], clock: Callable[[], float]) -> Callable[[], float]:
    def measure() -> float:
        began = clock()
        for batch in batches:
            run(*batch)
        return clock() - began

    return measure


def _graph_timer(run: Run, batches: Sequence[Batch]) -> Callable[[], float]:
    """Capture the calls in a CUDA graph, as vLLM does, so that launches from Python are not
    timed."""
    for batch in batches:
        run(*batch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for batch in batches:
            run(*batch)

    def measure() -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        # keeps the GPU busy while the next replays are queued, so that no launch is timed
        graph.replay()
        start.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1000 / REPLAYS

    return measure


def _judge(
    seconds: Mapping[str, list[float]],
    batches: Sequence[Batch],
    widths: list[int],
    shape: Shape,
    ceilings: Mapping[str, float],
) -> dict[str, Any]:
    """Return times, achieved rates, ratios to the baselines, and ragged's time over dense time ×
    the kept share.

    The kept share is that of the bytes if reading the weights takes longer at the ceilings, else of
    the operations.
    """
    item = batches[0][0].element_size()
    read, computed = work(batches, widths, shape.hidden_size, item)
    dense_read, dense_computed = work(batches, [shape.intermediate_size] * len(widths), shape.hidden_size, item)
    reading = dense_read / ceilings["copy_gb_per_s"] > dense_computed / ceilings["matmul_gflop_per_s"]
    share = read / dense_read if reading else computed / dense_computed
    ragged = median(seconds["ragged"])
    return {
        "seconds": {
            name: {"median": median(values), "lowest": min(values), "highest": max(values)}
            for name, values in seconds.items()
        },
        "speedup_over": {name: asdict(judge(seconds["ragged"], seconds[name])) for name in BASELINES},
        "bound": "bytes" if reading else "operations",
        "share_kept": share,
        "over_proportional": median([r / d for r, d in zip(seconds["ragged"], seconds["dense"], strict=True)])
        / max(share, 1e-9),
        "gb_per_s": read / ragged / 1e9,
        "gflop_per_s": computed / ragged / 1e9,
    }


def measure_ceilings(device: str, dtype: torch.dtype, clock: Callable[[], float]) -> dict[str, float]:
    """Return the best rate of large copies (bytes read and written) and of square matrix products
    on this machine."""
    cuda = device == "cuda"
    size, side = (2**30, 8192) if cuda else (2**27, 1024)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    a = torch.randn(side, side, device=device).to(dtype)
    copy = _best_seconds(lambda: target.copy_(source), cuda, clock)
    matmul = _best_seconds(lambda: a @ a, cuda, clock)
    return {"copy_gb_per_s": 2 * size / copy / 1e9, "matmul_gflop_per_s": 2 * side**3 / matmul / 1e9}


def _best_seconds(call: Callable[[], Any], cuda: bool, clock: Callable[[], float]) -> float:
    best = float("inf")
    for _ in range(10):
        began = clock()
        call()
        if cuda:
            torch.cuda.synchronize()
        best = min(best, clock() - began)
    return best


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = script_parser(__doc__)
    parser.add_argument("--shape", default="qwen3-30b-a3b", help=f"some of {','.join(SHAPES)}; or all")
    parser.add_argument("--tokens", type=numbers, default="1,4,16,64,256,1024,4096", help="batch sizes")
    parser.add_argument("--sparsity", type=numbers, default="0,20,40,60", help="percent removed")
    parser.add_argument("--rounds", type=int, default=9, help="interleaved measurements of each kernel")
    parser.add_argument("--device", choices=("cpu", "cuda"), default=device)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--scale", type=float, default=1.0, help="factor of hidden and intermediate size")
    parser.add_argument("--experts", type=int, help="at most so many")
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", "-o", type=Path, default=Path("kernel.json"))
    args = parser.parse_args()
    args.shape = list(SHAPES) if args.shape == "all" else args.shape.split(",")
    if unknown := set(args.shape) - SHAPES.keys():
        parser.error(f"--shape {unknown.pop()} is unknown")
    if args.clock == "cpu" and (args.device != "cpu" or torch.get_num_threads() != 1):
        parser.error("--clock cpu adds the time of all threads; use --device cpu and set OMP_NUM_THREADS=1")
    run_kernel_benchmark(args)


if __name__ == "__main__":
    main()
