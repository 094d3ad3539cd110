"""Finds the model of a run on disk and checks it before it is loaded: a local folder, or a snapshot
of a hub name.

The model is dense or, for recovery, a pruned one.
"""

import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from ddp_vllm import machine
from ddp_vllm.checkpoint import Checkpoint, check_head, read_config
from ddp_vllm.dimensions import (
    BLOCK_NAMES,
    Dimensions,
    completed,
    dimensions_of,
    is_copied_head,
    text_config,
    widths_of,
)
from ddp_vllm.errors import CheckpointError, ModelError, Printer, SettingError, reading
from ddp_vllm.families import FAMILIES, check_dense, check_supported, register_pruned, warn_of_foreign_code
from ddp_vllm.formats import check_states_no_widths
from ddp_vllm.hub import hub_fault
from ddp_vllm.model_files import NOT_COPIED, WEIGHT_PATTERNS, has_tokenizer
from ddp_vllm.names import is_hub_name
from ddp_vllm.remote_code.files import INDEX_FILE, WidthsError, checked_tensors, short, weight_files
from ddp_vllm.remote_code.tensors import LAYERS, MODEL_TYPE_PREFIX, dense_type
from ddp_vllm.remote_code.widths import Widths, states_widths

if TYPE_CHECKING:  # which imports torch
    import torch

    from ddp_prune.models.structure import Structure

FORMATS = ("BF16", "F16", "F32")
AGAIN = "download the model again, or update transformers"


@dataclass(frozen=True, kw_only=True)
class Source:
    """A dense or pruned checkpoint on disk."""

    folder: Path
    config: Mapping[str, Any]
    sizes: Dimensions
    """Of the dense model."""
    shapes: Mapping[str, list[int]]
    """Shape of every weight on disk; tied embeddings are listed once, and stacked experts one by
    one."""
    structure: "Structure | None" = None
    """What can be pruned in a model without a row in `FAMILIES`."""
    name: str = ""
    """As the user gave it."""

    @property
    def tokenizer(self) -> str:
        """The name to load the tokenizer by: transformers chooses the class of some tokenizers by
        their name on the Hub, so not the folder of the snapshot."""
        return self.name or str(self.folder)

    @cached_property
    def widths(self) -> Widths:
        """The widths that the config states, and the names on disk that they apply to."""
        return widths_of(self.config)

    @property
    def text_config(self) -> Mapping[str, Any]:
        """The config of the language model."""
        return text_config(self.config)

    @property
    def vocab_size(self) -> int:
        """Tokens that the model knows, as far as its config states them."""
        return int(self.text_config.get("vocab_size") or sys.maxsize)

    @property
    def memory_shapes(self) -> Mapping[str, list[int]]:
        """Shapes of the loaded weights, by names as in the families; those outside of decoder
        layers as embeddings."""
        if not self.structure:
            return self.shapes
        layers, shapes = f"{self.structure.widths.layers_module}.", dict[str, list[int]]()
        for name, shape in self.shapes.items():
            if name.endswith(("lm_head.weight", "embed_out.weight")):
                shapes["lm_head.weight"] = shape
            elif name.startswith(layers):
                shapes[f"{LAYERS}.{name.removeprefix(layers)}"] = shape
            elif name in self.structure.loaded:
                shapes[f"model.embed_tokens.{name}"] = shape
        return shapes

    @property
    def prunable(self) -> tuple[str, ...]:
        """Module types that can have gates."""
        return self.widths.blocks

    def describe_rest(self, print_line: Printer) -> None:
        """Print in one line what is not pruned, because this architecture or the user does not
        allow it."""
        mlps = f"the MLPs of {len(self.sizes.mlp_layers)} layers (--prune mlp,experts)" if self.structure else "MLPs"
        labels = {"attn": "attention", "mlp": mlps, "experts": "routed experts"}
        rest = [*(self.structure.left_alone if self.structure else ())]
        rest += [labels[kind] for kind in self.prunable if kind not in self.sizes.blocks]
        if rest:
            print_line(f"not pruned: {', '.join(rest)}")

    def with_blocks(self, chosen: Collection[str]) -> "Source":
        """Return the source with gates on these module types only. Raises: SettingError for one
        that has none."""
        if lacking := sorted(set(chosen) - set(self.prunable)):
            raise SettingError(
                "prune",
                f"is {','.join(BLOCK_NAMES[kind] for kind in chosen)}, but {BLOCK_NAMES[lacking[0]]} of "
                f"{self.config['model_type']} cannot be pruned; choose from "
                f"{','.join(BLOCK_NAMES[kind] for kind in self.prunable)}",
            )
        blocks = tuple(kind for kind in self.prunable if kind in chosen)
        return replace(self, sizes=replace(self.sizes, blocks=blocks)) if chosen else self


def open_source(model: str, *, load: bool = True, to_prune: bool = True) -> Source:
    """Find the dense model, check it as `read_source`, and turn off transformers' progress bars.
    Raises: ModelError."""
    source = read_source(model, load=load, to_prune=to_prune)
    from transformers.utils import logging

    logging.disable_progress_bar()
    warn_of_foreign_code(model, source.config)
    return source


