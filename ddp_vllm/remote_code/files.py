"""What the files of a checkpoint say, read strictly: JSON, the index, and the headers of safetensors files.

Programs differ in what they make of a name that stands twice, of a tensor in two files, or of an index that does not
tell the truth. Here each is refused, so that everyone who loads a folder loads what was checked.

This file travels inside checkpoints: standard library only.
"""

import json
import os
import stat
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any

INDEX_FILE = "model.safetensors.index.json"
WEIGHTS = "model*.safetensors"
LARGEST_JSON = 500_000_000  # bytes; tokenizers of 256,000 tokens take 40 MB
LARGEST_CONFIG = 4_000_000  # bytes of a config.json; lists take 25 times that in memory, and real ones take 1 MB
LONGEST_HEADER = 100_000_000  # bytes of a safetensors file; its own library's limit
DEEPEST = 100  # objects and lists in each other
MOST_DIGITS = 19  # of a whole number; more than 64 bits hold
_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32), **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}  # fmt: skip


class WidthsError(ValueError):
    """The widths contradict the dense model, or the files contradict the widths or each other."""


def short(value: Any) -> str:
    """Return a value from a file as it may stand in a message."""
    try:
        text = ascii(value) if not isinstance(value, str) or not value.isprintable() else repr(value)
    except (ValueError, RecursionError):  # a number of too many digits
        text = f"something of type {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:60]}… ({len(text)} characters)"


def read_bytes(path: Path, most: int) -> bytes:
    """Return what a file holds.

    Raises: OSError, which says too if it is a folder, a pipe or a device, or holds more bytes than `most`.
    """
    with open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_size > most:
            raise OSError(f"{path} is no file of at most {most:,} bytes")
        return file.read(status.st_size)


def parse_json(content: bytes | str) -> Any:
    """Return what JSON says.

    Raises: ValueError, also for a name that stands twice in an object, for numbers of more than 64 bits, texts that
        UTF-8 cannot hold, and objects and lists nested more than `DEEPEST` deep.
    """
    text = content if isinstance(content, str) else content.decode("utf-8")
    try:
        found = json.loads(text, object_pairs_hook=_unique, parse_int=_whole)
        _check_depth(found)
        if "\\ud" in text.lower():
            json.dumps(found, ensure_ascii=False).encode()  # half of a pair of surrogates is no character
    except RecursionError:
        raise ValueError(f"it is nested more than {DEEPEST} deep") from None
    return found


def read_json(path: Path) -> Any:
    """Return what a JSON file says. Raises: OSError, also for one that is too large; ValueError as `parse_json`."""
    return parse_json(read_bytes(path, LARGEST_CONFIG if path.name == "config.json" else LARGEST_JSON))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = next(name for name, times in Counter(name for name, _ in pairs).items() if times > 1)
        raise ValueError(f"{short(twice)} stands twice in an object")
    return found


def _whole(digits: str) -> int:
    if len(digits.lstrip("-")) > MOST_DIGITS:
        raise ValueError(f"{digits[:20]}… is too large a number ({len(digits)} digits)")
    return int(digits)


def _check_depth(found: Any) -> None:
    level = [found]
    for _ in range(DEEPEST):
        inside = (each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list))
        level = [part for parts in inside for part in parts]
    if level:
        raise RecursionError


def folder_tensors(folder: Path) -> Iterator[tuple[str, list[int], str]]:
    """Yield (name, shape, number format) from the headers of all safetensors files of a local checkpoint.

    Weights are not read. The masks file is not part of them and is left out. Raises: WidthsError.
    """
    for path in sorted(folder.glob(WEIGHTS)):
        yield from file_tensors(path)


