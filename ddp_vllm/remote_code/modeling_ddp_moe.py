"""Loads pruned mixtures of experts in transformers, and DeepSeekMoE (v1), which transformers lacks.

The stock model is built first, then the routed experts of every layer are replaced by experts of
different widths. Router, shared experts and attention are stock code. This file is part of every
checkpoint.
Legend of shape suffixes: T tokens, H hidden size, K experts per token, E experts per layer, S = T·K
    routed pairs.
"""

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2ForCausalLM,
    LlamaForCausalLM,
    MixtralForCausalLM,
    OlmoeForCausalLM,
    Qwen2MoeForCausalLM,
    Qwen3MoeForCausalLM,
)
from transformers.conversion_mapping import (
    WeightRenaming,
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.integrations import use_experts_implementation
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaModel, LlamaPreTrainedModel

from .configuration_ddp import (
    DDPDeepseekConfig,
    DDPDeepseekV2Config,
    DDPMixtralConfig,
    DDPOlmoeConfig,
    DDPQwen2MoeConfig,
    DDPQwen3MoeConfig,
    DeepseekConfig,
    register_deepseek_config,
)
from .files import WidthsError
from .modeling_ddp import NonUniform
from .ragged_experts import RaggedExperts
from .tensors import expert_names
from .widths import ModelWidths, is_routed


class NonUniformExperts(NonUniform):
    """Mixin for stock mixtures of experts: replace the routed experts by narrower ones."""

    @classmethod
    def is_backend_compatible(cls) -> bool:
        """Refuse vLLM's Transformers backend, which calls this before it builds a model.
        Raises: WidthsError."""
        raise WidthsError("vLLM has no kernel for experts of different widths; install ddp-vllm alongside it")

    @staticmethod
    def narrow(layer: Any, widths: ModelWidths, layer_idx: int) -> None:
        """Replace the routed experts of one stock decoder layer by narrower ones."""
        if (sizes := widths.layers[layer_idx].expert_intermediate_sizes) is not None:
            gate, up, down = expert_names(widths.table)
            layer.mlp.experts = RaggedExperts(layer.mlp.experts, sizes, (gate, up), down)


class DDPQwen3MoeForCausalLM(NonUniformExperts, Qwen3MoeForCausalLM):
    config_class = DDPQwen3MoeConfig


class DDPQwen2MoeForCausalLM(NonUniformExperts, Qwen2MoeForCausalLM):
    config_class = DDPQwen2MoeConfig


class DDPMixtralForCausalLM(NonUniformExperts, MixtralForCausalLM):
    config_class = DDPMixtralConfig


class DDPOlmoeForCausalLM(NonUniformExperts, OlmoeForCausalLM):
    config_class = DDPOlmoeConfig


class DDPDeepseekV2ForCausalLM(NonUniformExperts, DeepseekV2ForCausalLM):
    config_class = DDPDeepseekV2Config


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
            if is_routed(vars(config), index):
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


class DDPDeepseekForCausalLM(NonUniformExperts, DeepseekForCausalLM):
    config_class = DDPDeepseekConfig


# on disk DeepSeek stores each expert separately, as Qwen2-MoE does; Mixtral names its block
# differently on disk
register_checkpoint_conversion_mapping("deepseek", get_checkpoint_conversion_mapping("qwen2_moe"), overwrite=True)
register_checkpoint_conversion_mapping("ddp_mixtral", [WeightRenaming(".block_sparse_moe.", ".mlp.")], overwrite=True)


def register_deepseek() -> None:
    """Register the classes of dense DeepSeekMoE (v1) with transformers' Auto classes; safe to call
    again."""
    register_deepseek_config()
    AutoModelForCausalLM.register(DeepseekConfig, DeepseekForCausalLM, exist_ok=True)
