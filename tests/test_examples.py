"""Every example runs in a folder of its own, on tiny random models."""

import contextlib
import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from urllib.request import urlopen

import pytest
from commands import VLLM_SETTINGS, write_lines
from transformers import LlamaConfig, MixtralConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from ddp_benchmarks.engine import CPU_DEFAULTS
from random_models import train_tokenizer, write_models

Example = Callable[..., str]
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("short_answers")]

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SIZES = {
    "vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1, "initializer_range": 0.2,
}  # fmt: skip
SMALL = ["--steps", "4", "--batch-size", "2", "--seq-len", "32"]


def turn(role: str, number: int) -> dict[str, str]:
    return {"role": role, "content": f"ticket {number}: " + f"the {role} number {number * 7} writes again. " * 6}


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations, some of the last without a turn of a user, as in ShareGPT."""
    roles = [["assistant"] if number in (55, 59) else ["user", "assistant"] for number in range(60)]
    rows = [{"messages": [turn(role, number) for role in names]} for number, names in enumerate(roles)]
    return write_lines(tmp_path_factory.mktemp("chats") / "chats.jsonl", rows)


def save(folder: Path, config: LlamaConfig | MixtralConfig, text: Path) -> Path:
    """Write a random model with a tokenizer that llama.cpp knows and a chat template."""
    special = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    lines = text.read_text(encoding="utf-8").splitlines(keepends=True)
    tokenizer = train_tokenizer(lines, special=[*special.values()], chat_template=CHATML, **special)
    write_models({folder: config}, tokenizer)
    return folder


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory, chats: Path) -> Path:
    return save(tmp_path_factory.mktemp("model") / "dense", LlamaConfig(**SIZES, intermediate_size=128), chats)


def environment_of(folder: Path) -> dict[str, str]:
    """Return the environment of a user who installed ddp-vllm, with every cache in `folder`."""
    commands = folder / "bin"
    commands.mkdir(exist_ok=True)
    script = commands / "ddp-vllm"  # as pip installs it
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ddp_vllm "$@"\n')
    script.chmod(0o755)
    packages = [ROOT, ROOT / "prune", ROOT / "plugins", ROOT / "benchmarks"]
    path = os.pathsep.join([str(commands), str(Path(sys.executable).parent), os.environ["PATH"]])
    return os.environ | VLLM_SETTINGS | {
        "PYTHONPATH": os.pathsep.join(map(str, packages)), "PATH": path,
        "DDP_VLLM_CACHE": str(folder / "cache"), "VLLM_CACHE_ROOT": str(folder / "vllm"), "HF_HUB_OFFLINE": "1",
    }  # fmt: skip


def run_script(folder: Path, script: Path, **settings: str) -> "subprocess.CompletedProcess[str]":
    command, environment = ["bash", str(script)], environment_of(folder) | settings
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.fixture
def example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cache: Path
) -> Example:
    """Run an example in a folder of its own, in this process, which has imported what is slow to import."""

    def run_example(name: str, *words: object) -> str:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [name, *map(str, words)])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run_example


def test_support_desk_asks_only_what_users_asked(dense: Path, chats: Path, tmp_path: Path, example: Example) -> None:
    printed = example("support_desk.py", "--model", dense, "--data", chats, "--output", "desk", *SMALL)
    assert f"bench sharegpt --dense {dense} --pruned desk\n" in printed  # unwrapped
    assert "10. ticket 58: the user" in printed and "1. ticket 48: the user" in printed
    assert len((tmp_path / "desk-training.jsonl").read_text().splitlines()) == 50
    assert (tmp_path / "desk" / "report.html").exists()


@pytest.mark.usefixtures("no_pictures")
def test_choose_a_size(dense: Path, chats: Path, tmp_path: Path, example: Example) -> None:
    words = ["--model", dense, "--data", chats, "--output", "sizes", "--sizes", "0.2,0.4", "--tolerance", "100"]
    printed = example("choose_a_size.py", *words, "--min-agreement", "0", *SMALL)
    assert "chosen: sizes/sparsity-0.4" in printed and (tmp_path / "sizes.html").exists()
    assert re.search(r"sparsity-0.2: [\d,]+ parameters, perplexity × [\d.]+, top-1 agreement [\d.]+%", printed)


WRONG = {  # example with its words -> what it prints instead of a traceback
    "choose_a_size.py --sizes 2": "sparsity is 2.0; it must lie between 0 and 1",
    "choose_a_size.py --data gone.jsonl": "gone.jsonl is not a file",
    "mixture.py --sparsity 2": "sparsity is 2.0; it must lie between 0 and 1",
    "mixture.py --whole-experts": "is not a mixture of experts",
    "support_desk.py --speedup 0.5": "speedup is 0.5; it must be above 1",
    "support_desk.py --data text.txt": "text.txt cannot be read (Expecting value",
    "support_desk.py --data gone.jsonl": "gone.jsonl cannot be read (",
    "support_desk.py --data list.jsonl": "list.jsonl cannot be read (",
}


@pytest.mark.parametrize("words", WRONG)
def test_a_mistake_is_one_line(words: str, dense: Path, chats: Path, tmp_path: Path, example: Example) -> None:
    (tmp_path / "text.txt").write_text("A text.\n")
    (tmp_path / "list.jsonl").write_text("[1]\n")
    name, *more = words.split()
    with pytest.raises(SystemExit) as ended:
        example(name, "--model", dense, "--data", chats, "--output", "out", *more)
    assert WRONG[words] in str(ended.value) and "\n" not in str(ended.value)


@pytest.mark.parametrize("more", [pytest.param([], marks=pytest.mark.nightly), ["--whole-experts"]])
@pytest.mark.usefixtures("no_pictures")
def test_mixture(more: list[str], chats: Path, tmp_path: Path, example: Example) -> None:
    config = MixtralConfig(**SIZES, intermediate_size=32, num_local_experts=4, num_experts_per_tok=2)
    model = save(tmp_path / "dense", config, chats)
    printed = example("mixture.py", "--model", model, "--data", chats, "--output", "small", *SMALL, *more)
    assert ("layer 1: 3 of 4 experts, 32 to 32 channels" in printed) == bool(more) and "layer 1: " in printed


@pytest.mark.vllm
@pytest.mark.nightly
def test_speedrun(dense: Path, chats: Path, tmp_path: Path) -> None:
    short = {"STEPS": "4", "SMALL": "--batch-size 2 --seq-len 32", "TEST_LINES": "20", "RECOVER_MINUTES": "0.02"}
    result = run_script(tmp_path, EXAMPLES / "speedrun.sh", MODEL=str(dense), CHATS=str(chats), **short)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert "=== 8. Serve it" in result.stdout and (tmp_path / "speedrun" / "recovered.gguf").exists()


def served(folder: Path, script: Path, port: int, **settings: str) -> tuple[str, list[str]]:
    """Run the script of docs/8b.md until its server answers; return the served folder and what the script printed."""
    log = folder / "log.txt"
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            ["bash", script], cwd=folder, env=environment_of(folder) | CPU_DEFAULTS | settings,
            stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
        try:
            while process.poll() is None:
                with contextlib.suppress(OSError):
                    urlopen(f"http://localhost:{port}/health").close()
                    (model,) = json.load(urlopen(f"http://localhost:{port}/v1/models"))["data"]
                    assert model["id"] == "my-model"
                    return str(model["root"]), log.read_text().splitlines()
                time.sleep(0.5)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGINT)
            process.wait(60)
    raise AssertionError(f"exit code {process.returncode}: {log.read_text()[-9000:]}")


@pytest.mark.vllm
@pytest.mark.nightly
def test_the_script_of_the_page_on_an_8b(dense: Path, chats: Path, tmp_path: Path) -> None:
    """From a LoRA adapter to a server, over a missed limit, and back to the dense model. Tasks require the Hub."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(AutoModelForCausalLM.from_pretrained(dense), LoraConfig(target_modules=["q_proj"]))
    model.save_pretrained(tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = "/another/machine"  # and it has no tokenizer
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    page = (ROOT / "docs" / "8b.md").read_text(encoding="utf-8")
    script = tmp_path / "8b.sh"
    script.write_text(re.findall(r"```bash\n(#!.*?)```", page, re.DOTALL)[0])
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    settings = {
        "MODEL": str(dense), "ADAPTER": "adapter", "CHATS": str(chats), "GENERAL": "",
        "BUDGET": "--sparsity 0.3 --seq-len 32 --batch-size 2",
        "CONCURRENCY": "2", "LENGTH": "96", "MINUTES": "0.5", "TASKS": "",
        "SERVER": f"--port {port} --max-model-len 128 --enforce-eager",
    }  # fmt: skip
    short = run_script(tmp_path, script, **settings | {"LENGTH": "100000"})
    assert short.returncode == 4 and "has fewer than LENGTH=100000 words; give more chats" in short.stdout
    assert not (tmp_path / "work" / "pruned.run").exists()
    missed = run_script(tmp_path, script, **settings, MAX_RATIO="0.01")
    assert missed.returncode == 9 and "above --max-ratio 0.01" in missed.stderr, missed.stderr[-3000:]
    assert (tmp_path / "work" / "recovered" / "config.json").exists()
    root, printed = served(tmp_path, script, port, **settings, MAX_RATIO="100")
    assert root == "work/pruned" and any("prefill" in line for line in printed)
    root, _ = served(tmp_path, script, port, ROLL_BACK="yes")  # of the model and options that were passed before
    assert root == "work/merged"


def test_every_example_runs_here() -> None:
    code = Path(__file__).read_text(encoding="utf-8")
    for example in EXAMPLES.iterdir():
        assert example.name.startswith("__") or f'"{example.name}"' in code, example


def test_the_core_runs_on_a_model_in_memory(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "core.py"), run_name="__main__")
    kept = [[int(number) for number in re.findall(r"(\d+) of", line)] for line in capsys.readouterr().out.splitlines()]
    # a KV group has 3 · 16 rows of 64 weights and a column block of 16; a channel three rows of 64
    cost = sum(heads * (2 * 8 + 2 * 8 + 8 + 8) * 64 + channels * 3 * 64 for heads, channels in kept)
    assert len(kept) == 4 and 0.58 < cost / (4 * (4 * 48 * 64 + 256 * 3 * 64)) <= 0.6
