"""Blocks of tokens: their content, their first token, their cache, and the text that is rejected."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers.processors import TemplateProcessing

from ddp_text import blocks as text
from ddp_text.documents import Document
from ddp_text.tokens import Tokens, leading_bos, load_tokenizer, pack
from ddp_vllm.errors import ModelError, OutputError, TextError

DOCUMENTS = [f"document {number} says fox {number * number} twice: fox {number * number}." for number in range(60)]
SEQ_LEN = 16  # of `load`
BOS = 7  # any token of the vocabulary


@pytest.fixture
def jsonl(write_texts: Callable[..., Path]) -> Path:
    return write_texts("plain.jsonl", DOCUMENTS)


@pytest.fixture
def beginning(tokenizer: Any) -> Any:
    """As Llama-3's: it begins every text with BOS."""
    tokenizer.bos_token = tokenizer.convert_ids_to_tokens(BOS)
    added = TemplateProcessing(single="BOS $A", special_tokens=[("BOS", BOS)])
    tokenizer.backend_tokenizer.post_processor = added
    return tokenizer


def _documents(tokenizer: Any, tokens_BT: torch.Tensor) -> list[str]:
    """Return the documents that lie wholly inside blocks; ByteLevel puts a blank before each."""
    return [text.removeprefix(" ") for text in tokenizer.decode(tokens_BT.flatten()).split("<eos>")[1:-1]]


def test_documents_are_whole_shuffled_and_joined_by_eos(jsonl: Path, load: Callable[..., Any], tokenizer: Any) -> None:
    orders = []
    for seed in (0, 1, 0):
        blocks = load(jsonl, seed=seed)
        assert blocks.train.shape[1:] == (SEQ_LEN,) and blocks.heldout.shape == (3, SEQ_LEN)
        assert blocks.train.dtype == blocks.heldout.dtype == torch.int64
        documents = [*_documents(tokenizer, blocks.heldout), *_documents(tokenizer, blocks.train)]
        assert len(set(documents)) == len(documents) >= len(DOCUMENTS) - 4 and set(documents) <= set(DOCUMENTS)
        orders.append(documents)
    assert orders[0] == orders[2] != orders[1]


@pytest.mark.parametrize("count", [0, 1, 64, 129])
def test_texts_are_joined_by_eos_and_no_more_are_read_than_needed(count: int, tokenizer: Any) -> None:
    texts = [f"{i} fox" for i in range(count)]
    expected = [id for text in texts for id in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]
    for limit in (10**9, 100):
        rest = iter(texts)
        assert pack(map(Document, rest), tokenizer, limit).ids.tolist() == expected[:limit]
    assert len(list(rest)) == max(0, count - 64)  # the tokenizer takes 64 at a time


def _pieces(tokens_BT: torch.Tensor, eos: int) -> set[tuple[int, ...]]:
    """Return what lies between two EOS, as tokens."""
    stream = tokens_BT.flatten().tolist()
    ends = [place for place, token in enumerate(stream) if token == eos]
    return {tuple(stream[a + 1 : b]) for a, b in itertools.pairwise(ends)}


@pytest.mark.parametrize("bos", [True, False])
def test_every_block_begins_with_bos_where_every_text_does(
    bos: bool, jsonl: Path, load: Callable[..., Any], beginning: Any
) -> None:
    """Without it, the blocks are one stream of whole documents; SmolLM2 has a BOS, and puts none before a text."""
    if not bos:
        beginning.backend_tokenizer.post_processor = TemplateProcessing(single="$A", special_tokens=[])
    assert leading_bos(beginning) == [BOS] * bos
    whole = {tuple(beginning(text, add_special_tokens=False)["input_ids"]) for text in DOCUMENTS}
    for _ in range(2):  # the second time from the cache
        blocks = load(jsonl, beginning, heldout_blocks=20)
        for part in (blocks.heldout, blocks.train):
            assert part.shape[1] == SEQ_LEN and bool((part[:, 0] == BOS).all()) == bos
            found = _pieces(part[:, int(bos) :], beginning.eos_token_id)
            assert found and found <= whole


