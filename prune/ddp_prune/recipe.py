"""Every setting of a pruning run, checked once and passed whole.

Defaults are the paper's (arXiv:2603.08065, appendix "Additional Implementation Details") but for the search itself,
`controller` and `polish`; what the paper leaves open says so. A recipe is saved inside the run and inside the
checkpoint, so a result can be made again; `read_recipe` reads it. The command line's options, their help and defaults
are made of these fields.
"""

import dataclasses
import math
from dataclasses import dataclass
from types import UnionType
from typing import Any

from ddp_vllm.errors import SettingError, is_utf8
from ddp_vllm.latency import PHASES, Workload

CHOICES = {
    "head_unit": ("auto", "kv-group", "query-head"),
    "scope": ("global", "layer", "expert"),
    "budget": ("units", "params", "flops", "kv-bytes", "latency"),
    "phase": PHASES,
    "controller": ("gradual", "alm"),
    "dtype": ("auto", "float32", "bfloat16", "float16"),
    "activation_checkpointing": ("auto", "on", "off"),
    "learn": ("auto", "scales", "full"),
    "method": ("auto", "full", "lora"),
    "learn_from": ("auto", "assistant", "all"),
}


WITH_WHOLE_EXPERTS = {  # what else a recipe may say: the paper's search closes channels, and all layers keep as many
    "controller": ("gradual",), "scope": ("global", "layer"), "budget": ("units", "params"), "align": (1,),
}  # fmt: skip


def kind_of(field: dataclasses.Field[Any]) -> type:
    """Return the type of a setting, without the None of one that may be absent."""
    kind = field.type.__args__[0] if isinstance(field.type, UnionType) else field.type
    assert isinstance(kind, type)
    return kind


def _check_types(settings: Any) -> None:
    """Refuse values of another type, and numbers that are none; whole numbers will do for floats."""
    for field in dataclasses.fields(settings):
        value: Any = getattr(settings, field.name)
        if value is None and isinstance(field.type, UnionType):
            continue
        kind = kind_of(field)
        if kind is float and type(value) is int:
            value = value if value.bit_length() > 1000 else float(value)  # larger ones no float holds
            object.__setattr__(settings, field.name, value)
        if type(value) is not kind:
            raise SettingError(f"{field.name} is {value!r}; it must be a {kind.__name__}")
        if isinstance(value, str) and not is_utf8(value):
            raise SettingError(f"{field.name} is {value!r}, whose bytes are no UTF-8; rename the file or folder")
        if isinstance(value, float) and not math.isfinite(value):
            raise SettingError(f"{field.name} is {value}; it must be a finite number")


def _at_least(name: str, value: float, low: float) -> None:
    if value < low:
        raise SettingError(f"{name} is {value}; it must be at least {low}")


def _check_fraction(name: str, value: float) -> None:
    if not 0.0 <= value < 1.0:
        raise SettingError(f"{name} is {value}; it must be at least 0 and below 1")


def _check_suits_raw_masks(recipe: "Recipe") -> None:
    if recipe.alm.raw_masks and (recipe.polish or recipe.align > 1 or recipe.tp > 1 or recipe.attention_sparsity == 0):
        raise SettingError(
            "raw_masks meets no exact widths and learns no longer; leave out polish, align, tp and attention_sparsity 0"
        )


def _check_suits_whole_experts(recipe: "Recipe") -> None:
    for name, allowed in WITH_WHOLE_EXPERTS.items():
        if (given := getattr(recipe, name)) not in allowed:
            raise SettingError(f"{name} is {given!r}; where whole experts go, it must be {allowed[0]!r}")


