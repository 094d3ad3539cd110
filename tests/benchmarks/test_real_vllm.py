"""Real vLLM on a tiny model: it answers, it is measured, it may die, and nothing is left running."""

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


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No compiler: vLLM's sampler alone takes 15 s of two cores."""
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")


def running(text: str) -> list[int]:
    """Return the vLLM processes whose command line contains `text`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().decode(errors="replace")
        except OSError:
            continue
        if text in line and "vllm.entrypoints" in line:
            found.append(int(path.parent.name))
    return found


def wait_for(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + PATIENCE
    while not (value := condition()):
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.1)
    return value


@pytest.fixture
def start(tiny: Path, talks: Path, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """A function that starts `bench sharegpt` of the tiny model against itself; results go to results.json."""
    processes: list[subprocess.Popen[str]] = []
    command = [*COMMAND, "--dense", str(tiny), "--pruned", str(tiny), "--dataset", str(talks)]
    command += ["-o", str(tmp_path / "results.json"), *QUICK]

    def start_one(*arguments: str) -> subprocess.Popen[str]:
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
        process.wait()
        for stream in (process.stdout, process.stderr):
            if stream:
                stream.close()


def test_the_example_chats(tiny: Path, tmp_path: Path) -> None:
    model = shutil.copytree(tiny, tmp_path / "chatty")
    (model / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    example = Path(__file__).parents[2] / "examples" / "chat.py"
    engine = "enforce_eager=True, dtype='float32', max_model_len=128"
    code = f"import runpy; runpy.run_path({str(example)!r})['main']({str(model)!r}, 'ice melts in the', {engine})"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0 and result.stdout.strip(), result.stderr[-3000:]


def test_server_answers_and_leaves_nothing(tiny: Path) -> None:
    with Server(str(tiny), arguments=ENGINE[1:]) as server:
        text = server.complete("ice melts", max_tokens=5)
        assert text == server.complete("ice melts", max_tokens=5)
        with pytest.raises(ServingError, match=f"port {server.port} cannot be used"):
            Server(str(tiny), port=server.port)
        members = list(group_members(server.process.pid))
        assert len(members) >= 2  # the front end and the engine core
        facts = server.facts()
        os.killpg(server.process.pid, signal.SIGKILL)
        with pytest.raises(ServingError, match="was killed by signal 9"):
            wait_for(lambda: server.process.poll() is not None) and server.complete("ice")
    assert list(group_members(server.process.pid)) == []
    assert facts["kv_cache_tokens"] > 256
    assert facts["peak_memory_bytes"] > 2**28


def test_server_that_cannot_start_says_why(tiny: Path) -> None:
    with (
        pytest.raises(ServingError, match="did not start") as caught,
        Server(str(tiny), arguments=["--max-model-len", "9999"]),
    ):
        pass
    assert "max_model_len" in str(caught.value)  # vLLM's own reason


def test_our_sample_is_vllms(tiny: Path, talks: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    conversations = read_conversations(talks)
    (tmp_path / "all.json").write_text(json.dumps(conversations))
    command = [sys.executable, "-c", _SAMPLE, str(tmp_path / "all.json"), str(tiny), "12", "7"]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    theirs = json.loads(output[output.index("RESULT") + 6 :].splitlines()[0])
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    sample = draw_sample(conversations, lambda text: len(tokenizer(text).input_ids), num_prompts=12, seed=7)
    assert [entry["conversations"][0]["value"] for entry in sample.entries] == [prompt for prompt, _, _ in theirs]
    assert sample.prompt_tokens == sum(length for _, length, _ in theirs)
    assert sample.output_tokens == sum(length for _, _, length in theirs)


def test_a_model_against_itself(tiny: Path, tmp_path: Path, start: Callable[..., subprocess.Popen[str]]) -> None:
    process = start("--num-prompts", "50", "--pairs", "1", "--json")
    printed, errors = process.communicate()
    assert process.returncode == 0, errors
    assert "50 were requested, but no more are usable" in " ".join(printed.split())
    output = tmp_path / "results.json"
    found = json.loads(output.read_text())
    assert found["complete"] is True
    assert [run["label"] for run in found["runs"]] == ["dense", "tiny-llama"]
    tokens = found["sample"]["prompt_tokens"] + found["sample"]["output_tokens"]
    assert {run["raw"]["total_num_tokens"] for run in found["runs"]} == {tokens}
    assert {run["raw"]["num_requests"] for run in found["runs"]} == {40}
    verdict = found["verdicts"][0]["metrics"]["requests_per_second"]
    speeds = [run["raw"]["requests_per_second"] for run in found["runs"]]
    assert verdict["ratio"] == pytest.approx(speeds[1] / speeds[0])
    assert 0.2 < verdict["ratio"] < 5
    assert json.loads(printed.splitlines()[-1])["verdicts"][0]["sentence"] == verdict["sentence"]
    assert output.with_suffix(".png").stat().st_size > 5000
    assert running(str(tiny)) == []


def test_a_killed_server_keeps_what_was_measured(
    tiny: Path, tmp_path: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    output = tmp_path / "results.json"
    process = start("--mode", "serve", "--num-prompts", "8", "--request-rate", "inf,0.1")
    wait_for(lambda: output.exists() and json.loads(output.read_text())["runs"])
    server = next(number for number in running(str(tiny)) if b"serve\0" + str(tiny).encode() in cmdline(number))
    wait_for(lambda: any(b"\0bench\0" in cmdline(number) for number in running(str(tiny))))
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
    assert running(str(tiny)) == []


def test_interrupt_stops_the_server_too(
    tiny: Path, tmp_path: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    process = start("--mode", "serve", "--num-prompts", "4")
    wait_for(lambda: running(str(tiny)))
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=PATIENCE)
    assert process.returncode != 0
    assert json.loads((tmp_path / "results.json").read_text())["reason"] == "interrupted"
    assert running(str(tiny)) == []


def cmdline(process: int) -> bytes:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return b""


def test_killing_the_demo_ends_the_benchmark_it_runs_and_that_ones_server(
    tiny: Path, talks: Path, tmp_path: Path
) -> None:
    words = ["bench", "sharegpt", "--dense", str(tiny), "--pruned", str(tiny), "--dataset", str(talks)]
    words += ["-o", str(tmp_path / "results.json"), "--mode", "serve", *QUICK, *ENGINE]
    code = "import sys, demo; demo.command(*sys.argv[1:])"
    process = subprocess.Popen([sys.executable, "-c", code, *words], stdout=subprocess.DEVNULL)
    try:
        server = wait_for(lambda: running(str(tiny)))[0]
        wait_for(lambda: any(b"EngineCore" in cmdline(member) for member in group_members(server)))
        benchmark = int(Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split()[1])
        assert b"\0bench\0" in cmdline(benchmark)
    finally:
        process.kill()
        process.wait()
    wait_for(lambda: not list(group_members(server)) and not cmdline(benchmark))
    assert running(str(tiny)) == []
