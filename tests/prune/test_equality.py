"""benchmarks/equality.py, by which a change of the code is shown to change no result."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "equality.py"


@pytest.mark.parametrize("case", ["speedup", "killed and resumed"])
def test_a_case_runs_to_its_end(case: str) -> None:
    """The one that reads a profile which the script writes, and the one that kills a run."""
    command = [sys.executable, str(SCRIPT), "--only", case]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=SCRIPT.parents[1])
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert json.loads(ended.stdout.splitlines()[-1])["cases"] == 1
