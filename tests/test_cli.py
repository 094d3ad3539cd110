"""The command line: verbs load when used, errors are one line and a documented exit code."""

import inspect
import json
import os
import pty
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, get_origin

import click
import pytest
from click.testing import Result
from commands import assert_refused, invoke, passed
from written_folders import write_model

import ddp_vllm
from ddp_vllm import cli, errors, settings
from ddp_vllm.api import COMMANDS
from ddp_vllm.errors import DdpError, SettingError

ROOT = Path(__file__).parents[1]
PACKAGES = [ROOT, ROOT / "prune", ROOT / "plugins", ROOT / "benchmarks"]
OF_OURS = {"PYTHONPATH": os.pathsep.join(map(str, PACKAGES))}


def test_a_line_reaches_a_log_at_once() -> None:
    """Not when the command ends: minutes pass between two lines of a profile."""
    code = "import os; from ddp_vllm.errors import echo; echo('1 of 7: mlp 0'); os._exit(0)"
    assert subprocess.run([sys.executable, "-c", code], env=os.environ | OF_OURS, capture_output=True).stdout


def _error_classes() -> list[type[DdpError]]:
    return [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, DdpError)]


def test_help_lists_every_verb_and_every_exit_code() -> None:
    text = invoke("--help").stdout
    for verb in COMMANDS:
        assert re.search(rf"^  {verb} ", text, re.MULTILINE), verb
    listed = text.partition("Exit codes:")[2].partition("Options")[0]
    assert sorted(map(int, re.findall(r"(\d+) \w", listed))) == [
        0,
        *sorted({kind.exit_code for kind in _error_classes()}),
        cli.INTERRUPTED,
    ]


def _missing(module: str) -> ModuleNotFoundError:
    return ModuleNotFoundError(f"No module named {module!r}", name=module)


RAISED: list[tuple[BaseException, int, str]] = [  # an error inside a verb, the exit code, and what is printed
    *((kind("first line\n  second line"), kind.exit_code, "first line second line\n") for kind in _error_classes()),
    (KeyboardInterrupt(), 130, "stopped\n"),
    (KeyboardInterrupt("stopped at step 3"), 130, "stopped at step 3\n"),
    # what a file or a name causes
    (OSError("File name too long"), 1, "File name too long; --debug shows the traceback\n"),
    (RecursionError(), 1, "RecursionError; --debug shows the traceback\n"),
    (UnicodeDecodeError("u", b"", 0, 1, "x"), 1, "'u' codec can't decode byte"),
    # the one extra that brings a package; what comes with none is named itself
    (_missing("torch.nn"), 1, 'the package torch is not installed; pip install ".[prune]" in a clone of ddp-vllm\n'),
    (_missing("lm_eval"), 1, 'the package lm-eval is not installed; pip install ".[eval]" in a clone of ddp-vllm\n'),
    (_missing("rich"), 1, "the package rich is not installed; pip install rich\n"),
    (_missing("einops"), 1, "the package einops is not installed; pip install einops\n"),
]


def _verb_that_raises(error: BaseException, monkeypatch: pytest.MonkeyPatch, *options: str) -> Result:
    """Run `report` with this error."""

    def read(_: Path) -> None:
        raise error

    monkeypatch.setattr("ddp_vllm.pages.verbs.read_checkpoint", read)
    return invoke(*options, "report", "folder")


@pytest.mark.parametrize(("error", "code", "line"), RAISED)
def test_an_error_is_one_line_with_its_exit_code(
    error: BaseException, code: int, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].items()
    required = [f"{each}; extra == '{extra}'" for extra, packages in extras for each in packages]
    monkeypatch.setattr("importlib.metadata.requires", lambda _name: [*project["dependencies"], *required])
    result = _verb_that_raises(error, monkeypatch)
    assert (result.exit_code, result.stdout) == (code, "")
    start = "\nddp-vllm: " if code == cli.INTERRUPTED else "ddp-vllm: "
    assert result.stderr.startswith(start + line) and result.stderr.count("\n") == start.count("\n") + 1
    if isinstance(error, Exception):
        assert _verb_that_raises(error, monkeypatch, "--debug").exception is error


