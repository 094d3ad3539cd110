"""Real vLLM on tiny models: it answers over HTTP, it is measured, it may die, and nothing is left running."""

import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval_tasks import write_tasks
from transformers import AutoModelForCausalLM, AutoTokenizer

import ddp_vllm
from ddp_benchmarks import evaluate
from ddp_benchmarks.conversations import draw_sample, read_conversations
from ddp_benchmarks.engine import Server
from ddp_benchmarks.processes import group_members
from demo import complete

pytestmark = pytest.mark.vllm
COMMAND = [sys.executable, "-c", "from ddp_vllm.cli import main; main()", "bench", "sharegpt"]
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


@pytest.mark.nightly
def test_a_server_answers_over_http_and_leaves_nothing(halved: Path, tmp_path: Path) -> None:
    """Without `--trust-remote-code`, and as transformers answers."""
    tokenizer = AutoTokenizer.from_pretrained(halved)
    model = AutoModelForCausalLM.from_pretrained(halved, trust_remote_code=True, dtype=torch.float32).eval()
    ids = tokenizer("ice melts", return_tensors="pt")["input_ids"]
    expected = model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=1)[0, ids.shape[1] :]
    with Server(str(halved), arguments=ENGINE[1:], log=tmp_path / "log") as server:
        assert "--trust-remote-code" not in server.command
        answer = complete(server, "ice melts", max_tokens=12)
        assert answer and answer == tokenizer.decode(expected, skip_special_tokens=True)
        assert len(list(group_members(server.process.pid))) >= 2  # the front end and the engine core
        facts = server.facts()
        os.killpg(server.process.pid, signal.SIGKILL)
        server.process.wait()
        assert server.failure().startswith("was killed by signal 9")
    assert list(group_members(server.process.pid)) == []
    assert facts["kv_cache_tokens"] > 256


@pytest.mark.parametrize("servers", ["commands_in_forks", pytest.param("environment", marks=pytest.mark.nightly)])
def test_requests_over_http_are_measured_and_judged(
    servers: str, tiny: Path, halved: Path, talks: Path, tmp_path: Path, request: pytest.FixtureRequest,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Each model by a server of its own; `compare` shows the verdict."""
    request.getfixturevalue(servers)
    output = tmp_path / "served.json"
    results = ddp_vllm.bench(
        tiny, halved, output=output, dataset=talks, mode="serve", request_rate=64, num_prompts=6, pairs=1,
        warmups=0, warmup_round=False, engine_arguments=ENGINE[1:],
    )  # fmt: skip
    assert results["complete"] and json.loads(output.read_text()) == json.loads(json.dumps(results))
    assert [(run["label"], run["load"]) for run in results["runs"]] == [
        (label, "64 requests/s") for label in ("dense", "halved")
    ]
    tokens = results["sample"]["prompt_tokens"] + results["sample"]["output_tokens"]
    assert {run["raw"]["total_input_tokens"] + run["raw"]["total_output_tokens"] for run in results["runs"]} == {tokens}
    assert all(run["metrics"]["p99_ttft_ms"] > 0 and run["engine"]["startup_seconds"] > 1 for run in results["runs"])
    assert "time per output token: " in results["verdicts"][0]["sentence"] and capfd.readouterr().out == ""
    page = ddp_vllm.compare(halved, results=output, output=tmp_path / "page")
    assert page.pruned[0].speed and page.pruned[0].speed.verdict.load == "64 requests/s"


PLUGINS = Path(__file__).parents[1] / "plugins"
EVALUATE = """
import json, pickle, sys
from functools import partial
from pathlib import Path
import lm_eval.tasks
sys.path.insert(0, sys.argv[2])
import serve_tiny
from ddp_benchmarks.evaluate import _evaluate_tasks
serve_tiny.skip_inspection()
lm_eval.tasks.TaskManager = partial(lm_eval.tasks.TaskManager, include_defaults=False)  # of 14,000 files
print("RESULT" + json.dumps(_evaluate_tasks(pickle.loads(Path(sys.argv[1]).read_bytes()))))
"""


def test_vllm_evaluates_tasks(
    halved: Path, cache: Path, tmp_path: Path, run_in_vllm: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_alone(_: object, settings: evaluate.EvalSettings) -> Any:
        (tmp_path / "settings").write_bytes(pickle.dumps(settings))
        words, environment = (tmp_path / "settings", PLUGINS), {"HF_HOME": tmp_path / "hf", "DDP_VLLM_CACHE": cache}
        printed = run_in_vllm(EVALUATE, *words, **{name: str(path) for name, path in environment.items()})
        return json.loads(printed.partition("RESULT")[2].splitlines()[0])

    monkeypatch.setattr(evaluate, "run_alone", run_alone)  # where vLLM is imported already
    tasks = write_tasks(tmp_path / "tasks", "riddles", num_rows=6)
    scored = ddp_vllm.evaluate(
        halved, tasks="riddles", include_path=tasks, backend="vllm", dtype="float32", max_length=64,
        output=tmp_path / "out", model_args=("enforce_eager=True",),
    )  # fmt: skip
    assert scored["results"]["riddles"]["acc,none"] == 0.5  # as with transformers: it always takes the same answer
    assert scored["ddp_vllm"]["settings"]["backend"] == "vllm" and scored["n-samples"]["riddles"]["effective"] == 6


def test_our_sample_is_vllms(tiny: Path, talks: Path, tmp_path: Path, run_in_vllm: Callable[..., str]) -> None:
    conversations = read_conversations(talks)
    (tmp_path / "all.json").write_text(json.dumps(conversations))
    theirs = json.loads(run_in_vllm(_SAMPLE, tmp_path / "all.json", tiny, 12, 7).partition("RESULT")[2].splitlines()[0])
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    sample = draw_sample(conversations, lambda text: len(tokenizer(text).input_ids), num_prompts=12, seed=7)
    assert [entry["conversations"][0]["value"] for entry in sample.entries] == [prompt for prompt, _, _ in theirs]
    assert sample.prompt_tokens == sum(length for _, length, _ in theirs)
    assert sample.output_tokens == sum(length for _, _, length in theirs)


@pytest.mark.nightly
def test_two_models_are_measured(tiny: Path, halved: Path, talks: Path, tmp_path: Path) -> None:
    output = tmp_path / "results.json"
    models = ["--dense", str(tiny), "--pruned", str(halved), "--dataset", str(talks), "-o", str(output)]
    command = [*COMMAND, *models, *QUICK, "--num-prompts", "50", "--pairs", "1", "--json", *ENGINE]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "50 were requested, but no more are usable" in " ".join(done.stdout.split())
    measured = json.loads(output.read_text())
    assert measured["complete"] is True
    assert [run["label"] for run in measured["runs"]] == ["dense", "halved"]
    tokens = measured["sample"]["prompt_tokens"] + measured["sample"]["output_tokens"]
    assert {run["raw"]["total_num_tokens"] for run in measured["runs"]} == {tokens}
    assert {run["raw"]["num_requests"] for run in measured["runs"]} == {40}
    verdict = measured["verdicts"][0]["metrics"]["requests_per_second"]
    speeds = [run["raw"]["requests_per_second"] for run in measured["runs"]]
    assert verdict["ratio"] == pytest.approx(speeds[1] / speeds[0])
    assert json.loads(done.stdout.splitlines()[-1])["verdicts"][0]["sentence"] == verdict["sentence"]
