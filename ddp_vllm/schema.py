"""Checks of values from files: kinds, bounds and lengths. Each file is checked once, before it is
used.

A form is one of
    bool, ANY             a truth value; any value
    Number, Text          a number or a text within bounds
    None                  null
    (form, form, …)       a value of one of these forms; an error message names the last form
    [form], [form, 99]    a list of values of this form; with at most 99 entries
    {"a": form, "b?": form}   an object with the key a and optionally b; other keys are not checked
    {str: form}           an object with any keys
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ddp_vllm.remote_code.files import short

ANY = object()
MOST = 1_000_000  # entries of a list
Form = Any


class SchemaError(ValueError):
    """A value from a file is invalid; the message names its place."""


@dataclass(frozen=True)
class Number:
    """A number within bounds."""

    low: float = -1e18
    high: float = 1e18
    whole: bool = False

    def takes(self, value: Any) -> bool:
        kinds = (int,) if self.whole else (int, float)
        return type(value) in kinds and self.low <= value <= self.high  # False for NaN

    def __str__(self) -> str:
        return f"{'whole ' * self.whole}number in {self.low:g}…{self.high:g}"


@dataclass(frozen=True)
class Text:
    """A text with at most this many characters."""

    longest: int = 1_000_000

    def takes(self, value: Any) -> bool:
        return isinstance(value, str) and len(value) <= self.longest

    def __str__(self) -> str:
        return f"text of at most {self.longest:,} characters"


NUMBER, POSITIVE, COUNT, TEXT = Number(), Number(1e-18, 1e18), Number(0, 2**53, whole=True), Text()
NAME = Text(4096)


def check(value: Any, form: Form, place: str) -> None:
    """Check a value. Raises: SchemaError, naming the place inside `place`, the value there, and its
    form."""
    if reason := _fault(value, form, place):
        raise SchemaError(reason)


def _fault(value: Any, form: Form, place: str) -> str:
    """Return the fault of a value; "" if it has none."""
    if isinstance(form, tuple):
        faults = [_fault(value, option, place) for option in form]
        return "" if "" in faults else faults[-1]
    if isinstance(form, list) and isinstance(value, list):
        if len(value) > (most := form[1] if len(form) > 1 else MOST):
            return f"{place} has {len(value):,} entries, more than {most:,}"
        return next(filter(None, (_fault(entry, form[0], f"{place}[{i}]") for i, entry in enumerate(value))), "")
    if isinstance(form, dict) and isinstance(value, dict):
        return _fault_inside(value, form, place)
    fits = form is ANY or (form is None and value is None) or (form is bool and type(value) is bool)
    if fits or (isinstance(form, Number | Text) and form.takes(value)):
        return ""
    kinds = {dict: "object", list: "list", type: "truth value", type(None): "null"}
    return f"{place} is {short(value)}, no {kinds.get(type(form), form)}"


def _fault_inside(value: Mapping[str, Any], form: Mapping[Any, Form], place: str) -> str:
    if str in form:
        names = [name for name in value if not NAME.takes(name)]
        inside = (_fault(inside, form[str], f"{place}.{name}") for name, inside in value.items())
        return f"{place} has the name {short(names[0])}" if names else next(filter(None, inside), "")
    for key, inner in form.items():
        name = key.removesuffix("?")
        if name not in value:
            if name == key:
                return f"{place} lacks {name}"
        elif fault := _fault(value[name], inner, f"{place}.{name}"):
            return fault
    return ""
