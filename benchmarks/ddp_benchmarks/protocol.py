"""Shared parts of all measurements: refused arguments, and the rotating order in a round."""

from collections.abc import Sequence
from typing import TypeVar

from ddp_vllm.errors import SettingError

Variant = TypeVar("Variant")


def check_engine_arguments(words: Sequence[str], *reserved: str) -> None:
    """Refuse arguments of vLLM that a measurement sets itself. Raises: SettingError, naming the
    argument."""
    for word in words:
        option = word.partition("=")[0].replace("_", "-")
        if option in reserved:
            raise SettingError(f"{option} after -- is set by this measurement; omit it")


def rotated(variants: Sequence[Variant], turn: int) -> list[Variant]:
    """Return the variants in the order of a round; each round starts with the next, so slow minutes
    affect all."""
    first = turn % len(variants)
    return [*variants[first:], *variants[:first]]
