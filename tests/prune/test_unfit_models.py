"""Models that can be pruned by their config and headers, and turn out unfit once they are loaded: one line each."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_prune_cli import _copy, _prune, _refused

from ddp_prune import pipeline


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDP_VLLM_CACHE", str(tmp_path_factory.mktemp("cache")))


def test_weights_that_are_not_numbers(tiny_model: Path, tiny_text: Path, tmp_path: Path) -> None:
    model = _copy(tiny_model, tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][0, 0] = float("nan")
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    _refused(_prune(model, tiny_text, tmp_path / "out"), 3, "perplexity inf before pruning")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_tokenizer_of_another_model(tiny_model: Path, tiny_text: Path, tmp_path: Path) -> None:
    """Its numbers are no rows of the embedding: an IndexError, on a GPU an assertion in the device."""
    model = _copy(tiny_model, tmp_path / "model")
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": 320, "content": " lazy"})
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    result = _prune(model, tiny_text, tmp_path / "out")
    _refused(result, 3, str(model), "token 320", "0 to 319", "belongs to the model")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("where", ["load_model", "block_losses"])
def test_a_model_that_a_device_cannot_hold(
    where: str, tiny_model: Path, tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is made here: no GPU runs in these tests."""

    def run_out(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(pipeline, where, run_out)
    _refused(_prune(tiny_model, tiny_text, tmp_path / "out"), 6, str(tiny_model), "memory of a device", "--shard")
    assert list(tmp_path.iterdir()) == []
