"""Documents of a file, and files beside each other, take turns; what is held out of any of them is not learned on."""

import re
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from test_tokens import DOCUMENTS, _documents, _load, _write
from transformers import PreTrainedTokenizerFast

from ddp_prune import tokens
from ddp_prune.tokens import load_tokenizer, read_excerpts, sources_of
from ddp_vllm.errors import TextError


@pytest.fixture
def tokenizer(tiny_model: Path) -> PreTrainedTokenizerFast:
    return load_tokenizer(str(tiny_model))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DDP_VLLM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_documents_of_a_file_take_turns(tokenizer: Any, tmp_path: Path) -> None:
    """Two thirds are long. All give one excerpt before one gives a second, and each starts somewhere else."""
    texts = [f"{i} " + " ".join(f"{i}.{j}" for j in range(100 if i % 3 else 3)) for i in range(60)]
    file = _write(tmp_path / "long.jsonl", [{"text": text} for text in texts])
    numbered = list(read_excerpts(str(file), tokenizer, 0, size=80, few=12))
    first, later = numbered[:60], numbered[60:]
    assert [number for number, _ in first] == list(range(60)) and [number for number, _ in later[:40]] == sorted(
        {number for number, _ in later}
    )
    assert sum(excerpt.startswith(f"{i} ") for _, excerpt in first for i in range(60)) < 40  # 20 are short and whole
    whole = {number: sorted("".join(e for n, e in numbered if n == number)) for number in range(60)}
    assert sorted(map(str, whole.values())) == sorted(str(sorted(text)) for text in texts)


@pytest.mark.parametrize("streamed", [False, True])
def test_short_documents_are_not_read_again_for_a_long_one(
    streamed: bool, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["", *DOCUMENTS[:20], "", " ".join(f"{i} fox" for i in range(40)), *DOCUMENTS[20:]]
    data = str(_write(tmp_path / "a.jsonl", [{"text": text} for text in texts]))
    if streamed:
        rows = datasets.load_dataset("json", data_files=data, split="train", streaming=True)
        monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: rows)
        data = "somebody/text"
    read: list[str] = []
    document = tokens._document
    monkeypatch.setattr(tokens, "_document", lambda row, *more: read.append(row["text"]) or document(row, *more))
    found = [text for _, text in read_excerpts(data, tokenizer, 0, size=80, few=10)]
    assert sorted(found) == sorted(piece for text in texts for piece in tokens._cut(text, 80))
    assert len(read) == len(texts) + len(tokens._cut(texts[22], 80)) - 1


def test_sources_take_turns(tokenizer: Any, tmp_path: Path) -> None:
    """The one named twice has two; a document keeps its number; who has more takes the turns of who has not."""
    a, b, c = (
        str(_write(tmp_path / f"{name}.jsonl", _long_rows(name, count)))
        for name, count in (("a", 90), ("b", 30), ("c", 9))
    )
    numbered = list(read_excerpts(f"{a}, {a}, {b},{c}", tokenizer, 0, size=80, few=12))
    documents = [excerpt.split()[0].partition(".")[0] for _, excerpt in numbered]
    assert "".join(document[0] for document in documents[:16]) == "aabc" * 4
    assert [number for number, _ in numbered[:36]] == list(range(36))  # then c gives second excerpts
    assert len(set(documents)) == 90 + 30 + 9
    assert len({(number, document) for (number, _), document in zip(numbered, documents, strict=True)}) == 90 + 30 + 9
    assert {document[0] for document in documents[-30:]} == {"a"}


def test_what_is_held_out_of_any_source_is_not_learned_on(tokenizer: Any, tmp_path: Path) -> None:
    names = [str(_write(tmp_path / f"{name}.jsonl", _long_rows(name, 100))) for name in "abc"]
    blocks = _load(",".join(names), tokenizer, heldout_blocks=60)
    heldout, learned = (
        {text.split(".")[0] for text in _documents(tokenizer, part)} for part in (blocks.heldout, blocks.train)
    )
    assert {document[0] for document in heldout} == {document[0] for document in learned} == set("abc")
    assert not heldout & learned


@pytest.mark.parametrize("seed", range(4))
def test_a_small_source_in_its_second_turn_gives_nothing_that_was_held_out(
    seed: int, tokenizer: Any, tmp_path: Path
) -> None:
    """Held-out text is still being read when it starts anew; its documents are long, those of the other one word."""
    small = _write(tmp_path / "a.jsonl", [{"text": f"a{i}." * (40 if i < 3 else 1)} for i in range(24)])
    large = _write(tmp_path / "b.jsonl", [{"text": f"b{i}."} for i in range(4000)])
    blocks = _load(f"{small},{large}", tokenizer, heldout_blocks=12, seed=seed)
    heldout, learned = (
        set(re.findall(r"a\d+", tokenizer.decode(part.flatten()))) for part in (blocks.heldout, blocks.train)
    )
    assert heldout and not heldout & learned


