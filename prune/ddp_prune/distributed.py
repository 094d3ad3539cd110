"""Several processes as one run: who goes first, errors that all raise, and weights sharded over all of them.

Processes are started by accelerate launch or torchrun. With `shard`, FSDP2 shards the decoder layers by rows, and each
layer is gathered just before it is used. Weights outside the layers stay whole in every process, because the output
head is used all the time (`loss.py`); accelerate's own FSDP2 plugin would shard them too, and does not support CPUs.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.tracking import get_available_trackers
from accelerate.utils import broadcast_object_list, gather_object
from safetensors import safe_open
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from ddp_prune.model import Source, check_complete, load_model, loading_options, weight_files
from ddp_prune.recipe import Recipe, RecoveryRecipe
from ddp_vllm.errors import DdpError, SettingError
from ddp_vllm.remote_code.tensors import LAYERS

Found = TypeVar("Found")


def make_accelerator(output: Path, tracker: str | None) -> Accelerator:
    """Return the accelerator, which knows this process's device and rank. Raises: SettingError without the tracker."""
    trackers = [str(name) for name in get_available_trackers()]
    if tracker and tracker not in trackers:
        known = ", ".join(trackers) or "none; for example pip install tensorboard"
        raise SettingError(f"tracker is {tracker!r}, which is unknown or not installed; installed: {known}")
    # Without cpu=True, accelerate takes a CPU process that torchrun started for the only one.
    device = torch.accelerator.current_accelerator(check_available=True)
    on_cpu = device is None or device.type == "mps"  # Apple GPUs lack float64, in which gradients are summed
    # Other ranks wait while the first downloads and tokenizes; torch's default timeout is ten minutes.
    timeout = InitProcessGroupKwargs(timeout=timedelta(hours=6))
    return Accelerator(cpu=on_cpu, log_with=tracker, project_dir=str(output.parent), kwargs_handlers=[timeout])


@contextmanager
def raise_on_all_ranks(accelerator: Accelerator) -> Iterator[None]:
    """Wait for all processes after the block, and raise a DdpError in all of them if any of them raised one.

    Without this, the other processes would wait forever for the failed one. The block itself must not communicate. Any
    other exception ends its process at once, and the launcher ends the rest.
    """
    own: DdpError | None = None
    try:
        yield
    except DdpError as error:
        own = error
    raised: list[DdpError | None] = gather_object([own])
    if first := own or next(filter(None, raised), None):
        raise first


def main_process_first(accelerator: Accelerator, find: Callable[[], Found]) -> Found:
    """Return `find()` of each process; the first process of each machine runs it before the others, and fills caches.

    Errors are raised as by `raise_on_all_ranks`.
    """
    for first in (True, False):
        with raise_on_all_ranks(accelerator):
            if accelerator.is_local_main_process == first:
                found = find()
    return found


def broadcast_from_main(accelerator: Accelerator, value: Found) -> Found:
    """Return the main process's `value` in all processes."""
    return broadcast_object_list([value])[0] if accelerator.num_processes > 1 else value


def check_sharding(recipe: Recipe | RecoveryRecipe, num_processes: int) -> None:
    """Check that `shard` has several processes, each with equally many sequences per step. Raises: SettingError."""
    if not recipe.shard:
        return
    if num_processes == 1:
        raise SettingError(
            "shard spreads the weights over processes, but there is one; start with: "
            "accelerate launch --num_processes N -m ddp_vllm …"
        )
    if recipe.batch_size % num_processes:
        raise SettingError(
            f"batch_size is {recipe.batch_size}, which {num_processes} processes that share weights cannot divide "
            f"evenly; make it {recipe.batch_size + -recipe.batch_size % num_processes}"
        )


def load(source: Source, recipe: Recipe | RecoveryRecipe, accelerator: Accelerator) -> Any:
    """Load a model for a run, whole or sharded; see `load_model` and `load_sharded`."""
    gc.collect()  # models of earlier sizes: FSDP and peft leave reference cycles
    if recipe.shard:
        return load_sharded(source, recipe.dtype, accelerator.device, accelerator.num_processes)
    return load_model(source, recipe.dtype, accelerator.device)


def load_sharded(source: Source, dtype: str, device: torch.device, num_processes: int) -> Any:
    """Load the stock transformers model, frozen, in eval mode, with its decoder layers sharded over all processes.

    The model is built without memory; then each process reads only its own rows from disk. All processes must call
    this together. Raises: ModelError if the checkpoint lacks weights.
    """
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    files = [safe_open(path, framework="pt") for path in weight_files(source.folder)]
    slices = {name: file.get_slice(name) for file in files for name in file.keys()}  # noqa: SIM118 (no mapping)
    config = AutoConfig.from_pretrained(source.folder, trust_remote_code=False)
    options = loading_options(source, dtype, device)
    with init_empty_weights(include_buffers=False):  # buffers are small, and computed rather than stored
        model: Any = AutoModelForCausalLM.from_config(config, **options)
    model.requires_grad_(False)
    shard_layers(model, device, num_processes, options["dtype"])
    settings = LoadStateDictConfig(
        device_map={"": device}, dtype=options["dtype"], weight_mapping=get_model_conversion_mapping(model)
    )
    convert_and_load_state_dict_in_model(model, slices, settings)  # reads each DTensor's own rows
    model.tie_weights()
    check_complete(source, [name for name, parameter in model.named_parameters() if parameter.is_meta])
    model.requires_grad_(False)
    return model.eval()


def shard_layers(model: Any, device: torch.device, num_processes: int, dtype: torch.dtype) -> None:
    """Shard every decoder layer by rows. Layers compute in `dtype`, and gradients are summed in float32."""
    mesh = init_device_mesh(device.type, (num_processes,))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    sharded: set[torch.nn.Parameter] = set()
    for layer in model.get_submodule(LAYERS).children():
        fully_shard(layer, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
        sharded.update(layer.parameters())
    # The decoder shards no weights of its own, but as the root of its layers it lets them be gathered ahead of use.
    fully_shard(model.get_decoder(), mesh=mesh, ignored_params=set(model.parameters()) - sharded)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process's rows of a tensor that may be sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
