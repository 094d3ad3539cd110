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

from ddp_vllm.errors import CheckpointError, reading
from ddp_vllm.remote_code.tensors import BLOCK_OF, TABLES, dense_type
from ddp_vllm.remote_code.widths import LayerWidths, count_experts, head_dim

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

    What a unit has of each projection is in the family's table of tensors. `names` are the tensors of the model, which
    tell what has a bias; `context` is the number of tokens attended to.
    """
    size = head_dim(config)
    if budget == "kv-bytes":
        return [Prices(kv_head=2.0 * size * KV_ELEMENT_BYTES)] * config["num_hidden_layers"]
    biased = {name.split(".")[-2] for name in names if name.endswith(".bias")}
    weights, biases = dict.fromkeys(BLOCK_OF, 0.0), dict.fromkeys(BLOCK_OF, 0.0)  # numbers a unit has
    for projection in TABLES[dense_type(config)].projections:
        numbers = projection.unit_size(size)
        has_bias = projection.axis == 0 and projection.name.rpartition(".")[2] in biased
        for unit in projection.units:
            weights[unit] += numbers * config["hidden_size"]
            biases[unit] += numbers * has_bias
    if budget == "params":
        return [Prices(**{unit: weights[unit] + biases[unit] for unit in BLOCK_OF})] * config["num_hidden_layers"]
    assert budget == "flops"  # two a weight; a query head also meets each key and each value
    flops = {unit: 2.0 * number for unit, number in weights.items()}
    flops["expert_channel"] *= _share_of_experts(config)
    meeting = 4.0 * size if weights["query_head"] else 0.0  # of one token attended to
    return [
        Prices(**flops | {"query_head": flops["query_head"] + meeting * seen}) for seen in attended(config, context)
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


def attended(config: Mapping[str, Any], context: int) -> list[int]:
    """Return how many tokens each layer attends to: `context`, or its sliding window if that is shorter."""
    num_layers, kinds = config["num_hidden_layers"], config.get("layer_types")
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    if not window:
        return [context] * num_layers
    if kinds is None:
        from transformers import CONFIG_MAPPING

        model_type = dense_type(config)
        if model_type in CONFIG_MAPPING:  # older config files leave it to the class to say which layers have windows
            with reading("config.json", CheckpointError, "download the model again"):
                kinds = getattr(CONFIG_MAPPING[model_type].from_dict(_stock(config, model_type)), "layer_types", None)
    if not isinstance(kinds, list):
        kinds = ["sliding_attention"] * num_layers
    return [min(window, context) if kind == "sliding_attention" else context for kind in kinds]


def _stock(config: Mapping[str, Any], model_type: str) -> dict[str, Any]:
    ours = ("ddp_layers", "auto_map", "architectures")
    return {key: value for key, value in config.items() if key not in ours} | {"model_type": model_type}


def _share_of_experts(config: Mapping[str, Any]) -> float:
    """Of the routed experts of a layer, the share that a token is sent to."""
    return config["num_experts_per_tok"] / count_experts(config) if count_experts(config) else 0.0
