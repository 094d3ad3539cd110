"""The masks file of a pruned folder: gates, the search results behind them, and their provenance.

`ddp_masks.safetensors` holds float32 tensors `<module type>.gates`, `.z` and `.saliency`, and the
provenance as JSON in its metadata, under the one key `ddp` (safetensors writes several keys in any
order). Both have checksums in the provenance, which detect damage; files of older versions have
none.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ddp_vllm.errors import CheckpointError
from ddp_vllm.machine import PLACE
from ddp_vllm.remote_code.files import parse_json
from ddp_vllm.schema import ANY, COUNT, NAME, NUMBER, POSITIVE, TEXT, Number, SchemaError, check

MASKS_FILE = "ddp_masks.safetensors"
METRICS_FILE, RECOVERY_FILE = "ddp_metrics.jsonl", "ddp_recovery.jsonl"
"""The metrics that `prune` and `recover` logged, one JSON object per step; also files of the pruned
folder."""
MASK = re.compile(r"(attn|mlp|experts)\.\w+")  # of a module type: gates, z, saliency
_LOSSES = {str: [Number(-700, 700)]}  # model -> nats per token; a float holds exp of these
_MEASURED = Number(0, float("inf"))
QUALITY = {
    "dense": _MEASURED, "pruned": _MEASURED, "recovered?": _MEASURED, "tokens": COUNT,
    "block_losses?": (None, _LOSSES), "block_tokens?": (None, [Number(1, 1e9, whole=True)]),
    "agreement?": {str: {"kl": _MEASURED, "top1": Number(0, 1)}},
}  # fmt: skip
_RECIPE = {
    "model?": TEXT, "sparsity?": (None, Number(0, 1)), "context_length?": Number(1, 1 << 40, whole=True),
    "tokens?": COUNT, "scope?": NAME, "budget?": NAME, "method?": NAME, "data?": ANY,
}  # fmt: skip
_SAMPLES = {"prompts?": [TEXT], "answers?": {str: [TEXT]}}
PROVENANCE = _SAMPLES | {
    "ddp_vllm?": NAME, "head_unit?": NAME, "applied_to?": TEXT, "recipe?": _RECIPE, "search_steps?": COUNT,
    "targets?": {str: Number(0, 1)},
    "run?": {"train?": NAME}, "run_id?": NAME, "converted?": {"from": NAME, "format": NAME},
    "texts?": [TEXT], "fingerprint?": {"text?": NAME},
    "perplexity?": (None, QUALITY), "watched?": {str: (None, QUALITY)},
    "rounding?": {str: {"raw_sparsity": Number(0, 1), "dropped": COUNT, "revived": COUNT}},
    "routing?": {"chosen?": {str: [Number(0, 1e15)]}},
    "latency?": PLACE | {
        "speedup": POSITIVE, "low": POSITIVE, "high": POSITIVE,
        "workload": {"phase": NAME, "batch": COUNT, "context": COUNT},
    },
    "recovery?": _SAMPLES | {
        "recipe?": _RECIPE, "texts?": [TEXT], "seconds?": NUMBER, "watched?": {str: (None, QUALITY)}
    },
}  # fmt: skip


def is_mask(name: str) -> bool:
    """Tell whether a tensor belongs to the masks file and not to the weights."""
    return MASK.fullmatch(name) is not None


def checksums(header: str, tensors: Iterable[tuple[str, Any]]) -> dict[str, str]:
    """Return a hash of a file's header, and one of the labels and bytes of its tensors, in the
    given order."""
    digest = hashlib.sha256()
    for label, content in tensors:
        digest.update(label.encode())
        digest.update(content)
    return {"header": hashlib.sha256(header.encode()).hexdigest(), "tensors": digest.hexdigest()}


def masks_metadata(provenance: Mapping[str, Any], tensors: Mapping[str, Any]) -> dict[str, str]:
    """Return the metadata of a masks file; tensors: numpy arrays by name."""
    text = json.dumps(provenance)
    return {"ddp": json.dumps({**provenance, "checksums": checksums(text, _labeled(tensors))})}


def read_provenance(path: Path) -> dict[str, Any]:
    """Return the provenance in a masks file; {} if there is no such file.
    Raises: CheckpointError."""
    return _read(path, with_tensors=False)[1] if path.exists() else {}


def read_masks_file(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the tensors of a masks file, numpy arrays by name, and its provenance. Raises:
    CheckpointError."""
    return _read(path, with_tensors=True)


def _read(path: Path, *, with_tensors: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    from safetensors import SafetensorError, safe_open

    try:
        if not path.is_file():
            raise ValueError("it is missing, or no file")
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            names = sorted(file.keys())
            tensors = {name: file.get_tensor(name) for name in names} if with_tensors else {}
        provenance = parse_json(metadata.get("ddp", "{}"))
        check(provenance, {"checksums?": {"header": NAME, "tensors": NAME}}, "its provenance")
        if stored := provenance.pop("checksums", None):
            computed = checksums(json.dumps(provenance), _labeled(tensors))
            if stored["header"] != computed["header"]:
                raise ValueError("its provenance does not match its checksum")
            if with_tensors and stored["tensors"] != computed["tensors"]:
                raise ValueError("its masks do not match their checksum")
        check_provenance(provenance)
    except (SafetensorError, OSError, ValueError, TypeError) as error:  # TypeError: a number format that numpy lacks
        raise CheckpointError(
            f"{path} is not a masks file ({error}); pass the {MASKS_FILE} of a pruned folder"
        ) from error
    return tensors, provenance


def check_provenance(provenance: Any) -> None:
    """Refuse provenance that the pages cannot show. Raises: SchemaError."""
    if isinstance(provenance, dict) and provenance.get("perplexity") == {}:
        provenance = provenance | {"perplexity": None}
    check(provenance, PROVENANCE, "its provenance")
    recovery = provenance.get("recovery", {})
    for part in (provenance, recovery):
        if any(len(answers) != len(part.get("prompts", ())) for answers in part.get("answers", {}).values()):
            raise SchemaError("its provenance does not have one answer per prompt")
    for name, quality in {
        "": provenance.get("perplexity"),
        **provenance.get("watched", {}),
        **recovery.get("watched", {}),
    }.items():
        losses = (quality or {}).get("block_losses") or {}
        tokens = (quality or {}).get("block_tokens")
        lengths = {*map(len, losses.values()), *([] if tokens is None else [len(tokens)])}
        if len(lengths) > 1 or [] in losses.values():
            raise SchemaError(f"its perplexity{' on ' * bool(name)}{name} is not of the same blocks for each model")
    if not all(re.fullmatch("0|[1-9][0-9]{0,4}", layer) for layer in provenance.get("routing", {}).get("chosen", {})):
        raise SchemaError("its routing names a layer that is not a number")


def _labeled(tensors: Mapping[str, Any]) -> list[tuple[str, bytes]]:
    return [(f"{name} {value.dtype} {list(value.shape)}", value.tobytes()) for name, value in sorted(tensors.items())]