def check_model(model: str, *, with_tokenizer: bool = True) -> Source | None:
    """Refuse a model that cannot be pruned, before torch is imported. A hub model must be cached or
    within reach.

    with_tokenizer: whether the model's own tokenizer is read. Returns a local folder's model. Raises:
    ModelError.
    """
    if Path(model).is_dir():
        source = read_source(model)
        if with_tokenizer and not has_tokenizer(source.folder):
            raise ModelError(f"{model} has no tokenizer; put tokenizer.json into the model's folder")
        return source
    _check_hub_name(model)
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        is_cached = isinstance(try_to_load_from_cache(model, "config.json"), str)
    except HFValidationError as error:
        raise ModelError(f"{model} is neither a folder nor a hub name ({error}); check the path") from error
    if not is_cached and (fault := hub_fault()):
        raise ModelError(f"{model} is not a folder and cannot be downloaded ({fault}); check name and network")
    return None


def read_source(model: str, *, load: bool = True, to_prune: bool = True) -> Source:
    """Find the dense model and check from its headers that it can be pruned, without torch for a
    local folder.

    load: whether the model will be loaded; otherwise only the headers of a hub model's weights are
        downloaded. to_prune: whether a part of it must be one that can be pruned.
    Raises: ModelError if the folder is unknown, or its weights are unreadable, incomplete or of an
        unsupported family.
    """
    is_local = Path(model).is_dir()
    folder = Path(model) if is_local else _download(model, load=load)
    config, structure = read_config(folder), None
    is_family = str(config.get("model_type")) in FAMILIES
    with _naming(model):
        # a model that we pruned is refused by `check_dense`
        if not str(config.get("model_type")).startswith(MODEL_TYPE_PREFIX):
            check_states_no_widths(config)
        check_dense(config, to_prune=to_prune)
        if is_family:
            check_supported(config)
        tensors = read_headers(folder) if is_local or load else _on_hub(model)
    tensors = {name: tensor for name, tensor in tensors.items() if not is_copied_head(config, name)}
    if is_family:
        _check_names(folder, tensors)
    else:
        from ddp_prune.models.structure import find_structure

        register_pruned(config)  # of DeepSeekMoE v1, which transformers does not know
        with _naming(model):
            shapes_on_disk = {name: shape for name, (shape, _) in tensors.items()}
            structure = find_structure(folder, shapes_on_disk, to_prune=to_prune)
        config = structure.describe(config)
    sizes, shapes = dimensions_of(config), dict[str, list[int]]()
    if sizes.num_experts:  # MLPs of the first layers are a small part of a mixture
        sizes = replace(sizes, blocks=("experts",))
    source = Source(folder=folder, config=config, sizes=sizes, shapes=shapes, structure=structure, name=model)
    for name, (shape, dtype) in tensors.items():
        singles = structure.unstacked(name, shape) if structure else {name: shape}
        if dtype not in FORMATS and (is_family or any(map(source.widths.find, singles))):
            raise ModelError(
                f"{folder}: tensor {short(name)} is {dtype}, but only {', '.join(FORMATS)} are supported; prune the "
                "unquantized checkpoint"
            )
        shapes |= singles
    try:  # the check that every checkpoint made from it will have to pass
        source.widths.check((name, shape, FORMATS[0]) for name, shape in shapes.items())
    except WidthsError as error:
        fault = str(error).partition(";")[0].replace("ddp_layers", "config.json")
        raise ModelError(f"{folder}: {fault}; download the model again, as published") from None
    return source


@contextmanager
def _naming(model: str) -> Iterator[None]:
    """Begin the message of a ModelError with the model's name."""
    try:
        yield
    except ModelError as error:
        raise ModelError(f"{model}: {error}") from None


def open_pruned(checkpoint: Checkpoint, dense: Source, *, same_tokens: bool = True) -> Source:
    """Return a pruned checkpoint as a source, which transformers will load by our own classes.

    same_tokens: whether it must have the tokens of `dense`; they may have been trimmed before pruning.
    Raises: CheckpointError if it is quantized; ModelError if it was not pruned from a model like
        `dense`.
    """
    folder, config = checkpoint.folder, completed(checkpoint.config)
    widths = widths_of(config)
    if config.get("quantization_config") and not states_widths(config):
        raise CheckpointError(f"{folder} is quantized; recover or measure the folder it was made from, then quantize")
    stated = dense.widths if dense.widths.is_family else dense.widths.only(widths.blocks)
    stated = replace(stated, layers=stated.dense_layers, is_renumbered=False)
    # other tools may have added biases
    before = replace(widths, layers=widths.dense_layers, is_renumbered=False, biased=stated.biased)
    vocabularies = (text_config(model).get("vocab_size") for model in (config, dense.config))
    pairs = {"model_type": (dense_type(config), dense.config.get("model_type")), "vocab_size": (*vocabularies,)}
    pairs |= {name: (value, vars(stated)[name]) for name, value in vars(before).items()}
    for name, (one, other) in pairs.items():
        if one != other and (same_tokens or name != "vocab_size"):
            fault = f"{name} {other} instead of {one}, unlike" if isinstance(one, int | str) else f"other {name} than"
            raise ModelError(f"{dense.folder} has {fault} the model that {folder} was pruned from; pass that model")
    if checkpoint.is_stock:
        return open_source(str(folder))
    register_pruned(config)
    if dense.structure:
        return replace(dense, folder=folder, name="", shapes=checkpoint.shapes)
    return Source(folder=folder, config=config, sizes=dense.sizes, shapes=checkpoint.shapes)


