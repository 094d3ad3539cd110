"""What a user can get wrong before an engine starts, and what a command leaves behind when SIGKILL ends it: nothing."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import assert_refused, invoke
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from ddp_benchmarks.sharegpt import BenchSettings, results_file
from ddp_vllm.errors import ModelError
from ddp_vllm.model_facts import tokens_differ

SHAREGPT = "bench sharegpt --dense {tiny} --pruned"
PROFILE = "profile {tiny} -o new.json"
REFUSED = {  # words of a command, which writes nothing -> exit code, and a part of the message
    f"{SHAREGPT} b -o new.json --num-prompts 0": (2, "--num-prompts is 0; it must be at least 1"),
    f"{SHAREGPT} b -o new.json -- --enable-prefix-caching": (2, "--enable-prefix-caching after -- is set"),
    f"{SHAREGPT} b -o new.json -- --model=gpt2": (2, "--model after -- is set by this measurement; omit it"),
    f"{SHAREGPT} ./nowhere -o new.json": (3, "nowhere is not the folder of a model"),
    f"{SHAREGPT} {{tiny}}": (2, "is not pruned; pass a folder of ddp-vllm prune, or -o FILE"),
    f"{SHAREGPT} b -o new.json --mode serve --request-rate 0": (2, "--request-rate is 0.0; it must be at least 0.001"),
    f"{PROFILE} --concurrency 0": (2, "--concurrency is 0; it must be at least 1"),
    f"{PROFILE} --context-length 10": (2, "--context-length is 10; it must be at least the 96 steps"),
    f"{PROFILE} --context-length 99999": (2, "the model takes 256; pass a lower --context-length"),
    f"{PROFILE} --steps 8": (2, "--steps is 8; it must be at least 12"),
    f"{PROFILE} -- --model gpt2": (2, "--model after -- is set by this measurement"),
    "profile {tiny} -o file": (5, "exists"),
    "eval {tiny} --against {tiny} --min-retained 97": (2, "--min-retained 97 is not a fraction"),
    "eval {tiny} --max-length 64 --include-path . -o file": (5, "choose another output"),
    "eval {tiny} --model-args dtype=auto,max_length=64 -o new": (2, "--model-args sets dtype, which is set already"),
    "eval {tiny} --model-args pretrained=other -o new": (2, "sets pretrained, which is set already; pass MODEL"),
    "eval {tiny} --model-args a=1,a=2 -o new": (2, "sets a, which is set already; pass it once"),
    "eval other --tasks piqa -o new": (3, "another tool pruned it: its config.json has drop_attn_list"),
    "eval lacking --text file -o new": (3, "model-2.safetensors is not a file; download it again"),
    "eval lacking --tasks piqa -o new": (3, "model-2.safetensors is not a file; download it again"),
    f"{SHAREGPT} lacking -o new.json": (3, "model-2.safetensors is not a file; download it again"),
    "eval unknown --tasks piqa -o new": (3, "config.json has no model_type; download the model again"),
    "eval twice --tasks piqa -o new": (3, "twice: config.json: ddp_widths is no object"),
}


def test_a_context_that_a_model_does_not_take_is_lowered_aloud(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.json").write_text("[]")
    words = ["bench", "sharegpt", "--dense", tiny, "--pruned", tiny, "--dataset", tmp_path / "empty.json"]
    for length, told in ((256, False), (2048, True)):
        result = invoke(*words, "--max-model-len", length, "-o", tmp_path / "new.json")
        assert ("the context is 256 tokens instead of 2,048" in result.stdout) == told, result.output
        assert result.exit_code == 4, result.output


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_measured_is_refused(
    words: str, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folders = {"other", "twice", "lacking", "unknown"}
    for name in folders:
        (tmp_path / name).mkdir()
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = sizes | {"model_type": "llama", "drop_attn_list": [1]}
    (tmp_path / "other/config.json").write_text(json.dumps(config))
    (tmp_path / "twice/config.json").write_text(json.dumps(sizes | {"model_type": "llama", "ddp_widths": []}))
    (tmp_path / "unknown/config.json").write_text(json.dumps(sizes))
    (tmp_path / "lacking/config.json").write_text(json.dumps(sizes | {"model_type": "llama"}))
    index = {"weight_map": {"model.norm.weight": "model-2.safetensors"}}
    (tmp_path / "lacking/model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "file").write_text("mine")
    before = sorted(tiny.iterdir())
    code, reason = REFUSED[words]
    assert_refused(invoke(*words.format(tiny=tiny).split()), code, reason)
    assert sorted(tiny.iterdir()) == before and (tmp_path / "file").read_text() == "mine"
    assert {path.name for path in tmp_path.iterdir()} == {"file", *folders}


def test_a_word_is_no_number(tiny: Path) -> None:
    result = invoke("profile", tiny, "--concurrency", "many")
    assert result.exit_code == 2 and "neither a number nor several" in result.stderr


def test_models_with_different_tokens_are_told_apart(tmp_path: Path) -> None:
    def write_tokenizer(name: str, vocab: dict[str, int], rows: int = 4) -> str:
        (tmp_path / name).mkdir()
        tokenizer = Tokenizer(WordLevel(vocab, unk_token="x"))
        tokenizer.add_special_tokens(["<s>"])
        tokenizer.save(str(tmp_path / name / "tokenizer.json"))
        (tmp_path / name / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": rows}))
        return str(tmp_path / name)

    first = write_tokenizer("a", {"x": 0, "y": 1})
    assert not tokens_differ(first, write_tokenizer("b", {"y": 1, "x": 0}))
    assert "different tokens (3 and 4; '<s>' is 2 and 3)" in tokens_differ(
        first, write_tokenizer("c", {"x": 0, "y": 1, "z": 2})
    )
    assert "'x' is 0 and 1" in tokens_differ(first, write_tokenizer("d", {"y": 0, "x": 1}))
    assert "have 4 and 8 rows" in tokens_differ(first, write_tokenizer("e", {"y": 1, "x": 0}, rows=8))
    (tmp_path / "b/tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"the tokenizer of .* cannot be read"):
        tokens_differ(first, str(tmp_path / "b"))


def test_with_an_output_a_dense_model_is_compared_with_itself(tiny: Path, tmp_path: Path) -> None:
    settings = BenchSettings(dense=str(tiny), pruned=(str(tiny),))
    assert results_file(settings, tmp_path / "aa.json", overwrite=False) == tmp_path / "aa.json"


_WAIT = """
import os, signal, sys
from ddp_benchmarks.processes import terminable
signal.signal(signal.SIGHUP, getattr(signal, sys.argv[1]))
with terminable():
    try:
        print("ready", flush=True)
        os.read(0, 1)  # until the test closes it
    except KeyboardInterrupt:
        print("stopping", flush=True)
        os.read(0, 1)  # stopping an engine; the shell's signal comes after the kernel's
        print("stopped", flush=True)
