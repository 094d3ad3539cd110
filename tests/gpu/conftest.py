"""Tests that need a GPU; `LEASE_DRY=1` runs them on a CPU in tiny sizes."""

import os
import sys
from pathlib import Path

import pytest
import torch

KIT = Path(__file__).parents[2] / "benchmarks" / "borrowed_gpu"
sys.path.append(str(KIT))
if os.environ.get("LEASE_DRY"):
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not (torch.cuda.is_available() or os.environ.get("LEASE_DRY")):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
