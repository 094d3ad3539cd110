"""Frozen weights cut over processes by FSDP2, so that a model trains where one device cannot hold it.

Each decoder layer is a unit: its weights are gathered just before they are used, forward and backward, and let go
after. There are no gradients of weights to exchange. What is outside the layers stays whole on every device: the output
head is multiplied with chunk after chunk of every micro-batch (`objective.py`), so it would be gathered whole for all
of that time, and it is often the embedding too; of a 70B model both are 3 % of the weights.
accelerate's own FSDP2 plugin would cut the head too, and its launcher refuses `--use_fsdp` with `--cpu`.
"""

from typing import Any

import torch
from safetensors import safe_open
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ddp_prune.source import Source, check_complete, loading_options, weight_files
from ddp_vllm.errors import SettingError


def check_shares(batch_size: int, num_processes: int) -> None:
    """Refuse what would leave processes waiting for others' weights. Raises: SettingError."""
    if num_processes == 1:
        raise SettingError(
            "shard cuts the weights over processes, but there is one; start with: "
            "accelerate launch --num_processes N -m ddp_vllm prune …"
        )
    if batch_size % num_processes:
        raise SettingError(
            f"batch_size is {batch_size}, which {num_processes} processes that share weights cannot divide evenly; "
            f"make it {batch_size + -batch_size % num_processes}"
        )


def load_sharded(source: Source, dtype: str, device: torch.device, num_processes: int) -> Any:
    """Load the stock transformers model, frozen, in eval mode, with its decoder layers cut over all processes.

    It is built without memory; then each process reads from disk the rows that are its own, and never holds more.
    All processes must call this together. Raises: ModelError if the checkpoint lacks weights.
    """
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    files = [safe_open(path, framework="pt") for path in weight_files(source.folder)]
    slices = {name: file.get_slice(name) for file in files for name in file.keys()}  # noqa: SIM118 (no mapping)
    config, options = AutoConfig.from_pretrained(source.folder), loading_options(source, dtype, device)
    with init_empty_weights(include_buffers=False):  # buffers are small, and computed rather than stored
        model: Any = AutoModelForCausalLM.from_config(config, **options)
    model.requires_grad_(False)
    shard_layers(model, source.family.layers, device, num_processes)
    settings = LoadStateDictConfig(
        device_map={"": device}, dtype=options["dtype"], weight_mapping=get_model_conversion_mapping(model)
    )
    convert_and_load_state_dict_in_model(model, slices, settings)  # reads each DTensor's own rows
    model.tie_weights()
    check_complete(source, [name for name, parameter in model.named_parameters() if parameter.is_meta])
    model.requires_grad_(False)
    return model.eval()


def shard_layers(model: Any, layers: str, device: torch.device, num_processes: int) -> None:
    """Cut every decoder layer over all processes, by rows; what is outside of the layers stays whole."""
    mesh = init_device_mesh(device.type, (num_processes,))
    cut: set[torch.nn.Parameter] = set()
    for layer in model.get_submodule(layers).children():
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
        cut.update(layer.parameters())
    # the decoder owns no weights of its own, but as the root of its layers it lets them gather ahead of each other
    fully_shard(model.get_decoder(), mesh=mesh, ignored_params=set(model.parameters()) - cut)
