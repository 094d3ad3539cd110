"""A latency profile of a machine whose times are known exactly."""

import json
from pathlib import Path
from typing import Any

from ddp_vllm.dimensions import widths_of
from ddp_vllm.latency import FORMAT, shapes_of
from ddp_vllm.remote_code.widths import LayerWidths

CONFIG = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 1024, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 320,
}  # fmt: skip
MIXTURE = {
    "model_type": "qwen3_moe", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 320, "num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 768,
}  # fmt: skip
EXPERTS, EXPERT_CHANNEL = 1e-3, 4e-6  # of a routed layer, and of a channel of the mean width of its experts
REST, ATTENTION, KV_HEAD, MLP, CHANNEL = 5e-3, 1e-4, 2e-4, 3e-4, 1e-6


def seconds(
    layers: list[LayerWidths], batch: int = 8, context: int = 256, kernel: float = 1.0, mixture: float = 0.0
) -> float:
    """Return the seconds of a step, linear in widths, batch and context.

    kernel: the time of the plugin's kernel for routed experts, relative to the dense model's kernel.
    mixture: the time of each further number of KV heads.
    """
    total = REST + mixture * (len({layer.num_kv_heads for layer in layers} - {0}) - 1)
    for layer in layers:
        if sizes := layer.expert_intermediate_sizes:
            mean = sum(-(-width // 16) * 16 for width in sizes) / len(sizes)
            total += kernel * (EXPERTS + EXPERT_CHANNEL * mean) * bool(mean)
            continue
        total += (ATTENTION + KV_HEAD * layer.num_kv_heads) * bool(layer.num_kv_heads)
        total += (MLP + CHANNEL * -(-layer.intermediate_size // 128) * 128) * bool(layer.intermediate_size)
    return total * (1 + batch / 8) * (1 + context / 256)


def written(
    folder: Path,
    config: dict[str, Any] = CONFIG,
    multiple: int = 128,
    kernel: float = 1.0,
    mixture: float = 0.0,
    **changes: Any,
) -> Path:
    """Write a profile of two rounds, the second of which decodes a tenth slower."""

    def cells(widths: list[LayerWidths], turn: int, kernel: float) -> list[dict[str, Any]]:
        measured = []
        for batch, context in ((1, 256), (1, 1024), (8, 256), (8, 1024)):
            step = seconds(widths, batch, context, kernel, mixture)
            times = {"decode": (1 + turn / 10) * step, "prefill": 50 * step}
            measured.append({"batch": batch, "context": context} | times)
        return measured

    shapes, dense = shapes_of(config, multiple), widths_of(config).dense_layers
    times = [
        {"round": turn, "shape": name, "cells": cells(widths, turn, kernel), "dense": cells(dense, turn, 1.0)}
        for turn in (0, 1)
        for name, widths in shapes.items()
    ]
    content = {
        "format": FORMAT, "complete": True, "multiple": multiple, "config": config,
        "shapes": list(shapes), "times": times, "hardware": {"cpu": "a CPU", "cores": 2, "gpus": []}, "versions": {},
        "settings": {"engine_arguments": ["--quantization", "fp8"]},
    }  # fmt: skip
    path = folder / "machine.json"
    path.write_text(json.dumps(content | changes))
    return path
