"""Loads pruned dense models in transformers: the dense family's own classes with narrower
projections.

The stock model is built first, then every projection is replaced by a narrower one. The forward
pass is stock code, which derives the number of heads from the size of the projections.
`from_pretrained` does all of this on the meta device, so no dense weight is ever allocated. This
file is part of every checkpoint.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_MAPPING,
    GenerationMixin,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .configuration_ddp import CONFIGS
from .files import WEIGHTS, WidthsError, checked_tensors
from .stock_vllm import IdleAttention, is_in_vllm, register_layerwise_attention
from .tensors import FAMILIES, Projection
from .widths import LayerWidths, Widths


class RemovedAttention(nn.Module):
    """Replaces removed attention: adds nothing, but reports the number of tokens to the KV
    cache."""

    def __init__(self, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx

    def forward(
        self, hidden_states: torch.Tensor, cache: Any = None, past_key_values: Any = None, **_: Any
    ) -> tuple[torch.Tensor, None]:
        # the argument's name in older transformers
        cache = past_key_values if cache is None else cache
        if cache is not None:  # the cache takes the number of tokens from its first layer
            batch, tokens, _hidden = hidden_states.shape
            layers = cache.layers
            own = layers[self.layer_idx] if self.layer_idx < len(layers) else None
            # a quantized cache stores groups of this many numbers
            width = getattr(own, "q_group_size", 1)
            empty = hidden_states.new_zeros(batch, 1, tokens, width)
            cache.update(empty, empty, self.layer_idx)
        return torch.zeros_like(hidden_states), None


class RemovedMLP(nn.Module):
    """Replaces a removed MLP and adds nothing."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(hidden_states)


class Overlay:
    """An object with some attributes replaced; all others are read from the original when they are
    used."""

    def __init__(self, original: Any, **replaced: Any) -> None:
        self.original = original
        vars(self).update(replaced)

    def __getattr__(self, name: str) -> Any:
        if name == "original":  # not set yet, while a model is copied
            raise AttributeError(name)
        return getattr(self.original, name)


