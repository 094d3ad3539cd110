"""The model card publishes as its parent a name on the hub, never a folder of this machine."""

from pathlib import Path

import pytest
from torch import ones

from ddp_prune.card import model_card
from ddp_prune.export import export
from ddp_prune.gates import unit_shapes
from ddp_prune.source import open_source
from ddp_vllm.checkpoint import read_checkpoint


@pytest.mark.parametrize(("model", "there", "named"), [
    ("models/llama", False, True), ("models/llama", True, False), ("~/llama", False, False), ("./llama", False, False),
])  # fmt: skip
def test_a_folder_is_no_base_model(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, there: bool, named: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    source, output = open_source(str(tiny_model)), tmp_path / "pruned"
    gates = {kind: ones(shape) for kind, shape in unit_shapes(source.sizes, "kv-group").items()}
    export(source, gates, output, head_unit="kv-group", provenance={"recipe": {"model": model, "data": "a.jsonl"}})
    if there:
        Path(model).mkdir(parents=True)
    assert (f"base_model: {model}" in model_card(read_checkpoint(output), source, "pruned")) == named
