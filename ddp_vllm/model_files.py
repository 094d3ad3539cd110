"""Writes a model's folder: config, tokenizer, code, and weights in shards.

Tensors are read and written one by one, so memory holds about one shard, however large the model is.
Importing it does not import torch.
"""

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ddp_vllm.families import code_of
from ddp_vllm.remote_code.files import INDEX_FILE, weight_files
from ddp_vllm.remote_code.tensors import Config

MAX_SHARD_BYTES = 4_000_000_000
LARGEST = 200_000_000  # bytes of a file that is copied along; tokenizers take up to 40 MB
WEIGHT_PATTERNS = ("*.safetensors", "*.safetensors.index.json")
# neither copied along with a model nor downloaded, unlike all other files of its folder
NOT_COPIED = (
    *("*.bin", "*.bin.*", "*.pt", "*.pth", "*.ckpt*", "*.h5", "*.msgpack", "*.gguf", "*.onnx*", "*.tflite", "*.pkl"),
    *("*.npz", "*.tar*", "*.zip", "consolidated*", "params.json"),  # other formats' copies
    *("*.py", "*.pyc", "*.so", "*.sh", "*.ipynb"),
    *("README.md", "report.html", "ddp_*", "sharegpt-*", "hf_quant_config.json", ".*"),
    *("[!a]*/*", "a[!d]*/*"),  # all folders but additional_chat_templates
)
TOKENIZERS = ("tokenizer.json", "*.model", "*.model.v*", "vocab*", "*.tiktoken", "tekken.json", "merges*")


def tokenizer_and_config_files(folder: Path) -> list[Path]:
    """Return the files that are copied along with a model's weights: tokenizer, processors of
    pictures, templates, licenses, and whatever else is small. `check_links` must have checked the
    folder."""
    files = [file for pattern in ("*", "*/*") for file in sorted(folder.glob(pattern)) if file.is_file()]
    skipped = {
        file
        for pattern in (*NOT_COPIED, *WEIGHT_PATTERNS)
        for file in files
        if fnmatchcase(file.relative_to(folder).as_posix(), pattern)
    }
    return [file for file in files if file not in skipped and file.stat().st_size <= LARGEST]


def has_tokenizer(folder: Path) -> bool:
    """Tell whether a folder has the files of a tokenizer."""
    return any(any(folder.glob(pattern)) for pattern in TOKENIZERS)


def write_model_files(folder: Path, source: Path, config: Config) -> None:
    """Write the config, and copy the tokenizer and other data files of `source`. A pruned model
    also gets its code."""
    for file in tokenizer_and_config_files(source):
        if file.name != "config.json":
            copy = folder / file.relative_to(source)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, copy)
    for path in folder.glob("*config.json"):
        settings = _settings(path)
        if settings.pop("auto_map", None) is not None:  # it would name code, which is not copied
            write_json(settings, path)
    write_json(config, folder / "config.json")
    for file in code_of(config):
        shutil.copyfile(file, folder / file.name)


def write_json(content: Mapping[str, Any], path: Path) -> None:
    """Write an object as indented JSON."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def save_tensors(tensors: dict[str, Any], path: Path, metadata: dict[str, str]) -> None:
    """Write a safetensors file. Raises: OSError, also where safetensors raises an error of its
    own."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, path, metadata)
    except SafetensorError as error:
        raise OSError(str(error)) from error


def stored_tensors(folder: Path) -> Iterator[tuple[str, Any]]:
    """Yield every tensor of a checkpoint, of torch, with its name on disk."""
    from safetensors import safe_open

    for path in weight_files(folder):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (no mapping)
                yield name, file.get_tensor(name)


def write_model(folder: Path, source: Path, config: Config, tensors: Iterable[tuple[str, Any]]) -> None:
    """Write weights and config, and copy the tokenizer and other data files of `source`. A pruned
    model also gets the code that loads it."""
    write_model_files(folder, source, config)
    write_weights(tensors, folder)


def write_weights(tensors: Iterable[tuple[str, Any]], folder: Path) -> None:
    """Write named tensors of torch into files of at most MAX_SHARD_BYTES, one in memory at a time,
    and their index.

    Even a single file gets an index: without it vLLM loads every safetensors file, the masks among
    them. Raises: OSError, also where safetensors raises an error of its own.
    """
    shards: list[tuple[Path, list[str]]] = []
    held: dict[str, Any] = {}

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
    total, weight_map = 0, dict[str, str]()
    for number, (path, names) in enumerate(shards, 1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        total += path.rename(folder / file).stat().st_size
        weight_map |= dict.fromkeys(names, file)
    write_json({"metadata": {"total_size": total}, "weight_map": weight_map}, folder / INDEX_FILE)


def _settings(path: Path) -> dict[str, Any]:
    """Return the content of a file of settings; {} if it cannot be read, in which case transformers
    fails too."""
    with suppress(OSError, ValueError, RecursionError):
        settings = json.loads(path.read_text(encoding="utf-8"))
        return settings if isinstance(settings, dict) else {}
    return {}


@contextmanager
def errors_only() -> Iterator[None]:
    """Let transformers log no warnings, where our own lines state what matters."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def tokenizer_class(tokenizer: Any) -> str:
    """Return the name of a tokenizer's class as tokenizer_config.json states it."""
    name = type(tokenizer).__name__
    return "PreTrainedTokenizerFast" if name == "TokenizersBackend" else name  # the name in transformers 4


def state_class(folder: Path, name: str) -> None:
    """Let transformers load the tokenizer of a folder by the class of this name."""
    path = folder / "tokenizer_config.json"
    if (settings := _settings(path)).get("tokenizer_class") != name:
        write_json(settings | {"tokenizer_class": name}, path)


def state_tokenizer(model: str | Path, target: Path, *, has_own_type: bool) -> None:
    """Let transformers load from `target` the tokenizer that it loads for the dense model.

    transformers chooses its class and repairs it by names, whatever the files state: by the model's
    name on the Hub, and by `model_type`. So the class that it chose is stated, and where that does
    not suffice, the tokenizer is written as it is in memory, with all repairs.

    model: the dense one, by the name that the user gave. has_own_type: whether the pruned model has
    a `model_type` of its own.
    """
    from transformers import AutoTokenizer

    if not has_tokenizer(target):
        return
    try:
        dense = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    except Exception:  # a tokenizer that does not load for the dense model need not load for the pruned one
        return

    def is_same() -> bool:
        """Compare normalization, splitting, vocabulary and decoding."""
        with suppress(Exception), errors_only():  # it does not know our model types
            own = AutoTokenizer.from_pretrained(target, trust_remote_code=False)
            return bool(own.backend_tokenizer.to_str() == dense.backend_tokenizer.to_str())
        return False

    is_fast = getattr(dense, "is_fast", False)
    if has_own_type or (is_fast and not is_same()):
        state_class(target, tokenizer_class(dense))
    if is_fast and not is_same():
        dense.save_pretrained(target)
        state_class(target, "PreTrainedTokenizerFast")
