"""DeepSeekMoE (v1, arXiv:2401.06066), which transformers lacks: its configuration and dense class.

This file is part of every pruned checkpoint of that model, and is used for the dense one too.
Legend of shape suffixes: T tokens, H hidden size, K experts per token.
"""

from typing import Any, ClassVar

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES
from transformers.models.llama.modeling_llama import LlamaModel, LlamaPreTrainedModel
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeExperts, Qwen2MoeMLP, Qwen2MoeTopKRouter

from .configuration_ddp_widths import AnyConfig, register_widths


class DeepseekConfig(LlamaConfig):
    """Llama with experts. Defaults are those of DeepSeekMoE-16B."""

    model_type = "deepseek"
    attribute_map: ClassVar[dict[str, str]] = {"num_experts": "n_routed_experts"}
    n_routed_experts: int = 64
    n_shared_experts: int | None = 2
    num_experts_per_tok: int = 6
    moe_intermediate_size: int = 1408
    first_k_dense_replace: int = 1
    moe_layer_freq: int = 1
    norm_topk_prob: bool = False


class DeepseekMoE(nn.Module):
    """Qwen2-MoE's router and experts, and shared experts for every token, without a gate."""

    def __init__(self, config: DeepseekConfig) -> None:
        super().__init__()
        self.gate, self.experts = Qwen2MoeTopKRouter(config), Qwen2MoeExperts(config)
        for parameter in self.parameters():  # Llama's class initializes linear layers only
            parameter.data.normal_(std=config.initializer_range)
        self.shared_experts = None
        if config.n_shared_experts:
            self.shared_experts = Qwen2MoeMLP(config, config.n_shared_experts * config.moe_intermediate_size)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x_TH = hidden_states.view(-1, hidden_states.shape[-1])
        _, weights_TK, ids_TK = self.gate(x_TH)
        y_TH = self.experts(x_TH, ids_TK, weights_TK)
        if self.shared_experts is not None:
            y_TH = y_TH + self.shared_experts(x_TH)
        return y_TH.view(hidden_states.shape)


class DeepseekModel(LlamaModel):
    """Llama decoder with experts in the layers that the config names."""

    # otherwise transformers inherits Llama's cached value: no experts
    _can_set_experts_implementation_cached_value = True

    def __init__(self, config: DeepseekConfig) -> None:
        super().__init__(config)
        for index, layer in enumerate(self.layers):
            if index >= config.first_k_dense_replace and index % config.moe_layer_freq == 0:
                layer.mlp = DeepseekMoE(config)


class DeepseekForCausalLM(LlamaForCausalLM):
    """DeepSeekMoE (v1), dense."""

    config_class = DeepseekConfig
    _can_set_experts_implementation_cached_value = True  # as in its decoder

    def __init__(self, config: DeepseekConfig) -> None:
        # LlamaForCausalLM's __init__ would build a Llama first
        LlamaPreTrainedModel.__init__(self, config)
        self.model = DeepseekModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


class AnyDeepseekConfig(AnyConfig):
    """Stands for the configuration of a pruned DeepSeekMoE, which it registers and returns."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, **kwargs: Any) -> Any:
        register_deepseek()
        return super().from_pretrained(pretrained_model_name_or_path, **kwargs)


def register_deepseek() -> None:
    """Register configuration, class, tokenizer and names on disk with transformers; safe to call
    again.

    The published tokenizer_config.json names a Llama tokenizer, which loses the blanks of this
    byte-level vocabulary. transformers overrides that name itself for later DeepSeek models.
    """
    model_type = DeepseekConfig.model_type
    AutoConfig.register(model_type, DeepseekConfig, exist_ok=True)
    AutoModelForCausalLM.register(DeepseekConfig, DeepseekForCausalLM, exist_ok=True)
    TOKENIZER_MAPPING_NAMES[model_type] = "TokenizersBackend"
    # each expert is stored separately, as in Qwen2-MoE
    mapping = get_checkpoint_conversion_mapping("qwen2_moe")
    register_checkpoint_conversion_mapping(model_type, mapping, overwrite=True)
    # transformers prefers a registered class to AnyDeepseekConfig, which would register it
    register_widths()
