"""Copies a weight into 2 MB huge pages, which speeds up decoding on a CPU.

The plugin does so with its experts, and `benchmarks/kernels` with vLLM's too, so that it compares only
kernels.
"""

import mmap

import torch

HUGE_PAGE = 1 << 21  # bytes


def on_huge_pages(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy in huge pages, or in ordinary memory where Linux provides none.

    A decode step reads far more weights than the processor's TLB covers with pages of 4 kB.
    """
    num_bytes = tensor.numel() * tensor.element_size()
    if num_bytes < HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return tensor.clone(memory_format=torch.contiguous_format)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # a Linux kernel without huge pages
        return tensor.clone(memory_format=torch.contiguous_format)
    return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape).copy_(tensor)
