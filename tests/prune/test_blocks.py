"""Blocks of tokens: their content, their first token, their cache, which of them are held out, and who takes turns."""

import hashlib
import importlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import seams
import torch
from commands import write_lines
from seams import ChatTemplate, blocks_module, check_watched, load_blocks, sources_of
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from ddp_vllm.errors import TextError
from ddp_vllm.names import absolute_name, bare_name

Write = Callable[[str, list[str]], Path]
Load = Callable[..., Any]
DOCUMENTS = [f"document {number} says fox {number * number} twice: fox {number * number}." for number in range(60)]


@pytest.fixture
def jsonl(write_texts: Write) -> Path:
    return write_texts("plain.jsonl", DOCUMENTS)


CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.reasoning_content %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}"
    "{{ (m.content or '') + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WORDS = ["fox", "crow", "cheese", "river", "cloud", "harbour", "boat", "lantern", "winter", "bread"]
GOLDEN = {  # data, seed, most training blocks, held-out blocks -> training blocks, loss mask, held-out blocks
    ("plain.jsonl", 0, 40, 4): ("eebbe5874564", "7b9e7b8c3c5f", "8f7a4605c414"),
    # a tokenizer that begins every text with BOS, as Llama-3's does
    ("BOS plain.jsonl", 0, 40, 4): ("9cdd5d6ca972", "7b9e7b8c3c5f", "3f2f368e5973"),
    ("plain.jsonl", 3, 40, 4): ("93b0e9278f63", "7b9e7b8c3c5f", "8f7a4605c414"),
    ("book.txt", 0, 40, 4): ("b40d386db5d6", "7b9e7b8c3c5f", "b97c3aee7a8c"),
    ("chats.jsonl", 0, 40, 4): ("830a086c742d", "50e1dcedfee3", "999909e435ff"),
    ("answers.jsonl", 0, 40, 4): ("e0f12b3fa5bd", "0ede401a1643", "9d35cafa2ecd"),
    ("plain.jsonl:2,chats.jsonl", 0, 40, 4): ("33c05cb6f43b", "443e0da2ec94", "8f7a4605c414"),
    # all text: sources end one after another, and a copy of a document that is held out is not trained on
    ("plain.jsonl:2,chats.jsonl,copies.jsonl:3", 0, 10_000, 20): ("1670c325f314", "49098f0d0945", "d129df02dc22"),
    ("long.jsonl", 0, 40, 4): ("81fa9ae26318", "7b9e7b8c3c5f", "6e6c760db838"),
}


def write_golden_texts(folder: Path) -> None:
    plain = [
        " ".join(f"the {WORDS[i * j % 10]} {i * j} sees a {WORDS[(i + j) % 10]}." for j in range(9)) for i in range(80)
    ]
    chats = []
    for i in range(60):
        question = {"role": "user", "content": f"how many {WORDS[i % 10]} are {i}?"}
        answer = {"role": "assistant", "content": f"{i} {WORDS[i % 7]}, I think."}
        again = [{"role": "user", "content": "why?"}, answer | {"content": f"because {i}", "weight": 0}]
        chats.append({"messages": [question, answer, *again[: 2 * (i % 2)]]})
    book = " ".join(f"rain fell on the {WORDS[i % 10]} while {i} boats waited." for i in range(200))
    (folder / "book.txt").write_text(book)
    rows = {"plain": [{"text": text} for text in plain], "chats": chats}
    question = {"role": "user", "content": "tell me"}
    answers = [{"role": "assistant", "content": f"{i} {book[:900]}"} for i in range(40)]  # of several excerpts
    rows["answers"] = [{"messages": [question, answer]} for answer in answers]
    rows["copies"] = [*rows["plain"], {"text": ""}]
    rows["long"] = [{"text": f"{WORDS[i % 10]} {i}: {book[:1500]}"} for i in range(90)]  # of several excerpts each
    for name, lines in rows.items():
        write_lines(folder / f"{name}.jsonl", lines)


def digest(values: torch.Tensor) -> str:
    content = f"{list(values.shape)}".encode() + values.to(torch.int32).numpy().tobytes()
    return hashlib.sha256(content).hexdigest()[:12]


