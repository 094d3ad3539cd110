from typing import Any

import pytest
from serving import Serve, serve_in_new_process


@pytest.fixture(scope="session")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Serve:
    """Return a function that serves folders with real vLLM in a new process."""
    cache = tmp_path_factory.mktemp("vllm_cache")  # a model compiled in an earlier session would prove nothing

    def run(jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return serve_in_new_process(jobs, tmp_path_factory.mktemp("serve"), cache)

    return run
