"""Writes a checkpoint: weights in shards, config, tokenizer and code.

Tensors are read and written one by one, so memory holds about one output shard, however large the
model is.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from ddp_vllm.checkpoint import Checkpoint
from ddp_vllm.families import pruned_config
from ddp_vllm.model_files import finish_shards, save_tensors, write_model_files
from ddp_vllm.remote_code.files import weight_files
from ddp_vllm.remote_code.tensors import dense_type

MAX_SHARD_BYTES = 4_000_000_000


def stored_tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of a checkpoint with its name on disk."""
    for path in weight_files(folder):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (no mapping)
                yield name, file.get_tensor(name)


def write_model(
    folder: Path, source: Path, config: Mapping[str, Any], tensors: Iterable[tuple[str, torch.Tensor]]
) -> None:
    """Write weights and config, and copy the tokenizer and other data files of `source`. A pruned
    model also gets the code that loads it."""
    write_model_files(folder, source, config)
    write_weights(tensors, folder)


def write_weights(tensors: Iterable[tuple[str, torch.Tensor]], folder: Path) -> None:
    """Write named tensors into shards of at most MAX_SHARD_BYTES, one in memory at a time, and
    their index."""
    shards: list[tuple[Path, list[str]]] = []
    held: dict[str, torch.Tensor] = {}

    def flush() -> None:
        path = folder / f"shard-{len(shards)}.tmp"
        save_tensors(held, path, {"format": "pt"})
        shards.append((path, list(held)))
        held.clear()

    for name, tensor in tensors:
        if held and sum(tensor.nbytes for tensor in held.values()) + tensor.nbytes > MAX_SHARD_BYTES:
            flush()
        held[name] = tensor
    flush()
    finish_shards(folder, shards)


def config_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the config of a checkpoint for a new copy of it; the only code that it names is
    ours."""
    if not checkpoint.widths.is_family:
        return dict(checkpoint.config)
    return pruned_config({**checkpoint.config, "model_type": dense_type(checkpoint.config)}, checkpoint.widths)