@pytest.mark.parametrize("count", [1, 4, 8])
def test_a_source_that_is_held_out_whole_is_named(count: int, tokenizer: Any, tmp_path: Path) -> None:
    """Eight blocks take more of either than it has."""
    few = _write(tmp_path / "few.jsonl", [{"text": f"cat {number}"} for number in range(count)])
    many = _write(tmp_path / "many.jsonl", [{"text": f"fox {number}"} for number in range(500)])
    for data in (f"{few},{many}", f"{many},{few}"):
        with pytest.raises(TextError, match=r"all of \S*few.jsonl is held out"):
            _load(data, tokenizer, heldout_blocks=8)


def test_a_source_of_which_something_is_left_to_learn_on_is_taken(tokenizer: Any, tmp_path: Path) -> None:
    few = _write(tmp_path / "few.jsonl", [{"text": f"cat {number}"} for number in range(8)])
    many = _write(tmp_path / "many.jsonl", [{"text": f"fox {number}"} for number in range(500)])
    blocks = _load(f"{few},{many}", tokenizer, heldout_blocks=1)
    assert all("cat" in tokenizer.decode(part.flatten()) for part in (blocks.heldout, blocks.train))


def test_a_source_without_text_is_named(tokenizer: Any, tmp_path: Path) -> None:
    full, empty = _write(tmp_path / "a.jsonl", _long_rows("a", 90)), _write(tmp_path / "b.jsonl", [{"text": ""}] * 9)
    with pytest.raises(TextError, match=r"b\.jsonl holds no text; "):
        _load(f"{full},{empty}", tokenizer)


def test_one_file_by_two_names_is_one_source(tokenizer: Any, tmp_path: Path) -> None:
    file = _write(tmp_path / "a.jsonl", _long_rows("a", 90))
    same = tmp_path / "." / "x" / ".." / "a.jsonl"
    (tmp_path / "x").mkdir()
    assert sources_of(f"{file},{same}") == [str(file)] * 2
    assert sources_of("owner/name:part,owner/name") == ["owner/name:part", "owner/name"]


def test_the_cache_knows_every_source(tokenizer: Any, tmp_path: Path) -> None:
    first, second = (str(_write(tmp_path / f"{name}.jsonl", _long_rows(name, 90))) for name in "ab")
    blocks = _load(f"{first},{second}", tokenizer)
    _write(Path(second), _long_rows("c", 90))
    assert not torch.equal(_load(f"{first},{second}", tokenizer).train, blocks.train)
    assert not torch.equal(_load(f"{first},{first},{second}", tokenizer).train, blocks.train)


def _long_rows(name: str, count: int) -> list[dict[str, Any]]:
    return [{"text": " ".join(f"{name}{i}.{j}" for j in range(30))} for i in range(count)]


@pytest.mark.parametrize("data", ["a.jsonl,", ",", "", "a.jsonl, ,b.jsonl"])
def test_a_missing_name_of_a_source_is_refused(data: str, tokenizer: Any) -> None:
    with pytest.raises(TextError, match="name is missing"):
        _load(data, tokenizer)


def test_a_streamed_dataset_takes_turns_as_a_file_does(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real streaming, of a local file under a hub's name; more passes only where the text is short."""
    texts = [f"{i} " + " ".join(f"{i}.{j}" for j in range(100)) for i in range(60)]
    file, load = str(_write(tmp_path / "hub.jsonl", [{"text": text} for text in texts])), datasets.load_dataset
    names: list[tuple[Any, ...]] = []

    def load_file(*name: Any, **options: Any) -> Any:
        names.append(name)
        return load("json", data_files=file, cache_dir=str(tmp_path / "cache"), **options)

    monkeypatch.setattr(datasets, "load_dataset", load_file)
    numbered = list(read_excerpts("owner/name:part", tokenizer, 0, size=80, few=12))
    assert names == [("owner/name", "part")]
    assert [number for number, _ in numbered[:120]] == [*range(60), *range(60)]
    whole = {number: sorted("".join(e for n, e in numbered if n == number)) for number in range(60)}
    assert sorted(map(str, whole.values())) == sorted(str(sorted(text)) for text in texts)
    starts = [re.findall(r"\d+", excerpt)[0] for _, excerpt in numbered[:60]]
    assert starts != sorted(starts, key=int)  # shuffled among neighbours
