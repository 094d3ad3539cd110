"""Real vLLM on tiny models: it answers over HTTP, it is measured, it may die, and nothing is left running."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ddp_benchmarks.conversations import draw_sample, read_conversations
from ddp_benchmarks.engine import Server
from ddp_benchmarks.processes import group_members
from ddp_vllm.errors import ServingError

pytestmark = pytest.mark.vllm
COMMAND = [sys.executable, "-c", "from ddp_vllm.cli import main; main()", "bench", "sharegpt"]
PATIENCE = 600  # seconds, for a busy machine
QUICK = ["--warmups", "1", "--no-warmup-round"]  # the default context of 2048 is cut to the model's 256
ENGINE = ["--", "--enforce-eager", "--dtype", "float32"]

_SAMPLE = """
import json, sys
from transformers import AutoTokenizer
from vllm.benchmarks.datasets import ShareGPTDataset
path, model, number, seed = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
requests = ShareGPTDataset(dataset_path=path, random_seed=seed).sample(AutoTokenizer.from_pretrained(model), number)
print("RESULT" + json.dumps([[r.prompt, r.prompt_len, r.expected_output_len] for r in requests]))
"""
_CHAT = """
import runpy, sys
options = {"enforce_eager": True, "dtype": "float32", "max_model_len": 128, "gpu_memory_utilization": 0.3}
runpy.run_path(sys.argv[1])["main"](sys.argv[2], "ice melts in the", **options)
"""


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No compiler: vLLM's sampler alone takes 15 s of two cores."""
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")


def running(text: str) -> list[int]:
    """Return the vLLM processes whose command line contains `text`."""
    numbers = (int(path.name) for path in Path("/proc").glob("[0-9]*"))
    return [number for number in numbers if text.encode() in (line := cmdline(number)) and b"vllm.entrypoints" in line]


def cmdline(process: int) -> bytes:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return b""


def wait_for(condition: Callable[[], Any], process: "subprocess.Popen[str]") -> Any:
    """Return the value of a condition once it holds, while a process runs."""
    deadline = time.monotonic() + PATIENCE
    while not (value := condition()):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.1)
    return value


@pytest.fixture
def start(tiny: Path, halved: Path, talks: Path, tmp_path: Path) -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """A function that starts `bench sharegpt` of the two tiny models; results go to results.json."""
    processes: list[subprocess.Popen[str]] = []
    command = [*COMMAND, "--dense", str(tiny), "--pruned", str(halved), "--dataset", str(talks)]
    command += ["-o", str(tmp_path / "results.json"), *QUICK]

    def start_one(*arguments: str) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [*command, *arguments, *ENGINE],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job in the background inherits none
        )
        processes.append(process)
        return process

    yield start_one
    for process in processes:
        process.kill()
        process.communicate()


def test_the_example_chats(tiny: Path, tmp_path: Path, run_in_vllm: Callable[..., str]) -> None:
    model = shutil.copytree(tiny, tmp_path / "chatty")
    (model / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    assert run_in_vllm(_CHAT, Path(__file__).parents[2] / "examples" / "chat.py", model).strip()


def test_a_server_answers_over_http_and_leaves_nothing(halved: Path) -> None:
    """Without `--trust-remote-code`, and as transformers answers."""
    tokenizer = AutoTokenizer.from_pretrained(halved)
    model = AutoModelForCausalLM.from_pretrained(halved, trust_remote_code=True, dtype=torch.float32).eval()
    ids = tokenizer("ice melts", return_tensors="pt")["input_ids"]
    expected = model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=1)[0, ids.shape[1] :]
    with Server(str(halved), arguments=ENGINE[1:]) as server:
        assert "--trust-remote-code" not in server.command
        answer = server.complete("ice melts", max_tokens=12)
        assert answer and answer == tokenizer.decode(expected, skip_special_tokens=True)
        with pytest.raises(ServingError, match=f"port {server.port} cannot be used"):
            Server(str(halved), port=server.port)
        assert len(list(group_members(server.process.pid))) >= 2  # the front end and the engine core
        facts = server.facts()
        os.killpg(server.process.pid, signal.SIGKILL)
        server.process.wait()
        with pytest.raises(ServingError, match="was killed by signal 9"):
            server.complete("ice")
    assert list(group_members(server.process.pid)) == []
    assert facts["kv_cache_tokens"] > 256
    assert facts["peak_memory_bytes"] > 2**28


