"""Counts the tokens and the context of compared models."""

from collections.abc import Callable

from ddp_vllm.checkpoint import read_config
from ddp_vllm.model_facts import known_folder


def token_counter(model: str) -> Callable[[str], int]:
    """Return a function that counts the tokens of a text, special tokens included. Raises:
    ModelError."""
    from ddp_prune.text.tokens import load_tokenizer

    tokenizer = load_tokenizer(model)
    return lambda text: len(tokenizer(text, verbose=False).input_ids)


# kinds of rotary embeddings for which vLLM multiplies the context that the config states
STRETCHING = ("linear", "dynamic", "yarn")


def max_model_len(model: str) -> int | None:
    """Return the longest context in tokens by the model's config; None if the config is remote,
    does not state it, or stretches it."""
    folder = known_folder(model)
    if folder is None or not (folder / "config.json").is_file():
        return None
    config = read_config(folder)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    stretched = isinstance(rope, dict) and rope.get("rope_type", rope.get("type")) in STRETCHING
    longest = config.get("max_position_embeddings")
    return longest if isinstance(longest, int) and not stretched else None
