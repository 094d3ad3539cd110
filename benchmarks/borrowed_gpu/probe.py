"""What does this GPU do at best? Versions, ceilings and latencies that every prediction of
`moe_traffic.py` needs.

python probe.py OUT.json
"""

import importlib.metadata
import platform
import shutil
import subprocess
import sys

import torch
import triton
import triton.language as tl

from lease import DEVICE, DRY, Results, graph_seconds, seconds_of

PACKAGES = ("torch", "triton", "transformers", "accelerate", "peft", "numpy", "vllm", "tokenizers", "torchao")
QUERY = "name,memory.total,driver_version,clocks.max.sm,clocks.max.mem,power.limit"
L2_PROGRAMS, L2_BLOCK = 132 * 4, 4096


@triton.jit
def read_from_l2(x_ptr, y_ptr, N: tl.constexpr, BLOCK: tl.constexpr):
    """Every program reads all N numbers, beginning at another one: the first of them from HBM, the
    others from L2."""
    total = tl.zeros((BLOCK,), tl.int32)
    start = tl.program_id(0) * BLOCK
    for at in range(0, N, BLOCK):
        total += tl.load(x_ptr + (start + at + tl.arange(0, BLOCK)) % N, cache_modifier=".cg")
    tl.store(y_ptr + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), total)


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def shell(*words: str) -> str:
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        return repr(error)


def main() -> None:
    results = Results(
        sys.argv[1], python=platform.python_version(), versions={name: version(name) for name in PACKAGES},
        tools={name: shutil.which(name) for name in ("gcc", "nvcc", "ncu", "ninja")},
        gpu=shell("nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"),
    )  # fmt: skip
    results.save()
    source = torch.randint(0, 255, (2**20 if DRY else 2**32,), dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    results.save(
        copy_tb_s=2 * len(source) / seconds_of(lambda: target.copy_(source)) / 1e12,
        read_tb_s=len(source) / seconds_of(lambda: source.view(torch.int32).sum()) / 1e12,
    )
    side = 64 if DRY else 8192
    a = torch.randn(side, side, device=DEVICE, dtype=torch.bfloat16)
    results.save(matmul_tflops=2 * side**3 / seconds_of(lambda: a @ a, inner=3) / 1e12)
    weight = torch.randn(*((96, 32) if DRY else (12288, 4096)), device=DEVICE, dtype=torch.bfloat16)
    inputs = {m: weight.new_ones(m, weight.shape[1]) for m in (1, 8, 32, 64, 128, 256, 512, 2048, 8192)}
    results.save(linear_4096x12288_us={m: 1e6 * seconds_of(lambda x=x: x @ weight.t()) for m, x in inputs.items()})
    small = torch.zeros(1024, device=DEVICE)
    results.save(
        graph_node_us=1e6 * graph_seconds([lambda: small.add_(1.0)] * 200),
        eager_launch_us=1e6 * seconds_of(lambda: small.add_(1.0), inner=1000),
    )
    for mib in () if DRY else (8, 24):
        x = torch.randint(0, 9, (mib * 2**18,), dtype=torch.int32, device=DEVICE)
        y = torch.empty(L2_PROGRAMS * L2_BLOCK, dtype=torch.int32, device=DEVICE)
        seconds = seconds_of(
            lambda x=x, y=y: read_from_l2[(L2_PROGRAMS,)](x, y, N=len(x), BLOCK=L2_BLOCK, num_warps=8), 5, inner=1
        )
        results.save(**{f"l2_tb_s_{mib}_mib": L2_PROGRAMS * x.nbytes / seconds / 1e12})
    results.save(complete=True)
    print({name: value for name, value in results.items() if isinstance(value, float)})


if __name__ == "__main__":
    main()
