"""What a user sets, stated once: a field of a settings dataclass or a parameter of a verb, with its
help text and limits in an `Option`.

A verb is a function that is also a command (`command`); the front end (command.py) makes the command
from its signature and settings. Nothing here imports click.
"""

import dataclasses
import difflib
import functools
import inspect
import math
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, TypeVar, get_args, get_origin

from ddp_vllm.errors import SettingError, is_utf8

Function = TypeVar("Function", bound=Callable[..., Any])
HEADINGS = ("Basic", "Budget", "Shape", "Text", "Run", "Rarely needed")
"""The headings under which help texts and pages list settings, in order."""
Values = Mapping[str, Any]
"""All parameters of a command, by name."""
DTYPES = ("auto", "float32", "bfloat16", "float16")
USUAL = "Run"  # heading of a setting that has none


@dataclass(frozen=True)
class Option:
    """What is known of a setting besides its name, type and default."""

    help: str = ""
    """Help texts show its first sentence."""
    spelling: str = ""
    """A second name of the option, such as `-o`."""
    metavar: str | None = None
    """How help texts name the value; None: by its type."""
    shown: str = ""
    """How help texts describe a default that is computed."""
    heading: str = USUAL
    """Where help texts list the option; "": the command line has no option for this setting."""
    least: float | None = None
    choices: tuple[str, ...] = ()
    is_fraction: bool = False
    """The value is at least 0 and below 1."""
    may_be_infinite: bool = False
    of: Callable[[str], Any] | None = None
    """Makes one of several values of its text, or raises ValueError; None: by the type."""
    join: Callable[[Any], Any] | None = None
    """The option takes several values, with commas between them or repeated; this makes one value
    of them."""
    is_argument: bool = False
    """The value is a word of the command instead of an option, or all its last words."""


def setting(default: Any = MISSING, help: str = "", spelling: str = "", **known: Any) -> Any:
    """Return a field with an `Option`, whose other fields are `known`."""
    return dataclasses.field(default=default, metadata={"option": Option(help, spelling, **known)})


def option_of(field: "dataclasses.Field[Any]") -> Option:
    return field.metadata.get("option", Option(heading=""))


def kind_of(annotation: Any) -> Any:
    """Return the type of a setting, the first of several that a function takes."""
    return kinds_of(annotation)[0]


def kinds_of(annotation: Any) -> list[Any]:
    """Return the types of an annotation, which may be a union of several."""
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    return [*get_args(annotation)] if isinstance(annotation, UnionType) else [annotation]


def part_of(kind: Any) -> Any:
    """Return the type of the parts of a tuple; None for other types."""
    return get_args(kind)[0] if get_origin(kind) in (tuple, Iterable, Sequence) else None


def fraction(text: str) -> float:
    """Read a number; 20% is 0.2."""
    return float(text.rstrip("%")) / (100.0 if "%" in text else 1.0)


