"""Lists the model families whose heads can be pruned, and the sizes of these and of any other
model.

A gate scales the contribution of one unit to the residual stream, at the input of the projection
that writes it: `o_proj` for heads, `down_proj` for channels. Removing the unit removes its rows of
the projections that compute it and its columns of the projection that writes it
(`remote_code/tensors.py`). How to add a family:
docs/dev/CONTRIBUTING.md.

Of a model without a row here, the MLPs or routed experts are pruned, which
`ddp_prune/models/structure.py` finds. Its config then describes them (`remote_code/widths.py`).
For a few mixtures of experts `described` derives that description from the stock config alone.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypedDict

from ddp_vllm.errors import ModelError, SettingError
from ddp_vllm.remote_code import DEEPSEEK
from ddp_vllm.remote_code.files import WidthsError, short
from ddp_vllm.remote_code.tensors import FAMILIES as FAMILIES
from ddp_vllm.remote_code.tensors import MODEL_TYPE_PREFIX, TABLES, TensorTable, dense_type
from ddp_vllm.remote_code.widths import (
    METHOD,
    LayerWidths,
    Widths,
    block_table,
    check_sizes,
    dense_kv_heads,
    head_dim,
    stated_widths,
    states_widths,
)
from ddp_vllm.schema import SchemaError, checked

EXPERT_COUNT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
# transformers' module of routed experts in a decoder layer; names on disk differ
EXPERTS = "mlp.experts"
ROUTER = "mlp.gate"  # transformers' module of the router
BLOCK_NAMES = {
    "attn": "attention",
    "mlp": "mlp",
    "experts": "experts",
}  # module type -> name in the setting `prune`
# value of `head_unit` if the units are whole routed experts, which leave the router too
WHOLE_EXPERT = "expert"
# mixtures of experts that `described` knows: model_type -> the name of their stock classes
MIXTURES = {
    "qwen3_moe": "Qwen3Moe",
    "qwen2_moe": "Qwen2Moe",
    "mixtral": "Mixtral",
    "olmoe": "Olmoe",
    DEEPSEEK: "Deepseek",
    "deepseek_v2": "DeepseekV2",
}
KNOWN = {**FAMILIES, **MIXTURES}


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model family that can be pruned."""

    name: str
    """The name that its classes contain, such as Qwen3."""
    tensors: TensorTable
    """Projections by their names in transformers."""
    experts: str = EXPERTS
    """Module of routed experts in a decoder layer, in transformers."""
    removes_blocks: bool = True
    """Whether a block without units is removed with its norms and its output bias; otherwise these
    stay."""

    @property
    def pruned_architecture(self) -> str:
        """Class in `remote_code/modeling_ddp.py`, and in vLLM's plugin."""
        return f"DDP{self.name}ForCausalLM"

    @property
    def pruned_decoder(self) -> str:
        """Class in `remote_code/modeling_ddp.py`, without the output head."""
        return f"DDP{self.name}Model"

    @property
    def pruned_config(self) -> str:
        """Class in `remote_code/configuration_ddp.py`."""
        return f"DDP{self.name}Config"


# key of a config that, if set, enables a feature the exported model lacks -> the feature's name
FEATURES = {
    "dual_chunk_attention_config": "dual chunk attention",
    "attention_chunk_size": "chunked attention",
    "num_kv_shared_layers": "layers that share a KV cache",
    "use_bidirectional_attention": "bidirectional attention",
    "num_nextn_predict_layers": "layers that predict several tokens",
}
LAYER_TYPES = {"full_attention", "sliding_attention"}
# why an architecture cannot be pruned, where its checkpoints would be refused for another reason
REFUSED = {"gpt_oss": "its experts have biases, and their gate and up rows alternate"}


class _Types(TypedDict, total=False):
    """Fields of a dense config that are read before its class is known."""

    layer_types: list[str] | None
    model_type: str


