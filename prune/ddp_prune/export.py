"""From masks to a checkpoint: slice the dense weights, fold the gates into them, and write a Hugging Face folder.

Tensors are read, sliced and written one by one, so memory holds about one output shard whatever the size of the model.
"""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ddp_prune.gates import Masks
from ddp_prune.model import Source, companions, weight_files
from ddp_vllm import __version__
from ddp_vllm.checkpoint import Checkpoint, read_checkpoint
from ddp_vllm.errors import CheckpointError
from ddp_vllm.families import WHOLE_EXPERT, Dimensions, fewer_experts, pruned_config
from ddp_vllm.masks import MASKS_FILE, masks_metadata
from ddp_vllm.output import atomic_folder
from ddp_vllm.pages.card import model_card
from ddp_vllm.provenance import published, remember
from ddp_vllm.remote_code import FILES
from ddp_vllm.remote_code.files import INDEX_FILE
from ddp_vllm.remote_code.tensors import BLOCK_OF, LAYERS, Projection, dense_type
from ddp_vllm.remote_code.widths import LayerWidths

MAX_SHARD_BYTES = 4_000_000_000
Transform = Callable[[str, torch.Tensor], torch.Tensor]
"""Returns the updated value of a stored weight, given its name on disk and its old value."""


def layer_widths(gates: Masks, source: Source, head_unit: str) -> list[LayerWidths]:
    """Return the kept widths of each layer: the units whose gate is above 0."""
    sizes, widths = source.sizes, []
    if "experts" in gates:
        kept = dict(zip(sizes.routed_layers, (gates["experts"] > 0).sum(-1).tolist(), strict=True))
        return [
            LayerWidths(
                query_heads_per_kv_head=(sizes.queries_per_kv,) * sizes.num_kv_heads,
                intermediate_size=0 if layer in kept else sizes.intermediate_size,
                expert_intermediate_sizes=tuple(kept[layer]) if layer in kept else None,
            )
            for layer in range(sizes.num_layers)
        ]
    for heads_U, channels_U in zip(gates["attn"] > 0, gates["mlp"] > 0, strict=True):
        if head_unit == "kv-group":
            counts = [sizes.queries_per_kv] * int(heads_U.sum())
        else:
            counts = [int(n) for n in heads_U.view(sizes.num_kv_heads, -1).sum(1) if n]
        widths.append(LayerWidths(query_heads_per_kv_head=tuple(counts), intermediate_size=int(channels_U.sum())))
    return widths


class UnitSlicer:
    """Slices tensors one by one: removes heads, channels and expert channels whose gate is 0, and emptied blocks."""

    def __init__(self, gates: Masks, source: Source) -> None:
        self.table, self.head_dim = source.family.tensors, source.sizes.head_dim
        self.scales = unit_scales(gates, source.sizes)
        self.is_removed = {  # block -> bool [all layers]
            BLOCK_OF[unit]: ~(scales > 0).flatten(1).any(1)
            for unit, scales in self.scales.items()
            if unit != "expert_channel"
        }

    def slice(self, name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor] | None:
        """Return the name and the kept part of a tensor, with gates folded in; None if nothing of it is kept."""
        if (place := _place(name)) is None:
            return name, tensor
        layer, module, kind = place
        if any(removed[layer] and self._is_part_of(module, block) for block, removed in self.is_removed.items()):
            return None
        if (found := self.table.find(module)) is None:
            return name, tensor
        projection, expert = found
        scale = self._scale(projection, layer, expert)
        keep = scale > 0
        if not keep.any():
            return None
        if projection.axis == 0:
            tensor = tensor[keep].contiguous()
        elif kind == "weight":  # a bias is added after the gates
            tensor = fold(tensor[:, keep], scale[keep])
        return name, tensor

    def _scale(self, projection: Projection, layer: int, expert: int) -> torch.Tensor:
        """Return the gate of each row (axis 0) or column (axis 1) of a projection."""
        scales = [self.scales[unit][layer] for unit in projection.units]
        if projection.block == "experts":
            scales = [scale[expert] for scale in scales]
        return torch.cat(scales).repeat_interleave(projection.unit_size(self.head_dim))

    def _is_part_of(self, module: str, block: str) -> bool:
        """Tell whether a module is removed with a block: its projections, its other submodules, and its norms."""
        inside = self.table.output(block).name.partition(".")[0]
        return module.startswith(f"{inside}.") or module in self.table.norms[block]


class WholeExpertSlicer:
    """Removes whole experts and their rows of the router, and renumbers the kept experts."""

    def __init__(self, gates: Masks, source: Source, kept: Mapping[int, list[int]]) -> None:
        """kept: the numbers of the experts to keep, per routed layer."""
        self.table, self.kept = source.family.tensors, kept
        self.gates = dict(zip(kept, gates["experts"], strict=True))  # layer -> [E, C]

    def slice(self, name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor] | None:
        """Return the new name and the kept part of a tensor, as `UnitSlicer.slice`."""
        if (place := _place(name)) is None or place[0] not in self.kept:
            return name, tensor
        layer, module, kind = place
        kept = self.kept[layer]
        if module == self.table.router[0]:
            return name, tensor[kept]
        if (found := self.table.find(module)) is None:
            return name, tensor
        projection, expert = found
        if expert not in kept:
            return None
        if projection.axis == 1 and kind == "weight":
            tensor = fold(tensor, self.gates[layer][expert])
        return f"{LAYERS}.{layer}.{projection.name.format(kept.index(expert))}.{kind}", tensor


