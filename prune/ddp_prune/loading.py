"""Loads the model of a run: whole, or sharded over all processes.

With `shard`, FSDP2 shards the decoder layers by rows, and each layer is gathered just before it is used. Weights
outside the layers stay whole in every process, because the output head is used all the time (`ddp_training/loss.py`);
accelerate's own FSDP2 plugin would shard them too, and does not support CPUs.
"""

import gc
from typing import Any

import torch
from accelerate import Accelerator
from safetensors import safe_open
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from ddp_prune.model import Source, check_complete, load_model, loading_options, weight_files
from ddp_prune.recipe import TrainingSettings
from ddp_vllm.errors import SettingError
from ddp_vllm.remote_code.tensors import LAYERS


def check_sharding(recipe: TrainingSettings, num_processes: int) -> None:
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


def load(source: Source, recipe: TrainingSettings, accelerator: Accelerator) -> Any:
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