def check_dense(config: Mapping[str, Any]) -> None:
    """Refuse a config that is not of a dense, unquantized model. Raises: ModelError."""
    try:
        checked(config, _Types, "config.json")
    except SchemaError as error:
        raise ModelError(f"{error}; download the model again") from error
    model_type = str(config.get("model_type"))
    if model_type.startswith(MODEL_TYPE_PREFIX) or states_widths(config):
        raise ModelError(f"the model is pruned already ({model_type}); prune its dense model")
    if why := REFUSED.get(model_type):
        raise ModelError(f"{model_type} cannot be pruned: {why}")
    if quantization := config.get("quantization_config"):
        method = quantization.get("quant_method", "?") if isinstance(quantization, Mapping) else quantization
        raise ModelError(
            f"the {model_type} checkpoint is quantized ({method}); supported are bfloat16, float16 and float32: "
            "use the unquantized checkpoint"
        )


def family_of(config: Mapping[str, Any]) -> Family:
    """Return the row of a dense config. Raises: ModelError, naming the families."""
    check_dense(config)
    model_type = str(config.get("model_type"))
    if model_type not in KNOWN:
        raise ModelError(f"model_type {model_type!r} is not supported; supported: {', '.join(KNOWN)}")
    _check_features(model_type, config)
    if model_type in MIXTURES:
        return Family(name=MIXTURES[model_type], tensors=TensorTable(projections=()), removes_blocks=False)
    return Family(name=FAMILIES[model_type], tensors=TABLES[model_type])


def foreign_code(config: Mapping[str, Any]) -> str:
    """Return a sentence on the code that a dense config brings along; "" if it names none, or for
    another family.

    Such code may compute something else than the stock class, by keys that only it reads.
    """
    code = config.get("auto_map")
    classes = [name for name in code.values() if isinstance(name, str)] if isinstance(code, Mapping) else []
    model_type = str(config.get("model_type"))
    if not classes or model_type not in KNOWN:
        return ""
    return (
        f"config.json names code of its own (auto_map: {short(classes[-1])}), which is not run: the stock class of "
        f"{model_type} is used"
    )


def warn_of_foreign_code(model: object, config: Mapping[str, Any]) -> None:
    """Print the sentence of `foreign_code` on a model to stderr, once per process."""
    if code := foreign_code(config):
        warn(f"{model}: {code}")


@cache
def warn(line: str) -> None:
    """Print a line on a model to stderr, once per process, and only in the first process of a
    run."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        logging.getLogger("ddp_vllm").warning("%s", line)


def pruned_config(config: Mapping[str, Any], layers: Sequence[LayerWidths]) -> dict[str, Any]:
    """Return the config of the pruned model: the dense config with widths, and of a family with
    classes of ours with its model type and classes."""
    if config.get("model_type") in MIXTURES:
        stock = {"architectures": [f"{MIXTURES[config['model_type']]}ForCausalLM"]}
        return described_config(stock | dict(config), replace(Widths.of(described(config)), layers=tuple(layers)))
    family = family_of(config)
    head = {
        "architectures": [family.pruned_architecture],
        "model_type": MODEL_TYPE_PREFIX + str(config["model_type"]),
        "auto_map": {
            "AutoConfig": f"configuration_ddp.{family.pruned_config}",
            "AutoModel": f"modeling_ddp.{family.pruned_decoder}",
            "AutoModelForCausalLM": f"modeling_ddp.{family.pruned_architecture}",
        },
    }
    dropped = (*head, "_name_or_path", "per_layer_config", "base_architecture")
    rest = {key: value for key, value in config.items() if key not in dropped}
    rest.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    own = per_layer_config(rest, layers)
    upstream = {"base_architecture": f"{family.name}ForCausalLM", "per_layer_config": own} if own else {}
    return head | rest | {"ddp_layers": [layer.to_json() for layer in layers]} | upstream


def described(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config of one of `MIXTURES` with a description of its dense routed experts; any
    other config as it is. Raises: ModelError."""
    if config.get("model_type") not in MIXTURES or stated_widths(config) is not None:
        return config
    try:
        check_sizes(config, "hidden_size")
    except WidthsError as error:
        raise ModelError(str(error)) from None
    names = [f"mlp.experts.{{}}.{name}_proj" for name in ("gate", "up", "down")]
    if config["model_type"] == "mixtral":
        names = [f"block_sparse_moe.experts.{{}}.{name}" for name in ("w1", "w3", "w2")]
    dense = LayerWidths(expert_intermediate_sizes=(dense_expert_size(config),) * count_experts(config))
    widths = Widths(
        table=TensorTable(projections=block_table("experts", names[:2], names[2])),
        dense=dense,
        layers=tuple(
            dense if is_routed(config, index) else LayerWidths() for index in range(config["num_hidden_layers"])
        ),
        is_family=False,
    )
    return {**config, METHOD: widths.to_json()}


