"""Names of models and texts as users pass them: paths, names on the hub, and lists of both."""

import os
import re
from collections.abc import Callable


def identity_of(source: str) -> str:
    """Return what two names of one text share: the real path of a file, or a hub dataset with its
    split."""
    if os.path.exists(source):
        return os.path.realpath(source)
    name, configuration, split = [*source.split(":", 2), "", ""][:3]
    return f"{name}:{configuration}:{split or 'train'}"


def split_sources(data: str) -> list[tuple[str, int]]:
    """Return each name in a comma-separated list of texts with its number of turns: 3 for `NAME:3`,
    1 for `NAME`.

    The name of an existing file may itself contain commas and colons.
    """
    names = [data] if os.path.exists(data) else [name.strip() for name in data.split(",")]
    sources = []
    for name in names:
        plain, _, turns = name.rpartition(":")
        has_turns = plain and re.fullmatch("[1-9][0-9]?", turns) and not os.path.exists(name)
        sources.append((plain, int(turns)) if has_turns else (name, 1))
    return sources


def is_hub_name(name: str) -> bool:
    """Tell whether this is a name on the hub, OWNER/NAME, and not a path."""
    return name.count("/") == 1 and not name.startswith((".", "/", "~")) and not os.path.exists(name)


def bare_name(name: str) -> str:
    """Return names as given, separated by commas, but paths without their folders."""
    return _renamed(
        name, lambda plain: plain if not plain or is_hub_name(plain) else os.path.basename(os.path.abspath(plain))
    )


def absolute_name(name: str) -> str:
    """Return names as given, separated by commas, but with the absolute paths of what is here, unless a folder's name
    with a comma would then divide one of several."""
    renamed = _renamed(name, lambda plain: os.path.abspath(plain) if os.path.exists(plain) else plain)
    return renamed if len(split_sources(renamed)) == len(split_sources(name)) else name


def _renamed(name: str, rename: Callable[[str], str]) -> str:
    """Return each of the names that `split_sources` returns as `rename` states it."""
    return ",".join(rename(plain) + (f":{turns}" if turns > 1 else "") for plain, turns in split_sources(name))
