"""ddp-vllm: Deterministic Differentiable Pruning for language models, served by vLLM."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddp_vllm.api import (
        apply,
        bench,
        compare,
        evaluate,
        evaluate_text,
        export_gguf,
        inspect,
        plan,
        profile,
        prune,
        prune_sizes,
        quantize,
        read,
        recover,
        report,
        study,
        verify,
    )
    from ddp_vllm.checkpoint import Checkpoint
    from ddp_vllm.errors import DdpError
    from ddp_vllm.fetch import fetch_conversations, fetch_model
    from ddp_vllm.push import publish

__version__ = "0.2.0"
__all__ = [  # noqa: RUF022  (in the order of docs/api.md)
    "prune", "prune_sizes", "plan", "recover", "apply", "quantize", "study", "export_gguf", "read", "inspect",
    "verify", "publish", "report", "profile", "bench", "evaluate", "evaluate_text", "compare", "fetch_model",
    "fetch_conversations", "Checkpoint", "DdpError",
]  # fmt: skip
_ELSEWHERE = {
    "Checkpoint": "checkpoint", "DdpError": "errors", "publish": "push", "fetch_model": "fetch",
    "fetch_conversations": "fetch",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import a public name when it is used, so that importing the package stays light."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_ELSEWHERE.get(name, 'api')}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
