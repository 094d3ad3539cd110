"""Texts become the same tokens, loss masks and held-out excerpts as ever, by their hashes.

A change of one of these values means that a saved run, a token cache and published figures belong to other text.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ddp_prune.text.blocks import load_blocks

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.reasoning_content %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}"
    "{{ (m.content or '') + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WORDS = ["fox", "crow", "cheese", "river", "cloud", "harbour", "boat", "lantern", "winter", "bread"]
SIZES: dict[str, Any] = {"seq_len": 32, "train_blocks": 40, "heldout_blocks": 4, "min_train_blocks": 2, "seed": 0}
GOLDEN = {  # data, other sizes -> training blocks, loss mask, held-out blocks
    "plain.jsonl": ("eebbe5874564", "7b9e7b8c3c5f", "716b803246c8"),
    "plain.jsonl, seed 3": ("93b0e9278f63", "7b9e7b8c3c5f", "716b803246c8"),
    "book.txt": ("dcb04a64a444", "7b9e7b8c3c5f", "b97c3aee7a8c"),
    "chats.jsonl": ("830a086c742d", "50e1dcedfee3", "6396c8b9020f"),
    "plain.jsonl:2,chats.jsonl": ("33c05cb6f43b", "443e0da2ec94", "716b803246c8"),
}


@pytest.fixture
def tokenizer() -> Any:
    """A token per byte, and two special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<eos>": 0, "<|im_start|>": 1, "<|im_end|>": 2} | {part: 3 + i for i, part in enumerate(alphabet)}
    raw = Tokenizer(models.BPE(vocabulary, []))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<eos>", additional_special_tokens=["<|im_start|>", "<|im_end|>"],
        chat_template=CHATML,
    )  # fmt: skip


def write_texts(folder: Path) -> None:
    plain = [
        " ".join(f"the {WORDS[i * j % 10]} {i * j} sees a {WORDS[(i + j) % 10]}." for j in range(9)) for i in range(80)
    ]
    chats = []
    for i in range(60):
        question = {"role": "user", "content": f"how many {WORDS[i % 10]} are {i}?"}
        answer = {"role": "assistant", "content": f"{i} {WORDS[i % 7]}, I think."}
        again = [{"role": "user", "content": "why?"}, answer | {"content": f"because {i}", "weight": 0}]
        chats.append({"messages": [question, answer, *again[: 2 * (i % 2)]]})
    for name, rows in (("plain.jsonl", [{"text": text} for text in plain]), ("chats.jsonl", chats)):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "book.txt").write_text(
        " ".join(f"rain fell on the {WORDS[i % 10]} while {i} boats waited." for i in range(200))
    )


def digest(values: torch.Tensor | None) -> str:
    if values is None:
        return "all"
    content = f"{list(values.shape)}".encode() + values.to(torch.int32).numpy().tobytes()
    return hashlib.sha256(content).hexdigest()[:12]


@pytest.mark.parametrize("case", GOLDEN)
def test_texts_become_the_same_tokens(
    case: str, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_texts(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DDP_VLLM_CACHE", str(tmp_path / "cache"))
    data, _, seed = case.partition(", seed ")
    blocks = load_blocks(data, tokenizer, **SIZES | ({"seed": int(seed)} if seed else {}))
    found = tuple(map(digest, (blocks.train, blocks.loss_mask, blocks.heldout)))
    assert found == GOLDEN[case], found
