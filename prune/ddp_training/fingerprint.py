"""The identity of a run: the settings that decide its result, and the fingerprint of its text, weights and configs."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from ddp_vllm.manifest import sha256

INDECISIVE = (  # settings that do not change the result, and settings whose resolved values are compared instead
    *("save_every", "micro_batch_size", "activation_checkpointing", "shard", "recover_minutes", "train", "optimizer"),
    *("profile", "watch"),
)
DERIVED_FROM_MINUTES = ("steps", "batch_size", "seq_len")
PAGE = 4096  # bytes of a tensor that a fingerprint reads


def decisive(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a recipe that decide its result; minutes stand for the settings derived from them."""
    left_out = (*INDECISIVE, *(DERIVED_FROM_MINUTES if recipe.get("minutes") and "steps" in recipe else ()))
    return {name: value for name, value in recipe.items() if name not in left_out}


def fingerprint(
    text: Iterable[torch.Tensor], weights: Iterable[Path], config_files: Iterable[Path], *, profile: str = ""
) -> dict[str, Any]:
    """Return the training-data fingerprint: hashes of text blocks, weights, config, tokenizer files and profile.

    A weight file is identified by its name, size and header, and by a page of each tensor, which differs after any
    training. Its time is left out: the same weights can be downloaded again.
    config_files: config and tokenizer files. profile: path of the latency profile that decides the budget, if any.
    """
    digest = hashlib.sha256()
    for blocks in text:
        digest.update(f"{list(blocks.shape)}".encode())
        digest.update(blocks.contiguous().numpy().data)
    hashes = [(path.name, sha256(path)) for path in config_files]
    return {
        "text": digest.hexdigest(),
        "weights": [[path.name, path.stat().st_size, _hash_of_pages(path)] for path in weights],
        "config": [each for name, each in hashes if name == "config.json"],
        "tokenizer": [[name, each] for name, each in hashes if name != "config.json"],
        **({"profile": sha256(Path(profile))} if profile else {}),
    }


def _hash_of_pages(path: Path) -> str:
    """Return a hash of a safetensors file's header, and of the page in the middle of each tensor."""
    with open(path, "rb") as file:
        header = file.read(int.from_bytes(file.read(8), "little"))
        digest, start = hashlib.sha256(header), file.tell()
        spans = [entry["data_offsets"] for name, entry in json.loads(header).items() if name != "__metadata__"]
        for first, end in sorted(spans):
            file.seek(start + max(first, (first + end - PAGE) // 2))
            digest.update(file.read(min(PAGE, end - first)))
    return digest.hexdigest()