@dataclass(frozen=True, kw_only=True)
class AlmSettings:
    """The paper's search, `controller = "alm"`; in a recipe file the table `[alm]`."""

    learning_rate: float = 2e-2
    """AdamW's rate for z."""
    lambda_learning_rate: float = 2e-2
    """Ascent rate of λ1 and λ3 (Eq. 13 and 15)."""
    lambda2_learning_rate: float = 4e-1
    """Ascent rate of λ2; the paper uses 8e-1 at higher sparsity."""
    warmup: float = 0.05
    """Fraction of the search over which AdamW's rates rise linearly; the paper names a warm-up, not its length."""
    mu_start: float = 0.5
    """Sharpness μ0 of the surrogate (Eq. 14)."""
    mu_end: float = 0.05
    """Sharpness μT. The paper says 0.05; the authors' code stops at 0.1."""
    gate_floor: float = 0.0
    """Lower bound of z. 0 keeps a dead gate one step from life; the authors' code uses −0.1."""
    raw_masks: bool = False
    """Take the gates as the search leaves them: those above 0 stay, however many and however small, as in the paper.
    Else the budget is met to a unit, and what stays is at least 0.05. `study` compares equal units, so there it is
    off."""

    def __post_init__(self) -> None:
        """Check every value once. Raises: SettingError."""
        _check_types(self)
        for name in ("learning_rate", "lambda_learning_rate", "lambda2_learning_rate"):
            _at_least(name, getattr(self, name), 0)
        _check_fraction("warmup", self.warmup)
        if not 0.0 < self.mu_end <= self.mu_start:
            raise SettingError(f"mu_end is {self.mu_end} and mu_start {self.mu_start}; 0 < mu_end ≤ mu_start must hold")
        if self.gate_floor > 0.0:
            raise SettingError(f"gate_floor is {self.gate_floor}; it must be at most 0, or no gate could close")


