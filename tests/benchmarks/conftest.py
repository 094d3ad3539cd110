"""A tiny random Llama with a tokenizer trained on the spot, and conversations it can answer."""

import os
from itertools import cycle, islice
from pathlib import Path

import pytest
from commands import write_lines

ROOT = Path(__file__).parents[2]
WORDS = ["ice", "melts", "in", "the", "sun", "and", "water", "runs", "down", "hill", "to", "sea"]


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the processes that a test starts import this checkout."""
    parts = [ROOT, ROOT / "prune", ROOT / "plugins", ROOT / "benchmarks"]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, parts)))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a Llama with 2 layers and a byte-level BPE of 300 tokens; context 256."""
    from transformers import LlamaConfig

    from random_models import train_tokenizer, write_models

    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    tokenizer = train_tokenizer([" ".join(WORDS)] * 20, 300, [*special.values()], **special)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=256, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    write_models({folder: config}, tokenizer)
    return folder


@pytest.fixture(scope="session")
def halved(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of that Llama pruned: its first layer has 41 of 96 channels, its second no attention."""
    import torch
    from seams import cut, open_source

    gates = {"attn": torch.tensor([[1.2], [0.0]]), "mlp": torch.ones(2, 96)}
    gates["mlp"][0, 41:] = 0.0
    folder = tmp_path_factory.mktemp("pruned") / "halved"
    cut(open_source(str(tiny)), gates, folder, "kv-group")
    return folder


@pytest.fixture(scope="session")
def talks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ShareGPT file of 40 conversations: prompts of 8 to 47 words, answers of 6 to 25."""
    texts = [" ".join(islice(cycle(WORDS), number, 2 * number + 8)) for number in range(40)]
    answers = [" ".join(islice(cycle(WORDS), number, number + 6 + number % 20)) for number in range(40)]
    rows = [
        {"id": f"talk{number}", "conversations": [{"from": "human", "value": asked}, {"from": "gpt", "value": answer}]}
        for number, (asked, answer) in enumerate(zip(texts, answers, strict=True))
    ]
    return write_lines(tmp_path_factory.mktemp("talks") / "sharegpt.jsonl", rows)