def count_experts(config: Mapping[str, Any]) -> int:
    """Return the number of routed experts per layer from a config's fields; 0 for a dense model."""
    return next((config[key] for key in EXPERT_COUNT_KEYS if config.get(key)), 0)


def dense_expert_size(config: Mapping[str, Any]) -> int:
    """Return the number of channels of a dense routed expert."""
    return int(config.get("moe_intermediate_size") or config["intermediate_size"])


def is_routed(config: Mapping[str, Any], index: int) -> bool:
    """Return whether layer `index` has routed experts; each family uses some of these keys."""
    return (
        count_experts(config) > 0
        and index not in (config.get("mlp_only_layers") or ())
        and (index + 1) % (config.get("decoder_sparse_step") or 1) == 0
        and index >= (config.get("first_k_dense_replace") or 0)
        and index % (config.get("moe_layer_freq") or 1) == 0
    )


def described_config(config: Mapping[str, Any], widths: Widths) -> dict[str, Any]:
    """Return the config of a pruned model of the stock class: the dense config, and the widths of
    its modules."""
    dropped = ("auto_map", "_name_or_path", "quantization_config", METHOD)
    rest = {key: value for key, value in config.items() if key not in dropped}
    is_deepseek = config.get("model_type") == DEEPSEEK
    place = "modeling_deepseek.AnyDeepseekConfig" if is_deepseek else "configuration_ddp_widths.AnyConfig"
    code = {"auto_map": {"AutoConfig": place}}  # for transformers without ddp-vllm
    return rest | code | {METHOD: widths.to_json(), "quantization_config": widths.to_json()}


def per_layer_config(config: Mapping[str, Any], widths: Sequence[LayerWidths]) -> dict[str, Any]:
    """Return the widths as transformers and NVIDIA's AnyModel state them: layer -> fields that
    differ, and `skip`.

    {} if all layers are dense, and for uneven groups, for which the format has no place.
    """
    if any(len({*layer.query_heads_per_kv_head}) > 1 for layer in widths):
        return {}
    found: dict[str, dict[str, Any]] = {}
    for index, layer in enumerate(widths):
        own = {"num_attention_heads": layer.num_query_heads, "num_key_value_heads": layer.num_kv_heads}
        own |= {"intermediate_size": layer.intermediate_size}
        skip = [*["attention"] * (not layer.num_kv_heads), *["mlp"] * (not layer.intermediate_size)]
        found[str(index)] = {key: value for key, value in own.items() if value not in (0, config.get(key))}
        found[str(index)] |= {"skip": skip} if skip else {}
    return {index: own for index, own in found.items() if own}


def fewer_experts(config: Mapping[str, Any], kept: int) -> dict[str, Any]:
    """Return the fields of a config that differ in the same stock model with `kept` routed experts
    per layer. Raises: SettingError."""
    chosen, num_experts = config["num_experts_per_tok"], count_experts(config)
    if not chosen <= kept < num_experts:
        raise SettingError(
            f"{kept} of {num_experts} experts would be kept per layer; keep {chosen} to {num_experts - 1}, because "
            f"the router sends each token to {chosen}"
        )
    if config["model_type"] == DEEPSEEK or (config.get("n_group") or 1) > 1:
        why = "experts in groups" if config["model_type"] != DEEPSEEK else "no stock class in transformers"
        raise SettingError(f"this {config['model_type']} model has {why}, so it keeps all experts; prune channels")
    return {key: kept for key in EXPERT_COUNT_KEYS if config.get(key)}


