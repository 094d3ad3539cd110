"""Text in, blocks of tokens out: read, hold out, take excerpts in turn, tokenize, pack, cache.

The held-out documents are those whose rows have the lowest hash, so they are the same for any seed
and any number of steps. Rows are hashed as they stand in the file: only documents that are used are
rendered. A short run should see all of its text, not only the first documents. Therefore documents
take turns: each gives an excerpt of about one block, then each gives another. Sources take turns as
well, and one that ends begins again while another lasts. If the tokenizer begins every text with
BOS, so does every block: models of such a family (Llama-3, Mistral, Gemma) were never trained on
text without BOS, and their attention uses it as a sink.
"""

import hashlib
import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from torch import Tensor

from ddp_prune.text.documents import Document, DocumentReader, cut, hash_of
from ddp_prune.text.messages import Notes
from ddp_prune.text.rows import Rows, open_rows, reading_text, sources_of
from ddp_prune.text.templates import ChatTemplate, leading_bos
from ddp_prune.text.tokens import Tokens, pack
from ddp_vllm.cache import cache_folder, check_cache, sha256, unwritable_cache
from ddp_vllm.errors import ModelError, Printer, TextError
from ddp_vllm.output import atomic_file

ARRAYS = ("train", "loss_mask", "heldout", "train_hashes", "heldout_hashes")  # of cached blocks
VERSION = 13  # of cached blocks; raised when the same text gives other blocks
CHARACTERS_PER_TOKEN = 5  # of an excerpt; English has between 4 and 5
RUN = 32  # tokens; the longest that two texts may have in common by chance or quotation
MOST_SHARED = 0.01  # of the runs of a watched text that training text may hold
COMPARED_AT_ONCE = 1 << 22  # tokens
NEIGHBORS = 1000  # documents that take turns; `datasets` shuffles a stream among as many
# a source shorter than this many times the held-out text, or with fewer documents, is split into its excerpts
SHORT_SOURCE = 4
# the part of a stream that held-out text is chosen from, in multiples of the held-out text
STREAMED_CANDIDATES = 16


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """The packed text of a run: blocks to train on and held-out blocks."""

    train: Tensor
    """int64 [num_blocks, seq_len]"""
    loss_mask: Tensor
    """bool [num_blocks, seq_len], of `train`: the assistant's tokens in conversations, with the
    token that ends a turn; all tokens of other text. If the tokenizer cannot map tokens to
    characters, all tokens of any text."""
    heldout: Tensor
    """int64 [heldout_blocks, seq_len], of documents that are not in `train`; a short source gives
    other excerpts."""
    num_tokens: int
    """Tokens in all blocks. Reading stops when the run has enough."""
    train_hashes: frozenset[int] = frozenset()
    heldout_hashes: frozenset[int] = frozenset()
    """Of the excerpts that are trained on, and of all excerpts of held-out documents."""
    notes: tuple[str, ...] = ()
    """Lines for the user about rows that were dropped, unknown or changed, as `Notes`."""


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
    """Read, tokenize and pack up to `train_blocks + heldout_blocks` blocks of `seq_len` tokens, or
    take cached ones.

    Excerpts are joined with EOS between them and cut into blocks. A run longer than the text
    repeats it. If the tokenizer begins every text with BOS, a block is BOS and `seq_len - 1` tokens
    of text.
    data: hub datasets or files, separated by commas, which take turns; `NAME:3` takes three turns
        in a row.
    text_column: the column that holds the text, in every source that has columns; "" finds it by
        its name.
    Raises: TextError if the text cannot be read, holds fewer than `min_train_blocks +
        heldout_blocks` blocks, or has a source that is held out entirely; OutputError if the cache
        cannot be written.
    """
    sizes = (seq_len, train_blocks, heldout_blocks, min_train_blocks, seed, text_column)
    with reading_text(data):
        path = cache_folder() / "tokens" / f"{_key(data, tokenizer, *sizes)}.tokens"
    if saved := saved_blocks(path):
        return _as_blocks(*saved)
    check_cache()  # otherwise the error of `datasets` would blame the text
    bos = leading_bos(tokenizer)
    width, excerpt_size = seq_len - len(bos), CHARACTERS_PER_TOKEN * seq_len  # tokens of text in a block, characters
    heldout_tokens, names = heldout_blocks * width, sources_of(data)
    turns, template = Counter(names), ChatTemplate(tokenizer)
    notes = {name: Notes() for name in turns}
    candidates, excerpts = dict[str, Iterable[Document]](), dict[str, _Excerpts]()
    hidden = set[int]()
    for name, count in turns.items():
        heldout_size = math.ceil(CHARACTERS_PER_TOKEN * heldout_tokens * count / len(names))
        reader = DocumentReader(name, template, notes[name], text_column)
        rows = open_rows(name, text_column)
        candidates[name], documents = _open(rows, reader, seed, excerpt_size, heldout_size)
        excerpts[name] = _Excerpts(name, documents, excerpt_size, seed, hidden, is_alone=len(turns) == 1)
    heldout = hold_out(take_turns(candidates, turns), tokenizer, excerpt_size, heldout_tokens, hidden)
    train = pack(take_turns(excerpts, turns), tokenizer, train_blocks * width)
    for name in turns:
        notes[name].add("times begun anew, because other text lasts longer", count=excerpts[name].passes - 1)
    lines = [line for name in turns for line in notes[name].lines(name)]
    num_tokens, required = len(heldout.ids) + len(train.ids), (min_train_blocks + heldout_blocks) * width
    if len(train.ids) < min_train_blocks * width or len(heldout.ids) < heldout_tokens:
        raise TextError(
            f"{data} holds {num_tokens:,} tokens, but one step and the held-out text require {required:,}; "
            "give more text or lower --batch-size or --seq-len" + "".join(f"; {line}" for line in lines)
        )
    arrays = {
        "train": _cut_blocks(train.ids, bos, width),
        "loss_mask": _cut_blocks(train.loss_mask, [True] * len(bos), width),
        "heldout": _cut_blocks(heldout.ids, bos, width),
        "train_hashes": train.hashes,
        "heldout_hashes": np.asarray([*hidden], np.uint64),
    }
    save_blocks(path, arrays, lines)
    return _as_blocks(arrays, lines)


