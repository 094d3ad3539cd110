"""Every setting of a recovery, checked once. Settings that are not passed are those of the pruning
run."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_prune.settings import TrainingSettings
from ddp_vllm.errors import SettingError
from ddp_vllm.settings import read_settings, setting


@dataclass(frozen=True, kw_only=True)
class RecoveryRecipe(TrainingSettings):
    """Settings of a recovery: distillation of a pruned model from the dense one."""

    inherited = ("data", "text_column", "batch_size", "seq_len", "seed", "heldout_blocks", "distillation", "dtype")

    model: str = setting(help="Folder of the pruned model.")
    teacher: str = setting(help="Folder or Hub name of the dense model from which the model was pruned.")
    minutes: float = setting(
        10.0,
        """Minutes of training. A step is timed first; the number of steps that fit is saved with the
        run, so that an interrupted run resumes with the same number.""",
        least=0,
        heading="Basic",
    )
    tokens: int = setting(0, "Tokens to train on. Replaces `minutes`.", least=0)
    train: str = setting(
        "auto",
        """Training mode: `weights` trains all weights except embeddings and output head, `lora` trains
        low-rank additions to the projections, merged at the end. `auto` is `weights` if memory holds
        one of the optimizers.""",
        choices=("auto", "weights", "lora"),
    )
    rank: int = setting(16, "Rank of the low-rank additions of `lora`.", least=1)
    warmup: float = setting(
        0.1, "Fraction of the steps over which the rate rises; it then falls to 0 along a cosine.", is_fraction=True
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.minutes or self.tokens):
            raise SettingError("minutes", "tokens", "are 0; give one of them")

    def holds_teacher(self, train: str) -> bool:
        return True

    @property
    def steps(self) -> int:
        """Optimizer steps; at least one."""
        return max(1, self.tokens // (self.batch_size * self.seq_len))


def load_recovery(path: Path | None, settings: Mapping[str, Any], pruned_by: Mapping[str, Any]) -> RecoveryRecipe:
    """Build the recipe of a recovery as `load_recipe` does; settings that are not given are
    inherited.

    pruned_by: the recipe of the pruning run, as stored in the checkpoint; {} if it is unknown.
    """
    inherited = {name: pruned_by[name] for name in RecoveryRecipe.inherited if name in pruned_by}
    values = inherited | read_settings(path, settings, RecoveryRecipe, (("tokens", "minutes"),))
    if "teacher" not in values and "model" in pruned_by:
        values["teacher"] = known = pruned_by["model"]
        if "/" not in known and not Path(known).exists():  # a folder of another machine
            raise SettingError(
                f"the dense model was {known}, which is not a folder here; pass its folder or Hub name with --teacher"
            )
    if missing := {"model", "teacher"} - set(values):
        raise SettingError(min(missing), "is missing; give it on the command line or in the recipe")
    return RecoveryRecipe(**values)
