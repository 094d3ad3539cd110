"""Memory for weights on a CPU."""

import mmap

import torch

HUGE_PAGE = 1 << 21  # bytes


def on_huge_pages(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy on pages of 2 MB, where Linux gives them.

    A token reads far more weights than the processor can remember pages of 4 kB for.
    """
    num_bytes = tensor.numel() * tensor.element_size()
    if num_bytes < HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return tensor.clone(memory_format=torch.contiguous_format)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # a kernel without them
        return tensor.clone(memory_format=torch.contiguous_format)
    return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape).copy_(tensor)