def one_or_several(parts: Sequence[Any]) -> Any:
    return parts[0] if len(parts) == 1 else parts


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Base of a dataclass of settings, whose values are checked one by one: type, choices,
    limits."""

    inherited: ClassVar[tuple[str, ...]] = ()
    """Settings whose default comes from the pruning run."""

    def __post_init__(self) -> None:
        """Check every value. Raises: SettingError."""
        for field in dataclasses.fields(self):
            value = _as_declared(field.name, field.type, option_of(field), getattr(self, field.name))
            texts = [text for text in (value if isinstance(value, tuple) else (value,)) if isinstance(text, str)]
            if not all(map(is_utf8, texts)):
                raise SettingError(field.name, f"is {value!r}, which is not UTF-8; rename the file or folder")
            object.__setattr__(self, field.name, value)

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as plain data, without those that are None, because TOML has no
        null."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}


def _as_declared(name: str, annotation: Any, option: Option, value: Any) -> Any:
    """Return a value in the first type of its annotation that holds it without loss: one for a tuple
    of one, a path for its text, an integer for a float.

    name, option: of the setting or argument. Raises: SettingError for a value of another type, or
    outside of the limits of the option.
    """
    kinds = kinds_of(annotation)
    singles = tuple(kind for kind in kinds if not part_of(kind))
    parts = [part for kind in kinds if (part := part_of(kind))]
    if float in singles and type(value) is int and value.bit_length() <= 1000:  # a larger one overflows
        value = float(value)  # TOML writes 0 for 0.0
    if isinstance(value, str | Path) and not isinstance(value, singles):
        value = next((kind(value) for kind in singles if kind in (str, Path)), value)
    if isinstance(value, singles) and (type(value) is not bool or bool in singles):
        _check_limits(name, option, value)
        return value
    if parts:
        several = value if isinstance(value, Iterable) and not isinstance(value, str | Mapping) else (value,)
        return tuple(_as_declared(name, parts[0], option, member) for member in several)
    known = dict.fromkeys(kind.__name__ for kind in singles if kind is not NoneType)
    raise SettingError(name, f"is {value!r}, a {type(value).__name__}; it must be a {' or '.join(known)}")


def _check_limits(name: str, option: Option, value: Any) -> None:
    """Refuse a value outside of the limits of its setting. Raises: SettingError."""
    if value is None:
        return
    if option.choices and value not in option.choices:
        raise SettingError(name, f"is {value!r}; it must be one of {', '.join(option.choices)}")
    if isinstance(value, float) and (math.isnan(value) or not (option.may_be_infinite or math.isfinite(value))):
        raise SettingError(name, f"is {value}; it must be a finite number")
    if option.is_fraction and not 0.0 <= value < 1.0:
        raise SettingError(name, f"is {value}; it must be at least 0 and below 1")
    if option.least is not None and value < option.least:
        raise SettingError(name, f"is {value}; it must be at least {option.least}")


def typed(settings: type[Settings] | None = None) -> Callable[[Function], Function]:
    """Return a decorator that gives a verb its arguments in the first type of their annotations that
    they have, one for several in a tuple, and within the limits of their `Option`.

    settings: the fields of `**settings`. Raises: SettingError, in the verb, also for an unknown one.
    """

    def add(function: Function) -> Function:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def checked(*words: Any, **values: Any) -> Any:
            if settings:
                fields = {name: value for name, value in values.items() if name not in signature.parameters}
                check_known(f"{function.__name__}()", fields, settings, signature.parameters)
            given = signature.bind(*words, **values)
            for name, value in given.arguments.items():
                parameter = signature.parameters[name]
                if parameter.kind is not parameter.VAR_KEYWORD:
                    option = getattr(parameter.annotation, "__metadata__", (Option(),))[0]
                    given.arguments[name] = _as_declared(name, parameter.annotation, option, value)
            return function(*given.args, **given.kwargs)

        return checked  # type: ignore[return-value]

    return add


@dataclass(frozen=True, kw_only=True)
class Verb:
    """A function as a command."""

    function: Callable[..., Any]
    settings: type[Settings] | None = None
    """The fields of its last parameter, `**settings`."""
    show: Callable[[Any, Values], None]
    """Prints what the function returned, given all values; it may raise a `LimitError`."""
    as_json: Callable[[Any, Values], Any] | None = None
    """Returns what the option --json prints, plain data or a line, of the same arguments."""
    json_is_last_line: bool = False
    """With --json, other lines go to stdout too, instead of stderr."""
    has_quiet: bool = False
    """The command has the option --quiet."""


VERBS: dict[str, Verb] = {}
"""The verbs whose modules were imported, by command."""


def command(name: str, **known: Any) -> Callable[[Function], Function]:
    """Return a decorator that makes a function a command; `known` are fields of its `Verb`.

    A parameter annotated with an `Option` is an option of the command, and so is a field of its
    settings. Another positional parameter is an argument. `verbose` is set unless --quiet is passed.
    The docstring is the help text, up to a paragraph that begins with "In Python".
    """

    def add(function: Function) -> Function:
        function = typed(known.get("settings"))(function)
        VERBS[name] = Verb(function=function, **known)
        return function

    return add


def documents(settings: type[Settings]) -> Callable[[Function], Function]:
    """Return a decorator that adds the fields of a dataclass to a function's docstring, for
    `help`."""

    def add(function: Function) -> Function:
        lines = [f"{inspect.cleandoc(function.__doc__ or '')}\n\nSettings:"]
        for field in dataclasses.fields(settings):
            kind = getattr(field.type, "__name__", str(field.type))
            default = "" if field.default in ("", MISSING) else f" = {field.default!r}"
            lines.append(f"    {field.name}: {kind}{default}\n        {first_sentence(option_of(field).help)}")
        function.__doc__ = "\n".join(lines)
        return function

    return add


def first_sentence(help: str) -> str:
    """Return the first sentence of a help text, on one line."""
    return re.split(r"(?<!Eq)\. ", " ".join(help.split()))[0].removesuffix(".") + "."


def read_settings(
    base: Path | Mapping[str, Any] | None,
    given: Mapping[str, Any],
    kind: type,
    alternatives: tuple[tuple[str, ...], ...] = (),
) -> dict[str, Any]:
    """Return the settings of a TOML file or a mapping, overridden by those that are given, for a
    dataclass `kind`.

    given: None means not given; a path becomes text.
    alternatives: groups of names that replace each other: a given one drops the others of the base.
    Raises: SettingError for an unreadable file, an unknown name, or two alternatives at one level.
    """
    values = dict(base) if isinstance(base, Mapping) else {}
    if isinstance(base, Path):
        try:
            values = tomllib.loads(base.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:  # of TOML, of UTF-8, of numbers without end, of nesting
            raise SettingError(
                f"the recipe {base} cannot be read ({error}); it must be TOML, one setting per line"
            ) from error
    values = {name: plain(value) for name, value in values.items()}
    given = {name: plain(value) for name, value in given.items() if value is not None}
    tables = {field.name for field in dataclasses.fields(kind) if isinstance(field.default, Settings)}
    if wrong := [name for name, value in values.items() if isinstance(value, Mapping) and name not in tables]:
        raise SettingError(f"{base} has a table [{wrong[0]}], but settings stand outside of tables; delete that line")
    for names in alternatives:
        for level in (values, given):
            if len(stated := [name for name in names if level.get(name) not in (None, 0)]) > 1:
                raise SettingError(*stated, "are given; give one of them")
        if any(given.get(name) not in (None, 0) for name in names):
            values = {name: value for name, value in values.items() if name not in names}
    values |= given
    check_known(str(base) if isinstance(base, Path) else "the recipe", values, kind)
    return values


def plain(value: Any) -> Any:
    """Return a setting as recipes hold it: a path as text, a list of paths or texts as one text with
    commas, and numbers of numpy, also in lists, as those of Python."""
    if isinstance(value, list | tuple):
        parts = [plain(part) for part in value]
        return ",".join(parts) if parts and all(isinstance(part, str) for part in parts) else parts
    if isinstance(value, Path):
        return str(value)
    return value.tolist() if hasattr(value, "tolist") else value


def check_known(where: str, values: Mapping[str, Any], kind: type, others: Iterable[str] = ()) -> None:
    """Refuse names that are neither fields of a dataclass nor `others`. Raises: SettingError."""
    known = {field.name for field in dataclasses.fields(kind)}.union(others) - {"settings"}
    if unknown := set(values) - known:
        near = difflib.get_close_matches(str(min(unknown)), known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(sorted(known))}"
        raise SettingError(f"{where} sets {min(unknown)!r}, which is unknown; {hint}")
