"""The entry point vLLM calls in each of its processes before it looks at a model.

Importing this file imports neither torch nor vLLM, and `register` names model classes by strings: vLLM imports them
itself when a checkpoint asks for one, after it has set up its devices.
"""

import logging
from typing import Any

logger = logging.getLogger("vllm.ddp_plugins.register")  # vLLM shows what its own loggers say, and those below them


def model_class(config: type) -> str:
    """Return where the vLLM class of a pruned model's configuration lies, as `module:class`."""
    module = "moe" if hasattr(config, "num_experts_per_tok") else "dense"
    return f"ddp_plugins.{module}:{config.__name__.removesuffix('Config')}ForCausalLM"


def register() -> None:
    """Tell transformers and vLLM of pruned models; safe to call again.

    vLLM calls it in every process, whatever it serves, and would not survive an error here: other models would not be
    served either. So what goes wrong is a warning.
    """
    try:
        register_models()
    except Exception as error:  # a version of vLLM or transformers in which a name is gone
        logger.warning(
            "ddp-vllm steps aside, so pruned models are not served here (%s: %s). Other models are. Install the "
            "versions of vLLM and transformers that ddp-vllm asks for.",
            type(error).__name__,
            " ".join(str(error).split()),
        )


def with_dense_heads(convertor: type) -> type:
    """Return a way to read a config that sees the dense model's heads, as our layers count their own.

    Else vLLM would ask the config for those of each layer, as it does where the plugin is missing.
    """
    return type(convertor.__name__, (convertor,), {"get_per_layer_hf_configs": lambda self: None})


def register_models() -> None:
    """Tell transformers the configurations and vLLM the architectures of pruned models."""
    from transformers import AutoConfig
    from vllm import ModelRegistry
    from vllm.config.model import _FLOAT16_NOT_SUPPORTED_MODELS
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP
    from vllm.transformers_utils.model_arch_config_convertor import (
        MODEL_ARCH_CONFIG_CONVERTORS,
        ModelArchConfigConvertorBase,
    )

    from ddp_plugins.limits import Limits
    from ddp_vllm.remote_code.configuration_ddp import CONFIGS, register_deepseek_config
    from ddp_vllm.remote_code.tensors import MODEL_TYPE_PREFIX

    class LatentAttention(ModelArchConfigConvertorBase):
        """vLLM keeps DeepSeek's latent KV cache (MLA) for model types it knows by name; ours is one of them."""

        def is_deepseek_mla(self) -> bool:
            return self.hf_text_config.kv_lora_rank is not None

    MODEL_ARCH_CONFIG_CONVERTORS["ddp_deepseek_v2"] = LatentAttention
    register_deepseek_config()  # vLLM has the dense model's class, but no configuration for it
    for config in CONFIGS:
        dense_type = config.model_type.removeprefix(MODEL_TYPE_PREFIX)
        tables: tuple[dict[str, Any], ...] = (_FLOAT16_NOT_SUPPORTED_MODELS, MODEL_ARCH_CONFIG_CONVERTORS)
        for table in tables:  # what vLLM knows of a dense type holds for its pruned one
            if dense_type in table:
                table.setdefault(config.model_type, table[dense_type])
        convertor = MODEL_ARCH_CONFIG_CONVERTORS.get(config.model_type, ModelArchConfigConvertorBase)
        MODEL_ARCH_CONFIG_CONVERTORS[config.model_type] = with_dense_heads(convertor)
        AutoConfig.register(config.model_type, config, exist_ok=True)
        path = model_class(config)
        architecture = path.partition(":")[2]
        if path.startswith("ddp_plugins.dense:"):
            MODELS_CONFIG_MAP[architecture] = Limits
        ModelRegistry.register_model(architecture, path)  # last: nothing is served without its limits