def uneven_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Run stock attention with each KV head repeated for its own number of query heads.

    query: `[batch, query heads, tokens, head_dim]`; key, value: `[batch, KV heads, tokens,
    head_dim]`. KV heads are repeated after the projections and the KV cache, so both stay compact,
    and so do adapters.
    """
    config = module.config.original
    # FSDP replaces the class
    eager = sys.modules[type(module).forward.__module__].eager_attention_forward
    stock = ALL_ATTENTION_FUNCTIONS.get_interface(config._attn_implementation, eager)
    counts = module.query_heads_per_kv_head
    key, value = (
        torch.cat([head.expand(-1, count, -1, -1) for head, count in zip(heads.split(1, 1), counts, strict=True)], 1)
        for heads in (key, value)
    )
    return stock(Overlay(module, config=config), query, key, value, *args, **kwargs)


ALL_ATTENTION_FUNCTIONS.register("ddp_uneven", uneven_attention)


def narrow_layer(layer: Any, widths: Widths, layer_idx: int) -> None:
    """Replace the projections of one stock decoder layer by narrower ones, and removed blocks with
    their norms."""
    own = widths.layers[layer_idx]
    removed, config = own.removed_blocks, layer.self_attn.config
    if "attn" in removed:
        idle = is_in_vllm(config)
        layer.self_attn = IdleAttention(config, layer_idx, widths.head_dim) if idle else RemovedAttention(layer_idx)
    if "mlp" in removed:
        layer.mlp = RemovedMLP()
    for norm in (norm for block in removed for norm in widths.table.norms[block]):
        setattr(layer, norm, nn.Identity())
    for projection in widths.table.projections:
        if projection.block not in removed:
            narrow_projection(layer, projection, own, widths.head_dim)
    if "attn" not in removed:
        group_heads(layer.self_attn, own)


def narrow_projection(layer: Any, projection: Projection, widths: LayerWidths, head_dim: int) -> None:
    """Replace one projection of a stock decoder layer by a narrower one."""
    old = layer.get_submodule(projection.name)
    length = sum(map(widths.num_units, projection.units)) * projection.unit_size(head_dim)
    inputs, outputs = (old.in_features, length) if projection.axis == 0 else (length, old.out_features)
    parent, _, name = projection.name.rpartition(".")
    has_bias, like = old.bias is not None, old.weight
    new = nn.Linear(inputs, outputs, bias=has_bias, device=like.device, dtype=like.dtype)
    setattr(layer.get_submodule(parent), name, new)


def group_heads(attention: Any, widths: LayerWidths) -> None:
    """Set on one stock attention module which of its query heads share a KV head."""
    counts = widths.query_heads_per_kv_head
    attention.num_key_value_groups = counts[0]
    # Phi-3 stores q, k and v in one weight and splits it by the config
    if hasattr(attention, "qkv_proj"):
        attention.config = Overlay(attention.config, num_attention_heads=widths.num_query_heads)
        attention.num_key_value_heads = widths.num_kv_heads
    attention.query_heads_per_kv_head = counts
    if len(set(counts)) > 1 and not is_in_vllm(attention.config):
        attention.num_key_value_groups = 1
        attention.config = Overlay(attention.config, _attn_implementation="ddp_uneven")


class NonUniform:
    """Mixin for stock classes: narrow the layers after building, and check a local folder before
    loading it.

    A family has two classes: the whole model, and its decoder, which vLLM builds where ddp-vllm is
    not installed.
    """

    config: Any
    layers: Any
    model: Any

    def __init__(self, config: Any) -> None:
        super().__init__(config)  # type: ignore[call-arg]
        if config.ddp_layers is not None:
            widths = config.widths
            if is_in_vllm(config):
                register_layerwise_attention()
                if config.name_or_path:
                    check_folder(Path(config.name_or_path), config)
            for index, layer in enumerate(getattr(self, "model", self).layers):
                narrow_layer(layer, widths, index)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, config: Any = None, **kwargs: Any) -> Any:
        """Load as transformers does; with `config`, which AutoModel passes, check a local folder's
        tensors first.

        For a Hub name only transformers checks each shape, while it loads. Raises: WidthsError,
        also for missing tensors, which transformers would initialize at random.
        """
        returns_info = kwargs.pop("output_loading_info", False)
        folder = None if pretrained_model_name_or_path is None else Path(pretrained_model_name_or_path)
        is_pruned = getattr(config, "ddp_layers", None) is not None
        if is_pruned and folder:
            check_folder(folder, config)
        model, info = super().from_pretrained(  # type: ignore[misc]
            pretrained_model_name_or_path, *args, config=config, output_loading_info=True, **kwargs
        )
        if missing := info["missing_keys"]:
            raise WidthsError(f"{min(missing)} is missing ({len(missing)} tensors in all); download the model again")
        return (model, info) if returns_info else model

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse layers that differ in KV heads: transformers' paged cache supports one number.
        Raises: WidthsError."""
        counts = {layer.num_kv_heads for layer in self.config.widths.layers}
        if len(counts) > 1:
            raise WidthsError("continuous batching requires equal KV heads in all layers; use generate() or vLLM")
        return super().init_continuous_batching(*args, **kwargs)  # type: ignore[misc]

    def _get_static_cache_init_shape(self) -> None:
        """Make transformers take the shape of a static cache from the first keys, not from the
        config."""


def check_folder(folder: Path, config: Any) -> None:
    """Check the tensors of a local folder, if any, against the widths. Raises: WidthsError."""
    if any(folder.glob(WEIGHTS)):
        saved = getattr(config, "quantization_config", None)
        widths = replace(config.widths, is_quantized=saved is not None)
        widths.check(checked_tensors(folder))


# SDPA omits the cap on attention scores, which vLLM applies
_MORE: dict[str, dict[str, Any]] = {"gemma2": {"_supports_sdpa": False}}
for _model_type, _config in zip(FAMILIES, CONFIGS, strict=True):
    _stock = CONFIG_MAPPING[_model_type]
    # transformers creates a class of its own where GenerationMixin is no direct base
    _bases = {"Model": (MODEL_MAPPING[_stock],), "ForCausalLM": (MODEL_FOR_CAUSAL_LM_MAPPING[_stock], GenerationMixin)}
    for _suffix, _kinds in _bases.items():
        _name = f"DDP{FAMILIES[_model_type]}{_suffix}"
        _fields = {"config_class": _config, "__module__": __name__, **_MORE.get(_model_type, {})}
        globals()[_name] = type(_name, (NonUniform, *_kinds), _fields)


def __getattr__(name: str) -> Any:  # for type checkers: the classes are made above
    raise AttributeError(name)
