"""The non-uniform checkpoint: what a pruned folder holds, how it is checked, and how it is written in one piece.

A pruned checkpoint is a normal Hugging Face folder. What makes it ours is in `config.json` (`ddp_layers`, see
`remote_code/widths.py`), in the Python files that travel with it, and in `ddp_masks.safetensors`.
Nothing here imports torch.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from ddp_vllm.errors import CheckpointError, ModelError, OutputError
from ddp_vllm.remote_code.widths import (
    LayerWidths,
    WidthsError,
    check_experts,
    check_shapes,
    folder_tensors,
    parse_layers,
)

MASKS_FILE = "ddp_masks.safetensors"
_MASK = re.compile(r"(attn|mlp|experts)\.\w+")  # of a module type: gates, z, saliency
INDEX_FILE = "model.safetensors.index.json"
MODEL_TYPE_PREFIX = "ddp_"


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A pruned checkpoint on disk, checked."""

    folder: Path
    config: Mapping[str, Any]
    """`config.json` as it stands; stock fields hold the dense values."""
    layers: tuple[LayerWidths, ...]
    shapes: Mapping[str, list[int]]
    """Shape of every weight on disk."""
    provenance: Mapping[str, Any]
    """Recipe, budget and quality, from the metadata of the masks file; empty if that file is missing."""

    @property
    def num_parameters(self) -> int:
        """Parameters on disk; tied embeddings count once."""
        return sum(prod(shape) for shape in self.shapes.values())

    @property
    def head_dim(self) -> int:
        return head_dim(self.config)


