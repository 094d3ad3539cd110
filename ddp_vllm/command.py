"""Makes the click command of a verb from its signature and the fields of its settings."""

import inspect
import io
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import MISSING, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from ddp_vllm.errors import LOST, OutputError, SettingError
from ddp_vllm.settings import HEADINGS, USUAL, VERBS, Option, Verb, first_sentence, kind_of, option_of, part_of

Declared = tuple[str, Any, Any, Option]
"""Name, type, default and `Option` of a parameter of a verb or a setting."""
JSON = "Print the results as JSON; other lines go to stderr."
JSON_IS_LAST_LINE = "Print the results as one line of JSON at the end."
STDOUT = 1
QUIET = "Print no progress and no results, only errors."


class Command(click.Command):
    """A command whose help text lists its options under the headings of settings."""

    headings: dict[str, str]
    """Of the options that are settings."""

    def groups(self) -> dict[str, list[click.Option]]:
        """Return the options of each heading."""
        grouped: dict[str, list[click.Option]] = {heading: [] for heading in HEADINGS}
        for option in self.params:
            if isinstance(option, click.Option):
                grouped[self.headings.get(option.name or "", USUAL)].append(option)
        return {heading: options for heading, options in grouped.items() if options}

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Describe all options, but only name those of the last heading."""
        groups = self.groups()
        if len(groups) < 2:
            super().format_options(ctx, formatter)
            return
        for heading, options in groups.items():
            with formatter.section(heading):
                if heading == HEADINGS[-1]:
                    names = ", ".join(option.opts[-1] for option in options)
                    formatter.write_text(f"{names}: see docs/commands.md")
                else:
                    formatter.write_dl([record for option in options if (record := option.get_help_record(ctx))])


class Several(click.ParamType):  # type: ignore[type-arg]  # not generic before click 8.3
    """One or several values, separated by commas."""

    def __init__(self, of: Callable[[str], Any]) -> None:
        """of: makes a value of its text, or raises ValueError."""
        self.of, self.name = of, f"{click.types.convert_type(of).name},…"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = os.path.expanduser(value)
        parts = [path] if os.path.exists(path) else str(value).split(",")  # an existing name may have commas
        if not all(map(str.strip, parts)):
            self.fail(f"{value!r} has an empty part; leave out the comma", param, ctx)
        try:
            return [self.of(os.path.expanduser(part)) for part in parts]
        except ValueError:
            self.fail(f"{value!r} is neither a number nor several separated by commas, such as 1,16", param, ctx)


class _Given:
    """A parameter whose value is not empty, as that of an unset variable of the shell would be, and whose ~ is the
    home, also behind `=`, where a shell leaves it."""

    def type_cast_value(self: Any, context: click.Context, value: Any) -> Any:
        name = self.name.upper() if isinstance(self, click.Argument) else max(self.opts, key=len)
        words = [word for word in (value if isinstance(value, tuple | list) else [value]) if isinstance(word, str)]
        if not all(map(str.strip, words)):
            raise SettingError(f"{name} is empty; give a value" + ", or leave it out" * (not self.required))
        if isinstance(value, str):
            value = os.path.expanduser(value)
        return super().type_cast_value(context, value)  # type: ignore[misc]


class _Argument(_Given, click.Argument):
    pass


class _Option(_Given, click.Option):
    pass


def command_of(name: str, help: str = "") -> click.Command:
    """Return a command, or the group of the commands whose names begin with this one."""
    if not (verb := VERBS.get(name)):
        members = [command_of(member) for member in VERBS if member.startswith(f"{name} ")]
        return click.Group(name, members, help=help)
    declared = [*_declared(verb)]
    parameters = [_parameter(*parts) for parts in declared]
    if verb.as_json:
        text = JSON_IS_LAST_LINE if verb.json_is_last_line else JSON
        parameters.append(click.Option(["--json", "as_json"], is_flag=True, help=text))
    if verb.has_quiet:
        parameters.append(click.Option(["--quiet"], is_flag=True, help=QUIET))
    made = Command(name.split()[-1], callback=partial(_run, verb), params=parameters, help=help_of(verb.function))
    made.headings = {name: option.heading for name, _, _, option in declared} if verb.settings else {}
    return made


def help_of(function: Callable[..., Any]) -> str:
    """Return the help text of a verb: its docstring, in which an indented paragraph is code, up to
    the part on Python."""
    text = inspect.cleandoc(function.__doc__ or "").partition("\n\nIn Python")[0]
    # click keeps the line breaks of a paragraph that begins with \b
    paragraphs = (f"\b\n{inspect.cleandoc(part)}" if part.startswith("    ") else part for part in text.split("\n\n"))
    return "\n\n".join(paragraphs)


def _declared(verb: Verb) -> Iterator[Declared]:
    """Yield what a verb takes on the command line: positional parameters, settings, then keywords."""
    positional, keywords = list[Declared](), list[Declared]()
    parameters = inspect.signature(verb.function).parameters
    for name, parameter in parameters.items():
        is_positional = parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        declared = getattr(parameter.annotation, "__metadata__", [Option(heading="", is_argument=is_positional)])
        kept = positional if is_positional else keywords
        kept.append((name, parameter.annotation, parameter.default, declared[0]))
    for field in fields(verb.settings) if verb.settings else ():
        option = option_of(field)
        if verb.settings and field.name in verb.settings.inherited:
            option = replace(option, shown="that of the pruning run")
        if field.name not in parameters:
            positional.append((field.name, field.type, field.default, option))
    return (declared for declared in (*positional, *keywords) if declared[-1].heading or declared[-1].is_argument)


def _parameter(name: str, annotation: Any, default: Any, option: Option) -> click.Parameter:
    """Return the option or argument of a command. Its default is only shown, because the verb has
    it."""
    kind, is_required = kind_of(annotation), default is inspect.Parameter.empty
    part = kind_of(part_of(kind))
    of: Any = click.Choice(option.choices) if option.choices else option.of or part or kind
    of = click.Path(path_type=Path) if of is Path else of
    if option.is_argument:
        return _Argument([name], type=of, nargs=-1 if part else 1, required=is_required)
    flag = name.replace("_", "-")
    known: dict[str, Any] = {"help": first_sentence(option.help).replace("`", "")}
    if kind is bool:
        names = [f"--no-{flag}" if default else f"--{flag}", name]
        return _Option(names, is_flag=True, flag_value=not default, default=default, **known)
    if part or option.join:
        join = option.join or tuple
        values = default if part else [default]
        default = None if is_required or not default else [",".join(map(str, values))]
        known |= {"multiple": True, "callback": lambda _context, _option, lists: join([*itertools.chain(*lists)])}
        of = Several(option.of or part or kind)
    is_none = default in ("", MISSING, inspect.Parameter.empty) or (type(default) is float and not default)
    if option.shown or is_none:
        default = None
    known |= {"type": of, "metavar": option.metavar, "required": is_required}
    known |= {} if is_required else {"default": default}  # a default of None would be a value
    names = [*filter(None, [option.spelling]), f"--{flag}", name]
    return _Option(names, show_default=option.shown or True, **known)


def _run(verb: Verb, **values: Any) -> None:
    """Run a verb with the values that were passed, and print what it returned. The first of several
    processes prints for all."""
    context, is_main = click.get_current_context(), os.environ.get("RANK", "0") == "0"
    source, stdout = context.get_parameter_source, sys.stdout
    as_json, quiet = values.get("as_json", False), values.get("quiet", False) or not is_main
    passed = {name: value for name, value in values.items() if source(name) is ParameterSource.COMMANDLINE}
    passed = {name: value for name, value in passed.items() if name not in ("as_json", "quiet")}
    if "verbose" in inspect.signature(verb.function).parameters:
        passed["verbose"] = not quiet
    try:
        with redirect_stdout(sys.stderr if as_json and not verb.json_is_last_line else stdout):
            result = verb.function(**passed)
            try:
                with redirect_stdout(io.StringIO() if quiet else sys.stdout):
                    verb.show(result, values)
            finally:  # it raises the error of a limit that the model misses
                if verb.as_json and as_json and is_main:
                    line = verb.as_json(result, values)
                    print(line if isinstance(line, str) else json.dumps(line), file=stdout, flush=True)
                    if STDOUT in LOST:
                        raise OutputError("the results were not printed; stdout is full or closed")
    except SettingError as error:
        options = {option.name or "": max(option.opts, key=len) for option in context.command.params}
        error.args = (error.spelled(options),)
        raise
