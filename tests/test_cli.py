"""The command line: verbs load when used, errors are one line and a documented exit code."""

import inspect
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest
from click.testing import Result
from commands import assert_refused, invoke

from ddp_vllm import cli, errors
from ddp_vllm.api import COMMANDS
from ddp_vllm.errors import DdpError, ModelError, TrainingError


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


def test_of_several_processes_one_speaks_but_each_of_its_own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    for error, said in ((ModelError("gone"), ""), (TrainingError("full"), "ddp-vllm (process 1): full\n")):
        result = _verb_that_raises(error, monkeypatch)
        assert (result.exit_code, result.stderr) == (error.exit_code, said)


def test_a_missing_package_is_one_line_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one extra that brings it; what comes with none is named itself."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
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
    """Run `inspect` with this error."""

    @click.command("inspect")
    def verb() -> None:
        raise error

    monkeypatch.setattr("ddp_vllm.pages.cli.inspect", verb)
    return invoke("inspect")


def test_ctrl_c_has_the_exit_code_of_a_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    for error, said in (
        (KeyboardInterrupt(), "stopped"),
        (KeyboardInterrupt("stopped at step 3"), "stopped at step 3"),
    ):
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


@pytest.mark.parametrize("output", [".", "", "/", "/proc", "inner/.."])
def test_an_output_that_cannot_be_renamed(output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them hold a config.json or are mounted, so that `--overwrite` would replace them."""
    for folder in (tmp_path, tmp_path / "inner"):
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path / "inner")
    for arguments in (["prune", "model", "--sparsity", "0.2"], ["apply", "model", "--masks", "masks"]):
        result = invoke(*arguments, "-o", output, "--overwrite")
        assert_refused(result, 5, "cannot be replaced; choose a folder inside it")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["config.json", "config.json", "inner"]


@pytest.mark.parametrize(
    "error", [OSError("File name too long"), RecursionError(), UnicodeDecodeError("u", b"", 0, 1, "x")]
)
def test_what_a_file_or_a_name_causes_is_one_line(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(_: Path) -> None:
        raise error

    monkeypatch.setattr("ddp_vllm.folder.read_checkpoint", read)
    assert_refused(invoke("inspect", "x"), 1, "--debug")
    assert invoke("--debug", "inspect", "x").exception is error


def test_what_a_message_quotes_is_not_obeyed_by_the_terminal() -> None:
    result = invoke("inspect", "evil\x1b]0;name")
    assert result.exit_code == 7 and "\x1b" not in result.stderr and "\\x1b]0;name" in result.stderr


def test_no_verb_prints_by_another_way() -> None:
    """`echo` and `SafeConsole` show control characters; click's and rich's own would send them to the terminal."""
    root = Path(cli.__file__).parents[1]
    files = [root / "ddp_vllm", root / "prune", root / "benchmarks" / "ddp_benchmarks"]
    for file in sorted(path for folder in files for path in folder.rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        assert text.count("click.echo(") == (file.name == "cli.py" and file.parent.name == "ddp_vllm"), file
        assert not re.search(r"(?<!Safe)\bConsole\((?!stderr)", text.replace("SafeConsole(Console)", "")), file
