"""The verb export. What writes a format is imported when it runs."""

from pathlib import Path

import click

from ddp_vllm import api
from ddp_vllm.cli import echo


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="The file to write.")
@click.option("--to", "form", type=click.Choice(["gguf"]), default="gguf", show_default=True, help="Which format.")
@click.option(
    "--type", "type_name", default="F16", show_default=True, help="F32, F16, BF16, Q8_0, Q5_1, Q5_0, Q4_1 or Q4_0."
)
@click.option("--overwrite", is_flag=True, help="Replace the file.")
def export(folder: Path, output: Path, form: str, type_name: str, overwrite: bool) -> None:
    """Write the pruned or dense model in FOLDER as one file that stock llama.cpp runs.

    \b
    ddp-vllm export ./pruned --type Q8_0 -o pruned.gguf
    llama-server -m pruned.gguf
    """
    api.export_gguf(folder, output=output, type_name=type_name, overwrite=overwrite, verbose=True)
    echo(f"written: {output} ({output.stat().st_size / 1e6:,.0f} MB)")
