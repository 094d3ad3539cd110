"""The sizes of any model, from its config alone.

Families of `remote_code/tensors.py` and configs that describe their MLPs and experts state them. Of
a few mixtures of experts `widths_of` derives the description from the stock config.
"""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from ddp_vllm.errors import CheckpointError, ModelError, SettingError, reading
from ddp_vllm.remote_code.files import WidthsError
from ddp_vllm.remote_code.tensors import TABLES, Config, TensorTable, dense_type
from ddp_vllm.remote_code.widths import (
    HEAD,
    LayerWidths,
    Widths,
    block_table,
    check_sizes,
    dense_heads,
    stated_widths,
)
from ddp_vllm.remote_code.widths import text_config as text_config

DEEPSEEK = "deepseek"  # the model type of DeepSeekMoE v1
EXPERT_COUNT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
CHOSEN_EXPERTS_KEYS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
BLOCK_NAMES = {
    "attn": "attention",
    "mlp": "mlp",
    "experts": "experts",
}  # module type -> name in the setting `prune`
# value of `head_unit` if the units are whole routed experts, which leave the router too
WHOLE_EXPERT = "expert"
# mixtures of experts that `widths_of` knows
MIXTURES = ("qwen3_moe", "qwen2_moe", "mixtral", "olmoe", DEEPSEEK, "deepseek_v2")
LAYER_TYPES = {"full_attention", "sliding_attention"}
TABLE = re.compile(
    r"(.*\.)?(embed_tokens(_per_layer)?|embed_in|wte|(word_)?embeddings|lm_head|embed_out)\.(weight|bias)"
)
"""The names of the embedding, of the output head and of the embeddings of layers, in any model."""
CACHED_TYPES = {*LAYER_TYPES, "chunked_attention", "indexed_attention"}  # of Llama 4; of DeepSeek V3.2


def widths_of(config: Config) -> Widths:
    """Return the widths that a config states, dense or pruned; those of the routed experts of
    `MIXTURES` follow from its fields. Raises: WidthsError."""
    if config.get("model_type") not in MIXTURES or stated_widths(config) is not None:
        return Widths.of(config)
    check_sizes(config)
    names = [f"mlp.experts.{{}}.{name}_proj" for name in ("gate", "up", "down")]
    if config["model_type"] == "mixtral":
        names = [f"block_sparse_moe.experts.{{}}.{name}" for name in ("w1", "w3", "w2")]
    plain = LayerWidths(query_heads_per_kv_head=dense_heads(config))
    size = int(config.get("moe_intermediate_size") or config["intermediate_size"])
    dense = replace(plain, expert_intermediate_sizes=(size,) * count_experts(config))
    layers = (dense if is_routed(config, index) else plain for index in range(config["num_hidden_layers"]))
    table = TensorTable(projections=block_table("experts", names[:2], names[2]))
    return Widths(table=table, dense=dense, layers=tuple(layers), is_family=False)


def completed(config: Config) -> Config:
    """Return a config with the fields of its language model that a stock class without a table derives, such as
    `layer_types`; as it is if transformers cannot read it."""
    model_type, text = str(config.get("model_type")), text_config(config)
    # the class of Gemma 4 derives the heads of layers
    states_all = text.keys() >= {"layer_types", "tie_word_embeddings"} and "gemma4" not in model_type
    if states_all or dense_type(config) in (*TABLES, *MIXTURES):
        return config
    from transformers import CONFIG_MAPPING  # takes seconds

    from ddp_vllm.model_files import errors_only

    with suppress(Exception), errors_only():  # a class may raise any error for a field, and change what it is given
        # transformers writes infinite numbers in a form of its own
        plain = json.loads(re.sub(r'\{"__float__": "(\S+)"\}', r"\1", json.dumps(config)))
        usual = CONFIG_MAPPING[model_type].from_dict(plain).get_text_config()
        names = {name: getattr(usual, name, None) for name in ("layer_types", *usual.attribute_map)}  # by other names
        names["layer_types"] = names["layer_types"] or getattr(usual, "layers_block_type", None)  # of RecurrentGemma
        known = {**usual.to_dict(), **{name: value for name, value in names.items() if value is not None}, **text}
        return {**config, "text_config": known} if text is not config else known
    return config


def quantization_of(config: Config) -> Any:
    """Return how a model is quantized, as its config or that of its language model states, as of Kimi K2.5; None if
    it is not."""
    return config.get("quantization_config") or text_config(config).get("quantization_config")


def of_layer(config: Config, index: int) -> Config:
    """Return the fields of a layer, some of which may differ from the whole model's, as in Gemma 4."""
    layers = config.get("per_layer_config") or {}
    return {**config, **next((own for key, own in layers.items() if int(key) == index), {})}  # a key may be "05"


def is_copied_head(config: Config, name: str) -> bool:
    """Return whether a tensor is the output head of a model whose head is its embedding, which some programs store
    twice."""
    table = TABLES.get(dense_type(config))
    return name == HEAD and bool(completed(config).get("tie_word_embeddings", table and table.is_tied))


# kinds of rotary embeddings for which vLLM multiplies the context that the config states
STRETCHING = ("linear", "dynamic", "yarn")
CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len")  # of GPT-2; of MPT


def longest_context(config: Config) -> int | None:
    """Return the longest context in tokens; None if the config does not state it, or stretches it."""
    text = text_config(config)
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    is_stretched = isinstance(rope, Mapping) and rope.get("rope_type", rope.get("type")) in STRETCHING
    longest = next((text[key] for key in CONTEXT_KEYS if key in text), None)
    return longest if isinstance(longest, int) and longest > 0 and not is_stretched else None