def register_pruned(config: Mapping[str, Any]) -> None:
    """Register the installed classes for a pruned config with transformers, so that no code of its
    folder runs; of DeepSeekMoE v1 also for a dense config."""
    if config.get("model_type") == DEEPSEEK:
        from ddp_vllm.remote_code.modeling_deepseek import register_deepseek

        register_deepseek()
    if states_widths(config):
        from ddp_vllm.remote_code.configuration_ddp_widths import register_widths

        register_widths()
        return
    from transformers import AutoConfig, AutoModelForCausalLM

    from ddp_vllm.remote_code import configuration_ddp, modeling_ddp

    dense = dense_type(config)
    if dense not in FAMILIES:
        return
    family = Family(name=FAMILIES[dense], tensors=TABLES[dense])
    kind = getattr(configuration_ddp, family.pruned_config)
    AutoConfig.register(kind.model_type, kind, exist_ok=True)
    AutoModelForCausalLM.register(kind, getattr(modeling_ddp, family.pruned_architecture), exist_ok=True)


def _check_features(model_type: str, config: Mapping[str, Any]) -> None:
    """Refuse a variant of a family with an unsupported feature. Raises: ModelError, naming the
    feature."""
    features = [name for key, name in FEATURES.items() if config.get(key)]
    features += [f"layers of type {name}" for name in set(config.get("layer_types") or ()) - LAYER_TYPES]
    if features:
        raise ModelError(
            f"this {model_type} model has {min(features)}, which is not supported; choose a variant without it"
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

    def units_in(self, unit: str) -> int:
        """Return the number of units of a kind (key of `tensors.BLOCK_OF`) per dense layer."""
        counts = {
            "query_head": self.num_query_heads,
            "kv_head": self.num_kv_heads,
            "channel": self.intermediate_size,
        }
        return counts[unit]


def dimensions_of(config: Mapping[str, Any]) -> Dimensions:
    """Read the sizes that pruning requires. Raises: ModelError for missing or contradictory
    sizes."""
    if stated_widths(config := described(config)) is not None:
        return _described_dimensions(config)
    try:
        check_sizes(config, "hidden_size")
    except WidthsError as error:
        raise ModelError(str(error)) from None
    num_heads = config["num_attention_heads"]
    num_kv_heads = dense_kv_heads(config)
    every = tuple(range(config["num_hidden_layers"]))
    return Dimensions(
        mlp_layers=every,
        num_layers=config["num_hidden_layers"],
        num_query_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim(config),
        intermediate_size=config["intermediate_size"],
        hidden_size=config["hidden_size"],
    )


def _described_dimensions(config: Mapping[str, Any]) -> Dimensions:
    """Return the sizes of a model whose config describes its MLPs and experts.
    Raises: ModelError."""
    text = text_config(config)
    try:
        widths = Widths.of(config)
    except WidthsError as error:
        raise ModelError(str(error)) from None
    heads, dense = int(text.get("num_attention_heads") or 1), widths.dense
    layers = list(enumerate(widths.layers))
    return Dimensions(
        num_layers=len(layers),
        num_query_heads=heads,
        num_kv_heads=int(text.get("num_key_value_heads") or heads),
        head_dim=int(text.get("head_dim") or (text.get("hidden_size") or 0) // heads),
        intermediate_size=dense.intermediate_size or int(text.get("intermediate_size") or 0),
        hidden_size=int(text.get("hidden_size") or 0),
        num_experts=widths.num_experts,
        expert_intermediate_size=max(dense.expert_intermediate_sizes or (0,)),
        routed_layers=tuple(index for index, layer in layers if widths.states("experts", layer)),
        mlp_layers=tuple(index for index, layer in layers if widths.states("mlp", layer)),
        blocks=widths.blocks,
    )


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config of the language model: that inside a multimodal model's config, or the
    config itself."""
    text = config.get("text_config")
    return text if isinstance(text, Mapping) else config


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


def dense_layers(config: Mapping[str, Any]) -> list[LayerWidths]:
    """Return the widths of the dense model from its config."""
    if stated_widths(config := described(config)) is not None:
        return list(Widths.of(config).dense_layers)
    heads, kv_heads = config["num_attention_heads"], dense_kv_heads(config)
    queries = (heads // kv_heads,) * kv_heads
    dense = LayerWidths(query_heads_per_kv_head=queries, intermediate_size=config["intermediate_size"])
    return [dense] * config["num_hidden_layers"]
