"""A dense model and its pruned half, evaluated and measured; and a pruned model with all that its training left."""

from pathlib import Path

import pytest
from written_folders import write_bench, write_evaluation, write_model, write_trained


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    folder = write_model(tmp_path / "base", widths=[(2, 16), (2, 16)], origin=None)
    write_evaluation(folder, 0.8)
    return folder


@pytest.fixture
def pruned(tmp_path: Path, dense: Path) -> Path:
    folder = write_model(tmp_path / "half", widths=[(1, 5), (1, 9)], origin=str(dense))
    write_evaluation(folder, 0.6)
    write_bench(folder / "sharegpt.json", dense, folder, [(1, 1.5), (2, 3.1), (1, 1.45), (1, 1.52), (3, 4.4)])
    return folder


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pruned folder called `a<b`, whose name must be escaped; see `write_trained`."""
    return write_trained(tmp_path_factory.mktemp("trained") / "a<b")
