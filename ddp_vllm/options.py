"""Makes the options of a command from the fields of a dataclass of settings.

The field gives the option its name, type and default; the first sentence of the field's docstring is its help text.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from ddp_vllm.settings import field_docs, kind_of

Decorator = Callable[[Callable[..., None]], Callable[..., None]]

recipe_option = click.option(
    "--recipe", "recipe_file", type=click.Path(path_type=Path), help="TOML file with any settings of a run."
)
output_option = click.option(
    "-o", "--output", type=click.Path(path_type=Path), required=True, help="Folder to write the model to."
)
overwrite_option = click.option("--overwrite", is_flag=True, help="Replace an existing pruned model.")


class Grouped(click.Command):
    """A command whose help text lists its options under headings."""

    def __init__(self, *arguments: Any, headings: Mapping[str, Collection[str]], **options: Any) -> None:
        """headings: heading -> the names of its options; the last heading has all others."""
        super().__init__(*arguments, **options)
        self.headings = headings

    def groups(self) -> dict[str, list[click.Option]]:
        """Return the options of each heading."""
        found: dict[str, list[click.Option]] = {heading: [] for heading in self.headings}
        for each in self.params:
            if isinstance(each, click.Option):
                found[heading_of(each.name or "", self.headings)].append(each)
        return {heading: options for heading, options in found.items() if options}

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for heading, options in self.groups().items():
            with formatter.section(heading):
                formatter.write_dl([record for each in options if (record := each.get_help_record(ctx))])


def heading_of(name: str, headings: Mapping[str, Collection[str]]) -> str:
    """Return the heading of a field or option."""
    return next((heading for heading, names in headings.items() if name in names), [*headings][-1])


class Sizes(click.ParamType):  # type: ignore[type-arg]  # not generic before click 8.3
    """A number, or several separated by commas; 20% is 0.2."""

    name = "numbers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            sizes = [float(part.rstrip("%")) / (100.0 if "%" in part else 1.0) for part in str(value).split(",")]
        except ValueError:
            self.fail(f"{value!r} is neither a number nor several separated by commas", param, ctx)
        return sizes[0] if len(sizes) == 1 else sizes


def settings_options(
    settings: type,
    *,
    instead: Mapping[str, Sequence[Decorator]],
    sizes: Collection[str] = (),
    inherited: Collection[str] = (),
) -> Decorator:
    """Return a decorator that gives a command an option for each field.

    instead: field -> the options that replace its own, possibly none.
    sizes: fields that may have several values.
    inherited: fields whose default comes from the pruning run.
    """
    docs = field_docs(settings)

    def option(field: "dataclasses.Field[Any]") -> Decorator:
        name, kind, choices = field.name, kind_of(field), field.metadata.get("choices")
        shown: dict[str, Any] = {"type": Sizes() if name in sizes else click.Choice(choices) if choices else kind}
        if kind is bool:
            shown = {"is_flag": True}
        elif name in inherited:
            shown |= {"default": None, "show_default": "that of the pruning run"}
        elif name not in sizes and field.default not in ("", dataclasses.MISSING):
            shown |= {"default": field.default, "show_default": True}
        sentence = docs.get(name, "").partition(". ")[0].removesuffix(".").replace("`", "")
        return click.option(f"--{name.replace('_', '-')}", name, help=f"{sentence}.", **shown)

    def add(command: Callable[..., None]) -> Callable[..., None]:
        for field in reversed(dataclasses.fields(settings)):
            for decorator in reversed(instead.get(field.name, [option(field)])):
                command = decorator(command)
        return command

    return add


def given(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that were passed on the command line, without defaults, which a recipe file overrides."""
    source = click.get_current_context().get_parameter_source
    return {name: value for name, value in settings.items() if source(name) is ParameterSource.COMMANDLINE}
