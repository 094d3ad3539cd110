"""Serves pruned dense models in a vLLM without ddp-vllm, by its Transformers backend.

The command is `vllm serve DIR --trust-remote-code --model-impl transformers`. The backend builds
the decoder of `modeling_ddp`, replaces its linear layers, and adds attention with the heads of
`per_layer_config` to every layer. It requires attention in every layer and the same number of query
heads per KV head. So query heads are zero-padded around the kernel; weights stay compact. This file
is part of every checkpoint.
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .files import WidthsError

VLLM = "vllm"  # the backend's attention, in the config and among transformers' attention functions
VLLM_ATTENTION = "attn"  # the backend's attribute in a layer's attention module


def is_in_vllm(config: Any) -> bool:
    """Return whether vLLM's Transformers backend builds the model."""
    return config._attn_implementation == VLLM


class IdleAttention(nn.Module):
    """Replaces removed attention by one head of zeros, because vLLM requires attention in every
    layer; adds nothing.

    vLLM recognizes attention by the source of `forward`.
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
    """Make vLLM's attention accept different numbers of query heads per KV head; safe to call
    again."""
    stock = ALL_ATTENTION_FUNCTIONS[VLLM]
    if not hasattr(stock, "takes_uneven_groups"):
        ALL_ATTENTION_FUNCTIONS.register(VLLM, layerwise(stock))


def layerwise(stock: Any) -> Any:
    """Wrap vLLM's attention function: zero-pad query heads of uneven groups before the kernel, and
    drop them after."""

    @functools.wraps(stock)
    def attend(module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        """query: `[1, query heads, tokens, head_dim]`; returns `[tokens, query heads * head_dim]`
        and None."""
        counts = getattr(module, "query_heads_per_kv_head", (1,))
        most, is_uneven = max(counts), len(set(counts)) > 1
        if is_uneven and query.shape[1] == sum(counts):
            groups = zip(query.split(counts, 1), counts, strict=True)
            query = torch.cat([F.pad(heads, (0, 0, 0, 0, 0, most - count)) for heads, count in groups], 1)
        kernel, required = getattr(module, VLLM_ATTENTION, None), (query.shape[1], key.shape[1])
        built = (kernel.num_heads, kernel.num_kv_heads) if kernel else (0, 0)
        if built != required:
            raise WidthsError(
                f"layer {module.layer_idx} has {required[0]} query and {required[1]} KV heads, vLLM's attention has "
                f"{built[0]} and {built[1]}: without ddp-vllm use vLLM 0.30 or newer and one device, or a number of "
                "devices that divides all heads; with ddp-vllm omit --model-impl transformers"
            )
        output, weights = stock(module, query, key, value, *args, **kwargs)
        if is_uneven:
            heads = output.unflatten(-1, (len(counts), most, -1))
            output = torch.cat([heads[..., index, :count, :].flatten(-2) for index, count in enumerate(counts)], -1)
        return output, weights

    marked: Any = attend
    marked.takes_uneven_groups = True
    return marked
