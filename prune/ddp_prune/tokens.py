"""Text in, blocks of tokens out: read, shuffle, take excerpts, tokenise, pack, hold some out, cache.

A short run must not spend itself on the few documents it meets first. So documents take turns: each gives an excerpt of
about one block, then each another, until there is enough. Sources of different kinds take turns as well. Reading is
`datasets`' work: a hub name is streamed, a local file may be .txt, .jsonl, .json or .parquet, plain or compressed with
gz, xz or zst. The cache is keyed by content: same text, tokenizer and sizes, same file.
Where the tokenizer begins every text with BOS, so does every block: models of such a family (Llama-3, Mistral, Gemma)
never saw a text without it, and lean on it as the place where attention goes that finds nothing.
"""

import glob
import hashlib
import itertools
import json
import math
import os
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ddp_vllm.registry import cache_folder, check_cache, unwritable_cache
from jinja2 import TemplateError

from ddp_vllm.errors import ModelError, TextError

READERS = {".txt": "text", ".raw": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}
COMPRESSIONS = (".gz", ".xz", ".zst")
EXCERPT = 5  # characters for each token of a block; English has between 4 and 5 a token
NEIGHBOURS = 1000  # documents of a streamed dataset that are shuffled among each other
ROLES = {"system": "system"} | dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard"), "assistant")  # else user


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Packed text."""

    train: torch.Tensor
    """int64 [num_blocks, seq_len]"""
    heldout: torch.Tensor
    """int64 [heldout_blocks, seq_len], of documents that `train` does not hold; of other excerpts if they are few."""
    found: int
    """Tokens read; reading stops when the run has enough."""


def load_tokenizer(model: str) -> Any:
    """Return a model's tokenizer. Raises: ModelError if it has none."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        raise ModelError(
            f"{model} has no tokenizer that loads ({reason}); put tokenizer.json beside the model"
        ) from error
    if tokenizer.eos_token_id is None:
        raise ModelError(f"the tokenizer of {model} has no EOS token, which separates documents; set eos_token in it")
    return tokenizer