@dataclass(frozen=True, kw_only=True)
class LearningSettings:
    """What a run has that learns masks, and one that learns weights."""

    data: str = "HuggingFaceFW/fineweb-edu:sample-10BT"
    """Text to learn on: a hub dataset (`name`, `name:configuration` or `name:configuration:split`; else split `train`)
    or a .txt/.jsonl/.json/.parquet file. Several, separated by commas, take turns of about `seq_len` tokens; `NAME:3`
    has three turns to the others' one."""
    text_column: str = ""
    """Column that holds the text, where it is not called text, conversations or messages. Every text of `data` that has
    columns must have it."""
    batch_size: int = 16
    """Sequences an optimizer step, over all devices."""
    seq_len: int = 2048
    """Tokens a sequence; the first is BOS where the model's tokenizer begins every text with it."""
    seed: int = 0
    """Orders the documents. Gates start at exactly 1, so nothing else of them is random."""
    heldout_blocks: int = 16
    """Sequences of the text that are never trained on; their perplexity is reported."""
    distillation: float = 2.0
    """Weight η of KL(teacher ‖ student); 0 trains on cross-entropy alone. Eq. 17."""
    learn_from: str = "auto"
    """Tokens whose cross-entropy counts: `assistant` those of its turns in conversations, and all of other text; `all`.
    `auto` is `all` while masks learn, but `assistant` in a recovery of a model with a chat template. The teacher
    teaches on every token."""

    micro_batch_size: int = 0
    """Sequences a forward pass; 0 chooses. It keeps about 8,192 tokens in flight, 1,024 on a CPU, fewer where memory is
    short."""
    dtype: str = "auto"
    """Number format of the weights while learning; `auto` takes the checkpoint's. But bfloat16 for float16, in
    which small gradients vanish. What is exported has the checkpoint's either way."""
    activation_checkpointing: str = "auto"
    """Run layers again in backward instead of keeping what they computed. A third more work, a small part of the
    memory, the same gradients. `auto` does it when half of the free memory would not hold the activations."""
    shard: bool = False
    """Cut the weights over all processes (FSDP2), for models that one device cannot hold."""
    save_every: int = 0
    """Steps between saves of the run, from which an interrupted run resumes; 0 saves by time: at most every two
    minutes, and so that saving takes at most a twentieth of the run. A run is saved after its last step too."""

    def __post_init__(self) -> None:
        """Check every value once. Raises: SettingError."""
        _check_types(self)
        for name in ("batch_size", "heldout_blocks"):
            _at_least(name, getattr(self, name), 1)
        _at_least("seq_len", self.seq_len, 8)
        for name in ("micro_batch_size", "seed", "distillation", "save_every"):
            _at_least(name, getattr(self, name), 0)
        if self.seed >= 2**32:
            raise SettingError(f"seed is {self.seed}; it must be below 2^32, {2**32:,}")
        for name, choices in CHOICES.items():
            if hasattr(self, name) and getattr(self, name) not in choices:
                raise SettingError(f"{name} is {getattr(self, name)!r}; it must be one of {', '.join(choices)}")

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as plain data, as they are saved; without those that are not set, as TOML has no null."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class Recipe(LearningSettings):
    """Settings of a run that learns masks."""

    model: str
    """Folder or Hugging Face hub name of the dense model."""

    sparsity: float = 0.0
    """Fraction to remove of what can be pruned (not embeddings, norms, routers), between 0 and 1. It is 1 − ρ of Eq. 6,
    by default of each module type: heads, MLP channels; of a mixture of experts, its expert channels."""
    attention_sparsity: float | None = None
    """Fraction of the attention units to remove, if it differs from that of the MLP channels; 0 prunes MLPs only. With
    the budget `units`."""
    target: float = 0.0
    """Instead of `sparsity`: what the whole model, embeddings and all, may have left of what `budget` counts."""
    speedup: float = 0.0
    """Instead of `sparsity`: how many times faster than the dense model a step shall be where it will be served, with
    the budget `latency`."""
    budget: str = "units"
    """What the fraction counts: `units` of each module type as in the paper, or over all types together `params`,
    `flops` (a token), `kv-bytes` (of KV cache a token, at 16 bits) or `latency` (measured time of a step)."""
    context_length: int = 2048
    """Tokens attended to, on which `flops` and `latency` depend."""
    concurrency: int = 8
    """Sequences served at once, on which `latency` depends."""
    phase: str = "decode"
    """What `latency` counts: a step of `decode`, the `prefill` of prompts, or a `mix`, half prompt and half answer."""
    profile: str = ""
    """What `ddp-vllm profile` measured for `latency`; without one it is measured first."""
    other_machine: bool = False
    """Take a profile that was measured on another machine, where the model will be served."""
    scope: str = "global"
    """Where the budget holds: over the whole model, in every layer, or in every expert. Eq. 19."""
    whole_experts: bool = False
    """Of a mixture of experts, remove whole experts, equally many from every layer, and from its router. What is
    written is a stock checkpoint that needs no plugin. What is kept is the most experts that the budget allows."""
    head_unit: str = "auto"
    """What an attention unit is: `kv-group` (a KV head with all its query heads) or `query-head`."""
    align: int = 1
    """Make the width of every MLP, or of every expert, a multiple of this: 32, 64 or 128 suit kernels and quantisation.
    What is kept is then the largest multiple that is not above the budget."""
    tp: int = 1
    """Make every layer split over this many devices without padding; a device's share is a multiple of `align`."""

    steps: int = 1000
    """Optimizer steps in all: search and polish."""

    controller: str = "gradual"
    """How the search comes down to the budget: `gradual` or the paper's `alm`. `gradual` closes gates for good, worst
    first by Fisher information and scale, while the scales of the others are learned; better in short runs (log 30).
    `alm` has the paper's surrogate and multipliers, which need about 1,000 steps."""
    polish: float = 0.35
    """Last fraction of the steps, in which only the scales of what is kept are learned. 0 is the paper's single phase.
    Ours; the fraction was not tuned."""
    alm: AlmSettings = AlmSettings()
    """Settings of `controller = "alm"`."""

    masks_every: int = 0
    """Steps between copies of the gates, kept in the masks file as `mlp.after_100` and the like; 0: none."""
    in_family: bool = False
    """One of several sizes from one search."""
    after: float = 0.0
    """Of a family: the size that the same search passed before this one; 0: it begins here."""
    after_steps: int = 0
    """Steps that the search had done by then."""

    learn: str = "auto"
    """What learns while gates close: the `scales` of what is open, as in the paper, or also all weights but embeddings
    (`full`). That takes a second copy of the model, the teacher, and 18 bytes more a parameter. `auto` is `full` where
    memory holds it, but `scales` for `alm`."""
    recover: float = 0.0
    """Minutes in which the weights that stay then learn from the dense model, as `ddp-vllm recover` does; 0: none."""

    def __post_init__(self) -> None:
        """Check every value once. Raises: SettingError."""
        super().__post_init__()
        for name in ("steps", "align", "tp", "context_length", "concurrency"):
            _at_least(name, getattr(self, name), 1)
        for name in ("recover", "masks_every"):
            _at_least(name, getattr(self, name), 0)
        _check_fraction("polish", self.polish)
        _check_fraction("attention_sparsity", self.attention_sparsity or 0.0)
        self._check_size()
        _check_suits_raw_masks(self)
        if self.whole_experts:
            _check_suits_whole_experts(self)

    def _check_size(self) -> None:
        """Refuse what says not once how much goes. Raises: SettingError."""
        if self.attention_sparsity is not None and not (self.sparsity and self.budget == "units"):
            raise SettingError("attention_sparsity requires a sparsity and the budget units; leave it out")
        if self.budget == "latency" and self.scope != "global":
            raise SettingError(f"scope is {self.scope!r}, but a step has one time for the whole model; leave scope out")
        if self.speedup:
            if self.sparsity or self.target or self.speedup <= 1:
                raise SettingError(f"speedup is {self.speedup:g}; give a number above 1, and no sparsity or target")
            if self.budget != "latency":
                raise SettingError("speedup needs the budget latency; leave budget out")
        elif self.target:
            if self.sparsity or self.target < 0:
                raise SettingError(f"target is {self.target} and sparsity {self.sparsity}; give one, above 0")
            if self.budget == "units":
                raise SettingError("target needs a budget of params, flops or kv-bytes; with units, give a sparsity")
        elif not 0.0 < self.sparsity < 1.0:
            raise SettingError(f"sparsity is {self.sparsity}; it must lie between 0 and 1, for example 0.2")

    @property
    def size_name(self) -> str:
        return "speedup" if self.speedup else "sparsity"

    @property
    def size(self) -> float:
        """How much goes, as it was asked for."""
        return self.speedup or self.sparsity

    def removed(self, module_type: str) -> float:
        """Return the fraction of the units of a module type that goes, with the budget `units`."""
        own = self.attention_sparsity if module_type == "attn" else None
        return self.sparsity if own is None else own

    def resized(self, size: float, **changes: Any) -> "Recipe":
        """Return the recipe of another size of a family."""
        return dataclasses.replace(self, **{self.size_name: size, **changes})

    @property
    def workload(self) -> Workload:
        """What the budget `latency` is measured by."""
        return Workload(phase=self.phase, batch=self.concurrency, context=self.context_length)

    @property
    def polish_steps(self) -> int:
        """Steps with a frozen support, at the end."""
        return min(self.steps - 1, round(self.polish * self.steps))

    @property
    def search_steps(self) -> int:
        """Steps in which the support is searched, at the start; at least one."""
        return self.steps - self.polish_steps


