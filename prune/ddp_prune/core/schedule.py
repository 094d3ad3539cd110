"""What learning is told besides a model, its text and its budgets, and where it keeps its state:
`Unsaved` keeps nothing, a run's folder keeps everything. Imports no torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from ddp_vllm.errors import SettingError
from ddp_vllm.settings import Settings, setting

if TYPE_CHECKING:
    import torch

WARMUP = 0.1  # share of a run's steps over which the learning rate of trained weights rises


class Steps(NamedTuple):
    """The optimizer steps of a size, numbered from the start of the shared search."""

    first: int
    """Steps that the search has taken when the part of this size begins."""
    search: int
    """Steps after which its search ends and the support is rounded and frozen; at least one more
    than `first`."""
    last: int
    """Steps after which its polish ends."""


@dataclass(frozen=True, kw_only=True)
class AlmSettings(Settings):
    """The paper's search, `controller = "alm"`; in a recipe file the table `[alm]`."""

    learning_rate: float = setting(2e-2, "AdamW's rate for z.", least=0)
    lambda_learning_rate: float = setting(2e-2, "Ascent rate of λ1 and λ3 (Eq. 13 and 15).", least=0)
    lambda2_learning_rate: float = setting(4e-1, "Ascent rate of λ2; the paper uses 8e-1 at higher sparsity.", least=0)
    warmup: float = setting(
        0.05,
        """Fraction of the search over which AdamW's rates rise linearly; the paper does not state its
        length.""",
        is_fraction=True,
    )
    mu_start: float = setting(0.5, "Sharpness μ0 of the surrogate at the start of the search (Eq. 14).")
    mu_end: float = setting(0.05, "Sharpness μT at its end. The paper states 0.05; the authors' code stops at 0.1.")
    gate_floor: float = setting(
        0.0, "Lower bound of z. At 0, one step can reopen a closed gate; the authors' code uses −0.1."
    )
    raw_masks: bool = setting(
        False,
        """Keep every gate above 0 at the end of the search with its scale, as in the paper, whatever
        the budget. Otherwise the budget is met to a unit, and kept units have a scale of at least 0.05.
        `study` compares equal budgets and ignores this setting.""",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 < self.mu_end <= self.mu_start:
            raise SettingError(f"mu_end is {self.mu_end} and mu_start {self.mu_start}; 0 < mu_end ≤ mu_start must hold")
        if self.gate_floor > 0.0:
            raise SettingError("gate_floor", f"is {self.gate_floor}; it must be at most 0, or no gate could close")


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The steps of a learner, and what they depend on."""

    steps: Steps
    batch_size: int
    """Sequences of a step, over all processes."""
    distillation: float = 2.0
    """Weight η of KL(teacher ‖ student), Eq. 17."""
    seed: int = 0
    """Of stochastic rounding."""
    learning_rate: float | None = None
    """AdamW's highest rate of trained weights; None: found by trials, or by method and hidden size."""
    warmup: float = WARMUP
    flat_until: int = 0
    """Step at which the rate of trained weights begins to decay, if that is later than the end of
    the warm-up."""
    start: Mapping[str, float] = field(default_factory=dict)
    """Keep ratio of each pool when the search begins; 1 for pools without an entry."""
    alm: AlmSettings | None = None
    """Of the paper's search; None: the default search."""
    num_sequences: int = 0
    """Per forward pass and device, as fitted to memory; 0: as if memory were no concern."""
    checkpointed: bool = False
    """Whether layers run forward again in backward."""
    leaves_out: bool = True
    """Whether closed heads and channels are left out of the computation, which copies weights."""
    save_every: int = 0
    """Steps between saves; 0 saves by time."""


Like = Callable[[str], "torch.Tensor | None"]
"""Returns the tensor that a saved one is read into, sharded or not, by its name; None for a new one in host
memory."""


class Saved(NamedTuple):
    """What a learner resumes from."""

    step: int
    """The next step."""
    tensors: "dict[str, torch.Tensor]"
    extra: dict[str, Any]
    """Plain data, such as metrics of the rounding."""


class Unsaved:
    """Keeps nothing: for training in memory, without a folder."""

    where = "nothing was saved"
    search: int | None = None
    """Steps after which the search ends, from whose end the next size starts; None for the last
    size."""

    before = 0
    """Steps that a tracker adds to the step's number, so that it never goes back: those of earlier
    sizes."""

    def resume(self, like: Like) -> Saved | None:
        """Return the state to start from; None to start anew."""

    def save(self, step: int, tensors: "dict[str, torch.Tensor]", extra: dict[str, Any]) -> None:
        """Replace the saved state; `step` is the next one. All processes call this together."""

    def log(self, metrics: dict[str, float]) -> None:
        """Keep the metrics of one step."""
