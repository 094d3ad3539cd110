"""The non-uniform checkpoint: reads and checks a pruned folder. Nothing here imports torch.

A pruned checkpoint is a normal Hugging Face folder with three additions: `ddp_layers` in
`config.json` (see `remote_code/widths.py`), the Python files that load it, and
`ddp_masks.safetensors`.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from ddp_vllm.costs import prices
from ddp_vllm.errors import CheckpointError, ModelError
from ddp_vllm.families import (
    dense_layers,
    described,
    described_layers,
    dimensions_of,
    family_of,
    pruned_config,
    warn_of_foreign_code,
)
from ddp_vllm.formats import check_states_no_widths
from ddp_vllm.masks import MASKS_FILE, read_provenance
from ddp_vllm.remote_code import files
from ddp_vllm.remote_code.files import WidthsError, checked_tensors, short
from ddp_vllm.remote_code.module_widths import LayerChannels, ModuleWidths, states_widths
from ddp_vllm.remote_code.widths import EXPERT_COUNT_KEYS, LayerWidths, ModelWidths, check_sizes


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A pruned checkpoint on disk, checked."""

    folder: Path
    config: Mapping[str, Any]
    """`config.json`; stock fields hold the dense values. Where whole experts were removed, it is
    the dense model's config, which describes the kept experts."""
    layers: tuple[LayerWidths, ...]
    """The kept widths of each decoder layer."""
    widths: ModelWidths | ModuleWidths
    """The widths with the names of the tensors; `ModuleWidths` for models of a stock class."""
    shapes: Mapping[str, list[int]]
    """Shape of every weight on disk; of a quantized weight the shape before quantization, without
    its scales."""
    provenance: Mapping[str, Any]
    """Recipe, budget and quality, from the metadata of the masks file; empty if that file is
    missing."""
    stock: Mapping[str, Any] | None = None
    """`config.json` of a mixture of experts that any program reads: a dense one, or one without
    whole experts."""

    @property
    def num_parameters(self) -> int:
        """Number of parameters on disk; tied embeddings are counted once."""
        return sum(prod(shape) for shape in self.shapes.values())

    @property
    def perplexity(self) -> dict[str, float]:
        """Perplexity on held-out text of the `dense`, `pruned` and `recovered` model; {} if it was
        not measured."""
        quality = self.provenance.get("perplexity") or {}
        return {name: quality[name] for name in ("dense", "pruned", "recovered") if name in quality}

    @property
    def speedup(self) -> float | None:
        """Predicted speedup of a step over the dense model; None without the budget `latency`."""
        speedup = self.provenance.get("latency", {}).get("speedup")
        return None if speedup is None else float(speedup)

    @property
    def removed(self) -> float:
        """Removed share of the dense model's parameters; norms and output biases of removed blocks
        are not counted."""
        pairs = zip(dense_layers(self.config), self.layers, strict=True)
        costs = prices("params", self.config, self.shapes, 1)
        removed = sum(price.of(dense) - price.of(kept) for price, (dense, kept) in zip(costs, pairs, strict=True))
        return removed / (self.num_parameters + removed)

    def __repr__(self) -> str:
        """Return one line; the fields would fill a screen for every layer."""
        ratio = f", perplexity {self.perplexity}" if self.perplexity else ""
        return (
            f"Checkpoint({str(self.folder)!r}, {self.num_parameters:,} parameters, {self.removed:.1%} removed{ratio})"
        )

    @property
    def family_widths(self) -> ModelWidths:
        """The widths of a model with a class of ours, which the caller has made sure of."""
        assert isinstance(self.widths, ModelWidths)
        return self.widths

    @property
    def has_experts(self) -> bool:
        """Whether routed experts were pruned."""
        return any(layer.expert_intermediate_sizes is not None for layer in self.layers)


def read_json(path: Path) -> Any:
    """Read one JSON file of a checkpoint.

    Raises: CheckpointError if it is missing or not JSON.
    """
    try:
        return files.read_json(path)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; is this the folder of a model?") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); download it or run ddp-vllm apply again") from error


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
    if (folder / "adapter_config.json").exists() and not (folder / "config.json").exists():
        raise ModelError(f"{folder} is a LoRA adapter; merge it into its model by merge_and_unload of peft first")
    try:
        config = read_json(folder / "config.json")
        check_links(folder)
    except CheckpointError as error:
        raise ModelError(str(error)) from error
    if not isinstance(config, dict):
        raise ModelError(f"{folder / 'config.json'} is not an object; download the model again")
    return config


