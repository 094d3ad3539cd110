"""Reads recipes from TOML files, the command line and checkpoints; and the recipes of several sizes."""

import dataclasses
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddp_prune.recipe import AlmSettings, Recipe, RecoveryRecipe
from ddp_prune.run import schedule
from ddp_vllm.errors import SettingError

INHERITED = ("data", "text_column", "batch_size", "seq_len", "seed", "heldout_blocks", "distillation", "dtype")
"""Settings that a recovery takes over from the run that learned the masks, unless they are passed."""


def load_recipes(path: Path | None, settings: Mapping[str, Any]) -> list[Recipe]:
    """Build the recipe of each size, smallest cut first, as `load_recipe` does; several sizes are one size family."""
    values = _read(path, settings, Recipe)
    name = "speedup" if values.get("speedup") else "sparsity"
    if not isinstance(sizes := values.get(name), list | tuple):
        return [load_recipe(path, settings)]
    rising = sorted({float(each) for each in sizes if type(each) in (int, float)})
    if len(rising) != len(sizes):
        raise SettingError(f"{name} is {sizes}; give numbers that differ, as 0.1,0.2,0.3")
    recipes = [load_recipe(path, {**settings, name: size}) for size in rising]
    schedule(recipes)  # before anything expensive
    return recipes


def load_recipe(path: Path | None, settings: Mapping[str, Any]) -> Recipe:
    """Build a recipe from a TOML file, overridden by settings of the command line (None means not given).

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
    if "model" not in values:
        raise SettingError("model is missing; give it on the command line or in the recipe")
    if not {"sparsity", "target", "speedup"} & values.keys():
        raise SettingError(
            "sparsity is missing; give it, or --speedup, or a target such as --target-params 5.5B, on the command line "
            "or in the recipe"
        )
    if isinstance(values.get("target"), str):
        values["target"] = parse_amount(values["target"])
    return Recipe(**values)


def load_recovery(path: Path | None, settings: Mapping[str, Any], pruned_by: Mapping[str, Any]) -> RecoveryRecipe:
    """Build the recipe of a recovery as `load_recipe` does; settings that are not given are inherited.

    pruned_by: the recipe that learned the masks, as the checkpoint has it; {} if that is unknown.
    """
    inherited = {name: pruned_by[name] for name in INHERITED if name in pruned_by}
    values = inherited | _read(path, settings, RecoveryRecipe)
    if "teacher" not in values and "model" in pruned_by:
        values["teacher"] = known = pruned_by["model"]
        if "/" not in known and not Path(known).exists():  # a folder of another machine
            raise SettingError(f"the dense model was {known}, which is no folder here; pass its place as --teacher")
    if missing := {"model", "teacher"} - set(values):
        raise SettingError(f"{min(missing)} is missing; give it on the command line or in the recipe")
    return RecoveryRecipe(**values)


def _read(path: Path | None, settings: Mapping[str, Any], kind: type) -> dict[str, Any]:
    """Return the settings of a TOML file and the command line, for a recipe of this kind. Raises: SettingError."""
    values: dict[str, Any] = {}
    if path is not None:
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:  # of TOML, of UTF-8, of numbers without end, of nesting
            raise SettingError(
                f"the recipe {path} cannot be read ({error}); it must be TOML, one setting per line"
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