def _as_blocks(arrays: dict[str, np.ndarray], notes: Sequence[str]) -> Blocks:
    return Blocks(
        train=torch.from_numpy(arrays["train"]).long(),
        loss_mask=torch.from_numpy(arrays["loss_mask"]),
        heldout=torch.from_numpy(arrays["heldout"]).long(),
        num_tokens=arrays["train"].size + arrays["heldout"].size,
        train_hashes=frozenset(arrays["train_hashes"].tolist()),
        heldout_hashes=frozenset(arrays["heldout_hashes"].tolist()),
        notes=tuple(notes),
    )


def _open(
    rows: Rows,
    reader: DocumentReader,
    seed: int,
    excerpt_size: int,
    heldout_size: int,
    read: tuple[int, int] = (STREAMED_CANDIDATES, 0),
) -> tuple[Iterable[Document], Callable[[], Iterator[Document]]]:
    """Return the documents of a source that may be held out, lowest hash first, and a function that
    returns all documents, shuffled.

    A source with less than SHORT_SOURCE times the held-out text, at one excerpt per document, is
    split into its excerpts, which are then treated as documents. Of a stream, only the first
    documents may be held out.
    excerpt_size, heldout_size: characters per excerpt, and characters to hold out. read: of a stream, in
        multiples of heldout_size; with the documents that a shorter part gave.
    """
    multiple, num_before = read
    limits = multiple * heldout_size, excerpt_size
    rest, first, size = reader.read(partial(rows.by_hash, reader.notes, *limits)), list[Document](), 0
    while heldout_size and (size < SHORT_SOURCE * heldout_size or len(first) < SHORT_SOURCE):
        if (document := next(rest, None)) is None:
            if rows.is_stream and len(first) > num_before:  # its rows may hold more than the text, as tools
                return _open(rows, reader, seed, excerpt_size, heldout_size, (4 * multiple, len(first)))
            excerpts = {hash_of(excerpt.text): excerpt for document in first for excerpt in cut(document, excerpt_size)}
            candidates = [excerpts[number] for number in sorted(excerpts)]
            order = np.random.default_rng(seed).permutation(len(candidates))
            return candidates, partial(map, candidates.__getitem__, order)
        first.append(document)
        size += min(len(document.text), excerpt_size)
    return itertools.chain(first, rest), partial(reader.read, partial(rows.shuffled, seed))