@dataclass(frozen=True, kw_only=True)
class RecoveryRecipe(LearningSettings):
    """Settings of a run in which the weights of a pruned model learn from the dense one."""

    model: str
    """Folder of the pruned model."""
    teacher: str
    """Folder or hub name of the dense model it was cut from."""
    minutes: float = 10.0
    """How long to learn. A step is timed first; how many fit is saved with the run, so that it can go on to the bit."""
    tokens: int = 0
    """Instead of `minutes`: tokens to learn on."""
    method: str = "auto"
    """What learns: `full` all weights but embeddings and output head, `lora` low-rank additions to the projections,
    merged at the end. `auto` is `full` where memory holds its optimizer, 18 bytes a parameter."""
    rank: int = 16
    """Rank of the additions of `lora`."""
    learning_rate: float = 0.0
    """AdamW's highest rate; 0 chooses by method and hidden size."""
    warmup: float = 0.1
    """Fraction of the steps over which the rate rises; it then falls to 0 along a cosine."""
    watch: str = ""
    """Text of another kind, named as `data`, on which nothing is learned; it is said if the model gets worse there."""

    def __post_init__(self) -> None:
        """Check every value once. Raises: SettingError."""
        super().__post_init__()
        for name in ("minutes", "tokens", "learning_rate"):
            _at_least(name, getattr(self, name), 0)
        _at_least("rank", self.rank, 1)
        _check_fraction("warmup", self.warmup)
        if not (self.minutes or self.tokens):
            raise SettingError("minutes and tokens are 0; give one of them")

    @property
    def steps(self) -> int:
        """Optimizer steps; at least one."""
        return max(1, self.tokens // (self.batch_size * self.seq_len))
