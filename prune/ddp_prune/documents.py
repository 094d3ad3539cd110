"""Rows of any supported text as documents: a file or a hub dataset in, one text a row out.

A local file may be .txt, .jsonl, .json or .parquet, plain or compressed with gz, xz or zst; any other name is a dataset
of the hub, which is streamed. A row has a text, or a conversation, which the tokenizer's chat template makes a text. So
has a row with an instruction and what was answered.
"""

import glob
import hashlib
import itertools
import re
import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, TemplateError

from ddp_vllm.cache import cache_folder
from ddp_vllm.errors import TextError, reading

READERS = {".txt": "text", ".raw": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}
COMPRESSIONS = (".gz", ".xz", ".zst")
BEGIN, END = "\ufdd0", "\ufdd1"
"""Around what an assistant says in a conversation; Unicode keeps both for a program's own use."""
DEEPEST = 100  # objects and lists in each other, in a line of JSON
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"')
LONGEST_RENDERING = 10.0
"""Seconds a chat template may take for one conversation; real ones take a millisecond."""
LARGEST_RENDERING = 1 << 28
"""Bytes of memory a chat template may take for one conversation."""
INSTRUCTION = (("instruction", "prompt"), ("response", "output", "completion"), ("context", "input"))
"""Columns of what is asked, answered, and given beside the question; the first that says something is taken."""
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
        return rows
    columns = rows.column_names or list(next(iter(rows), {}))  # a stream may not know before it is read
    if column not in columns:
        raise TextError(f"{name} has no column {column}, only {', '.join(columns)}; name another with --text-column")
    return rows.select_columns([column]).rename_column(column, "text")


def reading_text(data: str) -> AbstractContextManager[None]:
    """Raise TextError for what `datasets` raises in the block, from pyarrow's errors to the hub's."""
    return reading(data, TextError, f"give a hub dataset or a {_kinds()} file", how=" as text")


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


def document(row: dict[str, Any], tokenizer: Any, data: str) -> str:
    """Return a row's text, or its conversation by the chat template; as plain text where that refuses its turns.

    What the assistant says stands between BEGIN and END where the template arranged it.
    Raises: TextError, naming `data`, if it has neither.
    """
    if isinstance(row.get("text"), str):
        return str(row["text"])
    turns = row.get("conversations") or row.get("messages")
    if turns is None and (turns := _instruction(row)) is None:
        if row.keys() & {"text", "conversations", "messages"}:
            return ""
        raise TextError(
            f"{data} has no column text, conversations or messages, nor instruction and response, only "
            f"{', '.join(row)}; name one with --text-column"
        )
    said = [(turn.get("from") or turn.get("role"), _words(turn.get("value") or turn.get("content"))) for turn in turns]
    messages = [{"role": ROLES.get(speaker, "user"), "content": words} for speaker, words in said if words]
    if tokenizer.chat_template:
        marked = [
            message | {"content": f"{BEGIN}{message['content']}{END}"} if message["role"] == "assistant" else message
            for message in messages
        ]
        for arrange in (list, _alternating):
            with suppress(TemplateError):  # what a template raises that refuses these roles in this order
                if turns := arrange(marked):
                    return str(by_template(tokenizer, turns))
    return "\n\n".join(message["content"] for message in messages)


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


def by_template(tokenizer: Any, turns: list[Any], **options: Any) -> Any:
    """Return a conversation, or several, as the chat template of a tokenizer arranges them.

    Raises: TemplateError where it refuses their roles or order; TextError if it fails otherwise, or does not end.
    """
    try:
        _check_powers(str(tokenizer.chat_template))
        with _time_limit(LONGEST_RENDERING), _memory_limit(LARGEST_RENDERING):
            return tokenizer.apply_chat_template(turns, tokenize=False, **options)
    except TemplateError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise TextError(f"the chat template of the tokenizer fails ({reason}); repair it, or delete it") from error


@lru_cache(maxsize=4)
def _check_powers(template: str) -> None:
    """Refuse a template that raises to a power: a number of any length, made in one step that nothing can stop.

    No template needs it; other operations take time or memory that is limited. Raises: ValueError.
    """
    with suppress(TemplateError):  # of a template that will not compile either
        if any(kind == "operator" and sign == "**" for _, kind, sign in Environment().lex(template)):
            raise ValueError("it raises to a power")


@contextmanager
def _memory_limit(num_bytes: int) -> Iterator[None]:
    """Raise MemoryError when the process takes so many bytes more in the block; where the system tells and limits."""
    try:
        taken = int(Path("/proc/self/statm").read_bytes().split()[0]) * resource.getpagesize()
    except OSError:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = [each for each in (soft, hard, taken + num_bytes) if each != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(most), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError when the block takes longer; outside of the main thread, which alone gets signals, never."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: Any) -> None:
        raise TimeoutError(f"it takes more than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


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