@pytest.mark.parametrize("case", GOLDEN, ids=str)
def test_texts_become_the_same_tokens_loss_masks_and_held_out_excerpts_as_ever(
    case: tuple[str, int, int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    """A change of one of these values means that a saved run, a token cache and published figures belong to other
    text. The tokenizer has a token per byte, and two special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<eos>": 0, "<|im_start|>": 1, "<|im_end|>": 2} | {part: 3 + i for i, part in enumerate(alphabet)}
    raw = Tokenizer(models.BPE(vocabulary, []))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    if case[0].startswith("BOS"):
        raw.post_processor = TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<|im_start|>", eos_token="<eos>", additional_special_tokens=["<|im_end|>"],
        chat_template=CHATML,
    )  # fmt: skip
    write_golden_texts(tmp_path)
    monkeypatch.chdir(tmp_path)
    sizes = dict(zip(("seed", "train_blocks", "heldout_blocks"), case[1:], strict=True))
    blocks = load_blocks(case[0].removeprefix("BOS "), tokenizer, seq_len=32, min_train_blocks=2, **sizes)
    assert bool((blocks.train[:, 0] == 1).all() and (blocks.heldout[:, 0] == 1).all()) is case[0].startswith("BOS")
    digests = tuple(map(digest, (blocks.train, blocks.loss_mask, blocks.heldout)))
    assert digests == GOLDEN[case], digests


def test_the_cache_is_keyed_by_content(
    jsonl: Path, load: Load, tokenizer: Any, write_texts: Write, cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    first = load(jsonl)
    (file,) = (cache / "tokens").iterdir()
    arrays, notes = blocks_module.saved_blocks(file)
    arrays["train"] = arrays["train"][::-1].copy()  # undone by tokenizing
    blocks_module.save_blocks(file, arrays, notes)
    again = load(jsonl)
    assert torch.equal(again.train, first.train.flipud()) and torch.equal(again.heldout, first.heldout)
    write_texts(jsonl.name, [text.replace("fox", "cat") for text in DOCUMENTS])
    assert "cat" in tokenizer.decode(load(jsonl).train.flatten())
    load(jsonl, seq_len=8)
    assert len(list((cache / "tokens").iterdir())) == 3
    monkeypatch.setattr(blocks_module, "VERSION", blocks_module.VERSION + 1)
    load(jsonl, seq_len=8)
    tokenizer.chat_template = "{{ messages }}"
    load(jsonl, seq_len=8)
    assert len(list((cache / "tokens").iterdir())) == 5
    assert sorted(folder.name for folder in cache.iterdir()) == ["tokens"]


def test_a_damaged_cache_is_written_again(jsonl: Path, load: Load, cache: Path) -> None:
    """One that is cut off, and one whose header lacks what it should hold."""
    first = load(jsonl)
    (file,) = (cache / "tokens").iterdir()
    whole = file.read_bytes()
    for damaged in (whole[:-1], whole.replace(b'"notes"', b'"nodes"', 1), whole.replace(b'"train"', b'"trail"', 1)):
        assert damaged != whole
        file.write_bytes(damaged)
        assert torch.equal(load(jsonl).train, first.train)
    assert file.stat().st_mode & 0o777 == 0o600 and blocks_module.saved_blocks(file) is not None


def texts_of(name: str, count: int, words: int = 30) -> list[str]:
    return [" ".join(f"{name}{i}.{j}" for j in range(words)) for i in range(count)]


@pytest.mark.parametrize("words", [3, 300])
def test_held_out_text_depends_on_no_seed_steps_or_order(words: int, load: Load, write_texts: Write) -> None:
    """And more of it is the same and then other documents."""
    a, b = texts_of("a", 100, words), texts_of("b", 100, words)
    data = f"{write_texts('a.jsonl', a)},{write_texts('b.jsonl', b)}"
    first = load(data, seed=0)
    for seed, train_blocks in ((1, 10_000), (0, 40), (2, 7)):
        assert torch.equal(load(data, seed=seed, train_blocks=train_blocks).heldout, first.heldout)
    assert torch.equal(load(data, seed=0).train, first.train)
    assert not torch.equal(load(data, seed=1).train, first.train)
    assert torch.equal(load(data, heldout_blocks=9).heldout[:3], first.heldout)
    write_texts("a.jsonl", a[::-1])
    assert torch.equal(load(data).heldout, first.heldout)


@pytest.mark.parametrize("few", [["cat"] * 4, [""] * 9], ids=len)
def test_a_source_that_is_held_out_whole_is_named(few: list[str], load: Load, write_texts: Write) -> None:
    names = [write_texts("few.jsonl", few), write_texts("many.jsonl", [f"fox {number}" for number in range(500)])]
    for data in (names, names[::-1]):
        with pytest.raises(TextError, match=r"few\.jsonl holds no text, or all of it is held out"):
            load(",".join(map(str, data)), heldout_blocks=8)


@pytest.mark.parametrize("words", [8, 300])
def test_text_of_which_a_part_is_trained_on_is_not_watched(words: int, load: Load, write_texts: Write) -> None:
    """Whatever its name, its order and its other text; text that is only held out may be watched."""
    texts, only = texts_of("a", 60, words), {"train_blocks": 1, "min_train_blocks": 0}
    blocks = load(write_texts("a.jsonl", texts), heldout_blocks=2)
    other = load(write_texts("b.jsonl", texts_of("b", 60, words)), heldout_blocks=40, **only)
    check_watched(other, "b.jsonl", blocks, "a.jsonl")
    mixed = write_texts("c.jsonl", [*texts_of("b", 30, words), *texts[:30][::-1]])
    for _ in range(2):  # the second time from the cache
        watched = load(mixed, heldout_blocks=40, **only)
        with pytest.raises(TextError, match=r"a\.jsonl trains on \d+ of the \d+ excerpts that are held out of c\.js"):
            check_watched(watched, "c.jsonl", blocks, "a.jsonl")
    again = load(write_texts("d.jsonl", texts), heldout_blocks=2, **only)
    assert again.heldout.equal(blocks.heldout)
    check_watched(again, "d.jsonl", blocks, "a.jsonl")


def test_text_is_recognized_in_other_rows_and_with_other_blanks(load: Load, write_texts: Write) -> None:
    """Not what every document begins with, which a template writes."""
    texts, only = texts_of("a", 60, 300), {"train_blocks": 1, "min_train_blocks": 0, "heldout_blocks": 40}
    same = " ".join(f"start{number}" for number in range(60))
    blocks = load(write_texts("a.jsonl", [f"{same} {text}" for text in texts]))
    joined = " ".join(texts)
    rows = [joined[start : start + 777] for start in range(0, len(joined), 777)]
    for name, changed in {"rows": rows, "blanks": [f"  also {text}" for text in texts]}.items():
        watched = load(write_texts(f"{name}.jsonl", changed), **only)
        assert seams.blocks_module.shared_runs(watched.heldout, blocks.train) > 0.1
        with pytest.raises(TextError, match=rf"a\.jsonl trains on .* held out of {name}\.jsonl"):
            check_watched(watched, f"{name}.jsonl", blocks, "a.jsonl")
    other = load(write_texts("b.jsonl", [f"{same} {text}" for text in texts_of("b", 60, 300)]), **only)
    check_watched(other, "b.jsonl", blocks, "a.jsonl")


def chats_of(count: int, turns: int = 6) -> list[dict[str, Any]]:
    """Conversations with an id each; every tenth is the same as the one before it, with another id."""
    words = [f"{WORDS[i % 9]} {i}" for i in (number - (number % 10 == 9) for number in range(count))]
    says = ("user", "assistant")
    return [
        {"id": i, "messages": [{"role": says[n % 2], "content": f"{word} sees {n}"} for n in range(turns)]}
        for i, word in enumerate(words)
    ]


@pytest.fixture
def renderings(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of messages of all conversations that are rendered."""
    rendered, render = list[int](), tokenizer.apply_chat_template
    tokenizer.chat_template = CHATML

    def count(messages: Any, **options: Any) -> Any:
        rendered.append(len(messages))
        return render(messages, **options)

    monkeypatch.setattr(tokenizer, "apply_chat_template", count)
    return rendered


def test_only_rows_that_are_used_are_rendered(load: Load, tmp_path: Path, renderings: list[int]) -> None:
    """Each at most three times, for training and for what is held out of it, however long it is. Copies of
    conversations that are held out are not trained on, and the copies are counted."""
    path = write_lines(tmp_path / "chats.jsonl", chats_of(20_000))
    few = load(path, train_blocks=4)
    assert len(renderings) < 300
    copies = "2,000 rows that are copies of others; copies of text that is held out are not trained on"
    assert any(note.endswith(copies) for note in few.notes)
    again = load(path, train_blocks=8, seed=5)
    assert torch.equal(few.heldout, again.heldout) and not torch.equal(few.train, again.train[:4])
    write_lines(path, chats_of(200, turns=2))
    every = load(path)
    assert not every.train_hashes & every.heldout_hashes and every.num_tokens > 100 * 16
    renderings.clear()
    load(path, heldout_blocks=0, train_blocks=4)
    assert len(renderings) < 150


def test_a_long_conversation_is_rendered_twice(tokenizer: Any, renderings: list[int], monkeypatch: Any) -> None:
    """Once as it is, and once with marks in the places of all answers, which are found where one mark at a time finds
    them."""
    template = ChatTemplate(tokenizer)
    (chat,) = chats_of(1, turns=40)
    template.render(chat["messages"][:2])  # what is asked of a template once
    renderings.clear()
    rendered = template.render(chat["messages"])
    assert len(renderings) == 2 and len(rendered.answers) == 20
    answers = [rendered.text[start:stop] for start, stop in rendered.answers]
    assert answers == [f"fox 0 sees {n}" for n in range(1, 40, 2)]
    monkeypatch.setattr(ChatTemplate, "_answers", lambda *_: {})
    assert template.render(chat["messages"]) == rendered


@pytest.mark.parametrize(
    ("speaker", "role"),
    [("assistant_1", "assistant"), ("human_0", "user"), ("User2", "user"), ("gpt-4o", "assistant"), ("bot_12", "")],
)
def test_an_ordinal_of_a_speaker_is_set_aside(speaker: str, role: str, tokenizer: Any) -> None:
    notes = seams.Notes()
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    turns = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    turns.insert(2 if role == "user" else 1, {"role": speaker, "content": "said"})
    text = seams.document({"messages": turns}, tokenizer, notes).text
    assert f"<{role or 'assistant'}>" in text and (not role or not any("unknown" in note for note in notes.counts))
    assert not role or f"<{role}>said" in text


def test_several_short_files_are_split_and_not_held_out_whole(load: Load, tmp_path: Path) -> None:
    """A book that is one document, also if little is held out."""
    names = [tmp_path / f"{word}.txt" for word in WORDS[:3]]
    for name in names:
        name.write_text(" ".join(f"{name.stem} {number}" for number in range(300)))
    blocks = load(",".join(map(str, names)), heldout_blocks=1)
    assert len(blocks.train) > 100 and len(blocks.heldout) == 1


def test_sources_keep_their_turns_to_the_end(load: Load, write_texts: Write) -> None:
    """A text that ends begins again while another lasts, and a line says so."""
    short = write_texts("short.jsonl", [f"fox {number} fox fox" for number in range(40)])
    long = write_texts("long.jsonl", [f"dog {number} dog dog" for number in range(900)])
    blocks = load(f"{short}:3,{long}", train_blocks=10**4, heldout_blocks=2)
    fox, dog = ((blocks.train == load(str(file)).train[0, 0]).sum(1).double() for file in (short, long))
    for part in (slice(0, 20), slice(-20, None)):
        assert 2.5 < fox[part].sum() / dog[part].sum() < 3.5
    (note,) = blocks.notes
    assert note.startswith(f"{short}: ") and "times begun anew" in note


def test_names_of_sources(tmp_path: Path, write_texts: Write, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """One file by two names is one source, and a missing name is refused."""
    file = write_texts("a.jsonl", ["fox"])
    (tmp_path / "x").mkdir()
    assert sources_of(f"{file},{tmp_path / '.' / 'x' / '..' / 'a.jsonl'}") == [str(file)] * 2
    assert sources_of("owner/name:part:2,owner/name") == ["owner/name:part", "owner/name:part", "owner/name"]
    for name in ("b.jsonl:3", "a,b.jsonl"):  # that is what it is called
        (tmp_path / name).write_text("{}")
        assert sources_of(f"{tmp_path}/{name}") == [f"{tmp_path}/{name}"]
    assert bare_name(f"{file}:3,owner/name:3") == "a.jsonl:3,owner/name:3"
    monkeypatch.chdir(tmp_path / "x")
    assert (bare_name("."), bare_name("../x/"), bare_name("")) == ("x", "x", "")
    assert absolute_name("../a.jsonl:3,owner/name") == f"{file}:3,owner/name"
    assert absolute_name("../a,b.jsonl") == f"{tmp_path}/a,b.jsonl"
    (tmp_path / "y,z").mkdir()
    (tmp_path / "y,z" / "c.jsonl").write_text("{}")
    monkeypatch.chdir(tmp_path / "y,z")
    assert absolute_name("c.jsonl,../a.jsonl") == "c.jsonl,../a.jsonl"  # its path would be two names
    for data in ("", "a.jsonl, ,b.jsonl"):
        with pytest.raises(TextError, match="name is missing"):
            load(data)


@pytest.fixture
def datasets(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The library of the hub's data, which takes seconds to import, and a hub within reach that no test asks."""
    monkeypatch.setattr("seams.rows_module.hub_fault", lambda: "")
    return importlib.import_module("datasets")


def test_a_hub_dataset_is_streamed_with_a_file(
    load: Load, tokenizer: Any, write_texts: Write, tmp_path: Path, datasets: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real streaming, of a local file under any hub name."""
    names: list[tuple[Any, ...]] = []
    load_dataset, hub = datasets.load_dataset, write_texts("hub.jsonl", texts_of("h", 300))

    def load_file(*name: Any, split: str, **options: Any) -> Any:
        names.append((*name, split))
        options["split"] = "train"  # the only one of a file
        return load_dataset("json", data_files=str(hub), cache_dir=str(tmp_path / "hub"), **options)

    monkeypatch.setattr(datasets, "load_dataset", load_file)
    file = write_texts("file.jsonl", texts_of("f", 300))
    data = f"owner/name:part:validation,{file}"
    blocks = [load(data, train_blocks=200, heldout_blocks=4, seed=seed) for seed in (0, 0, 1)]
    load("owner/name")
    assert set(names) == {("owner/name", "part", "validation"), ("owner/name", None, "train")}
    starts = [text.strip() for text in tokenizer.decode(blocks[0].train.flatten()).split("<eos>")[1:]]
    assert {start[0] for start in starts} == {"h", "f"}
    numbers = [int(re.findall(r"\d+", start)[0]) for start in starts if start[0] == "h"]
    assert numbers != sorted(numbers)  # shuffled among neighbors
    assert torch.equal(blocks[0].heldout, blocks[2].heldout) and not torch.equal(blocks[0].train, blocks[2].train)


def test_a_stream_whose_rows_hold_more_than_the_text_is_no_short_one(
    load: Load, tmp_path: Path, datasets: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As descriptions of tools, which the template leaves out: as much is trained on as of a file of these rows."""
    description = json.dumps([{"type": "function", "function": {"name": "f", "description": "x" * 9000}}])
    turns = [[{"from": "human", "value": f"{text}?"}, {"from": "gpt", "value": text}] for text in texts_of("h", 300, 1)]
    table = datasets.Dataset.from_dict({"conversations": turns, "tools": [description] * 300})
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: table.to_iterable_dataset())
    table.to_json(file := tmp_path / "rows.jsonl")
    streamed, stored = (load(str(name), train_blocks=10_000, heldout_blocks=4) for name in ("owner/name", file))
    assert len(streamed.train) == pytest.approx(len(stored.train), rel=0.02)


def test_a_hub_dataset_that_breaks_off_is_named(load: Load, datasets: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise ConnectionError("no hub\nin this test")

    texts = datasets.Dataset.from_dict({"text": texts_of("h", 400)}).to_iterable_dataset()
    rows = texts.map(lambda row, place: row if place < 300 else refuse(), with_indices=True)
    for load_dataset in (refuse, lambda *_, **__: rows):
        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        with pytest.raises(TextError, match=r"owner/name cannot be read as text \(no hub in this test\); give a hub"):
            load("owner/name", heldout_blocks=1)
