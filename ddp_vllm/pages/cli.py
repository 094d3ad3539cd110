"""The commands inspect, report, compare and push. Libraries that draw are imported when one of them
runs."""

import json
from pathlib import Path
from typing import Any

import click

from ddp_vllm.cli import echo
from ddp_vllm.errors import LimitError
from ddp_vllm.folder import read
from ddp_vllm.options import json_option, list_option
from ddp_vllm.pages import verbs


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print widths, sizes, quality and recipe as JSON instead.")
def inspect(folder: Path, as_json: bool) -> None:
    """Check a pruned checkpoint and show the kept units of each layer."""
    if as_json:
        echo(json.dumps(verbs.inspect(folder)))
        return
    checkpoint = read(folder)
    from ddp_vllm.pages.terminal import SafeConsole, print_checkpoint

    print_checkpoint(checkpoint, SafeConsole(soft_wrap=True))


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), show_default="FOLDER itself", help="Where to write.")
def report(folder: Path, output: Path | None) -> None:
    """Draw the removed units as one page, report.html.

    `prune` draws this page too. FOLDER is any pruned checkpoint.
    """
    echo(f"written: {verbs.report(folder, output=output)}")


@click.command()
@click.argument("folders", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--output", "-o", type=click.Path(path_type=Path), default="compare.html", show_default=True, help="The page."
)
@list_option("--results", of=Path, help="Results files outside the folders, or folders that eval -o wrote.")
@click.option("--dense", metavar="MODEL", show_default="that of the recipe", help="The dense model.")
@click.option(
    "--tolerance",
    type=float,
    help="Name the fastest model whose perplexity is at most this many times the dense model's.",
)
@click.option("--overwrite", is_flag=True, help="Replace the page.")
@json_option
def compare(folders: tuple[Path, ...], output: Path, tolerance: float | None, as_json: bool, **options: Any) -> None:
    """Put quality and speed of the pruned checkpoints in FOLDERS into one table, here and on a
    page.

    The page is written in HTML and in Markdown.

    \b
    ddp-vllm compare ./pruned-20 ./pruned-50 -o page.html

    Results of bench and eval are found in each folder and its eval folder, or passed with
    --results. The exit code is 9 if no model is within --tolerance.
    """
    comparison = verbs.compare(folders, output=output, tolerance=tolerance, **options)
    from ddp_vllm.pages.compare import choice, comparison_table, fastest, records
    from ddp_vllm.pages.terminal import SafeConsole, print_table

    if as_json:
        echo(json.dumps(records(comparison, tolerance)))
    else:
        print_table(comparison_table(comparison), SafeConsole())
        if tolerance is not None:
            echo(f"within {tolerance:g} times: {choice(comparison, tolerance)}")
    for note, command in comparison.notes.items():
        echo(f"{note}: {command}" if command else note, err=True)
    echo(f"{output} and {output.with_suffix('.md')}", err=as_json)
    if tolerance is not None and not fastest(comparison, tolerance):
        remedy = "; train for longer with ddp-vllm recover, or remove less"
        evaluated = any(model.heldout for model in comparison.pruned)
        raise LimitError(choice(comparison, tolerance) + remedy * evaluated)


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("repository")
@click.option("--private", is_flag=True, help="Make a new repository private.")
@click.option("--revision", show_default="main", help="Branch to push to; a new one is made.")
@click.option("--license", "license_name", help="License of the dense model in the hub's spelling, e.g. apache-2.0.")
@click.option(
    "--base-model", show_default="the model it was pruned from, if on the hub", help="The dense model on the hub."
)
def push(folder: Path, repository: str, **options: Any) -> None:
    """Publish a pruned checkpoint on the Hugging Face hub, as OWNER/NAME.

    \b
    ddp-vllm push ./pruned me/llama-pruned --license apache-2.0

    The folder is checked first. Results of eval and bench are not sent, and the model card is
    written for the hub. Log in first with `hf auth login`, or set HF_TOKEN.
    """
    echo(f"published: {verbs.push(folder, repository, **options)}")
