"""The non-uniform checkpoint: what a pruned folder holds, and how it is checked.

A pruned checkpoint is a normal Hugging Face folder. What makes it ours is in `config.json` (`ddp_layers`, see
`remote_code/widths.py`), in the Python files that travel with it, and in `ddp_masks.safetensors`.
Nothing here imports torch.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from ddp_vllm.errors import CheckpointError, ModelError
from ddp_vllm.families import dense_layers, pruned_config
from ddp_vllm.remote_code.widths import LayerWidths, ModelWidths, WidthsError, folder_tensors

MASKS_FILE = "ddp_masks.safetensors"
_MASK = re.compile(r"(attn|mlp|experts)\.\w+")  # of a module type: gates, z, saliency
INDEX_FILE = "model.safetensors.index.json"


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A pruned checkpoint on disk, checked."""

    folder: Path
    config: Mapping[str, Any]
    """`config.json` as it stands; stock fields hold the dense values."""
    widths: ModelWidths
    shapes: Mapping[str, list[int]]
    """Shape of every weight on disk; of a quantised one as it was before, and of no scale."""
    provenance: Mapping[str, Any]
    """Recipe, budget and quality, from the metadata of the masks file; empty if that file is missing."""

    @property
    def num_parameters(self) -> int:
        """Parameters on disk; tied embeddings count once."""
        return sum(prod(shape) for shape in self.shapes.values())

    @property
    def layers(self) -> tuple[LayerWidths, ...]:
        """What each decoder layer has left."""
        return self.widths.layers


def is_mask(name: str) -> bool:
    """Say whether a tensor is one of the masks file, not of the weights."""
    return _MASK.fullmatch(name) is not None


def read_json(path: Path) -> Any:
    """Read one JSON file of a checkpoint.

    Raises: CheckpointError if it is missing or no JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; is this the folder of a model?") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); download it or run ddp-vllm apply again") from error


def read_config(folder: Path) -> dict[str, Any]:
    """Return the config of a dense model. Raises: ModelError if it is missing or no object."""
    try:
        config = read_json(folder / "config.json")
    except CheckpointError as error:
        raise ModelError(str(error)) from error
    if not isinstance(config, dict):
        raise ModelError(f"{folder / 'config.json'} is not an object; download the model again")
    return config


def read_checkpoint(folder: Path, *, dense: bool = False) -> Checkpoint:
    """Read and check a pruned checkpoint without loading a weight.

    dense: take a dense model's folder too, with the widths that its config states.
    Raises: CheckpointError if it is no pruned checkpoint, if its widths are negative, fractional or above the dense
        ones, if a tensor is missing or has another shape than its widths ask for, or if its index points elsewhere;
        ModelError for a dense model of no supported family.
    """
    config = read_json(folder / "config.json")
    if dense and isinstance(config, dict) and "ddp_layers" not in config:
        config = pruned_config(config, dense_layers(config))
    if not isinstance(config, dict) or "ddp_layers" not in config:
        raise CheckpointError(f"{folder} is not a pruned checkpoint: its config.json has no ddp_layers; prune it first")
    _check_index(folder)
    try:
        widths = ModelWidths.of(config)
        tensors = list(folder_tensors(folder))
        widths.check_complete(widths.checked(tensors))
    except (WidthsError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder}: {_one_line(error)}") from error
    shapes = unpacked({name: shape for name, shape, _ in tensors}, config)
    provenance = read_provenance(folder / MASKS_FILE)
    return Checkpoint(folder=folder, config=config, widths=widths, shapes=shapes, provenance=provenance)


def unpacked(shapes: Mapping[str, list[int]], config: Mapping[str, Any]) -> dict[str, list[int]]:
    """Return the shapes of weights and biases as they were before compressed-tensors quantised them.

    4-bit weights lie eight in an int32, along the inputs, and are called weight_packed; beside them lie scales.
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


def _one_line(error: Exception) -> str:
    return str(error) if isinstance(error, WidthsError) else f"config.json lacks or misuses {error}"


