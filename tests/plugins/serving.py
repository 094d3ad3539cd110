"""What real vLLM is given to serve, and how its answers are judged."""

from collections.abc import Callable
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
UPDATES = ("reload", "pieces")  # how the weights of a running engine are replaced
ARGUMENTS = ("num_tokens", "prompts", "updates", "compiled", "asks_layers")  # of `serve` in the scripts


def job(folder: Path, adapters: tuple[Path | None, ...] = (), **options: Any) -> dict[str, Any]:
    """Return what `serve` is given to serve a folder with vLLM's options; adapters: folders, None for none."""
    stated: dict[str, Any] = {key: options.pop(key) for key in ARGUMENTS if key in options}
    if adapters:
        stated["adapters"] = [adapter and str(adapter) for adapter in adapters]
        options |= {"enable_lora": True, "max_lora_rank": 8}
    return {"folder": str(folder), "options": options, **stated}


def selected(request: pytest.FixtureRequest, parameter: str, file: str) -> set[str]:
    """Return the values of a parameter in the selected tests of a file: nothing is made for others."""
    items = [item for item in request.session.items if item.path == Path(file) and hasattr(item, "callspec")]
    values = [item.callspec.params.get(parameter) for item in items]
    return {value for value in values if isinstance(value, str)}


def assert_same(result: dict[str, Any], reference: dict[str, Any]) -> None:
    assert "error" not in result, result
    assert_same_outputs(result["outputs"], reference["outputs"])


def assert_same_outputs(outputs: list[dict[str, Any]], references: list[dict[str, Any]]) -> None:
    for got, expected in zip(outputs, references, strict=True):
        assert got["tokens"] == expected["tokens"]
        assert got["logprobs"] == pytest.approx(expected["logprobs"], abs=LOGPROB_TOLERANCE)


def difference(result: dict[str, Any], reference: dict[str, Any]) -> float:
    """Return the largest difference of log-probabilities of the same tokens."""
    pairs = zip(result["outputs"], reference["outputs"], strict=True)
    return max(abs(a - b) for x, y in pairs for a, b in zip(x["logprobs"], y["logprobs"], strict=True))