def test_blocks_that_were_kept_without_bos_are_not_used(
    jsonl: Path, load: Callable[..., Any], beginning: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(text, "leading_bos", lambda _: [])
        assert not (load(jsonl, beginning).train[:, 0] == BOS).all()
    assert (load(jsonl, beginning).train[:, 0] == BOS).all()


def test_enough_text_is_enough_with_bos(jsonl: Path, load: Callable[..., Any], beginning: Any) -> None:
    """The line counts tokens of text, of which a block needs one less."""
    assert load(jsonl, beginning, train_blocks=4).train.shape == (4, SEQ_LEN)
    with pytest.raises(TextError, match=r"one step and the held-out text need 15,045"):
        load(jsonl, beginning, min_train_blocks=1000)


def test_the_cache_is_keyed_by_content(
    jsonl: Path, load: Callable[..., Any], tokenizer: Any, write_texts: Callable[..., Path], cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    first = load(jsonl)
    (file,) = (cache / "tokens").iterdir()
    kept = text.saved_blocks(file)
    assert kept is not None
    text.save_blocks(file, Tokens(*map(np.ascontiguousarray, map(np.flipud, kept))))  # tokenizing would undo it
    again = load(jsonl)
    assert torch.equal(torch.cat([again.heldout, again.train]), torch.cat([first.heldout, first.train]).flipud())
    assert again.found == first.found
    write_texts(jsonl.name, [text.replace("fox", "cat") for text in DOCUMENTS])
    assert "cat" in tokenizer.decode(load(jsonl).train.flatten())
    load(jsonl, seq_len=8)
    assert len(list((cache / "tokens").iterdir())) == 3
    monkeypatch.setattr(text, "VERSION", text.VERSION + 1)
    load(jsonl, seq_len=8)
    assert len(list((cache / "tokens").iterdir())) == 4
    assert sorted(folder.name for folder in cache.iterdir()) == ["datasets", "tokens"]  # with the Arrow copy


@pytest.mark.parametrize(("place", "left"), [(0, None), (40, None), (300, None), (-1, None), (0, 0), (0, 20), (0, 200)])
def test_a_flipped_bit_in_the_cache_is_found(
    place: int, left: int | None, jsonl: Path, load: Callable[..., Any], cache: Path
) -> None:
    """And a missing end."""
    first = load(jsonl)
    (file,) = (cache / "tokens").iterdir()
    content = bytearray(file.read_bytes())
    content[place] ^= left is None
    file.write_bytes(content[:left])
    assert torch.equal(load(jsonl).train, first.train)
    assert file.stat().st_mode & 0o777 == 0o600 and text.saved_blocks(file) is not None


def test_text_that_is_too_short_for_a_step_is_refused_from_the_cache_too(jsonl: Path, load: Callable[..., Any]) -> None:
    num_blocks = len(load(jsonl, min_train_blocks=1).train)
    with pytest.raises(TextError, match="tokens, but one step"):
        load(jsonl, min_train_blocks=num_blocks + 1)


def test_a_cache_that_cannot_be_written_is_not_the_texts_fault(
    jsonl: Path, load: Callable[..., Any], cache: Path
) -> None:
    cache.write_text("a file where the folder should be")
    with pytest.raises(OutputError, match=f"the cache {cache} cannot be written .*DDP_VLLM_CACHE"):
        load(jsonl)
    cache.unlink()
    cache.mkdir()
    (cache / "tokens").write_text("the same, one floor down")
    with pytest.raises(OutputError, match=f"the cache {cache} cannot be written"):
        load(jsonl)


def test_a_tokenizer_without_eos_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((tiny_model / name).read_bytes())
    settings = json.loads((tiny_model / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**settings, "eos_token": None}))
    with pytest.raises(ModelError, match="no EOS"):
        load_tokenizer(str(tmp_path))
