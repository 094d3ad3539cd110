"""Writes the pages of a checkpoint that `prune` or `recover` is writing, and shows it
afterwards."""

from dataclasses import replace
from pathlib import Path
from shlex import quote

from rich.console import Console

from ddp_vllm.checkpoint import Checkpoint
from ddp_vllm.pages.card import write_card
from ddp_vllm.pages.page import REPORT_FILE
from ddp_vllm.pages.report import write_report
from ddp_vllm.pages.terminal import print_checkpoint


def write_pages(folder: Path, output: Path) -> Checkpoint:
    """Check a folder that will become `output`, write its card and report, and return it as the
    checkpoint at `output`.

    Raises: CheckpointError, OutputError.
    """
    checkpoint = write_card(folder, output)
    write_report(replace(checkpoint, folder=folder), folder, output.name)
    return checkpoint


def print_written(checkpoint: Checkpoint, dense: str, console: Console) -> None:
    """Print a summary of a checkpoint, and the commands to look at it, serve it and measure it.

    dense: the name of the dense model, as the user gave it.
    """
    output = checkpoint.folder
    folder, bench = quote(str(output)), "sharegpt"
    if latency := checkpoint.history.latency:
        work = latency.workload
        bench = f"steps --phase {work.phase} --concurrency {work.batch} --context-length {work.context}"
    print_checkpoint(checkpoint, console)
    console.print(
        f"\nwritten: {output}\nlook at it: {output / REPORT_FILE}\nserve it:   vllm serve {folder}"
        f"\nmeasure it: ddp-vllm bench {bench} --dense {quote(dense)} --pruned {folder}"
    )
