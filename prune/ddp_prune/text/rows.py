"""Files and datasets of the Hugging Face hub in, rows with their places out.

Local files may be .txt, .jsonl, .json or .parquet, plain or compressed with gz, xz or zst. Any
other name is a dataset of the hub, which is streamed. JSON is read here and not by `datasets`,
whose table gives every message the keys of all others and changes values of mixed types.
"""

import glob
import hashlib
import itertools
import os
import shutil
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from ddp_prune.text.conversations import COLUMNS, TURNS, RowParser
from ddp_prune.text.messages import Notes, are_turns, at, load_json
from ddp_prune.text.templates import ChatTemplate
from ddp_vllm.cache import cache_folder, sha256
from ddp_vllm.errors import TextError, reading
from ddp_vllm.hub import hub_fault
from ddp_vllm.names import split_sources
from ddp_vllm.output import atomic_file
from ddp_vllm.remote_code.files import check_no_pointer

FORMATS, COMPRESSIONS = (".txt", ".jsonl", ".json", ".parquet"), (".gz", ".xz", ".zst")
BATCH = 1000  # rows of a table that are hashed at a time
KINDS = f"{'/'.join(FORMATS)} (plain or {', '.join(COMPRESSIONS)})"
BOM = b"\xef\xbb\xbf"
COPIES = "rows that are copies of others; copies of text that is held out are not trained on"


Row = tuple[str, Any]
"""A row after its place, for messages."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The rows of a source."""

    name: str
    read: Callable[[], Iterator[Row]]
    """Yields them in their own order."""
    shuffled: Callable[[int], Iterator[Row]]
    """Yields them in an order that a seed chooses; a stream shuffles among neighbors."""
    by_hash: Callable[[Notes, int, int], Iterator[Row]]
    """Yields different rows, lowest `hash_of_row` first: of a file all, of a stream the first ones
    that hold `size` characters, of which each row counts at most `most`. Notes count the copies."""
    is_stream: bool = False


def hash_of_row(row: Any, column: str) -> int:
    """Return 64 bits of the SHA-256 of the values of a row that may be read, in any format of its
    file. Nothing is rendered."""
    if isinstance(row, list):
        row = {TURNS[0]: row}
    if isinstance(row, dict):
        row = [row[name] for name in ([column] if column in row else sorted(_used_columns([*row], column)))]
    content = msgspec.json.encode(row, enc_hook=lambda value: type(value).__name__, order="deterministic")
    return int.from_bytes(hashlib.sha256(content).digest()[:8])


def _numbered(
    name: str,
    num_rows: int,
    read: Callable[[Iterable[int]], Iterator[Row]],
    column: str,
    hashes: Callable[[], Iterable[int]] | None = None,
) -> Rows:
    """Return the rows of a file, which can be read in any order. hashes: returns those of all rows faster than by
    `read`."""

    def shuffled(seed: int) -> Iterator[Row]:
        import numpy as np

        return read(np.random.default_rng(seed).permutation(num_rows).tolist())

    def by_hash(notes: Notes, *_: int) -> Iterator[Row]:
        import numpy as np

        of_rows = hashes() if hashes else (hash_of_row(row, column) for _, row in read(range(num_rows)))
        different = np.unique(np.fromiter(of_rows, np.uint64, num_rows), return_index=True)[1]
        notes.add(COPIES, count=num_rows - len(different))
        return read(different.tolist())

    return Rows(name=name, read=partial(read, range(num_rows)), shuffled=shuffled, by_hash=by_hash)


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
        ending = _format_of(path)
        if not ending:
            _check_hub(name)
            return _hub_rows(name, column)
        file = _decompressed(path)
        if ending == ".parquet":
            return _parquet_rows(name, path, file, column)
        if ending != ".txt":
            return _json_rows(name, file, column)
        text = {column or "text": _decoded(file.read_bytes(), name)}
        return _numbered(name, 1, lambda _: iter([(name, text)]), column, lambda: [0])


