"""A small dense model, text, and the model trimmed for it."""

import json
from pathlib import Path

import pytest
import torch
from commands import invoke, passed
from transformers import LlamaConfig, LlamaForCausalLM

from random_models import SENTENCES, train_tokenizer

TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }} over lazy clouds<eos>{% endfor %}"


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with padded rows, whose special tokens follow the vocabulary."""
    folder = tmp_path_factory.mktemp("dense") / "model"
    tokenizer = train_tokenizer(SENTENCES, 512, eos_token="<eos>", bos_token="<bos>")
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=640, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False, max_position_embeddings=512,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=[tokenizer.eos_token_id], pad_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    path.write_text("".join(json.dumps({"text": sentence}) + "\n" for sentence in SENTENCES))
    return path


@pytest.fixture(scope="module")
def trimmed(dense: Path, text: Path) -> tuple[Path, str]:
    folder = dense.parent / "trimmed"
    command = ("trim", dense, "--tokens", 400, "--data", text, "-o", folder, "--no-proof")
    return folder, passed(invoke(*command)).stdout
