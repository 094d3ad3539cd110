"""The verbs read and verify: is this folder a pruned checkpoint, and is it as it was written?"""

from pathlib import Path

from ddp_vllm.checkpoint import Checkpoint, read_checkpoint
from ddp_vllm.manifest import check_manifest


def read(folder: str | Path) -> Checkpoint:
    """Read and check a pruned checkpoint without loading a weight: widths, number of parameters,
    provenance."""
    return read_checkpoint(Path(folder))


def verify(folder: str | Path) -> list[str]:
    """Compare every file of a pruned checkpoint with its SHA-256, check the checkpoint, and return
    the files' names."""
    hashes = check_manifest(Path(folder))
    read(folder)
    return list(hashes)
