"""Builds dense models for vLLM whose decoder layers have different widths, from vLLM's own layers.

One mechanism serves every family. The stock model is built without decoder layers. Then the
family's own layer class builds each layer from a copy of the config with that layer's widths. A
removed block is replaced by one that adds nothing. A family is one row at the end of this file.
"""

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import QKVParallelLinear, RowParallelLinear
from vllm.model_executor.models.gemma2 import Gemma2DecoderLayer, Gemma2ForCausalLM
from vllm.model_executor.models.gemma3 import Gemma3DecoderLayer, Gemma3ForCausalLM
from vllm.model_executor.models.granite import GraniteDecoderLayer, GraniteForCausalLM
from vllm.model_executor.models.llama import LlamaDecoderLayer, LlamaForCausalLM
from vllm.model_executor.models.mistral import MistralDecoderLayer, MistralForCausalLM
from vllm.model_executor.models.phi3 import Phi3ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3DecoderLayer, Qwen3ForCausalLM
from vllm.model_executor.models.utils import extract_layer_index, make_layers, maybe_prefix
from vllm.model_executor.utils import set_weight_attrs
from vllm.platforms import current_platform

from ddp_plugins.limits import check_adapters, plain_config
from ddp_plugins.loading import CheckedLoading
from ddp_plugins.padding import channel_block
from ddp_vllm.errors import SettingError
from ddp_vllm.remote_code.tensors import TensorTable
from ddp_vllm.remote_code.widths import LayerWidths, Widths
from ddp_vllm.tensor_parallel import padded_widths

# vLLM's name for quantization of 16-bit weights while they load, such as fp8_per_tensor
ONLINE = "online"
logger = init_logger("vllm.ddp_plugins.dense")  # vLLM prints only its own loggers' records


