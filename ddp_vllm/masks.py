"""The masks file of a pruned folder: gates, the search results behind them, and their provenance.

`ddp_masks.safetensors` holds float32 tensors `<module type>.gates`, `.z` and `.saliency`, and the
provenance as JSON in its metadata, under the one key `ddp` (safetensors writes several keys in any
order). Both have checksums in the provenance, which detect damage; files of older versions have
none.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct, field

from ddp_vllm.errors import CheckpointError
from ddp_vllm.machine import Measured, Workload
from ddp_vllm.remote_code.files import parse_json
from ddp_vllm.schema import AboveZero, AtLeastOne, AtLeastZero, Count, Positive, SchemaError, Share, checked

MASKS_FILE = "ddp_masks.safetensors"
METRICS_FILE, RECOVERY_FILE = "ddp_metrics.jsonl", "ddp_recovery.jsonl"
"""The metrics that `prune` and `recover` logged, one JSON object per step; also files of the pruned
folder."""
MASK = re.compile(r"(attn|mlp|experts)\.\w+")  # of a module type: gates, z, saliency


class Agreement(Struct):
    """The agreement of a model with the dense one."""

    kl: AtLeastZero
    """Nats per token."""
    top1: Share


class Quality(Struct, kw_only=True):
    """The perplexities of a model and the dense one on one text."""

    dense: AtLeastZero
    pruned: AtLeastZero
    recovered: AtLeastZero | None = None
    tokens: Count
    sha256: str = ""
    """Of the text's file; "" of a hub dataset."""
    block_losses: dict[str, list[Annotated[float, Meta(ge=-700, le=700)]]] | None = None
    """Model -> nats per token of each block; a float holds exp of these."""
    block_tokens: list[AtLeastOne] | None = None
    agreement: dict[str, Agreement] = {}
    """By model."""

    def __post_init__(self) -> None:
        losses = [*(self.block_losses or {}).values()]
        if [] in losses or len({len(blocks) for blocks in (*losses, self.block_tokens) if blocks is not None}) > 1:
            raise SchemaError("the losses are not of the same blocks for each model")

    @property
    def perplexities(self) -> dict[str, float]:
        """The perplexity of each model that was evaluated, by the stages of a checkpoint in order."""
        values = {"dense": self.dense, "pruned": self.pruned, "recovered": self.recovered}
        return {model: value for model, value in values.items() if value is not None}

    @property
    def last(self) -> str:
        """The last stage."""
        return [*self.perplexities][-1]

    @property
    def ratio(self) -> float:
        """The perplexity of the last model over the dense one's."""
        return self.perplexities[self.last] / self.dense

    @property
    def last_agreement(self) -> Agreement | None:
        """That of the last model; None if unknown."""
        return self.agreement.get(self.last)


class _Recipe(Struct):
    model: str = ""
    teacher: str = ""
    context_length: Annotated[int, Meta(ge=1, le=1 << 40)] | None = None
    tokens: Count = 0


class _Run(Struct):
    train: str = ""


class _Routing(Struct):
    chosen: dict[Annotated[str, Meta(pattern="^(0|[1-9][0-9]{0,4})$")], list[AtLeastZero]] = {}
    """Layer -> how often each expert was chosen."""


class _Converted(Struct, rename={"source": "from"}):
    source: str
    format: str


class Training(Struct, kw_only=True):
    """What was trained on which text, and with what result."""

    recipe: _Recipe = field(default_factory=_Recipe)
    tokens: Count | None = None
    texts: list[str] = []
    earlier: "list[Training]" = []
    """Recoveries before this one, whose result its figures call the pruned model."""
    watched: dict[str, Quality | None] = {}
    prompts: list[str] = []
    answers: dict[str, list[str]] = {}


class _Checksums(Struct):
    header: str
    tensors: str


class Latency(Measured, kw_only=True):
    """The predicted speedup of a step, with its range over rounds of the profile."""

    speedup: Positive
    low: Positive
    high: Positive
    workload: Workload

    @property
    def bounds(self) -> tuple[float, float, float]:
        """The speedup and the ends of its range."""
        return self.speedup, self.low, self.high


class _Fingerprint(Struct):
    weights: list[Any] = []


