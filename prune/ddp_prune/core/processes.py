"""Several processes in one run: which runs first, and errors that all of them raise.

Processes are started by accelerate launch or torchrun. torch is imported only when they communicate.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar, TypeVarTuple

from ddp_vllm.errors import DdpError

if TYPE_CHECKING:
    from accelerate import Accelerator

Found = TypeVar("Found")
Given = TypeVarTuple("Given")


@contextmanager
def raise_on_all_ranks(accelerator: "Accelerator") -> Iterator[None]:
    """Wait for all processes after the block, and raise a DdpError in all of them if any of them
    raised one.

    Without this, the other processes would wait forever for the failed one. The block itself must
    not communicate. Any other exception ends its process at once, and the launcher ends the rest.
    """
    from accelerate.utils import gather_object

    local: DdpError | None = None
    try:
        yield
    except DdpError as error:
        local = error
    raised: list[DdpError | None] = gather_object([local])
    if first := local or next(filter(None, raised), None):
        raise first


def main_process_first(accelerator: "Accelerator", find: Callable[[*Given], Found], *given: *Given) -> Found:
    """Return `find` of what is given, in each process. The first process of each machine runs it before
    the others, to fill the caches.

    Errors are raised as by `raise_on_all_ranks`.
    """
    for first in (True, False):
        with raise_on_all_ranks(accelerator):
            if accelerator.is_local_main_process == first:
                value = find(*given)
    return value


def broadcast_from_main(accelerator: "Accelerator", value: Found) -> Found:
    """Return the main process's `value` in all processes."""
    from accelerate.utils import broadcast_object_list

    return broadcast_object_list([value])[0] if accelerator.num_processes > 1 else value
