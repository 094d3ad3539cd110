"""Shows the checkpoint that `prune` or `recover` has written."""

from rich.console import Console

from ddp_vllm.checkpoint import Checkpoint
from ddp_vllm.pages.report import write_report
from ddp_vllm.pages.terminal import print_checkpoint


def show(checkpoint: Checkpoint, dense: str, console: Console) -> None:
    """Print a summary of a checkpoint, draw its report, and print the commands to serve and measure it.

    dense: the name of the dense model, as the user gave it.
    """
    output = checkpoint.folder
    print_checkpoint(checkpoint, console)
    page = write_report(checkpoint, output)
    console.print(
        f"\nwritten: {output}\nlook at it: {page}\nserve it:   vllm serve {output}"
        f"\nmeasure it: ddp-vllm bench sharegpt --dense {dense} --pruned {output}",
        markup=False,
    )
