"""Files and datasets of the Hugging Face hub in, numbered rows out.

Local files may be .txt, .jsonl, .json or .parquet, plain or compressed with gz, xz or zst. Any
other name is a dataset of the hub, which is streamed. JSON is read here and not by `datasets`,
whose table gives every message the keys of all others and changes values of mixed types.
"""

import glob
import gzip
import json
import lzma
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

from ddp_prune.text.conversations import COLUMNS, RowParser
from ddp_prune.text.messages import Notes, are_turns
from ddp_vllm.cache import cache_folder, check_cache, sha256, unwritable_cache
from ddp_vllm.errors import TextError, reading
from ddp_vllm.hub import hub_fault
from ddp_vllm.names import split_sources
from ddp_vllm.output import FULL, atomic_file

READERS = {".txt": "text", ".raw": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}
COMPRESSIONS = (".gz", ".xz", ".zst")
KINDS = f".txt/.jsonl/.json/.parquet (plain or {', '.join(COMPRESSIONS)})"
ROWS_PER_BATCH = 32  # of a Parquet file or a hub dataset
BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The rows of a source."""

    name: str
    num_rows: int | None
    """None: a stream."""
    read: Callable[[Sequence[int] | None], Iterator[tuple[int, Any]]]
    """Yields (number, row) in the order of the given numbers, which start at 0; None: in their own
    order. A stream takes `[seed]` instead, and shuffles among neighbors."""
    lines: Sequence[int] | None = None
    """The line of a file at which a row begins, from 1; None: rows have no lines."""
    columns: tuple[str, ...] = ()
    """All columns of a table, of which only the used ones are read; (): those of the row."""

    def place(self, number: int) -> str:
        """Return the place of a row, for messages."""
        return f"{self.name}, " + (f"row {number + 1}" if self.lines is None else f"line {self.lines[number]}")


def sources_of(data: str) -> list[str]:
    """Return the names in a comma-separated list of texts, with three copies for `NAME:3`.

    Raises: TextError.
    """
    names = [name for name, turns in split_sources(data) for _ in range(turns)]
    if not all(names):
        raise TextError(f"data is {data!r}, where a name is missing; give hub datasets or files, separated by commas")
    return [os.path.normpath(name) if os.path.exists(name) else name for name in names]


def open_rows(name: str, column: str = "") -> Rows:
    """Open a source.

    name: a path; or `name`, `name:configuration` or `name:configuration:split` on the hub.
    column: the column that holds the text or conversation, if not one of `COLUMNS`.
    Raises: as `reading_text`.
    """
    path = Path(name)
    with reading_text(name):
        kind = _kind_of_file(path)
        if kind is None:
            _check_hub(name)
            return _hub_rows(name, column)
        file = _decompressed(path)
        if kind == "json":
            return _json_rows(name, file)
        if kind == "parquet":
            return _parquet_rows(name, path, file, column)
        text = {column or "text": file.read_text(encoding="utf-8")}
        return Rows(name=name, num_rows=1, read=lambda _: iter([(0, text)]))


def check_sources(data: str, column: str = "") -> None:
    """Refuse text that is missing or has no format that is read, before torch is imported and a
    model is loaded.

    The first row of a file of JSON Lines is read too. An unreachable hub is no error here if tokens
    are cached: they may be those of this text. Raises: TextError.
    """
    for name in dict.fromkeys(sources_of(data)):
        with reading_text(name):
            kind = _kind_of_file(Path(name))
            if kind is None and not any((cache_folder() / "tokens").glob("*.tokens")):
                _check_hub(name)
            if kind == "json" and Path(name).suffix == ".jsonl":
                rows = open_rows(name, column)
                number, first = next(rows.read(None))
                RowParser(Notes(), column=column).parse(first, rows.place(number))


def _kind_of_file(path: Path) -> str | None:
    """Return how a file is read, or None for a dataset of the hub. Raises: TextError."""
    endings = [suffix for suffix in path.suffixes if suffix not in COMPRESSIONS]
    kind = READERS.get(endings[-1]) if endings else None
    if not path.exists() and not kind:
        return None
    if not path.is_file():
        raise TextError(f"{path} is not a file; give a {KINDS} file or a hub dataset")
    with open(path, "rb") as file:
        is_empty = not file.read(1)  # which fails for some files whose size is 0
    if is_empty:
        raise TextError(f"{path} is empty; give a file with text")
    if kind is None:
        raise TextError(f"{path} has an unknown ending {path.suffix!r}; give a {KINDS} file")
    return kind


def _check_hub(name: str) -> None:
    """Refuse a dataset if the hub cannot be reached. Raises: TextError."""
    if fault := hub_fault():
        raise TextError(
            f"{name} is no file here, and the hub's dataset of that name cannot be read ({fault}); give a {KINDS} file "
            "with --data"
        )


@contextmanager
def reading_text(data: str) -> Iterator[None]:
    """Raise TextError instead of the errors of libraries in the block, from pyarrow's to the hub's.

    Raises: OutputError instead if the disk that holds the cache is full.
    """
    with reading(data, TextError, f"give a hub dataset or a {KINDS} file", how=" as text"):
        try:
            yield
        except Exception as error:
            cause: BaseException | None = error
            while cause:
                if isinstance(cause, OSError) and cause.errno in FULL:
                    raise unwritable_cache(cache_folder(), cause) from error
                cause = cause.__cause__ or cause.__context__
            raise


def _decompressed(path: Path) -> Path:
    """Return a plain file: this one, or its decompressed copy in the cache."""
    if path.suffix not in COMPRESSIONS:
        return path
    check_cache()
    copy = cache_folder() / "text" / sha256(path)[:32]
    if not copy.exists():
        copy.parent.mkdir(parents=True, exist_ok=True)
        with (
            _open_compressed(path) as source,
            atomic_file(copy, private=True) as temporary,
            open(temporary, "wb") as file,
        ):
            shutil.copyfileobj(source, file)
    return copy


def _open_compressed(path: Path) -> IO[bytes]:
    if path.suffix == ".zst":
        import zstandard

        return zstandard.open(path, "rb")
    return gzip.open(path) if path.suffix == ".gz" else lzma.open(path)  # type: ignore[return-value]


def _json_rows(name: str, file: Path) -> Rows:
    """Open JSON Lines, or one JSON value that holds all rows."""
    starts, numbers, position, first = list[int](), list[int](), 0, b""
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, 1):
            content = line.removeprefix(BOM).strip()
            if content:
                first = first or content
                starts.append(position)
                numbers.append(number)
            position += len(line)
    if not starts:
        raise TextError(f"{name} is empty; give a file with text")
    if values := _single_value(name, file, first, len(starts)):
        return Rows(name=name, num_rows=len(values), read=partial(_ordered, values))

    def read(order: Sequence[int] | None) -> Iterator[tuple[int, Any]]:
        with open(file, "rb") as lines:
            for number, start in _ordered(starts, order):
                lines.seek(start)
                yield number, _parse(lines.readline(), name, numbers[number])

    return Rows(name=name, num_rows=len(starts), read=read, lines=numbers)


def _ordered(values: Sequence[Any], order: Sequence[int] | None) -> Iterator[tuple[int, Any]]:
    numbers = range(len(values)) if order is None else order
    return ((number, values[number]) for number in numbers)


def _single_value(name: str, file: Path, first: bytes, num_lines: int) -> list[Any]:
    """Return the rows of a file that is an array, or one object of several lines; []: JSON Lines.

    first: its first line. A single line with a list is an array of rows, or one conversation.
    """
    with suppress(TextError):
        row = _parse(first, name)
        if num_lines > 1 or not isinstance(row, list):
            return []
    is_list = first.startswith(b"[")
    try:
        value = _parse(file.read_bytes(), name)
    except TextError:
        if is_list:
            raise
        return []  # the error of the first row names its place
    if value == []:
        raise TextError(f"{name} is an empty list; give a file with text")
    return value if is_list and not _is_conversation(value) else [value]


def _is_conversation(values: list[Any]) -> bool:
    """Tell whether a list holds the messages of one conversation, and not rows."""
    return are_turns(values) and not any(set(COLUMNS) & value.keys() for value in values)


def _parse(content: bytes, name: str, line: int = 1) -> Any:
    """Return the JSON value of a line, or of a file whose first line is `line`."""
    try:
        return json.loads(content.removeprefix(BOM).decode())
    except json.JSONDecodeError as error:
        raise TextError(
            f"{name}, line {line + error.lineno - 1}: not JSON ({error.msg} at column "
            f"{error.colno}); is the file cut off? Repair or delete the line"
        ) from None
    except UnicodeDecodeError as error:
        raise TextError(f"{name}, line {line} cannot be read as text ({error}); save the file as UTF-8") from None
    except (RecursionError, ValueError):
        raise TextError(f"{name}, line {line}: nested too deeply, or a number too long; delete the line") from None


def _parquet_rows(name: str, path: Path, file: Path, column: str) -> Rows:
    import datasets

    check_cache()
    datasets.disable_progress_bars()
    datasets.utils.logging.set_verbosity(datasets.utils.logging.CRITICAL)  # the error repeats it
    # `datasets` identifies a file by its name and time; load_dataset would tell the hub about it
    cache = str(cache_folder() / "datasets" / sha256(path)[:32])
    table = datasets.Dataset.from_parquet(glob.escape(str(file)), cache_dir=cache)
    columns = tuple(table.column_names)
    table = table.select_columns(_used_columns(columns, column))

    def read(order: Sequence[int] | None) -> Iterator[tuple[int, Any]]:
        numbers = range(len(table)) if order is None else order
        yield from zip(numbers, _rows_of(table.select(numbers)), strict=True)

    return Rows(name=name, num_rows=len(table), read=read, columns=columns)


def _hub_rows(name: str, column: str) -> Rows:
    import datasets

    hub_name, configuration, split = [*name.split(":", 2), "", ""][:3]
    stream = datasets.load_dataset(hub_name, configuration or None, split=split or "train", streaming=True)
    if columns := tuple(stream.column_names or ()):  # a stream may not know them before it is read
        stream = stream.select_columns(_used_columns(columns, column))

    def read(seeds: Sequence[int] | None) -> Iterator[tuple[int, Any]]:
        rows = stream if seeds is None else stream.shuffle(seed=seeds[0])
        yield from enumerate(_rows_of(rows))

    return Rows(name=name, num_rows=None, read=read, columns=columns)


def _used_columns(columns: Sequence[str], column: str) -> list[str]:
    """Return the columns to decode: thousands of others would take minutes. Without any, all."""
    used = [name for name in columns if name == column or name in COLUMNS]
    return used or list(columns)


def _rows_of(rows: Any) -> Iterator[dict[str, Any]]:
    """Yield rows of a table, without the empty fields that fill up its structures."""
    for columns in rows.iter(batch_size=ROWS_PER_BATCH):
        for values in zip(*columns.values(), strict=True):
            row = zip(columns, values, strict=True)
            yield {name: _without_nulls(value) for name, value in row}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        items = {key: _without_nulls(item) for key, item in value.items()}
        return {key: item for key, item in items.items() if item is not None or key == "content"}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
