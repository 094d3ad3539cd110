"""Pruned layers in a vLLM that never saw ddp-vllm: `vllm serve DIR --trust-remote-code --model-impl transformers`.

That backend builds the decoder of `modeling_ddp`, puts its own linear layers into it, and gives every layer attention
with as many heads as `per_layer_config` says. It wants attention in every layer, and as many query heads for each KV
head. Weights stay as they are: zeros are added around the kernel. This file travels inside checkpoints.
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .files import WidthsError

VLLM = "vllm"  # what this backend names its attention, in the config and among transformers' attention functions
VLLM_ATTENTION = "attn"  # where it puts its attention into a layer's attention module


def is_in_vllm(config: Any) -> bool:
    """Say whether vLLM's Transformers backend builds the model."""
    return config._attn_implementation == VLLM


class IdleAttention(nn.Module):
    """Stands where a layer's attention was, where every layer must have one: a head of zeros, which adds nothing.

    vLLM finds attention in the source of `forward`.
    """

    def __init__(self, config: Any, layer_idx: int, head_dim: int) -> None:
        super().__init__()
        self.config, self.layer_idx, self.head_dim = config, layer_idx, head_dim
        self.scaling = 1.0

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, None)
        head = hidden_states.new_zeros(1, 1, hidden_states.shape[-2], self.head_dim)
        attend(self, head, head, head, None, scaling=self.scaling)
        return torch.zeros_like(hidden_states), None


def register_layerwise_attention() -> None:
    """Let vLLM's attention take layers whose KV heads serve different numbers of query heads; safe to call again."""
    stock = ALL_ATTENTION_FUNCTIONS[VLLM]
    if not hasattr(stock, "takes_uneven_groups"):
        ALL_ATTENTION_FUNCTIONS.register(VLLM, layerwise(stock))


def layerwise(stock: Any) -> Any:
    """Return vLLM's attention function with zeroed query heads filled in where groups are uneven, and dropped again."""

    @functools.wraps(stock)
    def attend(module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        """query: `[1, query heads, tokens, head_dim]`; returns `[tokens, query heads * head_dim]` and None."""
        counts = getattr(module, "query_heads_per_kv_head", (1,))
        most, is_uneven = max(counts), len(set(counts)) > 1
        if is_uneven and query.shape[1] == sum(counts):
            groups = zip(query.split(counts, 1), counts, strict=True)
            query = torch.cat([F.pad(heads, (0, 0, 0, 0, 0, most - count)) for heads, count in groups], 1)
        kernel, wanted = getattr(module, VLLM_ATTENTION, None), (query.shape[1], key.shape[1])
        built = (kernel.num_heads, kernel.num_kv_heads) if kernel else (0, 0)
        if built != wanted:
            raise WidthsError(
                f"layer {module.layer_idx} has {wanted[0]} query and {wanted[1]} KV heads, and vLLM's attention "
                f"{built[0]} and {built[1]}: without ddp-vllm take vLLM 0.30 or newer and one device, or as many as "
                "divide all heads; beside ddp-vllm leave out --model-impl transformers"
            )
        output, weights = stock(module, query, key, value, *args, **kwargs)
        if is_uneven:
            heads = output.unflatten(-1, (len(counts), most, -1))
            output = torch.cat([heads[..., index, :count, :].flatten(-2) for index, count in enumerate(counts)], -1)
        return output, weights

    marked: Any = attend
    marked.takes_uneven_groups = True
    return marked
