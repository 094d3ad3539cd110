"""Recipes from TOML files, the command line and checkpoints; and the recipes of a family of sizes."""

import dataclasses
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ddp_prune.recipe import AlmSettings, Recipe, RecoveryRecipe
from ddp_vllm.errors import SettingError

FAMILY_STEPS = 1.3  # of all sizes together, × those of the largest cut alone; sizes share what the search leaves
INHERITED = ("data", "text_column", "batch_size", "seq_len", "seed", "heldout_blocks", "distillation", "dtype")
"""Settings that a recovery takes over from the run that learned the masks, where none are given."""


def load_recipes(path: Path | None, settings: Mapping[str, Any]) -> list[Recipe]:
    """Build the recipe of each size, smallest cut first, as `load_recipe` does; several sizes are one family."""
    values = _read(path, settings, Recipe)
    name = "speedup" if values.get("speedup") else "sparsity"
    if not isinstance(values.get(name), list | tuple):
        return [load_recipe(path, settings)]
    sizes = sorted({float(each) for each in values[name] if type(each) in (int, float)})
    if len(sizes) != len(values[name]):
        raise SettingError(f"{name} is {values[name]}; give numbers that differ, as 0.1,0.2,0.3")
    last = load_recipe(path, {**settings, name: sizes[-1]})
    return family(last, sizes) if len(sizes) > 1 else [last]


def family(last: Recipe, sizes: Sequence[float]) -> list[Recipe]:
    """Return the recipes of all sizes, rising, that one search passes on its way to `last`, the largest cut.

    The search has as many steps as that of `last` alone, shared out by what each size removes more than the one before.
    Every size polishes as long, so that all together cost FAMILY_STEPS of `last` alone.
    Raises: SettingError if a size is left without steps.
    """
    if last.controller != "gradual":
        raise SettingError(f"controller is {last.controller!r}, which passes no sizes on its way; give one size")
    left = FAMILY_STEPS * last.steps - last.search_steps
    polish = max(1, min(last.polish_steps, int(left / len(sizes))))
    recipes, before, done = [], 0.0, 0
    for size in sizes:
        removed, in_all = (1 - 1 / each if last.speedup else each for each in (size, sizes[-1]))
        end = round(last.search_steps * removed / in_all)
        if end <= done:
            raise SettingError(f"steps is {last.steps}, which leaves none for {last.size_name} {size:g}; give more")
        steps = {"steps": end + polish, "polish": polish / (end + polish), "after_steps": done}
        recipes.append(last.resized(size, in_family=True, after=before, **steps))
        before, done = size, end
    return recipes


def load_recipe(path: Path | None, settings: Mapping[str, Any]) -> Recipe:
    """Build a recipe from a TOML file, overridden by settings given on the command line (None means not given).

    Raises: SettingError for an unreadable file, an unknown key or a value out of range.
    """
    values = _read(path, settings, Recipe)
    where = str(path or "the recipe")
    if values.get("speedup"):
        values.setdefault("budget", "latency")
    if "alm" in values:
        if not isinstance(alm := values["alm"], Mapping):
            raise SettingError(f"alm is {alm!r}; it must be a table, [alm]")
        _check_known(f"[alm] of {where}", alm, AlmSettings)
        values["alm"] = AlmSettings(**alm)
        if values["alm"] != AlmSettings() and values.get("controller") != "alm":
            raise SettingError(f'the table [alm] of {where} is for controller = "alm"; set that, or leave it out')
    if (
        missing := {"model", "sparsity"}
        - set(values)
        - ({"sparsity"} if {"target", "speedup"} & set(values) else set())
    ):
        name = min(missing)
        instead = ", or --speedup, or a target such as --target-params 5.5B," if name == "sparsity" else ""
        raise SettingError(f"{name} is missing; give it{instead} on the command line or in the recipe")
    if isinstance(values.get("target"), str):
        values["target"] = parse_amount(values["target"])
    return Recipe(**values)


def load_recovery(path: Path | None, settings: Mapping[str, Any], masks: Mapping[str, Any]) -> RecoveryRecipe:
    """Build the recipe of a recovery as `load_recipe` does; what is not given is as in the recipe `masks`.

    masks: that with which the masks were learned, as its checkpoint has it; {} if that is unknown.
    """
    inherited = {name: masks[name] for name in INHERITED if name in masks}
    values = inherited | _read(path, settings, RecoveryRecipe)
    if "teacher" not in values and "model" in masks:
        values["teacher"] = known = masks["model"]
        if "/" not in known and not Path(known).exists():  # a folder of another machine
            raise SettingError(f"the dense model was {known}, which is no folder here; say where it is with --teacher")
    if missing := {"model", "teacher"} - set(values):
        raise SettingError(f"{min(missing)} is missing; give it on the command line or in the recipe")
    return RecoveryRecipe(**values)


def _read(path: Path | None, settings: Mapping[str, Any], kind: type) -> dict[str, Any]:
    """Return what a TOML file and the command line set of a recipe of this kind. Raises: SettingError."""
    values: dict[str, Any] = {}
    if path is not None:
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:  # of TOML, of UTF-8, of numbers without end, of nesting
            raise SettingError(
                f"the recipe {path} cannot be read ({error}); it must be TOML, one setting a line"
            ) from error
    values |= {name: value for name, value in settings.items() if value is not None}
    _check_known(str(path or "the recipe"), values, kind)
    return values


def _check_known(where: str, values: Mapping[str, Any], settings: type) -> None:
    known = {field.name for field in dataclasses.fields(settings)}
    if unknown := set(values) - known:
        raise SettingError(f"{where} sets {min(unknown)!r}, which is unknown; known: {', '.join(sorted(known))}")


def parse_amount(text: str) -> float:
    """Read a number such as 5.5B, 120M, 8G or 1e9; suffixes are powers of 1,000. Raises: SettingError."""
    suffixes = {"K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}
    scale = suffixes.get(text[-1:].upper())
    try:
        return float(text if scale is None else text[:-1]) * (scale or 1.0)
    except ValueError:
        raise SettingError(f"target is {text!r}; it must be a number such as 5.5B, 120M or 1e9") from None
