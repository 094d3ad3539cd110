"""Documents of a source, and sources beside each other, take turns; what `datasets` promises of that comes first."""

import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp_prune.text import cut, excerpts_of, sources_of, take_turns
from ddp_vllm.errors import TextError
from ddp_vllm.provenance import bare_name

COUNTS = st.lists(st.integers(1, 12), min_size=1, max_size=4)


def _stream(texts: list[str], **others: list[Any]) -> Any:
    """A local source: an Arrow table that is read as a stream."""
    return datasets.Dataset.from_dict({"text": texts, **others}).to_iterable_dataset()


def _lazy(texts: list[str]) -> Any:
    """A source as a streamed one is: a generator, whose columns are not known before it is read."""

    def rows() -> Iterator[dict[str, str]]:
        yield from ({"text": text} for text in texts)

    return datasets.IterableDataset.from_generator(rows)


def _in_turn(columns: list[list[str]]) -> list[str]:
    return [text for row in itertools.zip_longest(*columns) for text in row if text is not None]


def _interleaved(streams: list[Any]) -> list[str]:
    mixed = datasets.interleave_datasets(streams, stopping_strategy="all_exhausted_without_replacement")
    return [row["text"] for row in mixed]


@settings(max_examples=25)
@given(counts=COUNTS)
def test_datasets_takes_strict_turns_until_all_are_exhausted(counts: list[int]) -> None:
    """Each text once, the same order every time, and the turns of one that has no more go to the others."""
    texts = [[f"{source}.{number}" for number in range(count)] for source, count in enumerate(counts)]
    assert _interleaved([_stream(text) for text in texts]) == _in_turn(texts)
    assert _interleaved([_stream(text) for text in texts]) == _in_turn(texts)


def test_datasets_interleaves_local_and_streamed_sources(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(cache))
    texts = [[f"a{i}" for i in range(5)], [f"b{i}" for i in range(2)], [f"a{i}" for i in range(5)]]
    assert _interleaved([_stream(texts[0]), _lazy(texts[1]), _stream(texts[2])]) == _in_turn(texts)
    with pytest.raises(ValueError, match="Unable to interleave"):  # why a file is read as a stream
        _interleaved([datasets.Dataset.from_dict({"text": texts[0]}), _lazy(texts[1])])


