"""Fixtures of tests/plugins: narrow models of stock classes, made once, and what transformers generates with them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from any_families import load, narrow
from any_models import write_model
from serving import PROMPTS
from tiny_models import generate


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that makes the folders `dense`, `narrow` and `zeroed` of a model, once."""
    root = tmp_path_factory.mktemp("any")

    def make(name: str) -> Path:
        if not (root / name).exists():
            write_model(name, root / name / "dense")
            narrow(*(root / name / part for part in ("dense", "narrow", "zeroed")))
        return root / name

    return make


@pytest.fixture(scope="session")
def answers(made: Callable[[str], Path]) -> Callable[[str, str], dict[str, Any]]:
    """Return a function that gives what transformers generates with a folder of a model."""
    known: dict[tuple[str, str], dict[str, Any]] = {}

    def ask(name: str, kind: str) -> dict[str, Any]:
        if (name, kind) not in known:
            model = load(made(name) / kind)
            known[name, kind] = {"outputs": [generate(model, prompt) for prompt in PROMPTS]}
        return known[name, kind]

    return ask
