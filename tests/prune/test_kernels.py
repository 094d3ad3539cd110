"""The GPU kernels of training: their arithmetic in Triton's interpreter."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

pytest.importorskip("triton")
HERE = Path(__file__).parent


def test_the_kernels_in_tritons_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    options = ["-q", "--noconftest", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, str(HERE / "interpreted_kernels.py")]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=HERE.parent.parent)
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
    assert int(re.search(r"(\d+) passed", result.stdout)[1]) == 9  # type: ignore[index]
