"""The dense model: a local folder, or a hub name downloaded into the hub's own cache; checked, then loaded.

And the pruned one that was cut from it, where its weights shall learn.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch

from ddp_vllm.checkpoint import Checkpoint, read_config
from ddp_vllm.errors import CheckpointError, ModelError, OutputError, reading
from ddp_vllm.families import (
    Dimensions,
    Family,
    dense_layers,
    dimensions_of,
    family_of,
    pruned_config,
    register_pruned,
)
from ddp_vllm.remote_code.files import INDEX_FILE, WidthsError, file_tensors, index_map, short
from ddp_vllm.remote_code.tensors import LAYERS, dense_type
from ddp_vllm.remote_code.widths import ModelWidths

COMPANIONS = (  # files beside the weights that a checkpoint needs: data that we know by name, never code
    *("config.json", "generation_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "tokenizer.model.v3", "tekken.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "spiece.model", "sentencepiece.bpe.model"),
    *("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja"),
    *("LICENSE", "LICENSE.md", "LICENSE.txt", "LICENSE-CODE", "LICENSE-MODEL", "NOTICE", "NOTICE.md", "NOTICE.txt"),
)
WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
FORMATS = ("BF16", "F16", "F32")
AGAIN = "download the model again, or update transformers"
COPIES = ["consolidated*", "original/*"]  # the same weights once more, in the format of those who trained the model


@dataclass(frozen=True, kw_only=True)
class Source:
    """A checkpoint on disk: a dense one, or one that was pruned."""

    folder: Path
    config: Mapping[str, Any]
    family: Family
    """Of the dense model."""
    sizes: Dimensions
    """Of the dense model."""


def open_source(model: str) -> Source:
    """Find the dense model, check that it can be pruned, and see to it that transformers can read it.

    No weight is loaded. Raises: ModelError if the folder is unknown, holds no readable safetensors or is of a family
    without a row.
    """
    folder = Path(model) if Path(model).is_dir() else _download(model)
    config = read_config(folder)
    try:
        family, sizes = family_of(config), dimensions_of(config)
    except ModelError as error:
        raise ModelError(f"{model}: {error}") from None
    source = Source(folder=folder, config=config, family=family, sizes=sizes)
    shapes = weight_shapes(source)
    _check_names(source, shapes)
    _check_shapes(source, shapes)
    try:  # as what is made of it will be
        widths = ModelWidths.of(pruned_config(config, dense_layers(config)))
        widths.checked((name, shape, FORMATS[0]) for name, shape in shapes.items())
    except WidthsError as error:
        fault = str(error).partition(";")[0]
        raise ModelError(f"{folder}: {fault}, unlike in its family's models; download the model again") from None
    _prepare_transformers(config)
    return source


def open_pruned(checkpoint: Checkpoint, dense: Source) -> Source:
    """Return a pruned checkpoint that was cut from a model like `dense`, for transformers to load by our own classes.

    Raises: CheckpointError if it is quantised; ModelError if `dense` has other sizes, another vocabulary or family.
    """
    folder, config = checkpoint.folder, checkpoint.config
    if config.get("quantization_config"):
        raise CheckpointError(
            f"{folder} is quantised; give the folder it was made of: recover or measure that, then quantise"
        )
    own = dict(config, model_type=dense_type(config))
    for key in ("model_type", "vocab_size", "tie_word_embeddings"):
        if (ours := own.get(key)) != (theirs := dense.config.get(key)):
            raise ModelError(
                f"{dense.folder} has {key} {theirs}, but {folder} has {ours}; give the model it was pruned from"
            )
    if (ours := dimensions_of(own)) != dense.sizes:
        differing = [name for name, value in vars(ours).items() if value != getattr(dense.sizes, name)]
        raise ModelError(
            f"{dense.folder} has another {differing[0]} than {folder} had before it was pruned; give the model it was "
            "pruned from"
        )
    if checkpoint.stock:
        return open_source(str(folder))
    register_pruned(config)
    return Source(folder=folder, config=config, family=dense.family, sizes=dense.sizes)


def companions(folder: Path) -> list[Path]:
    """Return the files of a model that travel with its weights; `checkpoint.check_links` has checked the folder."""
    return [file for pattern in COMPANIONS for file in sorted(folder.glob(pattern)) if file.is_file()]


def check_spares_source(output: Path, source: Source) -> None:
    """Refuse an output that would replace the dense model itself. Raises: OutputError."""
    if source.folder.resolve().is_relative_to(output.resolve()):
        raise OutputError(f"{output} holds the dense model, which --overwrite would delete; choose another folder")


def check_index(folder: Path) -> None:
    """Refuse weights that can be cut as they are, but that transformers cannot load. Raises: ModelError."""
    if not any((folder / name).exists() for name in ("model.safetensors", INDEX_FILE)):
        raise ModelError(
            f"{folder} holds {weight_files(folder)[0].name}, but neither model.safetensors nor {INDEX_FILE}; "
            "download the model again, whole"
        )


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a dense checkpoint, those that transformers reads. Raises: ModelError.

    `model.safetensors` goes before the files that the index names; where there is neither, any will do.
    """
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    if not (folder / INDEX_FILE).exists():
        return sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("*.safetensors"))
    try:
        return [folder / name for name in sorted(set(index_map(folder / INDEX_FILE).values()))]
    except WidthsError as error:
        raise ModelError(str(error)) from error


