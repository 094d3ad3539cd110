"""The verb read: is this folder a pruned checkpoint?"""

from pathlib import Path

from ddp_vllm.checkpoint import Checkpoint, read_checkpoint


def read(folder: str | Path) -> Checkpoint:
    """Read and check a pruned checkpoint without loading a weight: widths, number of parameters,
    provenance."""
    return read_checkpoint(Path(folder))
