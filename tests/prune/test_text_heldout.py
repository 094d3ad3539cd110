"""Held-out text depends on the documents alone and is not trained on; some of every source is trained on."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ddp_text.blocks import cut, excerpts_of, hash_of, hold_out
from ddp_text.documents import Document
from ddp_vllm.errors import TextError

Write = Callable[[str, list[str]], Path]


def _texts(name: str, count: int, words: int = 30) -> list[str]:
    return [" ".join(f"{name}{i}.{j}" for j in range(words)) for i in range(count)]


def _cut(text: str, size: int) -> list[str]:
    return [excerpt.text for excerpt in cut(Document(text), size)]


def _found(tokenizer: Any, tokens_BT: torch.Tensor) -> set[str]:
    """Return the documents of which a whole word is in these blocks."""
    return set(re.findall(r"\b([a-z]\d+)\.", tokenizer.decode(tokens_BT.flatten())))


@pytest.mark.parametrize("words", [3, 300])
def test_it_is_the_same_for_any_seed_number_of_steps_and_order_of_documents(
    words: int, load: Callable[..., Any], tokenizer: Any, write_texts: Write
) -> None:
    """And more of it is the same and then other documents."""
    a, b = _texts("a", 100, words), _texts("b", 100, words)
    data = f"{write_texts('a.jsonl', a)},{write_texts('b.jsonl', b)}"
    first = load(data, seed=0)
    for seed, train_blocks in ((1, 10_000), (0, 40), (2, 7)):
        assert torch.equal(load(data, seed=seed, train_blocks=train_blocks).heldout, first.heldout)
    assert not torch.equal(load(data, seed=1).train, first.train)
    assert torch.equal(load(data, heldout_blocks=9).heldout[:3], first.heldout)
    write_texts("a.jsonl", a[::-1])
    assert torch.equal(load(data).heldout, first.heldout)


@pytest.mark.parametrize("heldout_blocks", [1, 60])
def test_no_document_is_both_held_out_and_trained_on(
    heldout_blocks: int, load: Callable[..., Any], tokenizer: Any, write_texts: Write
) -> None:
    data = ",".join(str(write_texts(f"{name}.jsonl", _texts(name, 100))) for name in "abc")
    blocks = load(data, heldout_blocks=heldout_blocks)
    heldout, trained = (_found(tokenizer, part) for part in (blocks.heldout, blocks.train))
    assert heldout and not heldout & trained
    assert {document[0] for document in trained} == set("abc")
    assert heldout_blocks < 60 or {document[0] for document in heldout} == set("abc")


def test_a_copy_in_another_source_is_held_out_too(load: Callable[..., Any], tokenizer: Any, write_texts: Write) -> None:
    """This also holds if one source is so short that its excerpts count as documents, and the other is not."""
    texts = _texts("a", 6, 300)
    short, long = write_texts("a.jsonl", texts), write_texts("b.jsonl", texts + _texts("b", 200))
    for data in (f"{short},{long}", f"{long},{short}"):
        blocks = load(data, heldout_blocks=9)
        heldout, trained = (
            set(re.findall(r"\b[a-z]\d+\.\d+ ", tokenizer.decode(part.flatten())))
            for part in (blocks.heldout, blocks.train)
        )
        assert any(word.startswith("a") for word in heldout) and not heldout & trained


def test_excerpts_of_a_book_count_as_documents(load: Callable[..., Any], tokenizer: Any, tmp_path: Path) -> None:
    book = tmp_path / "book.txt"
    book.write_text(_texts("a", 1, 1000)[0])
    first, second = (load(book, seed=seed) for seed in (0, 1))
    assert torch.equal(first.heldout, second.heldout) and not torch.equal(first.train, second.train)
    words = [
        set(re.findall(r"(?<= )a\d+\.\d+(?= )", tokenizer.decode(part.flatten())))
        for part in (first.heldout, first.train)
    ]
    assert words[0] and not words[0] & words[1]
    assert len(words[1]) > 700


def test_many_short_documents_do_not_keep_a_book_from_being_held_out(
    load: Callable[..., Any], write_texts: Write
) -> None:
    """One excerpt of each document is less than the held-out text, so all excerpts count as documents."""
    file = write_texts("a.jsonl", [*(f"{i}" for i in range(100)), *_texts("book", 2, 2000)])
    blocks = load(file, heldout_blocks=100)
    assert len(blocks.heldout) == 100 and len(blocks.train) > 100


@pytest.mark.parametrize("few", [["cat"], ["cat"] * 4, [f"cat {number}" for number in range(8)], [""] * 9], ids=len)
def test_a_source_that_is_held_out_whole_is_named(few: list[str], load: Callable[..., Any], write_texts: Write) -> None:
    """Eight blocks are more than either source has."""
    names = [write_texts("few.jsonl", few), write_texts("many.jsonl", [f"fox {number}" for number in range(500)])]
    for data in (names, names[::-1]):
        with pytest.raises(TextError, match=r"few\.jsonl holds no text, or all of it is held out"):
            load(",".join(map(str, data)), heldout_blocks=8)


def test_of_a_stream_it_is_chosen_among_the_first_documents(
    load: Callable[..., Any], tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only 16 times as much as needed is read for it; training text may come from anywhere."""
    rows = datasets.Dataset.from_dict({"text": _texts("a", 5000)}).to_iterable_dataset()
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: rows)
    blocks = load("owner/name", train_blocks=400)
    heldout, trained = (_found(tokenizer, part) for part in (blocks.heldout, blocks.train))
    assert heldout and max(int(document[1:]) for document in heldout) < 60 < max(int(name[1:]) for name in trained)
    assert not heldout & trained


@given(
    corpora=st.lists(st.lists(st.text(st.sampled_from("ab "), max_size=40), max_size=12), min_size=1, max_size=3),
    size=st.integers(5, 12),
    wanted=st.integers(1, 60),
    seed=st.integers(0, 3),
)
def test_each_excerpt_is_either_held_out_or_trained_on(
    corpora: list[list[str]], size: int, wanted: int, seed: int
) -> None:
    """The tokenizer is one of characters."""

    class Characters:
        eos_token_id = 0

        def __call__(self, texts: list[str], **_: Any) -> dict[str, list[list[int]]]:
            return {"input_ids": [[ord(character) for character in text] for text in texts]}

    documents = sorted({text for corpus in corpora for text in corpus}, key=hash_of)
    tokens, hidden = hold_out(map(Document, documents), Characters(), size, wanted)
    assert len(tokens.ids) == wanted or hidden == {excerpt for text in documents for excerpt in _cut(text, size)}
    for corpus in corpora:
        trained = [excerpt.text for excerpt in excerpts_of(map(Document, corpus), size, seed, hidden)]
        assert sorted(trained) == sorted(each for text in corpus for each in _cut(text, size) if each not in hidden)