def _check_index(folder: Path) -> None:
    """The index may only name the weight files that are checked here, and each of them must be there."""
    if not any(folder.glob("model*.safetensors")):
        raise CheckpointError(f"{folder} holds no model*.safetensors; only safetensors weights are read")
    if not (folder / INDEX_FILE).exists():
        return
    index = read_json(folder / INDEX_FILE)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{folder / INDEX_FILE} is no index: it has no weight_map; copy the folder again, whole")
    for file in sorted(set(map(str, weight_map.values()))):
        if Path(file).name != file or not Path(file).match("model*.safetensors"):
            raise CheckpointError(
                f"{folder / INDEX_FILE} names {file!r}, no model*.safetensors of this folder; run ddp-vllm apply again"
            )
        if not (folder / file).is_file():
            raise CheckpointError(f"{folder} lacks the weight file {file} of its index; copy the folder again, whole")


def read_provenance(path: Path) -> dict[str, Any]:
    """Return what a masks file says about its making; {} if there is none. Raises: CheckpointError."""
    if not path.exists():
        return {}
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
        provenance = json.loads(metadata.get("ddp", "{}"))
        if not isinstance(provenance, dict):
            raise ValueError("its provenance is no object")
        _check_parts(provenance)
        if not isinstance(provenance.get("search_steps", 0), int):
            raise ValueError("its search_steps is no integer")
        if not all(layer.isdigit() for layer in provenance.get("routing", {}).get("chosen", {})):
            raise ValueError("its routing names a layer that is no number")
        _check_perplexity("perplexity", provenance.get("perplexity"))
        for kind, change in provenance.get("rounding", {}).items():
            _check_numbers(f"rounding of {kind}", change, ("raw_sparsity", "dropped", "revived"))
    except (SafetensorError, OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is no masks file ({error}); pass the {MASKS_FILE} of a pruned folder") from error
    return provenance


def _check_parts(provenance: dict[str, Any]) -> None:
    """Raises: ValueError for a part that is no object, and for texts that are no names."""
    for name in ("recipe", "rounding", "routing", "perplexity", "recovery"):
        if not isinstance(provenance.get(name, {}), dict):
            raise ValueError(f"its {name} is no object")
    _check_recovery(provenance.get("recovery", {}))
    for part in (provenance, provenance.get("recovery", {})):
        if not all(isinstance(name, str) for name in part.get("texts", [])):
            raise ValueError("its texts are no names")


def _check_recovery(recovery: dict[str, Any]) -> None:
    """Raises: ValueError if its parts are not what the pages read."""
    prompts, answers, recipe = recovery.get("prompts", []), recovery.get("answers", {}), recovery.get("recipe", {})
    parts = {"recipe": recipe, "answers": answers, "watched": (watched := recovery.get("watched", {}))}
    if wrong := [name for name, part in parts.items() if not isinstance(part, dict)]:
        raise ValueError(f"the {wrong[0]} of its recovery is no object")
    if not isinstance(prompts, list) or not isinstance(recipe.get("tokens", 0), int):
        raise ValueError("the prompts or the tokens of its recovery are not what they should be")
    if not all(isinstance(said, list) and len(said) == len(prompts) for said in answers.values()):
        raise ValueError("the answers of its recovery are not one a prompt")
    for name, quality in watched.items():
        _check_perplexity(f"perplexity on {name}", quality or {"dense": None})


def _check_perplexity(name: str, quality: Any) -> None:
    models = (
        ("dense", "pruned", "recovered")
        if isinstance(quality, dict) and "recovered" in quality
        else ("dense", "pruned")
    )
    _check_numbers(name, quality, (*models, "tokens"))


def _check_numbers(name: str, found: Any, wanted: tuple[str, ...]) -> None:
    if found and not (isinstance(found, dict) and all(isinstance(found.get(key), int | float) for key in wanted)):
        raise ValueError(f"its {name} lacks one of the numbers {', '.join(wanted)}")