def check_sources(data: str, column: str = "", *, of_hub: bool = True) -> None:
    """Refuse text that is missing or has no format that is read, before torch is imported and a
    model is loaded.

    The first row of a file of JSON Lines is read too. An unreachable hub is no error here if tokens
    are cached: they may be those of this text. of_hub: look at datasets of the hub too. Raises:
    TextError.
    """
    for name in dict.fromkeys(sources_of(data)):
        with reading_text(name):
            ending = _format_of(Path(name))
            if not ending and of_hub and not any((cache_folder() / "tokens").glob("*.tokens")):
                _check_hub(name)
            if ending == ".jsonl":
                place, first = next(open_rows(name, column).read())
                with at(place):
                    RowParser(Notes(), ChatTemplate(), column).parse(first)


def _format_of(path: Path) -> str:
    """Return the ending of a file that tells its format; "" for a dataset of the hub. Raises: TextError."""
    ending = next((suffix for suffix in reversed(path.suffixes) if suffix not in COMPRESSIONS), "")
    plain, _, turns = str(path).rpartition(":")
    if not path.exists() and os.path.isfile(plain):
        raise TextError(f"{path}: {turns!r} is not a number of turns; give 1 to 99, as in {plain}:3")
    if not path.exists() and ending not in FORMATS:
        return ""
    if not path.is_file() or ending not in FORMATS:
        raise TextError(f"{path} is not a file, or has another ending; give a {KINDS} file or a hub dataset")
    with open(path, "rb") as file:
        check_no_pointer(file.read(40), path)
    return ending


def _check_hub(name: str) -> None:
    """Refuse a dataset if the hub cannot be reached. Raises: TextError."""
    if fault := hub_fault():
        raise TextError(
            f"{name} is no file here, and the hub's dataset of that name cannot be read ({fault}); give a {KINDS} file "
            "with --data"
        )


def reading_text(data: str) -> AbstractContextManager[None]:
    """Raise TextError instead of the errors of libraries in the block, from pyarrow's to the hub's."""
    return reading(data, TextError, f"give a hub dataset or a {KINDS} file", how=" as text")


def _decompressed(path: Path) -> Path:
    """Return a plain file: this one, or its decompressed copy in the cache."""
    if path.suffix not in COMPRESSIONS:
        return path
    import fsspec

    copy = cache_folder() / "text" / sha256(path)[:32]
    if not copy.exists():
        copy.parent.mkdir(parents=True, exist_ok=True)
        with (
            fsspec.open(str(path), compression="infer") as source,
            atomic_file(copy, private=True) as temporary,
            open(temporary, "wb") as file,
        ):
            shutil.copyfileobj(source, file)
    return copy


def _json_rows(name: str, file: Path, column: str) -> Rows:
    """Open JSON Lines, or one JSON value that holds all rows."""
    numbers, starts, position = array("q"), array("q"), 0  # of lines: the number, from 1, and the first byte
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.removeprefix(BOM).strip():
                numbers.append(number)
                starts.append(position)
            position += len(line)

    def read(order: Iterable[int]) -> Iterator[Row]:
        with open(file, "rb") as lines:
            for index in order:
                lines.seek(starts[index])
                yield f"{name}, line {numbers[index]}", _parse(lines.readline(), name, numbers[index])

    try:
        value: Any = next((row for _, row in read(range(len(starts)))), [])
        if len(starts) > 1 or isinstance(value, dict):
            return _numbered(name, len(starts), read, column)
    except TextError:  # the first line is a part of a value
        value = _parse(file.read_bytes(), name)
    if value == []:
        raise TextError(f"{name} is empty; give a file with text")
    values = value if isinstance(value, list) and not _is_conversation(value) else [value]
    rows = [(f"{name}, row {number}", row) for number, row in enumerate(values, 1)]
    return _numbered(name, len(rows), partial(map, rows.__getitem__), column)


