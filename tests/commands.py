"""The command line in this process, and what is asserted of its results."""

import json
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from ddp_vllm.cli import main

VLLM_SETTINGS = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # lets the workers of a test count their parameters
}


def cases(names: Iterable[str], by_day: Collection[str]) -> list[Any]:
    """Return the values of a parameter, all of which are tested at night."""
    return [pytest.param(name, marks=[pytest.mark.nightly] * (name not in by_day)) for name in names]


def invoke(*words: object) -> Result:
    """Run `ddp-vllm` with these words."""
    return CliRunner().invoke(main, [*map(str, words)])


@contextmanager
def quick_commands() -> Iterator[None]:
    """Commands for the fixtures of a whole file: samples of one token and no report, as `short_answers` has it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("seams.evaluation_module.SAMPLE_TOKENS", 1)
        patch.setattr("ddp_vllm.pages.written.write_report", lambda *_: None)
        yield


def passed(result: Result) -> Result:
    """Assert that a command succeeded, and return its result."""
    assert result.exit_code == 0, (result.output, result.exception)
    return result


def assert_refused(result: Result, code: int, *words: str) -> None:
    """One line, with an exit code of its own."""
    assert result.exit_code == code, (result.output, result.exception)
    assert result.stderr.startswith("ddp-vllm: ") and result.stderr.count("\n") == 1, result.stderr
    assert "Traceback" not in result.output
    for word in words:
        assert word in result.stderr, result.stderr


def write_lines(path: Path, rows: Iterable[Any]) -> Path:
    """Write a file of JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def edit_json(path: Path, *edits: Callable[[dict[str, Any]], Any], **changes: Any) -> Path:
    """Change a file, which may not exist yet, by functions and by values of fields; None removes a field."""
    content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for edit in edits:
        edit(content)
    content |= changes
    for name in (name for name, value in changes.items() if value is None):
        del content[name]
    path.write_text(json.dumps(content), encoding="utf-8")
    return path
