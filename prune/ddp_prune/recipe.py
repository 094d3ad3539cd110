"""Every setting of a pruning run and of a recovery, checked once.

Defaults are the paper's (arXiv:2603.08065, appendix "Additional Implementation Details") except for
the search itself, `controller` and `polish`. A recipe holds the settings that the user passed; a
`Run` (run.py) holds the values that were resolved from them. Both are saved inside the run and
inside the checkpoint, so a result can be reproduced. The options of the command line, their help
texts and defaults are made from these fields.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp_prune.core.schedule import AlmSettings
from ddp_prune.settings import TrainingSettings
from ddp_vllm.dimensions import BLOCK_NAMES, MIXTURES
from ddp_vllm.errors import SettingError
from ddp_vllm.machine import PHASES, Workload
from ddp_vllm.settings import check_known, fraction, one_or_several, read_settings, setting

if TYPE_CHECKING:
    from ddp_prune.models.source import Source

SIZES = ("sparsity", "target", "speedup")
"""Settings that state how much to remove; a recipe has one of them."""
ALTERNATIVES = (SIZES, ("steps", "minutes"))
BUDGETS = {"target": ("params", "flops", "kv-bytes"), "speedup": ("latency",)}
"""The budgets in which a size can be stated, the implied one first; a sparsity can be in all."""
# the paper's search removes channels; experts that leave the router do so equally in all layers
WITH_WHOLE_EXPERTS = {
    "controller": ("gradual",), "scope": ("global", "layer"), "budget": ("units", "params"), "align": (1,),
}  # fmt: skip


def parse_amount(text: str) -> float:
    """Read a number such as 5.5B, 120M, 8G or 1e9; suffixes are powers of 1,000.
    Raises: SettingError."""
    suffixes = {"K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}
    scale = suffixes.get(text[-1:].upper())
    try:
        return float(text if scale is None else text[:-1]) * (scale or 1.0)
    except ValueError:
        raise SettingError(f"{text!r} is not a size; give a number such as 5.5B, 120M or 1e9") from None


@dataclass(frozen=True, kw_only=True)
class Recipe(TrainingSettings):
    """Settings of a pruning run, as the user passed them."""

    needs = TrainingSettings.needs | {
        "profile": ("budget", "latency"), "other_machine": ("profile",), "phase": ("budget", "latency"),
    }  # fmt: skip

    model: str = setting("", "Folder or Hugging Face Hub name of the dense model. `prune` takes it as an argument.")

    sparsity: float = setting(
        0.0,
        """Fraction of the prunable units to remove, between 0 and 1. It is 1 − ρ of Eq. 6. By default
        it applies to each module type: heads and MLP channels, or the expert channels of a mixture of
        experts. Embeddings, norms and routers are not prunable.""",
        heading="Basic",
        of=fraction,
        join=one_or_several,
    )
    target: float = setting(
        0.0,
        """Size of the whole model after pruning, such as 5.5B, in the unit of `budget`, by default
        `params`. Embeddings are included. Replaces `sparsity`.""",
        metavar="N",
        heading="Budget",
        of=parse_amount,
    )
    speedup: float = setting(
        0.0,
        """Target speedup of a step over the dense model on the serving machine, for example 1.25.
        Replaces `sparsity` and implies the budget `latency`.""",
        heading="Basic",
        of=fraction,
        join=one_or_several,
    )
    budget: str = setting(
        "units",
        """Quantity that the fraction is taken of: `units` of each module type, or over all types
        `params`, `flops` and `kv-bytes` per token, or the measured `latency` of a step. The paper's is
        `units`.""",
        choices=("units", "params", "flops", "kv-bytes", "latency"),
        heading="Budget",
    )
    context_length: int = setting(
        2048, "Tokens in the context; the budgets `flops` and `latency` depend on it.", least=1, heading="Budget"
    )
    concurrency: int = setting(
        8, "Sequences served at the same time; the budget `latency` depends on it.", least=1, heading="Budget"
    )
    phase: str = setting(
        "decode",
        "Step whose time the budget `latency` limits: `decode` or the `prefill` of prompts.",
        choices=PHASES,
        heading="Rarely needed",
    )
    profile: str = setting(
        "",
        """Latency profile that `ddp-vllm profile` wrote, for the budget `latency`; without one, this
        machine is profiled first.""",
        heading="Budget",
    )
    other_machine: bool = setting(
        False, "Accept a latency profile from another machine, where the model will be served.", heading="Budget"
    )
    prune: str = setting(
        "",
        """Parts to prune, separated by commas: `attention`, `mlp`, `experts`. The default is attention
        and MLPs, or the routed experts of a mixture of experts; the MLPs alone where attention cannot
        be pruned.""",
        join=",".join,
    )
    scope: str = setting(
        "global",
        "Where the budget holds: over the whole model, in every layer, or in every expert. Eq. 19.",
        choices=("global", "layer", "expert"),
        heading="Rarely needed",
    )
    whole_experts: bool = setting(
        False,
        """Remove whole experts of a mixture of experts, equally many from every layer, and their rows
        of the router. The result is a stock checkpoint that requires no plugin. It keeps as many
        experts as the budget allows.""",
        heading="Shape",
    )
    head_unit: str = setting(
        "auto",
        "Attention unit: `kv-group` (a KV head with all its query heads) or `query-head`.",
        choices=("auto", "kv-group", "query-head"),
        heading="Shape",
    )
    align: int = setting(
        1,
        """Make the width of every MLP, or of every expert, a multiple of this: 32, 64 or 128 suit
        kernels and quantization. The kept width is the largest multiple within the budget.""",
        least=1,
        heading="Shape",
    )
    tp: int = setting(
        1,
        """Make every layer split over this many devices without padding; the share of a device in an
        MLP is a multiple of `align`.""",
        least=1,
        heading="Shape",
    )

    steps: int = setting(1000, "Optimizer steps in total: search and polish.", least=1)
    minutes: float | None = setting(
        None,
        """Minutes of training, without loading and evaluation. Steps are timed first, and the number of
        steps that fit replaces `steps`; if few fit, `batch_size` and `seq_len` are lowered. If fewer
        than 20 fit, `train` auto takes the next simpler mode. The numbers are saved with the run, so
        that an interrupted run resumes with the same numbers.""",
        heading="Basic",
    )

    controller: str = setting(
        "gradual",
        """How the search reaches the budget: `gradual` or the paper's `alm`. `gradual` closes gates for
        good, in the order of Fisher information times squared scale, while the other scales are
        trained; it is better in short runs. `alm` is the paper's surrogate with multipliers, which
        requires about 1,000 steps.""",
        choices=("gradual", "alm"),
        heading="Rarely needed",
    )
    polish: float = setting(
        0.35,
        """Last fraction of the steps, in which only kept units are fine-tuned; 0 disables it, as in
        the paper. The default was not tuned.""",
        is_fraction=True,
        heading="Rarely needed",
    )
    alm: AlmSettings = setting(AlmSettings(), 'Settings of `controller = "alm"`.', heading="")

    train: str = setting(
        "auto",
        """What is trained while units are removed: `masks` alone, as in the paper, or also the
        remaining `weights`, or low-rank additions to them (`lora`). Embeddings are never trained, and
        additions are merged at the end. With its teacher, a second copy of the model, `weights`
        requires 20 bytes per 16-bit weight with `adamw` and 8 with `adamw-8bit`; `lora` requires
        little more than the 2 bytes of `masks`. `auto` is the first of weights, lora and masks that
        memory holds, and `masks` for the controller `alm`.""",
        choices=("auto", "masks", "lora", "weights"),
    )

    def __post_init__(self) -> None:
        if isinstance(self.alm, Mapping):  # as `changed` states it
            object.__setattr__(self, "alm", AlmSettings(**self.alm))
        if self.budget == "units" and (self.speedup or self.target):
            object.__setattr__(self, "budget", BUDGETS["speedup" if self.speedup else "target"][0])
        super().__post_init__()
        if self.minutes is not None and self.minutes <= 0.0:
            raise SettingError("minutes", f"is {self.minutes:g}; give at least 1, or leave it out to take `steps`")
        self._check_size()
        if self.alm.raw_masks and (self.polish or self.align > 1 or self.tp > 1):
            raise SettingError(
                "raw_masks keeps every gate that the search left open and trains nothing afterwards; leave out polish, "
                "align and tp"
            )
        for name, allowed in WITH_WHOLE_EXPERTS.items() if self.whole_experts else ():
            if (value := getattr(self, name)) not in allowed:
                raise SettingError(name, f"is {value!r}; with whole experts it must be {allowed[0]!r}")

    def finds_rate(self, train: str) -> bool:
        return train != "masks" and self.distillation > 0 and not self.learning_rate

    @property
    def blocks(self) -> tuple[str, ...]:
        """The module types that `prune` names; empty for the default."""
        kinds = {name: kind for kind, name in BLOCK_NAMES.items()}
        names = [name.strip() for name in self.prune.split(",")] if self.prune else []
        if wrong := [name for name in names if name not in kinds]:
            raise SettingError("prune", f"is {self.prune!r}; {wrong[0]!r} is none of {', '.join(kinds)}")
        return tuple(kind for kind in kinds.values() if kind in map(kinds.get, names))

    def _check_size(self) -> None:
        """Refuse a recipe that does not state exactly once how much to remove.
        Raises: SettingError."""
        if self.budget == "latency" and self.scope != "global":
            raise SettingError(
                "scope", f"is {self.scope!r}, but a step has one time for the whole model; leave scope out"
            )
        stated = [f"{name} {value:g}" for name in SIZES if (value := getattr(self, name))]
        if len(stated) > 1:
            raise SettingError(f"{' and '.join(stated)} are given, which both state how much to remove; give one")
        if self.speedup and self.speedup <= 1:
            raise SettingError("speedup", f"is {self.speedup:g}; it must be above 1, for example 1.25")
        check_budget(vars(self))
        if self.target < 0:
            raise SettingError("target", f"is {self.target:g}; it must be above 0, for example 5.5B")
        if not (self.speedup or self.target or 0.0 < self.sparsity < 1.0):
            raise SettingError("sparsity", f"is {self.sparsity}; it must lie between 0 and 1, for example 0.2")

    @property
    def size_name(self) -> str:
        """Name of the setting that states how much to remove, among those that may have several
        values."""
        return "speedup" if self.speedup else "sparsity"

    @property
    def size(self) -> float:
        """Value of that setting."""
        return self.speedup or self.sparsity

    def changed(self) -> dict[str, Any]:
        """Return the settings that differ from their defaults, as a recipe file would state
        them."""
        values = self.to_dict()
        implied = "latency" if self.speedup else "params" if self.target else ""
        changed = (field.name for field in fields(self) if getattr(self, field.name) != field.default)
        return {name: values[name] for name in changed if name != "budget" or values[name] != implied}

    @property
    def workload(self) -> Workload:
        """Workload whose time the budget `latency` limits."""
        return Workload(phase=self.phase, batch=self.concurrency, context=self.context_length)


def check_budget(values: Mapping[str, Any]) -> None:
    """Refuse a budget in which the size is not stated. values: the settings of a recipe. Raises: SettingError."""
    for name, budgets in BUDGETS.items():
        if values.get(name) and (budget := values.get("budget", budgets[0])) not in budgets:
            raise SettingError(
                "budget",
                f"is {budget!r}, but a {name} is a budget in {' or '.join(budgets)}; take budget out of the command "
                f"or the recipe, or give a sparsity instead of the {name}",
            )


def load_recipes(path: Path | Mapping[str, Any] | None, settings: Mapping[str, Any]) -> list[Recipe]:
    """Build one recipe per size, smallest cut first, as `load_recipe` does. Several sizes form a
    size family."""
    values = read_settings(path, settings, Recipe, ALTERNATIVES)
    name = "speedup" if values.get("speedup") else "sparsity"
    if not isinstance(sizes := values.get(name), list | tuple):
        return [load_recipe(path, settings)]
    if not sizes:
        raise SettingError(name, "is an empty list; give numbers, such as 0.1,0.2,0.3")
    if wrong := [size for size in sizes if isinstance(size, bool) or not isinstance(size, Real)]:
        raise SettingError(name, f"has {wrong[0]!r}, a {type(wrong[0]).__name__}; give numbers, such as 0.1,0.2,0.3")
    rising = sorted({float(size) for size in sizes})
    if len(rising) != len(sizes):
        raise SettingError(name, f"is {sizes}; give different numbers, such as 0.1,0.2,0.3")
    return [load_recipe(path, {**settings, name: size}) for size in rising]


def load_recipe(path: Path | Mapping[str, Any] | None, settings: Mapping[str, Any]) -> Recipe:
    """Build a recipe from a TOML file or a mapping, overridden by settings of the command line
    (None: not given).

    Raises: SettingError for an unreadable file, an unknown key or a value out of range.
    """
    values = read_settings(path, settings, Recipe, ALTERNATIVES)
    if isinstance(values.get("target"), str):
        values["target"] = parse_amount(values["target"])
    check_budget(values)  # also units that were stated
    where = str(path) if isinstance(path, Path) else "the recipe"
    if "alm" in values:
        if not isinstance(alm := values["alm"], Mapping):
            raise SettingError("alm", f"is {alm!r}; it must be a table, [alm]")
        check_known(f"[alm] of {where}", alm, AlmSettings)
        values["alm"] = AlmSettings(**alm)
        if values["alm"] != AlmSettings() and values.get("controller") != "alm":
            raise SettingError(f'the table [alm] of {where} is for controller = "alm"; set that, or leave it out')
    if "model" not in values:
        raise SettingError("model", "is missing; give it on the command line or in the recipe")
    stated = [name for name in SIZES if name in values]
    if not stated:
        raise SettingError(
            "sparsity",
            "is missing; give it, or --speedup, or a --target such as 5.5B, on the command line or in the recipe",
        )
    if not any(values[name] for name in stated):
        raise SettingError(stated[-1], "is 0; give how much to remove, such as a sparsity of 0.2")
    return Recipe(**values)


def check_suits(recipe: Recipe, source: "Source") -> None:
    """Refuse settings that do not suit a model. Raises: SettingError."""
    recipe.check_length(recipe.model, source.text_config)
    for name, default, kinds in (("head_unit", "auto", {"attn"}), ("align", 1, {"mlp", "experts"})):
        if getattr(recipe, name) != default and not kinds & {*source.sizes.blocks}:
            parts = " or ".join(sorted(BLOCK_NAMES[kind] for kind in kinds))
            raise SettingError(name, f"has no effect where no {parts} is pruned; leave it out")
    if recipe.scope == "expert" and source.sizes.blocks != ("experts",):
        raise SettingError(
            "scope", f"is 'expert', but {recipe.model} is not a mixture of experts; choose global or layer"
        )
    if recipe.whole_experts and "experts" not in source.sizes.blocks:
        raise SettingError(f"{recipe.model} is not a mixture of experts, so it has no whole experts to remove")
    if recipe.whole_experts and source.sizes.blocks != ("experts",):
        raise SettingError("whole_experts", "removes experts alone; give --prune experts")
    if recipe.whole_experts and source.config["model_type"] not in MIXTURES:
        raise SettingError(
            "whole_experts",
            f"removes rows of the router, which {source.config['model_type']} does not allow; prune channels: "
            "leave it out",
        )
    if recipe.scope == "layer" and recipe.budget != "units" and {"mlp", "experts"} <= {*source.sizes.blocks}:
        raise SettingError(
            "scope", "is 'layer', but layers have MLPs or experts; give a scope of global, or --prune mlp"
        )
