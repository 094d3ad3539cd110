"""Opens models that other tools pruned as they are: vLLM gets the config of a pruned model for
theirs.

vLLM reads config.json by a parser per format. Ours for Hugging Face's format differs from vLLM's
where config.json states that layers of a supported family differ (`formats.py`), and in
DeepSeekMoE v1, whose configuration transformers lacks. vLLM has a class of its own for
Nemotron-NAS, whose config requires --trust-remote-code: with this flag vLLM's class is used.
"""

from pathlib import Path
from typing import Any

from huggingface_hub.constants import HF_HUB_OFFLINE
from transformers import PreTrainedConfig
from vllm.logger import init_logger
from vllm.transformers_utils.config import _CONFIG_FORMAT_TO_CONFIG_PARSER, HFConfigParser

from ddp_vllm.dimensions import DEEPSEEK
from ddp_vllm.errors import DdpError
from ddp_vllm.families import register_pruned
from ddp_vllm.formats import DROPPED, NEMOTRON_NAS, opened_in_place
from ddp_vllm.remote_code import configuration_ddp

logger = init_logger("vllm.ddp_plugins.in_place")


class ConfigParser(HFConfigParser):
    """vLLM's parser of config.json, for models whose layers differ too."""

    def parse(
        self, model: str | Path, trust_remote_code: bool, revision: str | None = None, **kwargs: Any
    ) -> tuple[dict[str, Any], PreTrainedConfig]:
        try:
            raw, _ = PreTrainedConfig.get_config_dict(model, revision=revision, local_files_only=HF_HUB_OFFLINE)
            if raw.get("model_type") == DEEPSEEK:  # vLLM has its class, but no configuration
                register_pruned(raw)
            trusts_code = trust_remote_code or kwargs.get("trust_remote_code")
            is_vllms = trusts_code and raw.get("model_type") == NEMOTRON_NAS
            if not is_vllms and (pruned := opened_in_place(raw)):
                kind = getattr(configuration_ddp, pruned["auto_map"]["AutoConfig"].rpartition(".")[2])
                logger.info_once("ddp-vllm opens %s: its config.json states the widths of layers", str(model))
                return pruned, kind.from_dict(pruned)
        except (OSError, ValueError, DdpError) as error:  # vLLM says what is wrong, or has a class of its own for it
            if isinstance(error, DdpError) and any(raw.get(key) for key in DROPPED):
                # vLLM does not read these lists and would serve the model with the dropped blocks
                raise
            logger.warning_once("ddp-vllm does not open %s: %s", str(model), " ".join(str(error).split()))
        return super().parse(model, trust_remote_code, revision=revision, **kwargs)


def register_parser() -> None:
    """Let vLLM read config.json by our parser; safe to call again."""
    _CONFIG_FORMAT_TO_CONFIG_PARSER["hf"] = ConfigParser
