"""Reads text: a file or a dataset of the Hugging Face hub in, one document per row out.

Local files may be .txt, .jsonl, .json or .parquet, plain or compressed with gz, xz or zst. Any other name is a dataset
of the hub, which is streamed. A row holds a text, a conversation, or an instruction with its response. The tokenizer's
chat template turns the last two into a text whose loss mask selects what the assistant generates.
"""

import errno
import glob
import itertools
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ddp_text.templates import Message, Rendered, Templates
from ddp_vllm.cache import cache_folder, unwritable_cache
from ddp_vllm.errors import TextError, reading
from ddp_vllm.manifest import sha256
from ddp_vllm.provenance import split_sources

READERS = {".txt": "text", ".raw": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}
COMPRESSIONS = (".gz", ".xz", ".zst")
KINDS = f".txt/.jsonl/.json/.parquet (plain or {', '.join(COMPRESSIONS)})"
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
MAX_DEPTH = 100  # nested objects and lists in a line of JSON
ROWS_PER_BATCH = 32  # rows that are read and rendered at a time
INSTRUCTION = (("instruction", "prompt"), ("response", "output", "completion"), ("context", "input"))
"""Names of the columns for the question, the answer and the question's context; the first non-empty column is used."""
USED_COLUMNS = {"text", "conversations", "messages", *itertools.chain.from_iterable(INSTRUCTION)}
ROLES = {"system": "system"} | dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard"), "assistant")  # else user

_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)  # possessive: scans each byte once, unterminated strings too


@dataclass(frozen=True)
class Document:
    """A text, and which of its characters contribute to the loss."""

    text: str
    loss_mask: np.ndarray | None = None
    """bool [num_characters]; None: all characters, and the EOS after the text."""

    def __getitem__(self, characters: slice) -> "Document":
        """Return an excerpt."""
        return Document(self.text[characters], None if self.loss_mask is None else self.loss_mask[characters])


def sources_of(data: str) -> list[str]:
    """Return the names in a comma-separated list of texts, with three copies for `NAME:3`. Raises: TextError."""
    names = [name for name, turns in split_sources(data) for _ in range(turns)]
    if not all(names):
        raise TextError(f"data is {data!r}, where a name is missing; give hub datasets or files, separated by commas")
    return [os.path.normpath(name) if os.path.exists(name) else name for name in names]


def open_rows(name: str, column: str = "") -> Any:
    """Return the rows of a file as a `datasets.Dataset`, or those of a hub dataset as an `IterableDataset`.

    name: a path; or `name`, `name:configuration` or `name:configuration:split` on the hub.
    column: the column to read as `text`, if the source has columns.
    Raises: as `reading_text`.
    """
    import datasets

    path = Path(name)
    if path.exists() or _kind(path):
        rows = _read_file(path)
    else:
        hub_name, configuration, split = [*name.split(":", 2), "", ""][:3]
        rows = datasets.load_dataset(hub_name, configuration or None, split=split or "train", streaming=True)
    if not column or _kind(path) == "text":
        used = [name for name in rows.column_names or () if name in USED_COLUMNS]
        return rows.select_columns(used) if used else rows  # rows of thousands of columns take minutes to decode
    columns = rows.column_names or list(next(iter(rows), {}))  # a stream may not know its columns before it is read
    if column not in columns:
        raise TextError(f"{name} has no column {column}, only {', '.join(columns)}; name another with --text-column")
    return rows.select_columns([column]).rename_column(column, "text")


@contextmanager
def reading_text(data: str) -> Iterator[None]:
    """Raise TextError instead of the errors of `datasets` in the block, from pyarrow's to the hub's.

    Raises: OutputError instead if the disk that holds the cache of `datasets` is full.
    """
    with reading(data, TextError, f"give a hub dataset or a {KINDS} file", how=" as text"):
        try:
            yield
        except Exception as error:
            cause: BaseException | None = error
            while cause:
                if isinstance(cause, OSError) and cause.errno in DISK_FULL:
                    raise unwritable_cache(cache_folder(), cause) from error
                cause = cause.__cause__ or cause.__context__
            raise


def _kind(path: Path) -> str | None:
    suffixes = [suffix for suffix in path.suffixes if suffix not in COMPRESSIONS]
    return READERS.get(suffixes[-1]) if suffixes else None


def _read_file(path: Path) -> Any:
    import datasets

    if not path.is_file():
        raise TextError(f"{path} is not a file; give a {KINDS} file or a hub dataset")
    if path.stat().st_size == 0:
        raise TextError(f"{path} is empty; give a file with text")
    kind = _kind(path)
    if kind is None:
        raise TextError(f"{path} has an unknown ending {path.suffix!r}; give a {KINDS} file")
    options = {"sample_by": "document"} if kind == "text" else {}
    # `datasets` identifies a file by its name and time, a decompressed one by its name alone
    cache, file = str(cache_folder() / "datasets" / sha256(path)[:32]), str(path)
    datasets.disable_progress_bars()
    datasets.utils.logging.set_verbosity(datasets.utils.logging.CRITICAL)  # the error below repeats what it would log
    if kind != "text" and path.suffix in COMPRESSIONS:  # the Parquet reader requires a file that it can seek in
        file = datasets.DownloadManager(download_config=datasets.DownloadConfig(cache_dir=cache)).extract(file)
    if kind == "json":
        _check_depth(Path(file), path)
    read = getattr(datasets.Dataset, f"from_{kind}")  # load_dataset would tell the hub about every local file
    return read(glob.escape(file), cache_dir=cache, **options)  # otherwise a name with [ is taken for a pattern