def load_blocks(
    data: str, tokenizer: Any, *, seq_len: int, train_blocks: int, heldout_blocks: int, min_train_blocks: int, seed: int
) -> Blocks:
    """Read, tokenise and pack up to `train_blocks + heldout_blocks` blocks of `seq_len` tokens.

    Excerpts are joined with EOS between them and cut into blocks. A run longer than the text goes over it again.
    With a tokenizer that begins every text with BOS, a block is BOS and `seq_len - 1` tokens of text; else text alone.
    Raises: TextError if the text cannot be read, holds fewer than `min_train_blocks + heldout_blocks` blocks, or has a
        source of which all is held out; OutputError if the cache cannot be written.
    """
    sizes = (seq_len, train_blocks, heldout_blocks, min_train_blocks, seed)
    path = cache_folder() / "tokens" / f"{_key(data, tokenizer, *sizes)}.npy"
    blocks = _saved(path)
    if blocks is None:
        check_cache()  # `datasets` would blame the text
        begin = leading_bos(tokenizer)
        width = seq_len - len(begin)  # of a block's text
        excerpts = read_excerpts(data, tokenizer, seed, size=EXCERPT * seq_len, few=4 * heldout_blocks)
        heldout, last = np.empty(0, np.int32), 0
        while len(heldout) < heldout_blocks * width and (numbered := next(excerpts, None)):
            last, text = max(last, numbered[0]), numbered[1]
            heldout = np.concatenate([heldout, _pack([text], tokenizer, heldout_blocks * width - len(heldout))])
        names, learned = sources_of(data), set[str]()

        def others() -> Iterator[str]:
            for number, text in excerpts:
                if number > last:
                    learned.add(names[number % len(names)])  # as `read_excerpts` numbers the turns of a round
                    yield text

        train = _pack(others(), tokenizer, train_blocks * width)
        found, need = len(heldout) + len(train), (min_train_blocks + heldout_blocks) * width
        if len(train) < min_train_blocks * width:
            raise TextError(
                f"{data} holds {found:,} tokens, but one step and the held-out text need {need:,}; "
                "give more text or lower --batch-size or --seq-len"
            )
        if short := [name for name in names if name not in learned]:
            raise TextError(
                f"all of {short[0]} is held out, so nothing of it would be learned on; give more of it, leave it out, "
                "or set a lower heldout_blocks in a recipe"
            )
        blocks = np.concatenate([heldout, train[: len(train) // width * width]]).reshape(-1, width)
        blocks = np.hstack([np.tile(np.asarray(begin, np.int32), (len(blocks), 1)), blocks])
        _save(path, blocks)
    tokens = torch.from_numpy(blocks.astype(np.int64))
    return Blocks(train=tokens[heldout_blocks:], heldout=tokens[:heldout_blocks], found=blocks.size)


def leading_bos(tokenizer: Any) -> list[int]:
    """Return [BOS] if the tokenizer begins every text with it, else []."""
    bos = tokenizer.bos_token_id
    return [bos] if bos is not None and tokenizer("x")["input_ids"][:1] == [bos] else []


def read_excerpts(data: str, tokenizer: Any, seed: int, *, size: int, few: int) -> Iterator[tuple[int, str]]:
    """Yield the number of a document and an excerpt of it.

    `data` names sources, separated by commas: hub datasets or files. They take turns, an excerpt each; one that is
    named twice has two turns, and one that has no more leaves them to the others.
    A row is a document: its `text`, or its `conversations`/`messages` rendered with the tokenizer's chat template; as
    plain text if there is none, or if it refuses those turns even when they begin with the user and alternate.
    Documents of a source are shuffled by `seed` (those of a streamed hub dataset among their neighbours) and take
    turns, `size` characters each time; of fewer than `few`, every piece counts as a document. Raises: TextError.
    """
    turns = sources_of(data)
    places = {name: [place for place, other in enumerate(turns) if other == name] for name in turns}
    excerpts = {
        name: _read_source(name, tokenizer, seed, size=size, few=math.ceil(few * len(own) / len(turns)))
        for name, own in places.items()
    }
    found: set[str] = set()
    while excerpts:
        for name in turns:
            if name not in excerpts:
                continue
            numbered = next(excerpts[name], None)
            if numbered is None:
                if name not in found and len(places) > 1:  # one alone is too short, as `load_blocks` will say
                    raise TextError(f"{name} holds no text; leave it out, or give another file")
                del excerpts[name]
                continue
            found.add(name)
            round_, turn = divmod(numbered[0], len(places[name]))  # of the document's first excerpt
            yield round_ * len(turns) + places[name][turn], numbered[1]


def sources_of(data: str) -> list[str]:
    """Return the names in a comma-separated list; a file's own name may hold commas. Raises: TextError."""
    names = [data] if os.path.exists(data) else [name.strip() for name in data.split(",")]
    if not all(names):
        raise TextError(f"data is {data!r}, where a name is missing; give hub datasets or files, separated by commas")
    return [os.path.normpath(name) if os.path.exists(name) else name for name in names]


def _read_source(data: str, tokenizer: Any, seed: int, *, size: int, few: int) -> Iterator[tuple[int, str]]:
    """Yield numbered excerpts of one source. Raises: TextError."""
    import datasets

    path = Path(data)
    local = bool(path.exists() or _kind(path))
    try:
        if local:
            rows = _read_file(path).shuffle(seed=seed)
        else:
            name, _, configuration = data.partition(":")
            rows = datasets.load_dataset(name, configuration or None, split="train", streaming=True)
            rows = rows.shuffle(seed=seed, buffer_size=NEIGHBOURS)

        places: list[int] = []  # of the documents among the rows

        def documents() -> Iterator[str]:
            for place, row in enumerate(rows):
                if text := _document(row, tokenizer, data):
                    places.append(place)
                    yield text

        def again(numbers: list[int]) -> Iterator[str]:
            wanted = {places[number] for number in numbers}
            read = ((place, rows[place]) for place in sorted(wanted)) if local else enumerate(rows)
            return (_document(row, tokenizer, data) for place, row in read if place in wanted)

        rest = documents()
        first = list(itertools.islice(rest, few))
        if len(first) < few:
            pieces = [piece for text in first for piece in _cut(text, size)]
            random.Random(seed).shuffle(pieces)
            yield from enumerate(pieces)
        else:
            yield from _take_turns(itertools.chain(first, rest), again, size, seed)
    except TextError:
        raise
    except Exception as error:  # datasets raises dozens of kinds, from pyarrow's to the hub's
        reason = " ".join(str(error.__cause__ or error).split())[:200]
        raise TextError(f"{data} cannot be read as text ({reason}); give a hub dataset or a {_kinds()} file") from error


def _take_turns(
    documents: Iterable[str], again: Callable[[list[int]], Iterable[str]], size: int, seed: int
) -> Iterator[tuple[int, str]]:
    """Yield an excerpt of every document, then another of every one that has more, each from a place of its own on.

    `again` returns the documents of these numbers; the others, often all but a few long ones, are not read again.
    """
    numbers: Iterable[int] = itertools.count()
    for turn in itertools.count():
        longer = []
        for number, text in zip(numbers, documents, strict=False):
            pieces = _cut(text, size)
            yield number, pieces[(random.Random(f"{seed} {number}").randrange(len(pieces)) + turn) % len(pieces)]
            if turn + 1 < len(pieces):
                longer.append(number)
        if not longer:
            return
        numbers, documents = longer, again(longer)


def _cut(text: str, size: int) -> list[str]:
    """Cut a text at blanks into equal pieces of about `size` characters; the empty text into none."""
    count = max(1, round(len(text) / size))
    borders = [0, *(_next_blank(text, len(text) * i // count, size // 2) for i in range(1, count)), len(text)]
    return [text[start:stop] for start, stop in itertools.pairwise(borders) if start < stop]


def _next_blank(text: str, start: int, within: int) -> int:
    blank = text.find(" ", start, start + within)
    return start if blank < 0 else blank


def _kinds() -> str:
    return "/".join(kind for kind in READERS if kind != ".raw") + f" (plain or {', '.join(COMPRESSIONS)})"


def _kind(path: Path) -> str | None:
    suffixes = [suffix for suffix in path.suffixes if suffix not in COMPRESSIONS]
    return READERS.get(suffixes[-1]) if suffixes else None


def _read_file(path: Path) -> Any:
    import datasets

    if not path.is_file():
        raise TextError(f"{path} is not a file; give a {_kinds()} file or a hub dataset")
    if path.stat().st_size == 0:
        raise TextError(f"{path} is empty; give a file with text")
    kind = _kind(path)
    if kind is None:
        raise TextError(f"{path} has an unknown ending {path.suffix!r}; give a {_kinds()} file")
    options = {"sample_by": "document"} if kind == "text" else {}
    # datasets tells files apart by name and time, those it unpacks by name alone
    cache, file = str(cache_folder() / "datasets" / _content(path).hex()[:32]), str(path)
    datasets.disable_progress_bars()
    datasets.utils.logging.set_verbosity(datasets.utils.logging.CRITICAL)  # what it logs, the error below says
    if kind == "parquet" and path.suffix in COMPRESSIONS:  # its reader needs a file it can seek in
        file = datasets.DownloadManager(download_config=datasets.DownloadConfig(cache_dir=cache)).extract(file)
    read = getattr(datasets.Dataset, f"from_{kind}")  # load_dataset would tell the hub about every local file
    return read(glob.escape(file), cache_dir=cache, **options)  # a name with [ would be taken for a pattern


def _document(row: dict[str, Any], tokenizer: Any, data: str) -> str:
    if isinstance(row.get("text"), str):
        return str(row["text"])
    turns = row.get("conversations") or row.get("messages")
    if turns is None:
        if "text" in row or "conversations" in row or "messages" in row:
            return ""
        raise TextError(f"{data} has no column text, conversations or messages, only {', '.join(row)}; rename one")
    messages = [
        {
            "role": ROLES.get(turn.get("from") or turn.get("role"), "user"),
            "content": _words(turn.get("value") or turn.get("content")),
        }
        for turn in turns
    ]
    messages = [message for message in messages if message["content"]]
    if tokenizer.chat_template:
        for arrange in (list, _alternating):
            with suppress(TemplateError):  # what a template raises that refuses these roles in this order
                if turns := arrange(messages):
                    return str(tokenizer.apply_chat_template(turns, tokenize=False))
    return "\n\n".join(message["content"] for message in messages)


def _words(content: str | list[dict[str, Any]] | None) -> str:
    """Return what a turn says; of a list of parts, as OpenAI's format has them, those that are text."""
    if isinstance(content, list):
        return "\n\n".join(part["text"] for part in content if isinstance(part.get("text"), str))
    return content or ""


def _alternating(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Leave out what the assistant says first, and make one turn of neighbours in the same role."""
    rest = itertools.dropwhile(lambda message: message["role"] == "assistant", messages)
    return [
        {"role": role, "content": "\n\n".join(message["content"] for message in turn)}
        for role, turn in itertools.groupby(rest, key=lambda message: message["role"])
    ]


def _pack(documents: Iterable[str], tokenizer: Any, wanted: int) -> np.ndarray:
    """Tokenise documents until `wanted` tokens are there, EOS after each; int32."""
    stream: list[np.ndarray] = []
    batch: list[str] = []
    total = 0
    for document in documents:
        batch.append(document)
        if len(batch) == 64:
            total += _tokenise(batch, tokenizer, stream)
            batch = []
            if total >= wanted:
                break
    if batch:
        _tokenise(batch, tokenizer, stream)
    return np.concatenate(stream)[:wanted] if stream else np.empty(0, np.int32)


def _tokenise(batch: list[str], tokenizer: Any, stream: list[np.ndarray]) -> int:
    ids = tokenizer(batch, add_special_tokens=False, verbose=False)["input_ids"]
    arrays = [np.asarray([*document, tokenizer.eos_token_id], np.int32) for document in ids]
    stream.extend(arrays)
    return sum(map(len, arrays))


def _key(data: str, tokenizer: Any, *sizes: int) -> str:
    """Hash of what the blocks depend on: the files' bytes (a hub dataset's name), the vocabulary, BOS, the sizes."""
    settings = [EXCERPT, NEIGHBOURS, sizes, tokenizer.eos_token_id, tokenizer.chat_template, leading_bos(tokenizer)]
    digest = hashlib.sha256(json.dumps(settings).encode())
    names = sources_of(data)
    if len(names) > 1:
        digest.update(json.dumps([Path(name).name for name in names]).encode())
    for name in names:
        path = Path(name)
        if path.is_file():
            digest.update(_content(path))
        digest.update(path.name.encode() if path.is_file() else name.encode())
    backend = getattr(tokenizer, "backend_tokenizer", None)
    digest.update((backend.to_str() if backend is not None else json.dumps(sorted(tokenizer.get_vocab()))).encode())
    return digest.hexdigest()[:32]


def _content(path: Path) -> bytes:
    """Return a hash of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def _saved(path: Path) -> np.ndarray | None:
    """Return what `_save` wrote; None if there is nothing, or what a machine that lost its power left of it."""
    try:
        blocks: np.ndarray = np.load(path)
    except (OSError, ValueError, EOFError):
        return None
    return blocks


def _save(path: Path, blocks: np.ndarray) -> None:
    temporary = path.with_suffix(f".{os.getpid()}.tmp.npy")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(temporary, blocks.astype(np.int32))
        os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise unwritable_cache(cache_folder(), error) from error
