"""One row a model family: where its gates attach, and what is sliced with what.

A gate scales what one unit adds to the residual stream, so it sits on the input of the projection that adds it:
`attention_output` for heads, `mlp_output` for channels. Removing the unit removes the rows of the projections that
make it and the columns of the projection that adds it. In a mixture of experts the units are the channels of each
routed expert, and nothing else is pruned. To add a family: one row here, its configuration and model in
`ddp_vllm/remote_code/`, its row in `plugins/ddp_plugins/dense.py` or `moe.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ddp_vllm.checkpoint import head_dim
from ddp_vllm.errors import ModelError
from ddp_vllm.remote_code.widths import (
    WidthsError,
    check_routing,
    count_experts,
    dense_expert_size,
    dense_kv_heads,
    is_routed,
)

EXPERTS = "mlp.experts"  # transformers' module of routed experts in a decoder layer, whatever the names on disk


SEPARATE_ROWS = {
    "self_attn.q_proj": ("query",),
    "self_attn.k_proj": ("key",),
    "self_attn.v_proj": ("key",),
    "mlp.gate_proj": ("channel",),
    "mlp.up_proj": ("channel",),
}
FUSED_ROWS = {"self_attn.qkv_proj": ("query", "key", "key"), "mlp.gate_up_proj": ("channel", "channel")}  # Phi-3


@dataclass(frozen=True, kw_only=True)
class Family:
    """Names of the modules that a family's gates touch, relative to a decoder layer."""

    pruned_architecture: str
    """Class in `remote_code/modeling_ddp.py` and in vLLM's plugin."""
    pruned_config: str
    """Class in `remote_code/configuration_ddp.py`."""
    layers: str = "model.layers"
    rows: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: SEPARATE_ROWS)
    """Projections -> what lies along their rows, in order: `query` (head_dim rows a query head), `key` (head_dim rows
    a KV head; values too) or `channel` (a row a channel)."""
    attention_output: str = "self_attn.o_proj"
    """Projection with one block of head_dim columns a query head."""
    attention_norms: tuple[str, ...] = ("input_layernorm",)
    """Go when the attention goes."""
    mlp_output: str = "mlp.down_proj"
    """Projection with one column a channel."""
    mlp_norms: tuple[str, ...] = ("post_attention_layernorm",)
    """Go when the MLP goes."""
    expert_rows: tuple[str, ...] = ()
    """On disk, projections of expert `{}` with one row a channel; empty: the family has no routed experts."""
    expert_output: str = ""
    """On disk, the projection of expert `{}` with one column a channel."""

    @property
    def modeling_file(self) -> str:
        """File of `remote_code/` that holds `pruned_architecture`."""
        return "modeling_ddp_moe" if self.expert_rows else "modeling_ddp"


def _dense(name: str, **differences: Any) -> Family:
    return Family(
        pruned_architecture=f"DDP{name}ForCausalLM",
        pruned_config=f"DDP{name}Config",
        **differences,
    )