def read_checkpoint(folder: Path, *, dense: bool = False) -> Checkpoint:
    """Read and check a pruned checkpoint without loading a weight.

    dense: accept a dense model's folder too, with the widths in its config.
    Raises: CheckpointError if it is not a pruned checkpoint, if its widths are negative, fractional
        or above the dense ones, if a tensor is missing or does not have the shape that its widths
        require, if its index names other files, or as `check_links`; ModelError for a dense model
        of an unsupported family.
    """
    config = read_json(folder / "config.json")
    check_links(folder)
    provenance = read_provenance(folder / MASKS_FILE)
    is_stock = isinstance(config, dict) and "ddp_layers" not in config and not states_widths(config)
    if is_stock and (dense or "experts" in provenance):
        _check_dense(folder, config)
        stock = described(config)
        if states_widths(stock):
            return _read_described(folder, stock, provenance, stock=config)
        config = pruned_config(config, dense_layers(config))
    if isinstance(config, dict) and states_widths(config):
        return _read_described(folder, config, provenance)
    if not isinstance(config, dict) or "ddp_layers" not in config:
        raise CheckpointError(f"{folder} is not a pruned checkpoint: its config.json has no ddp_layers; prune it first")
    try:
        check_sizes(config, "hidden_size")
        widths = ModelWidths.of(config)
        tensors = checked_tensors(folder)
        widths.check_complete(widths.checked(tensors))
    except (WidthsError, OSError) as error:
        raise CheckpointError(f"{folder}: {error}") from error
    shapes = unpacked({name: shape for name, shape, _ in tensors}, config)
    return Checkpoint(
        folder=folder, config=config, layers=widths.layers, widths=widths, shapes=shapes, provenance=provenance
    )  # fmt: skip


def _read_described(
    folder: Path, config: Mapping[str, Any], provenance: Mapping[str, Any], stock: Mapping[str, Any] | None = None
) -> Checkpoint:
    """Read a model of a stock class. stock: its config.json if that describes nothing.
    Raises: CheckpointError."""
    try:
        widths, tensors = ModuleWidths.of(config), checked_tensors(folder)
        widths.check(tensors)
        if stock and "experts" in provenance:
            config = _with_removed_experts(config, widths, provenance["experts"])
            widths = ModuleWidths.of(config)
    except (WidthsError, OSError) as error:
        raise CheckpointError(f"{folder}: {error}") from error
    _check_routing(provenance.get("routing", {}).get("chosen", {}), widths, folder / MASKS_FILE)
    return Checkpoint(
        folder=folder,
        config=config,
        layers=described_layers(config),
        widths=widths,
        shapes={name: shape for name, shape, _ in tensors},
        provenance=provenance,
        stock=stock,
    )


def _check_dense(folder: Path, config: Mapping[str, Any]) -> None:
    """Refuse a dense config that no verb can use, or that states the widths of a pruned model.
    Raises: ModelError."""
    try:
        check_states_no_widths(config)
    except ModelError as error:
        raise ModelError(f"{folder}: {error}") from None
    family_of(config), dimensions_of(config)
    warn_of_foreign_code(folder, config)


def _with_removed_experts(
    config: Mapping[str, Any], widths: ModuleWidths, experts: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the dense model's config with the widths of all its experts, 0 if removed.
    Raises: WidthsError."""
    assert widths.experts
    layers = []
    for index, layer in enumerate(widths.layers):
        if (sizes := layer.expert_intermediate_sizes) is not None:
            kept = experts["stay"].get(str(index), [])
            if len({*kept}) != len(sizes) or max(kept) >= experts["of"]:
                raise WidthsError(f"{MASKS_FILE} and config.json keep other experts of layer {index}; copy both again")
            dense_sizes = tuple(sizes[0] if expert in kept else 0 for expert in range(experts["of"]))
            layer = LayerChannels(expert_intermediate_sizes=dense_sizes)
        layers.append(layer)
    dense = replace(widths, layers=tuple(layers), experts=replace(widths.experts, num_experts=experts["of"]))
    numbers = {key: experts["of"] for key in EXPERT_COUNT_KEYS if config.get(key)}
    return {**config, **numbers, "quantization_config": dense.to_json()}


def unpacked(shapes: Mapping[str, list[int]], config: Mapping[str, Any]) -> dict[str, list[int]]:
    """Return the shapes of weights and biases before compressed-tensors quantized them.

    A tensor `weight_packed` holds eight 4-bit weights per int32, along the inputs. Scales are left
    out.
    """
    if not config.get("quantization_config"):
        return dict(shapes)
    plain = {}
    for name, shape in shapes.items():
        module, _, kind = name.rpartition(".")
        if kind == "weight_packed":
            plain[f"{module}.weight"] = [shape[0], 8 * shape[1]]
        elif kind in ("weight", "bias"):
            plain[name] = shape
    return plain


def _check_routing(chosen: Mapping[str, list[float]], widths: ModuleWidths, path: Path) -> None:
    """Refuse routing counts that do not fit the experts of their layer. Raises: CheckpointError."""
    experts = {str(index): len(layer.expert_intermediate_sizes or ()) for index, layer in enumerate(widths.layers)}
    if wrong := [layer for layer, counts in chosen.items() if not counts or len(counts) != experts.get(layer)]:
        raise CheckpointError(
            f"{path} has routing counts for other experts of layer {wrong[0]} than config.json; "
            "run ddp-vllm apply again"
        )
