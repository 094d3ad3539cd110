"""The verb study as a function of `ddp_vllm`. It imports torch when it is called."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ddp_vllm.errors import SettingError, line_printer

STUDY_FIELDS = ("methods", "other_data", "samples", "polish", "detokenize", "test_length")
"""The settings that are fields of a `Study`; all others are fields of a `Recipe`."""


def study(
    table: str,
    model: str | Path,
    *,
    output: str | Path,
    test: str | Path,
    sparsity: float | Sequence[float] = (0.2, 0.5),
    seeds: str | Sequence[int] = (0,),
    recipe: str | Path | None = None,
    verbose: bool = False,
    **settings: Any,
) -> Path:
    """Reproduce a table of the paper for a model, row by row at the same exact budget; return the
    path of the page.

    table: methods, relaxations, groups, recovery, data, cost, tokens or shapes. output: a folder; a
    study that was interrupted there resumes, and rows that are new are added. test: the text file
    to evaluate on. seeds: each gives the text another order. recipe: a TOML file with settings.
    settings: any field of a `Study` (`methods`, `other_data`, `samples`, `polish`, `detokenize`,
        `test_length`) or of a `Recipe` (`data`, `steps`, …).
    """
    from ddp_prune.recipe import load_recipe
    from ddp_study.cells import run_study
    from ddp_study.page import write_study
    from ddp_study.study import Study

    sizes = tuple(sparsity) if isinstance(sparsity, Sequence) else (sparsity,)
    try:
        orders = tuple(map(int, seeds.split(","))) if isinstance(seeds, str) else tuple(seeds)
    except ValueError:
        raise SettingError(f"seeds is {seeds!r}; give numbers separated by commas, such as 0,1,2") from None
    chosen = {name: settings.pop(name) for name in STUDY_FIELDS if name in settings}
    if "other_data" in chosen:
        chosen["other_data"] = tuple(map(str, chosen["other_data"]))
    file = Path(recipe) if recipe else None
    for size in sizes:
        base = load_recipe(file, {**settings, "model": model, "sparsity": size})
    request = Study(
        table=table, recipe=base, recipe_file=file, test=Path(test), sparsities=sizes, seeds=orders, **chosen
    )
    run_study(request, Path(output), line_printer(verbose))
    return write_study(Path(output), table)