def check_length(name: str, length: int, model: str, config: Config) -> None:
    """Refuse sequences that are longer than a model states. name: of the setting. Raises:
    SettingError."""
    if (longest := longest_context(config)) and longest < length:
        raise SettingError(name, f"is {length}, but {model} takes {longest:,}; lower --{name.replace('_', '-')}")


def count_experts(config: Config) -> int:
    """Return the number of routed experts per layer from a config's fields; 0 for a dense model."""
    return _largest(config, EXPERT_COUNT_KEYS, 0)


def count_chosen_experts(config: Config) -> int:
    """Return to how many routed experts a layer sends each token, from a config's fields; 1 if they do not state it."""
    return _largest(config, CHOSEN_EXPERTS_KEYS, 1)


def _largest(config: Config, keys: Sequence[str], default: int) -> int:
    """Return the first of these fields that is stated, of a list, which has one number per modality or layer, the
    largest."""
    number = next((config[key] for key in keys if config.get(key)), default)
    return int(max(number) if isinstance(number, list | tuple) else number)


def is_routed(config: Config, index: int) -> bool:
    """Return whether layer `index` has routed experts; each family uses some of these keys."""
    return (
        count_experts(config) > 0
        and index not in (config.get("mlp_only_layers") or ())
        and (index + 1) % (config.get("decoder_sparse_step") or 1) == 0
        and index >= (config.get("first_k_dense_replace") or 0)
        and index % (config.get("moe_layer_freq") or 1) == 0
    )


@dataclass(frozen=True, kw_only=True)
class Dimensions:
    """Sizes of a dense model, from its config."""

    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    hidden_size: int
    num_experts: int = 0
    """Routed experts per layer; 0: a dense model."""
    expert_intermediate_size: int = 0
    routed_layers: tuple[int, ...] = ()
    """Layers with routed experts."""
    mlp_layers: tuple[int, ...] = ()
    """Layers with an MLP that can be pruned."""
    blocks: tuple[str, ...] = ("attn", "mlp")
    """Module types with gates: `attn`, `mlp`, `experts`."""

    @property
    def queries_per_kv(self) -> int:
        """Query heads per KV head."""
        return self.num_query_heads // self.num_kv_heads

    def layers_of(self, block: str) -> tuple[int, ...]:
        """Return the layers that a module type has gates in, one row of its masks each."""
        every = tuple(range(self.num_layers))
        return {"attn": every, "mlp": self.mlp_layers, "experts": self.routed_layers}[block]


def dimensions_of(config: Config) -> Dimensions:
    """Read the sizes that pruning requires, of a family or from a description of MLPs and experts.
    Raises: ModelError for missing or contradictory sizes."""
    text = text_config(config)
    try:
        widths = widths_of(config)
    except WidthsError as error:
        raise ModelError(str(error)) from None
    dense, layers, hidden_size = widths.dense, widths.dense_layers, int(text.get("hidden_size") or 0)
    return Dimensions(
        num_layers=len(layers),
        num_query_heads=dense.num_query_heads,
        num_kv_heads=dense.num_kv_heads,
        head_dim=int(text.get("head_dim") or hidden_size // dense.num_query_heads),
        intermediate_size=dense.intermediate_size or int(text.get("intermediate_size") or 0),
        hidden_size=hidden_size,
        num_experts=widths.num_experts,
        expert_intermediate_size=max(dense.expert_intermediate_sizes or (0,)),
        routed_layers=tuple(index for index, layer in enumerate(layers) if layer.expert_intermediate_sizes),
        mlp_layers=tuple(index for index, layer in enumerate(layers) if layer.intermediate_size),
        blocks=widths.blocks,
    )


def choose_head_unit(requested: str, sizes: Dimensions) -> str:
    """Resolve `auto`: KV groups where several query heads share a KV head, query heads
    otherwise."""
    if requested != "auto":
        return requested
    return "kv-group" if sizes.queries_per_kv > 1 else "query-head"


def unit_shapes(sizes: Dimensions, head_unit: str) -> dict[str, tuple[int, ...]]:
    """Return the shape of the gates per module type: [L, U], or [L, E, C] of routed experts."""
    heads = sizes.num_kv_heads if head_unit == "kv-group" else sizes.num_query_heads
    units = {
        "attn": (heads,),
        "mlp": (sizes.intermediate_size,),
        "experts": (sizes.num_experts, sizes.expert_intermediate_size),
    }
    return {block: (len(sizes.layers_of(block)), *units[block]) for block in sizes.blocks}


def attended(config: Config, context: int, num_layers: int | None = None) -> list[int]:
    """Return how many tokens each layer attends to: `context`, or its sliding window if that is
    shorter; 0 in layers of another kind than attention. num_layers: by default as the config states."""
    text = text_config(completed(config))
    kinds = text.get("layer_types")
    window = text.get("sliding_window") if text.get("use_sliding_window", True) else None
    if window and kinds is None:
        from transformers import CONFIG_MAPPING

        model_type = dense_type(text)
        # in older config files only the class knows which layers have windows
        if model_type in CONFIG_MAPPING:
            with reading("config.json", CheckpointError, "download the model again"):
                stock = CONFIG_MAPPING[model_type].from_dict({**text, "model_type": model_type})
                kinds = getattr(stock, "layer_types", None)
    if not isinstance(kinds, list):
        kinds = ["sliding_attention"] * (num_layers or text["num_hidden_layers"])
    # of Falcon-H1 and Zamba, which attend and convolve; of Granite 4's files, and of RecurrentGemma in a window
    reach = dict.fromkeys((*CACHED_TYPES, "hybrid", "attention", "hybrid_sliding"), context)
    if window:
        reach |= dict.fromkeys(("sliding_attention", "attention", "hybrid_sliding"), min(window, context))
    return [reach.get(kind, 0) for kind in kinds]
