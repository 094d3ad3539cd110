"""The plugin's entry point, which vLLM calls in each of its processes before it reads a model.

Importing this file imports neither torch nor vLLM. `register` names model classes by strings, so
that vLLM imports a class only for a checkpoint that uses it, after it has set up its devices.
"""

import logging
from typing import Any

logger = logging.getLogger("vllm.ddp_plugins.register")  # vLLM prints only its own loggers' records


def model_class(config: type) -> str:
    """Return the import path, `module:class`, of the vLLM model class for a pruned model's
    configuration."""
    return f"ddp_plugins.dense:{config.__name__.removesuffix('Config')}ForCausalLM"


def register() -> None:
    """Register pruned models with transformers and vLLM; safe to call again.

    vLLM calls this function in every process, whichever model it serves, and an exception here
    would stop vLLM. So a failure is logged as a warning and other models are still served.
    """
    try:
        register_models()
    except Exception as error:  # a version of vLLM or transformers without one of the names
        logger.warning(
            "ddp-vllm could not register its models (%s: %s), so vLLM serves every model except pruned ones. Install "
            "the versions of vLLM and transformers that ddp-vllm requires.",
            type(error).__name__,
            " ".join(str(error).split()),
        )


def with_dense_heads(convertor: type) -> type:
    """Return a subclass of vLLM's config convertor that reports the dense model's heads for all
    layers.

    Our layers set their own head counts. The config also offers counts per layer, for a vLLM
    without the plugin.
    """
    return type(convertor.__name__, (convertor,), {"get_per_layer_hf_configs": lambda self: None})


def register_models() -> None:
    """Register the configurations of pruned models with transformers and their architectures with
    vLLM."""
    from transformers import AutoConfig
    from vllm import ModelRegistry
    from vllm.config.model import _FLOAT16_NOT_SUPPORTED_MODELS
    from vllm.model_executor.layers.quantization import register_quantization_config
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP
    from vllm.transformers_utils.model_arch_config_convertor import (
        MODEL_ARCH_CONFIG_CONVERTORS,
        ModelArchConfigConvertorBase,
    )

    from ddp_plugins.any_model import WidthsConfig
    from ddp_plugins.in_place import register_parser
    from ddp_plugins.limits import Limits
    from ddp_vllm.remote_code.configuration_ddp import CONFIGS
    from ddp_vllm.remote_code.tensors import MODEL_TYPE_PREFIX
    from ddp_vllm.remote_code.widths import METHOD

    for config in CONFIGS:
        dense_type = config.model_type.removeprefix(MODEL_TYPE_PREFIX)
        tables: tuple[dict[str, Any], ...] = (_FLOAT16_NOT_SUPPORTED_MODELS, MODEL_ARCH_CONFIG_CONVERTORS)
        for table in tables:  # vLLM's settings for a dense model type hold for the pruned one
            if dense_type in table:
                table.setdefault(config.model_type, table[dense_type])
        convertor = MODEL_ARCH_CONFIG_CONVERTORS.get(config.model_type, ModelArchConfigConvertorBase)
        MODEL_ARCH_CONFIG_CONVERTORS[config.model_type] = with_dense_heads(convertor)
        AutoConfig.register(config.model_type, config, exist_ok=True)
        path = model_class(config)
        architecture = path.partition(":")[2]
        MODELS_CONFIG_MAP[architecture] = Limits
        # last, so that no model is served without its limits
        ModelRegistry.register_model(architecture, path)
    register_parser()
    register_quantization_config(METHOD)(WidthsConfig)
