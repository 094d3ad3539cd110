"""What every measurement here does alike: its command line, who goes first in a round, the line of JSON at its end."""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from ddp_vllm.errors import SettingError
from ddp_vllm.machine import hardware, today, versions

Way = TypeVar("Way")


def script_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help is the docstring of a script, as it stands."""
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def split_command_line() -> tuple[list[str], list[str]]:
    """Return the words before `--`, which are the script's, and those after it, which it passes on."""
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    return words[:end], words[end + 1 :]


def check_lowest(settings: object, **lowest: int) -> None:
    """Refuse a setting below its lowest value; None is no value. Raises: SettingError, naming option and value."""
    for name, low in lowest.items():
        value = getattr(settings, name)
        if value is not None and value < low:
            raise SettingError(f"--{name.replace('_', '-')} {value} is below {low}")


def rotated(ways: Sequence[Way], turn: int) -> list[Way]:
    """Return all ways in the order of a round: each starts with the next, so that a slow minute slows all of them."""
    first = turn % len(ways)
    return [*ways[first:], *ways[:first]]


def new_results(form: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a file of results begins with: which kind it is, its settings, and where and when it was measured."""
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
    """Return one line of JSON: the question, its settings, hardware, versions, seed and the answers.

    question: the first line of a docstring is taken. where: results that hold `hardware` and `versions`; None: here.
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
