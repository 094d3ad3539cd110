"""The verbs prune and apply. torch is imported when one of them runs, not before.

Every field of a `Recipe` is an option of `prune`, of a `RecoveryRecipe` one of `recover`: its type, default and help
are the field's.
"""

import ast
import dataclasses
import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from ddp_prune import verbs
from ddp_prune.read_recipe import INHERITED
from ddp_prune.recipe import CHOICES, Recipe, RecoveryRecipe, kind_of
from ddp_vllm.cli import echo
from ddp_vllm.errors import SettingError
from ddp_vllm.masks import read_provenance
from ddp_vllm.pages.summary import trained_together

ALIASES = {  # field -> another name of its option: that of 0.1, or that of the same thing in `profile`
    "scope": "--group", "context_length": "--context", "concurrency": "--batch"
}  # fmt: skip
NO_OPTION = {  # argument, three options, a table, sizes; what only a recipe has
    "model", "target", "alm", "in_family", "after", "after_steps", "masks_every",
}  # fmt: skip
SIZES = {"sparsity", "speedup"}  # of which there may be several
TARGETS = {  # budget -> help of its option
    "params": "Instead of a fraction: parameters of the whole model, as 5.5B.",
    "flops": "The same in FLOPs a token, at --context-length.",
    "kv-bytes": "The same in bytes of KV cache a token, at 16 bits.",
}


GROUPS = {  # what an option is about -> its fields; all others are about the run
    "Budget": (
        "sparsity", "attention_sparsity", "target", *(f"target_{budget.replace('-', '_')}" for budget in TARGETS),
        "speedup", "budget", "scope", "context_length", "concurrency", "phase", "profile", "other_machine",
    ),
    "Shape": ("whole_experts", "head_unit", "align", "quant_friendly", "tp"),
    "Text": ("data", "text_column", "seq_len", "batch_size", "heldout_blocks", "seed", "learn_from", "watch"),
    "Run": (),
}  # fmt: skip


def group_of(name: str) -> str:
    """Return what a field or option is about."""
    return next((title for title, names in GROUPS.items() if name in names), "Run")


class Grouped(click.Command):
    """A command whose help lists options by what they are about."""

    def groups(self) -> dict[str, list[click.Option]]:
        """Return the options by what they are about."""
        options = [each for each in self.params if isinstance(each, click.Option)]
        found = {title: [each for each in options if group_of(each.name or "") == title] for title in GROUPS}
        return {title: members for title, members in found.items() if members}

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, options in self.groups().items():
            with formatter.section(title):
                formatter.write_dl([record for each in options if (record := each.get_help_record(ctx))])


class Sizes(click.ParamType):  # type: ignore[type-arg]  # not generic before click 8.3
    """A number, or several by commas; 20% is 0.2."""

    name = "numbers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            sizes = [float(part.rstrip("%")) / (100.0 if "%" in part else 1.0) for part in str(value).split(",")]
        except ValueError:
            self.fail(f"{value!r} is no number, nor several by commas", param, ctx)
        return sizes[0] if len(sizes) == 1 else sizes


def field_docs(settings: type) -> dict[str, str]:
    """Return the docstring that stands under each field of a dataclass, on one line."""
    docs: dict[str, str] = {}
    for kind in filter(dataclasses.is_dataclass, reversed(settings.__mro__)):
        try:
            (definition,) = ast.parse(inspect.getsource(kind)).body
        except OSError:  # installed without its source
            continue
        assert isinstance(definition, ast.ClassDef)
        for field, below in zip(definition.body, definition.body[1:], strict=False):
            match field, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    docs[name] = " ".join(text.split())
    return docs


def recipe_options(settings: type, command: Callable[..., None]) -> Callable[..., None]:
    """Give a command an option for each field of a recipe."""
    docs = field_docs(settings)
    for field in reversed(dataclasses.fields(settings)):
        if field.name == "sparsity":
            for budget, text in reversed(TARGETS.items()):
                command = click.option(f"--target-{budget}", metavar="N", help=text)(command)
        if field.name in NO_OPTION:
            continue
        names = [f"--{field.name.replace('_', '-')}", *filter(None, [ALIASES.get(field.name)]), field.name]
        first_sentence = docs.get(field.name, "").partition(". ")[0].removesuffix(".").replace("`", "")
        kind: Any = click.Choice(CHOICES[field.name]) if field.name in CHOICES else kind_of(field)
        kind = Sizes() if field.name in SIZES else kind
        flag = {"is_flag": True} if kind is bool else {"type": kind}
        inherits = settings is RecoveryRecipe and field.name in INHERITED
        has_default = kind is not bool and field.name not in {*SIZES, "teacher"} and field.default != ""
        default = None if inherits or not has_default else field.default
        shown: Any = "as for the masks" if inherits else has_default
        command = click.option(*names, help=f"{first_sentence}.", default=default, show_default=shown, **flag)(command)
    return command


