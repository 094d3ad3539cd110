"""ddp-vllm: Deterministic Differentiable Pruning for language models, served by vLLM."""

__version__ = "0.2.0"
