"""Reads the files of a checkpoint strictly: JSON, the index, and the headers of safetensors files.

Programs interpret a duplicate name, a tensor in two files, or a wrong index differently. This
file refuses all of them, so every program loads exactly the tensors that were checked.

This file is part of every checkpoint and imports only the standard library.
"""

import json
import os
import stat
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any

INDEX_FILE = "model.safetensors.index.json"
WEIGHTS = "model*.safetensors"
LARGEST_JSON = 500_000_000  # bytes; tokenizers of 256,000 tokens take 40 MB
# bytes of a config.json; lists take 25 times that in memory, and real ones take 1 MB
LARGEST_CONFIG = 4_000_000
LONGEST_HEADER = 100_000_000  # bytes of a safetensors file; its own library's limit
DEEPEST = 100  # levels of nested objects and lists
MOST_DIGITS = 19  # of an integer; more digits exceed 64 bits
BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32), **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}  # fmt: skip


class WidthsError(ValueError):
    """The widths contradict the dense model, or the files contradict the widths or each other."""


def short(value: Any) -> str:
    """Return a value from a file in a form that is safe to print in a message."""
    try:
        text = ascii(value) if not isinstance(value, str) or not value.isprintable() else repr(value)
    except (ValueError, RecursionError):  # an integer with too many digits
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:60]}… ({len(text)} characters)"


def read_bytes(path: Path, most: int) -> bytes:
    """Read a file of at most `most` bytes.

    Raises: OSError, also for a folder, a pipe, a device or a larger file.
    """
    with open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_size > most:
            raise OSError(f"{path} is not a file of at most {most:,} bytes")
        content = file.read(status.st_size)
        check_no_pointer(content[:40], path)
        return content


class PointerError(WidthsError):
    """A file that git stored elsewhere."""


def check_no_pointer(first: bytes, path: object) -> None:
    """Refuse a file that begins as git-lfs leaves those that it did not download. Raises:
    PointerError."""
    if first.startswith(b"version https://git-lfs"[: len(first)]) and len(first) > 7:
        raise PointerError(f"{path} is a pointer of git-lfs, not the file itself; run: git lfs pull")


def parse_json(content: bytes | str, parse_constant: Callable[[str], Any] = float) -> Any:
    """Parse JSON strictly.

    parse_constant: reads NaN and infinity, which configs of transformers hold.
    Raises: ValueError, also for duplicate names in an object, integers of more than 64 bits, text
        that UTF-8 cannot encode, and objects and lists nested more than `DEEPEST` levels.
    """
    text = content if isinstance(content, str) else content.decode("utf-8")
    try:
        found = json.loads(text, object_pairs_hook=_unique, parse_int=_whole, parse_constant=parse_constant)
        _check_depth(found)
        if "\\ud" in text.lower():
            json.dumps(found, ensure_ascii=False).encode()  # a lone surrogate is not a character
    except RecursionError:
        raise ValueError(f"it is nested more than {DEEPEST} levels") from None
    return found


def read_json(path: Path) -> Any:
    """Read a JSON file. Raises: OSError, also if it is too large; ValueError as `parse_json`."""
    return parse_json(read_bytes(path, LARGEST_CONFIG if path.name == "config.json" else LARGEST_JSON))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = next(name for name, times in Counter(name for name, _ in pairs).items() if times > 1)
        raise ValueError(f"{short(twice)} occurs twice in an object")
    return found


def _whole(digits: str) -> int:
    if len(digits.lstrip("-")) > MOST_DIGITS:
        raise ValueError(f"{digits[:20]}… is too large ({len(digits)} digits, at most {MOST_DIGITS})")
    return int(digits)