def file_tensors(path: Path) -> Iterator[tuple[str, list[int], str]]:
    """Yield (name, shape, number format) of each tensor in a safetensors file, whose header must add up.

    Raises: WidthsError; OSError.
    """
    if not path.is_file():
        raise WidthsError(f"{path} is no file; download it again")
    with open(path, "rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= LONGEST_HEADER:
            raise WidthsError(f"{path} is no safetensors file: its header says {length} bytes; download it again")
        content, size = file.read(length), os.fstat(file.fileno()).st_size - 8 - length
    try:
        header = parse_json(content)
    except ValueError as error:
        raise WidthsError(
            f"{path} is no safetensors file: its header is no JSON ({error}); download it again"
        ) from error
    if not isinstance(header, dict):
        raise WidthsError(f"{path} is no safetensors file: its header is no object; download it again")
    ends = [0]
    for name, entry in header.items():
        if name != "__metadata__":
            shape, dtype, place = _stated(entry)
            if place is None:
                raise WidthsError(f"{path} states no shape, format and place of {short(name)}; download it again")
            if dtype in _BITS and prod(shape) * _BITS[dtype] != 8 * (place[1] - place[0]):
                raise WidthsError(
                    f"{path} has another number of bytes of {short(name)} than it states; download it again"
                )
            ends += place
            yield name, shape, dtype
    ends = [*sorted(ends), size]
    if ends[::2] != ends[1::2]:
        raise WidthsError(f"{path} is cut short, or its tensors lie in each other; download it again")


def _stated(entry: Any) -> tuple[list[int], str, list[int] | None]:
    """Return shape, format and place of a tensor; no place if one of them is not stated."""
    found = entry if isinstance(entry, dict) else {}
    shape, place, dtype = _sizes(found.get("shape")), _sizes(found.get("data_offsets")), found.get("dtype")
    if shape is None or place is None or len(place) != 2 or place[0] > place[1] or not isinstance(dtype, str):
        return [], "", None
    return shape, dtype, place


def _sizes(values: Any) -> list[int] | None:
    """Return a list of sizes if it is one."""
    good = isinstance(values, list) and all(type(each) is int and 0 <= each < 1 << 62 for each in values)
    return values if good else None


def checked_tensors(folder: Path) -> Sequence[tuple[str, list[int], str]]:
    """Return what `folder_tensors` yields of a folder that everyone loads alike.

    Each tensor is in one file, and the index, if there is one, names each with its file. Raises: WidthsError; OSError.
    """
    found: dict[str, tuple[str, list[int], str]] = {}
    places: dict[str, str] = {}
    for path in sorted(folder.glob(WEIGHTS)):
        for name, shape, dtype in file_tensors(path):
            if name in places:
                raise WidthsError(f"{folder}: tensor {short(name)} is in {places[name]} and {path.name}; remove one")
            found[name], places[name] = (name, shape, dtype), path.name
    if not places:
        raise WidthsError(f"{folder} holds no {WEIGHTS}; only safetensors weights are read")
    if os.path.lexists(folder / INDEX_FILE):
        _check_index(folder, places)
    return list(found.values())


def index_map(path: Path) -> dict[str, str]:
    """Return in which file of its folder each tensor is, by an index. Raises: WidthsError."""
    try:
        index = read_json(path)
    except (OSError, ValueError) as error:
        raise WidthsError(f"{path} cannot be read ({error}); copy the folder again, whole") from error
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict):
        raise WidthsError(f"{path} is no index: it has no weight_map; copy the folder again, whole")
    for file in weight_map.values():
        if not isinstance(file, str) or Path(file).name != file:
            raise WidthsError(f"{path} names {short(file)}, no file of this folder; copy the folder again, whole")
    return weight_map


def _check_index(folder: Path, places: dict[str, str]) -> None:
    """Refuse an index that does not name each tensor with the file it is in. Raises: WidthsError."""
    path = folder / INDEX_FILE
    weight_map = index_map(path)
    for name, file in weight_map.items():
        if not Path(file).match(WEIGHTS):
            raise WidthsError(f"{path} names {short(file)}, no {WEIGHTS}; run ddp-vllm apply again")
        if not (folder / file).is_file():
            raise WidthsError(f"{folder} lacks the weight file {short(file)} of its index; copy it again, whole")
        if places.get(name) != file:
            where = places.get(name, "no file of the folder")
            fault = f"says that tensor {short(name)} is in {short(file)}, but it is in {where}"
            raise WidthsError(f"{path} {fault}; copy the folder again, whole")
    if missing := places.keys() - weight_map.keys():
        raise WidthsError(f"{path} does not name tensor {short(min(missing))}; copy the folder again, whole")