def take_turns(sources: Mapping[str, Iterable[Document]], turns: Mapping[str, int]) -> Iterator[Document]:
    """Yield documents of the sources in rotation, `turns[name]` in a row, until all have ended; one
    that ends before another begins again, if it can."""
    streams, lasting = {name: iter(source) for name, source in sources.items()}, {*sources}
    while lasting:
        for name, source in sources.items():
            taken = list(itertools.islice(streams[name], turns[name]))
            if len(taken) < turns[name]:
                lasting.discard(name)
                if lasting:
                    streams[name] = iter(source)
                    taken += itertools.islice(streams[name], turns[name] - len(taken))
            yield from taken
            if not lasting:
                return


def hold_out(
    candidates: Iterable[Document], tokenizer: Any, excerpt_size: int, num_tokens: int, hidden: set[int]
) -> Tokens:
    """Return up to `num_tokens` tokens of one excerpt per document, and add the hashes of all their
    excerpts to `hidden`."""

    def chosen() -> Iterator[Document]:
        for document in candidates:
            excerpts = cut(document, excerpt_size)
            hashes = {hash_of(excerpt.text) for excerpt in excerpts}
            if not hidden >= hashes:  # otherwise it is a copy of a document in another source
                hidden.update(hashes)
                yield excerpts[hash_of(document.text) % len(excerpts)]

    return pack(chosen(), tokenizer, num_tokens, texts_per_batch=1)


@dataclass
class _Excerpts:
    """The excerpts of a source to train on, as often as they are asked for."""

    name: str
    documents: Callable[[], Iterator[Document]]
    size: int
    """Of an excerpt, in characters."""
    seed: int
    hidden: set[int]
    """Hashes of those that are held out."""
    is_alone: bool
    """The only source; one without text is refused later."""
    passes: int = 0
    """How often they were begun."""

    def __iter__(self) -> Iterator[Document]:
        """Raises: TextError if one of several sources has no excerpt."""
        self.passes += 1
        excerpts = excerpts_of(self.documents(), self.size, self.seed, self.hidden)
        first = next(excerpts, None)
        if first is None and not self.is_alone:
            raise TextError(
                f"{self.name} holds no text, or all of it is held out, so none is trained on; give more of it, leave "
                "it out, or set a lower heldout_blocks in a recipe"
            )
        yield from itertools.chain(filter(None, [first]), excerpts)


def excerpts_of(documents: Iterable[Document], excerpt_size: int, seed: int, hidden: set[int]) -> Iterator[Document]:
    """Yield an excerpt of every document, then another of every longer one, and so on, without
    hidden excerpts.

    Each document starts at an excerpt that its hash and the seed choose, not at its beginning.
    Documents take turns in groups of NEIGHBORS, so that each document is read once. None is read
    before it is needed.
    """
    rest = iter(documents)
    while first := next(rest, None):
        columns = []
        for document in itertools.chain([first], itertools.islice(rest, NEIGHBORS - 1)):
            excerpts = cut(document, excerpt_size)
            start = (hash_of(document.text) + seed) % max(1, len(excerpts))
            columns.append(iter(excerpts[start:] + excerpts[:start]))
            yield from _not_hidden(itertools.islice(columns[-1], 1), hidden)
        in_turn = itertools.chain.from_iterable(itertools.zip_longest(*columns))
        yield from _not_hidden(filter(None, in_turn), hidden)


def _not_hidden(excerpts: Iterable[Document], hidden: set[int]) -> Iterator[Document]:
    return (excerpt for excerpt in excerpts if hash_of(excerpt.text) not in hidden)


