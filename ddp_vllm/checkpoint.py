"""The non-uniform checkpoint: reads and checks a pruned folder. Nothing here imports torch.

A pruned checkpoint is a normal Hugging Face folder with three additions: its widths in `config.json`
(see `remote_code/widths.py`; `ddp_layers` of a family, `ddp_widths` of any other architecture), the
Python files that load it, and `ddp_masks.safetensors`.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from ddp_vllm.dimensions import TABLE, is_copied_head, quantization_of, widths_of
from ddp_vllm.errors import CheckpointError, ModelError
from ddp_vllm.masks import MASKS_FILE, Provenance, read_provenance
from ddp_vllm.quantized import unpacked
from ddp_vllm.remote_code import files
from ddp_vllm.remote_code.files import WidthsError, checked_tensors, short
from ddp_vllm.remote_code.tensors import Config, Shapes
from ddp_vllm.remote_code.widths import HEAD, METHOD, LayerWidths, Widths, stated_widths, states_widths

_FLOATS = {"BF16": "<u2", "F16": "<f2", "F32": "<f4"}  # their bytes in numpy, which has no bfloat16


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A pruned checkpoint on disk, checked."""

    folder: Path
    config: Config
    """`config.json`; stock fields hold the dense values, except the number of experts where whole
    ones were removed."""
    layers: tuple[LayerWidths, ...]
    """The kept widths of each decoder layer."""
    widths: Widths
    """The widths with the names of the tensors."""
    shapes: Shapes
    """Shape of every weight on disk, of tied embeddings once; of a quantized weight the shape before
    quantization, without its scales."""
    provenance: Mapping[str, Any]
    """Recipe, budget and quality, from the metadata of the masks file; empty if that file is
    missing."""

    @property
    def is_stock(self) -> bool:
        """Whether any program reads the folder: a dense mixture, or one without whole experts."""
        return not self.widths.is_family and not states_widths(self.config)

    @property
    def num_parameters(self) -> int:
        """Number of parameters on disk; tied embeddings are counted once."""
        return sum(prod(shape) for shape in self.shapes.values())

    @property
    def perplexity(self) -> dict[str, float]:
        """Perplexity on held-out text of the `dense`, `pruned` and `recovered` model; {} if it was
        not measured."""
        quality = self.history.perplexity
        return quality.perplexities if quality else {}

    @cached_property
    def history(self) -> Provenance:
        """The provenance as far as it is read again, with its defaults."""
        return Provenance.of(self.provenance)

    @cached_property
    def dense_shapes(self) -> Shapes:
        """Shape of every weight before pruning."""
        return dense_shapes(self.widths, self.shapes)

    @property
    def removed(self) -> float:
        """Removed share of the dense model's parameters."""
        return 1 - self.num_parameters / sum(map(prod, self.dense_shapes.values()))

    def __repr__(self) -> str:
        """Return one line; the fields would fill a screen for every layer."""
        ratio = f", perplexity {self.perplexity}" if self.perplexity else ""
        return (
            f"Checkpoint({str(self.folder)!r}, {self.num_parameters:,} parameters, {self.removed:.1%} removed{ratio})"
        )


def read_json(path: Path) -> Any:
    """Read one JSON file of a checkpoint.

    Raises: CheckpointError if it is missing or not JSON.
    """
    try:
        return files.read_json(path)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; is this the folder of a model?") from None
    except NotADirectoryError:
        raise CheckpointError(f"{path.parent} is a file; give the folder of a model") from None
    except files.PointerError as error:
        raise CheckpointError(str(error)) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); download it or run ddp-vllm apply again") from error


def is_pruned_config(config: Config) -> bool:
    """Tell whether ddp-vllm wrote a config with the widths of a pruned model. Raises: WidthsError."""
    return "ddp_layers" in config or stated_widths(config) is not None


