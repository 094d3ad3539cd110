"""Documents that say what the code says: the command reference, and links that lead somewhere."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

from ddp_vllm.cli import main as command_line

ROOT = Path(__file__).parent.parent
ROOMS = ("ddp_vllm", "prune", "plugins", "benchmarks", "examples", "tests")  # not what commands wrote here
FILES = [
    *ROOT.glob("*.md"),
    *ROOT.glob("docs/**/*.md"),
    *(p for room in ROOMS for p in (ROOT / room).rglob("README.md")),
]
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
