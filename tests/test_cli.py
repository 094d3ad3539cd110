"""The command line: verbs load when used, errors are one line and a documented exit code."""

import inspect
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from click.testing import Result
from commands import assert_refused, invoke
from written_folders import write_model

from ddp_vllm import cli, errors
from ddp_vllm.api import COMMANDS
from ddp_vllm.errors import DdpError

ROOT = Path(__file__).parents[1]


def _error_classes() -> list[type[DdpError]]:
    return [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, DdpError)]


def test_help_lists_every_verb_and_every_exit_code() -> None:
    text = invoke("--help").stdout
    for verb in COMMANDS:
        assert re.search(rf"^  {verb} ", text, re.MULTILINE), verb
    codes = sorted(
        int(code) for code in re.findall(r"(\d+) \w", text.partition("Exit codes:")[2].partition("Options")[0])
    )
    assert codes == [0, *sorted({kind.exit_code for kind in _error_classes()}), cli.INTERRUPTED]


@pytest.mark.parametrize("kind", _error_classes())
def test_an_error_is_one_line_with_its_exit_code(kind: type[DdpError], monkeypatch: pytest.MonkeyPatch) -> None:
    result = _verb_that_raises(kind("first line\n  second line"), monkeypatch)
    assert (result.exit_code, result.stdout) == (kind.exit_code, "")
    assert result.stderr == "ddp-vllm: first line second line\n"


def test_a_missing_package_is_one_line_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one extra that brings it; what comes with none is named itself."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].items()
    required = [f"{each}; extra == '{extra}'" for extra, packages in extras for each in packages]
    monkeypatch.setattr("importlib.metadata.requires", lambda _name: [*project["dependencies"], *required])
    for module, install in (
        ("torch.nn", '".[prune]" in a clone of ddp-vllm'),
        ("lm_eval", '".[eval]" in a clone of ddp-vllm'),
        ("rich", "rich"),
        ("einops", "einops"),
    ):
        error = ModuleNotFoundError(f"No module named {module!r}", name=module)
        result = _verb_that_raises(error, monkeypatch)
        package = module.partition(".")[0].replace("_", "-")
        assert result.exit_code == 1
        assert result.stderr == f"ddp-vllm: the package {package} is not installed; pip install {install}\n"


def test_a_defect_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    for defect in (ZeroDivisionError(), ModuleNotFoundError("ours", name="ddp_vllm.gone")):
        assert _verb_that_raises(defect, monkeypatch).exception is defect


def _verb_that_raises(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> Result:
    """Run `report` with this error."""

    def write(*_: object) -> None:
        raise error

    monkeypatch.setattr("ddp_vllm.pages.verbs.read", write)
    return invoke("report", "folder")


def test_ctrl_c_has_the_exit_code_of_a_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    for words, said in (((), "stopped"), (("stopped at step 3",), "stopped at step 3")):
        error = KeyboardInterrupt(*words)
        result = _verb_that_raises(error, monkeypatch)
        assert (result.exit_code, result.stderr) == (130, f"\nddp-vllm: {said}\n")


def test_a_terminal_that_knows_ascii_alone_gets_no_traceback() -> None:
    """Of the help of every command, and of a line that rich prints."""
    code = (
        "from ddp_vllm.cli import COMMANDS, main\n"
        "for verb in COMMANDS: main([verb, '--help'], standalone_mode=False)\n"
        "from ddp_vllm.pages.terminal import SafeConsole\n"
        "SafeConsole().print('1.02× █')"
    )
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment)
    assert (result.returncode, result.stderr) == (0, b"")
    assert result.stdout.count(b"Usage: ") == len(COMMANDS) and result.stdout.endswith(b"1.02? ?\n")