def test_a_defect_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    for defect in (ZeroDivisionError(), ModuleNotFoundError("ours", name="ddp_vllm.gone")):
        assert _verb_that_raises(defect, monkeypatch).exception is defect


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


def _gone_terminal() -> int:
    master, slave = pty.openpty()
    os.close(master)
    return slave


def _unread_pipe() -> int:
    reader, writer = os.pipe()
    os.close(reader)
    return writer


ENDS = {  # where lines cannot be written -> a file descriptor of it
    "a terminal that is gone": _gone_terminal,
    "a pipe that nobody reads": _unread_pipe,
    "a full disk": lambda: os.open("/dev/full", os.O_WRONLY),
    "opened to be read": lambda: os.open("/dev/null", os.O_RDONLY),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_line_that_cannot_be_printed_ends_no_command(end: str, tmp_path: Path) -> None:
    """Of ours or of a library, by print, rich or a bar; but results that a program asked for must arrive."""
    write_model(tmp_path / "pruned", widths=[(1, 5), (2, 16)], origin="owner/tiny")
    code = (
        "import sys, logging\n"
        "from ddp_vllm.cli import main\n"
        "from ddp_vllm.pages.progress import StepProgress\n"
        "from ddp_vllm.pages.terminal import SafeConsole\n"
        "from tqdm import tqdm\n"
        "def codes(*words):\n"
        "    try: main([*words])\n"
        "    except SystemExit as ended: return str(ended.code)\n"
        "done = [codes('inspect', 'pruned'), codes('inspect', 'pruned', '--json'), codes('inspect', 'gone')]\n"
        "with StepProgress(SafeConsole(force_terminal=True), 2, lambda _: ('search', ''), True) as report:\n"
        "    for step in (1, 2): report({'step': step, 'loss': 1.0, 'tokens': 8, 'seconds': 1.0})\n"
        "list(tqdm(range(3)))\n"
        "logging.warning('a library warns')\n"
        "open('done', 'w').write(' '.join(done))\n"
    )
    descriptor = ENDS[end]()
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, cwd=tmp_path, stdout=descriptor, stderr=descriptor, env=os.environ | OF_OURS)
    os.close(descriptor)
    assert ended.returncode == 0 and (tmp_path / "done").read_text() == "0 5 7"


@pytest.mark.parametrize("words", ["", "--json"])
@pytest.mark.parametrize(
    "shell",
    [
        "{} >&-",  # closed: the next file that is opened gets its number
        "{} 2>&- | head -1",
        "LC_ALL=POSIX PYTHONUTF8=0 PYTHONCOERCECLOCALE=0 {}",
    ],
)
def test_neither_a_closed_stream_nor_a_locale_ends_a_command(shell: str, words: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "pruned → ü", widths=[(1, 5), (2, 16)], origin="owner/→")
    command = shell.format(f"{sys.executable} -m ddp_vllm inspect '{folder}' {words}")
    result = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, env=os.environ | OF_OURS)
    assert result.returncode == 0 and b"Traceback" not in result.stderr, result.stderr


def test_what_a_message_quotes_is_not_obeyed_by_the_terminal() -> None:
    result = invoke("inspect", "evil\x1b]0;name")
    assert result.exit_code == 7 and "\x1b" not in result.stderr and "\\x1b]0;name" in result.stderr


def _commands() -> Iterator[tuple[str, click.Command]]:
    """Yield every command with its words."""
    for verb in COMMANDS:
        command = cli.main.get_command(click.Context(cli.main), verb)
        assert command
        if isinstance(command, click.Group):
            yield from ((f"{verb} {name}", member) for name, member in command.commands.items())
        else:
            yield verb, command


def _options(command: click.Command) -> list[click.Option]:
    return [option for option in command.params if isinstance(option, click.Option)]


def _call(words: str, command: click.Command, folder: Path, *others: str, without: str = "") -> Result:
    """Run a command with every argument and required option, `without` one option, and with others."""
    values = {
        "scheme": "W4A16",
        "dense": "owner/dense",
        "masks": str(folder / "ddp_masks.safetensors"),
        "tokens": "384",
    }
    arguments = [str(folder) for part in command.params if isinstance(part, click.Argument) and part.required]
    given = [*words.split(), *arguments, *others]
    for option in _options(command):
        is_required = option.required or (words, option.name) == ("prune", "output")
        if is_required and option.name != without and not any(word.startswith(option.opts[-1]) for word in others):
            given += [option.opts[-1], values.get(option.name or "", str(folder.parent / "out"))]
    if words == "prune" and not others and without != "sparsity":
        given += ["--sparsity", "0.2"]
    return invoke(*given)


