"""What a pruned dense model cannot be served with, said before weights are read.

vLLM calls `Limits` for our architectures while it puts its configuration together, before any worker starts, and hands
adapters to its LoRA manager, which `check_adapters` makes look at their shapes.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vllm.logger import init_logger
from vllm.model_executor.models.config import VerifyAndUpdateConfig
from vllm.platforms import current_platform
from vllm.version import __version__, __version_tuple__

from ddp_plugins.padding import fit
from ddp_vllm.errors import SettingError
from ddp_vllm.remote_code.widths import LayerWidths, ModelWidths, dense_kv_heads, parse_layers
from ddp_vllm.tensor_parallel import check_tensor_parallel

TESTED = (0, 32)  # the newest version of vLLM that the tests ran on
RETRAIN = "it was made for other widths: train the adapter on this pruned folder"
SLIDING = "sliding_attention"  # as in `layer_types`, where transformers says which layers see a window only

logger = init_logger("vllm.ddp_plugins.limits")


def plain_config(config: Any) -> dict[str, Any]:
    """Return the fields of a transformers config as `config.json` has them; its model type belongs to the class."""
    return vars(config) | {"model_type": config.model_type}


def warn_of_new_vllm() -> None:
    """Tell once, where a pruned model is served, that the installed vLLM is newer than the tests know."""
    if __version_tuple__[:2] > TESTED:
        tested = ".".join(map(str, TESTED))
        logger.warning_once(
            "vLLM %s is newer than %s, the last version that ddp-vllm was tested with. If this pruned model does not "
            "start, or answers otherwise than in transformers, install vLLM %s.",
            __version__,
            tested,
            tested,
        )


class Limits(VerifyAndUpdateConfig):
    """Raises: SettingError for what the model cannot be served with, naming what works."""

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        model, num_ranks = vllm_config.model_config, vllm_config.parallel_config.tensor_parallel_size
        config = plain_config(model.hf_config)
        check_tensor_parallel(num_ranks, config)
        layers = [on_a_rank(layer, num_ranks) for layer in parse_layers(config)]
        check_planning(vllm_config, config, layers)
        check_connectors(vllm_config.kv_transfer_config, max(1, dense_kv_heads(config) // num_ranks), layers)
        if not vllm_config.scheduler_config.disable_hybrid_kv_cache_manager:
            warn_of_padded_cache(config, layers)
        for present, what in ((model.quantization, "quantised weights"), (vllm_config.lora_config, "LoRA adapters")):
            if present is not None:
                remedy = f"choose one of them, as {what} cannot be padded, or prune with a suitable --tp"
                check_tensor_parallel(num_ranks, config, parse_layers(config), remedy=remedy)


def on_a_rank(widths: LayerWidths, num_ranks: int) -> LayerWidths:
    """Return a rank's share of a layer's heads; ranks that share a KV head have a copy of it each."""
    fitted = fit(widths, num_ranks)
    num_kv_heads = -(-fitted.num_kv_heads // num_ranks)
    queries = fitted.num_query_heads // num_ranks // max(1, num_kv_heads)
    return LayerWidths(query_heads_per_kv_head=(queries,) * num_kv_heads, intermediate_size=0)


def check_planning(vllm_config: Any, config: Mapping[str, Any], layers: Sequence[LayerWidths]) -> None:
    """Refuse FlashAttention 3 on vLLM's V1 model runner where it would be planned with another layer's query heads.

    That runner plans once for all layers of equal KV cache, whatever their query heads, and only FlashAttention 3 reads
    that from the plan. V2, vLLM's default, plans for both. Sliding windows beside full attention are not planned at
    all. Read in vLLM 0.32 (`_build_attn_group_metadata` in v1/worker/gpu_model_runner.py); no GPU has run it.
    Raises: SettingError, naming the widths and the flag.
    """
    if getattr(vllm_config, "use_v2_model_runner", True) or not current_platform.is_cuda():
        return
    attention, capability = vllm_config.attention_config, current_platform.get_device_capability()
    chosen = attention.backend is None or attention.backend.name == "FLASH_ATTN"
    version = attention.flash_attn_version or (3 if capability.major == 9 else 2)
    kinds = {kind for kind, layer in _kinds(config, layers) if layer.num_kv_heads}
    if not chosen or version != 3 or capability.major > 9 or len(kinds) > 1:
        return
    queries: dict[int, set[int]] = {}
    for layer in layers:
        queries.setdefault(layer.num_kv_heads, set()).add(layer.num_query_heads)
    for num_kv_heads, numbers in queries.items():
        if len(numbers) > 1:
            raise SettingError(
                f"layers of {num_kv_heads} KV heads have {_listed(numbers)} query heads, for which vLLM's V1 model "
                "runner plans FlashAttention 3 wrongly; pass --attention-backend TRITON_ATTN, or leave out what needs "
                "V1: VLLM_USE_V2_MODEL_RUNNER=0, --enable-dbo, suffix, Medusa or parallel drafting"
            )


def check_connectors(transfer: Any, num_kv_heads: int, layers: Iterable[LayerWidths]) -> None:
    """Refuse LMCache, whose buffers have the dense model's KV heads in every layer.

    transfer: vLLM's `kv_transfer_config`, which may combine several connectors. num_kv_heads: the dense model's.
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
            f"{found[0]} takes every layer for one of {num_kv_heads} KV heads, and this model has layers of "
            f"{_listed(numbers)}; serve it without LMCache"
        )


