"""From masks to a checkpoint: slice, fold, round once, write the whole Hugging Face folder in one piece.

Every weight is read, cut and written tensor by tensor, so memory stays near one output shard whatever the model.
"""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ddp_prune.gates import Masks
from ddp_prune.model import Source, check_spares_source, companions, open_source, weight_files
from ddp_prune.selection import realign
from ddp_vllm import __version__
from ddp_vllm.checkpoint import Checkpoint, check_links, read_checkpoint
from ddp_vllm.errors import CheckpointError, SettingError
from ddp_vllm.families import WHOLE_EXPERT, fewer_experts, pruned_config, unit_shapes
from ddp_vllm.masks import MASKS_FILE, masks_metadata, read_masks_file, read_provenance
from ddp_vllm.origins import local_provenance, published, remember
from ddp_vllm.output import atomic_folder
from ddp_vllm.pages.card import model_card
from ddp_vllm.pages.evidence import METRICS_FILE
from ddp_vllm.remote_code import FILES
from ddp_vllm.remote_code.files import INDEX_FILE
from ddp_vllm.remote_code.tensors import BLOCK_OF, LAYERS, dense_type
from ddp_vllm.remote_code.widths import LayerWidths
from ddp_vllm.tensor_parallel import check_tensor_parallel

MAX_SHARD_BYTES = 4_000_000_000
Become = Callable[[str, torch.Tensor], torch.Tensor]


def layer_widths(gates: Masks, source: Source, head_unit: str) -> list[LayerWidths]:
    """Return what each layer keeps: units whose gate is above 0."""
    sizes, widths = source.sizes, []
    if "experts" in gates:
        kept = dict(zip(sizes.routed_layers, (gates["experts"] > 0).sum(-1).tolist(), strict=True))
        return [
            LayerWidths(
                query_heads_per_kv_head=(sizes.queries_per_kv,) * sizes.num_kv_heads,
                intermediate_size=0 if index in kept else sizes.intermediate_size,
                expert_intermediate_sizes=tuple(kept[index]) if index in kept else None,
            )
            for index in range(sizes.num_layers)
        ]
    for heads_U, channels_U in zip(gates["attn"] > 0, gates["mlp"] > 0, strict=True):
        if head_unit == "kv-group":
            counts = [sizes.queries_per_kv] * int(heads_U.sum())
        else:
            counts = [int(n) for n in heads_U.view(sizes.num_kv_heads, -1).sum(1) if n]
        widths.append(LayerWidths(query_heads_per_kv_head=tuple(counts), intermediate_size=int(channels_U.sum())))
    return widths


def experts_that_stay(gates: Masks, source: Source) -> dict[int, list[int]]:
    """Return the numbers of the experts that each routed layer keeps, as many as any other.

    Raises: CheckpointError for gates that keep a part of an expert, or other numbers of them in other layers.
    """
    open_LEC = gates["experts"] > 0
    stays_LE = open_LEC.any(-1)
    if not torch.equal(stays_LE, open_LEC.all(-1)) or len(set(stays_LE.sum(1).tolist())) != 1:
        raise CheckpointError("the masks do not keep whole experts, as many in every layer; learn them again")
    return {i: row.nonzero().flatten().tolist() for i, row in zip(source.sizes.routed_layers, stays_LE, strict=True)}