def weight_shapes(source: Source) -> dict[str, list[int]]:
    """Return the shape of every parameter of a dense model, from the headers of its weights alone.

    Raises: ModelError if there are none, or a file cannot be read, as one that is cut short.
    """
    shapes: dict[str, list[int]] = {}
    files = weight_files(source.folder)
    if not files:
        raise ModelError(f"{source.folder} holds no .safetensors weights; convert the model with save_pretrained")
    for path in files:
        try:
            found = list(file_tensors(path))
        except (WidthsError, OSError) as error:
            raise ModelError(f"{path} cannot be read ({error}); download the model again") from error
        for name, shape, dtype in found:
            if name in shapes:
                raise ModelError(f"{path}: tensor {short(name)} is in another file too; download the model again")
            shapes[name] = shape
            if dtype not in FORMATS:
                raise ModelError(
                    f"{path}: tensor {short(name)} is {dtype}; supported are {', '.join(FORMATS)}: prune the "
                    "unquantised checkpoint"
                )
    if source.config.get("tie_word_embeddings"):
        shapes.pop("lm_head.weight", None)  # some write the embedding down twice
    return shapes


def _check_names(source: Source, shapes: Mapping[str, list[int]]) -> None:
    """The decoder's tensors must be named as those of the whole model. Raises: ModelError.

    transformers also loads a decoder that was saved alone, without the prefix that the export looks for.
    """
    prefix = f"{LAYERS}."
    if not any(name.startswith(prefix) for name in shapes):
        raise ModelError(
            f"{source.folder} names its tensors like {min(shapes, default='')!r}, not {prefix}…; load it with "
            "transformers' AutoModelForCausalLM, write it with save_pretrained to another folder, and prune that"
        )


def _check_shapes(source: Source, shapes: Mapping[str, list[int]]) -> None:
    """Every weight that the export cuts must be there, of the size that the config states. Raises: ModelError."""
    sizes, wanted = source.sizes, {}
    for layer in range(sizes.num_layers):
        for projection in source.family.tensors.projections:
            numbers = range(sizes.num_experts) if layer in sizes.routed_layers else range(0)
            length = sum(map(sizes.units_in, projection.units)) * projection.unit_size(sizes.head_dim)
            shape = [length, sizes.hidden_size] if projection.axis == 0 else [sizes.hidden_size, length]
            for number in numbers if projection.block == "experts" else (0,):
                wanted[f"{LAYERS}.{layer}.{projection.name.format(number)}.weight"] = shape
    for name in shapes:
        place = name.removeprefix(f"{LAYERS}.").partition(".")[0]
        if name.startswith(f"{LAYERS}.") and (not place.isdecimal() or int(place[:9]) >= sizes.num_layers):
            raise ModelError(
                f"{source.folder}: tensor {short(name)} is of a layer past the {sizes.num_layers} of config.json; "
                "download the model again"
            )
    wrong = [name for name, shape in wanted.items() if shapes.get(name) != shape]
    if known := [name for name in wrong if name in shapes]:
        raise ModelError(
            f"{source.folder}: tensor {known[0]} has shape {shapes[known[0]]}, but config.json asks for "
            f"{wanted[known[0]]}; download the model again"
        )
    check_complete(source, wrong)


