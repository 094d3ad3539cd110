"""What a user can get wrong before an engine starts, and what an engine must leave behind: nothing."""

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from commands import assert_refused, invoke
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from ddp_benchmarks.engine import choose_port
from ddp_benchmarks.evaluate import EvalSettings
from ddp_benchmarks.models import check_vocabularies
from ddp_benchmarks.sharegpt import BenchSettings, results_file
from ddp_vllm.errors import ModelError, OutputError, ServingError, SettingError


def test_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ServingError, match=f"port {port} cannot be used.*pass another --port"):
            choose_port(port)
        assert choose_port() != port
    with pytest.raises(ServingError):
        choose_port(70000)


def write_tokenizer(folder: Path, vocab: dict[str, int]) -> str:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    tokenizer = Tokenizer(WordLevel(vocab, unk_token="x"))
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return str(folder)


def test_a_folder_that_another_tool_pruned_is_not_evaluated_as_its_stock_class(tmp_path: Path) -> None:
    config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
              "num_attention_heads": 4, "drop_attn_list": [1]}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"another tool pruned it: its config\.json has drop_attn_list"):
        EvalSettings(model=str(tmp_path), tasks=("piqa",), output=tmp_path / "out").check()


def test_different_vocabularies_are_refused(tmp_path: Path) -> None:
    first = write_tokenizer(tmp_path / "a", {"x": 0, "y": 1})
    check_vocabularies(first, write_tokenizer(tmp_path / "b", {"y": 1, "x": 0}))
    with pytest.raises(ModelError, match=r"different vocabularies \(3 and 4 tokens"):
        check_vocabularies(first, write_tokenizer(tmp_path / "c", {"x": 0, "y": 1, "z": 2}))
    with pytest.raises(ModelError, match="'x' is 0 and 1"):
        check_vocabularies(first, write_tokenizer(tmp_path / "d", {"y": 0, "x": 1}))
    (tmp_path / "b" / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read"):
        check_vocabularies(first, str(tmp_path / "b"))


REFUSED: dict[str, tuple[list[str], int, str]] = {  # options of bench sharegpt, exit code, what is said
    "no prompts": (["--num-prompts", "0"], 2, "--num-prompts is 0; it must be at least 1"),
    "a cache that answers the warm-up": (
        ["--", "--enable-prefix-caching"],
        2,
        "--enable-prefix-caching after -- is set",
    ),
    "another model": (["--", "--model=gpt2"], 2, "--model after -- is set by this measurement; omit it"),
    "a folder that is not there": (["--pruned", "./nowhere"], 3, "nowhere is not the folder of a model"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_measured_is_refused(case: str, tiny: Path, tmp_path: Path) -> None:
    options, code, reason = REFUSED[case]
    command = ["bench", "sharegpt", "--dense", str(tiny), "-o", str(tmp_path / "out.json"), *options]
    if "--pruned" not in options:
        command[2:2] = ["--pruned", "b"]
    result = invoke(*command)
    assert result.exit_code == code and reason in result.stderr, result.output
    assert [*tmp_path.iterdir()] == []


def test_a_context_beyond_the_models_starts_no_engine(tiny: Path, tmp_path: Path) -> None:
    result = invoke("profile", tiny, "--context-length", "99999", "-o", tmp_path / "profile.json")
    assert_refused(result, 2, "the model takes 256; pass a lower --context-length")


def test_a_dense_folder_is_not_measured_as_pruned_nor_written_to(tiny: Path, tmp_path: Path) -> None:
    before = sorted(tiny.iterdir())
    command = ["bench", "sharegpt", "--dense", str(tiny), "--pruned", str(tiny)]
    for more, code, words in (
        ([], SettingError.exit_code, "is not pruned; pass a folder of ddp-vllm prune, or -o FILE"),
        (["-o", str(tiny / "out.json")], OutputError.exit_code, "would be in the folder of a dense model"),
    ):
        result = invoke(*command, *more)
        assert result.exit_code == code and words in result.stderr, result.output
    assert sorted(tiny.iterdir()) == before
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


@pytest.mark.parametrize(
    ("before", "number", "said"),
    [
        ("SIG_DFL", signal.SIGHUP, "stopping\n"),
        ("SIG_IGN", signal.SIGHUP, ""),  # nohup
    ],
)
def test_a_lost_terminal_stops_the_engine_unless_ignored(before: str, number: int, said: str) -> None:
    command = [sys.executable, "-c", _WAIT, before]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdin and run.stdout and run.stdout.readline() == "ready\n"
        run.send_signal(number)
        assert not said or run.stdout.readline() == said
        if number == signal.SIGHUP:
            run.send_signal(number)
        run.stdin.close()
        assert run.stdout.read() == said.replace("stopping", "stopped")
    assert run.returncode == 0
