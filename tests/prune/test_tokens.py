"""Text in any supported file gives the same blocks; what is held out is not learned on; bad text is one line."""

import bz2
import gzip
import json
import lzma
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from ddp_prune import tokens
from ddp_prune.tokens import Blocks, load_blocks, load_tokenizer, read_excerpts
from ddp_vllm.errors import ModelError, TextError

DOCUMENTS = [f"document {number} says fox {number * number} twice: fox {number * number}." for number in range(60)]
SEQ_LEN = 16


def _compress_zst(data: bytes) -> bytes:
    import zstandard

    return zstandard.compress(data)


COMPRESSIONS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes, ".gz": gzip.compress, ".xz": lzma.compress, ".zst": _compress_zst,
}  # fmt: skip


@pytest.fixture
def tokenizer(tiny_model: Path) -> PreTrainedTokenizerFast:
    return load_tokenizer(str(tiny_model))


def _documents(tokenizer: Any, tokens_BT: torch.Tensor) -> list[str]:
    """Return the documents that lie wholly inside blocks; ByteLevel puts a blank before each."""
    return [text.removeprefix(" ") for text in tokenizer.decode(tokens_BT.flatten()).split("<eos>")[1:-1]]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DDP_VLLM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def _load(path: Path | str, tokenizer: Any, **changes: int) -> Blocks:
    sizes = {"seq_len": SEQ_LEN, "train_blocks": 10_000, "heldout_blocks": 3, "min_train_blocks": 2, "seed": 0}
    return load_blocks(str(path), tokenizer, **sizes | changes)


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
    else:
        data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(COMPRESSIONS[compression](data))
    return path


@pytest.fixture
def jsonl(tmp_path: Path) -> Path:
    return _write(tmp_path / "plain.jsonl", [{"text": text} for text in DOCUMENTS])


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("kind", [".jsonl", ".json", ".parquet"])
def test_every_format_gives_the_same_blocks(
    kind: str, compression: str, jsonl: Path, tokenizer: Any, tmp_path: Path
) -> None:
    expected = _load(jsonl, tokenizer)
    file = _write(tmp_path / f"other{kind}{compression}", [{"text": text} for text in DOCUMENTS])
    blocks = _load(file, tokenizer)
    assert torch.equal(blocks.train, expected.train) and torch.equal(blocks.heldout, expected.heldout)
    assert blocks.found == expected.found == expected.train.numel() + expected.heldout.numel()


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_all_of_a_text_file_is_given_once(compression: str, tokenizer: Any, tmp_path: Path) -> None:
    text = "\n\n".join(DOCUMENTS)
    file = tmp_path / f"book.txt{compression}"
    file.write_bytes(COMPRESSIONS[compression](text.encode()))
    excerpts = [excerpt for _, excerpt in read_excerpts(str(file), tokenizer, 0, size=80, few=12)]
    assert sorted("".join(excerpts)) == sorted(text) and all(excerpt in text for excerpt in excerpts)
    assert len(set(excerpts)) == len(excerpts) == round(len(text) / 80)
    blocks = _load(file, tokenizer)
    stream = [*_documents(tokenizer, blocks.heldout), *_documents(tokenizer, blocks.train)]
    assert len(stream) >= len(excerpts) - 4 and set(stream) <= {excerpt.removeprefix(" ") for excerpt in excerpts}


@pytest.mark.parametrize("size", [5, 40, 80])
def test_cut_texts_are_their_pieces(size: int) -> None:
    """Also where blanks are further apart than a piece is long."""
    text = " ".join("x" * (7 * i % 60) for i in range(80))
    assert "".join(tokens._cut(text, size)) == text


def test_no_document_is_both_held_out_and_learned_on(tokenizer: Any, tmp_path: Path) -> None:
    texts = [f"<{i}> " * 200 for i in range(20)]
    file = _write(tmp_path / "long.jsonl", [{"text": text} for text in texts])
    blocks = _load(file, tokenizer, train_blocks=200)
    heldout, train = (
        set(re.findall(r"<\d+>", tokenizer.decode(part.flatten()))) for part in (blocks.heldout, blocks.train)
    )
    assert 1 <= len(heldout) <= 3 and len(train) == 20 - len(heldout) and not heldout & train
    assert len(blocks.train) == 200  # more than a turn of the other documents


