"""The commands inspect, report, compare, push, convert and export. Libraries that draw are imported
when one of them runs."""

import json
from pathlib import Path
from typing import Any

import click

from ddp_vllm.cli import echo
from ddp_vllm.errors import LimitError
from ddp_vllm.options import default_option, json_option, list_option
from ddp_vllm.pages import verbs

PATH = click.Path(path_type=Path)


@click.command()
@click.argument("folder", type=PATH)
@click.option("--json", "as_json", is_flag=True, help="Print widths, sizes, quality and recipe as JSON instead.")
def inspect(folder: Path, as_json: bool) -> None:
    """Check a pruned checkpoint and show the kept units of each layer."""
    if as_json:
        echo(json.dumps(verbs.inspect(folder)))
        return
    checkpoint = verbs.read(folder)
    from ddp_vllm.pages.terminal import SafeConsole, print_checkpoint

    print_checkpoint(checkpoint, SafeConsole(soft_wrap=True))


@click.command()
@click.argument("folder", type=PATH)
@click.option("-o", "--output", type=PATH, show_default="FOLDER itself", help="Where to write.")
def report(folder: Path, output: Path | None) -> None:
    """Draw the removed units as one page, report.html.

    `prune` draws this page too. FOLDER is any pruned checkpoint.
    """
    echo(f"written: {verbs.report(folder, output=output)}")


@click.command()
@click.argument("folders", nargs=-1, required=True, type=PATH)
@default_option("--output", "-o", type=PATH, default="compare.html", help="The page.")
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
@click.argument("folder", type=PATH)
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


@click.command()
@click.argument("folder", type=PATH)
@click.option("-o", "--output", required=True, type=PATH, help="Folder to write.")
@click.option("--dense", metavar="MODEL", help="The model that was pruned, for its sizes: a folder, or a hub name.")
@click.option("--overwrite", is_flag=True, help="Replace the folder.")
def convert(folder: Path, output: Path, dense: str | None, overwrite: bool) -> None:
    """Write the model in FOLDER, which another tool pruned, as a folder that vLLM with ddp-vllm
    serves.

    \b
    ddp-vllm convert ./pruned-by-others -o ./pruned
    vllm serve ./pruned

    Widths are read from the tensors, and from per_layer_config, block_configs, drop_attn_list
    and drop_mlp_list where config.json has them. Tensors are copied, none is changed.
    """
    from ddp_vllm.conversion.verb import convert as convert_folder

    checkpoint = convert_folder(folder, output=output, dense=dense, overwrite=overwrite, verbose=True)
    echo(f"written: {output} ({checkpoint.num_parameters:,} parameters)")


@click.command()
@click.argument("folder", type=PATH)
@click.option("-o", "--output", required=True, type=PATH, help="The file to write.")
@default_option("--outtype", default="f16", help="f32, f16, bf16 or q8_0.")
@click.option("--overwrite", is_flag=True, help="Replace the file.")
def export(folder: Path, output: Path, outtype: str, overwrite: bool) -> None:
    """Write the pruned or dense model in FOLDER as one GGUF file that stock llama.cpp runs.

    \b
    ddp-vllm export ./pruned --outtype q8_0 -o pruned.gguf
    llama-server -m pruned.gguf
    """
    verbs.export(folder, output=output, outtype=outtype, overwrite=overwrite, verbose=True)
    echo(f"written: {output} ({output.stat().st_size / 1e6:,.0f} MB)")
