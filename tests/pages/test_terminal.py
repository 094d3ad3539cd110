"""What the terminal shows: the progress of a run, at any width and in a log, and stored results of a benchmark."""

import io
import re
from typing import Any

import msgspec
import pytest

from ddp_benchmarks.tables import print_report
from ddp_vllm.pages.progress import StepProgress
from ddp_vllm.pages.terminal import SafeConsole
from ddp_vllm.results import Bench, verdicts

METRICS = {"loss": 3.25, "kl": 0.5, "tokens": 8192.0, "seconds": 2.0}


def run(console: SafeConsole, num_steps: int = 1000) -> None:
    describe = lambda _: ("search", "sparsity attn 10.0% of 20%, mlp 10.0% ")  # noqa: E731
    with StepProgress(console, num_steps, describe, True) as report:
        for step in range(1, num_steps + 1):
            report(METRICS | {"step": step})


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_steps_and_times_stay_at_any_width(width: int) -> None:
    text = io.StringIO()
    run(SafeConsole(file=text, force_terminal=True, width=width, color_system=None))
    line = [line for line in re.split(r"[\r\n]", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text.getvalue())) if line][-1]
    assert re.match(r"search +1000/1000 +0:\d\d:\d\d +0:00:00 ━", line) and len(line.rstrip()) <= width, line
    assert ("loss 3.250" in line) == (width >= 80) and ("tok/s" in line) == (width == 200), line


def test_a_log_tells_the_time_from_the_first_step_on() -> None:
    """What precedes the first step, such as trials of the learning rate, is not in the estimate."""
    text = io.StringIO()
    run(SafeConsole(file=text, width=80), 40)
    lines = text.getvalue().splitlines()
    assert len(lines) == 40 and lines[0].startswith("search 1/40, 78 s left: loss 3.250 kl 0.500 sparsity attn")


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
