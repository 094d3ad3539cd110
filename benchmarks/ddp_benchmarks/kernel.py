"""How fast are experts of different widths, and what do the different widths themselves cost?

One layer's routed experts run alone, in five variants on the same tokens and routing:

    ragged        our kernel at the drawn widths dense         vLLM's fused experts before pruning
    padded        vLLM's fused experts, zero-padded to the widest: the alternative without our
    kernel uniform       our kernel with every expert at the mean width: the same bytes in equal
    widths vllm_uniform  vLLM's fused experts at the mean width: the same bytes in vLLM's kernel

Rounds are interleaved in rotating order, so that a slow minute affects all variants, and ratios are
paired within rounds. Before timing, ragged must equal padded. On a CPU the weights of every variant
are in 2 MB huge pages, and the results have the bytes of each that really are. The results also
name the kernel that vLLM's own oracle chooses on this machine, and its tile sizes. Copy bandwidth
and matrix throughput, measured in the same run, are the ceilings of the achieved numbers.
"""

import importlib.metadata
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any

import torch

from ddp_benchmarks.expert_layers import (
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
    work,
)
from ddp_benchmarks.fused_experts import FusedExperts, build_vllm
from ddp_benchmarks.protocol import new_results, rotated
from ddp_vllm.errors import ServingError, SettingError
from ddp_vllm.huge_pages import huge_page_bytes
from ddp_vllm.intervals import judge, spread

FORMAT = "ddp-vllm bench kernel 1"
KERNELS = "ddp_vllm.moe_kernels"  # entry points
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
# share of the norm; both round every term
AGREE = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-4}
BASELINES = ("dense", "padded", "uniform", "vllm_uniform")
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
REPLAYS = 10  # of a CUDA graph per round
FEW_TOKENS, DRAWS = 64, 4
"""Batches of up to FEW_TOKENS run DRAWS routings in turn, so that caches do not hold the same few
experts."""

PrintLine = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class KernelSettings:
    """The layers, batches and machine to measure."""

    shapes: tuple[str, ...]
    tokens: tuple[int, ...]
    """Batch sizes M."""
    sparsities: tuple[int, ...]
    """Percent of the channels removed."""
    rounds: int
    seed: int
    device: str
    dtype: str
    scale: float
    """Factor of hidden and intermediate size, for small machines; 1: the real shape."""
    experts: int | None
    """Maximum number of experts; None: all."""
    clock: str = "wall"
    """`wall` or, on a CPU, `cpu`: processor time, which is independent of other work on a busy
    machine."""
    popularity: float = 0.5
    """Standard deviation of the experts' popularity; each token's own preference has 1."""

    def check(self) -> None:
        """Check all settings. Raises: SettingError, naming the option, its value and its limits."""
        for name in self.shapes:
            if name not in SHAPES:
                raise SettingError(f"--shape {name} is unknown; use one of {', '.join(SHAPES)}")
        limits: tuple[tuple[str, Sequence[float], float, float], ...] = (
            ("--tokens", self.tokens, 1, 65536),
            ("--sparsity", self.sparsities, 0, 95),
            ("--rounds", (self.rounds,), 2, 1000),
            ("--scale", (self.scale,), 0.01, 1),
            ("--experts", () if self.experts is None else (self.experts,), 1, 1024),
            ("--popularity", (self.popularity,), 0, 5),
        )
        for option, values, low, high in limits:
            if wrong := [value for value in values if not low <= value <= high]:
                raise SettingError(f"{option} {wrong[0]:g} is outside {low:g}…{high:g}")
        if self.clock == "cpu" and (self.device != "cpu" or torch.get_num_threads() != 1):
            raise SettingError("--clock cpu adds the time of all threads; use --device cpu and set OMP_NUM_THREADS=1")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise SettingError("--device cuda: PyTorch finds no CUDA device; use --device cpu")
        if self.device == "cuda" and self.dtype == "bfloat16" and not torch.cuda.is_bf16_supported(False):
            raise SettingError("--dtype bfloat16: this GPU does not support it; use --dtype float16")


