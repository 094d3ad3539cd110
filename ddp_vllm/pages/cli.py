"""The verbs inspect, report and compare. What draws and reads is imported when one of them runs, not before."""

import json
from pathlib import Path

import click

from ddp_vllm.cli import echo
from ddp_vllm.pages import verbs


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print widths, sizes, quality and recipe as JSON instead.")
def inspect(folder: Path, as_json: bool) -> None:
    """Check a pruned checkpoint and show what each layer has left."""
    if as_json:
        echo(json.dumps(verbs.inspect(folder)))
        return
    checkpoint = verbs.read(folder)
    from ddp_vllm.pages.terminal import SafeConsole, print_checkpoint

    print_checkpoint(checkpoint, SafeConsole(soft_wrap=True))


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
def verify(folder: Path) -> None:
    """Compare every file of a pruned checkpoint with the SHA-256 that was written beside it.

    Nothing may be missing, changed or added but the results of `eval` and `bench`. Then the checkpoint is checked as
    by `inspect`.
    """
    echo(f"{folder}: {len(verbs.verify(folder))} files are as they were written")


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), show_default="FOLDER itself", help="Where to write.")
def report(folder: Path, output: Path | None) -> None:
    """Draw what was removed: report.html, and its pictures and numbers in report/.

    `prune` does this by itself; FOLDER is any pruned checkpoint.
    """
    echo(f"written: {verbs.report(folder, output=output)}")


@click.command()
@click.argument("folders", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--output", "-o", type=click.Path(path_type=Path), default="compare.html", show_default=True)
@click.option(
    "--results",
    multiple=True,
    type=click.Path(path_type=Path),
    help="A file of results outside the folders, or a folder that eval -o wrote; repeatable.",
)
@click.option("--dense", metavar="MODEL", show_default="the one of the recipe", help="The dense model.")
@click.option("--tolerance", type=float, help="Say which model to take if perplexity may be so many times the dense.")
@click.option("--overwrite", is_flag=True, help="Replace the page.")
def compare(
    folders: tuple[Path, ...],
    output: Path,
    results: tuple[Path, ...],
    dense: str | None,
    tolerance: float | None,
    overwrite: bool,
) -> None:
    """Put quality and speed of the pruned checkpoints in FOLDERS on one page, in HTML and Markdown.

    \b
    ddp-vllm compare ./pruned-20 ./pruned-50 -o page.html

    Results of bench and eval are found in each folder and its eval folder, or passed with --results.
    """
    comparison = verbs.compare(
        folders, output=output, results=results, dense=dense, tolerance=tolerance, overwrite=overwrite
    )
    if tolerance is not None:
        from ddp_vllm.pages.compare import choice

        echo(f"within {tolerance:g} times: {choice(comparison, tolerance)}")
    for note, command in comparison.notes.items():
        echo(f"{note}: {command}" if command else note, err=True)
    echo(f"{output} and {output.with_suffix('.md')}")
