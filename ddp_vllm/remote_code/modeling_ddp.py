"""Pruned models in plain transformers: the dense family's own classes with narrower projections.

The stock model is built as it is, then every projection is replaced by one of the kept size; the forward is stock
code, which finds the number of heads from the size of the projections. Under `from_pretrained` all of it happens on
the meta device, so nothing dense is ever allocated. This file travels inside checkpoints.
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import LlamaForCausalLM, PreTrainedConfig

from .configuration_ddp import DDPLlamaConfig
from .widths import LayerWidths, check_shapes, folder_shapes, parse_layers


class RemovedAttention(nn.Module):
    """Stands where a layer's attention was: adds nothing, and keeps the KV cache counting tokens."""

    def __init__(self, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx

    def forward(self, hidden_states: torch.Tensor, past_key_values: Any = None, **_: Any) -> tuple[torch.Tensor, None]:
        if past_key_values is not None:  # the cache asks its first layer how many tokens it has seen
            batch, tokens, _hidden = hidden_states.shape
            empty = hidden_states.new_zeros(batch, 1, tokens, 1)
            past_key_values.update(empty, empty, self.layer_idx)
        return torch.zeros_like(hidden_states), None


class RemovedMLP(nn.Module):
    """Stands where a layer's MLP was."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(hidden_states)


class RepeatedHeads(nn.Linear):
    """A K or V projection that repeats each KV head for the query heads it still serves.

    Only for layers whose KV heads serve different numbers of query heads, which stock attention cannot express;
    the KV cache of plain transformers then holds the repeated heads. Weights stay compact.
    """

    heads: torch.Tensor

    def repeat(self, query_heads_per_kv_head: tuple[int, ...], head_dim: int) -> "RepeatedHeads":
        self.query_heads_per_kv_head, self.head_dim = query_heads_per_kv_head, head_dim
        return self

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        states = super().forward(input).unflatten(-1, (-1, self.head_dim))
        index = [head for head, count in enumerate(self.query_heads_per_kv_head) for _ in range(count)]
        return states[..., index, :].flatten(-2)


def _resize(
    linear: nn.Linear,
    *,
    in_features: int | None = None,
    out_features: int | None = None,
    kind: type[nn.Linear] = nn.Linear,
) -> Any:
    weight = linear.weight
    return kind(
        in_features or linear.in_features,
        out_features or linear.out_features,
        bias=linear.bias is not None,
        device=weight.device,
        dtype=weight.dtype,
    )


def narrow_layer(layer: Any, widths: LayerWidths, layer_idx: int) -> None:
    """Give one stock decoder layer the widths it has left, in place; a removed block takes its norm with it."""
    if not widths.num_kv_heads:
        layer.self_attn, layer.input_layernorm = RemovedAttention(layer_idx), nn.Identity()
    else:
        attention = layer.self_attn
        head_dim, counts = attention.head_dim, widths.query_heads_per_kv_head
        attention.q_proj = _resize(attention.q_proj, out_features=widths.num_query_heads * head_dim)
        attention.o_proj = _resize(attention.o_proj, in_features=widths.num_query_heads * head_dim)
        uneven = len(set(counts)) > 1
        attention.num_key_value_groups = 1 if uneven else counts[0]
        for name in ("k_proj", "v_proj"):
            old, size = getattr(attention, name), widths.num_kv_heads * head_dim
            if uneven:
                new = _resize(old, out_features=size, kind=RepeatedHeads).repeat(counts, head_dim)
            else:
                new = _resize(old, out_features=size)
            setattr(attention, name, new)
    if not widths.intermediate_size:
        layer.mlp, layer.post_attention_layernorm = RemovedMLP(), nn.Identity()
    else:
        mlp, size = layer.mlp, widths.intermediate_size
        mlp.gate_proj = _resize(mlp.gate_proj, out_features=size)
        mlp.up_proj = _resize(mlp.up_proj, out_features=size)
        mlp.down_proj = _resize(mlp.down_proj, in_features=size)


class NonUniform:
    """What every pruned family shares: narrow after building, and check a local folder before loading it."""

    config: PreTrainedConfig
    model: Any

    def __init__(self, config: Any) -> None:
        super().__init__(config)  # type: ignore[call-arg]
        if config.ddp_layers is not None:
            for index, widths in enumerate(parse_layers(vars(config))):
                narrow_layer(self.model.layers[index], widths, index)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, config: Any = None, **kwargs: Any) -> Any:
        """As in transformers; a local folder's shapes are checked first. Raises: WidthsError."""
        if config is not None and config.ddp_layers is not None and Path(pretrained_model_name_or_path).is_dir():
            layers = parse_layers(vars(config))
            for _ in check_shapes(folder_shapes(Path(pretrained_model_name_or_path)), layers, config.head_dim):
                pass
        return super().from_pretrained(pretrained_model_name_or_path, *args, config=config, **kwargs)  # type: ignore[misc]


class DDPLlamaForCausalLM(NonUniform, LlamaForCausalLM):
    """Llama whose layers have their own numbers of heads and MLP channels."""

    config_class = DDPLlamaConfig
