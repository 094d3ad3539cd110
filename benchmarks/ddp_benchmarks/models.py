"""Counts the tokens of compared models, and checks that vocabularies agree."""

from collections.abc import Callable
from pathlib import Path

from tokenizers import Tokenizer

from ddp_vllm.checkpoint import read_config
from ddp_vllm.errors import ModelError, reading
from ddp_vllm.model_facts import known_folder
from ddp_vllm.remote_code.files import LARGEST_JSON, read_bytes


def token_counter(model: str) -> Callable[[str], int]:
    """Return a function that counts the tokens of a text, special tokens included. Raises:
    ModelError."""
    from ddp_prune.text.tokens import load_tokenizer

    tokenizer = load_tokenizer(model)
    return lambda text: len(tokenizer(text, verbose=False).input_ids)


def check_vocabularies(dense: str, pruned: str) -> None:
    """Refuse to compare models with different vocabularies. Raises: ModelError naming the first
    different token."""
    first, second = _vocabulary(dense), _vocabulary(pruned)
    if first == second:
        return
    token = min(set(first.items()) ^ set(second.items()), key=lambda item: (item[1], item[0]))[0]
    raise ModelError(
        f"{dense} and {pruned} have different vocabularies ({len(first)} and {len(second)} tokens; {token!r} is "
        f"{first.get(token, 'absent')} and {second.get(token, 'absent')}); compare a model with its own pruned version"
    )


# kinds of rotary embeddings for which vLLM multiplies the context that the config states
STRETCHING = ("linear", "dynamic", "yarn")


def _vocabulary(model: str) -> dict[str, int]:
    from ddp_prune.text.tokens import load_tokenizer

    file = Path(model) / "tokenizer.json"
    if not file.exists():
        return dict(load_tokenizer(model).get_vocab())
    with reading(file, ModelError, "copy the tokenizer of the dense model"):
        return dict(Tokenizer.from_buffer(read_bytes(file, LARGEST_JSON)).get_vocab())


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