def test_a_list_may_be_given_in_several_options() -> None:
    """Otherwise the last option alone would be taken."""
    commands = dict(_commands())
    lists = {"prune": ("data", "watch", "prune"), "recover": ("data", "watch"), "trim": ("data", "keep")}
    for words, name in ((words, name) for words, names in lists.items() for name in names):
        given = [f"--{name}", "a,b", f"--{name}", "c"]
        assert commands[words].make_context(words, given, resilient_parsing=True).params[name] == "a,b,c"


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_model(tmp_path / "tiny", widths=[(1, 5), (2, 16)], origin="owner/tiny")


def test_every_required_option_is_asked_for(tiny: Path) -> None:
    asked = set()
    for words, command in _commands():
        needed = [option for option in _options(command) if option.required]
        needed += [option for option in _options(command) if words == "prune" and option.name in ("output", "sparsity")]
        for option in needed:
            result = _call(words, command, tiny, without=option.name or "")
            assert result.exit_code == 2 and max(option.opts, key=len) in result.stderr, (words, option, result.output)
            asked.add((words, option.name))
    assert {("apply", "masks"), ("recover", "output"), ("quantize", "scheme"), ("bench steps", "dense")} <= asked
    assert len(asked) == 16


MEANINGS_OF_0 = {  # options that document what 0 does
    *("seed", "distillation", "micro_batch_size", "save_every", "polish", "warmup", "warmups"),
    "min_agreement",
    "minutes",  # of prune: no limit; of recover: `tokens` must be given
}


@pytest.mark.parametrize("value", ["", " ", "nan", "-1", "0"])
def test_no_option_takes_a_value_without_a_meaning(value: str, tiny: Path) -> None:
    """As of a shell's variable that is not set: refused at once, naming the option."""
    numbers = ("integer", "float", "fraction", "parse_amount")
    for words, command in _commands():
        for option in _options(command):
            is_number = option.type.name.split(",")[0] in numbers
            if option.is_flag or (value.strip() and not is_number) or (value == "0" and option.name in MEANINGS_OF_0):
                continue
            name = max(option.opts, key=len)
            size = ["--sparsity=0.2"] * (words == "prune" and option.name not in ("sparsity", "speedup", "target"))
            result = _call(words, command, tiny, f"{name}={value}", *size)
            assert result.exit_code == 2 and name in result.stderr, (words, name, result.output, result.exception)
        for number, part in enumerate(command.params):
            if isinstance(part, click.Argument) and part.required and not value.strip():
                given = [value if other is part else str(tiny) for other in command.params[: number + 1]]
                assert invoke(*words.split(), *given).exit_code == 2
    assert not list(tiny.parent.glob("out*"))


