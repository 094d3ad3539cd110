"""What real vLLM is given to serve, and how its answers are judged."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

Serve = Callable[..., dict[str, Any]]
PROMPTS = [
    [5],  # a single token: nothing to attend to but itself
    [1, 2, 3, 4, 5, 6, 7],
    [(7 * i) % 120 + 1 for i in range(140)],  # longer than a block of the KV cache and than a sliding window
]
NUM_NEW_TOKENS = 8
LOGPROB_TOLERANCE = 1e-4
VLLM = find_spec("vllm")  # not imported in this process
RELOAD = "model_executor/model_loader/reload/inplace.py"  # an older vLLM updates weights in other ways
UPDATES = ("reload", "pieces") if VLLM and (Path(str(VLLM.origin)).parent / RELOAD).exists() else ()


def job(folder: Path, **options: Any) -> dict[str, Any]:
    """Return what `serve` is given to serve a folder with vLLM's options."""
    return {"folder": str(folder), "options": options}


def assert_same(result: dict[str, Any], reference: dict[str, Any]) -> None:
    assert "error" not in result, result
    assert_same_outputs(result["outputs"], reference["outputs"])


def assert_same_outputs(outputs: list[dict[str, Any]], references: list[dict[str, Any]]) -> None:
    for got, expected in zip(outputs, references, strict=True):
        assert got["tokens"] == expected["tokens"]
        assert got["logprobs"] == pytest.approx(expected["logprobs"], abs=LOGPROB_TOLERANCE)
