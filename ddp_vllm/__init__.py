"""ddp-vllm: Deterministic Differentiable Pruning for language models, served by vLLM."""

from typing import TYPE_CHECKING, Any

from ddp_vllm import api

if TYPE_CHECKING:
    from ddp_vllm.api import *  # noqa: F403

__version__ = "0.3.0"
__all__ = api.__all__


def __getattr__(name: str) -> Any:
    """Import a public name when it is used, so that importing the package stays light."""
    return getattr(api, name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
