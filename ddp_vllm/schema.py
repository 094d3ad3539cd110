"""Checks values from files against types, once, before they are used: what msgspec does, with an
error that names the file's own place."""

from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

Kind = TypeVar("Kind")
Count = Annotated[int, Meta(ge=0, le=2**53)]
Finite = Annotated[float, Meta(ge=-1e18, le=1e18)]
Positive = Annotated[float, Meta(ge=1e-18, le=1e18)]
AtLeastOne = Annotated[int, Meta(ge=1)]
AboveZero = Annotated[float, Meta(gt=0)]
AtLeastZero = Annotated[float, Meta(ge=0)]
"""May be infinite, but is a number."""
Share = Annotated[float, Meta(ge=0, le=1)]


class SchemaError(ValueError):
    """A value from a file is invalid; the message names its place."""


def checked(value: Any, kind: type[Kind], place: str) -> Kind:
    """Return a value from a file as `kind`. Raises: SchemaError, naming the place inside `place` and
    what belongs there."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        fault, _, inside = str(error).partition(" - at `$")
        raise SchemaError(f"{place}{inside.rstrip('`')}: {fault[0].lower()}{fault[1:]}") from None