class Slicer:
    """Cuts the tensors of one model: what stays of a named tensor, and what that is scaled by.

    Where whole experts go, their rows of the router go too, and those that stay are numbered anew.
    """

    def __init__(self, gates: Masks, source: Source, head_unit: str) -> None:
        self.table, self.head_dim = source.family.tensors, source.sizes.head_dim
        self.stay = experts_that_stay(gates, source) if head_unit == WHOLE_EXPERT else {}
        self.scales: dict[str, torch.Tensor] = {}  # unit -> float32 [all layers, U], or [all layers, E, C]
        sizes = source.sizes
        if "experts" in gates:
            scales = gates["experts"].new_zeros(sizes.num_layers, *gates["experts"].shape[1:])
            scales[list(sizes.routed_layers)] = gates["experts"]
            self.scales["expert_channel"] = scales
        else:
            queries_LQ = gates["attn"].repeat_interleave(sizes.num_query_heads // gates["attn"].shape[1], dim=1)
            kv_heads_LK = (queries_LQ > 0).unflatten(1, (sizes.num_kv_heads, -1)).any(-1).float()
            self.scales |= {"query_head": queries_LQ, "kv_head": kv_heads_LK, "channel": gates["mlp"]}
        self.gone = {  # block -> the layers in which nothing of it is left
            BLOCK_OF[unit]: ~(scales > 0).flatten(1).any(1)
            for unit, scales in self.scales.items()
            if unit != "expert_channel"
        }

    def cut(self, name: str, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return what is left of `tensor`, or None if its block is gone; gates are folded in fp32, rounded once."""
        if not name.startswith(f"{LAYERS}."):
            return tensor
        index, _, rest = name.removeprefix(f"{LAYERS}.").partition(".")
        module, _, kind = rest.rpartition(".")
        if any(gone[int(index)] and self._belongs(module, block) for block, gone in self.gone.items()):
            return None
        if (found := self.table.find(module)) is None:
            is_cut_router = int(index) in self.stay and module == self.table.router[0]
            return tensor[self.stay[int(index)]] if is_cut_router else tensor
        projection, expert = found
        scales = [self.scales[unit][int(index)] for unit in projection.units]
        if projection.block == "experts":
            scales = [scale[expert] for scale in scales]
        scale = torch.cat(scales).repeat_interleave(projection.unit_size(self.head_dim))
        keep = scale > 0
        if not keep.any():
            return None
        if projection.axis == 0:
            return tensor[keep].contiguous()
        if kind == "weight":  # a bias is added after the gates, so neither cut nor scaled
            tensor = (tensor[:, keep].float() * scale[keep]).to(tensor.dtype).contiguous()
        return tensor

    def renamed(self, name: str) -> str:
        """Return what a tensor that stays is called from now on."""
        index, _, rest = name.removeprefix(f"{LAYERS}.").partition(".")
        module, _, kind = rest.rpartition(".")
        if not (name.startswith(f"{LAYERS}.") and int(index) in self.stay and (found := self.table.find(module))):
            return name
        return f"{LAYERS}.{index}.{found[0].name.format(self.stay[int(index)].index(found[1]))}.{kind}"

    def _belongs(self, module: str, block: str) -> bool:
        """Say whether a module goes with a block: its projections, what else it has inside, and its norms."""
        inside = self.table.output(block).name.partition(".")[0]
        return module.startswith(f"{inside}.") or module in self.table.norms[block]


def export(
    source: Source,
    gates: Masks,
    output: Path,
    *,
    head_unit: str,
    provenance: Mapping[str, Any],
    evidence: Mapping[str, Masks] | None = None,
    overwrite: bool = False,
    extra_files: Mapping[str, str] | None = None,
    become: Become | None = None,
) -> None:
    """Write the pruned checkpoint: weights, config, tokenizer, remote code, masks and model card.

    Where whole experts went it is a stock one: its config differs by the number of experts, and there is no code.
    `gates` are float32 of `unit_shapes` with 0 for what goes; `head_unit` says what an attention unit is;
    `evidence` is kept beside them in the masks file, by name; `extra_files` maps file names to their text; `become`
    gives what a stored tensor has become, by its name on disk, where weights learned. The output appears whole or not
    at all.
    Raises: OutputError if it exists and `overwrite` is off; for whole experts as `experts_that_stay`, and SettingError
        if too few stay.
    """
    slicer = Slicer(gates, source, head_unit)
    widths = layer_widths(gates, source, head_unit)
    if slicer.stay:
        stock = fewer_experts(source.config, len(next(iter(slicer.stay.values()))))
        provenance = {**provenance, "experts": {"of": source.sizes.num_experts, "stay": slicer.stay}}
    with atomic_folder(output, overwrite=overwrite) as folder:
        copy_companions(source.folder, folder)
        if slicer.stay:
            _write_json(stock, folder / "config.json")
        else:
            _state_tokenizer_class(source.folder, folder)
            write_config(pruned_config(source.config, widths), folder)
        cut = (
            (name, tensor.dtype, slicer.cut(name, become(name, tensor) if become else tensor))
            for name, tensor in stored(source.folder)
        )
        left = ((name, dtype, part) for name, dtype, part in cut if part is not None)
        write_weights(((slicer.renamed(name), part.to(dtype)) for name, dtype, part in left), folder)
        write_masks(gates, folder / MASKS_FILE, head_unit=head_unit, provenance=provenance, evidence=evidence)
        for name, text in (extra_files or {}).items():
            (folder / name).write_text(text, encoding="utf-8")
        (folder / "README.md").write_text(model_card(read_checkpoint(folder), output.name), encoding="utf-8")


def export_recovered(
    checkpoint: Checkpoint,
    become: Become,
    output: Path,
    *,
    provenance: Mapping[str, Any],
    extra_files: Mapping[str, str],
    overwrite: bool = False,
) -> None:
    """Write a pruned checkpoint once more, its weights as they learned, each rounded once to the format it had.

    Arguments are as in `export`. Widths, gates and
    all other files are those of `checkpoint`; what lies in folders inside it, such as its report, is left behind.
    """
    source = checkpoint.folder
    gates, _ = read_masks(source / MASKS_FILE)
    with atomic_folder(output, overwrite=overwrite) as folder:
        copy_companions(source, folder)
        if checkpoint.stock:
            _write_json(checkpoint.stock, folder / "config.json")
        else:
            dense = {**checkpoint.config, "model_type": dense_type(checkpoint.config)}
            write_config(pruned_config(dense, checkpoint.layers), folder)
        write_weights(((name, become(name, tensor).to(tensor.dtype)) for name, tensor in stored(source)), folder)
        rest = {name: value for name, value in provenance.items() if name not in ("ddp_vllm", "head_unit")}
        write_masks(
            gates, folder / MASKS_FILE, head_unit=str(provenance.get("head_unit", "kv-group")), provenance=rest,
            evidence=read_evidence(source / MASKS_FILE),
        )  # fmt: skip
        if (source / METRICS_FILE).exists():
            shutil.copyfile(source / METRICS_FILE, folder / METRICS_FILE)
        for name, text in extra_files.items():
            (folder / name).write_text(text, encoding="utf-8")
        (folder / "README.md").write_text(model_card(read_checkpoint(folder), output.name), encoding="utf-8")


def write_config(config: Mapping[str, Any], folder: Path) -> None:
    """Write the config and the files it names, ours."""
    _write_json(config, folder / "config.json")
    for file in FILES:
        shutil.copyfile(file, folder / file.name)


def _write_json(content: Mapping[str, Any], path: Path) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def copy_companions(source: Path, target: Path) -> None:
    """Copy what travels with the weights but the config; the tokenizer's settings no longer name code."""
    for file in companions(source):
        if file.name != "config.json":
            copy = target / file.relative_to(source)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, copy)
    path = target / "tokenizer_config.json"
    settings = _settings(path)
    if settings.pop("auto_map", None) is not None:
        _write_json(settings, path)


def _settings(path: Path) -> dict[str, Any]:
    """Return what a tokenizer_config.json states; {} if there is none that can be read, for it will not load either."""
    with suppress(OSError, ValueError, RecursionError):
        settings = json.loads(path.read_text(encoding="utf-8"))
        return settings if isinstance(settings, dict) else {}
    return {}


def _state_tokenizer_class(source: Path, target: Path) -> None:
    """Name the class that really reads the dense model's tokenizer.

    transformers goes by the model type, at times against tokenizer_config.json; and the type is ours from now on.
    """
    from transformers import AutoTokenizer

    path = target / "tokenizer_config.json"
    settings = _settings(path)
    if not any(target.glob("tokenizer*")):
        return
    try:
        name = type(AutoTokenizer.from_pretrained(source, trust_remote_code=False)).__name__
    except Exception:  # what does not load there need not load here
        return
    name = "PreTrainedTokenizerFast" if name == "TokenizersBackend" else name  # the name that transformers 4 knows too
    if settings.get("tokenizer_class") != name:
        _write_json(settings | {"tokenizer_class": name}, path)


def write_weights(tensors: Iterable[tuple[str, torch.Tensor]], folder: Path) -> None:
    """Write named tensors into shards of at most MAX_SHARD_BYTES, one in memory at a time."""
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
    total = 0
    flush()
    weight_map: dict[str, str] = {}
    for index, names in enumerate(shards):
        file = "model.safetensors" if len(shards) == 1 else f"model-{index + 1:05}-of-{len(shards):05}.safetensors"
        written = (folder / f"shard-{index}.tmp").rename(folder / file)
        total += written.stat().st_size
        weight_map |= dict.fromkeys(names, file)
    # even one shard gets an index: without it vLLM loads every safetensors file, the masks among them
    _write_json({"metadata": {"total_size": total}, "weight_map": weight_map}, folder / INDEX_FILE)


def _save(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
    """Write a safetensors file. Raises: OSError, where safetensors has an error of its own."""
    try:
        save_file(tensors, path, metadata)
    except SafetensorError as error:
        raise OSError(str(error)) from error


def stored(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name of every tensor on disk, and the tensor."""
    for path in weight_files(folder):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (no mapping)
                yield name, file.get_tensor(name)


def write_masks(
    gates: Masks,
    path: Path,
    *,
    head_unit: str,
    provenance: Mapping[str, Any],
    evidence: Mapping[str, Masks] | None = None,
) -> None:
    """Write a masks file, which `read_masks` and `apply_masks` take; arguments as in `export`.

    Of paths in the provenance it holds the names alone; where they lead is kept in the cache.
    """
    tensors = {f"{kind}.gates": value for kind, value in gates.items()}
    for name, values in (evidence or {}).items():
        tensors |= {f"{kind}.{name}": value for kind, value in values.items()}
    said = {"ddp_vllm": __version__, "head_unit": head_unit, **published(provenance)}
    _save(tensors, path, masks_metadata(said, {name: each.numpy() for name, each in tensors.items()}))
    remember(path, provenance)


def read_masks(path: Path) -> tuple[Masks, dict[str, Any]]:
    """Return the gates of a masks file (a tensor a module type) and its provenance. Raises: CheckpointError."""
    tensors, provenance = read_masks_file(path)
    kinds = ("experts",) if "experts.gates" in tensors else ("attn", "mlp")
    if missing := [kind for kind in kinds if f"{kind}.gates" not in tensors]:
        raise CheckpointError(
            f"{path} is no masks file (it holds no {missing[0]}.gates); pass the {MASKS_FILE} of a pruned folder"
        )
    gates = {kind: torch.from_numpy(tensors[f"{kind}.gates"]).float() for kind in kinds}
    for kind, values in gates.items():
        if not (values.isfinite() & (values >= 0)).all():
            raise CheckpointError(f"{path} holds {kind} gates that are negative or no numbers; learn them again")
    return gates, provenance


def provenance_of(output: Path) -> dict[str, Any]:
    """Return what a pruned folder says of its making, if there is one."""
    try:
        return read_provenance(output / MASKS_FILE)
    except CheckpointError:
        return {}


def apply_masks(model: str, masks: Path, output: Path, *, overwrite: bool, tp: int = 1, align: int = 1) -> None:
    """Cut `model` again from a masks file alone; the widths are those of the masks unless `align` asks for others.

    Raises: CheckpointError if the masks are of a model of other sizes, or lack what aligning needs; SettingError if
        what is left does not split over `tp` devices or is less than a block; else as `open_source` and `export`.
    """
    source = open_source(model)
    check_spares_source(output, source)
    if (masks.parent / "config.json").exists():  # the folder of a model, which somebody else may have made
        check_links(masks.parent)
    (gates, _), provenance = read_masks(masks), local_provenance(masks)
    head_unit = provenance.get("head_unit", "kv-group")
    for kind, shape in unit_shapes(source.sizes, head_unit).items():
        if kind not in gates:
            raise CheckpointError(
                f"{masks} holds gates of {' and '.join(gates)}, {model} needs those of {kind}; "
                "they were learned on another model"
            )
        if tuple(gates[kind].shape) != shape:
            raise CheckpointError(
                f"{masks} holds {kind} gates of shape {list(gates[kind].shape)}, {model} needs {list(shape)}; "
                "they were learned on another model"
            )
    evidence = read_evidence(masks)
    for name in ("recovery", "perplexity", "prompts", "answers", "latency"):  # of another folder's weights and widths
        provenance.pop(name, None)
    if align != 1:
        gates, provenance = _aligned(gates, provenance, masks, align)
    widths = layer_widths(gates, source, head_unit)
    check_tensor_parallel(tp, source.config, widths, remedy=f"or prune with --tp {tp}")
    provenance = provenance | {"applied_to": model}
    export(source, gates, output, head_unit=head_unit, provenance=provenance, evidence=evidence, overwrite=overwrite)


def read_evidence(path: Path) -> dict[str, Masks]:
    """Return what a masks file keeps beside its gates: z and saliency of each module type, if they were learned."""
    evidence: dict[str, Masks] = {}
    for key, values in read_masks_file(path)[0].items():
        kind, _, name = key.partition(".")
        if name in ("z", "saliency"):
            evidence.setdefault(name, {})[kind] = torch.from_numpy(values)
    return evidence


def _aligned(gates: Masks, provenance: Mapping[str, Any], path: Path, align: int) -> tuple[Masks, dict[str, Any]]:
    """Return aligned gates, and the provenance without what rounding changed before."""
    kind = "experts" if "experts" in gates else "mlp"
    if provenance.get("head_unit") == WHOLE_EXPERT:
        raise SettingError(f"{path} keeps whole experts, whose channels all stay; leave --align out")
    scope = provenance.get("recipe", {}).get("scope", "global")
    if scope != "global":
        raise SettingError(f"{path} holds a budget of every {scope}, which aligning would break; prune with --align")
    kept, units = int((gates[kind] > 0).sum()), gates[kind].shape[-1]
    if not 0 < align <= min(kept, units):
        raise SettingError(f"align is {align}; {kept:,} channels, {units:,} a list, allow 1 to {min(kept, units):,}")
    name, found = f"{kind}.saliency", read_evidence(path).get("saliency", {})
    if kind not in found:
        raise CheckpointError(f"{path} holds no {name}, which says what to move; prune again with --align")
    saliency = found[kind]
    if saliency.shape != gates[kind].shape or not (saliency.isfinite() & (saliency >= 0)).all():
        raise CheckpointError(f"{path} holds {name} of another shape, negative or no numbers; learn the masks again")
    rest = {key: value for key, value in provenance.items() if key != "rounding"}
    return gates | {kind: realign(gates[kind], saliency, align)}, rest | {"aligned_after": align}
