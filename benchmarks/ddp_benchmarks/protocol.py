"""Shared parts of all measurements: refused arguments, rotating order in a round, the first fields of
results."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from ddp_vllm.errors import SettingError
from ddp_vllm.machine import hardware, now, versions

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


def new_results(form: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the first fields of a results file: format, time, settings, hardware and versions."""
    facts = {"format": form, "started": now(), "settings": dict(settings)}
    return facts | {"hardware": hardware(), "versions": versions()}
