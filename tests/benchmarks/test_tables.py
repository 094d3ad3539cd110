"""What the terminal, the picture and the JSON line say of stored runs."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ddp_benchmarks.tables import draw_speed, json_line, plain_console, print_report
from ddp_vllm.results import main_verdict, verdicts

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


def test_at_a_rate_the_sentence_is_of_the_time_per_token() -> None:
    """Below saturation both finish as many requests a second as arrive, however fast they are."""
    found = results(RATE, [(0.25, 0.25), (0.25, 0.2501), (0.2499, 0.25)], TPOT)
    (answer,) = found["verdicts"]
    assert main_verdict(answer)["ratio"] == pytest.approx(1.36, abs=0.01)
    sentence = "time per output token: 1.36× [1.32, 1.40] faster (only 3 pairs)"
    assert answer["sentence"] == sentence
    assert f"half, {RATE}: {sentence}" in printed(found)
    assert json.loads(json_line(found))["verdicts"][0] == {
        "label": "half", "load": RATE, "pairs": 3, "metric": "p50_tpot_ms", "sentence": sentence,
    }  # fmt: skip


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


def test_the_picture_shows_what_the_sentence_says(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for load, heading in (RATE, "time per output token, median ms"), (BURST, "requests/s (circles"):
        draw_speed(results(load, [(0.25, 0.25)] * 3, TPOT), tmp_path / "speed.svg")
        assert f"<!-- {heading}" in (tmp_path / "speed.svg").read_text()
