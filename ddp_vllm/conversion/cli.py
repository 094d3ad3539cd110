"""The command convert."""

from pathlib import Path

import click

from ddp_vllm.cli import echo
from ddp_vllm.conversion import verb


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="Folder to write.")
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
    checkpoint = verb.convert(folder, output=output, dense=dense, overwrite=overwrite, verbose=True)
    echo(f"written: {output} ({checkpoint.num_parameters:,} parameters)")
