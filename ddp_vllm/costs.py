"""The cost of each unit: one linear model behind every budget, and the totals in every report.

The cost is in `params`, `flops` (floating-point operations per token, at a given context length) or
`kv-bytes` (KV cache per token, at 16 bits). Prices leave out everything that does not depend on
widths: embeddings, norms, routers, shared experts. The totals of a whole model include these.
"""

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod

from ddp_vllm.dimensions import (
    TABLE,
    attended,
    completed,
    count_chosen_experts,
    count_experts,
    of_layer,
    text_config,
    widths_of,
)
from ddp_vllm.errors import SettingError
from ddp_vllm.remote_code.files import WidthsError
from ddp_vllm.remote_code.tensors import BLOCK_OF, Config, Shapes
from ddp_vllm.remote_code.widths import LayerWidths, Widths

LARGE_TABLE = 0.15  # of the weights that a decode step reads: trimming it is worth a sentence

KV_ELEMENT_BYTES = 2
# one tensor per expert on disk, stacked in memory
_EXPERT = re.compile(r"\.experts\.(\d+\.|gate_up_proj|down_proj)")
# projections around the layers: of OPT-350m; of Gemma 3n and 4
_AROUND = re.compile(r"(.*\.)?(project_in|project_out|per_layer_model_projection)\.weight")


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


def prices(budget: str, config: Config, shapes: Shapes, context: int) -> list[Prices]:
    """Return the prices of every layer of a dense config.

    The table of the widths states how many rows or columns of each projection belong to a unit.

    budget: `params`, `flops` or `kv-bytes`.
    shapes: of the tensors of the model, which show which projections have a bias.
    context: the number of tokens attended to.
    """
    widths = widths_of(config)
    table, size = widths.table, widths.head_dim if "attn" in widths.blocks else 0
    if budget == "kv-bytes":
        return [Prices(kv_head=2.0 * size * KV_ELEMENT_BYTES)] * len(widths.layers)
    shapes = {name: shape for name, shape in shapes.items() if name.startswith(widths.layers_module)}
    numbers = dict.fromkeys(BLOCK_OF, 0.0)  # weights and biases per unit
    for projection in table.projections:
        output, bias = f".{table.output(projection.block).name.format(0)}.weight", f".{projection.name}.bias"
        stored = (shape[0] for name, shape in shapes.items() if name.endswith(output))
        hidden_size = next(stored, text_config(config).get("hidden_size") or 0)
        has_bias = budget == "params" and projection.axis == 0 and any(name.endswith(bias) for name in shapes)
        for unit in projection.units:
            numbers[unit] += projection.unit_size(size) * (hidden_size + has_bias)
    if budget == "params":
        return [Prices(**numbers)] * len(widths.layers)
    # two per weight; a query head is also multiplied with each key and each value
    assert budget == "flops"
    flops = {unit: 2.0 * number for unit, number in numbers.items()}
    flops["expert_channel"] *= experts_chosen(config, widths)
    return [
        Prices(**flops | {"query_head": flops["query_head"] + 4.0 * size * num_keys})
        for num_keys in (attended(config, context) if size else [0] * len(widths.layers))
    ]


def whole_model(
    budget: str,
    config: Config,
    layers: Sequence[LayerWidths],
    shapes: Shapes,
    context: int,
) -> float:
    """Return the total cost of a model with these widths and tensors, including embeddings.

    FLOPs are those of the projections of decoder layers and output head, and of softmax attention.
    Towers of other modalities and heads that predict further tokens are left out.
    """
    if budget == "params":
        return float(sum(map(prod, shapes.values())))
    config = completed(config)
    widths = widths_of(config)
    if budget == "kv-bytes":
        if not widths.is_family:
            raise SettingError("the KV cache of this architecture is not pruned; choose the budget params or flops")
        priced = zip(prices(budget, config, shapes, context), layers, strict=True)
        return sum(price.of(layer) for price, layer in priced)
    weights, _ = numbers_read(config, shapes, layers)
    attention = 0.0
    for index, number in enumerate(attended(config, context, len(layers))):
        own = of_layer(text_config(config), index)
        queries = int(own.get("num_attention_heads") or 0)
        size = 2 * int(own.get("head_dim") or (own.get("hidden_size") or 0) // max(queries, 1))
        if own.get("kv_lora_rank"):  # latent attention has keys and values of several sizes
            size = sum(own.get(key) or 0 for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
        attention += size * number * (layers[index].num_query_heads if widths.is_family else queries)
    return 2.0 * (weights + attention)


def experts_chosen(config: Config, widths: Widths | None) -> float:
    """Return the share of the routed experts of a layer that a token is sent to; 0 without any."""
    text = text_config(config)
    number = (widths and widths.on_disk.num_experts) or count_experts(text)
    return count_chosen_experts(text) / number if number else 0.0


def numbers_read(
    config: Config,
    shapes: Shapes,
    layers: Sequence[LayerWidths] | None = None,
    *,
    batch: int = 1,
) -> tuple[float, float]:
    """Return how many numbers of weight matrices a decode step reads, and how many of these are of the
    table of tokens. An embedding that is not the head too is only looked up, as are those of layers.

    shapes: of a model's tensors, by name. layers: their widths, unless it is dense. batch: tokens of a
        step, which choose as many experts as independent ones are expected to.
    """
    widths, of_layers = None, [name for name in shapes if not TABLE.fullmatch(name)]
    with suppress(WidthsError):  # of a model that cannot be pruned here
        widths = widths_of(config) if layers is None else replace(widths_of(config), layers=tuple(layers))
        places = ((name, widths.split(name)) for name in shapes)
        number = len(widths.layers)
        of_layers = [name for name, place in places if (place[0] < number if place else _AROUND.fullmatch(name))]
    table = [name for name, shape in shapes.items() if TABLE.fullmatch(name) and len(shape) > 1]
    heads = [name for name in table if "lm_head" in name or "embed_out" in name]
    of_table = sum(prod(shapes[name]) for name in heads or table if "per_layer" not in name)
    read, share = float(of_table), experts_read(experts_chosen(config, widths), batch) or 1.0
    num_experts = count_experts(text_config(config))
    for name in of_layers:
        if 1 < len(shapes[name]) < 4:  # older files hold masks of attention, of four axes
            is_stack = len(shapes[name]) == 3 and shapes[name][0] == num_experts  # as of Granite
            read += prod(shapes[name]) * (share if is_stack or _EXPERT.search(name) else 1.0)
    return read, float(of_table)


def experts_read(chosen: float, batch: int) -> float:
    """Return the share of the experts that a batch of tokens reads if each is sent to the share `chosen`."""
    return 1.0 - (1.0 - chosen) ** batch


def table_note(config: Config, shapes: Shapes) -> str:
    """Return a sentence on the table of tokens, if a decode step reads much of it; "" if it does not."""
    read, of_table = numbers_read(config, shapes)
    if of_table < LARGE_TABLE * read or not read:
        return ""
    return f"the table of tokens is {of_table / read:.0%} of the weights that a decode step reads"
