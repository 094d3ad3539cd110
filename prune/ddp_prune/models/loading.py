"""Loads the model of a run, frozen and in eval mode: whole, or sharded over all processes.

With `shard`, FSDP2 shards the decoder layers by rows, and each layer is gathered just before it is
used. Every process holds the weights outside the layers whole, because each chunk of the loss uses
the output head (`ddp_prune/core/loss.py`); accelerate's own FSDP2 plugin would shard them too, and
does not support CPUs.
"""

import gc
from collections.abc import Collection
from typing import Any

import torch
from accelerate import Accelerator
from safetensors import safe_open
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from ddp_prune.core.decoder import auto_class, decoder_layers, decoder_of
from ddp_prune.core.loss import OutputHead, final_hidden
from ddp_prune.models.source import AGAIN, Source, loading_options, stock_config
from ddp_prune.settings import TrainingSettings
from ddp_vllm.errors import ModelError, SettingError, reading
from ddp_vllm.model_files import errors_only
from ddp_vllm.remote_code.files import weight_files


def check_sharding(recipe: TrainingSettings, num_processes: int) -> None:
    """Refuse `shard` with one process, or with a batch that the processes cannot divide.
    Raises: SettingError."""
    if not recipe.shard:
        return
    if num_processes == 1:
        raise SettingError(
            "shard",
            "spreads the weights over processes, but there is one; start with: "
            "accelerate launch --num_processes N -m ddp_vllm …",
        )
    if recipe.batch_size % num_processes:
        raise SettingError(
            "batch_size",
            f"is {recipe.batch_size}, which {num_processes} processes that share weights cannot divide "
            f"evenly; make it {recipe.batch_size + -recipe.batch_size % num_processes}",
        )


def load(source: Source, recipe: TrainingSettings, accelerator: Accelerator) -> Any:
    """Load a model for a run, whole or sharded; see `load_model` and `load_sharded`."""
    gc.collect()  # models of earlier sizes: FSDP and peft leave reference cycles
    if not recipe.shard:
        return load_model(source, recipe.dtype, accelerator.device)
    model = load_sharded(source, recipe.dtype, accelerator.device, accelerator.num_processes)
    if source.structure:
        check_head(source, model)
    return model


@torch.no_grad()
def check_head(source: Source, model: Any) -> None:
    """Refuse a model whose logits are computed otherwise than `OutputHead` computes them.
    Raises: ModelError."""
    head = OutputHead.of(model)
    tokens = torch.arange(1, min(9, len(head.weight)), device=head.weight.device)[None]
    computed, stock = head.logits(final_hidden(model, tokens)), model(tokens, use_cache=False).logits[0, :-1].float()
    if not torch.allclose(computed, stock, atol=0.02 * float(stock.abs().max()), rtol=0.02):
        raise ModelError(
            f"{source.folder}: {type(model).__name__} computes its logits in a way that ddp-vllm does not know; "
            "its loss would be another one, so it can neither be pruned nor evaluated"
        )


def load_teacher(source: Source, recipe: TrainingSettings, accelerator: Accelerator, student: Any) -> Any:
    """Load the dense model as the teacher of `student`; in a pruning it shares the frozen embeddings
    and output head of that."""
    teacher = load(source, recipe, accelerator)
    if recipe.shares_embeddings:
        teacher.set_input_embeddings(student.get_input_embeddings())
        teacher.set_output_embeddings(student.get_output_embeddings())
    return teacher


def load_model(source: Source, dtype: str, device: torch.device | None = None) -> Any:
    """Load the stock transformers model, frozen and in eval mode, straight to `device`.

    Raises: ModelError if weights are missing or have another shape, which transformers would initialize
        at random, and as `check_head`.
    """
    options = loading_options(source, dtype, device)
    if device is not None and device.type != "cpu":
        options["device_map"] = {"": device}
    # our own error reports missing weights
    with errors_only(), reading(source.folder, ModelError, AGAIN, but=(torch.OutOfMemoryError,)):
        model, loaded = auto_class(stock_config(source.folder)).from_pretrained(
            source.folder,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            trust_remote_code=False,
            **options,
        )
    check_complete(source, {*loaded["missing_keys"], *(name for name, *_ in loaded["mismatched_keys"])})
    model.requires_grad_(False).eval()
    if source.structure:
        check_head(source, model)
    return model


def check_complete(source: Source, lacking: Collection[str]) -> None:
    """Refuse a checkpoint that lacks weights, given by their names in transformers.
    Raises: ModelError."""
    if lacking:
        raise ModelError(
            f"{source.folder} lacks {min(lacking)}, or has it in another shape than config.json states "
            f"({len(lacking)} weights in all); download the model again, as published"
        )


def load_sharded(source: Source, dtype: str, device: torch.device, num_processes: int) -> Any:
    """Load the stock transformers model, frozen, in eval mode, with its decoder layers sharded over
    all processes.

    The model is built on the meta device; then each process reads only its own rows from disk. All
    processes must call this together. Raises: ModelError if the checkpoint lacks weights.
    """
    from accelerate import init_empty_weights
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    files = [safe_open(path, framework="pt") for path in weight_files(source.folder)]
    slices = {name: file.get_slice(name) for file in files for name in file.keys()}  # noqa: SIM118 (no mapping)
    config = stock_config(source.folder)
    options = loading_options(source, dtype, device)
    # buffers are small, and computed rather than stored
    with init_empty_weights(include_buffers=False):
        model: Any = auto_class(config).from_config(config, **options)
    model.requires_grad_(False)
    shard_layers(model, init_device_mesh(device.type, (num_processes,)), options["dtype"])
    settings = LoadStateDictConfig(
        device_map={"": device}, dtype=options["dtype"], weight_mapping=get_model_conversion_mapping(model)
    )
    convert_and_load_state_dict_in_model(model, slices, settings)  # reads each DTensor's own rows
    model.tie_weights()
    check_complete(source, [name for name, parameter in model.named_parameters() if parameter.is_meta])
    model.requires_grad_(False)
    return model.eval()


def shard_layers(model: Any, mesh: DeviceMesh, dtype: torch.dtype) -> None:
    """Shard every decoder layer by rows. Layers compute in `dtype`, and gradients are summed in
    float32."""
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    sharded: set[torch.nn.Parameter] = set()
    for layer in decoder_layers(model)[1]:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
        sharded.update(layer.parameters())
    # The decoder shards no weights of its own, but as the root of its layers it lets them be
    # gathered ahead of use.
    fully_shard(decoder_of(model), mesh=mesh, ignored_params=set(model.parameters()) - sharded)
