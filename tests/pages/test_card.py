"""The model card: what it publishes of where the model and the text came from."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from written_folders import write_mixture, write_model

from ddp_vllm.checkpoint import Checkpoint, read_checkpoint
from ddp_vllm.pages.card import model_card


@pytest.mark.parametrize(("model", "there", "named"), [
    ("models/llama", False, True), ("models/llama", True, False), ("./llama", False, False),
])  # fmt: skip
def test_a_folder_is_no_base_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, there: bool, named: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = write_model(tmp_path / "pruned", widths=[(1, 5), (2, 16)], origin=model)
    if there:
        Path(model).mkdir(parents=True)
    assert (f"base_model: {model}" in model_card(read_checkpoint(folder), "pruned")) == named


def test_the_card_names_each_text_once_and_no_folder(trained: Path) -> None:
    checkpoint = read_checkpoint(trained)
    quality = {"tokens": 1024, "dense": 2.0, "pruned": 3.0}
    texts = ["/mine/a.jsonl", "/mine/a.jsonl", "owner/b"]
    card = model_card(dataclasses.replace(checkpoint, provenance={"texts": texts, "perplexity": quality}), "pruned")
    assert "(1,024 tokens of a.jsonl, owner/b)" in card and "/mine" not in card
    assert "\nits dense model, pruned by ddp-vllm" in card and "base_model" not in card


def test_the_card_names_every_runtime_that_loads_the_folder(tmp_path: Path) -> None:
    """A llama goes everywhere; what is quantized not into llama.cpp, a Qwen3 neither, experts not into stock vLLM."""

    def named(checkpoint: Checkpoint, **changed: Any) -> list[bool]:
        card = model_card(dataclasses.replace(checkpoint, config={**checkpoint.config, **changed}), "p")
        return [command in card for command in (
            "vllm serve ./p\n", "vllm serve ./p --trust-remote-code --model-impl transformers\n",
            'from_pretrained("./p", trust_remote_code=True)', "ddp-vllm export ./p --outtype q8_0 -o p.gguf\n",
        )]  # fmt: skip

    llama = read_checkpoint(write_model(tmp_path / "llama", widths=[(1, 5), (2, 16)], origin="owner/llama"))
    assert named(llama) == [True, True, True, True]
    assert named(llama, quantization_config={"format": "int-quantized"}) == [True, True, True, False]
    assert named(llama, model_type="ddp_qwen3") == [True, True, True, False]
    mixture = write_mixture(tmp_path / "experts", [[24, 3, 24, 24, 24, 24, 24, 24]])
    assert named(read_checkpoint(mixture)) == [True, False, True, False]