def _download(model: str) -> Path:
    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise ModelError(f"{model} is no folder here and no hub name (owner/name); check the path")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=[*COMPANIONS, *WEIGHTS], ignore_patterns=COPIES))
    except Exception as error:  # the hub's client raises many kinds, of several libraries
        reason = shorten(str(error).strip().split("\n")[0], 200)
        raise ModelError(
            f"{model} is no folder here and cannot be downloaded ({reason}); check name and network"
        ) from error


def _prepare_transformers(config: Mapping[str, Any]) -> None:
    """Teach transformers the family that it does not know, model and tokenizer, and silence its progress bars."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    if config["model_type"] == "deepseek":
        from ddp_vllm.remote_code.modeling_ddp_moe import register_deepseek

        register_deepseek()


def loading_options(source: Source, dtype: str, device: torch.device | None) -> dict[str, Any]:
    """Return the number format and the attention that transformers shall give the model on `device` (None: a CPU).

    `auto` is the stored format, but bfloat16 for float16, in which small gradients would vanish. On GPUs older than
    Ampere, which multiply no bfloat16, it is float32 for both. transformers' fused attention leaves out the cap on
    scores that Gemma-2 was trained with and vLLM applies.
    """
    from safetensors import safe_open
    from transformers import AutoConfig

    wanted = (
        AutoConfig.from_pretrained(source.folder, trust_remote_code=False).dtype
        if dtype == "auto"
        else getattr(torch, dtype)
    )
    if wanted is None:  # the config does not say
        with safe_open(weight_files(source.folder)[0], framework="pt") as file:
            wanted = file.get_slice(next(iter(file.keys())))[:1].dtype
    if dtype == "auto" and wanted == torch.float16:
        wanted = torch.bfloat16
    on_gpu = device is not None and device.type == "cuda"
    if dtype == "auto" and wanted == torch.bfloat16 and on_gpu and not torch.cuda.is_bf16_supported(False):
        wanted = torch.float32
    attention = {"attn_implementation": "eager"} if source.config.get("attn_logit_softcapping") else {}
    return {"dtype": wanted, **attention}


def load_model(source: Source, dtype: str, device: torch.device | None = None) -> Any:
    """Load the stock transformers model, frozen, in eval mode; onto `device`, and not by way of host memory.

    Raises: ModelError if weights are missing, which transformers would make up, or of another shape.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    with reading(source.folder, ModelError, AGAIN):
        options = loading_options(source, dtype, device)
    if device is not None and device.type != "cpu":
        options["device_map"] = {"": device}
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # what it tells of missing weights, our error says
    try:
        with reading(source.folder, ModelError, AGAIN, but=(torch.OutOfMemoryError,)):
            model, loaded = AutoModelForCausalLM.from_pretrained(
                source.folder,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                trust_remote_code=False,
                **options,
            )
    finally:
        logging.set_verbosity(verbosity)
    check_complete(source, {*loaded["missing_keys"], *(name for name, *_ in loaded["mismatched_keys"])})
    model.requires_grad_(False)
    return model.eval()


def check_complete(source: Source, lacking: Collection[str]) -> None:
    """Refuse a checkpoint that lacks weights, named as transformers names them. Raises: ModelError."""
    if lacking:
        raise ModelError(
            f"{source.folder} lacks {min(lacking)}, or has it in another shape than config.json asks for "
            f"({len(lacking)} weights in all); download the model again, as published"
        )
