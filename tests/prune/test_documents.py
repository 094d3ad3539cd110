"""Rows of any file as documents: every format, conversations by the chat template, bad text rejected in one line.

A conversation that a template rejects is made to alternate if that helps, and otherwise becomes plain text.
The templates are short forms of published ones, with the conditions that raise.
"""

import gzip
import json
import lzma
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import small_files

from ddp_prune.text.documents import Document, read_documents
from ddp_prune.text.messages import Notes
from ddp_prune.text.rows import Rows
from ddp_prune.text.templates import ChatTemplate
from ddp_vllm.errors import OutputError, TextError

DOCUMENTS = [f"document {number} says fox {number * number} twice: fox {number * number}." for number in range(60)]


def _compress_zst(data: bytes) -> bytes:
    import zstandard

    return zstandard.compress(data)


COMPRESSIONS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes, ".gz": gzip.compress, ".xz": lzma.compress, ".zst": _compress_zst,
}  # fmt: skip


def document(row: Any, tokenizer: Any, notes: Notes | None = None) -> Document:
    """Return a row as a document."""
    rows = Rows(name="chat.jsonl", num_rows=1, read=lambda _: iter([(0, row)]))
    return next(read_documents(rows, ChatTemplate(tokenizer), notes or Notes()))


def in_loss(document: Document) -> str:
    """Return the characters that contribute to the loss, with | for the others."""
    assert document.loss_mask is not None
    return "".join(
        character if mask else "|" for character, mask in zip(document.text, document.loss_mask, strict=True)
    )


def _write(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write rows in the format and compression that the name asks for."""
    compression = path.suffix if path.suffix in COMPRESSIONS else ""
    kind = Path(path.name.removesuffix(compression)).suffix
    if kind == ".parquet":
        import pyarrow
        import pyarrow.parquet

        sink = pyarrow.BufferOutputStream()
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), sink)
        data = sink.getvalue().to_pybytes()
    elif kind == ".json":
        data = json.dumps(rows).encode()
    elif kind == ".txt":
        data = "\n".join(row["text"] for row in rows).encode()
    else:
        data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(COMPRESSIONS[compression](data))
    return path


@pytest.mark.parametrize(
    ("kind", "compression"),
    [(".jsonl", ".zst"), (".json", ".xz"), (".parquet", ".gz"), (".txt", "")],
)  # fmt: skip
def test_every_format_gives_the_same_blocks(
    kind: str, compression: str, load: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without network. A text file is one document, also where paragraphs are apart, which `datasets` splits."""
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: pytest.fail("no network in this test"))
    texts = ["\n\n".join(DOCUMENTS)] if kind == ".txt" else DOCUMENTS
    expected = load(_write(tmp_path / "plain.jsonl", [{"text": text} for text in texts]))
    blocks = load(_write(tmp_path / f"other{kind}{compression}", [{"text": text} for text in texts]))
    assert torch.equal(blocks.train, expected.train) and torch.equal(blocks.heldout, expected.heldout)
    assert blocks.num_tokens == expected.num_tokens == expected.train.numel() + expected.heldout.numel()


def test_text_may_be_in_another_column(load: Callable[..., Any], tmp_path: Path) -> None:
    """Of several files, every one that has columns must have it; a .txt has none."""
    named = _write(tmp_path / "named.jsonl", [{"body": text, "text": "no"} for text in DOCUMENTS])
    expected = load(_write(tmp_path / "plain.jsonl", [{"text": text} for text in DOCUMENTS]))
    blocks = load(named, text_column="body")
    assert torch.equal(blocks.train, expected.train) and torch.equal(blocks.heldout, expected.heldout)
    (tmp_path / "book.txt").write_text("\n".join(DOCUMENTS))
    assert load(f"{tmp_path / 'book.txt'},{named}", text_column="body").num_tokens > blocks.num_tokens
    with pytest.raises(
        TextError, match=r"plain.jsonl, line 1 has no column body, only text; name another with --text-column"
    ):
        load(f"{named},{tmp_path / 'plain.jsonl'}", text_column="body")


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet.gz"])
def test_new_text_in_a_file_of_old_name_and_time_is_read(
    name: str, load: Callable[..., Any], tokenizer: Any, tmp_path: Path
) -> None:
    texts = []
    for animal in ("fox", "cat"):
        path = _write(tmp_path / name, [{"text": text.replace("fox", animal)} for text in DOCUMENTS])
        os.utime(path, (10**9, 10**9))
        texts.append(tokenizer.decode(load(path).train.flatten()))
    assert "fox" in texts[0] and "cat" in texts[1] and "fox" not in texts[1]


def test_a_file_name_is_no_pattern(load: Callable[..., Any], write_texts: Callable[..., Path]) -> None:
    """The file that the pattern would match is in the same folder."""
    expected = load(write_texts("expected.jsonl", DOCUMENTS))
    write_texts("plain v.jsonl", ["of somebody else"] * 60)
    blocks = load(write_texts("plain [v2].jsonl", DOCUMENTS))
    assert torch.equal(blocks.train, expected.train) and torch.equal(blocks.heldout, expected.heldout)


