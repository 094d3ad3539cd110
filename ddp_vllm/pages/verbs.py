"""The verbs inspect, report and compare as functions. Libraries that draw are imported when they are called."""

from collections.abc import Iterable
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp_vllm.errors import SettingError
from ddp_vllm.folder import read
from ddp_vllm.output import check_file

if TYPE_CHECKING:
    from ddp_vllm.pages.measurements import Comparison


def inspect(folder: str | Path) -> dict[str, Any]:
    """Return widths, sizes, quality and recipe of a pruned checkpoint, as `ddp-vllm inspect --json` prints them."""
    from ddp_vllm.pages.summary import summary

    return summary(read(folder))


def report(folder: str | Path, *, output: str | Path | None = None) -> Path:
    """Draw the removed units of a pruned checkpoint, and return the path of `report.html`.

    output: another folder for the page.
    """
    from ddp_vllm.pages.report import write_report

    return write_report(read(folder), Path(output or folder))


def compare(
    folders: Iterable[str | Path],
    *,
    output: str | Path = "compare.html",
    results: Iterable[str | Path] = (),
    dense: str | Path | None = None,
    tolerance: float | None = None,
    overwrite: bool = False,
) -> "Comparison":
    """Put quality and speed of pruned checkpoints on one page, in HTML and in a Markdown file next to it.

    results: files of `bench` and `evaluate` outside the folders, or folders of them. dense: the dense model, by default
    that of the recipe. tolerance: name the fastest model whose perplexity is at most this many times the dense model's.
    Returns the `Comparison`.
    """
    if tolerance is not None and not 0 < tolerance < inf:
        raise SettingError(f"--tolerance {tolerance:g} is not a factor; give a number above 0, such as 1.05")
    page = Path(output)
    markdown = page.with_suffix(".md")
    if markdown == page:
        raise SettingError(f"{page} is the name of the Markdown file; call the page {page.with_suffix('.html')}")
    for path in (page, markdown):
        check_file(path, overwrite=overwrite)
    from ddp_vllm.pages.compare import write_comparison
    from ddp_vllm.pages.measurements import collect

    comparison = collect([*map(Path, folders)], results=[*map(Path, results)], dense=str(dense) if dense else None)
    write_comparison(comparison, page, markdown, tolerance)
    return comparison