def _is_conversation(values: list[Any]) -> bool:
    """Tell whether a list holds the messages of one conversation, and not rows."""
    return are_turns(values) and not any(set(COLUMNS) & value.keys() for value in values)


def _parse(content: bytes, name: str, line: int = 1) -> Any:
    """Return the JSON value of a line, or of a file whose first line is `line`."""
    with suppress(msgspec.MsgspecError, RecursionError, ValueError):  # which is faster, and stricter
        return msgspec.json.decode(content.removeprefix(BOM))
    text = _decoded(content, f"{name}, line {line}")
    try:
        return load_json(text)
    except (RecursionError, ValueError) as error:
        line += getattr(error, "lineno", 1) - 1
        raise TextError(
            f"{name}, line {line}: not JSON ({getattr(error, 'msg', error)}); is the file cut off? Repair or delete "
            "the line"
        ) from None


def _decoded(content: bytes, place: str) -> str:
    """Return the text of bytes. Raises: TextError."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        kind = "UTF-16" if b"\0" in content[:200] else "LATIN1"
        raise TextError(f"{place}: not UTF-8 ({error.reason}); convert the file: iconv -f {kind} -t UTF-8") from None


def _parquet_rows(name: str, path: Path, file: Path, column: str) -> Rows:
    import datasets

    datasets.disable_progress_bars()
    datasets.utils.logging.set_verbosity(datasets.utils.logging.CRITICAL)  # the error repeats it
    # `datasets` identifies a file by its name and time; load_dataset would tell the hub about it
    cache = str(cache_folder() / "datasets" / sha256(path)[:32])
    table = datasets.Dataset.from_parquet(glob.escape(str(file)), cache_dir=cache)
    table = table.select_columns(_used_columns(table.column_names, column))

    def read(order: Iterable[int]) -> Iterator[Row]:
        numbers = [*order]
        return _rows_of(name, table.select(numbers), numbers)

    def hashes() -> Iterator[int]:
        for batch in table.iter(BATCH):  # far faster than row by row
            for values in zip(*batch.values(), strict=True):
                yield hash_of_row(_without_nulls(dict(zip(batch, values, strict=True))), column)

    return _numbered(name, len(table), read, column, hashes)


def _hub_rows(name: str, column: str) -> Rows:
    import datasets

    hub_name, configuration, split = [*name.split(":", 2), "", ""][:3]
    stream = datasets.load_dataset(hub_name, configuration or None, split=split or "train", streaming=True)
    if columns := stream.column_names:  # a stream may not know them before it is read
        stream = stream.select_columns(_used_columns(columns, column))

    def read(seed: int | None = None) -> Iterator[Row]:
        return _rows_of(name, stream if seed is None else stream.shuffle(seed=seed), itertools.count())

    def by_hash(_: Notes, size: int, most: int) -> Iterator[Row]:
        candidates, held = dict[int, Row](), 0
        for place, row in read():
            candidates.setdefault(hash_of_row(row, column), (place, row))
            held += min(most, len(str(row)))
            if held >= size:
                break
        return (candidates[number] for number in sorted(candidates))

    return Rows(name=name, read=read, shuffled=read, by_hash=by_hash, is_stream=True)


def _used_columns(columns: Sequence[str], column: str) -> list[str]:
    """Return the columns to decode: thousands of others would take minutes. Without any, all."""
    used = [name for name in columns if name == column or name in COLUMNS]
    return used or list(columns)


def _rows_of(name: str, table: Any, numbers: Iterable[int]) -> Iterator[tuple[str, Any]]:
    """Yield the rows of a table with their places. The empty fields that fill up its structures are
    left out."""
    for number, row in zip(numbers, table, strict=False):
        yield f"{name}, row {number + 1}", {column: _without_nulls(value) for column, value in row.items()}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        items = {key: _without_nulls(item) for key, item in value.items()}
        return {key: item for key, item in items.items() if item is not None or key == "content"}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