"""


@pytest.mark.parametrize(("before", "said"), [("SIG_DFL", "stopping\n"), ("SIG_IGN", "")])  # the last by nohup
def test_a_lost_terminal_stops_the_engine_unless_ignored(before: str, said: str) -> None:
    command = [sys.executable, "-c", _WAIT, before]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdin and run.stdout and run.stdout.readline() == "ready\n"
        run.send_signal(signal.SIGHUP)
        assert not said or run.stdout.readline() == said
        run.send_signal(signal.SIGHUP)
        run.stdin.close()
        assert run.stdout.read() == said.replace("stopping", "stopped")
    assert run.returncode == 0


PATIENCE = 600  # seconds, for a busy machine
ENGINE = """
import time
from pathlib import Path
from ddp_benchmarks.engine import Engine
with Engine([], log=Path("log"), module="started"):
    time.sleep(3600)
"""
EVAL = """
import runpy, sys
from ddp_benchmarks.evaluate import run_alone
if __name__ == "__main__":
    run_alone(runpy.run_module, "started")
"""
STARTED = """
import os, subprocess, time
child = subprocess.Popen(["/bin/sleep", "3600"])  # as an engine has its core
with open(os.environ["STARTED"], "w") as file:
    file.write(f"{os.getpid()} {child.pid}")
time.sleep(3600)
"""


def wait_for(condition: Callable[[], Any]) -> Any:
    """Return a condition's value once it holds; what waits here sleeps six times as long unless it is killed."""
    deadline = time.monotonic() + PATIENCE
    while not (value := condition()):
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.05)
    return value


def is_alive(process: str) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.parametrize("parent", [ENGINE, EVAL], ids=["an engine", "eval"])
def test_what_a_killed_command_started_is_killed_too(
    parent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = tmp_path / "pids"
    (tmp_path / "started.py").write_text(STARTED)
    (tmp_path / "parent.py").write_text(parent)  # a process that is spawned reads it again
    monkeypatch.setenv("STARTED", str(note))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    process = subprocess.Popen([sys.executable, str(tmp_path / "parent.py")], cwd=tmp_path)
    try:
        leader, child = wait_for(lambda: note.exists() and note.read_text()).split()
        assert is_alive(leader) and is_alive(child)
    finally:
        process.kill()
        process.wait()
    try:
        wait_for(lambda: not is_alive(leader) and not is_alive(child))
    finally:
        for number in filter(is_alive, (leader, child)):
            os.kill(int(number), signal.SIGKILL)
