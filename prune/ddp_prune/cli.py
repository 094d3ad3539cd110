"""The verbs prune and apply. torch is imported when one of them runs, not before.

Every field of a `Recipe` is an option of `prune`, and every field of a `RecoveryRecipe` one of `recover`: the field
gives the option its type and default, and the first sentence of the field's docstring is the help text.
"""

import ast
import dataclasses
import inspect
import itertools
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

NO_OPTION = {"model", "target", "alm", "masks_every"}  # an argument, options per budget, a table, for research only
SIZES = {"sparsity", "speedup"}  # may have several values
TARGETS = {  # budget -> help text of its option
    "params": "Parameters of the whole model after pruning, for example 5.5B. Replaces --sparsity.",
    "flops": "FLOPs per token of the whole model after pruning, at --context-length. Replaces --sparsity.",
    "kv-bytes": "Bytes of KV cache per token after pruning, at 16 bits. Replaces --sparsity.",
}
GROUPS = {  # heading -> its fields and options; those of no other group are in the last one
    "Budget": (
        *("sparsity", "attention_sparsity", "target", "target_params", "target_flops", "target_kv_bytes", "speedup"),
        *("budget", "scope", "context_length", "concurrency", "phase", "profile", "other_machine"),
    ),
    "Shape": ("whole_experts", "head_unit", "align", "tp"),
    "Text": ("data", "text_column", "seq_len", "batch_size", "heldout_blocks", "seed", "learn_from", "watch"),
    "Run": (),
}


class Grouped(click.Command):
    """A command whose help text lists its options under the headings of GROUPS."""

    def groups(self) -> dict[str, list[click.Option]]:
        """Return the options of each heading."""
        found: dict[str, list[click.Option]] = {title: [] for title in GROUPS}
        for each in self.params:
            if isinstance(each, click.Option):
                found[group_of(each.name or "")].append(each)
        return {title: options for title, options in found.items() if options}

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, options in self.groups().items():
            with formatter.section(title):
                formatter.write_dl([record for each in options if (record := each.get_help_record(ctx))])


def group_of(name: str) -> str:
    """Return the heading of a field or option."""
    return next((title for title, names in GROUPS.items() if name in names), "Run")


class Sizes(click.ParamType):  # type: ignore[type-arg]  # not generic before click 8.3
    """A number, or several separated by commas; 20% is 0.2."""

    name = "numbers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            sizes = [float(part.rstrip("%")) / (100.0 if "%" in part else 1.0) for part in str(value).split(",")]
        except ValueError:
            self.fail(f"{value!r} is neither a number nor several separated by commas", param, ctx)
        return sizes[0] if len(sizes) == 1 else sizes


def field_docs(settings: type) -> dict[str, str]:
    """Return the docstring under each field of a dataclass and its bases, on one line; {} without source files."""
    docs: dict[str, str] = {}
    for kind in filter(dataclasses.is_dataclass, reversed(settings.__mro__)):
        try:
            body = ast.parse(inspect.getsource(kind)).body[0].body  # type: ignore[attr-defined]
        except OSError:
            continue
        for field, below in itertools.pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
                docs[ast.unparse(field.target)] = " ".join(ast.literal_eval(below.value).split())
    return docs


def recipe_options(settings: type, command: Callable[..., None]) -> Callable[..., None]:
    """Give a command an option for each field of a recipe."""
    docs = field_docs(settings)
    for field in reversed(dataclasses.fields(settings)):
        name, kind = field.name, kind_of(field)
        if name == "target":
            for budget, text in reversed(TARGETS.items()):
                command = click.option(f"--target-{budget}", metavar="N", help=text)(command)
        if name in NO_OPTION:
            continue
        shown: dict[str, Any] = {"default": field.default, "show_default": True, "type": kind}
        if settings is RecoveryRecipe and name in INHERITED:
            shown |= {"default": None, "show_default": "that of the pruning run"}
        elif name in {*SIZES, "teacher"} or field.default == "" or kind is bool:
            shown = {"is_flag": True} if kind is bool else {"type": kind}
        if name in SIZES or name in CHOICES:
            shown["type"] = Sizes() if name in SIZES else click.Choice(CHOICES[name])
        sentence = docs.get(name, "").partition(". ")[0].removesuffix(".").replace("`", "")
        command = click.option(f"--{name.replace('_', '-')}", name, help=f"{sentence}.", **shown)(command)
    return command


def given(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that were passed on the command line, without defaults, which a recipe file overrides."""
    source = click.get_current_context().get_parameter_source
    return {name: value for name, value in settings.items() if source(name) is ParameterSource.COMMANDLINE}


def _with_target(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings with the fields `budget` and `target` in place of a --target option. Raises: SettingError."""
    options = {budget: f"target_{budget.replace('-', '_')}" for budget in TARGETS}
    budgets = [budget for budget, option in options.items() if option in settings]
    if not budgets:
        return settings
    if len({*budgets, settings.get("budget", budgets[0])}) > 1:
        other = next(each for each in (*budgets[1:], settings.get("budget")) if each)
        raise SettingError(f"a target in {budgets[0]} and a budget in {other} are given; give one of them")
    return settings | {"budget": budgets[0], "target": settings.pop(options[budgets[0]])}


recipe_option = click.option(
    "--recipe", "recipe_file", type=click.Path(path_type=Path), help="TOML file with any settings of a run."
)
output_option = click.option(
    "-o", "--output", type=click.Path(path_type=Path), required=True, help="Folder to write the model to."
)
overwrite_option = click.option("--overwrite", is_flag=True, help="Replace an existing pruned model.")


@click.command(cls=Grouped)
@click.argument("model")
@partial(recipe_options, Recipe)
@recipe_option
@click.option("--tracker", help="Also log to an accelerate tracker: tensorboard, wandb, …")
@output_option
@overwrite_option
@click.option(
    "--dry-run", is_flag=True, help="Print what would be removed and the estimated memory and time, then exit."
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
    """Prune MODEL and write the smaller checkpoint.

    MODEL is a folder or a Hugging Face Hub name. Pruning trains a gate for every head and channel on text; units whose
    gates close are removed. The remaining weights are distilled from the dense model meanwhile, and with --recover for
    longer. Several sizes, as --sparsity 0.1,0.2,0.3, come from one search, each in a folder of its own. After an
    interruption, the same command resumes. On several devices: accelerate launch -m ddp_vllm prune …
    """
    settings = _with_target(given(settings))
    if dry_run:
        echo("\n".join(verbs.plan(model, output=output, recipe=recipe_file, **settings)))
        return
    settings |= {"overwrite": overwrite, "tracker": tracker}
    verbs.prune_sizes(model, output=output, recipe=recipe_file, verbose=True, **settings)


@click.command()
@click.argument("model")
@click.option("--masks", type=click.Path(path_type=Path), required=True, help="Masks file, ddp_masks.safetensors.")
@output_option
@click.option("--tp", default=1, show_default=True, help="Refuse masks that do not split over this many devices.")
@click.option("--align", default=1, show_default=True, help="Move channels until widths are multiples of this.")
@overwrite_option
def apply(model: str, masks: Path, output: Path, tp: int, align: int, overwrite: bool) -> None:
    """Prune MODEL by published masks; this requires no text and no training.

    A masks file holds no weights. If weights were trained together with the masks (prune --train weights) or after them
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
