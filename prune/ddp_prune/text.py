"""Text in, blocks of tokens out: read, hold some out, take excerpts in turn, tokenise, pack, cache.

The documents of lowest hash are held out, so they are the same for any seed and any number of steps.
A short run must not spend itself on the few documents it meets first. So documents take turns: each gives an excerpt of
about one block, then each another. Sources of different kinds take turns as well.
Where the tokenizer begins every text with BOS, so does every block: models of such a family (Llama-3, Mistral, Gemma)
never saw a text without it, and lean on it as the place where attention goes that finds nothing.
"""

import hashlib
import io
import itertools
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ddp_prune.documents import content_of, documents, open_rows, reading_text
from ddp_prune.templates import BEGIN, END, Templates
from ddp_vllm.cache import cache_folder, check_cache, unwritable_cache
from ddp_vllm.errors import ModelError, TextError, is_of_a_library
from ddp_vllm.output import atomic_file
from ddp_vllm.remote_code.files import read_bytes

LARGEST_CACHE = 1 << 36  # bytes
VERSION = 5  # of what cached blocks mean
EXCERPT = 5  # characters for each token of a block; English has between 4 and 5 a token
NEIGHBOURS = 1000  # documents that take turns; `datasets` shuffles those of a stream among as many
FEW = 4  # times the held-out text; where one excerpt of each document is less, every piece counts as a document
TOGETHER = 32  # rows that are read and arranged by the chat template at a time
POOL = 16  # times the held-out text; what is read of a stream to choose it from


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Packed text."""

    train: torch.Tensor
    """int64 [num_blocks, seq_len]"""
    scored: torch.Tensor
    """bool [num_blocks, seq_len]: in conversations, the tokens an assistant says and the one that ends its turn. All of
    other text, and with a tokenizer that does not tell where its tokens are."""
    heldout: torch.Tensor
    """int64 [heldout_blocks, seq_len], of documents that `train` does not hold; of other excerpts if they are few."""
    found: int
    """Tokens read; reading stops when the run has enough."""


def load_tokenizer(model: str) -> Any:
    """Return a model's tokenizer. Raises: ModelError if it has none."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
        tokenizer("A word, and another.", verbose=False)  # some settings are only read then
    except BaseException as error:
        if not is_of_a_library(error):
            raise
        reason = str(error).strip().split("\n")[0]
        raise ModelError(
            f"{model} has no tokenizer that loads ({reason}); put tokenizer.json beside the model"
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
    """Read, tokenise and pack up to `train_blocks + heldout_blocks` blocks of `seq_len` tokens.

    data: hub datasets or files, separated by commas, which take turns; `NAME:3` has three, and so has one named thrice.
    text_column: as in a `Recipe`.
    Excerpts are joined with EOS between them and cut into blocks. A run longer than the text goes over it again.
    With a tokenizer that begins every text with BOS, a block is BOS and `seq_len - 1` tokens of text; else text alone.
    Raises: TextError if the text cannot be read, holds fewer than `min_train_blocks + heldout_blocks` blocks, or has a
        source of which all is held out; OutputError if the cache cannot be written.
    """
    sizes = (seq_len, train_blocks, heldout_blocks, min_train_blocks, seed, text_column)
    with reading_text(data):
        path = cache_folder() / "tokens" / f"{_key(data, tokenizer, *sizes)}.tokens"
    blocks = saved_blocks(path)
    if blocks is None:
        check_cache()  # `datasets` would blame the text
        begin = leading_bos(tokenizer)
        width = seq_len - len(begin)  # of a block's text
        wanted = heldout_blocks * width, train_blocks * width
        heldout, train = _read(data, text_column, tokenizer, EXCERPT * seq_len, *wanted, seed)
        found, need = len(heldout) + len(train), (min_train_blocks + heldout_blocks) * width
        if len(train) < min_train_blocks * width or len(heldout) < heldout_blocks * width:
            raise TextError(
                f"{data} holds {found:,} tokens, but one step and the held-out text need {need:,}; "
                "give more text or lower --batch-size or --seq-len"
            )
        blocks = np.concatenate([heldout, train[: len(train) // width * width]]).reshape(-1, width)
        blocks = np.hstack([np.tile(np.asarray(begin, np.int32), (len(blocks), 1)), blocks])
        save_blocks(path, blocks)
    stored = torch.from_numpy(blocks.astype(np.int64))
    tokens, scored = torch.where(stored < 0, ~stored, stored), stored >= 0
    return Blocks(
        train=tokens[heldout_blocks:],
        scored=scored[heldout_blocks:],
        heldout=tokens[:heldout_blocks],
        found=blocks.size,
    )


def counting(blocks: Blocks, learn_from: str, data: str, say: Callable[[str], None]) -> torch.Tensor | None:
    """Return which tokens' cross-entropy counts, bool [num_blocks, seq_len]; None where all do.

    learn_from: `assistant` or else all, as in a `Recipe`. `say` takes a line for the user.
    Raises: TextError if none would count.
    """
    if learn_from != "assistant":
        return None
    if blocks.scored.all():
        say(f"no conversations are told apart in {data}, so all of it counts; add some after a comma")
        return None
    if not blocks.scored[:, 1:].any():
        raise TextError(f"{data} holds nothing that an assistant says; try --learn-from all")
    return blocks.scored


def check_vocabulary(blocks: Blocks, vocabulary: int, model: str) -> None:
    """Refuse tokens that a model does not know, which a tokenizer of another model makes. Raises: ModelError."""
    highest = max(int(part.max()) for part in (blocks.train, blocks.heldout) if part.numel())
    if highest >= vocabulary:
        raise ModelError(
            f"the tokenizer of {model} makes token {highest} of the text, but the model knows 0 to {vocabulary - 1}; "
            "put the tokenizer that belongs to the model beside it"
        )


def leading_bos(tokenizer: Any) -> list[int]:
    """Return [BOS] if the tokenizer begins every text with it, else []."""
    bos = tokenizer.bos_token_id
    return [bos] if bos is not None and tokenizer("x")["input_ids"][:1] == [bos] else []


def sources_of(data: str) -> list[str]:
    """Return the names in a comma-separated list, `NAME:3` three times; a file's own name may hold commas and colons.

    Raises: TextError.
    """
    given = [data] if os.path.exists(data) else [name.strip() for name in data.split(",")]
    names = []
    for name in given:
        plain, _, turns = name.rpartition(":")
        counted = plain and re.fullmatch("[1-9][0-9]?", turns) and not os.path.exists(name)
        names += [plain] * int(turns) if counted else [name]
    if not all(names):
        raise TextError(f"data is {data!r}, where a name is missing; give hub datasets or files, separated by commas")
    return [os.path.normpath(name) if os.path.exists(name) else name for name in names]


def _read(
    data: str, column: str, tokenizer: Any, size: int, heldout_tokens: int, train_tokens: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens to hold out and tokens to learn on; sources and their documents take turns."""
    names = sources_of(data)
    turns = {name: names.count(name) for name in names}
    rows, by_hash = dict[str, Any](), dict[str, Any]()
    with Templates(tokenizer) as templates, reading_text(data):
        for name, count in turns.items():
            with reading_text(name):
                sizes = {"size": size, "heldout": math.ceil(EXCERPT * heldout_tokens * count / len(names))}
                rows[name], by_hash[name] = open_source(name, templates, seed, **sizes, column=column)
        tokens, hidden = hold_out(take_turns(by_hash, turns), tokenizer, size, heldout_tokens)
        for name in turns if len(turns) > 1 else ():  # one alone is too short, as `load_blocks` will say
            _check_rest(name, (cut(row["text"], size) for row in by_hash[name]), hidden)
        excerpts = {name: excerpts_of(rows[name], size, seed, hidden) for name in turns}
        return tokens, pack(take_turns(excerpts, turns), tokenizer, train_tokens)


def open_source(name: str, templates: Templates, seed: int, *, size: int, heldout: int, column: str) -> tuple[Any, Any]:
    """Return the documents of a source, shuffled by `seed`, and those that may be held out, of lowest hash first.

    Both are `IterableDataset`s of one column, text. Of a stream, only the first documents may be held out.
    size: characters of an excerpt. heldout: characters to hold out; where `FEW` applies, pieces count as documents.
    """
    import datasets

    def texts(rows: Any) -> Any:
        def of(batch: dict[str, list[Any]]) -> dict[str, list[str]]:
            each = [dict(zip(batch, row, strict=True)) for row in zip(*batch.values(), strict=True)]
            return {"text": documents(each, templates, name)}

        stream = rows.to_iterable_dataset() if isinstance(rows, datasets.Dataset) else rows
        return stream.map(of, batched=True, batch_size=TOGETHER).select_columns(["text"])

    rows = pool = open_rows(name, column)
    if isinstance(rows, datasets.IterableDataset):
        pool = datasets.Dataset.from_dict({"text": _first(texts(rows), size, POOL * heldout)})
    first = _first(texts(pool), size, FEW * heldout)
    if sum(min(len(text), size) for text in first) < FEW * heldout:
        pieces = [piece for text in first for piece in cut(text, size)]
        rows = pool = datasets.Dataset.from_dict({"text": pieces or [""]})  # an empty one cannot be streamed
    places = {hash_of(row["text"]): place for place, row in enumerate(texts(pool))}
    return texts(rows.shuffle(seed=seed)), texts(pool.select([places[number] for number in sorted(places)]))


def _first(rows: Iterable[dict[str, str]], size: int, enough: int) -> list[str]:
    """Return the first documents, until one excerpt of each makes `enough` characters."""
    first, found = [], 0
    for row in rows:
        first.append(row["text"])
        found += min(len(row["text"]), size)
        if found >= enough:
            break
    return first


def hash_of(text: str) -> int:
    """Return 64 bits of a text's SHA-256."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8])


def take_turns(texts: dict[str, Any], turns: dict[str, int]) -> Iterator[str]:
    """Yield texts of `IterableDataset`s, `turns` of each in a row; one that ends leaves the turns to the others."""
    import datasets

    several = datasets.Features({"text": datasets.List(datasets.Value("large_string"))})
    batches = [
        stream.map(lambda batch: {"text": [batch["text"]]}, batched=True, batch_size=turns[name], features=several)
        for name, stream in texts.items()
    ]
    for batch in datasets.interleave_datasets(batches, stopping_strategy="all_exhausted_without_replacement"):
        yield from batch["text"]


def hold_out(documents: Iterable[str], tokenizer: Any, size: int, wanted: int) -> tuple[np.ndarray, set[str]]:
    """Return up to `wanted` tokens, an excerpt of each document, and all pieces of these documents."""
    tokens, hidden = np.empty(0, np.int32), set[str]()
    for text in documents if wanted else ():
        pieces = cut(text, size)
        if not hidden.issuperset(pieces):  # else it is a copy of one in another source
            hidden.update(pieces)
            excerpt = pieces[hash_of(text) % len(pieces)]
            tokens = np.concatenate([tokens, pack([excerpt], tokenizer, wanted - len(tokens))])
        if len(tokens) >= wanted:
            break
    return tokens, hidden


def _check_rest(name: str, documents: Iterable[list[str]], hidden: set[str]) -> None:
    """Refuse a source of which nothing would be learned on. Raises: TextError."""
    found = False
    for pieces in documents:
        if not hidden.issuperset(pieces):
            return
        found = found or bool(pieces)
    if not found:
        raise TextError(f"{name} holds no text; leave it out, or give another file")
    raise TextError(
        f"all of {name} is held out, so nothing of it would be learned on; give more of it, leave it out, "
        "or set a lower heldout_blocks in a recipe"
    )


def excerpts_of(documents: Any, size: int, seed: int, hidden: set[str]) -> Any:
    """Return a piece of every document, then another of every one that has more, but none that is hidden.

    Documents do not all begin at their beginning. They take turns in thousands, so that each is read once.
    """

    def in_turn(batch: dict[str, list[str]]) -> dict[str, list[str]]:
        columns = []
        for text in batch["text"]:
            pieces = cut(text, size)
            start = (hash_of(text) + seed) % max(1, len(pieces))
            columns.append(pieces[start:] + pieces[:start])
        across = itertools.chain.from_iterable(itertools.zip_longest(*columns))
        return {"text": [piece for piece in across if piece is not None and piece not in hidden]}

    return documents.map(in_turn, batched=True, batch_size=NEIGHBOURS)


def cut(text: str, size: int) -> list[str]:
    """Cut a text at blanks into equal pieces of about `size` characters; the empty text into none, a piece into one.

    A piece of a marked text begins with the mark that holds there.
    """
    count = max(1, round(len(text) / size))
    starts = (len(text) * number // count for number in range(1, count))
    blanks = ((start, text.find(" ", start, start + size // 5)) for start in starts)
    borders = [0, *(start if blank < 0 else blank for start, blank in blanks), len(text)]
    pieces = [(start, text[start:stop]) for start, stop in itertools.pairwise(borders) if start < stop]
    if BEGIN not in text and END not in text:
        return [piece for _, piece in pieces]
    says = [BEGIN if text.rfind(BEGIN, 0, start) > text.rfind(END, 0, start) else END for start, _ in pieces]
    return [piece if piece[0] in (BEGIN, END) else mark + piece for mark, (_, piece) in zip(says, pieces, strict=True)]


def pack(texts: Iterable[str], tokenizer: Any, wanted: int) -> np.ndarray:
    """Return the tokens of texts, EOS after each, up to `wanted`; int32, ~n for a token n that is not scored."""
    rest, found, stream = iter(texts), 0, [np.empty(0, np.int32)]
    while found < wanted and (batch := list(itertools.islice(rest, 64))):
        stream += encode(batch, tokenizer)
        found += sum(map(len, stream[-len(batch) :]))
    return np.concatenate(stream)[:wanted]


def encode(texts: list[str], tokenizer: Any) -> list[np.ndarray]:
    """Return the tokens of each text and EOS, as `pack` joins them."""
    parts = [re.split(f"([{BEGIN}{END}])", text) for text in texts]  # text, mark, text, …, mark, text
    tells = getattr(tokenizer, "is_fast", False)  # where in the text its tokens are
    options = {"add_special_tokens": False, "verbose": False, "return_offsets_mapping": tells}
    encoded = tokenizer(["".join(each[::2]) for each in parts], **options)
    found = []
    for number, each in enumerate(parts):
        tokens = np.asarray([*encoded["input_ids"][number], tokenizer.eos_token_id], np.int32)
        if len(each) > 1 and tells:
            said = [np.full(len(text), mark == BEGIN) for mark, text in zip([END, *each[1::2]], each[::2], strict=True)]
            starts, stops = np.asarray(encoded["offset_mapping"][number], np.int64).reshape(-1, 2).T
            starts = np.minimum(starts, np.append(0, stops)[:-1])  # with blanks before, which offsets may leave out
            starts = np.minimum(starts, np.maximum(stops - 1, 0))
            said_C = np.concatenate([*said, [False]])
            count_C = np.append(0, said_C.cumsum())  # in the characters before each
            scored = (count_C[stops] > count_C[starts]) | said_C[starts - 1]  # or the first token after an answer
            tokens = np.where(np.append(scored, False), tokens, ~tokens)
        found.append(tokens)
    return found


def _key(data: str, tokenizer: Any, *sizes: int | str) -> str:
    """Hash of what the blocks depend on: the files' bytes (a hub dataset's name), the vocabulary, BOS, the sizes."""
    settings = [VERSION, sizes, tokenizer.eos_token_id, tokenizer.chat_template, leading_bos(tokenizer)]
    for path in map(Path, sources_of(data)):
        settings.append([path.name, content_of(path)] if path.is_file() else str(path))
    backend = getattr(tokenizer, "backend_tokenizer", None)
    vocabulary = backend.to_str() if backend is not None else json.dumps(sorted(tokenizer.get_vocab()))
    return hashlib.sha256((json.dumps(settings) + vocabulary).encode()).hexdigest()[:32]


def saved_blocks(path: Path) -> np.ndarray | None:
    """Return what `save_blocks` wrote; None if there is nothing, or it is damaged."""
    try:
        digest, content = (stored := read_bytes(path, LARGEST_CACHE))[:32], stored[32:]
    except OSError:
        return None
    return np.load(io.BytesIO(content)) if hashlib.sha256(content).digest() == digest else None


def save_blocks(path: Path, blocks: np.ndarray) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        content = io.BytesIO()
        np.save(content, blocks.astype(np.int32))
        with atomic_file(path, private=True) as temporary, open(temporary, "wb") as file:
            file.write(hashlib.sha256(content.getbuffer()).digest())
            file.write(content.getbuffer())
    except OSError as error:
        raise unwritable_cache(cache_folder(), error) from error
