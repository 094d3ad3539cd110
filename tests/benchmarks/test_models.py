"""What is known of a model without loading it: where it is, whether all of it is there, what a token costs."""

import json
from pathlib import Path

import pytest

from ddp_benchmarks.models import max_model_len
from ddp_benchmarks.side_by_side import cache_gib
from ddp_vllm.model_facts import describe_model, local_folder

INDEX = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
CONFIG = {"num_hidden_layers": 3, "num_attention_heads": 2, "hidden_size": 16, "max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("files", "whole"),
    [
        (["tokenizer.json", "config.json"], False),
        (["config.json", "model.safetensors"], True),
        (["model.safetensors"], False),
        (["config.json", "model.safetensors.index.json", "model-00001-of-00002.safetensors"], False),
        (["config.json", "model.safetensors.index.json", *INDEX["weight_map"].values()], True),
    ],
)
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


def test_a_snapshot_of_puzzletron_is_whole_with_the_files_of_its_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are in a folder of their own, and part of the model's id."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--org--base" / "snapshots" / "abc"
    blocks = snapshot / "subblocks_safetensors"
    blocks.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc")
    names = [f"{blocks.name}/{part}.safetensors" for part in "ab"]
    (snapshot / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict(zip("ab", names, strict=True))})
    )
    (snapshot / "config.json").write_text(json.dumps(CONFIG))
    entry = b'{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,12]}}'
    (snapshot / names[0]).write_bytes(len(entry).to_bytes(8, "little") + entry + bytes(12))
    assert local_folder("org/base") is None
    (snapshot / names[1]).write_bytes(b"\x02" + bytes(7) + b"{}")
    facts = describe_model("org/base")
    assert (facts.parameters, facts.weight_bytes) == (3, len(entry) + 8 + 12 + 10)
    (snapshot / names[0]).write_bytes(len(entry).to_bytes(8, "little") + entry + bytes(11) + b"1")
    assert describe_model("org/base").id != facts.id


def test_the_cache_of_a_batch_needs_no_sizes_that_only_blocks_state(tmp_path: Path) -> None:
    """Nemotron-NAS leaves KV heads and channels to its blocks; other models name their sizes otherwise."""
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 64, "hidden_size": 8192, "vocab_size": 64}
    blocks = [{"attention": {"n_heads_in_group": group}, "ffn": {"intermediate_size": 64}} for group in (8, 16)]
    config = {"model_type": "nemotron-nas", **sizes, "num_key_value_heads": None, "intermediate_size": None}
    (tmp_path / "config.json").write_text(json.dumps(config | {"block_configs": blocks}))
    tokens = 3 * (8192 + 128) + 128
    assert cache_gib(str(tmp_path), 3, 8192, 2) == -(-tokens * 2 * 8 * 2 * 128 * 2 // 2**30) == 1
    assert cache_gib(str(tmp_path), 3 * 40, 8192, 2) == 8
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "other", "text_config": sizes}))
    assert cache_gib(str(tmp_path), 3, 8192, 2) == 1
