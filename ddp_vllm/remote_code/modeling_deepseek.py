"""DeepSeekMoE (v1, arXiv:2401.06066), which transformers lacks: its configuration and dense class.

This file is part of every pruned checkpoint of that model, and is used for the dense one too.
Legend of shape suffixes: T tokens, H hidden size, K experts per token, E experts per layer.
"""

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.integrations import use_experts_implementation
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaModel, LlamaPreTrainedModel

from .configuration_ddp_widths import AnyConfig, register_widths


class DeepseekConfig(LlamaConfig):
    """Llama with experts. Defaults are those of DeepSeekMoE-16B."""

    model_type = "deepseek"
    n_routed_experts: int = 64
    n_shared_experts: int | None = 2
    num_experts_per_tok: int = 6
    moe_intermediate_size: int = 1408
    first_k_dense_replace: int = 1
    moe_layer_freq: int = 1
    norm_topk_prob: bool = False


@use_experts_implementation
class DeepseekExperts(nn.Module):
    """Dense routed experts, stacked as transformers' experts functions require."""

    def __init__(self, config: DeepseekConfig) -> None:
        super().__init__()
        self.num_experts, self.hidden_dim = config.n_routed_experts, config.hidden_size
        self.intermediate_dim = config.moe_intermediate_size
        shape = (self.num_experts, 2 * self.intermediate_dim, self.hidden_dim)
        self.gate_up_proj = nn.Parameter(torch.empty(shape).normal_(std=config.initializer_range))
        shape = (self.num_experts, self.hidden_dim, self.intermediate_dim)
        self.down_proj = nn.Parameter(torch.empty(shape).normal_(std=config.initializer_range))
        self.act_fn = nn.SiLU()

    def forward(self, x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        """Loop over the experts, for `experts_implementation="eager"`."""
        sum_TH = torch.zeros_like(x_TH, dtype=torch.float32)
        for expert in ids_TK.unique().tolist():
            tokens, slots = torch.where(ids_TK == expert)
            gate, up = F.linear(x_TH[tokens], self.gate_up_proj[expert]).chunk(2, dim=-1)
            y = F.linear(self.act_fn(gate) * up, self.down_proj[expert])
            sum_TH.index_add_(0, tokens, (y * weights_TK[tokens, slots, None]).float())
        return sum_TH.to(x_TH.dtype)


class DeepseekMoE(nn.Module):
    """Routes each token to the best K experts by softmax over all, and adds shared experts for
    every token."""

    def __init__(self, config: DeepseekConfig) -> None:
        super().__init__()
        self.num_chosen, self.normalize = config.num_experts_per_tok, config.norm_topk_prob
        self.gate = nn.Linear(config.hidden_size, config.n_routed_experts, bias=False)
        self.experts = DeepseekExperts(config)
        self.shared_experts = None
        if config.n_shared_experts:
            shared = copy.copy(config)
            shared.intermediate_size = config.n_shared_experts * config.moe_intermediate_size
            self.shared_experts = LlamaMLP(shared)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x_TH = hidden_states.view(-1, hidden_states.shape[-1])
        scores_TE = self.gate(x_TH).softmax(-1, dtype=torch.float32)
        weights_TK, ids_TK = scores_TE.topk(self.num_chosen, dim=-1)
        if self.normalize:
            weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
        y_TH = self.experts(x_TH, ids_TK, weights_TK.to(x_TH.dtype))
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
