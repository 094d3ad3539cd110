"""Text in, blocks of tokens out: read, hold some out, take excerpts in turn, tokenize, pack, cache.

The held-out documents are those of lowest hash, so they are the same for any seed and any number of steps.
A short run should see all of its text, not only the first documents. Therefore documents take turns: each gives an
excerpt of about one block, then each gives another. Sources take turns as well.
If the tokenizer begins every text with BOS, so does every block: models of such a family (Llama-3, Mistral, Gemma) were
never trained on text without BOS, and their attention uses it as a sink.
"""

import hashlib
import itertools
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.numpy import load, save

from ddp_prune.documents import Document, Documents, content_of, open_rows, reading_text
from ddp_prune.templates import Templates
from ddp_vllm.cache import cache_folder, check_cache, unwritable_cache
from ddp_vllm.errors import ModelError, TextError, is_of_a_library
from ddp_vllm.output import atomic_file
from ddp_vllm.provenance import split_sources
from ddp_vllm.remote_code.files import read_bytes

LARGEST_CACHE = 1 << 36  # bytes
VERSION = 6  # of the meaning of cached blocks
CHARACTERS_PER_TOKEN = 5  # of an excerpt; English has between 4 and 5
NEIGHBOURS = 1000  # documents that take turns; `datasets` shuffles a stream among as many
SHORT_SOURCE = 4  # times the held-out text; a source with less, at one excerpt per document, is split into its excerpts
STREAMED_CANDIDATES = 16  # times the held-out text; how much of a stream is read to choose the held-out text from
TEXTS_PER_BATCH = 64  # that are tokenized at a time


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Packed text."""

    train: torch.Tensor
    """int64 [num_blocks, seq_len]"""
    loss_mask: torch.Tensor
    """bool [num_blocks, seq_len], of `train`: in conversations, the assistant's tokens and the one that ends its turn.
    All tokens of other text, and all of any text if the tokenizer cannot map tokens to characters."""
    heldout: torch.Tensor
    """int64 [heldout_blocks, seq_len], of documents that are not in `train`; of a short source, of other excerpts."""
    found: int
    """Tokens in all blocks; reading stops when the run has enough."""


def load_tokenizer(model: str) -> Any:
    """Return a model's tokenizer. Raises: ModelError if it has none."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
        tokenizer("A word, and another.", verbose=False)  # some settings are read only then
    except BaseException as error:
        if not is_of_a_library(error):
            raise
        reason = str(error).strip().split("\n")[0]
        raise ModelError(
            f"{model} has no tokenizer that loads ({reason}); put tokenizer.json into the model's folder"
        ) from error
    if tokenizer.eos_token_id is None:
        raise ModelError(f"the tokenizer of {model} has no EOS token, which separates documents; set eos_token in it")
    return tokenizer


def load_blocks(
    data: str,
    tokenizer: Any,
    *,
    seq_len: int,
    train_blocks: int,
    heldout_blocks: int,
    min_train_blocks: int,
    seed: int,
    text_column: str = "",
) -> Blocks:
    """Read, tokenize and pack up to `train_blocks + heldout_blocks` blocks of `seq_len` tokens.

    Excerpts are joined with EOS between them and cut into blocks. A run longer than the text repeats it. If the
    tokenizer begins every text with BOS, a block is BOS and `seq_len - 1` tokens of text.
    data: hub datasets or files, separated by commas, which take turns; `NAME:3` has three turns.
    text_column: as in a `Recipe`.
    Raises: TextError if the text cannot be read, holds fewer than `min_train_blocks + heldout_blocks` blocks, or has a
        source that is held out entirely; OutputError if the cache cannot be written.
    """
    sizes = (seq_len, train_blocks, heldout_blocks, min_train_blocks, seed, text_column)
    with reading_text(data):
        path = cache_folder() / "tokens" / f"{_key(data, tokenizer, *sizes)}.tokens"
    blocks = saved_blocks(path)
    if blocks is None:
        check_cache()  # otherwise the error of `datasets` would blame the text
        bos = leading_bos(tokenizer)
        width = seq_len - len(bos)  # tokens of text in a block
        heldout, train = _read(
            data, tokenizer, excerpt_size=CHARACTERS_PER_TOKEN * seq_len, heldout_tokens=heldout_blocks * width,
            train_tokens=train_blocks * width, seed=seed, text_column=text_column,
        )  # fmt: skip
        found, required = len(heldout.ids) + len(train.ids), (min_train_blocks + heldout_blocks) * width
        if len(train.ids) < min_train_blocks * width or len(heldout.ids) < heldout_blocks * width:
            raise TextError(
                f"{data} holds {found:,} tokens, but one step and the held-out text need {required:,}; "
                "give more text or lower --batch-size or --seq-len"
            )
        ids, loss_mask = (np.concatenate(parts) for parts in zip(heldout, train, strict=True))
        blocks = Tokens(_cut_blocks(ids, bos, width), _cut_blocks(loss_mask, [True] * len(bos), width))
        save_blocks(path, blocks)
    tokens, loss_mask = torch.from_numpy(blocks.ids).long(), torch.from_numpy(blocks.loss_mask)
    return Blocks(
        train=tokens[heldout_blocks:],
        loss_mask=loss_mask[heldout_blocks:],
        heldout=tokens[:heldout_blocks],
        found=tokens.numel(),
    )


