"""Tiny models in vLLM, one engine after the other in a process, without what costs more than they do."""

import gc
import inspect
import multiprocessing

from vllm.v1.engine import core
from vllm.v1.executor import multiproc_executor
from vllm.v1.sample import sampler
from vllm.v1.worker import gpu_worker


def save_time() -> None:
    """Do without what costs more than what is tested and has no part in it."""
    # each worker would import vLLM anew; it does on a CPU for the sake of OpenMP, and forks elsewhere
    multiproc_executor.get_mp_context = lambda: multiprocessing.get_context("fork")
    # the sampler compiles its count of likelier tokens, for longer than it takes to compile a tiny model
    sampler.batched_count_greater_than = inspect.unwrap(sampler.batched_count_greater_than)
    # an engine collects garbage eight times, and vLLM's modules each time: they stay frozen, the engine does not
    gc.freeze()
    gc.unfreeze = core.freeze_gc_heap = gpu_worker.freeze_gc_heap = lambda: None
