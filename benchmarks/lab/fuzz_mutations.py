"""Damages a file for `fuzz.py`: its bytes, a value in its JSON, the header of its tensors, or the file itself."""

import json
import os
import random
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import safe_open

NASTY: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2, 3, 7, 2**31, 2**53, 2**63, -(2**63), 10**30, 0.5, -0.0, 1e-300, 1e308,
    float("inf"), float("-inf"), float("nan"), "", "x", "0", "-1", "model.safetensors", "../x", "/etc/passwd",
    "\x1b]0;a", "[red]", "<b>", "=1+1", "a" * 100_000, "\ud800", "é\u2028", "torch.float8_e4m3fn", [], {}, [[]],
    [None], {"": 0}, [1] * 50, {"a": {"b": {}}}, "{{ 9 ** 9 }}",
)  # fmt: skip


def of_bytes(content: bytes, rng: random.Random) -> tuple[bytes, str]:
    """Return damaged bytes and a description of the damage."""
    data, size = bytearray(content), max(1, len(content))
    at, length = rng.randrange(size), rng.choice((1, 1, 2, 8, 64, size // 4 + 1))
    way = rng.choice(("bit", "bit", "byte", "cut", "drop", "repeat", "noise", "zeros", "empty", "more", "swap"))
    if way == "bit" and data:
        data[at] ^= 1 << rng.randrange(8)
    elif way == "byte" and data:
        data[at] = rng.randrange(256)
    elif way == "cut":
        del data[at:]
    elif way == "drop":
        del data[at : at + length]
    elif way == "repeat":
        data[at:at] = data[at : at + length]
    elif way in ("noise", "zeros"):
        data[at : at + length] = rng.randbytes(length) if way == "noise" else bytes(length)
    elif way == "empty":
        data.clear()
    elif way == "more":
        data += rng.randbytes(length)
    else:
        other = rng.randrange(size)
        data[at : at + length], data[other : other + length] = data[other : other + length], data[at : at + length]
    return bytes(data), f"{way} at {at}"


def paths(found: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value inside."""
    parts = found.items() if isinstance(found, dict) else enumerate(found) if isinstance(found, list) else ()
    for key, value in parts:
        yield (*path, key)
        yield from paths(value, (*path, key))


WAYS = ("nasty", "nasty", "nasty", "near", "drop", "rename", "swap", "wrap", "nest", "grow")


def of_json(found: Any, rng: random.Random) -> tuple[Any, str]:
    """Return damaged JSON and a description of the damage."""
    found = json.loads(json.dumps(found))
    every = list(paths(found))
    if not every or rng.random() < 0.02:
        return rng.choice(NASTY), "the whole"
    shallow = [path for path in every if len(path) <= 2]
    path, way = rng.choice(shallow if rng.random() < 0.4 else every), rng.choice(WAYS)
    parent, key = _at(found, path[:-1]), path[-1]
    if way == "drop":
        del parent[key]
    elif way == "rename" and isinstance(parent, dict):
        parent[rng.choice(("", "x", "a.b", "model.x", "0", "9" * 30))] = parent.pop(key)
    elif way == "swap":
        _swap(found, path, rng.choice(every))
    else:
        parent[key] = _other(parent[key], way, rng)
    return found, f"{way} {'.'.join(map(str, path))[:80]}"


def _other(value: Any, way: str, rng: random.Random) -> Any:
    """Return the replacement of a value."""
    if way == "near" and isinstance(value, int | float) and not isinstance(value, bool):
        return rng.choice((value + 1, value - 1, -value, value * 2, value / 2))
    if way == "wrap":
        return rng.choice(([value], {"x": value}))
    if way == "grow" and isinstance(value, list):
        return value * rng.choice((2, 3, 1000))
    for _ in range(rng.choice((90, 200, 900)) if way == "nest" else 0):
        value = [value]
    return value if way == "nest" else rng.choice(NASTY)


def _swap(found: Any, one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    """Swap two values that are not nested in each other."""
    if other[: len(one)] != one and one[: len(other)] != other:
        here, there = _at(found, one[:-1]), _at(found, other[:-1])
        here[one[-1]], there[other[-1]] = there[other[-1]], here[one[-1]]


def _at(found: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        found = found[key]
    return found


def of_tensors(content: bytes, rng: random.Random) -> tuple[bytes, str]:
    """Return a safetensors file with a damaged header or damaged metadata, and a description of the damage."""
    (length,) = struct.unpack("<Q", content[:8])
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    inside = sorted(header.get("__metadata__", {}).keys() - {"format"})
    if inside and rng.random() < 0.6:
        name, metadata = rng.choice(inside), header["__metadata__"]
        changed, what = of_json(json.loads(metadata[name]), rng)
        if name == "ddp" and isinstance(changed, dict) and rng.random() < 0.9:
            changed.pop("checksums", None)  # as after editing by hand: without the checksum
        metadata[name] = _dumps(changed)
        what = f"{name}: {what}"
    else:
        header, what = of_json(header, rng)
    text = _dumps(header).encode("utf-8", "surrogatepass")
    stated = len(text) if rng.random() < 0.97 else rng.choice((0, 1, len(text) - 1, len(text) + 1, 2**40, 2**63))
    return struct.pack("<Q", stated) + text + data, f"header: {what}"


def is_sealed(path: Path) -> bool:
    """Return whether a masks file has a checksum."""
    with safe_open(path, framework="numpy") as file:
        return "checksums" in json.loads((file.metadata() or {}).get("ddp", "{}"))


def _dumps(found: Any) -> str:
    text = json.dumps(found)
    return text[:-1] + "," + text[1:] if text.startswith('{"') and len(text) % 41 == 0 else text  # names twice


def mutate(path: Path, rng: random.Random) -> str:
    """Damage a file and return a description of the damage."""
    content = path.read_bytes()
    path.unlink()
    chance = rng.random()
    if chance < 0.03:
        kind = rng.choice(("missing", "folder", "dangling link", "pipe", "endless"))
        if kind == "folder":
            path.mkdir()
        elif kind == "dangling link":
            path.symlink_to("nowhere")
        elif kind == "pipe":
            os.mkfifo(path)
        elif kind == "endless":
            path.symlink_to("/dev/zero")
        return kind
    way = of_bytes
    if chance < 0.75 and path.suffix in (".json", ".jsonl", ".safetensors"):
        way = of_tensors if path.suffix == ".safetensors" else _of_json_text
    changed, what = way(content, rng)
    path.write_bytes(changed)
    return what


def _of_json_text(content: bytes, rng: random.Random) -> tuple[bytes, str]:
    lines = content.decode().splitlines()
    if len(lines) > 1 and lines[0].endswith("}"):  # one object per line
        number = rng.randrange(len(lines))
        changed, what = of_json(json.loads(lines[number]), rng)
        lines[number] = _dumps(changed)
        return "\n".join(lines).encode("utf-8", "surrogatepass"), f"line {number}: {what}"
    changed, what = of_json(json.loads(content), rng)
    return _dumps(changed).encode("utf-8", "surrogatepass"), what
