"""The command lines of the scripts beside the product, and the line of JSON that each prints last."""

import argparse
import json
from collections.abc import Mapping
from typing import Any

from ddp_vllm.machine import hardware, versions


def script_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help is the docstring of a script, with its line breaks."""
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


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
