"""What llama.cpp's graphs `deci` and `llama` compute. This file needs no package, so that model
cards can read it."""

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


def missing_parts(model_type: str) -> str:
    """Return which parts of a dense model type llama.cpp would leave out; "" if it computes such
    models exactly."""
    return MISSING_PARTS.get(model_type, "untested parts")
