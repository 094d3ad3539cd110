"""Pruned models in plain transformers: the dense family's own classes with narrower projections.

The stock model is built as it is, then every projection is replaced by one of the kept size; the forward is stock
code, which finds the number of heads from the size of the projections. Under `from_pretrained` all of it happens on
the meta device, so nothing dense is ever allocated. This file travels inside checkpoints.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    GenerationMixin,
    GraniteForCausalLM,
    LlamaForCausalLM,
    MistralForCausalLM,
    Phi3ForCausalLM,
    PreTrainedConfig,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
    SmolLM3ForCausalLM,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .configuration_ddp import (
    DDPGemma2Config,
    DDPGemma3Config,
    DDPGraniteConfig,
    DDPLlamaConfig,
    DDPMistralConfig,
    DDPPhi3Config,
    DDPQwen2Config,
    DDPQwen3Config,
    DDPSmolLM3Config,
)
from .tensors import TensorTable
from .widths import LayerWidths, ModelWidths, WidthsError, folder_tensors


class RemovedAttention(nn.Module):
    """Stands where a layer's attention was: adds nothing, and keeps the KV cache counting tokens."""

    def __init__(self, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx

    def forward(self, hidden_states: torch.Tensor, past_key_values: Any = None, **_: Any) -> tuple[torch.Tensor, None]:
        if past_key_values is not None:  # the cache asks its first layer how many tokens it has seen
            batch, tokens, _hidden = hidden_states.shape
            layers = past_key_values.layers
            cache = layers[self.layer_idx] if self.layer_idx < len(layers) else None
            width = getattr(cache, "q_group_size", 1)  # a quantised cache stores groups of so many numbers
            empty = hidden_states.new_zeros(batch, 1, tokens, width)
            past_key_values.update(empty, empty, self.layer_idx)
        return torch.zeros_like(hidden_states), None


class RemovedMLP(nn.Module):
    """Stands where a layer's MLP was."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(hidden_states)


class Overlay:
    """An object with some of its attributes replaced, the rest as they are at the time they are asked for."""

    def __init__(self, original: Any, **replaced: Any) -> None:
        self.original = original
        vars(self).update(replaced)

    def __getattr__(self, name: str) -> Any:
        if name == "original":  # not set yet, as when a model is copied
            raise AttributeError(name)
        return getattr(self.original, name)


def uneven_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Stock attention where KV heads serve different numbers of query heads: each is repeated for those it serves.

    query: `[batch, query heads, tokens, head_dim]`; key, value: `[batch, KV heads, tokens, head_dim]`. The repetition
    comes after the projections, so that adapters on them stay compact, and after the KV cache.
    """
    config = module.config.original
    eager = sys.modules[type(module).forward.__module__].eager_attention_forward  # FSDP replaces the class
    stock = ALL_ATTENTION_FUNCTIONS.get_interface(config._attn_implementation, eager)
    counts = module.query_heads_per_kv_head
    key, value = (
        torch.cat([head.expand(-1, count, -1, -1) for head, count in zip(heads.split(1, 1), counts, strict=True)], 1)
        for heads in (key, value)
    )
    return stock(Overlay(module, config=config), query, key, value, *args, **kwargs)


ALL_ATTENTION_FUNCTIONS.register("ddp_uneven", uneven_attention)


def _resize(linear: nn.Linear, *, in_features: int | None = None, out_features: int | None = None) -> nn.Linear:
    weight = linear.weight
    return nn.Linear(
        in_features or linear.in_features,
        out_features or linear.out_features,
        bias=linear.bias is not None,
        device=weight.device,
        dtype=weight.dtype,
    )


def narrow_layer(layer: Any, widths: LayerWidths, layer_idx: int, table: TensorTable) -> None:
    """Give one stock decoder layer the widths it has left, in place; a removed block takes its norms with it."""
    if widths.num_kv_heads:
        narrow_attention(layer.self_attn, widths)
    else:
        layer.self_attn = RemovedAttention(layer_idx)
    if widths.intermediate_size:
        narrow_mlp(layer.mlp, widths.intermediate_size)
    else:
        layer.mlp = RemovedMLP()
    for block, left in (("attn", widths.num_kv_heads), ("mlp", widths.intermediate_size)):
        for norm in table.norms[block] if not left else ():
            setattr(layer, norm, nn.Identity())


def narrow_attention(attention: Any, widths: LayerWidths) -> None:
    """Replace the projections of one stock attention module, in place."""
    head_dim, counts = attention.head_dim, widths.query_heads_per_kv_head
    num_query, num_kv = widths.num_query_heads, widths.num_kv_heads
    attention.num_key_value_groups = counts[0]
    attention.o_proj = _resize(attention.o_proj, in_features=num_query * head_dim)
    if hasattr(attention, "qkv_proj"):  # Phi-3 keeps q, k and v in one weight and cuts it by the config
        attention.qkv_proj = _resize(attention.qkv_proj, out_features=(num_query + 2 * num_kv) * head_dim)
        attention.config = Overlay(attention.config, num_attention_heads=num_query)
        attention.num_key_value_heads = num_kv
    else:
        attention.q_proj = _resize(attention.q_proj, out_features=num_query * head_dim)
        attention.k_proj = _resize(attention.k_proj, out_features=num_kv * head_dim)
        attention.v_proj = _resize(attention.v_proj, out_features=num_kv * head_dim)
    if len(set(counts)) > 1:
        attention.num_key_value_groups = 1
        attention.query_heads_per_kv_head = counts
        attention.config = Overlay(attention.config, _attn_implementation="ddp_uneven")


def narrow_mlp(mlp: Any, size: int) -> None:
    """Replace the projections of one stock MLP, in place."""
    if hasattr(mlp, "gate_up_proj"):
        mlp.gate_up_proj = _resize(mlp.gate_up_proj, out_features=2 * size)
    else:
        mlp.gate_proj = _resize(mlp.gate_proj, out_features=size)
        mlp.up_proj = _resize(mlp.up_proj, out_features=size)
    mlp.down_proj = _resize(mlp.down_proj, in_features=size)


class NonUniform:
    """What every pruned family shares: narrow after building, and check a local folder before loading it."""

    config: PreTrainedConfig
    model: Any

    @classmethod
    def narrow(cls, layer: Any, widths: LayerWidths, layer_idx: int, table: TensorTable) -> None:
        """Give one stock decoder layer the widths it has left, in place."""
        narrow_layer(layer, widths, layer_idx, table)

    def __init__(self, config: Any) -> None:
        super().__init__(config)  # type: ignore[call-arg]
        if config.ddp_layers is not None:
            widths = _widths(config)
            for index, layer in enumerate(widths.layers):
                self.narrow(self.model.layers[index], layer, index, widths.table)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, config: Any = None, **kwargs: Any) -> Any:
        """As in transformers; with `config`, as AutoModel calls it, a local folder's shapes are checked first.

        By hub name they are not: there transformers alone compares each shape as it loads. Raises: WidthsError.
        """
        folder = None if pretrained_model_name_or_path is None else Path(pretrained_model_name_or_path)
        is_pruned = getattr(config, "ddp_layers", None) is not None
        if is_pruned and folder and any(folder.glob("model*.safetensors")):
            widths = _widths(config)
            widths.check_complete(widths.checked(folder_tensors(folder)))
        return super().from_pretrained(pretrained_model_name_or_path, *args, config=config, **kwargs)  # type: ignore[misc]

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """As in transformers, whose paged cache knows one number of KV heads. Raises: WidthsError if layers differ."""
        counts = {layer.num_kv_heads for layer in _widths(self.config).layers}
        if len(counts) > 1:
            raise WidthsError("continuous batching wants as many KV heads in every layer; use generate() or vLLM")
        return super().init_continuous_batching(*args, **kwargs)  # type: ignore[misc]

    def _get_static_cache_init_shape(self) -> None:
        """Let transformers find the shape of a static cache when it sees the first keys, not in the config."""


