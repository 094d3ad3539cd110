"""What does this GPU do at best, and which models run on it?

    python machine.py OUT.json          # versions, ceilings and latencies
    python machine.py MODEL LAYERS      # folders of a model without weights, dense and pruned

Configs of real models for random weights, tiny versions for the dry run, and widths as pruning leaves them.
"""

import importlib.metadata
import json
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ddp_vllm.families import dense_layers, pruned_config
from ddp_vllm.remote_code.widths import LayerWidths
from expert_layers import CONCENTRATION
from lease import DEVICE, DRY, WORK, Results, graph_seconds, seconds_of

PACKAGES = ("torch", "triton", "transformers", "accelerate", "peft", "numpy", "vllm", "tokenizers", "torchao")
QUERY = "name,memory.total,driver_version,clocks.max.sm,clocks.max.mem,power.limit"

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


def build(config: dict[str, Any], device: str, dtype: torch.dtype) -> tuple[Any, dict[str, Any]]:
    """Return a random model and the config that the product reads."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind = config["model_type"]
    settings = AutoConfig.for_model(kind, **{name: value for name, value in config.items() if name != "model_type"})
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(settings, dtype=dtype)
    return model.requires_grad_(False).eval(), settings.to_dict() | config


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


def shell(*words: str) -> str:
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        return repr(error)


def probe() -> None:
    installed = {part.name: part.version for part in importlib.metadata.distributions()}
    results = Results(
        sys.argv[1], python=platform.python_version(), versions={name: installed.get(name) for name in PACKAGES},
        tools={name: shutil.which(name) for name in ("gcc", "nvcc", "ncu", "ninja")},
        gpu=shell("nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"),
    )  # fmt: skip
    results.save()
    source = torch.randint(0, 255, (2**20 if DRY else 2**32,), dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    results.save(
        copy_tb_s=2 * len(source) / seconds_of(lambda: target.copy_(source)) / 1e12,
        read_tb_s=len(source) / seconds_of(lambda: source.view(torch.int32).sum()) / 1e12,
    )
    side = 64 if DRY else 8192
    a = torch.randn(side, side, device=DEVICE, dtype=torch.bfloat16)
    results.save(matmul_tflops=2 * side**3 / seconds_of(lambda: a @ a, inner=3) / 1e12)
    weight = torch.randn(*((96, 32) if DRY else (12288, 4096)), device=DEVICE, dtype=torch.bfloat16)
    inputs = {m: weight.new_ones(m, weight.shape[1]) for m in (1, 8, 32, 64, 128, 256, 512, 2048, 8192)}
    results.save(linear_4096x12288_us={m: 1e6 * seconds_of(lambda x=x: x @ weight.t()) for m, x in inputs.items()})
    small = torch.zeros(1024, device=DEVICE)
    results.save(
        graph_node_us=1e6 * graph_seconds([lambda: small.add_(1.0)] * 200),
        eager_launch_us=1e6 * seconds_of(lambda: small.add_(1.0), inner=1000),
    )
    results.save(complete=True)
    print({name: value for name, value in results.items() if isinstance(value, float)})


if __name__ == "__main__":
    if len(sys.argv) == 2:
        probe()
    else:
        for removed in (0, 20, 40, 60):
            write_config(sys.argv[1], removed, int(sys.argv[2]), WORK / f"{sys.argv[1]}-{removed}")
