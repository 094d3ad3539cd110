"""The fuzz finds what it looks for, and finds nothing in a few hundred mutations that no other run has tried."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fuzz

pytestmark = pytest.mark.nightly


def _forever() -> None:
    while True:
        time.time()


FAULTY: dict[str, tuple[Callable[[], Any], str]] = {
    "a traceback": (lambda: {}["missing"], "KeyError"),
    "a hang": (_forever, "Hang"),
    "two lines": (lambda: fuzz.Readers.cli(_readers(), "bench", "sharegpt"), "Usage"),
    "made up weights": (lambda: _readers().checked_weights(_Model()), "wrong weights"),
}


class _Model:
    def named_parameters(self) -> list[tuple[str, Any]]:
        import torch

        return [("model.norm.weight", torch.ones(2))]


def _readers() -> fuzz.Readers:
    readers = fuzz.Readers.__new__(fuzz.Readers)
    readers.folder = readers.out = Path("/nowhere")
    return readers


@pytest.mark.parametrize("case", FAULTY)
def test_the_fuzz_tells_faults(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz, "SECONDS", 0.2)
    read, said = FAULTY[case]
    found = fuzz.Case(seed=0, target="checkpoint")
    assert fuzz.Fuzz.read(fuzz.Fuzz.__new__(fuzz.Fuzz), found, "reader", read) is None
    assert len(found.faults) == 1 and said in found.faults[0]


def test_a_few_hundred_mutations_find_nothing() -> None:
    """Seeds past those of the run in docs/measured.md."""
    command = [sys.executable, fuzz.__file__, "--first", "1000000", "--last", "1000300"]
    result = subprocess.run(command, capture_output=True, text=True)
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["faults"] == [] and result.returncode == 0, found["faults"]
    assert found["cases"] == 300 and found["targets"].keys() == fuzz.TARGETS.keys()
    assert min(found["answers"][each] for each in ("refused", "the same")) > 100
