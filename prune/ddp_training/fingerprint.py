"""The identity of a run: the settings that decide its result, and the fingerprint of its text, weights and configs."""

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from ddp_vllm.manifest import sha256

INDECISIVE = (  # settings that do not change the result, and settings whose resolved values are compared instead
    *("save_every", "micro_batch_size", "activation_checkpointing", "shard", "recover", "train", "optimizer"),
    *("profile", "watch"),
)
DERIVED_FROM_MINUTES = ("steps", "batch_size", "seq_len")
PAGES, PAGE = 64, 4096  # a fingerprint reads so many pages of so many bytes from a weight file, evenly spread


def decisive(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a recipe that decide its result; minutes stand for the settings derived from them."""
    left_out = (*INDECISIVE, *(DERIVED_FROM_MINUTES if recipe.get("minutes") and "steps" in recipe else ()))
    return {name: value for name, value in recipe.items() if name not in left_out}


def fingerprint(
    text: Iterable[torch.Tensor], weights: Iterable[Path], config_files: Iterable[Path], *, profile: str = ""
) -> dict[str, Any]:
    """Return the training-data fingerprint: hashes of text blocks, weights, config, tokenizer files and profile.

    A weight file is identified by name, size, time and some of its pages, which differ after any training.
    config_files: config and tokenizer files. profile: path of the latency profile that decides the budget, if any.
    """
    digest = hashlib.sha256()
    for blocks in text:
        digest.update(f"{list(blocks.shape)}".encode())
        digest.update(blocks.contiguous().numpy().data)
    files = [(path.name, path.stat(), _hash_of_pages(path)) for path in weights]
    hashes = [(path.name, sha256(path)) for path in config_files]
    return {
        "text": digest.hexdigest(),
        "weights": [[name, status.st_size, status.st_mtime_ns, pages] for name, status, pages in files],
        "config": [each for name, each in hashes if name == "config.json"],
        "tokenizer": [[name, each] for name, each in hashes if name != "config.json"],
        **({"profile": sha256(Path(profile))} if profile else {}),
    }


def _hash_of_pages(path: Path) -> str:
    size, digest = path.stat().st_size, hashlib.sha256()
    with open(path, "rb") as file:
        for number in range(PAGES):
            file.seek(max(0, size - PAGE) * number // (PAGES - 1))
            digest.update(file.read(PAGE))
    return digest.hexdigest()