def stock_config(folder: Path) -> Any:
    """Return the config of a model as transformers' class reads it. Raises: ModelError."""
    from transformers import AutoConfig

    with reading(folder, ModelError, AGAIN):
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)


def loading_options(source: Source, dtype: str, device: "torch.device | None") -> dict[str, Any]:
    """Return dtype, attention and, of a quantized model, the config for loading the model on
    `device` (None: any that computes in bfloat16).

    `auto` is the stored dtype, but bfloat16 for float16, in which small gradients vanish, and
    float32 instead of bfloat16 on devices that do not compute in it. Gemma-2 requires eager attention:
    transformers' fused attention omits the soft-cap on scores, which the model was trained with and
    vLLM applies. Raises: ModelError if the config is broken.
    """
    import torch
    from safetensors import safe_open

    config = stock_config(source.folder)
    number_format = config.dtype if dtype == "auto" else getattr(torch, dtype)
    if number_format is None:  # not in the config
        with safe_open(weight_files(source.folder)[0], framework="pt") as file:
            number_format = file.get_slice(next(iter(file.keys())))[:1].dtype
    if dtype == "auto" and number_format == torch.float16:
        number_format = torch.bfloat16
    if dtype == "auto" and number_format == torch.bfloat16 and device is not None:
        on_gpu = device.type == "cuda"
        if not (torch.cuda.is_bf16_supported(False) if on_gpu else machine.has_bfloat16()):  # GPUs before Ampere
            number_format = torch.float32
    options: dict[str, Any] = {"dtype": number_format}
    if source.text_config.get("attn_logit_softcapping"):
        options["attn_implementation"] = "eager"
    if source.structure is None and source.config.get("quantization_config"):
        # plain weights; activations are rounded all the same
        config.quantization_config["run_compressed"] = False
        options["config"] = config
    return options


def check_index(folder: Path) -> None:
    """Refuse weights that could be pruned but that transformers cannot load. Raises: ModelError."""
    if not any((folder / name).exists() for name in ("model.safetensors", INDEX_FILE)):
        raise ModelError(
            f"{folder} holds {weight_files(folder)[0].name}, but neither model.safetensors nor {INDEX_FILE}; "
            "download the model again, whole"
        )


def read_headers(folder: Path) -> dict[str, tuple[list[int], str]]:
    """Return shape and dtype of every tensor of a folder, from the headers of its files. Raises:
    ModelError, also as `check_head`."""
    config = read_config(folder)
    try:
        check_head(config, weight_files(folder))
        return {name: (shape, dtype) for name, shape, dtype in checked_tensors(folder)}
    except (WidthsError, OSError) as error:
        raise ModelError(str(error)) from error


def _on_hub(model: str) -> dict[str, tuple[list[int], str]]:
    """Return shape and dtype of every tensor of a hub model, without its weights. Raises: ModelError."""
    from huggingface_hub import get_safetensors_metadata

    with _downloading(model):
        files = get_safetensors_metadata(model).files_metadata.values()
    return {name: (header.shape, header.dtype) for file in files for name, header in file.tensors.items()}


def _check_names(folder: Path, names: Collection[str]) -> None:
    """Refuse a decoder that was saved without the prefix of the whole model. Raises: ModelError.

    transformers can load it, but the export requires the prefix.
    """
    prefix = f"{LAYERS}."
    if not any(name.startswith(prefix) for name in names):
        raise ModelError(
            f"{folder} names its tensors like {min(names, default='')!r}, not {prefix}…; load it with "
            "transformers' AutoModelForCausalLM, write it with save_pretrained to another folder, and prune that"
        )


def _check_hub_name(model: str) -> None:
    if Path(model).suffix == ".gguf":
        raise ModelError(f"{model} is a GGUF file, which cannot be pruned; give the folder it was made from")
    if not is_hub_name(model):
        raise ModelError(f"{model} is neither a folder nor a hub name (owner/name); check the path")


def _download(model: str, *, load: bool) -> Path:
    _check_hub_name(model)
    from huggingface_hub import snapshot_download

    with _downloading(model):
        return Path(snapshot_download(model, ignore_patterns=[*NOT_COPIED, *(() if load else WEIGHT_PATTERNS)]))


@contextmanager
def _downloading(model: str) -> Iterator[None]:
    """Turn the errors of the hub's client into a ModelError."""
    try:
        yield
    except Exception as error:  # of several libraries
        reason = shorten(str(error).strip().split("\n")[0], 200)
        raise ModelError(
            f"{model} is not a folder and cannot be downloaded ({reason}); check name and network"
        ) from error
