"""Refuses vLLM settings and LoRA adapters that a pruned model cannot be served with.

vLLM calls `Limits` for our dense architectures while it builds its configuration, before any worker
starts or weights are read. `check_adapters` is for every pruned model.
"""

from collections.abc import Iterable, Sequence
from functools import wraps
from typing import Any

from vllm.distributed.utils import get_pp_indices
from vllm.logger import init_logger
from vllm.model_executor.layers.linear import LinearBase, QKVParallelLinear
from vllm.model_executor.models.config import VerifyAndUpdateConfig
from vllm.model_executor.models.utils import is_pp_missing_parameter
from vllm.platforms import current_platform
from vllm.version import __version__, __version_tuple__

from ddp_vllm.errors import SettingError
from ddp_vllm.remote_code.tensors import Config
from ddp_vllm.remote_code.widths import LayerWidths, Widths, dense_heads
from ddp_vllm.tensor_parallel import check_tensor_parallel, padded_widths

TESTED = (0, 32)  # the newest version of vLLM that the tests ran on

logger = init_logger("vllm.ddp_plugins.limits")


def plain_config(config: Any) -> dict[str, Any]:
    """Return the fields of a transformers config as in `config.json`, with the model type, a class
    attribute."""
    return vars(config) | {"model_type": config.model_type}


def warn_of_new_vllm() -> None:
    """Log once that the installed vLLM is newer than the versions tested."""
    if __version_tuple__[:2] > TESTED:
        tested = ".".join(map(str, TESTED))
        logger.warning_once(
            "vLLM %s is newer than %s, the last version that ddp-vllm was tested with. If this pruned model does not "
            "start, or its output differs from transformers, install vLLM %s.",
            __version__,
            tested,
            tested,
        )


