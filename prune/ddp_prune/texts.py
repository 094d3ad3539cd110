"""Reads the text of a run: blocks to train on and to hold out, and the texts that are only watched."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ddp_prune.models.source import Source, weight_files
from ddp_prune.run_folder import inputs_of
from ddp_prune.settings import TrainingSettings
from ddp_prune.text.blocks import Blocks, check_vocabulary, check_watched, load_blocks, select_loss_mask
from ddp_vllm.errors import TextError
from ddp_vllm.model_files import tokenizer_and_config_files


class Text(NamedTuple):
    """Token blocks, int64 [num_blocks, seq_len]."""

    blocks: Blocks
    """To train on, and held out."""
    loss_mask: torch.Tensor | None
    """Of the blocks to train on, bool: tokens that contribute to the cross-entropy; None: all."""
    watched: Mapping[str, torch.Tensor]
    """Of texts that are only evaluated, by name."""

    def identity(self, *sources: Source, profile: str = "") -> dict[str, Any]:
        """Return the identity of text, weights and configs of a run (`inputs_of`). A watched text
        decides nothing."""
        weights, others = (
            [file for source in sources for file in files(source.folder)]
            for files in (weight_files, tokenizer_and_config_files)
        )
        return inputs_of({"train": self.blocks.train, "heldout": self.blocks.heldout}, weights, others, profile=profile)


def read_text(
    recipe: TrainingSettings,
    tokenizer: Any,
    vocabulary: int,
    *,
    model: str,
    steps: int,
    watched: Sequence[str],
    print_line: Callable[[str], None],
) -> Text:
    """Read the text for the steps of a run, and the watched texts.

    vocabulary: number of tokens that the model knows. model: to name in errors. watched: names;
    those that the recipe does not name itself are left out if they cannot be read.
    Raises: TextError as `load_blocks`, or if a watched text holds the same excerpts; ModelError if
        the model does not know a token.
    """

    def load(name: str, train_blocks: int, min_train_blocks: int) -> Blocks:
        blocks = load_blocks(
            name, tokenizer, seq_len=recipe.seq_len, train_blocks=train_blocks, heldout_blocks=recipe.heldout_blocks,
            min_train_blocks=min_train_blocks, seed=recipe.seed, text_column=recipe.text_column,
        )  # fmt: skip
        check_vocabulary(blocks, vocabulary, model)
        return blocks

    blocks, heldout = load(recipe.data, steps * recipe.batch_size, recipe.batch_size), dict[str, torch.Tensor]()
    for name in watched:
        try:
            other = load(name, 1, 0)
            check_watched(other, name, blocks, recipe.data)
        except TextError as error:
            if recipe.watch:
                raise
            print_line(f"{name} is not watched: {error}")
            continue
        heldout[name] = other.heldout
        for note in other.notes:
            print_line(note)
    return Text(blocks, select_loss_mask(blocks, recipe.learn_from, recipe.data, print_line), heldout)
