"""The verb convert: write what another tool pruned as a checkpoint of ddp-vllm. Bytes of tensors are copied, not read.

Weights are copied file by file in pieces, so memory holds none of them. Nothing here imports torch.
"""

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from ddp_vllm import __version__
from ddp_vllm.checkpoint import Checkpoint, read_config
from ddp_vllm.conversion.formats import FORMATS, SUBBLOCKS, dense_config, enclosing, grown, stated_layers
from ddp_vllm.conversion.shapes import AGAIN, is_leftover, read_layers, with_biases, zeros
from ddp_vllm.errors import ModelError, OutputError, line_printer
from ddp_vllm.families import dense_layers, pruned_config
from ddp_vllm.masks import MASKS_FILE, masks_metadata
from ddp_vllm.model_files import state_tokenizer_class, write_json, write_model_files
from ddp_vllm.output import atomic_folder, check_output
from ddp_vllm.pages.card import write_card
from ddp_vllm.provenance import is_hub_name, published, remember
from ddp_vllm.remote_code.files import (
    INDEX_FILE,
    WEIGHTS,
    WidthsError,
    checked_tensors,
    file_tensors,
    parse_json,
    read_json,
    short,
)
from ddp_vllm.remote_code.widths import EXPERT_COUNT_KEYS, LayerWidths, ModelWidths

PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl")
PIECE = 1 << 24  # bytes copied at once
SIZES = ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "moe_intermediate_size")


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A tensor on disk."""

    file: Path
    start: int
    """Byte at which it begins in the file."""
    size: int
    dtype: str
    shape: list[int]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a converted folder holds."""

    config: dict[str, Any]
    stored: dict[str, Stored]
    zeros: dict[str, str]
    """Bias of zeros to add -> the weight whose rows and dtype it has."""
    provenance: dict[str, Any]
    notes: list[str]


def convert(
    folder: str | Path, *, output: str | Path, dense: str | Path | None = None, overwrite: bool = False,
    verbose: bool = False,
) -> Checkpoint:  # fmt: skip
    """Write a model that another tool pruned as a checkpoint of ddp-vllm, and return it.

    dense: the model that was pruned, a folder or a hub name. Its config gives the sizes before pruning.
    verbose: print how widths were read from config.json and tensors.
    Raises: ModelError if no supported family can have such widths; OutputError.
    """
    source, target = Path(folder), Path(output)
    check_output(target, overwrite=overwrite)
    if any(each.exists() and each.resolve().is_relative_to(target.resolve()) for each in (source, Path(dense or ""))):
        raise OutputError(f"{target} holds the model to convert, or its dense model; choose another folder")
    try:
        plan = plan_of(source, str(dense) if dense else None)
    except (WidthsError, ModelError) as error:
        raise ModelError(f"{source}: {error}") from error
    for note in plan.notes:
        line_printer(verbose)(note)
    with atomic_folder(target, overwrite=overwrite) as writing:
        write_model_files(writing, source, plan.config)
        write_weights(writing, plan)
        state_tokenizer_class(source, writing)
        _write_provenance(writing / MASKS_FILE, plan.provenance)
        return write_card(writing, target)


def plan_of(folder: Path, dense_model: str | None) -> Plan:
    """Read what a folder holds, from its config and the headers of its weights. Raises: ModelError, WidthsError."""
    config = read_config(folder)
    if "ddp_layers" in config:
        raise ModelError("it is a checkpoint of ddp-vllm already; serve it as it is")
    stored = stored_tensors(folder)
    dense = own = dense_config(config)
    if dense_model and Path(dense_model).is_dir():
        dense = _with_dense_sizes(own, dense_config(read_config(Path(dense_model))), dense_model)
    elif dense_model and not is_hub_name(dense_model):
        raise ModelError(f"--dense {dense_model} is neither a folder nor a hub name (owner/name)")
    shapes = {name: each.shape for name, each in stored.items()}
    sized, layers = read_layers(dense, shapes)
    _check_stated(stated_layers(config, own), layers)
    whole = enclosing(sized, layers)
    biased = with_biases(whole, shapes)
    if layers == dense_layers(dense) and biased == whole:
        raise ModelError("no layer is narrower than another or than config.json says, so vLLM serves it as it is")
    pruned = pruned_config(biased, layers)
    widths = ModelWidths.of(pruned)
    kept = {name: each for name, each in stored.items() if not is_leftover(widths, name, each.shape)}
    added = {bias: weight for bias, weight in zeros(widths, shapes) if weight in kept}
    widths.check_complete([*widths.checked((name, each.shape, each.dtype) for name, each in kept.items()), *added])
    form = next((key for key in FORMATS if config.get(key)), "tensors")
    provenance: dict[str, Any] = {"converted": {"from": folder.resolve().name, "format": form}}
    notes = [f"widths of {len(layers)} layers read from the shapes of tensors", *grown(dense, whole)]
    notes[0] += f"; {form} says the same" if form in FORMATS else ""
    notes += [f"{len(added)} biases of zeros added: the class has one on every projection of a block"] * bool(added)
    return Plan(
        config=pruned, stored=kept, zeros=added, notes=notes,
        provenance=provenance | ({"applied_to": dense_model} if dense_model else {}),
    )  # fmt: skip


