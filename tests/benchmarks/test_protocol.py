"""What every measurement does alike: whose turn it is, and what the last line says."""

import json
from pathlib import Path

import pytest

from ddp_benchmarks.protocol import result_line, split_command_line


def test_what_comes_after_two_dashes_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["script.py", "model", "--draft", "x", "--", "--dtype", "float32", "--"])
    assert split_command_line() == (["model", "--draft", "x"], ["--dtype", "float32", "--"])
    monkeypatch.setattr("sys.argv", ["script.py", "model"])
    assert split_command_line() == (["model"], [])


def test_the_last_line_is_one_line_of_json_and_says_where() -> None:
    line = result_line("How fast?\n\nIn two\nlines.", {"data": Path("a b"), "rounds": 3}, seed=1, ratio=1.5)
    assert "\n" not in line
    found = json.loads(line)
    assert found["question"] == "How fast?" and found["settings"] == {"data": "a b", "rounds": 3}
    assert (found["seed"], found["ratio"]) == (1, 1.5)
    assert found["hardware"]["cores"] >= 1 and "python" in found["versions"]
    where = {"hardware": {"cpu": "another"}, "versions": {"torch": "1"}}
    told = json.loads(result_line(None, {}, seed=0, where=where | {"runs": []}))
    assert told == {"question": "", "settings": {}, "seed": 0} | where
