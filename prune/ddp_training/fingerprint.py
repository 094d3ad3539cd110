"""The training-data fingerprint: the identity of a run's text, weights, configs and latency
profile."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from ddp_vllm.cache import sha256

PAGE = 4096  # bytes of a tensor that a fingerprint reads


def fingerprint(
    text: Iterable[torch.Tensor], weights: Iterable[Path], config_files: Iterable[Path], *, profile: str = ""
) -> dict[str, Any]:
    """Return the training-data fingerprint: hashes of text blocks, weights, config, tokenizer files
    and profile.

    A weight file is identified by its name, size and header, and by a page of each tensor, which
    differs after any training. Its time is left out: the same weights can be downloaded again.
    config_files: config and tokenizer files. profile: path of the latency profile that decides the
        budget, if any.
    """
    digest = hashlib.sha256()
    for blocks in text:
        digest.update(f"{list(blocks.shape)}".encode())
        digest.update(blocks.contiguous().numpy().data)
    hashes = [(path.name, sha256(path)) for path in config_files]
    return {
        "text": digest.hexdigest(),
        "weights": [[path.name, path.stat().st_size, _hash_of_pages(path)] for path in weights],
        "config": [digest for name, digest in hashes if name == "config.json"],
        "tokenizer": [[name, digest] for name, digest in hashes if name != "config.json"],
        **({"profile": sha256(Path(profile))} if profile else {}),
    }


def _hash_of_pages(path: Path) -> str:
    """Return a hash of a safetensors file's header, and of the page in the middle of each
    tensor."""
    with open(path, "rb") as file:
        header = file.read(int.from_bytes(file.read(8), "little"))
        digest, start = hashlib.sha256(header), file.tell()
        spans = [entry["data_offsets"] for name, entry in json.loads(header).items() if name != "__metadata__"]
        for first, end in sorted(spans):
            file.seek(start + max(first, (first + end - PAGE) // 2))
            digest.update(file.read(min(PAGE, end - first)))
    return digest.hexdigest()
