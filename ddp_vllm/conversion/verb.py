"""The verb convert: write what another tool pruned as a checkpoint of ddp-vllm. Bytes of tensors
are copied, not read.

Weights are copied file by file in pieces, so memory holds none of them. Nothing here imports torch.
"""

import json
import os
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Annotated, Any

from ddp_vllm.checkpoint import Checkpoint, read_config
from ddp_vllm.conversion.shapes import AGAIN, read_layers
from ddp_vllm.conversion.stock import describe
from ddp_vllm.dimensions import EXPERT_COUNT_KEYS, text_config, widths_of
from ddp_vllm.errors import ModelError, echo, line_printer
from ddp_vllm.families import FAMILIES, KNOWN, check_dense, foreign_code, pruned_config
from ddp_vllm.formats import (
    DROPPED,
    FORMATS,
    SUBBLOCKS,
    base_type,
    dense_config,
    enclosing,
    grown,
    is_leftover,
    stated_layers,
)
from ddp_vllm.masks import MASKS_FILE
from ddp_vllm.model_facts import known_folder
from ddp_vllm.model_files import finish_shards, has_tokenizer, state_tokenizer_class, write_model_files
from ddp_vllm.names import is_hub_name
from ddp_vllm.output import atomic_folder, check_output
from ddp_vllm.pages.card import write_card
from ddp_vllm.provenance import write_provenance
from ddp_vllm.remote_code.files import (
    INDEX_FILE,
    WEIGHTS,
    WidthsError,
    checked_tensors,
    file_tensors,
    parse_json,
    read_json,
    short,
    weight_files,
)
from ddp_vllm.remote_code.widths import LayerWidths, Widths, head_dim, stated_widths
from ddp_vllm.settings import Option, command

