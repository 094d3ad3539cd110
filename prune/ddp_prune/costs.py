"""What a unit costs: one linear model behind every budget, and the sizes that every report states.

A budget counts `units` (the paper's), `params`, `flops` (floating-point operations a token, at a stated length of
context) or `kv-bytes` (of KV cache a token, at 16 bits). What does not depend on widths is in no price: embeddings,
norms, routers, shared experts. Whole-model totals include it.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from ddp_vllm.checkpoint import MODEL_TYPE_PREFIX, head_dim
from ddp_vllm.remote_code.widths import LayerWidths, count_experts, dense_expert_size, dense_kv_heads, is_routed

KV_ELEMENT_BYTES = 2
_EXPERT = re.compile(r"\.experts\.(\d+\.|gate_up_proj|down_proj)")  # on disk one tensor an expert, in memory stacked


@dataclass(frozen=True, kw_only=True)
class Prices:
    """What one part of one layer costs."""

    query_head: float = 0.0
    kv_head: float = 0.0
    channel: float = 0.0
    expert_channel: float = 0.0

    def of(self, widths: LayerWidths) -> float:
        """Return what a layer of these widths costs."""
        return (
            self.query_head * widths.num_query_heads
            + self.kv_head * widths.num_kv_heads
            + self.channel * widths.intermediate_size
            + self.expert_channel * sum(widths.expert_intermediate_sizes or ())
        )


def prices(budget: str, config: Mapping[str, Any], names: Iterable[str], context: int) -> list[Prices]:
    """Return the prices of every layer of a dense config.

    A query head has head_dim rows of q and columns of o, a KV head head_dim rows of k and v, a channel a row of gate
    and up and a column of down. `names` are the tensors of the model, which tell what has a bias; `context` is the
    number of tokens attended to.
    """
    hidden, size = config["hidden_size"], head_dim(config)
    biases = {name.split(".")[-2] for name in names if name.endswith(".bias")}
    if budget == "kv-bytes":
        return [Prices(kv_head=2.0 * size * KV_ELEMENT_BYTES)] * config["num_hidden_layers"]
    if budget == "params":
        layer = Prices(
            query_head=size * (2.0 * hidden + ("q_proj" in biases)),
            kv_head=size * (2.0 * hidden + ("k_proj" in biases) + ("v_proj" in biases)),
            channel=3.0 * hidden + ("gate_proj" in biases) + ("up_proj" in biases),
            expert_channel=3.0 * hidden,
        )
        return [layer] * config["num_hidden_layers"]
    assert budget == "flops"  # two a weight; a query head also meets each key and each value
    return [
        Prices(
            query_head=4.0 * size * (hidden + seen),
            kv_head=4.0 * size * hidden,
            channel=6.0 * hidden,
            expert_channel=6.0 * hidden * _share_of_experts(config),
        )
        for seen in attended(config, context)
    ]


def whole_model(
    budget: str,
    config: Mapping[str, Any],
    layers: Sequence[LayerWidths],
    shapes: Mapping[str, Sequence[int]],
    context: int,
) -> float:
    """Return the total of a model with these widths and tensors, embeddings and all."""
    if budget == "params":
        return float(sum(map(prod, shapes.values())))
    latent = config.get("kv_lora_rank")  # DeepSeek's latent attention, never pruned: one small cache for all heads
    if budget == "kv-bytes":
        if latent:
            return float(len(layers) * KV_ELEMENT_BYTES * (latent + config["qk_rope_head_dim"]))
        return sum(price.of(widths) for price, widths in zip(prices(budget, config, (), context), layers, strict=True))
    head = "embed_tokens" if any("lm_head." in name for name in shapes) else "no lookup"  # tied: looked up and the head
    weights = sum(
        prod(shape) * (_share_of_experts(config) if _EXPERT.search(name) else 1.0)
        for name, shape in shapes.items()
        if len(shape) >= 2 and head not in name
    )
    both = 2 * head_dim(config)  # of a key and a value
    if latent:
        both = config["qk_nope_head_dim"] + config["qk_rope_head_dim"] + config["v_head_dim"]
    seen = zip(attended(config, context), layers, strict=True)
    return 2.0 * (weights + both * sum(tokens * widths.num_query_heads for tokens, widths in seen))


def dense_layers(config: Mapping[str, Any]) -> list[LayerWidths]:
    """Return the widths of the dense model that a config states."""
    heads, experts = config["num_attention_heads"], count_experts(config)
    kv_heads, width = dense_kv_heads(config), dense_expert_size(config)
    return [
        LayerWidths(
            query_heads_per_kv_head=(heads // kv_heads,) * kv_heads,
            intermediate_size=0 if is_routed(config, index) else config["intermediate_size"],
            expert_intermediate_sizes=(width,) * experts if is_routed(config, index) else None,
        )
        for index in range(config["num_hidden_layers"])
    ]


def attended(config: Mapping[str, Any], context: int) -> list[int]:
    """Return how many tokens each layer attends to: `context`, or its sliding window if that is shorter."""
    num_layers, kinds = config["num_hidden_layers"], config.get("layer_types")
    if kinds is None:
        from transformers import CONFIG_MAPPING

        model_type = str(config["model_type"]).removeprefix(MODEL_TYPE_PREFIX)
        if model_type in CONFIG_MAPPING:  # older config files leave it to the class to say which layers have windows
            kinds = getattr(CONFIG_MAPPING[model_type].from_dict(_stock(config, model_type)), "layer_types", None)
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    if not isinstance(kinds, list):
        kinds = ["sliding_attention"] * num_layers
    return [min(window, context) if window and kind == "sliding_attention" else context for kind in kinds]


def _stock(config: Mapping[str, Any], model_type: str) -> dict[str, Any]:
    ours = ("ddp_layers", "auto_map", "architectures")
    return {key: value for key, value in config.items() if key not in ours} | {"model_type": model_type}


def _share_of_experts(config: Mapping[str, Any]) -> float:
    """Of the routed experts of a layer, the share that a token is sent to."""
    return config["num_experts_per_tok"] / count_experts(config) if count_experts(config) else 0.0
