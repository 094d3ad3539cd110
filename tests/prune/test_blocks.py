"""What a block begins with, what file its text comes from, and where it is kept."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing

from ddp_prune import tokens
from ddp_prune.tokens import Blocks, leading_bos, load_blocks, load_tokenizer, read_excerpts
from ddp_vllm.errors import OutputError

DOCUMENTS = [f"document {number} says fox {number * number} twice: fox {number * number}." for number in range(60)]
SEQ_LEN, HELDOUT = 16, 3
BOS = 7  # any token of the vocabulary


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DDP_VLLM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def tokenizer(tiny_model: Path) -> Any:
    """As SmolLM2's: it has a BOS, and puts none before a text."""
    tokenizer = load_tokenizer(str(tiny_model))
    tokenizer.bos_token = tokenizer.convert_ids_to_tokens(BOS)
    return tokenizer


@pytest.fixture
def beginning(tiny_model: Path) -> Any:
    """As Llama-3's: it begins every text with BOS."""
    tokenizer = load_tokenizer(str(tiny_model))
    tokenizer.bos_token = tokenizer.convert_ids_to_tokens(BOS)
    added = TemplateProcessing(single="BOS $A", special_tokens=[("BOS", BOS)])
    tokenizer.backend_tokenizer.post_processor = added
    return tokenizer


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return _write(tmp_path / "plain.jsonl")


def _write(path: Path) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS), encoding="utf-8")
    return path


def _load(path: Path, tokenizer: Any, **changes: int) -> Blocks:
    sizes = {
        "seq_len": SEQ_LEN, "train_blocks": 10_000, "heldout_blocks": HELDOUT, "min_train_blocks": 2, "seed": 0,
    }  # fmt: skip
    return load_blocks(str(path), tokenizer, **sizes | changes)


def _packed(path: Path, tokenizer: Any, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pack by hand: documents in their order, EOS after each; the rest of the one that fills the held-out text goes."""
    excerpts = read_excerpts(str(path), tokenizer, 0, size=5 * SEQ_LEN, few=4 * HELDOUT)
    streams: list[list[int]] = [[], []]
    for _, excerpt in excerpts:
        ids = [*tokenizer(excerpt, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        streams[len(streams[0]) >= HELDOUT * width] += ids
    heldout, train = (torch.tensor(stream[: len(stream) // width * width]).view(-1, width) for stream in streams)
    return heldout[:HELDOUT], train


def test_every_block_begins_with_bos_where_every_text_does(text: Path, beginning: Any) -> None:
    assert leading_bos(beginning) == [BOS]
    heldout, train = _packed(text, beginning, SEQ_LEN - 1)
    for _ in range(2):  # the second time from the cache
        blocks = _load(text, beginning)
        for part, expected in ((blocks.heldout, heldout), (blocks.train, train)):
            assert part.shape[1] == SEQ_LEN and (part[:, 0] == BOS).all()
            assert torch.equal(part[:, 1:], expected)


def test_blocks_of_a_tokenizer_that_adds_no_bos_are_text_alone(text: Path, tokenizer: Any) -> None:
    assert leading_bos(tokenizer) == []
    heldout, train = _packed(text, tokenizer, SEQ_LEN)
    blocks = _load(text, tokenizer)
    assert torch.equal(blocks.heldout, heldout) and torch.equal(blocks.train, train)
    tokenizer.bos_token = None
    assert leading_bos(tokenizer) == []
    assert torch.equal(_load(text, tokenizer).train, train)


def test_blocks_that_were_kept_without_bos_are_not_used(
    text: Path, beginning: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(tokens, "leading_bos", lambda _: [])
        assert not (_load(text, beginning).train[:, 0] == BOS).all()
    assert (_load(text, beginning).train[:, 0] == BOS).all()


def test_enough_text_is_enough_with_bos(text: Path, beginning: Any) -> None:
    """The line counts tokens of text, of which a block needs one less."""
    blocks = _load(text, beginning, train_blocks=4)
    assert blocks.train.shape == (4, SEQ_LEN)
    with pytest.raises(tokens.TextError, match=r"one step and the held-out text need 15,045"):
        _load(text, beginning, min_train_blocks=1000)


@pytest.mark.parametrize("name", ["plain [v2].jsonl", "what?.jsonl", "all*.jsonl", "[a-z].jsonl"])
def test_a_file_name_is_no_pattern(name: str, text: Path, tokenizer: Any, tmp_path: Path) -> None:
    """Files that the pattern would match lie beside it."""
    expected = _load(text, tokenizer)
    (tmp_path / "others").mkdir()
    for other in ("plain v.jsonl", "whats.jsonl", "all more.jsonl", "q.jsonl"):
        (tmp_path / "others" / other).write_text('{"text": "of somebody else"}\n' * 60)
    blocks = _load(_write(tmp_path / "others" / name), tokenizer)
    assert torch.equal(blocks.train, expected.train) and torch.equal(blocks.heldout, expected.heldout)


def test_a_cache_that_cannot_be_written_is_not_the_texts_fault(text: Path, tokenizer: Any, cache: Path) -> None:
    cache.write_text("a file where the folder should be")
    with pytest.raises(OutputError, match=f"the cache {cache} cannot be written .*DDP_VLLM_CACHE"):
        _load(text, tokenizer)
    cache.unlink()
    cache.mkdir()
    (cache / "tokens").write_text("the same, one floor down")
    with pytest.raises(OutputError, match=f"the cache {cache} cannot be written"):
        _load(text, tokenizer)
