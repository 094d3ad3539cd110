"""What a learner saves and resumes from; `Unsaved` keeps nothing, a run's folder keeps everything. Imports no
torch."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

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
