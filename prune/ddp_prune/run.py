"""A run: one requested size of a pruning, or a recovery, with everything that is resolved before its
first step.

The sizes of a size family share one search. The search of each size starts at the end of the
previous size's search; each size has a polish of its own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from ddp_prune.core.schedule import Schedule, Steps
from ddp_prune.recipe import Recipe
from ddp_prune.settings import RecoveryRecipe
from ddp_vllm.errors import SettingError

Settled = TypeVar("Settled", Recipe, RecoveryRecipe)
# steps of all sizes together, in multiples of the steps of the largest cut alone
FAMILY_STEPS = 1.3


@dataclass(frozen=True, kw_only=True)
class Run(Generic[Settled]):
    """The recipe of one size with every setting resolved. It is made before the first step and
    saved with the run."""

    recipe: Settled
    """The settings that the user passed, with the training mode, and instead of minutes the steps and
    their shape, as resolved."""
    steps: Steps
    train: str = "masks"
    """`masks`, `lora` or `weights`: the training mode, resolved if the recipe has `auto`."""
    optimizer: str = ""
    """Optimizer of trained weights, resolved; "" for masks only."""
    num_sequences: int = 0
    """Per forward pass and device, as they fit into memory; 0: as if memory were no concern."""
    checkpointed: bool = False
    """Whether layers run forward again in backward."""
    leaves_out: bool = True
    """Whether closed heads and channels are left out of the computation, which copies weights."""
    start: Mapping[str, float] = field(default_factory=dict)
    """Keep ratio of each pool when the search of this size begins; 1 for pools without an entry."""
    in_family: bool = False
    """Whether other sizes share the search."""

    @classmethod
    def alone(cls, recipe: Settled, **resolved: Any) -> "Run[Settled]":
        """Return the run of a single size."""
        return cls(recipe=recipe, steps=steps_of([recipe])[0], **resolved)

    @property
    def schedule(self) -> Schedule:
        """What the core is told."""
        recipe = self.recipe
        if isinstance(recipe, Recipe):
            others: dict[str, Any] = {"alm": recipe.alm if recipe.controller == "alm" else None}
        else:
            others = {"warmup": recipe.warmup}
        return Schedule(
            steps=self.steps, batch_size=recipe.batch_size, distillation=recipe.distillation, seed=recipe.seed,
            learning_rate=recipe.learning_rate, num_sequences=self.num_sequences or recipe.micro_batch_size,
            checkpointed=self.checkpointed or recipe.activation_checkpointing == "on", leaves_out=self.leaves_out,
            start=self.start, flat_until=self.steps.search if self.in_family else 0, save_every=recipe.save_every,
            **others,
        )  # fmt: skip

    def resolved(self) -> dict[str, Any]:
        """Return what an interrupted command resumes with."""
        shape = {name: getattr(self.recipe, name) for name in ("steps", "batch_size", "seq_len")}
        return {"train": self.train, "optimizer": self.optimizer, **shape}

    def to_dict(self) -> dict[str, Any]:
        """Return the resolved settings as plain data, without the recipe."""
        batch = [self.recipe.batch_size, self.recipe.seq_len]
        resolved = {"train": self.train, "optimizer": self.optimizer, "batch": batch, "steps": list(self.steps)}
        return resolved | {"start": dict(self.start), "in_family": self.in_family}


def steps_of(recipes: Sequence[Any]) -> list[Steps]:
    """Return the steps of each size of a family, smallest cut first; or of a single size or a recovery.

    The search has as many steps as that of the largest cut alone. Each size gets a share of them in
    proportion to the fraction that it removes on top of the previous size. All sizes have equally
    many polish steps, so that together they take FAMILY_STEPS times the steps of the largest cut
    alone.

    recipes: each a `Recipe`, or one `RecoveryRecipe`.
    Raises: SettingError if a size is left without steps.
    """
    last = recipes[-1]
    # at least one; the rest are polish steps
    search = last.steps - min(last.steps - 1, round(last.polish * last.steps))
    if len(recipes) == 1:
        return [Steps(0, search, last.steps)]
    if last.controller != "gradual":
        raise SettingError("controller", f"is {last.controller!r}, which prunes to one size only; give one size")
    polish = min(last.steps - search, max(1, int((FAMILY_STEPS * last.steps - search) / len(recipes))))
    steps, done = list[Steps](), 0
    for recipe in recipes:
        removed, most_removed = (
            1 - 1 / recipe_of_size.size if last.speedup else recipe_of_size.size for recipe_of_size in (recipe, last)
        )
        end = round(search * removed / most_removed)
        if end <= done:
            raise SettingError(
                "steps", f"is {last.steps}, which leaves none for {last.size_name} {recipe.size:g}; give more"
            )
        steps.append(Steps(done, end, end + polish))
        done = end
    return steps
