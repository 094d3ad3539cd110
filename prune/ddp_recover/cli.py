"""The verbs recover and quantize. torch is imported when one of them runs, not before."""

from functools import partial
from pathlib import Path
from typing import Any

import click

from ddp_prune.cli import Grouped, given, recipe_options
from ddp_prune.recipe import RecoveryRecipe
from ddp_recover import verbs
from ddp_vllm.cli import echo


@click.command(cls=Grouped)
@click.argument("model")
@partial(recipe_options, RecoveryRecipe)
@click.option("--recipe", "recipe_file", type=click.Path(path_type=Path), help="TOML file with any setting of a run.")
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="Folder to write.")
@click.option("--overwrite", is_flag=True, help="Replace an existing pruned folder.")
def recover(model: str, output: Path, recipe_file: Path | None, overwrite: bool, **settings: Any) -> None:
    """Let the weights of the pruned MODEL learn from the dense one, and write the better model.

    Widths, speed and how it is served stay as they are. What is not given is as when the masks were learned: teacher,
    text, sequences a step. Interrupted, the same command goes on where it was. On several devices:
    accelerate launch -m ddp_vllm recover …
    """
    verbs.recover(model, output=output, recipe=recipe_file, overwrite=overwrite, verbose=True, **given(settings))


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--scheme", type=click.Choice(["W8A8", "FP8", "W4A16"]), required=True,
    help="8-bit integers, 8-bit floats, or 4-bit weights alone.",
)  # fmt: skip
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="Folder to write.")
@click.option("--overwrite", is_flag=True, help="Replace an existing folder of ours.")
def quantize(folder: Path, scheme: str, output: Path, overwrite: bool) -> None:
    """Quantise the pruned or dense model in FOLDER by llm-compressor; vLLM serves it as before.

    It needs an environment of its own beside vLLM's: pip install "ddp-vllm[quantize]". Weights are rounded to the
    nearest, which takes no text. First it says which layers' widths a kernel will not take, and what cures it.
    """
    echo(f"written: {verbs.quantize(folder, scheme, output=output, overwrite=overwrite, verbose=True)}")