def test_a_file_of_the_users_is_never_replaced(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--overwrite permits to replace what the same command writes, or an empty file."""
    monkeypatch.chdir(tmp_path)
    file = tiny / "model.safetensors"
    before, dense = file.read_bytes(), write_model(tmp_path / "dense", widths=[(2, 16)] * 2, origin=None)
    ends = ["--dense", dense, "--pruned", tiny, "-o", file]
    for words in (
        ["export", tiny, "-o", file],
        ["profile", dense, "-o", file],
        ["bench", "steps", *ends],
        ["bench", "sharegpt", *ends],
    ):
        assert_refused(invoke(*words, "--overwrite"), 5, "did not write it")
    for name in ("page.html", "page.md", "report.html"):
        Path(name).write_text("<!doctype html>\nmine")
        assert_refused(invoke("compare", tiny, "-o", "page.html", "--overwrite"), 5, "page", "did not write it")
        assert Path(name).read_text().endswith("mine")
        Path("page.html").unlink(missing_ok=True)
    for output in ("report.html", "."):
        assert_refused(invoke("report", tiny, "-o", output), 5, "report.html", "did not write it")
    assert file.read_bytes() == before
    for name in ("page.html", "page.md", "report.html"):
        Path(name).write_text("")
    for _ in range(2):
        passed(invoke("compare", tiny, "-o", "page", "--overwrite"))
        passed(invoke("report", tiny, "-o", "report.html"))
    assert Path("report.html").is_file() and "pruned: tiny" in Path("report.html").read_text()


def test_a_dtype_is_one_that_weights_can_have(tiny: Path) -> None:
    for words in (["eval", tiny], ["eval", tiny, "--text", "a.txt"], ["prune", tiny, "-o", "o"]):
        result = invoke(*words, "--dtype", "int4")
        assert result.exit_code == 2 and "'int4' is not one of 'auto', 'float32', 'bfloat16'" in result.stderr


def test_pages_have_the_name_that_was_given(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    for name in ("x.txt", "v1.2"):
        assert_refused(invoke("compare", tiny, "-o", tmp_path / name), 2, name, ".html")
    passed(invoke("compare", tiny, "--output=~/all"))  # a shell leaves ~ behind =
    passed(invoke("report", tiny, "--output=~/one.html"))
    passed(invoke("report", tiny, "--output", "~/folder"))
    names = {str(path.relative_to(tmp_path)) for path in (tmp_path / "home").rglob("*.*")}
    assert names == {"home/all.html", "home/all.md", "home/one.html", "home/folder/report.html"}
    assert_refused(invoke("compare", tiny, "-o", tmp_path / "y", "--results=~/gone,~/there"), 4, str(tmp_path / "home"))


FORMS: dict[Any, list[Any]] = {  # a type of an annotation -> values of it
    str: ["x"], Path: [Path("x")], bool: [False], float: [1.5, 2], int: [3], NoneType: [None],
    Iterable: [["x"], (Path("x"),)], Sequence: [["x"]], tuple: [("x",)],
}  # fmt: skip
FUNCTIONS = [name for name in ddp_vllm.__all__ if inspect.isfunction(getattr(ddp_vllm, name))]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_takes_the_forms_that_it_states(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And refuses others, naming the argument."""
    monkeypatch.chdir(tmp_path)
    function = getattr(ddp_vllm, name)
    parameters = inspect.signature(function).parameters
    required = {key: "x" for key, part in parameters.items() if part.default is part.empty and key != "settings"}
    required |= {key: value for key, value in (("scheme", "W8A8"), ("tokens", 256)) if key in required}
    for key, part in parameters.items():
        if part.kind is part.VAR_KEYWORD:
            with pytest.raises(SettingError, match=f"^{name}\\(\\) sets 'sparsty', which is unknown"):
                function(**required, sparsty=1)
            continue
        for wrong in (object(), {"steps": 4}, 3 + 4j):
            with pytest.raises(SettingError, match=f"^{key} is "):
                function(**required | {key: wrong})
        kinds = settings.kinds_of(part.annotation)
        for kind in kinds:
            for value in FORMS.get(get_origin(kind) or kind, []):
                with pytest.raises(DdpError):  # there is no such model; not a TypeError or an AttributeError
                    function(**required | {key: value})
    assert not list(tmp_path.iterdir())


WRONG = {  # words of a command -> exit code, and a part of the message
    "prnue x": (2, "there is no command 'prnue'; did you mean prune?"),
    "prune a/b --sparsity 1.2 -o o": (2, "--sparsity is 1.2; it must lie"),
    "prune a/b --target 5X -o o": (2, "'5X' is not a size; give a number such as 5.5B"),
    "prune a/b --recipe wrong.toml -o o": (2, "sets 'sparsty', which is unknown; did you mean spar"),
    "prune ./gone --sparsity 0.2 -o o": (3, "neither a folder nor a hub name"),
    "prune dense --sparsity 0.2 --data gone.jsonl -o o": (4, "is not a file"),
    "prune dense --sparsity 0.2 --data bad.jsonl -o o": (4, "line 1: not JSON"),
    "prune dense --sparsity 0.2 --data odd.jsonl -o o": (4, "line 1: no column text, messages or conversations"),
    "prune dense --sparsity 0.2 --data good.jsonl -o /proc/o": (5, "/proc/o cannot be written"),
    "prune dense --speedup 1.2 --profile p.json --data good.jsonl -o o": (2, "is not a file"),
    "prune x.gguf --sparsity 0.2 -o o": (3, "is a GGUF file, which cannot be pruned"),
    "prune adapter --sparsity 0.2 -o o": (3, "is a LoRA adapter; merge it"),
    "prune oss --sparsity 0.2 -o o": (3, "gpt_oss cannot be pruned: its experts have biases"),
    "prune dense --sparsity 0.2 --on h100-80gb -o o": (2, "--on estimates for other GPUs"),
    "apply dense --masks good.jsonl -o o": (7, "is not a masks file"),
    "prune dense --sparsity 0.2 --data lfs.jsonl -o o": (4, "lfs.jsonl is a pointer of git-lfs"),
    "prune dense --sparsity 0.2 --data lfs.parquet -o o": (4, "lfs.parquet is a pointer of git-lfs"),
    "prune dense --sparsity 0.2 --data good.jsonl:0 -o o": (4, "'0' is not a number of turns; give 1 to 99, as in"),
    "prune dense --sparsity 0.2 --dry-run --data gone.jsonl": (4, "is not a file"),
    "prune dense --sparsity 0.2 --dry-run --data bad.jsonl -o o": (4, "line 1: not JSON"),
    "prune dense --sparsity 0.2 --dry-run --data good.jsonl -o adapter": (5, "ddp-vllm did not write it"),
    "prune dense --sparsity 0.2 --dry-run --data good.jsonl -o dense": (5, "holds dense, which this command reads"),
    "prune a/b --recipe table.toml -o o": (2, "table.toml has a table [prune], but settings stand outside of tables"),
    "prune a/b --recipe tables.toml -o o": (2, "tables.toml has a table [data]"),
    "prune a/b --target 0 -o o": (2, "--target is 0; give how much to remove"),
    "recover dense --recipe table.toml -o o": (7, "is not a pruned checkpoint"),
    "inspect good.jsonl": (7, "good.jsonl is a file; give the folder of a model"),
    "report good.jsonl": (7, "good.jsonl is a file; give the folder of a model"),
    "recover ./gone -o o": (7, "is missing"),
    "eval ./gone": (3, "is not the folder of a model"),
    "bench steps --dense ./gone --pruned ./away": (3, "./away is not the folder of a model"),
    "profile ./gone": (3, "is not the folder of a model"),
}


def test_wrong_input_is_refused_before_torch_is_imported(tmp_path: Path) -> None:
    """With an empty cache and no network: one line, its exit code, and neither torch nor transformers."""
    write_model(tmp_path / "dense", widths=[(2, 16), (2, 16)], origin=None)
    for name, content in (
        ("adapter/adapter_config.json", "{}"),
        ("oss/config.json", '{"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}'),
        ("dense/tokenizer.json", "{}"),
        ("x.gguf", "GGUF"),
        ("bad.jsonl", "no JSON\n"),
        ("good.jsonl", '{"text": "a"}\n'),
        ("odd.jsonl", '{"a": "text"}\n'),
        ("wrong.toml", "sparsty = 0.2\n"),
        ("table.toml", "[prune]\nsparsity = 0.2\n"),
        ("tables.toml", 'sparsity = 0.2\n[data]\nname = "a"\n'),
        ("lfs.jsonl", "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"),
        ("lfs.parquet", "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    code = (
        "import json, sys\n"
        "from click.testing import CliRunner\n"
        "from ddp_vllm.cli import main\n"
        "for words in json.loads(sys.argv[1]):\n"
        "    result = CliRunner().invoke(main, words.split())\n"
        "    heavy = sorted({'torch', 'transformers', 'datasets', 'vllm'} & sys.modules.keys())\n"
        "    print(json.dumps([result.exit_code, result.stderr, heavy]))\n"
    )
    changed = {"DDP_VLLM_CACHE": str(tmp_path / "cache"), "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", code, json.dumps([*WRONG])]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=os.environ | OF_OURS | changed)
    assert result.returncode == 0, result.stderr
    for (words, (expected, part)), line in zip(WRONG.items(), result.stdout.splitlines(), strict=True):
        exit_code, stderr, heavy = json.loads(line)
        assert (exit_code, stderr.count("\n"), heavy) == (expected, 1, []) and part in stderr, (words, line)
