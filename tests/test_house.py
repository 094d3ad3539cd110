"""The house: which package may import which and what it loads; its installer; documents that say what the code says."""

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from ddp_vllm.cli import main as command_line

ROOT = Path(__file__).parent.parent
ROOMS = {  # package -> its folder
    "ddp_vllm": ROOT / "ddp_vllm",
    "ddp_prune": ROOT / "prune" / "ddp_prune",
    "ddp_plugins": ROOT / "plugins" / "ddp_plugins",
    "ddp_benchmarks": ROOT / "benchmarks" / "ddp_benchmarks",
}
TABLE = ROOT / "ddp_vllm" / "api.py"  # the one file of the ground floor that names the packages above it
ABOVE: dict[str, tuple[Path, str, tuple[str, ...], tuple[str, ...]]] = {
    # part -> its folder and files, modules of ours that it does not name, and exceptions from these
    "ground floor": (ROOMS["ddp_vllm"], "**/*.py", ("ddp_prune", "ddp_plugins", "ddp_benchmarks"), ()),
    "what a checkpoint is": (
        ROOMS["ddp_vllm"], "*.py", ("ddp_vllm.pages", "ddp_vllm.gguf", "ddp_vllm.hub", "ddp_vllm.conversion"), ()
    ),
    "plugins": (ROOMS["ddp_plugins"], "**/*.py", ("ddp_prune", "ddp_benchmarks"), ()),
    "benchmarks": (ROOMS["ddp_benchmarks"], "**/*.py", ("ddp_prune", "ddp_plugins"), ("ddp_prune.text",)),
    "prune": (
        ROOMS["ddp_prune"], "**/*.py",
        ("ddp_plugins", "ddp_benchmarks", "ddp_vllm.pages.report", "ddp_vllm.pages.pictures"), (),
    ),
    "core": (ROOMS["ddp_prune"] / "core", "*.py", ("ddp_prune",), ("ddp_prune.core",)),  # no recipes, files or commands
    "text": (ROOMS["ddp_prune"] / "text", "*.py", ("ddp_prune",), ("ddp_prune.text",)),
    "models": (
        ROOMS["ddp_prune"] / "models", "*.py", ("ddp_prune",),
        ("ddp_prune.models", "ddp_prune.core", "ddp_prune.text", "ddp_prune.settings"),
    ),
    "tests": (ROOT / "tests", "**/*.py", ("ddp_prune.",), ()),
}  # fmt: skip
SEES_PRUNE = ("seams.py", "recover", "gpu", "nightly", "test_house.py")  # of the tests
HEAVY = ("torch", "vllm", "transformers", "datasets", "accelerate", "lm_eval", "matplotlib", "rich", "numpy")
LIGHT = {  # code -> the libraries that it must not load
    "import ddp_benchmarks.verbs; from ddp_vllm.cli import main; main(['--help'], standalone_mode=False)": HEAVY,
    "import ddp_vllm; ddp_vllm.prune": (*HEAVY, "click"),
    "import ddp_vllm.conversion.verb, ddp_plugins.register": ("torch", "vllm", "transformers", "matplotlib", "rich"),
}


