"""Options, the gated model and the result line that several scripts share."""

import argparse
from pathlib import Path
from typing import Any

import torch

from ddp_benchmarks.protocol import result_line
from ddp_prune.core.gates import GatedModel
from ddp_prune.models.source import Source
from ddp_vllm.families import choose_head_unit


def add_test_options(parser: argparse.ArgumentParser, *, required: bool = False) -> None:
    parser.add_argument("--test", type=Path, required=required, help="Text for perplexity that nothing is learned on.")
    parser.add_argument("--detokenize", action="store_true", help="Undo WikiText's spacing, as lm-eval does.")


def add_batch_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--seq-len", type=int, default=256)


def gate(model: Any, source: Source, head_unit: str = "auto") -> GatedModel:
    """Return a loaded model with gates on the units of its family."""
    return GatedModel(model, source.family, source.sizes, choose_head_unit(head_unit, source.sizes))


def print_result(question: str | None, arguments: argparse.Namespace, *, seed: int = 0, **answers: Any) -> None:
    """Print the line of JSON that ends a study, with the threads it ran on."""
    answers = {"threads": torch.get_num_threads()} | answers
    print(result_line(question, vars(arguments), seed=seed, **answers))
