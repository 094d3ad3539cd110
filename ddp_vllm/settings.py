"""Settings as frozen dataclasses: each value is checked once, and options and pages are made from
the fields."""

import ast
import dataclasses
import difflib
import inspect
import itertools
import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar

from ddp_vllm.errors import SettingError, is_utf8

SETTINGS_HEADING = "Settings:"
Verb = TypeVar("Verb", bound=Callable[..., Any])


HEADINGS = ("Basic", "Budget", "Shape", "Text", "Run", "Rarely needed")
USUAL = "Run"  # heading of a setting that has none
"""The headings under which help texts and pages list settings, in order."""


def setting(
    default: Any,
    *,
    least: float | None = None,
    choices: tuple[str, ...] = (),
    is_fraction: bool = False,
    is_several: bool = False,
    is_list: bool = False,
    heading: str = USUAL,
) -> Any:
    """Return a field with everything that is known of a setting.

    least, choices, is_fraction: limits of its value, the last from 0 to below 1.
    is_several: a command takes several numbers. is_list: the value is text with commas.
    """
    metadata = {
        "least": least, "choices": choices, "is_fraction": is_fraction, "is_several": is_several,
        "is_list": is_list, "heading": heading,
    }  # fmt: skip
    return dataclasses.field(default=default, metadata=metadata)


def kind_of(field: dataclasses.Field[Any]) -> type:
    """Return the type of a setting, without the None of an optional one."""
    kind = field.type.__args__[0] if isinstance(field.type, UnionType) else field.type
    assert isinstance(kind, type)
    return kind


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Base of a dataclass of settings, whose values are checked one by one: type, choices,
    limits."""

    def __post_init__(self) -> None:
        """Check every value. Raises: SettingError."""
        for field in dataclasses.fields(self):
            value: Any = getattr(self, field.name)
            kind = kind_of(field)
            # larger integers overflow a float
            if kind is float and type(value) is int and value.bit_length() <= 1000:
                value = float(value)  # TOML writes 0 for 0.0
                object.__setattr__(self, field.name, value)
            if value is not None or not isinstance(field.type, UnionType):
                _check(field, kind, value)

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as plain data, without those that are None, because TOML has no
        null."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}


def _check(field: dataclasses.Field[Any], kind: type, value: Any) -> None:
    """Refuse a value of another type or outside of the limits of its field.
    Raises: SettingError."""
    name, limits = field.name, field.metadata
    if (given := type(value)) is not kind:
        raise SettingError(f"{name} is {value!r}, a {given.__name__}; it must be a {kind.__name__}")
    if isinstance(value, str) and not is_utf8(value):
        raise SettingError(f"{name} is {value!r}, which is not UTF-8; rename the file or folder")
    if (choices := limits.get("choices")) and value not in choices:
        raise SettingError(f"{name} is {value!r}; it must be one of {', '.join(choices)}")
    if isinstance(value, float) and not math.isfinite(value):
        raise SettingError(f"{name} is {value}; it must be a finite number")
    if limits.get("is_fraction") and not 0.0 <= value < 1.0:
        raise SettingError(f"{name} is {value}; it must be at least 0 and below 1")
    if (least := limits.get("least")) is not None and value < least:
        raise SettingError(f"{name} is {value}; it must be at least {least}")


def field_docs(settings: type) -> dict[str, str]:
    """Return the docstring under each field of a dataclass and its bases, on one line; {} without
    source files."""
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


def documents(settings: type) -> Callable[[Verb], Verb]:
    """Return a decorator that adds the fields of a dataclass to a function's docstring, for
    `help`."""

    def add(function: Verb) -> Verb:
        docs = field_docs(settings)
        lines = [SETTINGS_HEADING]
        for field in dataclasses.fields(settings):
            kind = getattr(field.type, "__name__", str(field.type))
            default = "" if field.default in ("", dataclasses.MISSING) else f" = {field.default!r}"
            lines.append(f"    {field.name}: {kind}{default}\n        {docs.get(field.name, '').partition('. ')[0]}")
        function.__doc__ = f"{inspect.cleandoc(function.__doc__ or '')}\n\n" + "\n".join(lines)
        return function

    return add


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
    given = plain({name: value for name, value in given.items() if value is not None})
    for names in alternatives:
        for level in (values, given):
            if len(stated := [name for name in names if level.get(name) not in (None, 0)]) > 1:
                raise SettingError(f"{' and '.join(stated)} are given; give one of them")
        if any(given.get(name) not in (None, 0) for name in names):
            values = {name: value for name, value in values.items() if name not in names}
    values |= given
    check_known(str(base) if isinstance(base, Path) else "the recipe", values, kind)
    return values


def plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as recipes hold them: paths as text, lists of paths or texts as one text with
    commas, and numbers of numpy as those of Python."""
    values = {name: _of_python(value) for name, value in settings.items()}
    for name, value in values.items():
        if isinstance(value, Path):
            values[name] = str(value)
        elif isinstance(value, list | tuple) and value and all(isinstance(part, str | Path) for part in value):
            values[name] = ",".join(map(str, value))
    return values


def _of_python(value: Any) -> Any:
    """Return numbers and arrays of numpy, and lists of them, as numbers and lists of Python; others
    as they are."""
    if isinstance(value, list | tuple):
        return [_of_python(part) for part in value]
    return value.tolist() if hasattr(value, "tolist") else value


def check_known(where: str, values: Mapping[str, Any], kind: type) -> None:
    """Refuse names that are not fields of a dataclass. Raises: SettingError."""
    known = {field.name for field in dataclasses.fields(kind)}
    if unknown := set(values) - known:
        near = difflib.get_close_matches(str(min(unknown)), known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(sorted(known))}"
        raise SettingError(f"{where} sets {min(unknown)!r}, which is unknown; {hint}")