def test_datasets_wants_the_same_columns(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Why `take_turns` states them, and why it is given texts alone."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(cache))
    with pytest.raises(ValueError, match="features can't be aligned"):
        _interleaved([_stream(["a", "b"], id=[1, 2]), _stream(["c"], id=["x"])])
    streams = {"a": _stream(["a", "b"], id=[1, 2]), "c": _stream(["c"], id=["x"]), "d": _lazy(["d"])}
    texts = {name: stream.select_columns(["text"]) for name, stream in streams.items()}
    assert list(take_turns(texts, {"a": 1, "c": 1, "d": 1})) == ["a", "c", "d", "b"]


@settings(max_examples=25)
@given(counts=COUNTS, data=st.data())
def test_a_source_gives_as_many_texts_in_a_row_as_it_has_turns(counts: list[int], data: st.DataObject) -> None:
    turns = data.draw(st.lists(st.integers(1, 3), min_size=len(counts), max_size=len(counts)))
    texts = {str(source): [f"{source}.{number}" for number in range(count)] for source, count in enumerate(counts)}
    given_at_once = [
        ["|".join(column[start : start + count]) for start in range(0, len(column), count)]
        for column, count in zip(texts.values(), turns, strict=True)
    ]
    expected = [text for several in _in_turn(given_at_once) for text in several.split("|")]
    streams = {name: _stream(column) for name, column in texts.items()}
    assert list(take_turns(streams, dict(zip(texts, turns, strict=True)))) == expected


@given(text=st.text(st.sampled_from("ab \n")), size=st.integers(1, 12))
def test_cut_texts_are_their_pieces(text: str, size: int) -> None:
    """Also where blanks are further apart than a piece is long; and a piece is not cut again."""
    pieces = cut(text, size)
    assert "".join(pieces) == text and all(pieces)
    assert len(pieces) == (max(1, round(len(text) / size)) if text else 0)
    assert all(cut(piece, size) == [piece] for piece in pieces if len(piece) < 1.5 * size)
    assert size < 5 or all(cut(piece, size) == [piece] for piece in pieces)


def test_documents_take_turns() -> None:
    """Two thirds are long. All give one excerpt before one gives a second, and they do not all begin at the beginning.

    Every excerpt is given once.
    """
    texts = [f"{i} " + " ".join(f"{i}.{j}" for j in range(100 if i % 3 else 3)) for i in range(60)]
    found = [row["text"] for row in excerpts_of(_stream(texts), 80, 0, set())]
    numbers = [int(re.findall(r"\d+", excerpt)[0]) for excerpt in found]
    long = [number for number in range(60) if number % 3]
    assert numbers[:60] == list(range(60)) and numbers[60:100] == long
    assert sum(excerpt.startswith(f"{i} ") for i, excerpt in enumerate(found[:60])) < 40  # 20 are short and whole
    assert sorted(found) == sorted(piece for text in texts for piece in cut(text, 80))
    again = [row["text"] for row in excerpts_of(_stream(texts), 80, 1, set())]
    assert again != found and sorted(again) == sorted(found)


def test_a_document_is_read_once() -> None:
    """A streamed one would be downloaded twice. Turns are taken among a thousand, so more are not needed in memory."""
    read: list[str] = []

    def count(row: dict[str, str]) -> dict[str, str]:
        read.append(row["text"])
        return row

    texts = [f"{i} " + "fox " * (40 if i % 100 == 0 else 1) for i in range(2500)]
    excerpts = iter(excerpts_of(_stream(texts).map(count), 80, 0, set()))
    first = [next(excerpts)["text"] for _ in range(1000)]
    assert len(first) == len(read) == 1000
    rest = [row["text"] for row in excerpts]
    assert read == texts and sorted(first + rest) == sorted(piece for text in texts for piece in cut(text, 80))


def _long_texts(name: str, count: int) -> list[str]:
    return [" ".join(f"{name}{i}.{j}" for j in range(30)) for i in range(count)]


def test_a_file_that_is_named_twice_has_two_turns(
    load: Callable[..., Any], tokenizer: Any, write_texts: Callable[..., Path]
) -> None:
    a, b, c = (
        write_texts(f"{name}.jsonl", _long_texts(name, count)) for name, count in (("a", 90), ("b", 30), ("c", 9))
    )
    blocks = load(f"{a}:2, {b},{c}", heldout_blocks=1)
    assert torch.equal(blocks.train, load(f"{a}, {a}, {b},{c}", heldout_blocks=1).train)
    order = [text.strip()[0] for text in tokenizer.decode(blocks.train.flatten()).split("<eos>")[:-1]]
    assert "".join(order[1:17]) == ("aabc" * 5)[1:17]
    assert set(order[-20:]) == {"a"}


def test_one_file_by_two_names_is_one_source(tmp_path: Path, write_texts: Callable[..., Path]) -> None:
    file = write_texts("a.jsonl", ["fox"])
    same = tmp_path / "." / "x" / ".." / "a.jsonl"
    (tmp_path / "x").mkdir()
    assert sources_of(f"{file},{same}") == [str(file)] * 2
    assert sources_of("owner/name:part:2,owner/name") == ["owner/name:part", "owner/name:part", "owner/name"]
    (tmp_path / "b.jsonl:3").write_text("{}")
    assert sources_of(f"{tmp_path}/b.jsonl:3") == [f"{tmp_path}/b.jsonl:3"]  # that is what it is called
    assert bare_name(f"{file}:3,owner/name:3") == "a.jsonl:3,owner/name:3"


def test_a_file_may_have_a_comma_in_its_name(write_texts: Callable[..., Path]) -> None:
    file = write_texts("a,b.jsonl", ["fox"])
    assert sources_of(str(file)) == [str(file)]


def test_the_cache_knows_every_source(load: Callable[..., Any], write_texts: Callable[..., Path]) -> None:
    first, second = (write_texts(f"{name}.jsonl", _long_texts(name, 90)) for name in "ab")
    blocks = load(f"{first},{second}")
    write_texts(second.name, _long_texts("c", 90))
    assert not torch.equal(load(f"{first},{second}").train, blocks.train)
    assert not torch.equal(load(f"{first},{first},{second}").train, blocks.train)


@pytest.mark.parametrize("data", ["a.jsonl,", ",", "", "a.jsonl, ,b.jsonl"])
def test_a_missing_name_of_a_source_is_refused(data: str, load: Callable[..., Any]) -> None:
    with pytest.raises(TextError, match="name is missing"):
        load(data)


def test_a_source_without_text_is_named(load: Callable[..., Any], write_texts: Callable[..., Path]) -> None:
    full, empty = write_texts("a.jsonl", _long_texts("a", 90)), write_texts("b.jsonl", [""] * 9)
    with pytest.raises(TextError, match=r"b\.jsonl holds no text; "):
        load(f"{full},{empty}")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Real streaming, of the local file hub.jsonl under any hub name; the names that were asked for."""
    names: list[tuple[Any, ...]] = []
    load_dataset = datasets.load_dataset

    def load_file(*name: Any, split: str, **options: Any) -> Any:
        names.append((*name, split))
        options["split"] = "train"  # the only one of a file
        file, cache = str(tmp_path / "hub.jsonl"), str(tmp_path / "hub")
        return load_dataset("json", data_files=file, cache_dir=cache, **options)

    monkeypatch.setattr(datasets, "load_dataset", load_file)
    return names


@pytest.mark.parametrize("beside", [False, True])
def test_a_hub_dataset_is_streamed_beside_a_file(
    beside: bool, hub: list[Any], load: Callable[..., Any], tokenizer: Any, write_texts: Callable[..., Path]
) -> None:
    write_texts("hub.jsonl", _long_texts("h", 300))
    file = write_texts("file.jsonl", _long_texts("f", 300))
    data = f"owner/name:part,{file}" if beside else "owner/name:part:validation"
    blocks = [load(data, train_blocks=200, heldout_blocks=4, seed=seed) for seed in (0, 0, 1)]
    assert set(hub) == {("owner/name", "part", "train" if beside else "validation")}
    starts = [text.strip() for text in tokenizer.decode(blocks[0].train.flatten()).split("<eos>")[1:]]
    assert {start[0] for start in starts} == {"h", "f"} if beside else {"h"}
    numbers = [int(re.findall(r"\d+", start)[0]) for start in starts if start[0] == "h"]
    assert numbers != sorted(numbers)  # shuffled among neighbours
    assert torch.equal(blocks[0].heldout, blocks[2].heldout) and not torch.equal(blocks[0].train, blocks[2].train)


def test_a_hub_dataset_that_breaks_off_is_named(
    load: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise ConnectionError("no hub\nin this test")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(TextError, match=r"owner/name cannot be read as text \(no hub in this test\); give a hub"):
        load("owner/name")
    rows = _stream(_long_texts("h", 400)).map(lambda row, place: row if place < 300 else refuse(), with_indices=True)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: rows)
    with pytest.raises(TextError, match=r"owner/name cannot be read as text \(no hub in this test\); give a hub"):
        load("owner/name", heldout_blocks=1)
