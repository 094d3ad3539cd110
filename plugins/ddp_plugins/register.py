"""The entry point vLLM calls in each of its processes before it looks at a model.

Importing this file imports neither torch nor vLLM, and `register` names model classes by strings: vLLM imports them
itself when a checkpoint asks for one, after it has set up its devices.
"""


def register() -> None:
    """Tell transformers the configurations and vLLM the architectures of pruned models; safe to call again."""
    from transformers import AutoConfig
    from vllm import ModelRegistry

    from ddp_vllm.remote_code.configuration_ddp import CONFIGS

    for config in CONFIGS:
        AutoConfig.register(config.model_type, config, exist_ok=True)
        architecture = config.__name__.removesuffix("Config") + "ForCausalLM"
        ModelRegistry.register_model(architecture, f"ddp_plugins.dense:{architecture}")
