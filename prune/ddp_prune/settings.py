"""The settings that pruning and recovery share: text, batches, memory; those of a recovery, and those
of a comparison on text. torch is not imported."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ddp_vllm.dimensions import check_length
from ddp_vllm.errors import SettingError
from ddp_vllm.names import bare_name, identity_of, is_hub_name, split_sources
from ddp_vllm.settings import DTYPES, Settings, read_settings, setting

# settings that do not change the result, or whose resolved values are compared instead
INDECISIVE = (
    "save_every", "micro_batch_size", "activation_checkpointing", "shard", "train", "optimizer",
    "profile", "watch",
)  # fmt: skip


def optimizer_suits(optimizer: str, dtype: str) -> bool:
    """Tell whether an optimizer can train weights of a setting's dtype.

    `adamw-8bit` moves the weights themselves. It rounds them stochastically only in bfloat16, and
    in float16 most of its steps are below half of a weight's last digit, so the weights would not
    move.
    """
    return not (optimizer == "adamw-8bit" and dtype == "float16")


def _check_no_turns(name: str, texts: str) -> None:
    """Refuse `TEXT:3` of text that is only evaluated. Raises: SettingError."""
    for plain, turns in split_sources(texts):
        if turns > 1:
            raise SettingError(name, f"has {plain}:{turns}, but is read once; leave out `:{turns}`")


@dataclass(frozen=True, kw_only=True)
class TrainingSettings(Settings):
    """Settings that pruning and recovery share."""

    shares_embeddings: ClassVar[bool] = True
    """Whether the teacher has the frozen embeddings and output head of the trained model."""
    needs: ClassVar[dict[str, tuple[str, ...]]] = {
        "learning_rate": ("train", "auto", "lora", "weights"),
        "optimizer": ("train", "auto", "lora", "weights"),
    }
    """Setting -> another one, and the values of that one with which it has an effect; without values,
    any but an empty one."""

    if TYPE_CHECKING:  # each command states its own
        model: str
        minutes: float | None
        polish: float
        train: str

        @property
        def steps(self) -> int: ...

    data: str = setting(
        "HuggingFaceFW/fineweb-edu:sample-10BT",
        """Text to train on: a Hub dataset (`name`, `name:configuration` or `name:configuration:split`;
        the default split is `train`) or a .txt/.jsonl/.json/.parquet file. Several texts, separated by
        commas, take turns of about `seq_len` tokens; `NAME:3` gives a text three turns for every turn
        of the others.""",
        heading="Basic",
        join=",".join,
    )
    text_column: str = setting(
        "",
        """Column that holds the text, if it is not called text, conversations or messages. Every text
        of `data` that has columns must have this one.""",
        heading="Rarely needed",
    )
    batch_size: int = setting(16, "Sequences per optimizer step, over all devices.", least=1, heading="Text")
    seq_len: int = setting(
        2048,
        "Tokens per sequence; the first is BOS if the model's tokenizer begins every text with it.",
        least=8,
        heading="Text",
    )
    seed: int = setting(
        0,
        "Seed of the order of documents. Gates start at exactly 1, so nothing else is random.",
        least=0,
        heading="Rarely needed",
    )
    heldout_blocks: int = setting(
        16, "Sequences that are held out from training; their perplexity is reported.", least=1, heading="Rarely needed"
    )
    distillation: float = setting(
        2.0, "Weight η of KL(teacher ‖ student); 0 trains on cross-entropy alone. Eq. 17.", least=0
    )
    learn_from: str = setting(
        "auto",
        """Tokens that contribute to the cross-entropy: assistant turns (plus all tokens of other text),
        or all. `auto` is `all` while pruning, and `assistant` in a recovery of a model with a chat
        template. The KL term covers every token.""",
        choices=("auto", "assistant", "all"),
        heading="Text",
    )

    watch: str = setting(
        "",
        "Texts, named as `data`, that are only evaluated: their perplexity is printed and reported.",
        heading="Text",
        join=",".join,
    )
    micro_batch_size: int = setting(
        0,
        """Micro-batch size in sequences; 0 chooses automatically. Automatic micro-batches hold about
        8,192 tokens, up to 32,768 of small models, 1,024 on a CPU, and fewer if memory is short.""",
        least=0,
        heading="Rarely needed",
    )
    dtype: str = setting(
        "auto",
        """Number format of the weights in forward and backward passes. `auto` is the format of the
        checkpoint, but bfloat16 for float16, in which small gradients vanish, and float32 on devices
        that do not compute in bfloat16, such as older GPUs and CPUs. The written model always has the
        format of the checkpoint.""",
        choices=DTYPES,
        heading="Rarely needed",
    )
    optimizer: str = setting(
        "auto",
        """Optimizer of trained weights. `adamw` keeps float32 masters and moments, 16 bytes per 16-bit
        weight on top of the weight; `adamw-8bit` moves the weights themselves, rounds them
        stochastically and keeps 8-bit moments, 4 bytes. It requires a C++ compiler, and bfloat16 or
        float32 weights. `auto` is the first that memory holds.""",
        choices=("auto", "adamw", "adamw-8bit"),
        heading="Rarely needed",
    )
    learning_rate: float | None = setting(
        None,
        """AdamW's highest rate for trained weights. Without it, pruning finds the rate by short trials
        before the run, and recovery chooses it by method and hidden size.""",
    )
    activation_checkpointing: str = setting(
        "auto",
        """Recompute activations in the backward pass: a third more computation, far less memory, the
        same gradients. `auto` turns it on if the
        activations would fill more than half of the free memory.""",
        choices=("auto", "on", "off"),
        heading="Rarely needed",
    )
    shard: bool = setting(
        False, "Shard the weights over all processes (FSDP2), for models that one device cannot hold."
    )
    save_every: int = setting(
        0,
        """Steps between saves of the run, from which an interrupted run resumes; 0 saves by time.
        Saving by time happens at most every two minutes and takes at most a twentieth of the run. A run
        is also saved after its last step.""",
        least=0,
        heading="Rarely needed",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.without_effect():
            other, *useful = self.needs[name]
            value = f"is {getattr(self, other)!r}; leave it out, or choose {' or '.join(useful)}"
            missing = f"is missing; leave it out, or pass a {other}"
            raise SettingError(name, f"has no effect where {other} {value if useful else missing}")
        if self.learning_rate is not None and self.learning_rate <= 0.0:
            raise SettingError(
                "learning_rate", f"is {self.learning_rate:g}; give a number above 0, such as 1e-5, or leave it out"
            )
        if not optimizer_suits(self.optimizer, self.dtype):
            raise SettingError(
                "optimizer",
                f"is {self.optimizer!r} and dtype {self.dtype!r}, in which its small steps would be rounded away; "
                "choose dtype bfloat16, or optimizer adamw",
            )
        if self.train == "lora" and self.optimizer == "adamw-8bit":
            raise SettingError(
                "optimizer", "is 'adamw-8bit', but lora trains float32 additions with adamw; leave it out"
            )
        _check_no_turns("watch", self.watch)
        trained_on = {identity_of(name) for name, _ in split_sources(self.data)}
        if self.watch and any(identity_of(name) in trained_on for name, _ in split_sources(self.watch)):
            raise SettingError("watch", f"is {self.watch}, but data trains on part of it; name text that data does not")
        if self.seed >= 2**32:
            raise SettingError("seed", f"is {self.seed}; it must be below 2^32, {2**32:,}")

    def check_length(self, model: str, text_config: Mapping[str, Any]) -> None:
        """Refuse sequences that are longer than a model states, given its config. Raises:
        SettingError."""
        check_length("seq_len", self.seq_len, model, text_config)

    def without_effect(self, **resolved: str) -> dict[str, Any]:
        """Return the settings that differ from their defaults and have no effect (`needs`), with these
        defaults. resolved: values that replace those of other settings."""
        values, defaults = vars(self) | resolved, {field.name: field.default for field in fields(self)}
        return {
            name: defaults[name]
            for name, (other, *useful) in self.needs.items()
            if values[name] != defaults[name] and not (values[other] in useful if useful else values[other])
        }

    def finds_rate(self, train: str) -> bool:
        """Tell whether a run in this training mode finds its learning rate by trials."""
        return False

    def holds_teacher(self, train: str) -> bool:
        """Tell whether a run in this training mode loads the dense model a second time, as the teacher."""
        return train == "weights" and self.distillation > 0


@dataclass(frozen=True, kw_only=True)
class FidelitySettings(Settings):
    """Settings of a comparison on text."""

    model: str
    texts: tuple[str, ...]
    """Files or hub datasets, as for `prune`. In conversations only the assistant's turns are
    evaluated; all turns if the models have different tokens."""
    against: str = ""
    """The model to compare with; "": the dense model that a pruned folder was made from."""
    max_length: int = setting(2048, least=16)
    """Tokens per block, which is the longest context; of about as many are excerpts if the models have
    different tokens."""
    tokens: int = 16_384
    """Tokens of each text, of which `texts` may evaluate only some."""
    dtype: str = setting("auto", choices=DTYPES)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tokens < self.max_length:
            raise SettingError("tokens", f"is {self.tokens:,}, below the max_length of {self.max_length:,}")
        if not self.texts:
            raise SettingError("text", "names no text; give a file or a hub dataset")
        for text in self.texts:
            _check_no_turns("text", text)
        names = list(map(bare_name, self.texts))
        if repeated := next((name for name in names if names.count(name) > 1), None):
            raise SettingError(f"two texts are called {repeated}; rename one, or results cannot tell them apart")


@dataclass(frozen=True, kw_only=True)
class RecoveryRecipe(TrainingSettings):
    """Settings of a recovery: distillation of a pruned model from the dense one."""

    shares_embeddings = False
    polish = 0.0  # gates are fixed
    inherited = ("data", "text_column", "batch_size", "seq_len", "seed", "heldout_blocks", "distillation", "dtype")
    needs = TrainingSettings.needs | {"rank": ("train", "auto", "lora")}

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
        if self.tokens:
            object.__setattr__(self, "minutes", 0.0)

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
        if not is_hub_name(known) and not Path(known).exists():  # of another machine, or moved
            raise SettingError(
                f"the dense model was {known}, which is not a folder here; pass its folder or Hub name with --teacher"
            )
    if values.get("tokens") == 0 and "minutes" not in values:
        raise SettingError("tokens", "is 0; give a number of tokens, or minutes")
    if missing := {"model", "teacher"} - set(values):
        raise SettingError(min(missing), "is missing; give it on the command line or in the recipe")
    return RecoveryRecipe(**values)