class RemovedBlock(nn.Module):
    """Replaces a removed attention block or MLP and adds nothing."""

    def forward(self, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(kwargs["hidden_states"] if "hidden_states" in kwargs else args[-1])


class RemovedNorm(nn.Module):
    """Replaces the norm of a removed block and returns the residual stream as vLLM's fused norms
    do."""

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        return x if residual is None else (x, x + residual)


class UnevenHeads(Attention):
    """Attention whose KV heads serve different numbers of query heads.

    The kernel requires the same number for every KV head. So the last query head of a KV head with
    fewer is repeated before the kernel, and the repeated outputs are dropped after it. The
    projections stay compact.
    """

    padded: torch.Tensor
    kept: torch.Tensor

    @classmethod
    def take_over(cls, attention: Attention, query_heads_per_kv_head: tuple[int, ...]) -> None:
        """Turn an attention that was built for padded heads into one of this class.

        It stays where it is, because vLLM finds the scales of its KV cache by name.
        """
        queries_per_kv = max(query_heads_per_kv_head)
        padded, kept, start = [], [], 0
        for kv_head, count in enumerate(query_heads_per_kv_head):
            padded += [start + min(head, count - 1) for head in range(queries_per_kv)]
            kept += [kv_head * queries_per_kv + head for head in range(count)]
            start += count
        for name, heads in (("padded", torch.tensor(padded)), ("kept", torch.tensor(kept))):
            # nothing to load when vLLM reloads a layer
            set_weight_attrs(heads, {"weight_loader_numel": 0})
            attention.register_buffer(name, heads, persistent=False)
        attention.__class__ = cls

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """query and result: `[tokens, query heads * head_dim]`; key, value: `[tokens, KV heads *
        head_dim]`."""
        heads = query.unflatten(-1, (-1, self.head_size)).index_select(1, self.padded)
        output = super().forward(heads.flatten(1), key, value)
        return output.unflatten(-1, (-1, self.head_size)).index_select(1, self.kept).flatten(1)


def build_layer(layer_type: type[nn.Module], vllm_config: VllmConfig, widths: Widths, block: int, prefix: str) -> Any:
    """Build one decoder layer of the stock `layer_type` with its own widths. block: as in
    `tensor_parallel.padded_widths`."""
    config, num_ranks = vllm_config.model_config.hf_config, get_tensor_model_parallel_world_size()
    kept = widths.layers[extract_layer_index(prefix)]
    fitted = padded_widths(kept, num_ranks, block)
    own = copy.copy(config)
    own.head_dim = widths.head_dim  # stock layers would derive it from the number of heads
    # a removed block is built and then dropped: tiny, but at its dense width where quantized
    # kernels require multiples
    if fitted.num_kv_heads or vllm_config.quant_config is None:
        own.num_key_value_heads = fitted.num_kv_heads or num_ranks
        own.num_attention_heads = fitted.num_query_heads or num_ranks
    if fitted.intermediate_size or vllm_config.quant_config is None:
        own.intermediate_size = fitted.intermediate_size or num_ranks
    if issubclass(layer_type, LlamaDecoderLayer):
        layer = layer_type(vllm_config=vllm_config, prefix=prefix, config=own)
    else:
        layer = layer_type(own, vllm_config.cache_config, vllm_config.quant_config, prefix=prefix)
    if num_ranks == 1 and kept.num_query_heads != fitted.num_query_heads:
        keep_projections_compact(layer.self_attn, kept, vllm_config, f"{prefix}.self_attn")
    remove_blocks(layer, kept, widths.table, vllm_config)
    return layer


def keep_projections_compact(attention: Any, widths: LayerWidths, vllm_config: VllmConfig, prefix: str) -> None:
    """Rebuild an attention block's projections without padded query heads; only its kernel call
    keeps them."""
    num_heads, size = widths.num_query_heads, attention.head_dim
    hidden_size, quant_config = attention.qkv_proj.input_size, vllm_config.quant_config
    attention.num_heads = attention.total_num_heads = num_heads
    attention.q_size = num_heads * size
    attention.qkv_proj = QKVParallelLinear(
        hidden_size,
        size,
        num_heads,
        widths.num_kv_heads,
        bias=attention.qkv_proj.bias is not None,
        quant_config=quant_config,
        prefix=f"{prefix}.qkv_proj",
    )
    attention.o_proj = RowParallelLinear(
        num_heads * size,
        hidden_size,
        bias=attention.o_proj.bias is not None,
        quant_config=quant_config,
        prefix=f"{prefix}.o_proj",
    )
    UnevenHeads.take_over(attention.attn, widths.query_heads_per_kv_head)


def remove_blocks(layer: Any, widths: LayerWidths, table: TensorTable, vllm_config: VllmConfig) -> None:
    """Replace a layer's removed blocks and their norms, and allocate no KV cache for them."""
    for block in widths.removed_blocks:
        name = table.output(block).name.partition(".")[0]
        for module in getattr(layer, name).modules():
            if isinstance(module, Attention):
                del vllm_config.compilation_config.static_forward_context[module.layer_name]
        setattr(layer, name, RemovedBlock())
        for norm in table.norms[block]:
            setattr(layer, norm, RemovedNorm())


def log_padding(widths: Widths, block: int) -> None:
    """Log once how many channels padding adds to the MLPs, if any."""
    num_ranks = get_tensor_model_parallel_world_size()
    kept = sum(layer.intermediate_size for layer in widths.layers)
    built = sum(padded_widths(layer, num_ranks, block).intermediate_size for layer in widths.layers)
    if block > 1 and built > kept:
        logger.info_once(
            "MLP widths are zero-padded to multiples of %d: %.1f %% more channels. "
            '"ddp_pad_channels_to": 1 in config.json or --hf-overrides disables the padding.',
            num_ranks * block,
            100 * (built / kept - 1),
        )


@contextmanager
def no_layers(config: Any) -> Iterator[None]:
    """Build a stock model without decoder layers, so that none is ever allocated at its dense
    width."""
    num_layers, partition = config.num_hidden_layers, os.environ.pop("VLLM_PP_LAYER_PARTITION", None)
    config.num_hidden_layers = 0
    try:
        yield
    finally:
        config.num_hidden_layers = num_layers
        if partition is not None:
            os.environ["VLLM_PP_LAYER_PARTITION"] = partition


class NonUniform(CheckedLoading):
    """Mixin for vLLM's model class: decoder layers of different widths, padding, and checks of
    weights."""

    decoder_layer: type[nn.Module]
    model: Any

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        config = vllm_config.model_config.hf_config
        fields = plain_config(config)
        widths = Widths.of(fields)
        with no_layers(config):
            super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        self.is_quantized = vllm_config.quant_config is not None
        can_grow = not self.is_quantized or vllm_config.quant_config.get_name() == ONLINE
        self.block = channel_block(
            fields,
            get_tensor_model_parallel_world_size(),
            can_pad=can_grow and vllm_config.lora_config is None,
            on_cpu=current_platform.is_cpu(),
        )
        # shapes depend on it, and vLLM keys compiled graphs by the config
        config.ddp_pad_channels_to = self.block
        log_padding(widths, self.block)
        if vllm_config.lora_config is not None:
            check_adapters()

        def build(prefix: str) -> Any:
            try:
                return build_layer(self.decoder_layer, vllm_config, widths, self.block, prefix)
            except ValueError as error:
                if not self.is_quantized:
                    raise
                kept = widths.layers[extract_layer_index(prefix)]
                raise SettingError(
                    f"no kernel on this machine runs {vllm_config.quant_config.get_name()} weights of {prefix} "
                    f"({kept.num_query_heads} query heads, {kept.num_kv_heads} KV heads, intermediate_size "
                    f"{kept.intermediate_size}): {' '.join(str(error).split())}; prune again with --align, then "
                    "quantize that model"
                ) from error

        self.model.start_layer, self.model.end_layer, self.model.layers = make_layers(
            config.num_hidden_layers, build, prefix=maybe_prefix(prefix, "model.layers")
        )
        self.expect_weights(vllm_config, widths)


class Qwen2DecoderLayer(LlamaDecoderLayer):
    """Llama's layer with q, k, v biases. vLLM's own Qwen2 layer derives `head_dim` from the number
    of heads."""

    def __init__(self, vllm_config: VllmConfig, prefix: str, config: Any) -> None:
        config.qkv_bias = True
        super().__init__(vllm_config, prefix, config)


class NoRotation(nn.Module):
    """Replaces the rotary embedding in layers without positions."""

    def forward(self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> Any:
        return query, key


class SmolLM3DecoderLayer(LlamaDecoderLayer):
    """Llama's layer, without rotary embedding in every few layers. vLLM has no SmolLM3 model of its
    own."""

    def __init__(self, vllm_config: VllmConfig, prefix: str, config: Any) -> None:
        super().__init__(vllm_config, prefix, config)
        if not config.no_rope_layers[extract_layer_index(prefix)]:
            self.self_attn.rotary_emb = NoRotation()


class SeedOssDecoderLayer(LlamaDecoderLayer):
    """Llama's layer, whose output projection has its own flag for a bias. vLLM has no Seed-OSS model
    of its own."""

    def __init__(self, vllm_config: VllmConfig, prefix: str, config: Any) -> None:
        config.qkv_bias, config.attention_bias = config.attention_bias, config.attention_out_bias
        super().__init__(vllm_config, prefix, config)


STOCK: dict[str, tuple[type[nn.Module], type[nn.Module]]] = {  # family -> vLLM's model and decoder layer
    "Llama": (LlamaForCausalLM, LlamaDecoderLayer),
    "Mistral": (MistralForCausalLM, MistralDecoderLayer),
    "Qwen2": (LlamaForCausalLM, Qwen2DecoderLayer),
    "Qwen3": (Qwen3ForCausalLM, Qwen3DecoderLayer),
    "SmolLM3": (LlamaForCausalLM, SmolLM3DecoderLayer),
    "Granite": (GraniteForCausalLM, GraniteDecoderLayer),
    "Gemma2": (Gemma2ForCausalLM, Gemma2DecoderLayer),
    "Gemma3": (Gemma3ForCausalLM, Gemma3DecoderLayer),
    "Phi3": (Phi3ForCausalLM, LlamaDecoderLayer),
    "SeedOss": (LlamaForCausalLM, SeedOssDecoderLayer),
}
for _family, (_model, _layer) in STOCK.items():
    _name = f"DDP{_family}ForCausalLM"
    globals()[_name] = type(_name, (NonUniform, _model), {"decoder_layer": _layer, "__module__": __name__})


def __getattr__(name: str) -> Any:  # for type checkers: the classes are made above
    raise AttributeError(name)
