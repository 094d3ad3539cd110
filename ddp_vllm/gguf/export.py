"""The verb export: a model as one GGUF file. The package gguf is imported when it runs."""

from pathlib import Path

import click

from ddp_vllm.cli import echo
from ddp_vllm.errors import line_printer


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="The file to write.")
@click.option("--to", "form", type=click.Choice(["gguf"]), default="gguf", show_default=True, help="File format.")
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
    export_gguf(folder, output=output, type_name=type_name, overwrite=overwrite, verbose=True)
    echo(f"written: {output} ({output.stat().st_size / 1e6:,.0f} MB)")


def export_gguf(
    folder: str | Path,
    *,
    output: str | Path,
    type_name: str = "F16",
    overwrite: bool = False,
    verbose: bool = False,
) -> Path:
    """Write a pruned or dense model as one GGUF file for stock llama.cpp, and return its path.

    type_name: F32, F16, BF16, Q8_0, Q5_1, Q5_0, Q4_1 or Q4_0. verbose: print which tensors were zero-padded.
    """
    from ddp_vllm.gguf.file import write_gguf

    for note in write_gguf(Path(folder), Path(output), type_name.upper(), overwrite=overwrite):
        line_printer(verbose)(note)
    return Path(output)
