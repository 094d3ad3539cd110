"""Writes a checkpoint: weights in shards, config, tokenizer, code and model card.

Tensors are read and written one by one, so memory holds about one output shard, however large the model is.
"""

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ddp_models.source import tokenizer_and_config_files, weight_files
from ddp_vllm.checkpoint import Checkpoint, read_checkpoint
from ddp_vllm.families import pruned_config
from ddp_vllm.pages.card import model_card
from ddp_vllm.remote_code import FILES
from ddp_vllm.remote_code.files import INDEX_FILE
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
    """Write weights and config, and copy the tokenizer and other data files of `source`. A pruned model also gets the
    code that loads it."""
    for file in tokenizer_and_config_files(source):
        if file.name != "config.json":
            copy = folder / file.relative_to(source)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, copy)
    tokenizer = folder / "tokenizer_config.json"
    settings = _tokenizer_settings(tokenizer)
    if settings.pop("auto_map", None) is not None:  # it would name code, which is not copied
        _write_json(settings, tokenizer)
    _write_json(config, folder / "config.json")
    for file in FILES if "ddp_layers" in config else ():
        shutil.copyfile(file, folder / file.name)
    write_weights(tensors, folder)


def write_weights(tensors: Iterable[tuple[str, torch.Tensor]], folder: Path) -> None:
    """Write named tensors into shards of at most MAX_SHARD_BYTES, one in memory at a time, and their index."""
    shards: list[list[str]] = []
    held: dict[str, torch.Tensor] = {}

    def flush() -> None:
        save_tensors(held, folder / f"shard-{len(shards)}.tmp", {"format": "pt"})
        shards.append(list(held))
        held.clear()

    for name, tensor in tensors:
        if held and sum(each.nbytes for each in held.values()) + tensor.nbytes > MAX_SHARD_BYTES:
            flush()
        held[name] = tensor
    flush()
    total_size, weight_map = 0, dict[str, str]()
    for number, names in enumerate(shards):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        written = (folder / f"shard-{number}.tmp").rename(folder / file)
        total_size += written.stat().st_size
        weight_map |= dict.fromkeys(names, file)
    # even one shard gets an index: without it vLLM loads every safetensors file, the masks among them
    _write_json({"metadata": {"total_size": total_size}, "weight_map": weight_map}, folder / INDEX_FILE)


def save_tensors(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
    """Write a safetensors file. Raises: OSError, also where safetensors raises an error of its own."""
    try:
        save_file(tensors, path, metadata)
    except SafetensorError as error:
        raise OSError(str(error)) from error


def write_card(folder: Path, output: Path) -> Checkpoint:
    """Check a folder that will become `output`, write its model card, and return it as the checkpoint at `output`."""
    checkpoint = read_checkpoint(folder)
    (folder / "README.md").write_text(model_card(checkpoint, output.name), encoding="utf-8")
    return replace(checkpoint, folder=output)


def config_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the config of a checkpoint for a new copy of it; the only code that it names is ours."""
    if checkpoint.stock:
        return dict(checkpoint.stock)
    return pruned_config({**checkpoint.config, "model_type": dense_type(checkpoint.config)}, checkpoint.layers)


def _write_json(content: Mapping[str, Any], path: Path) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _tokenizer_settings(path: Path) -> dict[str, Any]:
    """Return the content of a tokenizer_config.json; {} if it cannot be read, in which case transformers fails too."""
    with suppress(OSError, ValueError, RecursionError):
        settings = json.loads(path.read_text(encoding="utf-8"))
        return settings if isinstance(settings, dict) else {}
    return {}


def state_tokenizer_class(source: Path, target: Path) -> None:
    """State in tokenizer_config.json the class by which transformers loads the dense model's tokenizer.

    transformers sometimes chooses the class by model type, whatever tokenizer_config.json states. The pruned model has
    a type of its own, for which transformers would choose another class.
    """
    from transformers import AutoTokenizer

    if not any(target.glob("tokenizer*")):
        return
    try:
        name = type(AutoTokenizer.from_pretrained(source, trust_remote_code=False)).__name__
    except Exception:  # a tokenizer that does not load for the dense model need not load for the pruned one
        return
    name = "PreTrainedTokenizerFast" if name == "TokenizersBackend" else name  # the name in transformers 4
    path = target / "tokenizer_config.json"
    settings = _tokenizer_settings(path)
    if settings.get("tokenizer_class") != name:
        _write_json(settings | {"tokenizer_class": name}, path)
