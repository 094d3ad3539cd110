"""ddp-vllm: Deterministic Differentiable Pruning for language models, served by vLLM."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddp_vllm.api import (
        apply,
        bench,
        compare,
        evaluate,
        inspect,
        plan,
        profile,
        prune,
        prune_sizes,
        read,
        recover,
        report,
        study_methods,
    )
    from ddp_vllm.checkpoint import Checkpoint
    from ddp_vllm.errors import DdpError

__version__ = "0.2.0"
__all__ = [  # noqa: RUF022  (in the order of docs/api.md)
    "prune", "prune_sizes", "plan", "recover", "apply", "study_methods", "read", "inspect", "report", "profile",
    "bench", "evaluate", "compare", "Checkpoint", "DdpError",
]  # fmt: skip
_ELSEWHERE = {"Checkpoint": "checkpoint", "DdpError": "errors"}


def __getattr__(name: str) -> Any:
    """Import a public name when it is used, so that importing the package stays light."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_ELSEWHERE.get(name, 'api')}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