def test_local_text_is_read_without_network(jsonl: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def refuse(*address: Any, **_: Any) -> Any:
        asked.append(address)
        raise OSError("no network in this test")

    monkeypatch.setattr("socket.getaddrinfo", refuse)
    assert _load(jsonl, tokenizer).found > 0
    assert not asked


def test_documents_are_whole_shuffled_and_joined_by_eos(jsonl: Path, tokenizer: Any) -> None:
    orders = []
    for seed in (0, 1, 0):
        blocks = _load(jsonl, tokenizer, seed=seed)
        documents = [*_documents(tokenizer, blocks.heldout), *_documents(tokenizer, blocks.train)]
        assert len(set(documents)) == len(documents) >= len(DOCUMENTS) - 4 and set(documents) <= set(DOCUMENTS)
        orders.append(documents)
    assert orders[0] == orders[2] != orders[1]


def test_what_is_held_out_is_not_learned_on(jsonl: Path, tokenizer: Any) -> None:
    blocks = _load(jsonl, tokenizer, heldout_blocks=10)
    heldout, train = (set(_documents(tokenizer, part)) for part in (blocks.heldout, blocks.train))
    assert heldout and train and not heldout & train


def test_reading_stops_when_the_run_has_enough(jsonl: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Any] = []
    document = tokens._document
    monkeypatch.setattr(tokens, "_document", lambda row, *more: read.append(row["text"]) or document(row, *more))
    rows = [{"text": f"{i} {text}"} for i in range(5) for text in DOCUMENTS]  # the tokenizer takes 64 at a time
    blocks = _load(_write(jsonl, rows), tokenizer, train_blocks=4)
    assert blocks.train.shape == (4, SEQ_LEN) and blocks.heldout.shape == (3, SEQ_LEN)
    assert blocks.train.dtype == torch.int64
    assert len(read) == len(set(read)) < len(rows)  # none twice: a streamed one would be downloaded twice


def test_conversations_go_through_the_chat_template(tokenizer: Any, tmp_path: Path) -> None:
    sharegpt = [{"conversations": [{"from": "human", "value": text}, {"from": "gpt", "value": "yes"}]}
                for text in DOCUMENTS]  # fmt: skip
    openai = [{"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "yes"}]}
              for text in DOCUMENTS]  # fmt: skip
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    blocks = [_load(_write(tmp_path / f"{i}.jsonl", rows), tokenizer) for i, rows in enumerate((sharegpt, openai))]
    assert torch.equal(blocks[0].train, blocks[1].train)
    documents = set(_documents(tokenizer, blocks[0].train))
    assert documents and documents <= {f"[user] {text}\n[assistant] yes\n" for text in DOCUMENTS}
    tokenizer.chat_template = None
    plain = _load(tmp_path / "0.jsonl", tokenizer)
    documents = set(_documents(tokenizer, plain.train))
    assert documents and documents <= {f"{text}\n\nyes" for text in DOCUMENTS}


def test_the_cache_is_keyed_by_content(
    jsonl: Path, tokenizer: Any, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = _load(jsonl, tokenizer)
    (file,) = (cache / "tokens").iterdir()
    np.save(file, np.flipud(np.load(file)))  # a second load that tokenised would not see this
    again = _load(jsonl, tokenizer)
    assert torch.equal(torch.cat([again.heldout, again.train]), torch.cat([first.heldout, first.train]).flipud())
    assert again.found == first.found
    _write(jsonl, [{"text": text.replace("fox", "cat")} for text in DOCUMENTS])
    changed = _load(jsonl, tokenizer)
    assert "cat" in tokenizer.decode(changed.train.flatten()) and len(list((cache / "tokens").iterdir())) == 2
    _load(jsonl, tokenizer, seq_len=8)
    assert len(list((cache / "tokens").iterdir())) == 3


@pytest.mark.parametrize("left", [0, 20, 200])
def test_half_a_file_in_the_cache_is_made_again(left: int, jsonl: Path, tokenizer: Any, cache: Path) -> None:
    first = _load(jsonl, tokenizer)
    (file,) = (cache / "tokens").iterdir()
    file.write_bytes(file.read_bytes()[:left])
    assert torch.equal(_load(jsonl, tokenizer).train, first.train)
    assert len(np.load(file)) == len(first.train) + len(first.heldout)


def test_text_that_is_too_short_for_a_step_is_refused_from_the_cache_too(jsonl: Path, tokenizer: Any) -> None:
    num_blocks = len(_load(jsonl, tokenizer, min_train_blocks=1).train)
    with pytest.raises(TextError, match="tokens, but one step"):
        _load(jsonl, tokenizer, min_train_blocks=num_blocks + 1)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.json.xz", "a.parquet", "a.parquet.gz"])
def test_new_text_in_a_file_of_old_name_and_time_is_read(name: str, tokenizer: Any, tmp_path: Path) -> None:
    found = []
    for animal in ("fox", "cat"):
        rows = [{"text": text.replace("fox", animal)} for text in DOCUMENTS]
        path = _write(tmp_path / name, rows)
        os.utime(path, (10**9, 10**9))
        found.append(tokenizer.decode(_load(path, tokenizer).train.flatten()))
    assert "fox" in found[0] and "cat" in found[1] and "fox" not in found[1]


BAD: dict[str, tuple[str, bytes, list[str]]] = {  # file name, content, what the line must say
    "empty": ("a.txt", b"", ["is empty"]),
    "empty document": ("a.jsonl", b'{"text": ""}\n', ["0 tokens"]),
    "only blanks": ("a.jsonl", b"\n\n \n", ["a.jsonl"]),
    "binary": ("a.jsonl", b"\x00\xff\xfe{\x9d" * 50, ["cannot be read"]),
    "binary text": ("a.txt", b"\x00\xff\xfe\x9d" * 500, ["cannot be read"]),
    "no parquet": ("a.parquet", b"PAR1 but no more", ["cannot be read"]),
    "no gzip": ("a.jsonl.gz", b'{"text": "plain"}\n', ["cannot be read"]),
    "cut gzip": ("a.jsonl.gz", gzip.compress(b'{"text": "plain"}\n' * 999)[:40], ["cannot be read"]),
    "unknown ending": ("a.docx", b"words", ["unknown ending", ".docx", ".jsonl"]),
    "unknown compression": ("a.jsonl.bz2", bz2.compress(b'{"text": "x"}\n'), ["unknown ending", ".bz2", "zst"]),
    "missing column": ("a.jsonl", b'{"body": "words", "id": 1}\n', ["no column text", "body", "id"]),
    "column of numbers": ("a.jsonl", b'{"text": 5}\n', ["text"]),
    "malformed turns": ("a.jsonl", b'{"conversations": ["hello", "you"]}\n', ["a.jsonl"]),
    "too short": ("a.jsonl", b'{"text": "a few words"}\n', ["tokens", "need 80", "--seq-len"]),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_text_is_one_line(case: str, tokenizer: Any, tmp_path: Path, cache: Path) -> None:
    name, content, words = BAD[case]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TextError) as caught:
        _load(tmp_path / name, tokenizer)
    message = str(caught.value)
    assert name in message and "\n" not in message and ";" in message
    assert all(word in message for word in words), message
    assert not (cache / "tokens").exists()


@pytest.mark.parametrize("name", ["none.jsonl", "nowhere/none.txt", "."])
def test_a_missing_file_is_not_looked_for_on_the_hub(name: str, tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(TextError, match="not a file"):
        _load(tmp_path / name, tokenizer)


def test_a_model_without_tokenizer_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((tiny_model / "config.json").read_bytes())
    with pytest.raises(ModelError, match=r"has no tokenizer.*tokenizer\.json"):
        load_tokenizer(str(tmp_path))


def test_a_tokenizer_without_eos_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((tiny_model / name).read_bytes())
    settings = json.loads((tiny_model / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**settings, "eos_token": None}))
    with pytest.raises(ModelError, match="no EOS"):
        load_tokenizer(str(tmp_path))


def test_batches_of_documents_do_not_change_the_blocks(jsonl: Path, tokenizer: Any, tmp_path: Path) -> None:
    """128 + 1 documents: two full batches of the tokenizer and a short one."""
    documents = [f"{i} fox" for i in range(129)]
    stream = tokens._pack(iter(documents), tokenizer, 10**9)
    expected = [id for text in documents for id in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]
    assert stream.tolist() == expected