def run_kernel_benchmark(
    settings: KernelSettings, print_line: PrintLine, save: Callable[[Mapping[str, Any]], None]
) -> None:
    """Measure every shape and sparsity, and pass the results so far to `save` after each.

    Raises: ServingError if a kernel is missing or its results are wrong.
    """
    build_ragged = find_kernel()
    results = new_results(FORMAT, asdict(settings)) | {
        "threads": torch.get_num_threads(),
        "ceilings": measure_ceilings(settings.device, DTYPES[settings.dtype], CLOCKS[settings.clock]),
        "complete": False,
        "rows": [],
    }
    print_line("copy {copy_gb_per_s:.1f} GB/s, matmul {matmul_gflop_per_s:,.0f} GFLOP/s".format(**results["ceilings"]))
    for name in settings.shapes:
        shape = SHAPES[name].scaled(settings.scale, settings.experts)
        generator = torch.Generator().manual_seed(settings.seed)
        dense = draw_experts(shape, DTYPES[settings.dtype], settings.device, generator)
        for sparsity in settings.sparsities:
            widths = draw_widths(shape, sparsity, settings.seed)
            print_line(f"{name} {asdict(shape)}, {sparsity} % removed: widths {min(widths)}…{max(widths)}")
            runs, pages = _variants(build_ragged, shape, dense, widths)
            of_vllm = {variant: run for variant, run in runs.items() if isinstance(run, FusedExperts)}
            for variant, run in of_vllm.items():
                print_line(f"vLLM runs {variant} by {run}")
            layer = {"shape": name, **asdict(shape), "sparsity": sparsity, "huge_page_bytes": pages}
            layer["vllm"] = {variant: run.choice for variant, run in of_vllm.items()}
            measured = _measure(runs, shape, widths, settings, results["ceilings"])
            results["rows"] += [layer | {"widths": widths} | row for row in measured]
            save(results)
    results["complete"] = True
    save(results)


def find_kernel() -> Callable[[Sequence[Expert]], Run]:
    """Return the installed builder of ragged experts. Raises: ServingError."""
    entries = importlib.metadata.entry_points(group=KERNELS, name="ragged")
    if not entries:
        raise ServingError(f"no entry point ragged in the group {KERNELS}; install ddp-vllm again: pip install -e .")
    builder: Callable[[Sequence[Expert]], Run] = next(iter(entries)).load()
    return builder


def _variants(
    build_ragged: Callable[[Sequence[Expert]], Run], shape: Shape, dense: Sequence[Expert], widths: list[int]
) -> tuple[dict[str, Run], dict[str, int]]:
    """Return each variant, and the bytes of its weights in huge pages."""
    even, by_vllm = even_widths(widths), partial(build_vllm, num_slots=shape.num_experts_per_tok)
    builders: dict[str, tuple[Callable[[Sequence[Expert]], Run], Sequence[Expert]]] = {
        "ragged": (build_ragged, cut(dense, widths)),
        "dense": (by_vllm, dense),
        "padded": (by_vllm, cut(dense, widths)),
        "uniform": (build_ragged, cut(dense, even)),
        "vllm_uniform": (by_vllm, cut(dense, even)),
    }
    runs, pages = dict[str, Run](), {}
    for name, (build, experts) in builders.items():
        before = huge_page_bytes()
        runs[name] = build(experts)
        pages[name] = huge_page_bytes() - before
    return runs, pages


def _measure(
    runs: Mapping[str, Run], shape: Shape, widths: list[int], settings: KernelSettings, ceilings: Mapping[str, float]
) -> Iterator[dict[str, Any]]:
    """Yield the results of each batch size."""
    generator = torch.Generator().manual_seed(settings.seed + 1)
    popularity = settings.popularity * torch.randn(shape.num_experts, generator=generator)
    dtype = DTYPES[settings.dtype]
    for tokens in settings.tokens:
        draws = range(DRAWS if tokens <= FEW_TOKENS else 1)
        batches = [draw_batch(shape, tokens, dtype, settings.device, generator, popularity) for _ in draws]
        _check_agreement(runs, batches[0])
        seconds = time_interleaved(runs, batches, settings.rounds, CLOCKS[settings.clock])
        tiles = {name: run.tiles_of(tokens) for name, run in runs.items() if isinstance(run, FusedExperts)}
        yield {"tokens": tokens, "draws": len(draws), "vllm_tiles": tiles} | _judge(
            seconds, batches, widths, shape, ceilings
        )


def _check_agreement(runs: Mapping[str, Run], batch: Batch) -> None:
    """Compare the kernels on the same experts. Raises: ServingError if they disagree."""
    for name, reference in (("ragged", "padded"), ("uniform", "vllm_uniform")):
        expected = runs[reference](*batch).double()
        error = ((runs[name](*batch).double() - expected).norm() / expected.norm()).item()
        if not error <= AGREE[batch[0].dtype]:  # also true for NaN
            raise ServingError(f"{name} and {reference} differ by {error:.2e} of the result's norm; nothing was timed")


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
        "seconds": {name: spread(values) for name, values in seconds.items()},
        "speedup_over": {name: judge(seconds["ragged"], seconds[name]).to_json() for name in BASELINES},
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
