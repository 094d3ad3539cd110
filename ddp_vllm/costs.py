"""The cost of each unit: one linear model behind every budget, and the totals in every report.

The cost is in `params`, `flops` (floating-point operations per token, at a given context length) or
`kv-bytes` (KV cache per token, at 16 bits). Prices leave out everything that does not depend on
widths: embeddings, norms, routers, shared experts. The totals of a whole model include these.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from ddp_vllm.errors import CheckpointError, SettingError, reading
from ddp_vllm.families import described, text_config
from ddp_vllm.remote_code.tensors import BLOCK_OF, LAYERS, TABLES, dense_type
from ddp_vllm.remote_code.widths import LayerWidths, Widths, head_dim, stated_widths

KV_ELEMENT_BYTES = 2
# one tensor per expert on disk, stacked in memory
_EXPERT = re.compile(r"\.experts\.(\d+\.|gate_up_proj|down_proj)")
_EMBEDDING = re.compile(r"(^|\.)embed_(tokens|in)\.weight$")  # of which a tied output head is made


@dataclass(frozen=True, kw_only=True)
class Prices:
    """The cost of one unit of each kind, in one layer."""

    query_head: float = 0.0
    kv_head: float = 0.0
    channel: float = 0.0
    expert_channel: float = 0.0

    def of(self, widths: LayerWidths) -> float:
        """Return the cost of a layer of these widths."""
        return (
            self.query_head * widths.num_query_heads
            + self.kv_head * widths.num_kv_heads
            + self.channel * widths.intermediate_size
            + self.expert_channel * sum(widths.expert_intermediate_sizes or ())
        )


def prices(budget: str, config: Mapping[str, Any], shapes: Mapping[str, Sequence[int]], context: int) -> list[Prices]:
    """Return the prices of every layer of a dense config.

    A table of tensors states how many rows or columns of each projection belong to a unit: the
    family's, or that of the MLPs and experts that the config describes.

    budget: `params`, `flops` or `kv-bytes`.
    shapes: of the tensors of the model, which show which projections have a bias.
    context: the number of tokens attended to.
    """
    widths = Widths.of(config) if stated_widths(config := described(config)) is not None else None
    table, where = (widths.table, widths.layers_module) if widths else (TABLES[dense_type(config)], LAYERS)
    size = 0 if widths else head_dim(config)
    num_layers = len(widths.layers) if widths else config["num_hidden_layers"]
    if budget == "kv-bytes":
        return [Prices(kv_head=2.0 * size * KV_ELEMENT_BYTES)] * num_layers
    shapes = {name: shape for name, shape in shapes.items() if name.startswith(where)}
    numbers = dict.fromkeys(BLOCK_OF, 0.0)  # weights and biases per unit
    for projection in table.projections:
        output, bias = f".{table.output(projection.block).name.format(0)}.weight", f".{projection.name}.bias"
        stored = (shape[0] for name, shape in shapes.items() if name.endswith(output))
        hidden_size = next(stored, text_config(config).get("hidden_size") or 0)
        has_bias = budget == "params" and projection.axis == 0 and any(name.endswith(bias) for name in shapes)
        for unit in projection.units:
            numbers[unit] += projection.unit_size(size) * (hidden_size + has_bias)
    if budget == "params":
        return [Prices(**numbers)] * num_layers
    # two per weight; a query head is also multiplied with each key and each value
    assert budget == "flops"
    flops = {unit: 2.0 * number for unit, number in numbers.items()}
    if widths:
        return [Prices(**flops | {"expert_channel": flops["expert_channel"] * _share_of_experts(config)})] * num_layers
    return [
        Prices(**flops | {"query_head": flops["query_head"] + 4.0 * size * num_keys})
        for num_keys in attended(config, context)
    ]


def whole_model(
    budget: str,
    config: Mapping[str, Any],
    layers: Sequence[LayerWidths],
    shapes: Mapping[str, Sequence[int]],
    context: int,
) -> float:
    """Return the total cost of a model with these widths and tensors, including embeddings."""
    if budget == "params":
        return float(sum(map(prod, shapes.values())))
    if stated_widths(config := described(config)) is not None:
        if budget == "kv-bytes":
            raise SettingError("the KV cache of this architecture is not pruned; choose the budget params or flops")
        return _described_flops(config, shapes, context)
    if budget == "kv-bytes":
        return sum(
            price.of(widths) for price, widths in zip(prices(budget, config, shapes, context), layers, strict=True)
        )
    # then the embedding is also the output head
    is_tied = not any("lm_head." in name for name in shapes)
    weights = sum(
        prod(shape) for name, shape in shapes.items() if len(shape) >= 2 and (is_tied or "embed_tokens" not in name)
    )
    attention = zip(attended(config, context), layers, strict=True)
    return 2.0 * (weights + 2 * head_dim(config) * sum(keys * widths.num_query_heads for keys, widths in attention))


def _described_flops(config: Mapping[str, Any], shapes: Mapping[str, Sequence[int]], context: int) -> float:
    """Return the FLOPs per token of the projections of decoder layers and output head, and of
    softmax attention.

    Towers of other modalities and heads that predict further tokens are left out.
    """
    widths, text = Widths.of(config), text_config(config)
    heads = [name for name in shapes if name.endswith(("lm_head.weight", "embed_out.weight"))]
    heads = heads or [name for name in shapes if _EMBEDDING.search(name)]
    weights = float(sum(prod(shapes[name]) for name in heads))
    for name, shape in shapes.items():
        if len(shape) >= 2 and (place := widths.split(name)) and place[0] < len(widths.layers):
            weights += prod(shape) * (_share_of_experts(config) if _EXPERT.search(name) else 1.0)
    queries = int(text.get("num_attention_heads") or 0)
    size = 2 * int(text.get("head_dim") or (text.get("hidden_size") or 0) // max(queries, 1))
    if text.get("kv_lora_rank"):  # latent attention has keys and values of several sizes
        size = sum(text.get(key) or 0 for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    attending = {"full_attention", "sliding_attention"}
    keys = attended({**text, "num_hidden_layers": len(widths.layers)}, context)
    kinds = text.get("layer_types") or ["full_attention"] * len(keys)
    num_keys = sum(number for number, kind in zip(keys, kinds, strict=True) if kind in attending)
    return 2.0 * (weights + size * queries * num_keys)


def attended(config: Mapping[str, Any], context: int) -> list[int]:
    """Return how many tokens each layer attends to: `context`, or its sliding window if that is
    shorter."""
    num_layers, kinds = config["num_hidden_layers"], config.get("layer_types")
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    if not window:
        return [context] * num_layers
    if kinds is None:
        from transformers import CONFIG_MAPPING

        model_type = dense_type(config)
        # in older config files only the class knows which layers have windows
        if model_type in CONFIG_MAPPING:
            with reading("config.json", CheckpointError, "download the model again"):
                kinds = getattr(CONFIG_MAPPING[model_type].from_dict(_stock(config, model_type)), "layer_types", None)
    if not isinstance(kinds, list):
        kinds = ["sliding_attention"] * num_layers
    return [min(window, context) if kind == "sliding_attention" else context for kind in kinds]


def _stock(config: Mapping[str, Any], model_type: str) -> dict[str, Any]:
    added = {
        *("ddp_layers", "auto_map", "architectures"),
        *("per_layer_config", "base_architecture", "quantization_config"),
    }
    return {key: value for key, value in config.items() if key not in added} | {"model_type": model_type}


def _share_of_experts(config: Mapping[str, Any]) -> float:
    """Return the share of the routed experts of a layer that a token is sent to."""
    number = Widths.of(config).on_disk.num_experts
    return (text_config(config).get("num_experts_per_tok") or 1) / number if number else 0.0
