"""Counts the tokens and the context of compared models."""

from collections.abc import Callable

from ddp_vllm.checkpoint import read_config
from ddp_vllm.dimensions import longest_context
from ddp_vllm.model_facts import known_folder


def token_counter(model: str) -> Callable[[str], int]:
    """Return a function that counts the tokens of a text, special tokens included. Raises:
    ModelError."""
    from ddp_prune.text.tokens import load_tokenizer

    tokenizer = load_tokenizer(model)
    return lambda text: len(tokenizer(text, verbose=False).input_ids)


def max_model_len(model: str) -> int | None:
    """Return the `longest_context` of a model; None if its config is remote."""
    folder = known_folder(model)
    if folder is None or not (folder / "config.json").is_file():
        return None
    return longest_context(read_config(folder))