Slicer = UnitSlicer | WholeExpertSlicer


def unit_scales(gates: Masks, sizes: Dimensions) -> dict[str, torch.Tensor]:
    """Return the gates of all layers by unit, float32 [L, U], or [L, E, C] for expert channels.

    A KV head, whose key and value rows are not scaled, counts 1 while a query head that reads it is kept.
    """
    if "experts" in gates:
        scales = gates["experts"].new_zeros(sizes.num_layers, *gates["experts"].shape[1:])
        scales[list(sizes.routed_layers)] = gates["experts"]
        return {"expert_channel": scales}
    queries_LQ = gates["attn"].repeat_interleave(sizes.num_query_heads // gates["attn"].shape[1], dim=1)
    kv_heads_LK = (queries_LQ > 0).unflatten(1, (sizes.num_kv_heads, -1)).any(-1).float()
    return {"query_head": queries_LQ, "kv_head": kv_heads_LK, "channel": gates["mlp"]}


def kept_experts(gates: Masks, source: Source) -> dict[int, list[int]]:
    """Return the numbers of the experts that each routed layer keeps, the same count in every layer.

    Raises: CheckpointError for gates that keep part of an expert, or different counts of experts.
    """
    open_LEC = gates["experts"] > 0
    kept_LE = open_LEC.any(-1)
    if not torch.equal(kept_LE, open_LEC.all(-1)) or len(set(kept_LE.sum(1).tolist())) != 1:
        raise CheckpointError("the masks do not keep whole experts, as many in every layer; prune again")
    rows = zip(source.sizes.routed_layers, kept_LE, strict=True)
    return {layer: row.nonzero().flatten().tolist() for layer, row in rows}


def fold(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Multiply the columns of a weight by gates, in float32 and rounded once to the weight's dtype."""
    return (weight.float() * scale).to(weight.dtype).contiguous()


def _place(name: str) -> tuple[int, str, str] | None:
    """Return layer, module and kind (weight or bias) of a decoder layer's tensor; None for other tensors."""
    if not name.startswith(f"{LAYERS}."):
        return None
    layer, _, rest = name.removeprefix(f"{LAYERS}.").partition(".")
    module, _, kind = rest.rpartition(".")
    return int(layer), module, kind


def export(
    source: Source,
    gates: Masks,
    output: Path,
    *,
    head_unit: str,
    provenance: Mapping[str, Any],
    scores: Mapping[str, Masks] | None = None,
    overwrite: bool = False,
    extra_files: Mapping[str, str] | None = None,
    transform: Transform | None = None,
) -> Checkpoint:
    """Write the pruned checkpoint: weights, config, tokenizer, remote code, masks and model card. Return it.

    With whole experts removed it is a stock checkpoint: its config has fewer experts, and it needs no remote code.

    gates: float32 of `unit_shapes`, 0 for removed units. head_unit: the unit of attention gates, or `expert` for whole
    experts. provenance, scores: kept with the gates in the masks file. extra_files: file name -> text. transform: the
    weights that were trained together with the masks. The output appears whole or not at all.
    Raises: OutputError if the output exists and `overwrite` is off; for whole experts as `kept_experts`, and
        SettingError if too few are kept.
    """
    if head_unit == WHOLE_EXPERT:
        kept = kept_experts(gates, source)
        slicer: Slicer = WholeExpertSlicer(gates, source, kept)
        config = fewer_experts(source.config, len(next(iter(kept.values()))))
        provenance = {**provenance, "experts": {"of": source.sizes.num_experts, "stay": kept}}
    else:
        slicer = UnitSlicer(gates, source)
        config = pruned_config(source.config, layer_widths(gates, source, head_unit))
    with atomic_folder(output, overwrite=overwrite) as folder:
        write_model(folder, source.folder, config, sliced_tensors(source.folder, slicer, transform))
        if head_unit != WHOLE_EXPERT:
            _state_tokenizer_class(source.folder, folder)
        write_masks(gates, folder / MASKS_FILE, head_unit=head_unit, provenance=provenance, scores=scores)
        for name, text in (extra_files or {}).items():
            (folder / name).write_text(text, encoding="utf-8")
        return write_card(folder, output)


def sliced_tensors(
    folder: Path, slicer: Slicer, transform: Transform | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the kept part of each stored tensor by its new name, rounded once to the dtype it was stored in."""
    for name, tensor in stored_tensors(folder):
        updated = transform(name, tensor) if transform else tensor
        if (kept := slicer.slice(name, updated)) is not None:
            yield kept[0], kept[1].to(tensor.dtype)


def stored_tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of a checkpoint with its name on disk."""
    for path in weight_files(folder):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (no mapping)
                yield name, file.get_tensor(name)


def write_model(
    folder: Path, source: Path, config: Mapping[str, Any], tensors: Iterable[tuple[str, torch.Tensor]]
) -> None:
    """Write weights and config, copy the tokenizer's and other data files of `source`, and add the code of a pruned
    config."""
    for file in companions(source):
        if file.name != "config.json":
            copy = folder / file.relative_to(source)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, copy)
    tokenizer = folder / "tokenizer_config.json"
    settings = _tokenizer_settings(tokenizer)
    if settings.pop("auto_map", None) is not None:  # it names code, which is not copied
        _write_json(settings, tokenizer)
    _write_json(config, folder / "config.json")
    for file in FILES if "ddp_layers" in config else ():
        shutil.copyfile(file, folder / file.name)
    write_weights(tensors, folder)


def write_weights(tensors: Iterable[tuple[str, torch.Tensor]], folder: Path) -> None:
    """Write named tensors into shards of at most MAX_SHARD_BYTES, one in memory at a time, and their index."""
    shards: list[list[str]] = []
    held: dict[str, torch.Tensor] = {}

    def flush() -> None:
        _save(held, folder / f"shard-{len(shards)}.tmp", {"format": "pt"})
        shards.append(list(held))
        held.clear()

    for name, tensor in tensors:
        if held and sum(each.nbytes for each in held.values()) + tensor.nbytes > MAX_SHARD_BYTES:
            flush()
        held[name] = tensor
    flush()
    total_size, weight_map = 0, dict[str, str]()
    for number, names in enumerate(shards):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        written = (folder / f"shard-{number}.tmp").rename(folder / file)
        total_size += written.stat().st_size
        weight_map |= dict.fromkeys(names, file)
    # even one shard gets an index: without it vLLM loads every safetensors file, the masks among them
    _write_json({"metadata": {"total_size": total_size}, "weight_map": weight_map}, folder / INDEX_FILE)


def _save(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
    """Write a safetensors file. Raises: OSError, also where safetensors raises an error of its own."""
    try:
        save_file(tensors, path, metadata)
    except SafetensorError as error:
        raise OSError(str(error)) from error


def write_masks(
    gates: Masks,
    path: Path,
    *,
    head_unit: str,
    provenance: Mapping[str, Any],
    scores: Mapping[str, Masks] | None = None,
) -> None:
    """Write a masks file, which `masks_file` reads.

    gates, scores: float32 per module type, as in `export`. provenance: how the masks were made. The file holds
    the names of models and texts only; their paths are kept in this machine's cache.
    """
    tensors = {f"{kind}.gates": values for kind, values in gates.items()}
    for name, masks in (scores or {}).items():
        tensors |= {f"{kind}.{name}": values for kind, values in masks.items()}
    header = {"ddp_vllm": __version__, "head_unit": head_unit, **published(provenance)}
    _save(tensors, path, masks_metadata(header, {name: each.numpy() for name, each in tensors.items()}))
    remember(path, provenance)


def write_card(folder: Path, output: Path) -> Checkpoint:
    """Check a folder that will become `output`, write its model card, and return it as the checkpoint at `output`."""
    checkpoint = read_checkpoint(folder)
    (folder / "README.md").write_text(model_card(checkpoint, output.name), encoding="utf-8")
    return replace(checkpoint, folder=output)


def config_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the config of a checkpoint to write again; it names no code but ours."""
    if checkpoint.stock:
        return dict(checkpoint.stock)
    return pruned_config({**checkpoint.config, "model_type": dense_type(checkpoint.config)}, checkpoint.layers)


def _write_json(content: Mapping[str, Any], path: Path) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _tokenizer_settings(path: Path) -> dict[str, Any]:
    """Return the content of a tokenizer_config.json; {} if it cannot be read, because then it does not load either."""
    with suppress(OSError, ValueError, RecursionError):
        settings = json.loads(path.read_text(encoding="utf-8"))
        return settings if isinstance(settings, dict) else {}
    return {}


def _state_tokenizer_class(source: Path, target: Path) -> None:
    """Name in tokenizer_config.json the class by which transformers loads the dense model's tokenizer.

    transformers sometimes chooses the class by model type, against tokenizer_config.json. The pruned model has a type
    of its own, so transformers could not choose the same class for it.
    """
    from transformers import AutoTokenizer

    if not any(target.glob("tokenizer*")):
        return
    try:
        name = type(AutoTokenizer.from_pretrained(source, trust_remote_code=False)).__name__
    except Exception:  # a tokenizer that does not load for the dense model need not load for the pruned one
        return
    name = "PreTrainedTokenizerFast" if name == "TokenizersBackend" else name  # the name in transformers 4
    path = target / "tokenizer_config.json"
    settings = _tokenizer_settings(path)
    if settings.get("tokenizer_class") != name:
        _write_json(settings | {"tokenizer_class": name}, path)
