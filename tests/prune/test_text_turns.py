"""Documents of a source take turns, and so do several sources."""

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

from ddp_text.blocks import cut, excerpts_of, take_turns
from ddp_text.documents import Document, sources_of
from ddp_vllm.errors import TextError
from ddp_vllm.provenance import bare_name


@settings(max_examples=25)
@given(counts=st.lists(st.integers(0, 12), min_size=1, max_size=4), data=st.data())
def test_a_source_gives_as_many_documents_in_a_row_as_it_has_turns(counts: list[int], data: st.DataObject) -> None:
    """A source that is exhausted leaves its turns to the others, and no document is lost or repeated."""
    turns = data.draw(st.lists(st.integers(1, 3), min_size=len(counts), max_size=len(counts)))
    texts = {str(source): [f"{source}.{number}" for number in range(count)] for source, count in enumerate(counts)}
    columns = [
        [column[start : start + count] for start in range(0, len(column), count)]
        for column, count in zip(texts.values(), turns, strict=True)
    ]
    expected = [text for row in itertools.zip_longest(*columns, fillvalue=[]) for several in row for text in several]
    sources = {name: map(Document, column) for name, column in texts.items()}
    found = take_turns(sources, dict(zip(texts, turns, strict=True)))
    assert [document.text for document in found] == expected


@given(text=st.text(st.sampled_from("ab \n")), size=st.integers(1, 12))
def test_a_document_consists_of_its_excerpts(text: str, size: int) -> None:
    """This also holds if blanks are further apart than an excerpt is long; and an excerpt is not cut again."""
    excerpts = cut(Document(text), size)
    assert "".join(excerpt.text for excerpt in excerpts) == text and all(excerpt.text for excerpt in excerpts)
    assert len(excerpts) == (max(1, round(len(text) / size)) if text else 0)
    assert all(cut(each, size) == [each] for each in excerpts if size >= 5 or len(each.text) < 1.5 * size)


def test_documents_take_turns() -> None:
    """Each gives an excerpt before any gives a second. Not all start at their beginning. No excerpt is repeated."""
    texts = [f"{i} " + " ".join(f"{i}.{j}" for j in range(100 if i % 3 else 3)) for i in range(60)]
    found = [excerpt.text for excerpt in excerpts_of(map(Document, texts), 80, 0, set())]
    numbers = [int(re.findall(r"\d+", excerpt)[0]) for excerpt in found]
    long = [number for number in range(60) if number % 3]
    assert numbers[:60] == list(range(60)) and numbers[60:100] == long
    assert sum(excerpt.startswith(f"{i} ") for i, excerpt in enumerate(found[:60])) < 40  # 20 are short and whole
    assert sorted(found) == sorted(excerpt.text for text in texts for excerpt in cut(Document(text), 80))
    again = [excerpt.text for excerpt in excerpts_of(map(Document, texts), 80, 1, set())]
    assert again != found and sorted(again) == sorted(found)


def test_a_document_is_read_once() -> None:
    """A streamed one would be downloaded twice. At most a thousand documents take turns and are in memory."""
    read: list[str] = []

    def documents() -> Iterator[Document]:
        for text in texts:
            read.append(text)
            yield Document(text)

    texts = [f"{i} " + "fox " * (40 if i % 100 == 0 else 1) for i in range(2500)]
    excerpts = excerpts_of(documents(), 80, 0, set())
    first = [next(excerpts).text for _ in range(1000)]
    assert len(first) == len(read) == 1000
    rest = [excerpt.text for excerpt in excerpts]
    assert read == texts and sorted(first + rest) == sorted(
        excerpt.text for text in texts for excerpt in cut(Document(text), 80)
    )


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
    write_texts("c.jsonl", _long_texts("d", 9))
    assert not torch.equal(
        load(f"{a}:2, {b},{c}", heldout_blocks=1).train, blocks.train
    )  # the cache knows all


def test_one_file_by_two_names_is_one_source(tmp_path: Path, write_texts: Callable[..., Path]) -> None:
    file = write_texts("a.jsonl", ["fox"])
    (tmp_path / "x").mkdir()
    assert sources_of(f"{file},{tmp_path / '.' / 'x' / '..' / 'a.jsonl'}") == [str(file)] * 2
    assert sources_of("owner/name:part:2,owner/name") == ["owner/name:part", "owner/name:part", "owner/name"]
    for name in ("b.jsonl:3", "a,b.jsonl"):  # that is what it is called
        (tmp_path / name).write_text("{}")
        assert sources_of(f"{tmp_path}/{name}") == [f"{tmp_path}/{name}"]
    assert bare_name(f"{file}:3,owner/name:3") == "a.jsonl:3,owner/name:3"


@pytest.mark.parametrize("data", ["a.jsonl,", "", "a.jsonl, ,b.jsonl"])
def test_a_missing_name_of_a_source_is_refused(data: str, load: Callable[..., Any]) -> None:
    with pytest.raises(TextError, match="name is missing"):
        load(data)


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


def test_a_hub_dataset_that_breaks_off_is_named(load: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise ConnectionError("no hub\nin this test")

    texts = datasets.Dataset.from_dict({"text": _long_texts("h", 400)}).to_iterable_dataset()
    rows = texts.map(lambda row, place: row if place < 300 else refuse(), with_indices=True)
    for load_dataset in (refuse, lambda *_, **__: rows):
        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        with pytest.raises(TextError, match=r"owner/name cannot be read as text \(no hub in this test\); give a hub"):
            load("owner/name", heldout_blocks=1)
