"""Damaged files, kills, a busy server. `DDP_SEEDS=20000 DDP_KILLS=400 DDP_REQUESTS=20000` asks for as many."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import fuzz
import kills
import pytest
from soak import OPTIONS, soak, tiny_model

from ddp_benchmarks.engine import Server

pytestmark = pytest.mark.nightly
SEEDS, KILLS, REQUESTS = (
    int(os.environ.get(name, few)) for name, few in (("DDP_SEEDS", 300), ("DDP_KILLS", 12), ("DDP_REQUESTS", 200))
)


def run(script: str, *arguments: str) -> Any:
    """Return the JSON of the last line of a script, whose seeds are past those of the run in docs/measured.md."""
    result = subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True)
    assert result.returncode == 0, (result.stdout[-3000:], result.stderr[-3000:])
    return json.loads(result.stdout.splitlines()[-1])


def test_a_few_hundred_mutations_find_nothing() -> None:
    found = run(fuzz.__file__, "--first", "1000000", "--last", str(1000000 + SEEDS))
    assert found["faults"] == [] and found["cases"] == SEEDS and found["targets"].keys() == fuzz.TARGETS.keys()
    assert found["refused"] > SEEDS // 3


def test_a_few_kills_find_nothing() -> None:
    names = "export,apply,joint training,recover,family"
    found = run(kills.__file__, "--kills", str(KILLS), "--seed", "1000", "--commands", names)
    assert found["faults"] == [] and found["kills"] == KILLS and sum(found["by_command"].values()) == KILLS


@pytest.mark.vllm
def test_answers_of_a_busy_server_equal_those_to_single_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    with Server(str(tiny_model(tmp_path)), arguments=OPTIONS, log=tmp_path / "server.log") as server:
        counts, wrong, memory = soak(server, num_requests=REQUESTS, num_clients=16)
        assert server.process.poll() is None
    assert wrong == []
    assert {kind: count / REQUESTS for kind, count in counts.items()} == {
        "whole": 0.5, "stream": 0.3, "cut": 0.1, "invalid": 0.1
    }  # fmt: skip
    # memory still grows during the first few hundred requests
    assert memory[-1] <= 1.01 * memory[2] or REQUESTS < 2000