def _widths(config: Any) -> ModelWidths:
    """Return the widths of a config; what is quantised while it is loaded was not when it was saved."""
    return ModelWidths.of(vars(config) | {"model_type": config.model_type, "quantization_config": None})


class DDPLlamaForCausalLM(NonUniform, LlamaForCausalLM):
    config_class = DDPLlamaConfig


class DDPMistralForCausalLM(NonUniform, MistralForCausalLM):
    config_class = DDPMistralConfig


class DDPQwen2ForCausalLM(NonUniform, Qwen2ForCausalLM):
    config_class = DDPQwen2Config


class DDPQwen3ForCausalLM(NonUniform, Qwen3ForCausalLM):
    config_class = DDPQwen3Config


class DDPGemma2ForCausalLM(NonUniform, Gemma2ForCausalLM):
    config_class = DDPGemma2Config
    _supports_sdpa = False  # it leaves out the cap on attention scores, which vLLM applies


class DDPGemma3ForCausalLM(NonUniform, Gemma3ForCausalLM):
    config_class = DDPGemma3Config


class DDPGraniteForCausalLM(NonUniform, GraniteForCausalLM):
    config_class = DDPGraniteConfig


class DDPSmolLM3ForCausalLM(NonUniform, SmolLM3ForCausalLM):
    config_class = DDPSmolLM3Config


class DDPPhi3ForCausalLM(NonUniform, Phi3ForCausalLM, GenerationMixin):  # else transformers makes a class of its own
    config_class = DDPPhi3Config
