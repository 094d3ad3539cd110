"""Fixtures of tests/prune, tests/recover and tests/study: tiny random models with a real tokenizer, and text."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from any_models import write_model
from commands import quick_commands, write_lines
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM, PreTrainedTokenizerFast

from random_models import train_tokenizer

SENTENCE = "The quick brown fox number {} jumps over the lazy dog while {} clouds drift by."


@pytest.fixture(autouse=True)
def always_short(short_answers: None) -> None:
    """No test here looks at answers for their words."""


@pytest.fixture(scope="module", autouse=True)
def cache_of_the_file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache for the tests of one file: another process may prune the same model at another path,
    and the cache remembers paths by the hash of the masks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DDP_VLLM_CACHE", str(tmp_path_factory.mktemp("cache") / "ddp-vllm"))
        yield


@pytest.fixture(scope="session")
def tiny_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [{"text": " ".join(SENTENCE.format(i * j, i + j) for j in range(20))} for i in range(40)]
    return write_lines(tmp_path_factory.mktemp("text") / "text.jsonl", rows)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory, tiny_text: Path) -> Path:
    """Folder of a dense model: 3 layers, 8 query heads, 4 KV heads, 96 channels, tied embeddings, float32."""
    folder = tmp_path_factory.mktemp("tiny")
    lines = tiny_text.read_text().splitlines(keepends=True)
    train_tokenizer(lines, special=["<eos>"], spaced=True, eos_token="<eos>").save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=8,
        num_key_value_heads=4, head_dim=8, tie_word_embeddings=True, eos_token_id=0, bos_token_id=None,
        initializer_range=0.2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_experts(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a dense mixture: 2 layers, 5 experts of 32 channels, 2 chosen; Mixtral, whose names on disk differ."""
    folder = tmp_path_factory.mktemp("experts") / "dense"
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=320, hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, head_dim=8, num_local_experts=5, num_experts_per_tok=2, eos_token_id=0,
        initializer_range=0.2,
    )  # fmt: skip
    MixtralForCausalLM(config).save_pretrained(folder)
    for file in tiny_model.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


@pytest.fixture(scope="module")
def pruned(tiny_model: Path, tiny_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with 40 % removed."""
    from runs import prune

    folder = tmp_path_factory.mktemp("recover") / "pruned"
    with quick_commands():
        assert prune(tiny_model, tiny_text, folder).exit_code == 0
    return folder


@pytest.fixture
def tokenizer(tiny_model: Path) -> PreTrainedTokenizerFast:
    """Of the tiny model; it is the test's own, to change."""
    from seams import load_tokenizer

    return load_tokenizer(str(tiny_model))


@pytest.fixture
def load(tokenizer: PreTrainedTokenizerFast, cache: Path) -> Callable[..., Any]:
    """Load blocks of 16 tokens, 3 of them held out, as many as there are; with an empty cache at first."""
    from seams import load_blocks

    def load(data: Path | str, tokenizer: Any = tokenizer, **changes: Any) -> Any:
        sizes = {"seq_len": 16, "train_blocks": 10_000, "heldout_blocks": 3, "min_train_blocks": 2, "seed": 0}
        return load_blocks(str(data), tokenizer, **sizes | changes)

    return load


@pytest.fixture
def write_texts(tmp_path: Path) -> Callable[[str, list[str]], Path]:
    """Write texts as documents of a .jsonl file of that name."""
    return lambda name, texts: write_lines(tmp_path / name, ({"text": text} for text in texts))


@pytest.fixture(scope="session")
def dense(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that makes the dense folder of a model, once."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = write_model(name, tmp_path_factory.mktemp(name))
            for file in tiny_model.glob("tokenizer*"):
                shutil.copy(file, made[name])
        return made[name]

    return make
