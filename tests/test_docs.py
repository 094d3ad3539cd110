"""Documents that say what the code says: the command reference, and links that lead somewhere."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("*/*/README.md")])


def test_the_pages_that_are_generated_are_those_of_the_code() -> None:
    """`python docs/make_pages.py` writes commands.md, recipe.md and api.md anew."""
    result = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "make_pages.py"), "--check"], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_to_a_file_and_a_heading(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        assert file.exists(), f"{page.name} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in slugs, f"{page.name} links to {target}"


def test_the_table_of_features_names_tests_that_exist() -> None:
    """As `test_file: test or case`; a case is a key of a table there."""
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = re.findall(r"`(\w+): ([^`]+)`", page)
    assert len(named) > 40
    for file, name in named:
        (path,) = ROOT.glob(f"tests/**/{file}.py")
        code = path.read_text(encoding="utf-8")
        assert f"def {name}(" in code or f'"{name}"' in code, f"{file} has no {name}"