def given(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that stand on the command line; the others are the recipe's, or the defaults."""
    source = click.get_current_context().get_parameter_source
    return {name: value for name, value in settings.items() if source(name) is ParameterSource.COMMANDLINE}


@click.command(cls=Grouped)
@click.argument("model")
@partial(recipe_options, Recipe)
@click.option("--quant-friendly", is_flag=True, help="The same as --align 128.")
@click.option("--recipe", "recipe_file", type=click.Path(path_type=Path), help="TOML file with any setting of a run.")
@click.option("--tracker", help="Also log to an accelerate tracker: tensorboard, wandb, …")
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="Folder to write.")
@click.option("--overwrite", is_flag=True, help="Replace an existing pruned folder.")
@click.option(
    "--dry-run", is_flag=True, help="Only say what would go, of the whole model too, in what memory and time."
)
def prune(
    model: str,
    output: Path,
    recipe_file: Path | None,
    tracker: str | None,
    overwrite: bool,
    dry_run: bool,
    **settings: Any,
) -> None:
    """Learn what MODEL can do without and write the pruned checkpoint.

    MODEL is a folder or a Hugging Face hub name. Gates on its heads and channels are learned on text; those that close
    are removed. What stays learns meanwhile, and with --recover longer. Several sizes, as --sparsity 0.1,0.2,0.3, come
    from one search, each in a folder of its own. Interrupted, the same command goes on where it was. On several
    devices: accelerate launch -m ddp_vllm prune …
    """
    settings = _settings(**given(settings))
    if dry_run:
        echo("\n".join(verbs.plan(model, output=output, recipe=recipe_file, **settings)))
        return
    settings |= {"overwrite": overwrite, "tracker": tracker}
    verbs.prune_sizes(model, output=output, recipe=recipe_file, verbose=True, **settings)


def _settings(*, quant_friendly: bool = False, **settings: Any) -> dict[str, Any]:
    """Return the options as fields of a recipe. Raises: SettingError for two that contradict each other."""
    targets = {budget: settings.pop(f"target_{budget.replace('-', '_')}", None) for budget in TARGETS}
    asked = {budget: target for budget, target in targets.items() if target is not None}
    if asked:
        budget, target = asked.popitem()
        if asked or settings.get("budget") not in (None, budget):
            other = next(iter(asked), settings.get("budget"))
            raise SettingError(f"a target in {budget} and a budget in {other} are given; give one of them")
        settings |= {"budget": budget, "target": target}
    if quant_friendly:
        if settings.get("align") not in (None, 128):
            raise SettingError(f"--quant-friendly is --align 128, but --align {settings['align']} is given; give one")
        settings["align"] = 128
    return settings


@click.command()
@click.argument("model")
@click.option("--masks", type=click.Path(path_type=Path), required=True, help="A ddp_masks.safetensors.")
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="Folder to write.")
@click.option("--tp", default=1, show_default=True, help="Refuse masks that do not split over this many devices.")
@click.option("--align", default=1, show_default=True, help="Move channels until widths are multiples of this.")
@click.option("--overwrite", is_flag=True, help="Replace an existing pruned folder.")
def apply(model: str, masks: Path, output: Path, tp: int, align: int, overwrite: bool) -> None:
    """Cut MODEL again from published masks alone; no text and no training needed.

    A masks file holds no weights. If weights were trained together with the masks (prune --learn full) or after them
    (recover), the written model has the dense model's weights instead and is worse; ddp-vllm recover trains them.
    """
    verbs.apply(model, masks, output=output, tp=tp, align=align, overwrite=overwrite)
    provenance = read_provenance(masks)
    if (together := trained_together(provenance)) or "recovery" in provenance:
        when = "together with" if together else "after"
        echo(
            f"warning: weights were trained {when} these masks, which do not hold them; {output} has the dense model's "
            f"weights and is worse until ddp-vllm recover {output} trains them",
            err=True,
        )
    echo(f"written: {output}")