def _experts(
    name: str, *, module: str = EXPERTS, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> Family:
    return Family(
        pruned_architecture=f"DDP{name}ForCausalLM",
        pruned_config=f"DDP{name}Config",
        expert_rows=(f"{module}.{{}}.{gate}", f"{module}.{{}}.{up}"),
        expert_output=f"{module}.{{}}.{down}",
    )


NORMS_AROUND_BLOCKS = {  # Gemma: one before and one after each block
    "attention_norms": ("input_layernorm", "post_attention_layernorm"),
    "mlp_norms": ("pre_feedforward_layernorm", "post_feedforward_layernorm"),
}
FAMILIES = {  # model_type of the dense config -> row
    "llama": _dense("Llama"),
    "mistral": _dense("Mistral"),
    "qwen2": _dense("Qwen2"),
    "qwen3": _dense("Qwen3"),
    "smollm3": _dense("SmolLM3"),
    "granite": _dense("Granite"),
    "gemma2": _dense("Gemma2", **NORMS_AROUND_BLOCKS),
    "gemma3_text": _dense("Gemma3", **NORMS_AROUND_BLOCKS),
    "phi3": _dense("Phi3", rows=FUSED_ROWS),
    "qwen3_moe": _experts("Qwen3Moe"),
    "qwen2_moe": _experts("Qwen2Moe"),
    "mixtral": _experts("Mixtral", module="block_sparse_moe.experts", gate="w1", up="w3", down="w2"),
    "olmoe": _experts("Olmoe"),
    "deepseek": _experts("Deepseek"),
    "deepseek_v2": _experts("DeepseekV2"),
}
REFUSED = {  # model_type -> the feature that pruning, plain transformers or vLLM would not survive
    "olmo2": "its q/k norm spans all heads, so removing one changes the others",
    "olmo3": "its q/k norm spans all heads, so removing one changes the others",
    "gpt_oss": "its attention has a sink for each head, which the exported model has no place for",
    "gemma3": "it is multimodal; extract its text model (model_type gemma3_text) and prune that",
    "gemma3n": "its layers share KV caches",
    "gemma": "no remote code and no vLLM class of ours serves it; Gemma-2 and Gemma-3 are supported",
    "phi4_multimodal": "it is multimodal",
    "phimoe": "its experts and norms differ from Mixtral's, and nothing of ours serves them",
    "granitemoe": "the experts of Granite are fused on disk",
    "granitemoeshared": "the experts of Granite are fused on disk",
    "granitemoehybrid": "it has state-space layers",
}
FEATURES = {  # key of a config that, if set, asks for what the exported model has no place for -> its name
    "dual_chunk_attention_config": "dual chunk attention",
    "attention_chunk_size": "chunked attention",
    "num_kv_shared_layers": "layers that share a KV cache",
    "use_bidirectional_attention": "bidirectional attention",
    "num_nextn_predict_layers": "layers that predict several tokens",
}
LAYER_TYPES = {"full_attention", "sliding_attention"}


def family_of(config: Mapping[str, Any]) -> Family:
    """Return the row of a dense config. Raises: ModelError, naming the supported families."""
    model_type = str(config.get("model_type"))
    if model_type in REFUSED:
        raise ModelError(f"{model_type} cannot be pruned: {REFUSED[model_type]}")
    if model_type.startswith("ddp_"):
        raise ModelError(f"the model is pruned already ({model_type}); prune the dense model it came from")
    if model_type not in FAMILIES:
        raise ModelError(f"model_type {model_type!r} is not supported; supported: {', '.join(FAMILIES)}")
    if quantised := config.get("quantization_config"):
        method = quantised.get("quant_method", "?") if isinstance(quantised, Mapping) else quantised
        raise ModelError(
            f"the {model_type} checkpoint is quantised ({method}); supported are bfloat16, float16 and float32: "
            "prune the unquantised checkpoint"
        )
    _check_features(model_type, config)
    return FAMILIES[model_type]


def _check_features(model_type: str, config: Mapping[str, Any]) -> None:
    """Refuse a variant of a known family that has more than the family. Raises: ModelError, naming the feature."""
    features = [name for key, name in FEATURES.items() if config.get(key)]
    features += [f"layers of type {name}" for name in set(config.get("layer_types") or ()) - LAYER_TYPES]
    if features:
        raise ModelError(
            f"this {model_type} model has {min(features)}, which is not supported; choose a variant without it"
        )


@dataclass(frozen=True, kw_only=True)
class Dimensions:
    """Sizes of a dense model, as its config states them."""

    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    hidden_size: int
    num_experts: int = 0
    """Routed experts of a layer; 0: a dense model."""
    expert_intermediate_size: int = 0
    routed_layers: tuple[int, ...] = ()
    """Layers with routed experts."""

    @property
    def group_size(self) -> int:
        """Query heads a KV head serves."""
        return self.num_query_heads // self.num_kv_heads


def dimensions_of(config: Mapping[str, Any]) -> Dimensions:
    """Read the sizes that pruning needs. Raises: ModelError if one is missing or they do not fit together."""
    required = ("num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_size")
    optional = ("num_key_value_heads", "head_dim", "moe_intermediate_size")
    for name in (*required, *(name for name in optional if config.get(name) is not None)):
        value = config.get(name)
        if type(value) is not int or value < 1:
            raise ModelError(f"config.json: {name} is {value!r}, not a positive integer; download the model again")
    num_heads = config["num_attention_heads"]
    num_kv_heads = dense_kv_heads(config)
    if num_heads % num_kv_heads:
        raise ModelError(
            f"config.json: num_attention_heads {num_heads} is no multiple of num_key_value_heads {num_kv_heads}; "
            "download the model again"
        )
    num_experts = count_experts(config)
    if num_experts:
        try:
            check_routing(config)
        except WidthsError as error:
            raise ModelError(str(error)) from None
    return Dimensions(
        num_experts=num_experts,
        expert_intermediate_size=dense_expert_size(config) if num_experts else 0,
        routed_layers=tuple(index for index in range(config["num_hidden_layers"]) if is_routed(config, index)),
        num_layers=config["num_hidden_layers"],
        num_query_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim(config),
        intermediate_size=config["intermediate_size"],
        hidden_size=config["hidden_size"],
    )


def choose_head_unit(requested: str, sizes: Dimensions) -> str:
    """Resolve `auto`: KV groups where several query heads share a KV head, query heads otherwise."""
    if requested != "auto":
        return requested
    return "kv-group" if sizes.group_size > 1 else "query-head"