def _cut_blocks(stream: np.ndarray, first: list[Any], width: int) -> np.ndarray:
    """Return [num_blocks, len(first) + width]: the whole blocks of a stream, each with `first` before it."""
    whole = stream[: len(stream) // width * width].reshape(-1, width)
    return np.hstack([np.tile(np.asarray(first, stream.dtype), (len(whole), 1)), whole])


def select_loss_mask(blocks: Blocks, learn_from: str, data: str, say: Callable[[str], None]) -> torch.Tensor | None:
    """Return the loss mask of the training blocks; None if all tokens contribute to the cross-entropy.

    learn_from: `assistant`, or anything else for all tokens, as in a `Recipe`.
    say: prints a line for the user.
    Raises: TextError if no token would contribute.
    """
    if learn_from != "assistant":
        return None
    if blocks.loss_mask.all():
        say(f"no turns of an assistant were found in {data}, so the loss is on all tokens; add conversations to it")
        return None
    if not blocks.loss_mask[:, 1:].any():
        raise TextError(f"{data} holds no words of an assistant; try --learn-from all")
    return blocks.loss_mask


def check_vocabulary(blocks: Blocks, vocabulary: int, model: str) -> None:
    """Reject tokens that the model does not know, from a tokenizer of another model. Raises: ModelError."""
    highest = max(int(part.max()) for part in (blocks.train, blocks.heldout) if part.numel())
    if highest >= vocabulary:
        raise ModelError(
            f"the tokenizer of {model} makes token {highest} of the text, but the model knows 0 to {vocabulary - 1}; "
            "put the tokenizer that belongs to the model into its folder"
        )


def leading_bos(tokenizer: Any) -> list[int]:
    """Return [BOS] if the tokenizer begins every text with it, else []."""
    bos = tokenizer.bos_token_id
    return [bos] if bos is not None and tokenizer("x")["input_ids"][:1] == [bos] else []


def sources_of(data: str) -> list[str]:
    """Return the names in a comma-separated list of texts, `NAME:3` three times. Raises: TextError if one is empty."""
    names = [name for name, turns in split_sources(data) for _ in range(turns)]
    if not all(names):
        raise TextError(f"data is {data!r}, where a name is missing; give hub datasets or files, separated by commas")
    return [os.path.normpath(name) if os.path.exists(name) else name for name in names]


class Tokens(NamedTuple):
    """Tokens in a row."""

    ids: np.ndarray
    """int32 [num_tokens]"""
    loss_mask: np.ndarray
    """bool [num_tokens]"""


class Source(NamedTuple):
    """The documents of one file or hub dataset, in two orders."""

    shuffled: Iterable[Document]
    candidates: Iterable[Document]
    """Those that may be held out, lowest hash first."""


def _read(
    data: str, tokenizer: Any, *, excerpt_size: int, heldout_tokens: int, train_tokens: int, seed: int, text_column: str
) -> tuple[Tokens, Tokens]:
    """Return the held-out tokens and the training tokens. excerpt_size: characters."""
    names = sources_of(data)
    turns = {name: names.count(name) for name in names}
    with Templates(tokenizer) as templates, reading_text(data):
        sources = {}
        for name, count in turns.items():
            heldout_size = math.ceil(CHARACTERS_PER_TOKEN * heldout_tokens * count / len(names))
            sources[name] = open_source(name, templates, seed, excerpt_size, heldout_size, text_column)
        candidates = take_turns({name: source.candidates for name, source in sources.items()}, turns)
        heldout, hidden = hold_out(candidates, tokenizer, excerpt_size, heldout_tokens)
        excerpts = {}
        for name, source in sources.items():
            stream = excerpts_of(source.shuffled, excerpt_size, seed, hidden)
            first = next(stream, None)
            if first is None and len(sources) > 1:  # a single source is too short, which `load_blocks` reports
                raise TextError(
                    f"{name} holds no text, or all of it is held out, so none is trained on; give more of it, leave it "
                    "out, or set a lower heldout_blocks in a recipe"
                )
            excerpts[name] = itertools.chain([first] if first else [], stream)
        return heldout, pack(take_turns(excerpts, turns), tokenizer, train_tokens)


def open_source(
    name: str, templates: Templates, seed: int, excerpt_size: int, heldout_size: int, text_column: str = ""
) -> Source:
    """Open a file or hub dataset.

    A source with less than SHORT_SOURCE times the held-out text, at one excerpt per document, is split into its
    excerpts, which then count as documents. Of a stream, only the first documents are candidates.
    excerpt_size, heldout_size: characters of an excerpt, and to hold out.
    Raises: as `reading_text`.
    """
    import datasets

    with reading_text(name):
        rows = open_rows(name, text_column)
        is_streamed = isinstance(rows, datasets.IterableDataset)
        in_memory = {} if is_streamed else {"keep_in_memory": True}  # in a file, a kill would leave a part of it
        documents, shuffled = (
            Documents(each, templates, name) for each in (rows, rows.shuffle(seed=seed, **in_memory))
        )
        first, found = list[Document](), 0
        for document in documents:
            first.append(document)
            found += min(len(document.text), excerpt_size)
            if found >= heldout_size * (STREAMED_CANDIDATES if is_streamed else SHORT_SOURCE):
                break
        if found < SHORT_SOURCE * heldout_size:
            parts = [excerpt for document in first for excerpt in cut(document, excerpt_size)]
            order = np.random.default_rng(seed).permutation(len(parts))
            return Source([parts[place] for place in order], _by_hash(parts))
        if is_streamed:
            return Source(shuffled, _by_hash(first))
        places = {hash_of(document.text): place for place, document in enumerate(documents)}
        in_order = rows.select([places[number] for number in sorted(places)])
        return Source(shuffled, Documents(in_order, templates, name))


def hash_of(text: str) -> int:
    """Return 64 bits of a text's SHA-256."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8])


def _by_hash(documents: Iterable[Document]) -> list[Document]:
    by_hash = {hash_of(document.text): document for document in documents}
    return [by_hash[number] for number in sorted(by_hash)]


def take_turns(sources: Mapping[str, Iterable[Document]], turns: Mapping[str, int]) -> Iterator[Document]:
    """Yield documents of the sources in rotation, `turns[name]` in a row, until all sources are exhausted."""
    streams = {name: iter(source) for name, source in sources.items()}
    while streams:
        for name, stream in list(streams.items()):
            taken = list(itertools.islice(stream, turns[name]))
            yield from taken
            if not taken:
                del streams[name]


def hold_out(
    candidates: Iterable[Document], tokenizer: Any, excerpt_size: int, num_tokens: int
) -> tuple[Tokens, set[str]]:
    """Return up to `num_tokens` tokens, one excerpt per document, and all excerpts of these documents."""
    hidden = set[str]()

    def chosen() -> Iterator[Document]:
        for document in candidates:
            excerpts = cut(document, excerpt_size)
            texts = {excerpt.text for excerpt in excerpts}
            if not hidden >= texts:  # otherwise it is a copy of a document in another source
                hidden.update(texts)
                yield excerpts[hash_of(document.text) % len(excerpts)]

    return pack(chosen(), tokenizer, num_tokens, texts_per_batch=1), hidden


def excerpts_of(documents: Iterable[Document], excerpt_size: int, seed: int, hidden: set[str]) -> Iterator[Document]:
    """Yield an excerpt of every document, then another of every longer one, and so on, but no hidden excerpt.

    Each document starts at an excerpt of its own choice, so not all start at their beginning. NEIGHBOURS documents at a
    time take turns, so each is read once.
    """
    rest = iter(documents)
    while neighbours := list(itertools.islice(rest, NEIGHBOURS)):
        columns = []
        for document in neighbours:
            excerpts = cut(document, excerpt_size)
            start = (hash_of(document.text) + seed) % max(1, len(excerpts))
            columns.append(excerpts[start:] + excerpts[:start])
        in_turn = itertools.chain.from_iterable(itertools.zip_longest(*columns))
        yield from (excerpt for excerpt in in_turn if excerpt and excerpt.text not in hidden)


def cut(document: Document, size: int) -> list[Document]:
    """Cut a document at blanks into equal excerpts of about `size` characters; an empty one into none."""
    text = document.text
    count = max(1, round(len(text) / size))
    starts = (len(text) * number // count for number in range(1, count))
    blanks = ((start, text.find(" ", start, start + size // 5)) for start in starts)
    borders = [0, *(start if blank < 0 else blank for start, blank in blanks), len(text)]
    return [document[start:stop] for start, stop in itertools.pairwise(borders) if start < stop]


def pack(
    excerpts: Iterable[Document], tokenizer: Any, num_tokens: int, texts_per_batch: int = TEXTS_PER_BATCH
) -> Tokens:
    """Return the tokens of excerpts, EOS after each, up to `num_tokens`; the rest of the excerpts is not read."""
    parts, found = [Tokens(np.empty(0, np.int32), np.empty(0, bool))], 0
    stream = tokenize(excerpts, tokenizer, texts_per_batch)
    while found < num_tokens and (tokens := next(stream, None)):
        parts.append(tokens)
        found += len(tokens.ids)
    ids, loss_mask = (np.concatenate(each)[:num_tokens] for each in zip(*parts, strict=True))
    return Tokens(ids, loss_mask)


def tokenize(documents: Iterable[Document], tokenizer: Any, texts_per_batch: int = TEXTS_PER_BATCH) -> Iterator[Tokens]:
    """Yield the tokens of each document, with EOS at the end."""
    maps_tokens = getattr(tokenizer, "is_fast", False)  # only such tokenizers map tokens to characters
    options = {"add_special_tokens": False, "verbose": False, "return_offsets_mapping": maps_tokens}
    rest = iter(documents)
    while batch := list(itertools.islice(rest, texts_per_batch)):
        encoded = tokenizer([document.text for document in batch], **options)
        for number, document in enumerate(batch):
            ids = np.asarray([*encoded["input_ids"][number], tokenizer.eos_token_id], np.int32)
            loss_mask = np.ones(len(ids), bool)
            if maps_tokens and document.loss_mask is not None:  # the assistant does not generate the EOS between texts
                loss_mask[:-1] = _of_tokens(document.loss_mask, encoded["offset_mapping"][number])
                loss_mask[-1] = False
            yield Tokens(ids, loss_mask)


def _of_tokens(loss_mask: np.ndarray, offsets: list[tuple[int, int]]) -> np.ndarray:
    """Return the loss mask over tokens for one over characters: tokens that contain a character of an answer, and the
    token after an answer, which ends the turn.

    offsets: [start, stop) of each token, in characters.
    """
    starts, stops = np.asarray(offsets, np.int64).reshape(-1, 2).T
    starts = np.minimum(starts, np.append(0, stops)[:-1])  # include blanks before the token, which offsets may omit
    starts = np.minimum(starts, np.maximum(stops - 1, 0))
    padded = np.append(loss_mask, False)  # also for the character before the first one, at -1
    count_before = np.append(0, padded.cumsum())
    return (count_before[stops] > count_before[starts]) | padded[starts - 1]


def _key(data: str, tokenizer: Any, *sizes: int | str) -> str:
    """Return a hash of all that blocks depend on: bytes of files or names of hub datasets, vocabulary, BOS, sizes."""
    settings = [VERSION, sizes, tokenizer.eos_token_id, tokenizer.chat_template, leading_bos(tokenizer)]
    for path in map(Path, sources_of(data)):
        settings.append([path.name, content_of(path)] if path.is_file() else str(path))
    backend = getattr(tokenizer, "backend_tokenizer", None)
    vocabulary = backend.to_str() if backend is not None else json.dumps(sorted(tokenizer.get_vocab()))
    return hashlib.sha256((json.dumps(settings) + vocabulary).encode()).hexdigest()[:32]


def saved_blocks(path: Path) -> Tokens | None:
    """Return what `save_blocks` wrote; None if there is no such file, or it is damaged."""
    try:
        digest, content = (stored := read_bytes(path, LARGEST_CACHE))[:32], stored[32:]
    except OSError:
        return None
    return Tokens(**load(content)) if hashlib.sha256(content).digest() == digest else None


def save_blocks(path: Path, blocks: Tokens) -> None:
    """Write blocks with a checksum. Raises: OutputError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        content = save(blocks._asdict())
        with atomic_file(path, private=True) as temporary, open(temporary, "wb") as file:
            file.write(hashlib.sha256(content).digest())
            file.write(content)
    except OSError as error:
        raise unwritable_cache(cache_folder(), error) from error
