"""Many clients at once, invalid requests and disconnects among them, on an unevenly pruned model in real vLLM."""

from pathlib import Path

import pytest

from ddp_benchmarks.engine import Server
from soak import OPTIONS, soak, tiny_model


@pytest.mark.nightly
@pytest.mark.vllm
def test_answers_of_a_busy_server_equal_those_to_single_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    with Server(str(tiny_model(tmp_path)), arguments=[*OPTIONS, "--enforce-eager"]) as server:
        report = soak(server, num_requests=200, num_clients=16)
        assert server.process.poll() is None
    assert report.wrong == []
    assert report.counts == {"whole": 100, "stream": 60, "cut": 20, "invalid": 20}
