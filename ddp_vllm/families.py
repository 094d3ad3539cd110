"""Lists the model families whose heads can be pruned, and writes the config of a pruned model.

A gate scales the contribution of one unit to the residual stream, at the input of the projection
that writes it: `o_proj` for heads, `down_proj` for channels. Removing the unit removes its rows of
the projections that compute it and its columns of the projection that writes it
(`remote_code/tensors.py`). How to add a family:
docs/dev/CONTRIBUTING.md.

Of a model without a row here, the MLPs or routed experts are pruned, which
`ddp_prune/models/structure.py` finds. Its config then describes them (`remote_code/widths.py`).
"""

import logging
import os
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from ddp_vllm.dimensions import (
    DEEPSEEK,
    EXPERT_COUNT_KEYS,
    LAYER_TYPES,
    MIXTURES,
    count_experts,
    dimensions_of,
    quantization_of,
)
from ddp_vllm.errors import ModelError, SettingError, reading
from ddp_vllm.remote_code.files import short
from ddp_vllm.remote_code.tensors import FAMILIES as FAMILIES
from ddp_vllm.remote_code.tensors import MODEL_TYPE_PREFIX, Config, dense_type
from ddp_vllm.remote_code.widths import METHOD, Widths, states_widths

KNOWN = (*FAMILIES, *MIXTURES)


# the code of a pruned model in `remote_code/`: of a family, and of a stock class
FAMILY_CODE = ("tensors", "files", "widths", "configuration_ddp", "stock_vllm", "modeling_ddp")
STOCK_CODE = ("tensors", "files", "widths", "ragged_experts", "configuration_ddp_widths")
# key of a config that, if set, enables a feature the exported model lacks -> the feature's name
FEATURES = {
    "dual_chunk_attention_config": "dual chunk attention",
    "attention_chunk_size": "chunked attention",
    "num_kv_shared_layers": "layers that share a KV cache",
    "use_bidirectional_attention": "bidirectional attention",
    "num_nextn_predict_layers": "layers that predict several tokens",
}
# why an architecture cannot be pruned, where its checkpoints would be refused for another reason
REFUSED = {"gpt_oss": "its experts have biases, and their gate and up rows alternate"}


def check_dense(config: Config, *, to_prune: bool = True) -> None:
    """Refuse a config that is not of a dense, unquantized model, `to_prune` also one that cannot be pruned. Raises:
    ModelError."""
    model_type = str(config.get("model_type"))
    if model_type.startswith(MODEL_TYPE_PREFIX) or states_widths(config):
        raise ModelError(f"the model is pruned already ({model_type}); prune its dense model")
    if to_prune and (why := REFUSED.get(model_type)):
        raise ModelError(f"{model_type} cannot be pruned: {why}")
    if quantization := quantization_of(config):
        method = quantization.get("quant_method", "?") if isinstance(quantization, Mapping) else quantization
        raise ModelError(
            f"the {model_type} checkpoint is quantized ({method}); supported are bfloat16, float16 and float32: "
            "use the unquantized checkpoint"
        )


def check_supported(config: Config) -> None:
    """Refuse a config that is not of a dense model of a family or mixture in this file, or lacks its
    sizes. Raises: ModelError."""
    check_dense(config)
    model_type = str(config.get("model_type"))
    if model_type not in KNOWN:
        raise ModelError(f"model_type {model_type!r} is not supported; supported: {', '.join(KNOWN)}")
    with reading("config.json", ModelError, "download the model again"):
        features = [name for key, name in FEATURES.items() if config.get(key)]
        features += [f"layers of type {name}" for name in set(config.get("layer_types") or ()) - LAYER_TYPES]
    if features:
        raise ModelError(
            f"this {model_type} model has {min(features)}, which is not supported; choose a variant without it"
        )
    dimensions_of(config)


def foreign_code(config: Config) -> str:
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


def warn_of_foreign_code(model: object, config: Config) -> None:
    """Print the sentence of `foreign_code` on a model to stderr, once per process."""
    if code := foreign_code(config):
        warn(f"{model}: {code}")