def _with_dense_sizes(own: Mapping[str, Any], dense: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a pruned model's config with the sizes of its dense model's. Raises: ModelError if they do not match."""
    for key in ("model_type", "hidden_size", "vocab_size", "num_hidden_layers"):
        if own.get(key) != dense.get(key):
            raise ModelError(f"{key} is {own.get(key)}, and {dense.get(key)} in --dense {name}; leave --dense out")
    return {**own, **{key: dense[key] for key in (*SIZES, *EXPERT_COUNT_KEYS) if dense.get(key)}}


def _check_stated(stated: Sequence[LayerWidths] | None, found: Sequence[LayerWidths]) -> None:
    """Refuse a config that states other widths than the tensors have. Raises: ModelError."""
    for index, (said, has) in enumerate(zip(stated or found, found, strict=True)):
        if said != has:
            raise ModelError(
                f"layer {index} has {short(json.dumps(has.to_json()))} by its tensors, but config.json states "
                f"{short(json.dumps(said.to_json()))}; {AGAIN}"
            )


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """Return the tensors of a folder, in its own safetensors files or in Puzzletron's. Raises: ModelError, WidthsError.

    Every tensor must be in one file, and the index, if any, must name them all.
    """
    paths = sorted(folder.glob(WEIGHTS))
    if paths:
        checked_tensors(folder)
    elif not (paths := sorted((folder / SUBBLOCKS).glob("*.safetensors"))):
        _refuse_pickles(folder)
    found: dict[str, Stored] = {}
    for path in paths:
        for name, stored in _positions(path):
            if name in found:
                raise ModelError(f"tensor {short(name)} is in {found[name].file.name} and {path.name}; remove one")
            found[name] = stored
    if (index := folder / INDEX_FILE).exists():
        try:
            names = read_json(index)["weight_map"].keys()
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ModelError(f"{INDEX_FILE} cannot be read ({error}); {AGAIN}") from error
        if other := names ^ found.keys():
            raise ModelError(f"tensor {short(min(other))} is in {INDEX_FILE} or in a file, but not in both; {AGAIN}")
    return found


def _refuse_pickles(folder: Path) -> None:
    """Raises: ModelError, with the line that writes safetensors where there are only pickles."""
    if pickles := sorted(path.name for pattern in PICKLES for path in folder.glob(pattern)):
        line = (
            "import torch; m = torch.load(FILE, weights_only=False, map_location='cpu'); "
            "m = m['model'] if isinstance(m, dict) and 'model' in m else m; m.save_pretrained('pruned')"
        ).replace("FILE", repr(short(pickles[0]).strip("'")))
        raise ModelError(
            f"it has only pickles ({short(pickles[0])}), which can run any code and are not opened; in the environment "
            f'of the tool that wrote it run: python -c "{line}", and convert that folder'
        )
    raise ModelError(f"it has no {WEIGHTS}; write it with save_pretrained")


def _positions(path: Path) -> Iterator[tuple[str, Stored]]:
    """Yield the tensors of a file whose header is consistent, in their order in the file. Raises: WidthsError."""
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
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(of_file.values(), 1):
        file = "model.safetensors" if len(of_file) == 1 else f"model-{number:05}-of-{len(of_file):05}.safetensors"
        added = {bias: tensors[weight] for bias, weight in plan.zeros.items() if weight in tensors}
        _write_file(folder / file, tensors, added)
        weight_map |= dict.fromkeys((*tensors, *added), file)
    total = sum((folder / file).stat().st_size for file in {*weight_map.values()})
    # even one file gets an index: without it vLLM loads every safetensors file, the masks among them
    write_json({"metadata": {"total_size": total}, "weight_map": weight_map}, folder / INDEX_FILE)


def _write_file(path: Path, tensors: Mapping[str, Stored], zeros: Mapping[str, Stored]) -> None:
    """Write a safetensors file of copied tensors and of zeros as long as rows of other tensors."""
    parts: list[tuple[str, str, list[int], int, Stored | None]] = [
        (name, each.dtype, each.shape, each.size, each) for name, each in tensors.items()
    ]
    for name, like in zeros.items():
        rows = like.shape[:1]
        parts.append((name, like.dtype, rows, rows[0] * (like.size // max(1, prod(like.shape))), None))
    parts.sort(key=lambda part: -(part[3] // max(1, prod(part[2]))))  # wide numbers first, so that all are aligned
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape, size, _ in parts:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for _, _, _, size, stored in parts:
            _copy(stored, size, out)


def _copy(stored: Stored | None, size: int, out: BinaryIO) -> None:
    """Copy a tensor piece by piece; without one write zeros. Raises: OSError if the file became shorter."""
    if stored is None:
        out.write(bytes(size))
        return
    with open(stored.file, "rb") as file:
        file.seek(stored.start)
        while size:
            piece = file.read(min(size, PIECE))
            if not piece:
                raise OSError(f"{stored.file} became shorter while it was read")
            out.write(piece)
            size -= len(piece)


def _write_provenance(path: Path, provenance: Mapping[str, Any]) -> None:
    """Write a masks file without masks: which units were removed is not known, only how many are left."""
    from safetensors.numpy import save_file

    header = {"ddp_vllm": __version__, **published(provenance)}
    save_file({}, path, masks_metadata(header, {}))
    remember(path, provenance)