def test_our_sample_is_vllms(tiny: Path, talks: Path, tmp_path: Path, run_in_vllm: Callable[..., str]) -> None:
    conversations = read_conversations(talks)
    (tmp_path / "all.json").write_text(json.dumps(conversations))
    theirs = json.loads(run_in_vllm(_SAMPLE, tmp_path / "all.json", tiny, 12, 7).partition("RESULT")[2].splitlines()[0])
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    sample = draw_sample(conversations, lambda text: len(tokenizer(text).input_ids), num_prompts=12, seed=7)
    assert [entry["conversations"][0]["value"] for entry in sample.entries] == [prompt for prompt, _, _ in theirs]
    assert sample.prompt_tokens == sum(length for _, length, _ in theirs)
    assert sample.output_tokens == sum(length for _, _, length in theirs)


def test_two_models_are_measured(halved: Path, tmp_path: Path, start: Callable[..., "subprocess.Popen[str]"]) -> None:
    process = start("--num-prompts", "50", "--pairs", "1", "--json")
    printed, errors = process.communicate()
    assert process.returncode == 0, errors
    assert "50 were requested, but no more are usable" in " ".join(printed.split())
    output = tmp_path / "results.json"
    found = json.loads(output.read_text())
    assert found["complete"] is True
    assert [run["label"] for run in found["runs"]] == ["dense", "halved"]
    tokens = found["sample"]["prompt_tokens"] + found["sample"]["output_tokens"]
    assert {run["raw"]["total_num_tokens"] for run in found["runs"]} == {tokens}
    assert {run["raw"]["num_requests"] for run in found["runs"]} == {40}
    verdict = found["verdicts"][0]["metrics"]["requests_per_second"]
    speeds = [run["raw"]["requests_per_second"] for run in found["runs"]]
    assert verdict["ratio"] == pytest.approx(speeds[1] / speeds[0])
    assert json.loads(printed.splitlines()[-1])["verdicts"][0]["sentence"] == verdict["sentence"]
    assert output.with_suffix(".png").stat().st_size > 5000
    assert running(str(halved)) == []


@pytest.mark.nightly
def test_a_killed_server_keeps_what_was_measured(
    tiny: Path, halved: Path, tmp_path: Path, start: Callable[..., "subprocess.Popen[str]"]
) -> None:
    output = tmp_path / "results.json"
    process = start("--mode", "serve", "--num-prompts", "8", "--request-rate", "inf,0.1")
    wait_for(lambda: output.exists() and json.loads(output.read_text())["runs"], process)
    server = next(number for number in running(str(tiny)) if b"serve\0" + str(tiny).encode() in cmdline(number))
    wait_for(lambda: any(b"\0bench\0" in cmdline(number) for number in running(str(tiny))), process)
    os.kill(server, signal.SIGKILL)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 8
    assert "the server died during the measurement; it was killed by signal 9" in errors
    found = json.loads(output.read_text())
    assert found["complete"] is False
    assert "killed by signal 9" in found["reason"]
    assert found["runs"][0]["metrics"]["requests_per_second"] > 0
    assert found["runs"][0]["metrics"]["p99_ttft_ms"] > 0
    assert "incomplete" in found["runs"][1]
    assert running(str(tiny)) == running(str(halved)) == []


@pytest.mark.nightly
def test_interrupt_stops_the_server_too(
    tiny: Path, tmp_path: Path, start: Callable[..., "subprocess.Popen[str]"]
) -> None:
    process = start("--mode", "serve", "--num-prompts", "4")
    wait_for(lambda: running(str(tiny)), process)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=PATIENCE)
    assert process.returncode != 0
    assert json.loads((tmp_path / "results.json").read_text())["reason"] == "interrupted"
    assert running(str(tiny)) == []
