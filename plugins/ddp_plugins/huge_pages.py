"""Memory for weights on a CPU."""

import mmap

import torch

HUGE_PAGE = 1 << 21  # bytes


def empty_on_huge_pages(size: int, like: torch.Tensor) -> torch.Tensor:
    """Return `size` numbers of unknown value, on pages of 2 MB where Linux gives them.

    A token reads far more weights than the processor can remember pages of 4 kB for.
    """
    num_bytes = size * like.element_size()
    if num_bytes < HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return like.new_empty(size)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        return like.new_empty(size)  # a kernel without them
    return torch.frombuffer(memory, dtype=like.dtype)
