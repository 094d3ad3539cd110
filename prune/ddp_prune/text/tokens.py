"""Documents in, tokens out: the tokenizer of a model, and the loss mask converted from characters
to tokens."""

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ddp_prune.text.documents import Document, hash_of
from ddp_vllm.errors import ModelError, reading
from ddp_vllm.model_files import errors_only
from ddp_vllm.remote_code.files import read_json

TEXTS_PER_BATCH = 64  # texts that are tokenized at a time


class Tokens(NamedTuple):
    """Consecutive tokens and their loss mask."""

    ids: np.ndarray
    """int32 [num_tokens]"""
    loss_mask: np.ndarray
    """bool [num_tokens]"""
    hashes: np.ndarray = np.empty(0, np.uint64)
    """uint64 [num_documents], of the texts"""


def load_tokenizer(model: str) -> Any:
    """Return a model's tokenizer, with the chat template that vLLM takes; `stored_chat_template` is its
    own. Raises: ModelError if it has none."""
    from transformers import AutoTokenizer

    with reading(f"the tokenizer of {model}", ModelError, "put tokenizer.json into the model's folder"):
        with errors_only():  # transformers does not know the type of a pruned model
            tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
        tokenizer("A word, and another.", verbose=False)  # some settings are read only then
        tokenizer.stored_chat_template = own = tokenizer.chat_template
        if template := _processor_template(Path(model)):
            tokenizer.chat_template = {"default": template} | ({"tool_use": own} if isinstance(own, str) else {})
    if tokenizer.eos_token_id is None:
        raise ModelError(f"the tokenizer of {model} has no EOS token, which separates documents; set eos_token in it")
    return tokenizer


def _processor_template(folder: Path) -> str:
    """Return the chat template of a model's processor, if it has one of its own: vLLM takes it for
    requests without tools. Raises: ValueError, OSError."""
    for file in (folder / "chat_template.json", folder / "processor_config.json"):
        if file.is_file() and not (folder / "chat_template.jinja").exists():
            content = read_json(file)
            if isinstance(content, dict) and isinstance(template := content.get("chat_template"), str):
                return template
    return ""


def token_ids(tokenizer: Any, text: Any) -> Any:
    """Return the tokens of a text, or of each of several, without those that begin or end every text."""
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def tokenize(documents: Iterable[Document], tokenizer: Any, texts_per_batch: int = TEXTS_PER_BATCH) -> Iterator[Tokens]:
    """Yield the tokens of each document, with EOS at the end."""
    # only fast tokenizers map tokens to characters
    maps_tokens = getattr(tokenizer, "is_fast", False)
    options = {"add_special_tokens": False, "verbose": False, "return_offsets_mapping": maps_tokens}
    rest = iter(documents)
    while batch := list(itertools.islice(rest, texts_per_batch)):
        encoded = tokenizer([document.text for document in batch], **options)
        for number, document in enumerate(batch):
            ids = np.asarray([*encoded["input_ids"][number], tokenizer.eos_token_id], np.int32)
            loss_mask = np.ones(len(ids), bool)
            # the assistant does not generate the EOS between texts
            if maps_tokens and document.loss_mask is not None:
                loss_mask[:-1] = _mask_over_tokens(document.loss_mask, encoded["offset_mapping"][number])
                loss_mask[-1] = False
            yield Tokens(ids, loss_mask, np.asarray([hash_of(document.text)], np.uint64))


def _mask_over_tokens(loss_mask: np.ndarray, offsets: list[tuple[int, int]]) -> np.ndarray:
    """Convert a loss mask over characters to one over tokens.

    It selects every token that contains a character of an answer, and the token after an answer,
    which ends the turn.
    offsets: [start, stop) of each token, in characters.
    """
    starts, stops = np.asarray(offsets, np.int64).reshape(-1, 2).T
    starts = np.minimum(starts, np.maximum(stops - 1, 0))  # offsets may omit the blanks that are a token
    padded = np.append(loss_mask, False)  # also for the character before the first one, at -1
    count_before = np.append(0, padded.cumsum())
    return (count_before[stops] > count_before[starts]) | padded[starts - 1]


def pack(
    documents: Iterable[Document], tokenizer: Any, num_tokens: int, texts_per_batch: int = TEXTS_PER_BATCH
) -> Tokens:
    """Return the first `num_tokens` tokens of documents, EOS after each; no more are read."""
    parts, total = [Tokens(np.empty(0, np.int32), np.empty(0, bool))], 0
    stream = tokenize(documents, tokenizer, texts_per_batch)
    while total < num_tokens and (tokens := next(stream, None)):
        parts.append(tokens)
        total += len(tokens.ids)
    return Tokens(*(np.concatenate(arrays)[:num_tokens] for arrays in zip(*parts, strict=True)))