def check_links(folder: Path) -> None:
    """Refuse a model's folder that links to a file outside, because that file would be read, copied
    and published.

    Links to other files of the folder are allowed, and those of a hub snapshot to the hub's own
    blobs. `read_config` and `read_checkpoint` call this before any other file of the folder is
    read.
    Raises: CheckpointError.
    """
    home = folder.resolve()
    homes = [home, *([home.parents[1] / "blobs"] if home.parent.name == "snapshots" else [])]
    for place, folders, files_there in os.walk(home):
        for path in (Path(place, name) for name in (*folders, *files_there)):
            if path.is_symlink() and not any(Path(os.path.realpath(path)).is_relative_to(each) for each in homes):
                raise CheckpointError(
                    f"{folder}: {short(str(path.relative_to(home)))} is a link out of the model's folder; put the file "
                    "itself there, or remove the link"
                )


def read_config(folder: Path) -> dict[str, Any]:
    """Return the config of a model. Raises: ModelError if it is missing, not a JSON object, or as
    `check_links`."""
    try:
        config = _config_of(folder)
    except CheckpointError as error:
        raise ModelError(str(error)) from error
    if not isinstance(config, dict):
        raise ModelError(f"{folder / 'config.json'} is not an object; download the model again")
    if not isinstance(config.get("model_type"), str):
        raise ModelError(f"{folder / 'config.json'} has no model_type; download the model again")
    if (name := config.get("transformers_weights")) is not None:
        raise ModelError(
            f"{folder / 'config.json'} states transformers_weights {short(name)}, which transformers reads instead of "
            "the files that vLLM reads; load the model in transformers and write it with save_pretrained"
        )
    return config


def read_stock_config(folder: Path) -> dict[str, Any]:
    """Return the config of a model to prune or to profile: one without whole experts is a dense model of the experts
    that it has. Raises: as `read_config`."""
    return {key: value for key, value in read_config(folder).items() if key != METHOD}


def _config_of(folder: Path) -> Any:
    """Return the content of config.json. Raises: CheckpointError, also as `check_links`, and for a LoRA
    adapter, alone or with the weights of its model: transformers adds it to them when it loads them,
    vLLM does not."""
    if (folder / "adapter_config.json").exists():
        what = "has the weights of a model and of" if (folder / "config.json").exists() else "is"
        raise CheckpointError(
            f"{folder} {what} a LoRA adapter; merge it into its model by merge_and_unload of peft first, or move "
            "adapter_config.json away"
        )
    config = read_json(folder / "config.json")
    check_links(folder)
    return config


def read_checkpoint(folder: Path, *, dense: bool = False) -> Checkpoint:
    """Read and check a pruned checkpoint without loading a weight.

    dense: accept a dense model's folder too, with the widths in its config.
    Raises: CheckpointError if it is not a pruned checkpoint, if its widths are negative, fractional
        or above the dense ones, if a tensor is missing or does not have the shape that its widths
        require, if its index names other files, or as `check_links`; ModelError for a dense model
        of an unsupported family.
    """
    config = _config_of(folder)
    provenance = read_provenance(folder / MASKS_FILE)
    try:
        if not isinstance(config, dict) or not is_pruned_config(config):
            if "trimmed" in provenance and not dense:
                raise CheckpointError(
                    f"{folder} is trimmed, not pruned: a stock model, whose README.md and report.html state what that "
                    "cost; hf upload publishes it, and prune prunes it"
                )
            if not isinstance(config, dict) or not dense:
                raise CheckpointError(
                    f"{folder} is not a pruned checkpoint: its config.json has neither ddp_layers nor {METHOD}; prune "
                    "it first"
                )
            _check_dense(folder, config)
        widths, tensors = widths_of(config), checked_tensors(folder)
        widths.on_disk.check(tensors)
        check_head(config, files.weight_files(folder))
        shapes = unpacked(tensors, config, widths)
    except (WidthsError, OSError) as error:
        raise CheckpointError(f"{folder}: {error}") from error
    _check_routing(Provenance.of(provenance).routing.chosen, widths, folder / MASKS_FILE)
    return Checkpoint(
        folder=folder,
        config=config,
        layers=widths.layers,
        widths=widths,
        shapes=shapes,
        provenance=provenance,
    )


