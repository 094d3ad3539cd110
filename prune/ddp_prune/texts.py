"""Loads the text of a run, to train on and to watch, with the checks that all verbs share."""

from collections.abc import Sequence
from typing import Any

from ddp_prune.settings import TrainingSettings
from ddp_prune.text.blocks import Blocks, check_vocabulary, check_watched, load_blocks


def load_text(
    name: str,
    recipe: TrainingSettings,
    tokenizer: Any,
    model: str,
    vocabulary: int,
    *,
    train_blocks: int,
    min_train_blocks: int,
) -> Blocks:
    """Load blocks of a text with the sizes of a recipe.

    model: to name in errors. vocabulary: number of tokens that the model knows.
    Raises: TextError as `load_blocks`; ModelError if the model does not know a token.
    """
    blocks = load_blocks(
        name,
        tokenizer,
        seq_len=recipe.seq_len,
        train_blocks=train_blocks,
        heldout_blocks=recipe.heldout_blocks,
        min_train_blocks=min_train_blocks,
        seed=recipe.seed,
        text_column=recipe.text_column,
    )
    check_vocabulary(blocks, vocabulary, model)
    return blocks


def load_watched(
    names: Sequence[str], blocks: Blocks, recipe: TrainingSettings, tokenizer: Any, model: str, vocabulary: int
) -> dict[str, Blocks]:
    """Load each text that is only evaluated; its held-out blocks are of interest.

    blocks: of the text that is trained on. Raises: as `load_text`; TextError if they hold the same
    excerpts.
    """
    sizes = {"train_blocks": 1, "min_train_blocks": 0}
    watched = {name: load_text(name, recipe, tokenizer, model, vocabulary, **sizes) for name in names}
    for name, text in watched.items():
        check_watched(text, name, blocks, recipe.data)
    return watched