def _cut_blocks(stream: np.ndarray, first: list[Any], width: int) -> np.ndarray:
    """Return [num_blocks, len(first) + width]: the blocks of a stream, each after `first`, which has
    at most one value."""
    rows = stream[: len(stream) // width * width].reshape(-1, width)
    return np.insert(rows, 0, first, axis=1) if first else rows


def _key(data: str, tokenizer: Any, *sizes: int | str) -> str:
    """Return a hash of everything that blocks depend on: bytes of files or names of hub datasets,
    tokenizer, sizes."""
    settings = [VERSION, sizes, tokenizer.eos_token_id, tokenizer.chat_template, leading_bos(tokenizer)]
    for path in map(Path, sources_of(data)):
        settings.append([path.name, sha256(path)[:32]] if path.is_file() else str(path))
    backend = getattr(tokenizer, "backend_tokenizer", None)
    vocabulary = backend.to_str() if backend is not None else json.dumps(sorted(tokenizer.get_vocab()))
    return hashlib.sha256((json.dumps(settings) + vocabulary).encode()).hexdigest()[:32]


def saved_blocks(path: Path) -> tuple[dict[str, np.ndarray], list[str]] | None:
    """Return what `save_blocks` wrote; None if there is no such file, it is cut off, or its header
    is damaged."""
    try:
        with safe_open(path, "np") as file:
            return {name: file.get_tensor(name) for name in ARRAYS}, json.loads(file.metadata()["notes"])
    except (OSError, SafetensorError, KeyError, TypeError, ValueError):
        return None


def save_blocks(path: Path, arrays: dict[str, np.ndarray], notes: Sequence[str]) -> None:
    """Write the arrays and notes of blocks. Raises: OutputError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path, private=True) as temporary:
            temporary.write_bytes(save(arrays, {"notes": json.dumps(notes)}))
    except OSError as error:
        raise unwritable_cache(cache_folder(), error) from error


def select_loss_mask(blocks: Blocks, learn_from: str, data: str, print_line: Printer) -> Tensor | None:
    """Return the loss mask of the training blocks; None if all tokens contribute to the
    cross-entropy.

    learn_from: `assistant`, or anything else for all tokens.
    print_line: prints a line for the user.
    Raises: TextError if no token would contribute.
    """
    for note in blocks.notes:
        print_line(note)
    if learn_from != "assistant":
        return None
    if blocks.loss_mask.all():
        print_line(
            f"no turns of an assistant were found in {data}, so the loss covers all tokens; add conversations, and a "
            "chat template to the tokenizer"
        )
        return None
    if not blocks.loss_mask[:, 1:].any():
        raise TextError(f"{data} holds no words of an assistant; try --learn-from all")
    return blocks.loss_mask


def check_watched(watched: Blocks, name: str, blocks: Blocks, data: str) -> None:
    """Refuse held-out text of which excerpts are trained on. Raises: TextError."""
    if shared := watched.heldout_hashes & blocks.train_hashes:
        raise TextError(
            f"{data} trains on {len(shared):,} of the {len(watched.heldout_hashes):,} excerpts that are held out of "
            f"{name}; pass text to --watch that data does not hold"
        )
    if (share := shared_runs(watched.heldout, blocks.train)) > MOST_SHARED:
        raise TextError(
            f"{data} trains on {share:.0%} of the text that is held out of {name}, by runs of {RUN} tokens; pass text "
            "to --watch that data does not hold"
        )


def shared_runs(watched: Tensor, train: Tensor) -> float:
    """Return the share of the runs of RUN tokens in watched text that training text holds too,
    whatever documents, blanks or rows they stand in.

    Runs that the watched text repeats, such as a template's system prompt, do not count.
    """
    runs, counts = np.unique(_hashed_runs(watched), return_counts=True)
    runs = runs[counts == 1]
    if not len(runs) or train.numel() < RUN:
        return 0.0
    is_shared = np.zeros(len(runs), bool)
    for part in train.flatten().split(COMPARED_AT_ONCE):
        others = _hashed_runs(part)
        positions = np.searchsorted(runs, others).clip(max=len(runs) - 1)
        is_shared[positions[runs[positions] == others]] = True
    return float(is_shared.mean())


def _hashed_runs(tokens: Tensor) -> np.ndarray:
    """Return a hash of every run of RUN successive tokens, uint64."""
    stream = tokens.flatten().numpy().astype(np.uint64)
    hashes = np.zeros(max(0, len(stream) - RUN + 1), np.uint64)
    for offset in range(RUN):  # polynomial, modulo 2^64
        hashes = hashes * np.uint64(0x9E3779B97F4A7C15) + stream[offset : offset + len(hashes)]
    return hashes


def check_vocabulary(blocks: Blocks, vocabulary: int, model: str) -> None:
    """Reject tokens that the model lacks, from a tokenizer of another. Raises: ModelError."""
    highest = max(int(part.max()) for part in (blocks.train, blocks.heldout) if part.numel())
    if highest >= vocabulary:
        raise ModelError(
            f"the tokenizer of {model} makes token {highest} of the text, but the model knows 0 to {vocabulary - 1}; "
            "put the tokenizer that belongs to the model into its folder"
        )