class _Proof(Struct):
    tokens: Count | None = None
    logits: AtLeastZero | None = None
    fault: str | None = None
    """"" if the folder repeats the measured model; None if it was not compared."""

    @property
    def statement(self) -> str:
        """What the proof of the folder showed, in words."""
        if self.fault is None:
            return "not compared with the measured model in a fresh process (--no-proof)"
        if self.fault:
            return f"FAILED: {self.fault}"
        logits = "logits finite" if self.logits is None else f"logits within {self.logits:.0e}".replace("e-0", "e-")
        return logits if self.tokens is None else f"{self.tokens:,} tokens the same, {logits}"


class _TrimmedText(Struct):
    tokens: tuple[AboveZero, AboveZero]
    bits: tuple[AboveZero, AboveZero]


class Trimmed(Struct):
    """A smaller vocabulary; each pair is before and after."""

    name: str
    """Of the model that was trimmed."""
    tokens: tuple[Count, Count]
    read: tuple[AtLeastOne, Count]
    """Numbers that a decode step reads."""
    texts: dict[str, _TrimmedText]
    """Tokens and bits per byte of held-out text."""
    words: dict[str, tuple[Count, Count]]
    """The tokens of the words that became longest."""


class Provenance(Training, kw_only=True):
    """What the masks file says of its checkpoint, as far as it is read again."""

    checksums: _Checksums | None = None
    ddp_vllm: str = "of an unknown version"
    head_unit: str = "kv-group"
    applied_to: str = ""
    applied_weights: list[Any] = []
    fingerprint: _Fingerprint = field(default_factory=_Fingerprint)
    search_steps: Count | None = None
    targets: dict[str, Share] = {}
    run: _Run = field(default_factory=_Run)
    run_id: str = ""
    converted: _Converted | None = None
    trimmed: Trimmed | None = None
    fewer_experts: tuple[Count, Count] | None = None
    """Experts per layer of the first dense model and of the one that was pruned, if whole ones were removed before."""
    perplexity: Quality | None = None
    routing: _Routing = field(default_factory=_Routing)
    latency: Latency | None = None
    recovery: Training | None = None
    proof: _Proof = field(default_factory=_Proof)

    @classmethod
    def of(cls, provenance: Any) -> "Provenance":
        """Return the provenance in a masks file. Raises: SchemaError if it is damaged."""
        return checked(provenance, cls, "its provenance")

    @property
    def training(self) -> Training:
        """The last training."""
        return self.recovery or self

    @property
    def dense_model(self) -> str:
        """The path or hub name of the model that its figures are compared with: the one that was pruned, or
        the teacher of its recovery; "" if it is unknown."""
        teacher = self.recovery.recipe.teacher if self.recovery else ""
        return teacher or self.applied_to or self.recipe.model

    @property
    def dense_weights(self) -> list[Any]:
        """The identity of the weights of the model that was pruned; [] if it is unknown."""
        return self.applied_weights or self.fingerprint.weights


def is_mask(name: str) -> bool:
    """Tell whether a tensor belongs to the masks file and not to the weights."""
    return MASK.fullmatch(name) is not None


def checksums(header: str, tensors: Mapping[str, Any]) -> dict[str, str]:
    """Return a hash of a file's header, and one of the names, types, shapes and bytes of its
    tensors, numpy arrays by name."""
    digest = hashlib.sha256()
    for name, value in sorted(tensors.items()):
        digest.update(f"{name} {value.dtype} {list(value.shape)}".encode())
        digest.update(value.tobytes())
    return {"header": hashlib.sha256(header.encode()).hexdigest(), "tensors": digest.hexdigest()}


def masks_metadata(provenance: Mapping[str, Any], tensors: Mapping[str, Any]) -> dict[str, str]:
    """Return the metadata of a masks file; tensors: numpy arrays by name."""
    text = json.dumps(provenance)
    return {"ddp": json.dumps({**provenance, "checksums": checksums(text, tensors)})}


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
        Provenance.of(provenance)
        if stored := provenance.pop("checksums", None):
            computed = checksums(json.dumps(provenance), tensors)
            if stored["header"] != computed["header"]:
                raise ValueError("its provenance does not match its checksum")
            if with_tensors and stored["tensors"] != computed["tensors"]:
                raise ValueError("its masks do not match their checksum")
    except (SafetensorError, OSError, ValueError, TypeError) as error:  # TypeError: a number format that numpy lacks
        raise CheckpointError(
            f"{path} is not a masks file ({error}); pass the {MASKS_FILE} of a pruned folder"
        ) from error
    return tensors, provenance
