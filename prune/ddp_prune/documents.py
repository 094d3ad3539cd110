"""Rows of any supported text as documents: a file or a hub dataset in, one text a row out.

A local file may be .txt, .jsonl, .json or .parquet, plain or compressed with gz, xz or zst; any other name is a dataset
of the hub, which is streamed. A row has a text, or a conversation, which the tokenizer's chat template makes a text. So
has a row with an instruction and what was answered.
"""

import errno
import glob
import hashlib
import itertools
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ddp_prune.templates import Templates
from ddp_vllm.cache import cache_folder, unwritable_cache
from ddp_vllm.errors import TextError, reading

READERS = {".txt": "text", ".raw": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}
COMPRESSIONS = (".gz", ".xz", ".zst")
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What the system says of a disk that is full, or of a file that is as large as it may be."""
DEEPEST = 100  # objects and lists in each other, in a line of JSON
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)  # or one that does not end: every byte is looked at once
INSTRUCTION = (("instruction", "prompt"), ("response", "output", "completion"), ("context", "input"))
"""Columns of what is asked, answered, and given beside the question; the first that says something is taken."""
USED = {"text", "conversations", "messages", *itertools.chain.from_iterable(INSTRUCTION)}
ROLES = {"system": "system"} | dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard"), "assistant")  # else user


def open_rows(name: str, column: str = "") -> Any:
    """Return the rows of a file, a `datasets.Dataset`, or of a hub dataset, an `IterableDataset` that is streamed.

    name: a path; or `name`, `name:configuration` or `name:configuration:split` on the hub. column: what becomes `text`,
    if there are columns.
    Raises: as in `reading_text`.
    """
    import datasets

    path = Path(name)
    if path.exists() or _kind(path):
        rows = _read_file(path)
    else:
        hub_name, configuration, split = [*name.split(":", 2), "", ""][:3]
        rows = datasets.load_dataset(hub_name, configuration or None, split=split or "train", streaming=True)
    if not column or _kind(path) == "text":
        used = [name for name in rows.column_names or () if name in USED]
        return rows.select_columns(used) if used else rows  # rows of thousands of columns take minutes to decode
    columns = rows.column_names or list(next(iter(rows), {}))  # a stream may not know before it is read
    if column not in columns:
        raise TextError(f"{name} has no column {column}, only {', '.join(columns)}; name another with --text-column")
    return rows.select_columns([column]).rename_column(column, "text")


@contextmanager
def reading_text(data: str) -> Iterator[None]:
    """Raise TextError for what `datasets` raises in the block, from pyarrow's errors to the hub's.

    Raises: OutputError instead where the disk that holds the cache of `datasets` is full.
    """
    with reading(data, TextError, f"give a hub dataset or a {_kinds()} file", how=" as text"):
        try:
            yield
        except Exception as error:
            cause: BaseException | None = error
            while cause:
                if isinstance(cause, OSError) and cause.errno in FULL:
                    raise unwritable_cache(cache_folder(), cause) from error
                cause = cause.__cause__ or cause.__context__
            raise


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
    cache, file = str(cache_folder() / "datasets" / content_of(path)), str(path)
    datasets.disable_progress_bars()
    datasets.utils.logging.set_verbosity(datasets.utils.logging.CRITICAL)  # what it logs, the error below says
    if kind != "text" and path.suffix in COMPRESSIONS:  # parquet's reader needs a file it can seek in
        file = datasets.DownloadManager(download_config=datasets.DownloadConfig(cache_dir=cache)).extract(file)
    if kind == "json":
        _check_depth(Path(file), path)
    read = getattr(datasets.Dataset, f"from_{kind}")  # load_dataset would tell the hub about every local file
    return read(glob.escape(file), cache_dir=cache, **options)  # a name with [ would be taken for a pattern


def _check_depth(unpacked: Path, path: Path) -> None:
    """Refuse lines nested so deeply that pyarrow's reader, which calls itself, would end the process.

    A line with few brackets is not looked at; a wrong one is left to the reader. Raises: TextError.
    """
    with open(unpacked, "rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.count(b"[") + line.count(b"{") <= DEEPEST:
                continue
            bare = np.frombuffer(_STRING.sub(b"", line), np.uint8)
            steps = np.isin(bare, list(b"[{")).astype(np.int64) - np.isin(bare, list(b"]}"))
            if steps.cumsum().max(initial=0) > DEEPEST:
                raise TextError(f"{path}, line {number}: nested more than {DEEPEST} deep; leave the line out")


def content_of(path: Path) -> str:
    """Return a hash of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:32]


def documents(rows: Sequence[dict[str, Any]], templates: Templates, data: str) -> list[str]:
    """Return the text of each row, or its conversation by the chat template; as plain text where that refuses it.

    What the assistant generates stands between BEGIN and END where the template arranged it.
    Raises: TextError, naming `data`, if a row has neither; as `Templates.render`.
    """
    found: list[Any] = [str(row["text"]) if isinstance(row.get("text"), str) else None for row in rows]
    chats = {place: _messages(rows[place], data) for place, text in enumerate(found) if text is None}
    if templates.tokenizer.chat_template:
        for arrange in (list, _alternating):
            asked = {place: turns for place, chat in chats.items() if found[place] is None and (turns := arrange(chat))}
            if asked:
                texts = templates.render(list(asked.values()), mark=True)
                for place, text in zip(asked, texts, strict=True):
                    found[place] = text
    for place, chat in chats.items():
        if found[place] is None:
            found[place] = "\n\n".join(message["content"] for message in chat)
    return found


def _messages(row: dict[str, Any], data: str) -> list[dict[str, str]]:
    """Return the turns of a row that say something. Raises: TextError, naming `data`, if it can have none."""
    turns = row.get("conversations") or row.get("messages")
    if turns is None and (turns := _instruction(row)) is None:
        if row.keys() & {"text", "conversations", "messages"}:
            return []
        raise TextError(
            f"{data} has no column text, conversations or messages, nor instruction and response, only "
            f"{', '.join(row)[:200]}; name one with --text-column"
        )
    said = [(turn.get("from") or turn.get("role"), _words(turn.get("value") or turn.get("content"))) for turn in turns]
    return [{"role": ROLES.get(speaker, "user"), "content": words} for speaker, words in said if words]


def _instruction(row: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Return the two turns of a row as Dolly, Alpaca or a table of prompts has it, none if one is silent; None if it is
    no such row."""
    asked, answered, given = (next((row[name] for name in names if row.get(name)), None) for names in INSTRUCTION)
    if not all(row.keys() & set(names) for names in INSTRUCTION[:2]):
        return None
    if not isinstance(asked, str) or not isinstance(answered, str):
        return []
    question = f"{asked}\n\n{given}" if isinstance(given, str) else asked
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answered}]


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
