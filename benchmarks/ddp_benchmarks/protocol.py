"""Shared parts of all measurements: command lines, rotating order in a round, and the final line of
JSON."""

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from ddp_vllm.errors import SettingError
from ddp_vllm.machine import hardware, today, versions

Variant = TypeVar("Variant")


def script_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help is the docstring of a script, with its line breaks."""
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


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
    facts = {"format": form, "started": today(), "settings": dict(settings)}
    return facts | {"hardware": hardware(), "versions": versions()}


def result_line(
    question: str | None,
    settings: Mapping[str, Any],
    *,
    seed: int,
    where: Mapping[str, Any] | None = None,
    **answers: Any,
) -> str:
    """Return one line of JSON: the question, its settings, hardware, versions, seed and the
    answers.

    question: a docstring, of which the first line is used.
    where: results with `hardware` and `versions`; None: this machine's.
    """
    where = where or {"hardware": hardware(), "versions": versions()}
    line = {
        "question": (question or "").partition("\n")[0],
        "settings": dict(settings),
        "hardware": where["hardware"],
        "versions": where["versions"],
        "seed": seed,
    }
    return json.dumps(line | answers, default=str)
