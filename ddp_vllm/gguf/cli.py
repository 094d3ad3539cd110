"""The command export."""

from pathlib import Path

import click

from ddp_vllm.cli import echo
from ddp_vllm.gguf import export as verb


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="The file to write.")
@click.option(
    "--outtype",
    default="f16",
    show_default=True,
    help="f32, f16, bf16 or q8_0.",
)
@click.option("--overwrite", is_flag=True, help="Replace the file.")
def export(folder: Path, output: Path, outtype: str, overwrite: bool) -> None:
    """Write the pruned or dense model in FOLDER as one GGUF file that stock llama.cpp runs.

    \b
    ddp-vllm export ./pruned --outtype q8_0 -o pruned.gguf
    llama-server -m pruned.gguf
    """
    verb.export(folder, output=output, outtype=outtype, overwrite=overwrite, verbose=True)
    echo(f"written: {output} ({output.stat().st_size / 1e6:,.0f} MB)")
