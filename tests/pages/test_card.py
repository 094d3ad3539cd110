"""The model card: what it publishes of where the model and the text came from."""

import dataclasses
from pathlib import Path

import pytest
from written_folders import write_model

from ddp_vllm.checkpoint import read_checkpoint
from ddp_vllm.pages.card import model_card


@pytest.mark.parametrize(("model", "there", "named"), [
    ("models/llama", False, True), ("models/llama", True, False), ("~/llama", False, False), ("./llama", False, False),
])  # fmt: skip
def test_a_folder_is_no_base_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, there: bool, named: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = write_model(tmp_path / "pruned", widths=[(1, 5), (2, 16)], origin=model)
    if there:
        Path(model).mkdir(parents=True)
    assert (f"base_model: {model}" in model_card(read_checkpoint(folder), "pruned")) == named


def test_the_card_states_sizes_and_widths(trained: Path) -> None:
    card, layers = model_card(read_checkpoint(trained), "pruned"), read_checkpoint(trained).layers
    assert "base_model: owner/tiny" in card and "vllm serve ./pruned\n" in card
    heads = " ".join(map(str, layers[1].query_heads_per_kv_head))
    assert f"| 1 | {heads} | {layers[1].intermediate_size} |" in card and "| 2 | – | 23 |" in card
    assert f"| MLP channels | 288 | 173 | {1 - 173 / 288:.1%} |" in card


def test_the_card_names_each_text_once_and_no_folder(trained: Path) -> None:
    checkpoint = read_checkpoint(trained)
    quality = {"tokens": 1024, "dense": 2.0, "pruned": 3.0}
    texts = ["/mine/a.jsonl", "/mine/a.jsonl", "owner/b"]
    card = model_card(dataclasses.replace(checkpoint, provenance={"texts": texts, "perplexity": quality}), "pruned")
    assert "text of a.jsonl, b (1,024 tokens)" in card and "/mine" not in card
    assert "\nits dense model with structure removed" in card and "base_model" not in card