def warn_of_padded_cache(config: Mapping[str, Any], layers: Sequence[LayerWidths]) -> None:
    """Say it where vLLM fills the KV cache of layers up to the widest, and which flag avoids that.

    Beside layers that see a window only, vLLM gives all layers pages of one size. A number of KV heads that divides the
    largest gets more tokens a page, any other gets padding.
    """
    numbers = {layer.num_kv_heads for layer in layers} - {0}
    kinds = {kind for kind, layer in _kinds(config, layers) if layer.num_kv_heads}
    if len(kinds) > 1 and any(max(numbers) % number for number in numbers):
        logger.warning_once(
            "Some layers have a sliding window, some none, and they have %s KV heads: vLLM fills the KV cache of each "
            "up to %d. --disable-hybrid-kv-cache-manager avoids that, but keeps what lies outside of windows. Compare "
            "'Maximum concurrency' in the log with and without it; it is better for short sequences. After prune "
            "--scope layer with a --sparsity that leaves whole KV heads in each (0.25 of 4) nothing is padded.",
            _listed(numbers),
            max(numbers),
        )


def _kinds(config: Mapping[str, Any], layers: Sequence[LayerWidths]) -> Iterable[tuple[str, LayerWidths]]:
    """Pair each layer with its kind of attention; most families have but one and say nothing."""
    return zip(config.get("layer_types") or [""] * len(layers), layers, strict=True)


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))


def check_adapters(manager: Any, widths: ModelWidths, hidden_size: int) -> None:
    """Let vLLM's LoRA manager check every adapter it is given; it would copy a narrower one into a corner unseen."""
    add_adapter = manager.add_adapter

    def add_checked(adapter: Any) -> Any:
        check_adapter(adapter.loras, widths, hidden_size)
        return add_adapter(adapter)

    manager.add_adapter = add_checked


def check_adapter(loras: Mapping[str, Any], widths: ModelWidths, hidden_size: int) -> None:
    """Refuse an adapter that was made for other widths.

    loras: by module, as vLLM reads them from disk: `lora_a` `[rank, in]`, `lora_b` `[out, rank]`.
    Raises: SettingError, naming the tensor, its shape and the one its layer asks for; WidthsError for an unknown layer.
    """
    for name, lora in loras.items():
        expected = widths.expected(f"{name}.weight")
        if expected is None or isinstance(lora.lora_b, list) or not lora.lora_b.any():
            continue  # adds nothing, as the adapters vLLM warms up with: packed, or cut to one rank already
        axis, length = expected
        if length == 0:
            raise SettingError(f"the adapter changes {name}, a block that was pruned away; {RETRAIN}")
        sizes = (hidden_size, length) if axis == 0 else (length, hidden_size)
        for letter, tensor, side, size in (("A", lora.lora_a, 1, sizes[0]), ("B", lora.lora_b, 0, sizes[1])):
            if tensor.shape[side] != size:
                wanted = [size, tensor.shape[1]] if side == 0 else [tensor.shape[0], size]
                raise SettingError(
                    f"the adapter's {name}.lora_{letter} has shape {list(tensor.shape)}, and this layer asks for "
                    f"{wanted}; {RETRAIN}"
                )
