"""Configs of real models for random weights, tiny versions for the dry run, and widths as pruning
leaves them."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from ddp_vllm.families import dense_layers, pruned_config
from ddp_vllm.remote_code.widths import LayerWidths
from expert_layers import CONCENTRATION
from lease import DRY

LLAMA = {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False, "hidden_act": "silu"}
QWEN3 = LLAMA | {"vocab_size": 151936, "num_attention_heads": 32, "head_dim": 128, "max_position_embeddings": 40960}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama-2-7b": LLAMA | {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 32000, "hidden_size": 4096,
        "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
        "head_dim": 128, "max_position_embeddings": 4096, "rope_theta": 1e4,
    },
    "qwen3-8b": QWEN3 | {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 4096, "num_key_value_heads": 8,
        "intermediate_size": 12288, "num_hidden_layers": 36, "attention_bias": False,
    },
    "qwen3-30b-a3b": QWEN3 | {
        "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048,
        "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "num_hidden_layers": 48,
        "num_key_value_heads": 4, "attention_bias": False,
    },
    "deepseekmoe-16b": LLAMA | {
        "model_type": "deepseek", "architectures": ["DeepseekForCausalLM"], "vocab_size": 102400, "hidden_size": 2048,
        "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_routed_experts": 64, "n_shared_experts": 2,
        "num_experts_per_tok": 6, "first_k_dense_replace": 1, "moe_layer_freq": 1, "norm_topk_prob": False,
        "scoring_func": "softmax", "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 16,
        "max_position_embeddings": 4096, "rope_theta": 1e4,
    },
}  # fmt: skip
TINY = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "head_dim": 32,
    "num_key_value_heads": 4, "max_position_embeddings": 1024, "num_hidden_layers": 2, "moe_intermediate_size": 96,
    "num_experts": 8, "n_routed_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip


def config_of(model: str) -> dict[str, Any]:
    """Return a model's config; in a dry run, its tiny version."""
    config = CONFIGS[model]
    tiny = {name: value for name, value in TINY.items() if name in config} if DRY else {}
    if config["num_key_value_heads"] == config["num_attention_heads"]:
        tiny |= {"num_key_value_heads": tiny.get("num_attention_heads", config["num_attention_heads"])}
    return config | tiny


def draw_shares(keep: float, count: int, generator: np.random.Generator) -> np.ndarray:
    """Return kept shares as `expert_layers.draw_widths` draws them: Beta distributed, with mean `keep`."""
    shares = generator.beta(CONCENTRATION * keep, CONCENTRATION * (1 - keep), count)
    return np.clip(shares * keep / shares.mean(), 0.0, 1.0)


def prune_config(config: dict[str, Any], removed: int) -> dict[str, Any]:
    """Return the config without `removed` percent: KV groups and channels, or the experts' channels
    of a mixture."""
    keep, generator, layers = 1 - removed / 100, np.random.default_rng(0), list(dense_layers(config))
    is_mixture = any(layer.expert_intermediate_sizes is not None for layer in layers)
    heads, channels = (draw_shares(keep, len(layers), generator) for _ in range(2))
    widths = []
    for layer, head_share, channel_share in zip(layers, heads, channels, strict=True):
        queries, experts = layer.query_heads_per_kv_head, layer.expert_intermediate_sizes
        if experts is not None:
            shares = draw_shares(keep, len(experts), generator)
            sizes = tuple(round(share * size) for share, size in zip(shares, experts, strict=True))
            layer = LayerWidths(
                query_heads_per_kv_head=queries, intermediate_size=layer.intermediate_size,
                expert_intermediate_sizes=sizes,
            )  # fmt: skip
        elif not is_mixture:
            layer = LayerWidths(
                query_heads_per_kv_head=queries[: round(head_share * len(queries))],
                intermediate_size=round(channel_share * layer.intermediate_size),
            )
        widths.append(layer)
    return pruned_config(config, widths)


def write_config(model: str, removed: int, layers: int, folder: Path) -> None:
    """Write config.json of a dense or pruned model without weights. layers: 0 for all."""
    config = config_of(model) | {"torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2}
    if layers:
        config["num_hidden_layers"] = layers
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(prune_config(config, removed) if removed else config))