_SHARD = re.compile(r"(.+)-(\d+)-of-(\d+)\.safetensors")
PIECE = 1 << 24  # bytes copied at once
SIZES = (
    *("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "moe_intermediate_size"),
    *(*EXPERT_COUNT_KEYS, "moe_num_experts"),
)


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A tensor on disk."""

    file: Path
    start: int
    """Byte at which it begins in the file."""
    size: int
    dtype: str
    shape: list[int]
    is_zero: bool = False
    """Whether it is of zeros, and of that file's tensors only by its number format."""

    @property
    def item_size(self) -> int:
        return self.size // max(1, prod(self.shape))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a converted folder holds."""

    config: dict[str, Any]
    stored: dict[str, Stored]
    notes: list[str]
    provenance: dict[str, Any]
    sources: list[Path]
    """Folders whose tokenizer and other files are copied; the last one has precedence."""


@command("convert", show=lambda made, _: echo(f"written: {made.folder} ({made.num_parameters:,} parameters)"))
def convert(
    folder: str | Path,
    *,
    output: Annotated[Path | str, Option("Folder to write.", "-o")],
    dense: Annotated[
        str | Path | None,
        Option("The model that was pruned, for its sizes: a folder, or a hub name.", metavar="MODEL"),
    ] = None,
    overwrite: Annotated[bool, Option("Replace the folder.")] = False,
    verbose: bool = False,
) -> Checkpoint:
    """Write the model in FOLDER, which another tool pruned, as a folder that vLLM with ddp-vllm
    serves.

        ddp-vllm convert ./pruned-by-others -o ./pruned
        vllm serve ./pruned

    Widths are read from the tensors, and from per_layer_config, block_configs, drop_attn_list
    and drop_mlp_list where config.json has them. Tensors are copied, none is changed.

    In Python the checkpoint is returned. verbose: print how widths were read.
    Raises: ModelError if no supported family can have such widths; OutputError.
    """
    source, target = Path(folder), Path(output)
    check_output(target, overwrite=overwrite, reads=[source, *([dense] if dense else [])])
    try:
        plan = plan_of(source, str(dense) if dense else None)
    except (WidthsError, ModelError) as error:
        raise ModelError(f"{source}: {error}") from error
    for note in plan.notes:
        line_printer(verbose)(note)
    with atomic_folder(target, overwrite=overwrite) as writing:
        for place in plan.sources:
            write_model_files(writing, place, plan.config)
        write_weights(writing, plan)
        if "ddp_layers" in plan.config:
            state_tokenizer_class(plan.sources[0], writing)
        write_provenance(writing / MASKS_FILE, plan.provenance)
        return write_card(writing, target)


def plan_of(folder: Path, dense_model: str | None) -> Plan:
    """Read what a folder holds, from its config and the headers of its weights. Raises: ModelError,
    WidthsError."""
    config = read_config(folder)
    if "ddp_layers" in config or stated_widths(config) is not None:
        raise ModelError("it is a checkpoint of ddp-vllm already; serve it as it is")
    stored, dense_folder = stored_tensors(folder), _folder_of(dense_model)
    plain = _dense_config(config)
    dense = _with_dense_sizes(plain, read_config(dense_folder), dense_folder) if dense_folder else plain
    stated = stated_layers(config, plain) if plain.get("model_type") in KNOWN else None
    if stated:  # tensors of blocks that it removes may still be there
        stored = _kept(stored, replace(widths_of(enclosing(plain, stated)), layers=tuple(stated)))
    shapes, zeros = {name: tensor.shape for name, tensor in stored.items()}, dict[str, str]()
    if plain.get("model_type") in FAMILIES:
        enclosed, biased, widths, zeros = read_layers(dense, shapes, sizes_known=dense_folder is not None)
        is_dense = widths.layers == widths_of(dense).layers and biased == enclosed
    else:
        enclosed, widths = describe(dense, shapes)
        biased, is_dense = enclosed, not widths.blocks
    pruned = pruned_config(biased, widths)
    widths = Widths.of(pruned)
    layers = widths.layers
    if not is_dense:
        _check_stated(stated, layers)
    kept = _kept(stored, widths)
    is_copied = is_dense and all(tensor.file.parent == folder for tensor in kept.values())
    tensors = [(name, tensor.shape, tensor.dtype) for name, tensor in kept.items()]
    added = {
        bias: replace(like, size=like.shape[0] * like.item_size, shape=like.shape[:1], is_zero=True)
        for bias, weight in zeros.items()
        if (like := kept.get(weight))
    }
    try:
        widths.check_complete([*widths.checked(tensors), *added])
    except WidthsError as error:  # whose remedy is for folders of ours
        raise ModelError(f"{str(error).partition(';')[0]}; {AGAIN}") from error
    code = foreign_code(config)
    if is_copied:
        raise ModelError(
            "no block is narrower than another or than config.json says, so vLLM serves it as it is"
            + f"; but {code}" * bool(code)
        )
    form = next((key for key in FORMATS if config.get(key)), "tensors") if stated else "tensors"
    notes = [
        f"widths of {len(layers)} layers read from the shapes of tensors"
        + (f" and from {form} in config.json" if stated else ""),
        *_removed(layers, stated=bool(stated), has_table=widths.is_family),
        *grown(text_config(dense), text_config(enclosed)),
    ]
    if added:
        notes.append(f"{len(added)} biases of zeros added: the class has one on every projection of a block")
    provenance: dict[str, Any] = {"converted": {"from": folder.resolve().name, "format": form}}
    provenance |= {"applied_to": dense_model} if dense_model else {}
    notes += filter(None, [code, *_missing(folder, dense_model, dense_folder)])
    sources = [folder]
    if not has_tokenizer(folder) and dense_folder and has_tokenizer(dense_folder):
        sources = [dense_folder, folder]
    return Plan(config=pruned, stored=kept | added, notes=notes, provenance=provenance, sources=sources)


def _missing(folder: Path, dense_model: str | None, dense_folder: Path | None) -> Iterator[str]:
    """Yield a note on the dense model that was not read, and on a tokenizer that the folder lacks."""
    if dense_model and not dense_folder:
        yield (
            f"{dense_model} is not in the hub's cache, so its sizes were not used; to use them, run first: "
            f"hf download {dense_model} --include '*.json'"
        )
    if not has_tokenizer(folder):
        remedy = "copy that of the dense model into the output, because vLLM requires it, or pass --dense"
        if dense_folder and has_tokenizer(dense_folder):
            remedy = f"that of {dense_folder} is copied"
        yield f"the folder has no tokenizer; {remedy}"


def _kept(stored: Mapping[str, Stored], widths: Widths) -> dict[str, Stored]:
    """Return the tensors that are not of removed blocks."""
    return {name: tensor for name, tensor in stored.items() if not is_leftover(widths, name, tensor.shape)}


def _dense_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of the model that a tool pruned, without the tool's keys. Raises:
    ModelError."""
    if base_type(config) in KNOWN:
        return dense_config(config)
    check_dense(config)
    dense = {key: value for key, value in config.items() if key not in (*DROPPED, "block_configs")}
    layers = config.get("per_layer_config") or {}  # transformers writes it too, for heads of Gemma 4 for example
    if removed := next((key for key in DROPPED if config.get(key)), "skip" if "skip" in str(layers) else ""):
        raise ModelError(f"{removed} removes whole blocks, which no stock class can lack; prune channels instead")
    if layers:  # the widths in it are those of the tensors
        others = {
            index: {key: value for key, value in entry.items() if not key.endswith("intermediate_size")}
            for index, entry in layers.items()
        }
        dense["per_layer_config"] = {index: entry for index, entry in others.items() if entry}
    return dense


def _folder_of(dense_model: str | None) -> Path | None:
    """Return the folder of the model that was pruned; None if it is only a name on the hub.
    Raises: ModelError."""
    if not dense_model or Path(dense_model).is_dir():
        return Path(dense_model) if dense_model else None
    if not is_hub_name(dense_model):
        raise ModelError(f"--dense {dense_model} is neither a folder nor a hub name (owner/name)")
    folder = known_folder(dense_model)
    return folder if folder and (folder / "config.json").is_file() else None


def _with_dense_sizes(pruned: Mapping[str, Any], config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return a pruned model's config with the sizes of its dense model's. Raises: ModelError if
    they do not match."""
    dense, text = text_config(_dense_config(config)), text_config(pruned)
    for key in ("model_type", "hidden_size", "vocab_size", "num_hidden_layers"):
        if text.get(key) != dense.get(key):
            raise ModelError(f"{key} is {text.get(key)}, and {dense.get(key)} in --dense {folder}; leave --dense out")
    sizes = {key: dense[key] for key in SIZES if dense.get(key)}
    if pruned.get("model_type") in FAMILIES:
        sizes["head_dim"] = head_dim(dense)
    return {**pruned, "text_config": {**text, **sizes}} if text is not pruned else {**pruned, **sizes}


def _removed(layers: Sequence[LayerWidths], *, stated: bool, has_table: bool) -> Iterator[str]:
    """Yield a line per kind of removed block: without a statement in config.json, missing tensors
    look the same."""
    removed = {
        "attention": [index for index, layer in enumerate(layers) if not layer.num_kv_heads and has_table],
        "MLP": [index for index, layer in enumerate(layers) if not layer.intermediate_size and has_table],
        "some experts": [index for index, layer in enumerate(layers) if 0 in (layer.expert_intermediate_sizes or ())],
    }
    why = "as config.json states" if stated else "because the folder has no tensors of it"
    for block, numbers in removed.items():
        if numbers:
            yield f"removed: {block} of layer{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}, {why}"


def _check_stated(stated: Sequence[LayerWidths] | None, measured: Sequence[LayerWidths]) -> None:
    """Refuse a config that states other widths than the tensors have. Raises: ModelError."""
    for index, (by_config, by_tensors) in enumerate(zip(stated or measured, measured, strict=True)):
        if by_config != by_tensors:
            raise ModelError(
                f"layer {index} has {short(json.dumps(by_tensors.to_json()))} by its tensors, but config.json states "
                f"{short(json.dumps(by_config.to_json()))}; {AGAIN}"
            )


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """Return the tensors of a folder, in its own safetensors files or in Puzzletron's.
    Raises: ModelError, WidthsError.

    Each is that of the file that the index names; without an index it must be in one file.
    """
    if any(folder.glob(WEIGHTS)):
        checked_tensors(folder)
        paths = weight_files(folder)
    elif not (paths := sorted((folder / SUBBLOCKS).glob("*.safetensors"))):
        raise ModelError(f"it has no {WEIGHTS}; write it with save_pretrained, because pickles are not opened")
    _check_shards([path.name for path in paths])
    tensors: dict[str, Stored] = {}
    for path in paths:
        for name, stored in _positions(path):
            if name in tensors and path.parent != folder:
                raise ModelError(f"tensor {short(name)} is in {tensors[name].file.name} and {path.name}; remove one")
            tensors[name] = stored  # of several copies the last one counts, which the index names
    if (index := folder / INDEX_FILE).exists():
        try:
            names = read_json(index)["weight_map"].keys()
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ModelError(f"{INDEX_FILE} cannot be read ({error}); {AGAIN}") from error
        if other := names ^ tensors.keys():
            raise ModelError(f"tensor {short(min(other))} is in {INDEX_FILE} or in a file, but not in both; {AGAIN}")
    return tensors


def _check_shards(names: Sequence[str]) -> None:
    """Refuse weights of which a file is missing by their names: its layers would look removed.
    Raises: ModelError."""
    shards = [match for match in map(_SHARD.fullmatch, names) if match]
    for stem, number in {(match[1], match[3]) for match in shards}:
        present = {int(match[2]) for match in shards if (match[1], match[3]) == (stem, number)}
        if missing := {*range(1, min(int(number), 100_000) + 1)} - present:
            digits = len(number)
            raise ModelError(f"{stem}-{min(missing):0{digits}}-of-{number}.safetensors is missing; {AGAIN}")


def _positions(path: Path) -> Iterator[tuple[str, Stored]]:
    """Yield the tensors of a file whose header is consistent, in their order in the file.
    Raises: WidthsError."""
    shapes = {name: (shape, dtype) for name, shape, dtype in file_tensors(path)}
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = parse_json(file.read(length))
    for name in sorted(shapes, key=lambda name: header[name]["data_offsets"]):
        (start, end), (shape, dtype) = header[name]["data_offsets"], shapes[name]
        yield name, Stored(file=path, start=8 + length + start, size=end - start, dtype=dtype, shape=shape)


def write_weights(folder: Path, plan: Plan) -> None:
    """Write one file for each file of the source that keeps a tensor, and their index."""
    of_file: dict[Path, dict[str, Stored]] = {}
    for name, stored in plan.stored.items():
        of_file.setdefault(stored.file, {})[name] = stored
    paths = [folder / f"shard-{number}.tmp" for number in range(len(of_file))]
    for path, tensors in zip(paths, of_file.values(), strict=True):
        _write_file(path, tensors)
    finish_shards(folder, list(zip(paths, of_file.values(), strict=True)))


def _write_file(path: Path, tensors: Mapping[str, Stored]) -> None:
    """Write a safetensors file, piece by piece. Raises: OSError if a file became shorter."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    # wide numbers first, so that all are aligned
    parts = sorted(tensors.items(), key=lambda item: -item[1].item_size)
    for name, part in parts:
        header[name] = {"dtype": part.dtype, "shape": part.shape, "data_offsets": [end, end + part.size]}
        end += part.size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for _, part in parts:
            with open(os.devnull if part.is_zero else part.file, "rb") as file:
                file.seek(part.start)
                left = part.size
                while left:
                    piece = bytes(left) if part.is_zero else file.read(min(left, PIECE))
                    if not piece:
                        raise OSError(f"{part.file} became shorter while it was read")
                    out.write(piece)
                    left -= len(piece)
