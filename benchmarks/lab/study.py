"""What scripts that learn masks share: options, the gated model, text to learn on, the result."""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

from ddp_benchmarks.protocol import result_line, script_parser
from ddp_models.source import Source
from ddp_prune.gates import GatedModel
from ddp_prune.recipe import Recipe
from ddp_prune.trainer import Trainer
from ddp_text.blocks import Blocks, load_blocks
from ddp_vllm.families import choose_head_unit


def learning_parser(description: str | None, *, steps: int) -> argparse.ArgumentParser:
    """Return the options of a script that learns masks and judges them on a test text."""
    parser = script_parser(description)
    parser.add_argument("model")
    parser.add_argument("--data", required=True)
    add_test_options(parser, required=True)
    parser.add_argument("--sparsity", type=float, default=0.2)
    parser.add_argument("--steps", type=int, default=steps)
    add_batch_options(parser)
    return parser


def add_test_options(parser: argparse.ArgumentParser, *, required: bool = False) -> None:
    parser.add_argument("--test", type=Path, required=required, help="Text for perplexity that nothing is learned on.")
    parser.add_argument("--detokenize", action="store_true", help="Undo WikiText's spacing, as lm-eval does.")


def add_batch_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--seq-len", type=int, default=256)


def gate(model: Any, source: Source, head_unit: str = "auto") -> GatedModel:
    """Return a loaded model with gates on the units of its family."""
    return GatedModel(model, source.family, source.sizes, choose_head_unit(head_unit, source.sizes))


def prepare_run(arguments: argparse.Namespace, tokenizer: Any, seed: int) -> tuple[Recipe, Blocks]:
    """Return the recipe of one run, and the blocks it learns on."""
    options = {name: getattr(arguments, name) for name in ("model", "sparsity", "data", "steps")}
    options |= {"batch_size": arguments.batch_size, "seq_len": arguments.seq_len, "seed": seed}
    recipe = Recipe(**options)
    blocks = load_blocks(
        recipe.data, tokenizer, seq_len=recipe.seq_len, train_blocks=recipe.steps * recipe.batch_size,
        heldout_blocks=recipe.heldout_blocks, min_train_blocks=recipe.batch_size, seed=recipe.seed,
    )  # fmt: skip
    return recipe, blocks


def take_steps(trainer: Trainer, first: int, end: int) -> None:
    """Let a trainer do its steps from `first` to before `end`, and show how it goes on stderr."""
    for step in range(first, end):
        show_progress(trainer.step(step), trainer.recipe.steps)


def show_progress(metrics: dict[str, float], num_steps: int) -> None:
    """Print the metrics of every tenth part of the steps to stderr."""
    if int(metrics["step"]) % max(1, num_steps // 10) == 0:
        print(" ", *(f"{name} {value:.4g}" for name, value in metrics.items()), file=sys.stderr, flush=True)


def print_result(question: str | None, arguments: argparse.Namespace, *, seed: int = 0, **answers: Any) -> None:
    """Print the line of JSON that ends a study, with the threads it ran on."""
    answers = {"threads": torch.get_num_threads()} | answers
    print(result_line(question, vars(arguments), seed=seed, **answers))
