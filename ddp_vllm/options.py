"""Makes the options of a command from the fields of a dataclass of settings.

The field gives the option its name, type and default; the first sentence of the field's docstring
is its help text.
"""

import dataclasses
import itertools
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from ddp_vllm.settings import HEADINGS, USUAL, field_docs, kind_of

Decorator = Callable[[Callable[..., None]], Callable[..., None]]

recipe_option = click.option(
    "--recipe", "recipe_file", type=click.Path(path_type=Path), help="TOML file with any settings of a run."
)
output_option = click.option(
    "-o", "--output", type=click.Path(path_type=Path), required=True, help="Folder to write the model to."
)
json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print the results as JSON; other lines go to stderr."
)
quiet_option = click.option("--quiet", is_flag=True, help="Print no progress and no results, only errors.")
overwrite_option = click.option("--overwrite", is_flag=True, help="Replace an existing pruned model.")


def default_option(*names: str, default: Any, help: str, **shown: Any) -> Decorator:
    """Return an option with a default that its help text shows; its type is that of the default."""
    return click.option(*names, default=default, show_default=True, help=help, **shown)


def choice_option(
    name: str, choices: Sequence[str], help: str, *, default: str | None = None, **shown: Any
) -> Decorator:
    """Return an option with one of several values, by default the first one."""
    chosen = default or choices[0]
    return default_option(name, type=click.Choice(choices), default=chosen, help=help, **shown)


class Grouped(click.Command):
    """A command whose help text lists its options under the headings of settings."""

    def __init__(self, *arguments: Any, settings: type, headings: Mapping[str, str], **options: Any) -> None:
        """settings: their headings apply; headings: those of further options. The help text
        only names the options of the last heading."""
        super().__init__(*arguments, **options)
        of_fields = {field.name: heading_of(field) for field in dataclasses.fields(settings)}
        self.headings = of_fields | dict(headings)

    def groups(self) -> dict[str, list[click.Option]]:
        """Return the options of each heading."""
        grouped: dict[str, list[click.Option]] = {heading: [] for heading in HEADINGS}
        for option in self.params:
            if isinstance(option, click.Option):
                grouped[self.headings.get(option.name or "", USUAL)].append(option)
        return {heading: options for heading, options in grouped.items() if options}

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for heading, options in self.groups().items():
            with formatter.section(heading):
                if heading == HEADINGS[-1]:
                    names = ", ".join(option.opts[-1] for option in options)
                    formatter.write_text(f"{names}: see docs/commands.md")
                else:
                    formatter.write_dl([record for option in options if (record := option.get_help_record(ctx))])


def heading_of(field: "dataclasses.Field[Any]") -> str:
    return str(field.metadata.get("heading", USUAL))


class Several(click.ParamType):  # type: ignore[type-arg]  # not generic before click 8.3
    """One or several values, separated by commas."""

    def __init__(self, of: Callable[[str], Any]) -> None:
        """of: makes a value of its text, or raises ValueError."""
        self.of, self.name = of, f"{click.types.convert_type(of).name},…"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return [self.of(part) for part in str(value).split(",")]
        except ValueError:
            self.fail(f"{value!r} is neither a number nor several separated by commas, such as 1,16", param, ctx)


def list_option(
    *names: str, of: Callable[[str], Any] = str, join: Callable[[tuple[Any, ...]], Any] = tuple, **shown: Any
) -> Decorator:
    """Return an option that takes a list: values separated by commas, or the option repeated, or
    both.

    of: as for `Several`. join: makes the value of the option of its parts. default: a text with
    commas.
    """

    def joined(_ctx: click.Context, _param: click.Parameter, values: Sequence[Sequence[Any]]) -> Any:
        return join(tuple(itertools.chain.from_iterable(values)))

    if shown.get("default"):
        shown |= {"default": [shown["default"]], "show_default": True}
    return click.option(*names, **shown | {"type": Several(of), "multiple": True, "callback": joined})


def one_or_several(parts: tuple[Any, ...]) -> Any:
    return parts[0] if len(parts) == 1 else parts


def fraction(text: str) -> float:
    """Read a number; 20% is 0.2."""
    return float(text.rstrip("%")) / (100.0 if "%" in text else 1.0)


def settings_options(
    settings: type,
    *,
    instead: Mapping[str, Sequence[Decorator]],
    inherited: Collection[str] = (),
) -> Decorator:
    """Return a decorator that gives a command an option for each field.

    instead: field -> the options that replace its own, possibly none.
    inherited: fields whose default comes from the pruning run.
    """
    docs = field_docs(settings)

    def option(field: "dataclasses.Field[Any]") -> Decorator:
        name, kind, known = field.name, kind_of(field), field.metadata
        sentence = docs.get(name, "").partition(". ")[0].removesuffix(".").replace("`", "")
        shown: dict[str, Any] = {"help": f"{sentence}."}
        if name in inherited:
            shown |= {"default": None, "show_default": "that of the pruning run"}
        elif kind is not bool and field.default not in ("", dataclasses.MISSING):
            shown |= {"default": field.default, "show_default": True}
        flag = f"--{name.replace('_', '-')}"
        if known.get("is_several"):
            return list_option(flag, name, of=fraction, join=one_or_several, help=shown["help"])
        if known.get("is_list"):
            return list_option(flag, name, join=",".join, **shown)
        if kind is bool:
            return click.option(flag, name, is_flag=True, **shown)
        choices = known.get("choices")
        return click.option(flag, name, type=click.Choice(choices) if choices else kind, **shown)

    def add(command: Callable[..., None]) -> Callable[..., None]:
        for field in reversed(dataclasses.fields(settings)):
            for decorator in reversed(instead.get(field.name, [option(field)])):
                command = decorator(command)
        return command

    return add


@contextmanager
def lines_to_stderr(as_json: bool) -> Iterator[None]:
    """Send whatever the block prints to stderr, so that stdout holds nothing but JSON."""
    with redirect_stdout(sys.stderr) if as_json else nullcontext():
        yield


def given(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that were passed on the command line, without defaults, which a recipe
    file overrides."""
    source = click.get_current_context().get_parameter_source
    return {name: value for name, value in settings.items() if source(name) is ParameterSource.COMMANDLINE}
