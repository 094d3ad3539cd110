"""What llama.cpp's graphs `deci` and `llama` compute. This file needs no package, so that model
cards can read it."""

from typing import Any

from ddp_vllm.dimensions import attended
from ddp_vllm.errors import ModelError, reading
from ddp_vllm.remote_code.tensors import Config, dense_type

# model_type -> the parts of such a model that those graphs do not have; "" if they have all
MISSING_PARTS = {
    "llama": "",
    "mistral": "",
    "qwen2": "",
    "qwen3": "norms of queries and keys",
    "smollm3": "layers without rotary positions",
    "granite": "factors on embeddings, residuals and logits",
    "gemma2": "norms after the blocks and soft caps",
    "gemma3_text": "norms after the blocks and of queries and keys",
    "phi3": "fused projections",
}


def missing_parts(config: Config) -> str:
    """Return which parts of a dense or pruned model llama.cpp would leave out; "" if it computes it
    exactly. Raises: ModelError."""
    model_type = dense_type(config)
    if missing := MISSING_PARTS.get(model_type, "untested parts"):
        return f"{missing} in models of type {model_type}"
    with reading("config.json", ModelError, "download the model again"):
        rope, length = rope_of(config), config.get("max_position_embeddings") or 0
        if min(attended(config, length)) < length:
            return f"a sliding window of {config['sliding_window']} tokens"
        if (activation := config.get("hidden_act", "silu")) != "silu":
            return f"the activation {activation}"
        if rope["rope_type"] not in ("default", "llama3") or rope.get("partial_rotary_factor", 1) != 1:
            return f"rotary positions of type {rope['rope_type']}"
    return ""


def rope_of(config: Config) -> dict[str, Any]:
    """Return the settings of rotary positions, as transformers 5 writes them or as older versions
    did."""
    old = {"rope_theta": config.get("rope_theta") or 10_000.0, **(config.get("rope_scaling") or {})}
    rope = config.get("rope_parameters") or old
    return {**old, **rope, "rope_type": rope.get("rope_type") or rope.get("type") or "default"}
