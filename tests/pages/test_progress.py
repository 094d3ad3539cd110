"""The progress of a run, in a terminal of any width and in a log."""

import io
import re

import pytest

from ddp_vllm.pages.progress import StepProgress
from ddp_vllm.pages.terminal import SafeConsole

METRICS = {"loss": 3.25, "kl": 0.5, "tokens": 8192.0, "seconds": 2.0}


def run(console: SafeConsole, num_steps: int = 1000) -> None:
    with StepProgress(
        console, num_steps, lambda _: ("search", "sparsity attn 10.0% of 20%, mlp 10.0% "), True
    ) as report:
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