@cache
def warn(line: str) -> None:
    """Print a line on a model to stderr, once per process, and only in the first process of a
    run."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        logging.getLogger("ddp_vllm").warning("%s", line)


def pruned_config(config: Config, widths: Widths) -> dict[str, Any]:
    """Return the config of the pruned model: the dense config with widths, and the code that builds
    them.

    Of a family it has a model type and classes of ours, of any other architecture the stock ones.
    """
    if not widths.is_family:
        dropped = ("auto_map", "_name_or_path", "quantization_config", METHOD)
        stated = {key: value for key, value in config.items() if key not in dropped}
        is_deepseek = config["model_type"] == DEEPSEEK
        # for transformers without ddp-vllm
        place = "modeling_deepseek.AnyDeepseekConfig" if is_deepseek else "configuration_ddp_widths.AnyConfig"
        copies = dict.fromkeys((METHOD, "quantization_config"), widths.to_json())
        return stated | {"auto_map": {"AutoConfig": place}} | copies
    name = FAMILIES[config["model_type"]]
    head = {
        "architectures": [f"DDP{name}ForCausalLM"],
        "model_type": MODEL_TYPE_PREFIX + config["model_type"],
        "auto_map": {
            "AutoConfig": f"configuration_ddp.DDP{name}Config",
            "AutoModel": f"modeling_ddp.DDP{name}Model",
            "AutoModelForCausalLM": f"modeling_ddp.DDP{name}ForCausalLM",
        },
    }
    rest = {key: value for key, value in config.items() if key not in (*head, "_name_or_path")}
    rest.setdefault("head_dim", widths.head_dim)
    return head | rest | {"ddp_layers": widths.to_json()}


def config_of_copy(config: Config, widths: Widths) -> dict[str, Any]:
    """Return the config of a checkpoint for a new copy of it; the only code that it names is ours."""
    if not widths.is_family:
        return dict(config)
    return pruned_config({**config, "model_type": dense_type(config)}, widths)


def code_of(config: Config) -> list[Path]:
    """Return the files of `remote_code/` that a checkpoint with this config contains."""
    names: tuple[str, ...] = FAMILY_CODE if "ddp_layers" in config else STOCK_CODE if states_widths(config) else ()
    if names == STOCK_CODE and config.get("model_type") == DEEPSEEK:
        names += ("modeling_deepseek",)
    return [Path(__file__).with_name("remote_code") / f"{name}.py" for name in names]


def fewer_experts(config: Config, kept: int) -> dict[str, Any]:
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


def check_present(folder: Path, config: Config, widths: Widths, stored: Iterable[str]) -> None:
    """Refuse a checkpoint of a stock class that lacks a tensor, as transformers does when it loads
    it; no weight is read.

    stored: the names on disk. Raises: WidthsError.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    from ddp_vllm.remote_code import configuration_ddp_widths as code

    register_pruned(config)
    stock = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    kinds = [kind for kind in (AutoModelForCausalLM, AutoModelForImageTextToText) if type(stock) in kind._model_mapping]
    with torch.device("meta"):
        code.check_present(kinds[0].from_config(stock, trust_remote_code=False), widths, stored)


def register_pruned(config: Config) -> None:
    """Register the installed classes for a pruned config with transformers, so that no code of its
    folder runs; of DeepSeekMoE v1 also for a dense config."""
    if config.get("model_type") == DEEPSEEK:
        from ddp_vllm.remote_code.modeling_deepseek import register_deepseek

        register_deepseek()
    if states_widths(config):
        from ddp_vllm.remote_code.configuration_ddp_widths import register_widths

        register_widths()
    elif (dense := dense_type(config)) in FAMILIES:
        from transformers import AutoConfig, AutoModelForCausalLM

        from ddp_vllm.remote_code import configuration_ddp, modeling_ddp

        kind = getattr(configuration_ddp, f"DDP{FAMILIES[dense]}Config")
        AutoConfig.register(kind.model_type, kind, exist_ok=True)
        AutoModelForCausalLM.register(kind, getattr(modeling_ddp, f"DDP{FAMILIES[dense]}ForCausalLM"), exist_ok=True)