BAD: dict[str, tuple[str, bytes, list[str]]] = {  # file name, content, what the line must say
    "empty": ("a.txt", b"", ["is empty"]),
    "binary": ("a.jsonl", b"\x00\xff\xfe{\x9d" * 50, ["cannot be read"]),
    "no parquet": ("a.parquet", b"PAR1 but no more", ["cannot be read"]),
    "cut gzip": ("a.jsonl.gz", gzip.compress(b'{"text": "plain"}\n' * 999)[:40], ["cannot be read"]),
    "unknown ending": ("a.docx", b"words", ["unknown ending", ".docx", ".jsonl"]),
    "missing column": ("a.jsonl", b'{"body": "words", "id": 1}\n', ["no column text", "body", "id", "--text-column"]),
    "too short": ("a.jsonl", b'{"text": "a few words"}\n', ["tokens", "require 80", "--seq-len"]),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_text_is_one_line(case: str, load: Callable[..., Any], tmp_path: Path, cache: Path) -> None:
    name, content, words = BAD[case]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TextError) as caught:
        load(tmp_path / name)
    message = str(caught.value)
    assert name in message and "\n" not in message and ";" in message
    assert all(word in message for word in words), message
    assert not (cache / "tokens").exists()


MISTRAL = (  # Mixtral-8x7B-Instruct-v0.1, and Llama-2-chat but for its system turn
    "{{ '<s>' }}{% for m in messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}{% else %}{{ m['content'] + '</s>' }}"
    "{% endif %}{% endfor %}"
)
GEMMA = (  # Gemma-2-it
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}"
    "{{ '<' + m['role'] + '>' + m['content'] + '\n' }}{% endfor %}"
)
LENIENT = "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] }}{% endfor %}"
CASES: dict[str, tuple[str, list[tuple[str, str]], str]] = {  # template, turns, text
    "as it is": (MISTRAL, [("human", "a"), ("gpt", "b")], "<s>[INST] a [/INST]b</s>"),
    "assistant first": (MISTRAL, [("gpt", "x"), ("human", "a"), ("gpt", "b")], "<s>[INST] a [/INST]b</s>"),
    "twice the assistant first": (GEMMA, [("gpt", "x"), ("gpt", "y"), ("human", "a")], "<user>a\n"),
    "neighbors": (
        GEMMA,
        [("human", "a"), ("human", "b"), ("gpt", "c"), ("gpt", "d")],
        "<user>a\n\nb\n<assistant>c\n\nd\n",
    ),
    "neighbors after an empty turn": (GEMMA, [("human", "a"), ("gpt", ""), ("human", "b")], "<user>a\n\nb\n"),
    "system refused": (GEMMA, [("system", "s"), ("human", "a"), ("gpt", "b")], "s\n\na\n\nb"),
    "system is no user": (MISTRAL, [("system", "s"), ("human", "a"), ("gpt", "b")], "s\n\na\n\nb"),
    "other assistants": (
        LENIENT,
        [("user", "a"), ("chatgpt", "b"), ("human", "c"), ("bing", "d"), ("someone", "e"), ("bard", "f")],
        "<user>a<assistant>b<user>c<assistant>d<user>e<assistant>f",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_conversation_under_a_template(case: str, tokenizer: Any) -> None:
    tokenizer.chat_template, turns, expected = CASES[case]
    row = {"conversations": [{"from": speaker, "value": value} for speaker, value in turns]}
    assert document(row, tokenizer).text == expected


def test_parts_of_a_turn_are_joined_as_vllm_joins_them(tokenizer: Any) -> None:
    """For templates that read no parts; parts that are no text are dropped, also where a turn has no other."""
    tokenizer.chat_template = LENIENT
    picture = {"type": "image_url", "url": "cat.png"}
    hello, you = ({"type": "text", "text": word} for word in ("hello", "you"))
    turns = [("user", [hello, picture, you]), ("user", [picture]), ("assistant", [hello])]
    row = {"messages": [{"role": role, "content": content} for role, content in turns]}
    assert document(row, tokenizer).text == "<user>hello\nyou<assistant>hello"


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl"])
def test_a_full_disk_of_the_cache_is_not_blamed_on_the_text(
    name: str, load: Callable[..., Any], tmp_path: Path, cache: Path
) -> None:
    _write(tmp_path / name, [{"text": text} for text in DOCUMENTS * 9])
    with (
        small_files(9_000),
        pytest.raises(OutputError, match=f"the cache {cache} cannot be written .*; make room"),
    ):
        load(tmp_path / name)


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_a_line_that_is_nested_too_deeply_is_an_error(ending: str, tmp_path: Path, load: Callable[..., Any]) -> None:
    """Brackets in a text are text."""
    fine = json.dumps({"text": "[" * 500 + " a quick brown fox" * 50})
    path = tmp_path / f"text.jsonl{ending}"
    path.write_bytes(COMPRESSIONS[ending]("\n".join([fine] * 2).encode()))
    load(path)
    path.write_bytes(COMPRESSIONS[ending](f'{fine}\n{{"text": {"[" * 10**6}{"]" * 10**6}}}\n'.encode()))
    with pytest.raises(TextError, match="line 2: nested too deeply"):
        load(path)
