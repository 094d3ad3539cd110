"""The verbs recover and quantize. torch is imported when one of them runs, not before."""

import json
import os
from pathlib import Path
from typing import Any

import click

from ddp_prune import recovery_verbs as verbs
from ddp_prune.cli import OUTPUT_HEADING, end_command, tracker_option
from ddp_prune.recovery_recipe import INHERITED, RecoveryRecipe
from ddp_vllm.cli import echo
from ddp_vllm.options import (
    Grouped,
    given,
    json_option,
    lines_to_stderr,
    output_option,
    overwrite_option,
    quiet_option,
    recipe_option,
    settings_options,
)
from ddp_vllm.pages.summary import summary


@click.command(cls=Grouped, settings=RecoveryRecipe, headings=OUTPUT_HEADING)
@click.argument("model")
@settings_options(RecoveryRecipe, instead={"model": ()}, inherited=INHERITED)
@recipe_option
@tracker_option
@output_option
@overwrite_option
@json_option
@quiet_option
def recover(
    model: str,
    output: Path,
    recipe_file: Path | None,
    tracker: str | None,
    overwrite: bool,
    as_json: bool,
    quiet: bool,
    **settings: Any,
) -> None:
    """Train the weights of the pruned MODEL on the dense model's output and write the better model.

    Widths, speed and serving do not change. Teacher, text and batch size are those of the pruning
    run unless they are passed. After an interruption, the same command resumes. On several devices:
    accelerate launch -m ddp_vllm recover …
    """
    options = given(settings) | {"overwrite": overwrite, "tracker": tracker}
    with lines_to_stderr(as_json):
        recovered = verbs.recover(model, output=output, recipe=recipe_file, verbose=not quiet, **options)
    if as_json and os.environ.get("RANK", "0") == "0":
        echo(json.dumps(summary(recovered)))
    end_command()


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--scheme", type=click.Choice(["W8A8", "FP8_DYNAMIC", "W4A16"]), required=True,
    help="8-bit integers, 8-bit floats, or 4-bit weights alone, by llm-compressor's names.",
)  # fmt: skip
@output_option
@overwrite_option
def quantize(folder: Path, scheme: str, output: Path, overwrite: bool) -> None:
    """Quantize the pruned or dense model in FOLDER with llm-compressor; vLLM serves it as before.

    This requires an environment separate from vLLM's: pip install ".[prune,quantize]" in a clone of
    ddp-vllm. Weights are rounded to the nearest value, so no text is required. The command first
    prints the layers whose widths suit no fast kernel, and how to avoid that.
    """
    echo(f"written: {verbs.quantize(folder, scheme, output=output, overwrite=overwrite, verbose=True)}")