@pytest.mark.parametrize(
    "error", [OSError("File name too long"), RecursionError(), UnicodeDecodeError("u", b"", 0, 1, "x")]
)
def test_what_a_file_or_a_name_causes_is_one_line(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(_: Path) -> None:
        raise error

    monkeypatch.setattr("ddp_vllm.pages.verbs.read_checkpoint", read)
    assert_refused(invoke("inspect", "x"), 1, "--debug")
    assert invoke("--debug", "inspect", "x").exception is error


def test_what_a_message_quotes_is_not_obeyed_by_the_terminal() -> None:
    result = invoke("inspect", "evil\x1b]0;name")
    assert result.exit_code == 7 and "\x1b" not in result.stderr and "\\x1b]0;name" in result.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["prnue", "x"], "there is no command 'prnue'; did you mean prune?"),
        (["prune", "a/b", "--sparsity", "1.2", "-o", "o"], "--sparsity is 1.2; it must lie"),
        (["prune", "a/b", "--target-params", "5X", "-o", "o"], "'5X' is not a size; give a number such as 5.5B"),
        (["prune", "a/b", "--recipe", "wrong.toml", "-o", "o"], "sets 'sparsty', which is unknown; did you mean spar"),
    ],
)  # fmt: skip
def test_messages_name_what_was_meant(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wrong.toml").write_text("sparsty = 0.2\n")
    assert_refused(invoke(*words), 2, message)


WRONG = {  # words of a command -> exit code, and a part of the message
    "prune ./gone --sparsity 0.2 -o o": (3, "neither a folder nor a hub name"),
    "prune dense --sparsity 0.2 --data gone.jsonl -o o": (4, "is not a file"),
    "prune dense --sparsity 0.2 --data bad.jsonl -o o": (4, "line 1: not JSON"),
    "prune dense --sparsity 0.2 --data odd.jsonl -o o": (4, "has no column text, messages or conversations"),
    "prune dense --sparsity 0.2 --data good.jsonl -o /proc/o": (5, "not a folder you may write to"),
    "prune dense --speedup 1.2 --profile p.json --data good.jsonl -o o": (2, "is not a file"),
    "prune x.gguf --sparsity 0.2 -o o": (3, "is a GGUF file, which cannot be pruned"),
    "prune adapter --sparsity 0.2 -o o": (3, "is a LoRA adapter; merge it"),
    "prune oss --sparsity 0.2 -o o": (3, "gpt_oss cannot be pruned: its experts have biases"),
    "prune dense --sparsity 0.2 --on h100-80gb -o o": (2, "--on estimates for other GPUs"),
    "apply dense --masks good.jsonl -o o": (7, "is not a masks file"),
    "recover ./gone -o o": (7, "is missing"),
    "eval ./gone": (3, "is not the folder of a model"),
    "eval dense": (4, "HF_HUB_OFFLINE is set); pass --include-path"),
    "bench steps --dense ./gone --pruned ./away": (3, "is missing"),
    "profile ./gone": (3, "is not the folder of a model"),
}


def test_wrong_input_is_refused_before_torch_is_imported(tmp_path: Path) -> None:
    """With an empty cache and no network: one line, its exit code, and neither torch nor transformers."""
    write_model(tmp_path / "dense", widths=[(2, 16), (2, 16)], origin=None)
    (tmp_path / "dense" / "tokenizer.json").write_text("{}")
    for name, file, content in (
        ("adapter", "adapter_config.json", "{}"),
        ("oss", "config.json", '{"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}'),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text(content)
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    (tmp_path / "bad.jsonl").write_text("no JSON\n")
    (tmp_path / "good.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "odd.jsonl").write_text('{"a": "text"}\n')
    code = (
        "import json, sys\n"
        "from click.testing import CliRunner\n"
        "from ddp_vllm.cli import main\n"
        "for words in json.loads(sys.argv[1]):\n"
        "    result = CliRunner().invoke(main, words.split())\n"
        "    heavy = sorted({'torch', 'transformers', 'datasets', 'vllm'} & sys.modules.keys())\n"
        "    print(json.dumps([result.exit_code, result.stderr, heavy]))\n"
    )
    packages = [ROOT, ROOT / "prune", ROOT / "plugins", ROOT / "benchmarks"]
    changed = {"DDP_VLLM_CACHE": str(tmp_path / "cache"), "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
    changed |= {"HF_DATASETS_CACHE": str(tmp_path / "rows"), "PYTHONPATH": os.pathsep.join(map(str, packages))}
    command = [sys.executable, "-c", code, json.dumps([*WRONG])]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=os.environ | changed)
    assert result.returncode == 0, result.stderr
    for (words, (expected, part)), line in zip(WRONG.items(), result.stdout.splitlines(), strict=True):
        exit_code, stderr, heavy = json.loads(line)
        assert (exit_code, stderr.count("\n"), heavy) == (expected, 1, []) and part in stderr, (words, line)
