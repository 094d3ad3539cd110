"""The harness tells a killed command that leaves something from one that does not, and a few kills find nothing."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import kills
from ddp_vllm.manifest import MANIFEST, manifest_of

pytestmark = pytest.mark.nightly


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What an undisturbed command would leave."""
    folder = tmp_path / "case"
    (folder / "out" / "report").mkdir(parents=True)
    (folder / "out" / "log.jsonl").write_text('{"step": 1, "seconds": 2}\n{"step": 2, "seconds": 2}\n')
    (folder / "out" / "report" / "curves.csv").write_text("step,seconds\n1,2\n")
    (folder / "out" / MANIFEST).write_text(manifest_of(folder / "out"))
    return folder


LEFT: dict[str, tuple[Callable[[Path], object], str]] = {
    "a temporary file": (lambda f: (f / ".out.tmp").write_text(""), ".out.tmp was left behind"),
    "a file less": (lambda f: (f / "out" / "log.jsonl").unlink(), "out/log.jsonl is missing"),
    "another step": (lambda f: (f / "out" / "log.jsonl").write_text('{"step": 3}\n'), "out/log.jsonl is another"),
    "an untrue manifest": (lambda f: (f / "out" / "new").write_text(""), "out/ddp_manifest.json is another"),
}


@pytest.mark.parametrize("case", LEFT)
def test_what_differs_is_told(case: str, folder: Path) -> None:
    before = kills.contents(folder)
    change, said = LEFT[case]
    change(folder)
    assert said in " ".join(kills.unequal(kills.contents(folder), before))


def test_times_are_not_compared(folder: Path) -> None:
    before = kills.contents(folder)
    (folder / "out" / "log.jsonl").write_text('{"step": 1, "seconds": 3}\n{"step": 2, "seconds": 4}\n')
    (folder / "out" / "report" / "curves.csv").write_text("step,seconds\n1,9\n")
    (folder / "out" / MANIFEST).write_text(manifest_of(folder / "out"))
    assert kills.unequal(kills.contents(folder), before) == []


@pytest.mark.parametrize(("after", "there"), [(False, False), (True, True)])
def test_a_process_is_killed_before_or_after_a_file_event(after: bool, there: bool, tmp_path: Path) -> None:
    """The second folder is made only if the kill comes after it."""
    child = os.fork()
    if not child:
        sys.addaudithook(kills.Watch(tmp_path, kills.Kill(event=1, after=after)))
        (tmp_path / "one").mkdir()
        (tmp_path / "two").mkdir()
        (tmp_path / "three").mkdir()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert (tmp_path / "one").is_dir() and (tmp_path / "two").is_dir() == there
    assert not (tmp_path / "three").exists()


def test_a_few_kills_find_nothing() -> None:
    """A seed past that of the run in docs/measured.md."""
    names = "export,apply,joint training,recover in place"
    command = [sys.executable, kills.__file__, "--kills", "12", "--seed", "1000", "--commands", names]
    result = subprocess.run(command, capture_output=True, text=True)
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["faults"] == {} and result.returncode == 0, result.stderr
    assert found["kills"] == 12 and found["by_command"]["recover in place"]["kills"] >= 3
