"""The pages of a folder that `prune` or `recover` writes: its model card, its report, and a summary on the terminal."""

from pathlib import Path

from rich.console import Console

from ddp_vllm.checkpoint import Checkpoint
from ddp_vllm.pages.card import write_card
from ddp_vllm.pages.report import REPORT_FILE, write_report
from ddp_vllm.pages.terminal import print_checkpoint


def write_card_and_report(folder: Path, output: Path) -> Checkpoint:
    """Write card and report into a checked folder that will become `output`; return the checkpoint at `output`."""
    checkpoint = write_card(folder, output)
    write_report(checkpoint, folder, folder)
    return checkpoint


def print_written(checkpoint: Checkpoint, dense: str, console: Console) -> None:
    """Print a summary of a checkpoint, and the commands to look at it, serve it and measure it.

    dense: the name of the dense model, as the user gave it.
    """
    output = checkpoint.folder
    print_checkpoint(checkpoint, console)
    console.print(
        f"\nwritten: {output}\nlook at it: {output / REPORT_FILE}\nserve it:   vllm serve {output}"
        f"\nmeasure it: ddp-vllm bench sharegpt --dense {dense} --pruned {output}",
        markup=False,
    )