def check_head(config: Config, paths: Sequence[Path]) -> None:
    """Refuse a model whose config ties the output head to the embedding, but that stores another head: pruning and
    export would drop it, while transformers and vLLM use it.

    paths: of its weights. In a quantized model, a head in another number format than the embedding is not compared.
    Raises: WidthsError; OSError.
    """
    import numpy as np

    if not is_copied_head(config, HEAD):
        return
    tensors = ((path, *tensor) for path in paths for tensor in files.file_tensors(path))
    tables = {name: (path, shape, dtype) for path, name, shape, dtype in tensors if TABLE.fullmatch(name)}
    path, shape, dtype = tables.pop(HEAD, (None, [], ""))
    if path is None or not tables:
        return
    is_quantized = bool(quantization_of(config))
    dtypes = {*_FLOATS} if dtype in _FLOATS and not is_quantized else {dtype}
    alike = {name: other for name, (other, size, kind) in tables.items() if size == shape and kind in dtypes}
    if not alike and is_quantized:
        return
    for name, other in alike.items():
        pieces = zip(_pieces(path, HEAD), _pieces(other, name), strict=True)
        if all(np.array_equal(one, two, equal_nan=True) for one, two in pieces):
            return
    raise WidthsError(
        f"config.json states tie_word_embeddings, but {HEAD} differs from {min(tables)}; set tie_word_embeddings to "
        f"false if the model was trained with a head of its own, otherwise remove {HEAD}"
    )


def _pieces(path: Path, name: str) -> Iterator[Any]:
    """Yield the numbers of a tensor, a few millions at a time: of others than floats the bytes. `file_tensors` must
    have checked the file."""
    import numpy as np

    with path.open("rb") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
        entry = json.loads(file.read(start - 8))[name]
        (first, end), kind = entry["data_offsets"], np.dtype(_FLOATS.get(entry["dtype"], "u1"))
        file.seek(start + first)
        for left in range(end - first, 0, -(kind.itemsize << 22)):
            numbers = np.frombuffer(file.read(min(left, kind.itemsize << 22)), kind)
            if entry["dtype"] == "BF16":
                numbers = (numbers.astype("<u4") << 16).view("<f4")
            yield numbers


def _check_dense(folder: Path, config: Config) -> None:
    """Refuse a dense config that no verb can use, or that states the widths of a pruned model.
    Raises: ModelError."""
    # a pruned checkpoint is read without these
    from ddp_vllm.families import check_supported, warn_of_foreign_code
    from ddp_vllm.formats import check_states_no_widths

    try:
        check_states_no_widths(config)
    except ModelError as error:
        raise ModelError(f"{folder}: {error}") from None
    check_supported(config)
    warn_of_foreign_code(folder, config)


def dense_shapes(widths: Widths, shapes: Shapes) -> dict[str, list[int]]:
    """Return the shapes of all tensors before pruning; those of a removed block, expert or router
    row are as in other layers."""
    dense = replace(widths, layers=widths.dense_layers, is_renumbered=False)
    full, kinds = dict(shapes), dict[tuple[str, str], list[int]]()
    for name, shape in shapes.items():
        layer, module, kind = widths.split(name) or (len(widths.layers), "", "")
        if widths.is_renumbered and module == widths.router:
            full[name] = [widths.num_experts, *shape[1:]]
        if place := dense.find(name):
            module = place.projection.name
            if place.length is not None:
                shape = [*shape[: place.axis], place.length, *shape[place.axis + 1 :]]
        if place or (widths.is_family and layer < len(widths.layers)):
            kinds[module, kind] = shape
    for index, layer_widths in enumerate(dense.layers):
        for (module, kind), shape in kinds.items():
            projection = dense.table.find(module)
            if (projection and dense.states(projection.block, layer_widths)) or widths.is_family:
                numbers = range(widths.num_experts if "{}" in module else 1)
                names = (f"{widths.layers_module}.{index}.{module.format(number)}.{kind}" for number in numbers)
                full |= dict.fromkeys(names, shape)
    return full


def _check_routing(chosen: Mapping[str, list[float]], widths: Widths, path: Path) -> None:
    """Refuse routing counts that do not fit the experts of their layer. Raises: CheckpointError."""
    experts = {str(index): len(layer.expert_intermediate_sizes or ()) for index, layer in enumerate(widths.layers)}
    if wrong := [layer for layer, counts in chosen.items() if not counts or len(counts) != experts.get(layer)]:
        raise CheckpointError(
            f"{path} has routing counts for other experts of layer {wrong[0]} than config.json; "
            "run ddp-vllm apply again"
        )