def _imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (level, module) of every import, those inside functions included; level 0 is absolute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((0, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.level, node.module or ""


def _named(path: Path) -> set[str]:
    """Return the modules of ours that a file imports, or names in a string of code, as `importlib` takes them."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = [*ast.walk(tree)]
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    strings = [node.value for node in nodes if isinstance(node, ast.Constant) and id(node) not in docstrings]
    texts = [module for level, module in _imports(tree) if level == 0] + [s for s in strings if isinstance(s, str)]
    return {name for text in texts for name in re.findall(rf"\b(?:{'|'.join(ROOMS)})\b[\w.]*", text)}


@pytest.mark.parametrize("part", ABOVE)
def test_what_lies_below_names_nothing_above(part: str) -> None:
    folder, pattern, above, allowed = ABOVE[part]
    files = {file for file in folder.glob(pattern) if file.relative_to(folder).parts[0] not in SEES_PRUNE} - {TABLE}
    assert files
    for file in files:
        named = {name for name in _named(file) if name.startswith(above)}
        assert not {name for name in named if not name.startswith(allowed or ("none",))}, file


def test_the_table_of_verbs_names_the_packages_that_have_some() -> None:
    assert {name.partition(".")[0] for name in _named(TABLE)} == set(ROOMS) - {"ddp_plugins"}


def test_travelling_files_import_nothing_of_ours_but_each_other() -> None:
    files = [*(ROOMS["ddp_vllm"] / "remote_code").glob("*.py")]
    imports = {file.stem: [*_imports(ast.parse(file.read_text(encoding="utf-8")))] for file in files}
    assert (1, "widths") in imports["configuration_ddp"]  # the walk does see relative imports
    for name, modules in imports.items():
        for level, module in modules:
            where = f"remote_code/{name}.py imports {'.' * level}{module}"
            assert level <= 1 and not module.startswith(tuple(ROOMS)), where
            assert level == 0 or module in imports, where
    torch_free = {module.partition(".")[0] for name in ("tensors", "files", "widths") for _, module in imports[name]}
    assert torch_free <= set(sys.stdlib_module_names) | {"tensors", "files"}


@pytest.mark.parametrize("code", LIGHT)
def test_nothing_heavy_is_loaded_before_it_is_used(code: str) -> None:
    code = f"import sys; {code}; print('LOADED', *sorted(sys.modules.keys() & {{*{LIGHT[code]!r}}}))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert result.stdout.splitlines()[-1].split() == ["LOADED"]


def test_a_library_that_python_compiles_anew_may_warn_of_its_source(tmp_path: Path) -> None:
    """torchao has a backslash in a docstring: an error in every test wherever no bytecode was kept."""
    (tmp_path / "a_library.py").write_text('"""\\."""\n\n\ndef same(number):\n    return number is 1\n')
    (tmp_path / "test_it.py").write_text(
        "import warnings\n\nimport pytest\n\nimport a_library\n\n\n"
        "def test_others_are_errors() -> None:\n"
        "    with pytest.raises(UserWarning):\n        warnings.warn('ours')\n    assert a_library\n"
    )
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml"), str(tmp_path)]
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    result = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stdout


def test_uv_gets_the_indexes_and_folders_of_pip(tmp_path: Path) -> None:
    """By `make install`. Folders that do not exist are passed over, as pip does; what is set for uv stays."""
    (tmp_path / "wheels").mkdir()
    (tmp_path / "pip.conf").write_text(
        f"[global]\nfind-links = {tmp_path}/wheels\n  {tmp_path}/none\nindex-url = https://global.example/simple\n"
        "extra-index-url = https://one.example/simple https://two.example/simple\n"
    )
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))}
    own = {"PIP_CONFIG_FILE": str(tmp_path / "pip.conf"), "PIP_INDEX_URL": "https://env.example/simple"}
    words = [sys.executable, "-c", "import install, json; print(json.dumps(install.uv_settings()))"]
    printed = subprocess.check_output(
        words, cwd=ROOT / "requirements", env=inherited | own | {"UV_INDEX": "https://mine.example"}
    )
    settings = json.loads(printed)
    assert settings["UV_FIND_LINKS"] == f"{tmp_path}/wheels"
    assert settings["UV_DEFAULT_INDEX"] == "https://env.example/simple"  # the environment before the file
    assert "UV_INDEX" not in settings
    printed = subprocess.check_output(words, cwd=ROOT / "requirements", env=inherited | own)
    assert json.loads(printed)["UV_INDEX"] == "https://one.example/simple https://two.example/simple"


FOLDERS = ("ddp_vllm", "prune", "plugins", "benchmarks", "examples", "tests")  # not what commands wrote here
READMES = [page for folder in FOLDERS for page in (ROOT / folder).rglob("README.md")]
FILES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *READMES]
PAGES = {page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8") for page in sorted(FILES)}


def test_the_pages_that_are_generated_are_those_of_the_code() -> None:
    """`python docs/make_pages.py` writes commands.md and api.md anew."""
    command = [sys.executable, str(ROOT / "docs" / "make_pages.py"), "--check"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_a_file_and_a_heading(page: str) -> None:
    for target in re.findall(r"\]\((?!https?://)([^)\s]+)\)", PAGES[page]):
        name, _, anchor = target.partition("#")
        file = (ROOT / page).parent / name if name else ROOT / page
        assert file.exists(), target
        headings = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE) if anchor else []
        slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
        assert not anchor or anchor in slugs, target


@pytest.mark.parametrize("page", [page for page in PAGES if page.endswith("/README.md")])
def test_the_files_in_the_table_of_a_folder_exist(page: str) -> None:
    folder = (ROOT / page).parent
    names = re.findall(r"`([\w/]+\.py)`", PAGES[page])
    assert [name for name in names if not (ROOT / name).exists() and not any(folder.rglob(name))] == []


def test_the_tables_of_features_and_of_problems_name_tests_that_exist() -> None:
    """As `test_file: test or case`; a case is a key of a table there."""
    named = re.findall(r"`(\w+): ([^`]+)`", PAGES["docs/dev/CONTRIBUTING.md"])
    assert len(named) > 40
    code = "".join(file.read_text(encoding="utf-8") for file in ROOT.glob("tests/**/test_*.py"))
    tests = re.findall(r"`(test_\w+)`", PAGES["docs/dev/reliability.md"])
    assert tests and [name for name in tests if f"def {name}(" not in code] == []
    for file, name in named:
        (path,) = ROOT.glob(f"tests/**/{file}.py")
        code = path.read_text(encoding="utf-8")
        assert f"def {name}(" in code or f'"{name}"' in code, f"{file} has no {name}"


def sentences(page: str) -> list[str]:
    """Return the sentences of paragraphs and of cells of tables, without code, links' targets and headings."""
    prose = re.sub(r"```.*?```|<!--.*?-->|<[^>]*>|^#.*?$", "", page, flags=re.DOTALL | re.MULTILINE)
    prose = re.sub(r"\]\([^)]*\)", "]", prose)
    blocks = re.split(r"\n\s*\n|\n(?=[-*] |\d+\. )|\||:\n", prose)
    return [sentence for block in blocks for sentence in re.split(r"(?<=[.?!])\s", " ".join(block.split()))]


@pytest.mark.parametrize("page", PAGES)
def test_no_sentence_is_long(page: str) -> None:
    assert [sentence for sentence in sentences(PAGES[page]) if len(sentence.split()) > 35] == []


def usages(page: str) -> list[list[str]]:
    """Return the words of every line of a Bash block that starts ddp-vllm, without those with variables or globs."""
    blocks = re.findall(r"```bash\n(.*?)```", page, re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").split("\n")]
    words_of = [shlex.split(line, comments=True) for line in lines if re.match(r"ddp-vllm|accelerate|torchrun", line)]
    return [line for line in words_of if not any(character in " ".join(line) for character in "$*<>")]


def test_usage_lines_can_be_pasted() -> None:
    """Every option exists, and has a value of its kind; nothing runs."""
    lines = [line for text in PAGES.values() for line in usages(text)]
    assert len(lines) >= 40
    for line in lines:
        name = "ddp_vllm" if "ddp_vllm" in line else "ddp-vllm"
        command: click.Command = command_line
        context, rest = click.Context(command), line[line.index(name) + 1 :]
        while isinstance(command, click.Group):
            found = command.get_command(context, rest[0])
            assert found, line
            command, rest = found, rest[1:]
            context = click.Context(command, parent=context)
        command.parse_args(context, rest)
