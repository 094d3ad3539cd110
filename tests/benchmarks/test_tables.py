"""What the terminal, the picture and the JSON line say of stored runs."""

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ddp_benchmarks.tables import draw_speed, plain_console, print_report
from ddp_vllm.results import verdicts

RATE, BURST = "0.25 requests/s", "all at once"
TPOT = [(30.7, 22.6), (31.0, 22.5), (30.5, 22.7)]  # ms, dense and pruned


def results(load: str, speeds: list[tuple[float, float]], times: list[tuple[float, float]], **more: Any) -> Any:
    """Return what `bench sharegpt --mode serve` writes, from (dense, pruned) requests/s and ms an output token."""
    runs = [
        {
            "round": turn,
            "label": label,
            "load": load,
            "metrics": {"requests_per_second": speed, "p50_tpot_ms": time, "p99_ttft_ms": 2 * time},
            "engine": {"peak_memory_bytes": 3 * 2**30, "weights_gib": 0.25, "kv_cache_tokens": 46592.0},
        }
        for turn, pair in enumerate(zip(speeds, times, strict=True))
        for label, speed, time in zip(("dense", "half"), *pair, strict=True)
    ]
    found: dict[str, Any] = {"complete": True, "reason": None, "models": [{"label": "dense"}, {"label": "half"}]}
    found |= {"hardware": {"gpus": []}, "versions": {}, "settings": {"seed": 0}, "runs": runs, **more}
    return found | {"verdicts": verdicts(found)}


def printed(found: Any) -> str:
    text = io.StringIO()
    print_report(found, Console(file=text, width=200, highlight=False))
    return text.getvalue()


def test_brackets_are_printed_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rich reads [/pytorch…] as the end of a style and raises, which hid the error itself."""
    reason = "vllm serve ended with code 1: RuntimeError: [/pytorch/gloo/pair.cc:534] Connection closed :x: [bold]"
    found = results(RATE, [(1, 1)] * 3, TPOT, complete=False, reason=reason)
    for part in (*found["models"], *found["runs"]):
        part["label"] = part["label"].replace("half", "[/b] $x^$ :x:")
    found["verdicts"] = verdicts(found)
    monkeypatch.setenv("COLUMNS", "200")
    console = plain_console()
    with console.capture() as capture:
        print_report(found, console)
    assert f"Incomplete: {reason}" in capture.get() and f"[/b] $x^$ :x:, {RATE}: time" in capture.get()
    pytest.importorskip("matplotlib")
    draw_speed(found, tmp_path / "speed.png")
