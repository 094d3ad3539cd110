"""The verb convert: write what another tool pruned as a checkpoint of ddp-vllm, with the tensors as
they are.

Widths are read from the headers of the weight files. Nothing here imports torch before weights are
written, one file at a time.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from ddp_vllm.checkpoint import Checkpoint, check_head, is_pruned_config, read_config
from ddp_vllm.conversion.shapes import AGAIN, read_layers
from ddp_vllm.conversion.stock import describe
from ddp_vllm.dimensions import EXPERT_COUNT_KEYS, text_config, widths_of
from ddp_vllm.errors import ModelError, echo, line_printer
from ddp_vllm.families import FAMILIES, check_dense, foreign_code, pruned_config
from ddp_vllm.formats import (
    DROPPED,
    FORMATS,
    base_type,
    block_files,
    check_drops_nothing,
    dense_config,
    enclosing,
    grown,
    stated_layers,
)
from ddp_vllm.masks import MASKS_FILE
from ddp_vllm.model_facts import known_folder
from ddp_vllm.model_files import has_tokenizer, state_tokenizer, write_model_files, write_weights
from ddp_vllm.output import atomic_folder, check_output
from ddp_vllm.pages.card import write_card
from ddp_vllm.proof import Proof, Reference, prove, read_back
from ddp_vllm.provenance import write_provenance
from ddp_vllm.remote_code.files import (
    WEIGHTS,
    WidthsError,
    checked_tensors,
    file_tensors,
    short,
    weight_files,
)
from ddp_vllm.remote_code.tensors import Config
from ddp_vllm.remote_code.widths import Widths, head_dim
from ddp_vllm.settings import Option, Values, command

_SHARD = re.compile(r"(.+)-\d+-of-(\d+)\.safetensors")
SIZES = (  # how keys of sizes that pruning changes end
    *("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "block_ff_dim"),
    *(*EXPERT_COUNT_KEYS, "shared_experts"),
)


class Stored(NamedTuple):
    """A tensor on disk."""

    file: Path
    shape: list[int]
    dtype: str


class Conversion(NamedTuple):
    """What a converted folder holds."""

    config: dict[str, Any]
    tensors: dict[str, Stored]
    zeros: dict[str, str]
    """Bias of zeros to add -> the weight whose rows and dtype it has."""
    form: str
    """Where the widths were read: a key of config.json, or `tensors`."""
    notes: list[str]


def _announce(made: Checkpoint, _: Values) -> None:
    echo(f"read back: {made.history.proof.statement}\nwritten: {made.folder} ({made.num_parameters:,} parameters)")


@command("convert", show=_announce)
def convert(
    folder: str | Path,
    *,
    output: Annotated[Path | str, Option("Folder to write.", "-o")],
    dense: Annotated[
        str | Path | None,
        Option("The model that was pruned, for its sizes: a folder, or a hub name.", metavar="MODEL"),
    ] = None,
    overwrite: Annotated[bool, Option("Replace the folder.")] = False,
    proof: Proof = True,
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
    dense_folder = known_folder(str(dense)) if dense else None
    if dense and not dense_folder:
        raise ModelError(f"--dense {dense} is not in the hub's cache; run: hf download {dense} --include '*.json'")
    try:
        conversion = conversion_of(source, dense_folder)
    except (WidthsError, ModelError) as error:
        raise ModelError(f"{source}: {error}") from error
    sources = [source]
    """Folders whose tokenizer and other files are copied; the last one has precedence."""
    if not has_tokenizer(source):
        remedy = "copy that of the dense model into the output, because vLLM requires it, or pass --dense"
        if dense_folder and has_tokenizer(dense_folder):
            sources, remedy = [dense_folder, source], f"that of {dense_folder} is copied"
        conversion.notes.append(f"the folder has no tokenizer; {remedy}")
    for note in conversion.notes:
        line_printer(verbose)(note)
    provenance: dict[str, Any] = {"converted": {"from": source.resolve().name, "format": conversion.form}}
    with atomic_folder(target, overwrite=overwrite) as writing:
        for place in sources:
            write_model_files(writing, place, conversion.config)
        write_weights(_planned(conversion), writing)
        state_tokenizer(sources[0], writing, has_own_type="ddp_layers" in conversion.config)
        provenance |= prove(writing, _reference(source, sources[0]) if proof else None)
        write_provenance(writing / MASKS_FILE, provenance | ({"applied_to": str(dense)} if dense else {}))
        return write_card(writing, target)


def _reference(source: Path, tokenizer: Path) -> Reference:
    """Return what transformers reads in the folder that is converted, if it can: most such folders
    need the code of another tool, which is not run."""
    texts = Reference.texts if has_tokenizer(tokenizer) else []
    read, logits = read_back(source, texts if tokenizer == source else [], Reference.tokens)
    dtype = read.get("dtype", "float32")
    if tokenizer != source:
        read = read_back(tokenizer, texts, [])[0]
    return Reference(read=read.get("texts"), logits=logits, dtype=dtype)


def conversion_of(folder: Path, dense_folder: Path | None) -> Conversion:
    """Read what a folder holds, from its config and the headers of its weights. Raises: ModelError,
    WidthsError."""
    config = read_config(folder)
    if is_pruned_config(config):
        raise ModelError("it is a checkpoint of ddp-vllm already; serve it as it is")
    stored, plain, zeros = read_stored(folder), _dense_config(config), dict[str, str]()
    check_head(config, sorted({tensor.file for tensor in stored.values()}))
    dense = _with_dense_sizes(plain, dense_folder) if dense_folder else plain
    stated = stated_layers(config, plain) if plain["model_type"] in FAMILIES else None
    if stated:  # tensors of blocks that it removes may still be there
        stored = _kept(stored, replace(widths_of(enclosing(plain, stated)), layers=tuple(stated)))
    shapes = {name: tensor.shape for name, tensor in stored.items()}
    if plain["model_type"] in FAMILIES:
        unpruned, widths, zeros = read_layers(dense, shapes, sizes_known=dense_folder is not None)
        before = widths_of(dense)
        is_dense = (widths.layers, widths.biased) == (before.layers, before.biased)
    else:
        unpruned, widths = describe(dense, shapes)
        is_dense = not widths.blocks
    pruned, code = pruned_config(unpruned, widths), foreign_code(config)
    widths = Widths.of(pruned)
    for index, (by_config, by_tensors) in enumerate(zip(stated or widths.layers, widths.layers, strict=True)):
        if by_config != by_tensors and not is_dense:
            raise ModelError(
                f"layer {index} has {short(json.dumps(by_tensors.to_json()))} by its tensors, but config.json states "
                f"{short(json.dumps(by_config.to_json()))}; {AGAIN}"
            )
    kept = _kept(stored, widths)
    try:
        names = widths.checked((name, tensor.shape, tensor.dtype) for name, tensor in kept.items())
        widths.check_complete([*names, *zeros])
    except WidthsError as error:  # whose remedy is for folders of ours
        raise ModelError(f"{str(error).partition(';')[0]}; {AGAIN}") from error
    if is_dense and all(tensor.file.parent == folder for tensor in kept.values()):
        also = f"; but {code}" if code else ""
        raise ModelError(
            f"no block is narrower than another or than config.json says, so vLLM serves it as it is{also}"
        )
    form = next((key for key in FORMATS if stated and config.get(key)), "tensors")
    added = f"{len(zeros)} biases of zeros added: the class has one on every projection of a block" if zeros else ""
    notes = [*_notes(widths, form), *grown(dense, unpruned), *filter(None, (added, code))]
    return Conversion(pruned, kept, zeros, form, notes)


def _kept(stored: Mapping[str, Stored], widths: Widths) -> dict[str, Stored]:
    """Return the tensors that are not of removed blocks."""
    return {name: tensor for name, tensor in stored.items() if not widths.is_removed(name)}


def _dense_config(config: Config) -> dict[str, Any]:
    """Return the config of the model that a tool pruned, without the tool's keys. Raises:
    ModelError."""
    if base_type(config) in FAMILIES:
        return dense_config(config)
    check_dense(config)
    check_drops_nothing(config)
    dense = {key: value for key, value in config.items() if key not in (*DROPPED, "block_configs")}
    # transformers writes it too, for heads of Gemma 4 for example; the widths in it are those of the tensors
    if layers := config.get("per_layer_config"):
        others = {
            index: {key: value for key, value in entry.items() if not key.endswith("intermediate_size")}
            for index, entry in layers.items()
        }
        dense["per_layer_config"] = {index: entry for index, entry in others.items() if entry}
    return dense


def _with_dense_sizes(pruned: Config, folder: Path) -> dict[str, Any]:
    """Return a pruned model's config with the sizes of the dense model's in `folder`. Raises:
    ModelError if they do not match."""
    dense, text = text_config(_dense_config(read_config(folder))), text_config(pruned)
    for key in ("model_type", "hidden_size", "vocab_size", "num_hidden_layers"):
        if text.get(key) != dense.get(key):
            raise ModelError(f"{key} is {text.get(key)}, and {dense.get(key)} in --dense {folder}; leave --dense out")
    # without sizes that only the pruned model states: a class may derive them from others
    sizes = {key: value for key, value in text.items() if not key.endswith(SIZES)}
    sizes |= {key: value for key, value in dense.items() if key.endswith(SIZES)}
    if pruned["model_type"] in FAMILIES:
        sizes["head_dim"] = head_dim(dense)
    return {**pruned, "text_config": sizes} if text is not pruned else sizes


def _notes(widths: Widths, form: str) -> Iterator[str]:
    """Yield where the widths were read, and a line per kind of removed block: without a statement in
    config.json, missing tensors look the same."""
    read, why = "the shapes of tensors", "because the folder has no tensors of it"
    if form != "tensors":
        read, why = f"{read} and from {form} in config.json", "as config.json states"
    yield f"widths of {len(widths.layers)} layers read from {read}"
    lacks: dict[str, Any] = {
        "attention": lambda layer: widths.is_family and not layer.num_kv_heads,
        "MLP": lambda layer: widths.is_family and not layer.intermediate_size,
        "some experts": lambda layer: 0 in (layer.expert_intermediate_sizes or ()),
    }
    for block, is_removed in lacks.items():
        if numbers := [str(index) for index, layer in enumerate(widths.layers) if is_removed(layer)]:
            yield f"removed: {block} of layer{'s' * (len(numbers) > 1)} {', '.join(numbers)}, {why}"


def read_stored(folder: Path) -> dict[str, Stored]:
    """Return the tensors of a folder that have numbers, in its own safetensors files or in
    Puzzletron's. Raises: ModelError, WidthsError."""
    if not (paths := block_files(folder)):
        if not (paths := weight_files(folder)):
            raise ModelError(f"it has no {WEIGHTS}; write it with save_pretrained, because pickles are not opened")
        checked_tensors(folder)
    for path in paths:  # layers in a missing file would look removed
        if (shard := _SHARD.fullmatch(path.name)) and int(shard[2]) > len(paths):
            raise ModelError(f"it has {len(paths)} weight files, but {path.name} is one of {int(shard[2])}; {AGAIN}")
    tensors = ((path, *tensor) for path in paths for tensor in file_tensors(path))
    return {name: Stored(path, shape, dtype) for path, name, shape, dtype in tensors if 0 not in shape}


def _planned(conversion: Conversion) -> Iterator[tuple[str, Any]]:
    """Yield the tensors of a conversion, file by file, with the biases of zeros."""
    from safetensors import safe_open

    names = dict[Path, list[str]]()
    for name, tensor in conversion.tensors.items():
        names.setdefault(tensor.file, []).append(name)
    for source in names:
        with safe_open(source, framework="pt") as file:  # maps the file: memory holds pages of it
            for name in names[source]:
                tensor = file.get_tensor(name)
                yield name, tensor
                yield from (
                    (bias, tensor.new_zeros(len(tensor))) for bias, of in conversion.zeros.items() if of == name
                )
