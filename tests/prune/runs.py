"""Small commands on tiny models, and folders to change."""

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from click.testing import Result
from commands import edit_json, invoke  # for other tests
from safetensors.torch import load_file, save_file
from seams import die_at, heldout_of, losses  # noqa: F401  # for tests/recover
from transformers import AutoModelForCausalLM

from ddp_vllm.checkpoint import read_checkpoint

Edit = Callable[[Path], Any]  # a change of a folder
SMALL = [
    *("--steps", "6", "--batch-size", "2", "--seq-len", "16", "--heldout-blocks", "4", "--train", "masks"),
]


def prune(model: Path | str, text: Path | str, output: Path, *more: object, sparsity: str = "0.4") -> Result:
    """Run `ddp-vllm prune` for six steps."""
    size = [] if "--sparsity" in more else ["--sparsity", sparsity]  # given twice, it would be two sizes
    rate = ["--learning-rate", "2e-4"] if {"auto", "lora", "weights"} & {*more} else []  # instead of trials
    return invoke("prune", model, *size, "--data", text, "-o", output, *SMALL, *rate, *more)


def recover(pruned: Path, output: Path, *more: object) -> Result:
    """Run `ddp-vllm recover` for thirty steps of two sequences of 16, unless told otherwise."""
    return invoke("recover", pruned, "-o", output, "--tokens", "960", *more)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Read the one file of a tiny model's weights."""
    return load_file(folder / "model.safetensors")


def loss_of(folder: Path, text: Path) -> torch.Tensor:
    """Return the loss of a folder on each held-out block, as plain transformers computes it."""
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    return torch.tensor(losses(model, heldout_of(folder, text)))


def assert_written_as_evaluated(folder: Path, text: Path, stage: str = "pruned", distance: float = 5e-5) -> None:
    stated = read_checkpoint(folder).provenance["perplexity"]["block_losses"][stage]
    torch.testing.assert_close(loss_of(folder, text), torch.tensor(stated), atol=distance, rtol=0)


def same_weights(one: Path, other: Path) -> bool:
    """To the bit."""
    first, second = weights(one), weights(other)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def assert_same_weights(one: Path, other: Path) -> None:
    assert same_weights(one, other)


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Change the one file of a tiny model's weights."""
    tensors = weights(folder)
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def edit_config(folder: Path, *edits: Callable[[dict[str, Any]], Any], **changes: Any) -> None:
    edit_json(folder / "config.json", *edits, **changes)


def config(*edits: Callable[[dict[str, Any]], Any], **changes: Any) -> Edit:
    """Return an edit of config.json, for tables of what is changed in a folder."""
    return lambda folder: edit_config(folder, *edits, **changes)


def tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Edit:
    return lambda folder: edit_weights(folder, change)


def without(name: str) -> Edit:
    return tensors(lambda weights: weights.pop(name))


@contextmanager
def small_files(num_bytes: int) -> Iterator[None]:
    """Let no file of this process grow above that, as on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
