"""What the terminal says of stored runs."""

from typing import Any

import msgspec
import pytest

from ddp_benchmarks.tables import print_report
from ddp_vllm.results import Bench, verdicts

RATE = "0.25 requests/s"
LABELS = ("dense", "[/b] $x^$ :x: \x1b]0;evil")


def test_brackets_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    """Rich reads [/pytorch…] as the end of a style and raises, which hid the error itself."""
    reason = "vllm serve ended with code 1: RuntimeError: [/pytorch/gloo/pair.cc:534] Connection closed :x: [bold]"
    metrics = {"requests_per_second": 1.0, "p50_tpot_ms": 30.7, "p99_ttft_ms": 61.4}
    engine = {"weights_gib": 0.25, "kv_cache_tokens": 46592.0}
    runs = [
        {"round": turn, "label": label, "load": RATE, "metrics": metrics, "engine": engine}
        for turn in range(3)
        for label in LABELS
    ]
    models = [{"label": label, "model": label, "name": label, "pruned": label != "dense"} for label in LABELS]
    found: dict[str, Any] = {
        "complete": False, "reason": reason, "models": models, "started": "2026", "runs": runs, "versions": {},
        "hardware": {"cpu": "", "cores": 2, "gpus": []}, "settings": {"mode": "serve", "pairs": 3, "seed": 0},
        "sample": {"conversations": 4, "prompt_tokens": 100, "output_tokens": 50},
    }  # fmt: skip
    bench = msgspec.convert(found | {"verdicts": verdicts(found)}, Bench)
    print_report(bench)
    printed = capsys.readouterr().out
    assert f"Incomplete: {reason}" in printed and f"[/b] $x^$ :x: \\x1b]0;evil, {RATE}: time" in printed
