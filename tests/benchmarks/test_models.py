"""What is known of a model without loading it: where it is, whether all of it is there, what a token costs."""

import json
from pathlib import Path

import pytest

from ddp_benchmarks.models import max_model_len
from ddp_vllm.model_facts import describe_model, local_folder

INDEX = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
CONFIG = {"num_hidden_layers": 3, "num_attention_heads": 2, "hidden_size": 16, "max_position_embeddings": 64}


@pytest.mark.parametrize(("files", "whole"), [
    (["config.json", "model.safetensors"], True),
    (["config.json", "model.safetensors.index.json", "model-00001-of-00002.safetensors"], False),
    (["config.json", "model.safetensors.index.json", *INDEX["weight_map"].values()], True),
])  # fmt: skip
def test_a_part_of_a_snapshot_is_not_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: list[str], whole: bool
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--org--base" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc")
    for name in files:
        content = json.dumps(INDEX if "index" in name else CONFIG) if name.endswith(".json") else ""
        (snapshot / name).write_bytes(content.encode() or b"\x02" + bytes(7) + b"{}")  # an empty safetensors file
    assert local_folder("org/base") == (snapshot if whole else None)
    assert describe_model("org/base").kv_bytes_per_token == (2 * 2 * 16 * 3 if whole else None)
    assert max_model_len("org/base") == (64 if "config.json" in files else None)  # for that the config will do
