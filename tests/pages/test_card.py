"""The model card: what it publishes of where the model and the text came from."""

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