def head_dim(config: Mapping[str, Any]) -> int:
    """Return the size of one attention head, from a config as plain data."""
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


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
    except (OSError, ValueError) as error:
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


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read and check a pruned checkpoint without loading a weight.

    Raises: CheckpointError if it is no pruned checkpoint, if its widths are negative, fractional or above the dense
        ones, if a tensor is missing or has another shape than its widths ask for, or if its index points elsewhere.
    """
    config = read_json(folder / "config.json")
    if not isinstance(config, dict) or "ddp_layers" not in config:
        raise CheckpointError(f"{folder} is not a pruned checkpoint: its config.json has no ddp_layers; prune it first")
    _check_index(folder)
    try:
        layers = parse_layers(config)
        tensors = list(folder_tensors(folder))
        check_experts(check_shapes(tensors, layers, head_dim(config)), layers)
    except (WidthsError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder}: {_one_line(error)}") from error
    shapes = {name: shape for name, shape, _ in tensors}
    _check_complete(folder, layers, shapes)
    return Checkpoint(
        folder=folder, config=config, layers=layers, shapes=shapes, provenance=read_provenance(folder / MASKS_FILE)
    )


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


def _check_complete(folder: Path, layers: tuple[LayerWidths, ...], shapes: Mapping[str, list[int]]) -> None:
    """Every kept block must have its output projection and what that block has elsewhere."""
    modules = set(re.findall(r"layers\.(\d+)\.((?:self_attn|mlp)\.\w+)\.", " ".join(shapes)))
    with_attention = {str(index) for index, layer in enumerate(layers) if layer.num_kv_heads}
    with_mlp = {
        str(index)
        for index, layer in enumerate(layers)
        if layer.expert_intermediate_sizes is None and layer.intermediate_size
    }
    needed = set()
    for indices, block, output in ((with_attention, "self_attn.", "o_proj"), (with_mlp, "mlp.", "down_proj")):
        names = {name for index, name in modules if index in indices and name.startswith(block)} | {block + output}
        needed |= {(index, name) for index in indices for name in names}
    if missing := needed - modules:
        index, module = min(missing)
        raise CheckpointError(f"{folder}: layer {index} lacks the tensors of {module}; run ddp-vllm apply again")


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
        for part in ("recipe", "rounding", "routing", "perplexity"):
            if not isinstance(provenance.get(part, {}), dict):
                raise ValueError(f"its {part} is no object")
        _check_numbers("perplexity", provenance.get("perplexity"), ("dense", "pruned", "tokens"))
        for kind, change in provenance.get("rounding", {}).items():
            _check_numbers(f"rounding of {kind}", change, ("raw_sparsity", "dropped", "revived"))
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} is no masks file ({error}); pass the {MASKS_FILE} of a pruned folder") from error
    return provenance


def _check_numbers(name: str, found: Any, wanted: tuple[str, ...]) -> None:
    if found and not (isinstance(found, dict) and all(isinstance(found.get(key), int | float) for key in wanted)):
        raise ValueError(f"its {name} lacks one of the numbers {', '.join(wanted)}")


def check_output(output: Path, *, overwrite: bool) -> None:
    """Refuse an output that exists, before any work is done.

    Raises: OutputError if `output` exists and `overwrite` is off, if it is no folder we could have written or could
        rename, or if nothing can be written there.
    """
    with _writing(output):
        _check_output(output, overwrite=overwrite)


def _check_output(output: Path, *, overwrite: bool) -> None:
    if output.is_symlink():
        raise OutputError(f"{output} is a link, which a finished folder would replace; give the folder it points to")
    if output.name in ("", "..") or os.path.ismount(output) or Path.cwd().is_relative_to(output.resolve()):
        raise OutputError(
            f"{output} is a mount point, or the folder you are in or above, and cannot be replaced; "
            "choose a folder inside it"
        )
    parent = next(folder for folder in output.absolute().parents if folder.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise OutputError(f"{output} cannot be written: {parent} is no folder you may write to; choose another folder")
    if not output.exists():
        return
    if not overwrite:
        raise OutputError(f"{output} exists; choose another folder or pass --overwrite")
    if not output.is_dir() or (any(output.iterdir()) and not (output / "config.json").exists()):
        raise OutputError(
            f"{output} is not the folder of a model, so --overwrite leaves it alone; choose another folder"
        )


@contextmanager
def atomic_folder(output: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield a temporary folder beside `output` that becomes `output` when the block ends without an error.

    Files are synced before the rename, so a crash leaves the old folder, the new one or none, never half of one. It
    may leave `.NAME.tmp` or `.NAME.old` beside it, which the next call for the same output removes.
    Raises: OutputError as `check_output`, if another process writes the same output, and of any OSError of the block.
    """
    check_output(output, overwrite=overwrite)
    with _writing(output):
        output.parent.mkdir(parents=True, exist_ok=True)
    temporary, old = (output.with_name(f".{output.name}.{kind}") for kind in ("tmp", "old"))
    taken = f"another process writes {output}; wait for it, or choose another folder"
    with _writing(output), _own_folder(temporary, taken):
        try:
            yield temporary
            for path in temporary.rglob("*"):
                if path.is_file():
                    path.chmod(temporary.stat().st_mode & 0o666)  # safetensors writes files for their owner alone
                sync(path)
            sync(temporary)
            if output.exists():
                shutil.rmtree(old, ignore_errors=True)
                os.rename(output, old)
            os.rename(temporary, output)
            shutil.rmtree(old, ignore_errors=True)
            sync(output.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def _own_folder(folder: Path, taken: str) -> Iterator[None]:
    """Make `folder`, empty, and keep other processes away from it. Raises: OutputError(taken)."""
    folder.mkdir(exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        if not lock(descriptor, folder):
            raise OutputError(taken)
        for path in folder.iterdir():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        yield
    finally:
        os.close(descriptor)


@contextmanager
def _writing(output: Path) -> Iterator[None]:
    """Raise OutputError for what the system refuses inside the block."""
    try:
        yield
    except OSError as error:
        remedy = "make room there, or choose another folder"
        raise OutputError(f"{output} cannot be written ({error}); {remedy}") from error


def lock(descriptor: int, path: Path) -> bool:
    """Return whether a file or folder, opened before, is ours now, until the descriptor is closed or the process ends.

    Yes too where there are no such locks, on Windows and some file systems.
    """
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):
        pass
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:  # another process removed or renamed it after we opened it
        return False


def sync(path: Path) -> None:
    """Wait until a file, or what a folder lists, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