def _check_depth(decompressed: Path, path: Path) -> None:
    """Reject lines that are nested so deeply that pyarrow's recursive reader would crash. Raises: TextError.

    Lines with few brackets pass unread; the reader itself rejects malformed JSON.
    """
    with open(decompressed, "rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.count(b"[") + line.count(b"{") <= MAX_DEPTH:
                continue
            without_strings = np.frombuffer(_STRING.sub(b"", line), np.uint8)
            opened = np.isin(without_strings, list(b"[{")).astype(np.int64)
            depths = (opened - np.isin(without_strings, list(b"]}"))).cumsum()
            if depths.max(initial=0) > MAX_DEPTH:
                raise TextError(f"{path}, line {number}: nested more than {MAX_DEPTH} deep; leave the line out")


def read_documents(rows: Any, templates: Templates, name: str) -> Iterator[Document]:
    """Yield the documents of a source in the order of its rows, a few of which are in memory at a time.

    rows: a `datasets.Dataset` or `IterableDataset`. templates: the chat template for conversations. name: of the
    source, for errors.
    Raises: as `reading_text`, `as_documents`.
    """
    with reading_text(name):
        for columns in rows.iter(batch_size=ROWS_PER_BATCH):
            batch = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
            yield from as_documents(batch, templates, name)


def as_documents(rows: Sequence[dict[str, Any]], templates: Templates, name: str) -> list[Document]:
    """Return the document of each row. A conversation that the chat template rejects becomes plain text.

    Raises: TextError, naming the source, if a row has neither text nor conversation; as `Templates.render`.
    """
    texts = [row["text"] if isinstance(row.get("text"), str) else None for row in rows]
    conversations = [_messages(row, name) if text is None else [] for row, text in zip(rows, texts, strict=True)]
    documents = []
    for text, conversation, rendered in zip(texts, conversations, _render(conversations, templates), strict=True):
        if rendered:
            documents.append(Document(rendered.text, _loss_mask(rendered)))
        else:
            plain = "\n\n".join(message["content"] for message in conversation)
            documents.append(Document(plain if text is None else text))
    return documents


def _render(conversations: Sequence[list[Message]], templates: Templates) -> list[Rendered | None]:
    """Render each conversation as it is, or with alternating roles if the chat template rejects it.

    Returns None for a conversation that is empty or rejected both times, and for all of them without a chat template.
    """
    found: list[Rendered | None] = [None] * len(conversations)
    for arrange in (list, _alternating) if templates.tokenizer.chat_template else ():
        arranged = {index: arrange(each) for index, each in enumerate(conversations) if not found[index]}
        arranged = {index: messages for index, messages in arranged.items() if messages}
        texts = templates.render(list(arranged.values())) if arranged else []
        for index, text in zip(arranged, texts, strict=True):
            found[index] = text
    return found


def _loss_mask(rendered: Rendered) -> np.ndarray | None:
    """Return the loss mask that selects the answers; None without an assistant: then all characters contribute."""
    if rendered.answers is None:
        return None
    loss_mask = np.zeros(len(rendered.text), dtype=bool)
    for start, stop in rendered.answers:
        loss_mask[start:stop] = True
    return loss_mask


def _messages(row: dict[str, Any], name: str) -> list[Message]:
    """Return the non-empty messages of a row. Raises: TextError, naming the source, if it has no column for them."""
    turns = row.get("conversations") or row.get("messages")
    if turns is None and (turns := _instruction(row)) is None:
        if row.keys() & {"text", "conversations", "messages"}:
            return []
        raise TextError(
            f"{name} has no column text, conversations or messages, nor instruction and response, only "
            f"{', '.join(row)[:200]}; name one with --text-column"
        )
    messages = [
        (turn.get("from") or turn.get("role"), _text(turn.get("value") or turn.get("content"))) for turn in turns
    ]
    return [{"role": ROLES.get(speaker, "user"), "content": content} for speaker, content in messages if content]


def _instruction(row: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Return question and answer of a row as in Dolly, Alpaca or a table of prompts.

    Returns [] if one of them is empty, and None if the row lacks these columns.
    """
    question, answer, context = (next((row[name] for name in names if row.get(name)), None) for names in INSTRUCTION)
    if not all(row.keys() & set(names) for names in INSTRUCTION[:2]):
        return None
    if not isinstance(question, str) or not isinstance(answer, str):
        return []
    content = f"{question}\n\n{context}" if isinstance(context, str) else question
    return [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]


def _text(content: str | list[dict[str, Any]] | None) -> str:
    """Return the text of a message, whose content may be a list of parts as in OpenAI's format."""
    if isinstance(content, list):
        return "\n\n".join(part["text"] for part in content if isinstance(part.get("text"), str))
    return content or ""


def _alternating(messages: list[Message]) -> list[Message]:
    """Drop the assistant's messages before the first question, and join neighbors of the same role."""
    rest = itertools.dropwhile(lambda message: message["role"] == "assistant", messages)
    return [
        {"role": role, "content": "\n\n".join(message["content"] for message in neighbors)}
        for role, neighbors in itertools.groupby(rest, key=lambda message: message["role"])
    ]
