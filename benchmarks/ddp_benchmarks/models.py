"""Loads the tokenizers of compared models, counts tokens, and checks that vocabularies agree."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypedDict

from tokenizers import Tokenizer

from ddp_vllm.checkpoint import read_config
from ddp_vllm.errors import ModelError, reading
from ddp_vllm.model_facts import known_folder
from ddp_vllm.remote_code.files import LARGEST_JSON, read_bytes
from ddp_vllm.schema import Count, checked


def load_tokenizer(model: str) -> Any:
    """Return the tokenizer of a model as vLLM loads it. Raises: ModelError if there is none."""
    from transformers import AutoTokenizer

    remedy = "pass a folder with tokenizer.json, or a Hub name while online"
    with reading(f"the tokenizer of {model}", ModelError, remedy):
        tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
        tokenizer("A word, and another.", verbose=False)  # some settings are only read then
    return tokenizer


def token_counter(model: str) -> Callable[[str], int]:
    """Return a function that counts the tokens of a text, special tokens included. Raises:
    ModelError."""
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
    file = Path(model) / "tokenizer.json"
    if not file.exists():
        return dict(load_tokenizer(model).get_vocab())
    with reading(file, ModelError, "copy the tokenizer of the dense model"):
        return dict(Tokenizer.from_buffer(read_bytes(file, LARGEST_JSON)).get_vocab())


class _Context(TypedDict, total=False):
    max_position_embeddings: Count | None


def max_model_len(model: str) -> int | None:
    """Return the longest context in tokens by the model's config; None if the config is remote,
    does not state it, or stretches it."""
    folder = known_folder(model)
    if folder is None or not (folder / "config.json").is_file():
        return None
    config = read_config(folder)
    with reading(folder / "config.json", ModelError, "download the model again"):
        checked(config, _Context, "it")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    stretched = isinstance(rope, dict) and rope.get("rope_type", rope.get("type")) in STRETCHING
    return None if stretched else config.get("max_position_embeddings") or None
