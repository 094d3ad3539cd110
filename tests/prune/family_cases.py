"""A small random model of the real config class for each dense family, with every bias, window and scale it has."""

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 72, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "initializer_range": 0.2, "eos_token_id": 0, "bos_token_id": None, "pad_token_id": None,
}  # fmt: skip
CASES = {
    "llama": transformers.LlamaConfig(**SIZES, head_dim=8),
    "mistral": transformers.MistralConfig(**SIZES, head_dim=24, sliding_window=6),  # wide heads, as in Nemo
    "qwen2": transformers.Qwen2Config(**SIZES),  # biases on q, k and v
    "qwen3": transformers.Qwen3Config(**SIZES, head_dim=16),  # a norm on each query and key head
    "smollm3": transformers.SmolLM3Config(**SIZES, no_rope_layers=[1, 0, 1, 0]),  # layers without positions
    "granite": transformers.GraniteConfig(  # scales on blocks, embeddings, scores and logits; biases everywhere
        **SIZES, attention_bias=True, mlp_bias=True, residual_multiplier=0.4, embedding_multiplier=3.0,
        attention_multiplier=0.2, logits_scaling=4.0,
    ),
    "gemma2": transformers.Gemma2Config(  # norms around blocks, caps on scores and logits, windows in every other layer
        **SIZES, head_dim=16, attention_bias=True, sliding_window=6, query_pre_attn_scalar=16,
        attn_logit_softcapping=4.0, final_logit_softcapping=3.0,
    ),
    "gemma3_text": transformers.Gemma3TextConfig(  # also a norm on each query and key head
        **SIZES, head_dim=16, sliding_window=6, query_pre_attn_scalar=16,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    "seed_oss": transformers.SeedOssConfig(**SIZES, head_dim=16, mlp_bias=True),  # biases but on outputs
    "phi3": transformers.Phi3Config(**SIZES, sliding_window=6),  # q, k and v in one projection, gate and up in one
}  # fmt: skip


def write_random(config: Any, folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """Write a random model whose norms and biases are not 0 and 1, where nothing could go wrong."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(type(config)(**config.to_dict() | changes))
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            torch.nn.init.normal_(parameter, mean=float(parameter.detach().mean()), std=0.5)
    model.to(dtype).save_pretrained(folder)
    return folder