class Limits(VerifyAndUpdateConfig):
    """vLLM's hook to verify a configuration. Raises: SettingError, naming the setting and one that
    works."""

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        model, num_ranks = vllm_config.model_config, vllm_config.parallel_config.tensor_parallel_size
        config = plain_config(model.hf_config)
        check_tensor_parallel(num_ranks, config)
        widths = Widths.of(config).layers
        layers = [on_a_rank(layer, num_ranks) for layer in widths]
        check_stages(vllm_config.parallel_config.pipeline_parallel_size, layers)
        # then there is nothing to cache, and vLLM would stop
        if not any(layer.num_kv_heads for layer in layers):
            vllm_config.cache_config.enable_prefix_caching = False
        check_head_scales(config, widths)
        check_planning(vllm_config, layers)
        check_connectors(vllm_config.kv_transfer_config, max(1, len(dense_heads(config)) // num_ranks), layers)
        if not vllm_config.scheduler_config.disable_hybrid_kv_cache_manager:
            warn_of_padded_cache(config, layers)
        for present, what in ((model.quantization, "quantized weights"), (vllm_config.lora_config, "LoRA adapters")):
            if present is not None:
                remedy = f"choose one of them, as {what} cannot be padded, or prune with a suitable --tp"
                check_tensor_parallel(num_ranks, config, widths, remedy=remedy)


def on_a_rank(widths: LayerWidths, num_ranks: int) -> LayerWidths:
    """Return one rank's share of a layer's heads; ranks that share a KV head hold a copy each."""
    fitted = padded_widths(widths, num_ranks)
    num_kv_heads = -(-fitted.num_kv_heads // num_ranks)
    queries = fitted.num_query_heads // num_ranks // max(1, num_kv_heads)
    return LayerWidths(query_heads_per_kv_head=(queries,) * num_kv_heads, intermediate_size=0)


def check_stages(num_stages: int, layers: Sequence[LayerWidths]) -> None:
    """Refuse a pipeline stage without a KV cache, whose size vLLM cannot plan.
    Raises: SettingError, naming it."""
    for stage in range(num_stages) if num_stages > 1 else ():
        start, stop = get_pp_indices(len(layers), stage, num_stages)
        if not any(layer.num_kv_heads for layer in layers[start:stop]):
            raise SettingError(
                f"pipeline stage {stage + 1} of {num_stages} has layers {start}…{stop - 1}, whose attention was pruned "
                "away, and vLLM requires a KV cache in every stage; pass a lower --pipeline-parallel-size, or other "
                "stages, as in VLLM_PP_LAYER_PARTITION=20,12"
            )


def check_head_scales(config: Config, layers: Sequence[LayerWidths]) -> None:
    """Refuse KV-cache scales per head where a layer lacks heads, because vLLM divides them by the
    dense head counts.

    Raises: SettingError, naming the layer and another strategy.
    """
    scheme = (config.get("quantization_config") or {}).get("kv_cache_scheme") or {}
    dense = dense_heads(config)
    pruned = [index for index, layer in enumerate(layers) if layer.query_heads_per_kv_head not in ((), dense)]
    if scheme.get("strategy") == "attn_head" and pruned:
        raise SettingError(
            f"kv_cache_scheme has one scale per head, and layer {pruned[0]} has {layers[pruned[0]].num_query_heads} "
            f"query heads and {layers[pruned[0]].num_kv_heads} KV heads, the dense model {sum(dense)} and "
            f"{len(dense)}; quantize the KV cache with the strategy tensor"
        )


def check_planning(vllm_config: Any, layers: Sequence[LayerWidths]) -> None:
    """Refuse FlashAttention on vLLM's V1 model runner where layers with equal KV heads differ in query
    heads.

    V1 makes one plan for all layers with the same KV cache, and FlashAttention 3 takes the number
    of query heads from the plan. V2, vLLM's default, makes a plan per number of query heads. Source:
    vLLM 0.32, `_build_attn_group_metadata` in v1/worker/gpu_model_runner.py; not run on a GPU.
    Raises: SettingError, naming the widths and the flag.
    """
    backend = vllm_config.attention_config.backend
    is_other = backend is not None and backend.name != "FLASH_ATTN"
    if vllm_config.use_v2_model_runner or not current_platform.is_cuda() or is_other:
        return
    queries: dict[int, set[int]] = {}
    for layer in layers:
        queries.setdefault(layer.num_kv_heads, set()).add(layer.num_query_heads)
    for num_kv_heads, numbers in queries.items():
        if len(numbers) > 1:
            raise SettingError(
                f"layers of {num_kv_heads} KV heads have {_listed(numbers)} query heads, for which vLLM's V1 model "
                "runner may plan FlashAttention wrongly; pass --attention-backend TRITON_ATTN, or omit the setting "
                "that requires V1: VLLM_USE_V2_MODEL_RUNNER=0, --enable-dbo, suffix, Medusa or parallel drafting"
            )


def check_connectors(transfer: Any, num_kv_heads: int, layers: Iterable[LayerWidths]) -> None:
    """Refuse LMCache, whose buffers have the dense model's KV heads in every layer.

    transfer: vLLM's `kv_transfer_config`, which may combine several connectors.
    num_kv_heads: KV heads of a dense layer on one rank.
    Raises: SettingError, naming the connector.
    """
    if transfer is None:
        return
    several = transfer.kv_connector_extra_config.get("connectors", ())
    names = [transfer.kv_connector, *(each.get("kv_connector") for each in several)]
    found = [name for name in names if str(name).startswith("LMCache")]
    numbers = {layer.num_kv_heads for layer in layers}
    if found and numbers != {num_kv_heads}:
        raise SettingError(
            f"{found[0]} requires {num_kv_heads} KV heads in every layer, and this model has layers of "
            f"{_listed(numbers)}; serve it without LMCache"
        )


def warn_of_padded_cache(config: Config, layers: Sequence[LayerWidths]) -> None:
    """Warn where vLLM pads the KV cache of narrower layers to the widest, and name the flag that
    avoids it.

    In a model that mixes sliding windows and full attention, vLLM gives all layers pages of one
    size. Layers whose number of KV heads divides the largest store more tokens per page; the cache
    of any other layer is padded.
    """
    numbers = {layer.num_kv_heads for layer in layers} - {0}
    stated = config.get("layer_types") or [""] * len(layers)  # families with only one kind of attention state none
    kinds = {kind for kind, layer in zip(stated, layers, strict=True) if layer.num_kv_heads}
    if len(kinds) > 1 and any(max(numbers) % number for number in numbers):
        logger.warning_once(
            "Only some layers have a sliding window, and layers have %s KV heads: vLLM pads the KV cache of each layer "
            "to %d. --disable-hybrid-kv-cache-manager avoids the padding, but keeps tokens outside of the windows in "
            "the cache, so it pays for short sequences: compare 'Maximum concurrency' in the log with and without it. "
            "Nothing is padded after prune --scope layer with a --sparsity that keeps whole KV heads (0.25 of 4).",
            _listed(numbers),
            max(numbers),
        )


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))


def check_adapters() -> None:
    """Let vLLM refuse LoRA adapters that were trained for other widths or that change a module
    without LoRA; safe to call again.

    vLLM would silently copy a narrower tensor into part of a buffer, and ignore parts for modules
    without LoRA. The adapter's `lora_a` is `[rank, in]` and `lora_b` `[out, rank]`, as on disk.
    Adapters raise SettingError, which names the module and its sizes.
    """
    from vllm.lora.model_manager import LoRAModelManager

    add_adapter = LoRAModelManager._add_adapter
    if hasattr(add_adapter, "__wrapped__"):
        return

    @wraps(add_adapter)
    def add_checked(manager: Any, adapter: Any) -> Any:
        packed = {part: (module, parts) for module, parts in manager.packed_modules.items() for part in parts}
        for stated, lora in adapter.loras.items():
            if isinstance(lora.lora_b, list) or not lora.lora_b.any():
                # adds nothing: vLLM's warm-up adapters, which are packed or already cut to one rank
                continue
            # of a model trained without its head
            name = f"model.{stated}" if stated.startswith("layers.") else stated
            module, parts = packed.get(name, (name, [name]))
            if module not in manager.modules:
                if is_pp_missing_parameter(f"{name}.weight", manager.model):  # another pipeline stage has it
                    continue
                raise SettingError(
                    f"the adapter changes {name}, to which no LoRA is applied here: --lora-target-modules excludes it, "
                    "its block was pruned away, or it is a routed expert; train the adapter without it, or merge the "
                    "adapter before pruning"
                )
            layer = getattr(manager.modules[module], "base_layer", None)
            if not isinstance(layer, LinearBase):
                continue
            index, sizes = parts.index(name), getattr(layer, "output_sizes", [layer.output_size])
            if len(parts) == 1:
                sizes = [sum(sizes)]
            # ranks that share a KV head hold a copy each
            copies = layer.num_kv_head_replicas if index and isinstance(layer, QKVParallelLinear) else 1
            shape = lora.lora_a.shape[1], lora.lora_b.shape[0]
            if len(sizes) == len(parts) and shape != (layer.input_size, sizes[index] // copies):
                raise SettingError(
                    f"the adapter's {name} is for {shape[0]:,} inputs and {shape[1]:,} outputs, and this layer "
                    f"requires {layer.input_size:,} and {sizes[index] // copies:,}; the adapter was trained for other "
                    "widths: train it on this pruned folder"
                )
        return add_adapter(manager, adapter)

    LoRAModelManager._add_adapter = add_checked