def _check_depth(found: Any) -> None:
    level = [found]
    for _ in range(DEEPEST):
        inside = (each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list))
        level = [part for parts in inside for part in parts]
    if level:
        raise RecursionError


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files of a checkpoint: those of its index, and all others whose names are
    of weights. Raises: WidthsError."""
    return sorted({*folder.glob(WEIGHTS), *(folder / name for name in index_map(folder).values())})


def file_tensors(path: Path) -> Iterator[tuple[str, list[int], str]]:
    """Yield (name, shape, dtype) of each tensor in a safetensors file with a consistent header.

    Raises: WidthsError; OSError.
    """
    if not path.is_file():
        raise WidthsError(f"{path} is not a file; download it again")
    with open(path, "rb") as file:
        start = file.read(8)
        check_no_pointer(start, path)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= LONGEST_HEADER:
            raise WidthsError(f"{path} is not a safetensors file: its header states {length} bytes; download it again")
        content, size = file.read(length), os.fstat(file.fileno()).st_size - 8 - length
    try:
        header = parse_json(content, int)  # safetensors reads no NaN
    except ValueError as error:
        raise WidthsError(
            f"{path} is not a safetensors file: its header is not JSON ({error}); download it again"
        ) from error
    if not isinstance(header, dict):
        raise WidthsError(f"{path} is not a safetensors file: its header is not an object; download it again")
    ends = [0]
    for name, entry in header.items():
        if name != "__metadata__":
            shape, dtype, offsets = _stated(entry)
            if offsets is None:
                raise WidthsError(f"{path} lacks shape, dtype or offsets of {short(name)}; download it again")
            if dtype in BITS and prod(shape) * BITS[dtype] != 8 * (offsets[1] - offsets[0]):
                raise WidthsError(f"{path}: offsets of {short(name)} contradict its shape and dtype; download it again")
            ends += offsets
            yield name, shape, dtype
    ends = [*sorted(ends), size]
    if ends[::2] != ends[1::2]:
        raise WidthsError(f"{path} is truncated, or its tensors overlap or have gaps; download it again")


def _stated(entry: Any) -> tuple[list[int], str, list[int] | None]:
    """Return shape, dtype and offsets from a tensor's entry in a header; offsets are None if one is
    invalid."""
    found = entry if isinstance(entry, dict) else {}
    shape, offsets, dtype = _sizes(found.get("shape")), _sizes(found.get("data_offsets")), found.get("dtype")
    if shape is None or offsets is None or len(offsets) != 2 or offsets[0] > offsets[1] or not isinstance(dtype, str):
        return [], "", None
    return shape, dtype, offsets


def _sizes(values: Any) -> list[int] | None:
    """Return `values` if it is a list of sizes, else None."""
    good = isinstance(values, list) and all(type(each) is int and 0 <= each < 1 << 62 for each in values)
    return values if good else None


def checked_tensors(folder: Path) -> Sequence[tuple[str, list[int], str]]:
    """Return name, shape and dtype of each tensor from the headers of all weight files, after
    checking that every program loads the same ones.

    A tensor may be in one file only. Neither weights nor the masks file are read.
    Raises: WidthsError; OSError.
    """
    found: dict[str, tuple[str, list[int], str]] = {}
    file_of: dict[str, str] = {}
    for path in weight_files(folder):
        for name, shape, dtype in file_tensors(path):
            if name in file_of:
                raise WidthsError(f"tensor {short(name)} is in {file_of[name]} and {path.name}; remove one")
            found[name], file_of[name] = (name, shape, dtype), path.name
    if not file_of:
        raise WidthsError(f"{folder} has no {WEIGHTS}; only safetensors weights are supported")
    index = index_map(folder)
    if index and (wrong := index.items() ^ file_of.items()):
        name, file = min(wrong)
        fault = f"{INDEX_FILE} and the files contradict each other: tensor {short(name)} in {short(file)}"
        raise WidthsError(f"{folder}: {fault}; copy the whole folder again")
    return list(found.values())


def index_map(folder: Path) -> dict[str, str]:
    """Read the index of a folder: tensor -> its file there; {} if there is none. Raises:
    WidthsError."""
    path = folder / INDEX_FILE
    if not os.path.lexists(path):
        return {}
    try:
        index = read_json(path)
    except (OSError, ValueError) as error:
        raise WidthsError(f"{path} cannot be read ({error}); copy the whole folder again") from error
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict):
        raise WidthsError(f"{path} is not an index: it has no weight_map; copy the whole folder again")
    for file in weight_map.values():
        if not isinstance(file, str) or Path(file).name != file:
            raise WidthsError(f"{path} names {short(file)}, not a file of its folder; copy the whole folder again")
    return weight_map
