"""The facts of a model that are read without loading it: its size, its KV cache, its id and its
folder.

A model is given by its folder or by its name on the Hugging Face hub.
"""

import hashlib
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

from ddp_vllm.checkpoint import is_pruned_config, read_checkpoint, read_config
from ddp_vllm.dimensions import CACHED_TYPES, completed, of_layer
from ddp_vllm.errors import ModelError, reading
from ddp_vllm.families import warn, warn_of_foreign_code
from ddp_vllm.formats import SUBBLOCKS, base_type, block_files, is_leftover, opened_in_place
from ddp_vllm.model_files import TOKENIZERS, has_tokenizer
from ddp_vllm.quantized import UnknownFormatError, unpacked
from ddp_vllm.remote_code.files import LARGEST_JSON, WidthsError, file_tensors, read_bytes, read_json, weight_files
from ddp_vllm.remote_code.tensors import Config, dense_type
from ddp_vllm.remote_code.widths import Widths, head_dim, text_config
from ddp_vllm.schema import Count

# the last by Puzzletron
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin", f"{SUBBLOCKS}/*.safetensors")
FOUND_BY_NAME = (  # by transformers and vLLM
    *("config.json", "generation_config.json", "hf_quant_config.json", "*.index.json"),
    *("tokenizer*", *TOKENIZERS, "special_tokens_map.json", "added_tokens.json"),
    *("chat_template*", "additional_chat_templates/*"),
)


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """The facts of one model; sizes are None if its weights are not on this machine."""

    model: str
    """The resolved folder, or the name on the hub."""
    name: str
    """The last part of the folder, or the whole hub name."""
    pruned: bool
    id: str | None = None
    """A hash of the files that determine its answers, by which results are matched to it anywhere;
    see `model_id`."""
    parameters: Count | None = None
    """Number of parameters on disk; tied embeddings are counted once. None too for an unknown
    quantization."""
    weight_bytes: Count | None = None
    kv_bytes_per_token: Count | None = None
    """Bytes of the KV cache per token, in all layers."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def identify(model: str) -> str:
    """Return the resolved folder of a model, or its name on the hub."""
    return str(Path(model).resolve()) if Path(model).is_dir() else model


def describe_model(model: str) -> ModelFacts:
    """Return the facts of a model, read from its config and the headers of its weights.

    Raises: CheckpointError if a pruned folder contradicts itself; ModelError if a dense one cannot
        be read.
    """
    folder = local_folder(model)
    if folder is None:
        return ModelFacts(model=model, name=model, pruned=False)
    name = folder.resolve().name if Path(model).is_dir() else model
    config, files, widths = read_config(folder), _safetensors_files(folder), None
    if is_pruned(folder):
        checkpoint = read_checkpoint(folder)
        widths, parameters = checkpoint.widths, checkpoint.num_parameters or None
    else:
        if opened := _opened(config):
            how = "vLLM with ddp-vllm opens it as it is, for transformers convert it first"
            warn(f"{model}: another tool pruned it; {how}")
            config, widths = opened, Widths.of(opened)
        else:
            warn_of_foreign_code(model, config)
        parameters = _num_parameters(files, config, widths)
    return ModelFacts(
        model=identify(model),
        name=name,
        pruned=widths is not None,
        id=model_id(folder),
        parameters=parameters,
        weight_bytes=sum(path.stat().st_size for path in files) or None,
        kv_bytes_per_token=_kv_bytes(folder, config, widths, size=2),
    )


def dense_kv_bytes(folder: Path, *, value_bytes: int) -> int | None:
    """Return the most bytes of the dense model's KV cache per token, also for a pruned model; None if
    they are not stated.

    Raises: ModelError.
    """
    config = read_config(folder)
    return _kv_bytes(folder, _opened(config) or config, None, size=value_bytes, is_limit=True)


def dense_kv_of_layers(folder: Path, *, value_bytes: int) -> list[int]:
    """Return the bytes per token of the KV cache that each layer of the dense model reads, those of another layer
    too. Raises: ModelError."""
    return _kv_of_layers(folder, text_config(completed(read_config(folder))), None, size=value_bytes)


def _opened(config: Config) -> dict[str, Any] | None:
    """Return `opened_in_place`, or None where vLLM's plugin does not open the model either."""
    with suppress(ModelError):
        return opened_in_place(config)
    return None


def _safetensors_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a model, those that only its index names and Puzzletron's blocks too.
    Raises: ModelError."""
    try:
        return block_files(folder) or weight_files(folder)
    except WidthsError as error:
        raise ModelError(str(error)) from error


def model_id(folder: Path) -> str:
    """Return a hash of what determines a model's answers; it does not depend on the folder.

    It covers config, tokenizer and chat template. Of each weight file it covers the size and 64
    evenly spaced pieces of 4 KiB, the first and the last among them.
    """
    digest = hashlib.sha256()
    for path in sorted({path for pattern in FOUND_BY_NAME for path in folder.glob(pattern) if path.is_file()}):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder)} {len(content)}".encode() + content)
    for path in all_weight_files(folder):
        size = path.stat().st_size
        digest.update(f"{path.relative_to(folder)} {size}".encode())
        with path.open("rb") as file:
            for piece in range(64):
                file.seek(max(0, size - 4096) * piece // 63)
                digest.update(file.read(4096))
    return digest.hexdigest()


def all_weight_files(folder: Path) -> list[Path]:
    """Return the files of a model's weights, in order."""
    return sorted(path for pattern in _WEIGHTS for path in folder.glob(pattern) if path.is_file())


def is_pruned(folder: Path) -> bool:
    """Tell whether ddp-vllm made the folder of a model. Raises: ModelError if it has no config, or one
    that describes widths in two ways."""
    try:
        return is_pruned_config(read_config(folder))
    except WidthsError as error:
        raise ModelError(f"{folder}: {error}") from error


def unrelated(dense: str, pruned: str) -> str:
    """Return in words why a model cannot be a pruned version of another one, by their configs; "" if
    it can, or if a config is not on this machine."""
    folders = list[Path]()
    with suppress(ModelError):
        folders = [folder for model in (dense, pruned) if (folder := known_folder(model))]
    if len(folders) < 2 or not all((folder / "config.json").is_file() for folder in folders):
        return ""
    if is_pruned(folders[0]) and not is_pruned(folders[1]):
        return f"{dense} is pruned and {pruned} is not; are they exchanged?"
    configs = [read_config(folder) for folder in folders]
    kinds = [base_type(dict(config) | {"model_type": dense_type(config)}).removesuffix("_text") for config in configs]
    sizes = [text_config(config).get("hidden_size") for config in configs]
    for name, one, other in (("model_type", *kinds), ("hidden_size", *sizes)):
        if one != other:
            return f"{pruned} is no pruned version of {dense}: its {name} is {other}, not {one}"
    return ""


def tokens_differ(dense: str, pruned: str, *, rows: int = sys.maxsize) -> str:
    """Return in words how the tokens of two models differ; "" if they have the same ids and as many
    rows. rows: of the embedding; tokens beyond them are not compared.

    Only models with the same tokens compare by losses, perplexities, KL and speeds per token; others
    by bits per byte and characters per second. Raises: ModelError if a tokenizer cannot be read.
    """
    first, second = _vocabulary(dense), _vocabulary(pruned)
    sizes = [vocab.pop("", len(vocab)) for vocab in (first, second)]
    if different := {pair for pair in set(first.items()) ^ set(second.items()) if pair[1] < rows}:
        token = min(different, key=lambda item: (item[1], item[0]))[0]
        ids = f"; {token!r} is {first.get(token, 'absent')} and {second.get(token, 'absent')}"
        return f"{dense} and {pruned} have different tokens ({len(first):,} and {len(second):,}{ids})"
    return "" if sizes[0] == sizes[1] else f"{dense} and {pruned} have {sizes[0]:,} and {sizes[1]:,} rows of tokens"


def _vocabulary(model: str) -> dict[str, int]:
    """Return the id of each token, and under "" the rows that the config states."""
    folder = known_folder(model)
    config = read_config(folder) if folder else {}
    if folder and not has_tokenizer(folder):
        raise ModelError(f"{model} has no tokenizer; copy tokenizer.json of the dense model")
    rows = {"": int(size)} if (size := text_config(config).get("vocab_size")) else {}
    with reading(f"the tokenizer of {model}", ModelError, "copy tokenizer.json of the dense model"):
        if folder and (file := folder / "tokenizer.json").is_file():
            from tokenizers import Tokenizer

            return Tokenizer.from_buffer(read_bytes(file, LARGEST_JSON)).get_vocab() | rows
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(model, trust_remote_code=False).get_vocab() | rows


def local_folder(model: str) -> Path | None:
    """Return the folder of a model: the given one, or the snapshot of a hub name whose weights were
    downloaded before.

    Raises: ModelError if `model` looks like a path but does not exist.
    """
    folder = known_folder(model)
    return folder if folder and (Path(model).is_dir() or _is_whole(folder)) else None


def _is_whole(snapshot: Path) -> bool:
    """Tell whether a snapshot has its config and all weight files; the hub's cache also holds
    partial snapshots."""
    if not (snapshot / "config.json").is_file():
        return False
    for weights in ("model.safetensors", "pytorch_model.bin"):
        index = snapshot / f"{weights}.index.json"
        # it is fetched again
        with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
            if index.is_file():
                return all((snapshot / file).is_file() for file in set(read_json(index)["weight_map"].values()))
        if (snapshot / weights).is_file():
            return True
    return False


def known_folder(model: str) -> Path | None:
    """Return the folder of a model, or its snapshot even if incomplete. Raises: ModelError as
    `local_folder`."""
    if (Path(model) / "config.json").is_file():
        return Path(model)
    if Path(model).exists() or model.startswith((".", "/", "~")):
        raise ModelError(f"{model} is not the folder of a model: it has no config.json; pass a folder or a hub name")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, local_files_only=True))
    except HFValidationError as error:
        raise ModelError(f"{model!r} is neither a folder nor a name on the hub ({error})") from error
    except LocalEntryNotFoundError:
        # the hub's client would try for a minute, and every such name there has an owner today
        if "/" not in model:
            raise ModelError(f"{model} is neither a folder here nor a hub name (owner/name); check the path") from None
        return None


def _num_parameters(files: Sequence[Path], config: Config, widths: Widths | None) -> int | None:
    try:
        tensors = (tensor for path in files for tensor in file_tensors(path))
        shapes = unpacked(tensors, config, widths)
        kept = (prod(shape) for name, shape in shapes.items() if not (widths and is_leftover(widths, name, shape)))
        return sum(kept) or None
    except UnknownFormatError as error:
        warn(f"{files[0].parent}: the number of parameters is unknown: {error}")
        return None
    except (WidthsError, OSError) as error:
        raise ModelError(str(error)) from error


def _kv_bytes(folder: Path, config: Config, widths: Widths | None, *, size: int, is_limit: bool = False) -> int | None:
    """Return the bytes per token of the KV cache of all layers, None if the config does not state
    them; widths: None for those of a dense model. is_limit: count layers of other kinds than attention
    too, whose cache does not grow with the context. Raises: ModelError."""
    config = text_config(completed(config))
    layers = _kv_of_layers(folder, config, widths, size=size)
    with reading(f"config.json of {folder}", ModelError, "download the model again"):
        if not is_limit and not {*(config.get("layer_types") or ())} <= CACHED_TYPES:
            return None
        return sum(layers[: len(layers) - int(config.get("num_kv_shared_layers") or 0)]) or None


def _kv_of_layers(folder: Path, config: Config, widths: Widths | None, *, size: int) -> list[int]:
    with reading(f"config.json of {folder}", ModelError, "download the model again"):
        number, layers = int(config.get("num_hidden_layers") or 0), list[int]()
        if config.get("kv_lora_rank"):  # latent attention keeps one compressed vector per layer
            return [size * (int(config["kv_lora_rank"]) + int(config.get("qk_rope_head_dim") or 0))] * number
        if widths and widths.is_family:
            return [2 * size * head_dim(config) * layer.num_kv_heads for layer in widths.layers]
        for index in range(number):
            own = of_layer(config, index)
            heads = int(own.get("num_attention_heads") or 0)
            kv_heads = int(own.get("num_key_value_heads") or own.get("num_kv_heads") or heads)  # as of Falcon
            if own.get("multi_query") and not own.get("new_decoder_architecture"):
                kv_heads = 1
            stated = own.get("head_dim") or (own.get("hidden_size") and heads)
            layers.append(2 * size * head_dim(own) * kv_heads if kv_heads and stated else 0)
        return layers
