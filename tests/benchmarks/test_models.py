"""What is known of a model without loading it: where it is, whether all of it is there, what a token costs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddp_benchmarks import side_by_side, verbs
from ddp_benchmarks.models import max_model_len
from ddp_vllm.model_facts import dense_kv_bytes, describe_model, local_folder, unrelated

INDEX = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
CONFIG = {"num_hidden_layers": 3, "num_attention_heads": 2, "hidden_size": 16, "max_position_embeddings": 64}


def test_models_that_are_not_related_are_named(tiny: Path, halved: Path, tmp_path: Path) -> None:
    """What is compared should be a model and its pruned versions; a model and itself show noise."""
    other, wider = tmp_path / "other", tmp_path / "wider"
    for folder, changes in ((other, {"model_type": "qwen3"}), (wider, {"hidden_size": 4096})):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(json.loads((tiny / "config.json").read_text()) | changes))
    related = [(tiny, halved), (tiny, tiny), (halved, halved), (tmp_path / "missing", halved)]
    assert not any(unrelated(str(dense), str(pruned)) for dense, pruned in related)
    assert unrelated(str(halved), str(tiny)).endswith("are they exchanged?")
    assert "its model_type is llama, not qwen3" in unrelated(str(other), str(halved))
    assert "its hidden_size is 64, not 4096" in unrelated(str(wider), str(halved))


@pytest.mark.parametrize(("arguments", "value_bytes"), [
    ([], 2), (["--dtype", "float32"], 4), (["--dtype=float32"], 4), (["--dtype", "float"], 4), (["--dtype", "half"], 2),
    (["--dtype", "bfloat16", "--mamba-ssm-cache-dtype", "float32"], 2), (["--mamba-ssm-cache-dtype=float32"], 2),
    (["--download-dir", "/models/float32"], 2), (["--dtype", "float32", "--dtype", "bfloat16"], 2),
])  # fmt: skip
def test_the_cache_of_an_engine_has_the_size_of_its_dtype(
    arguments: list[str], value_bytes: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sizes = list[int]()
    monkeypatch.setattr(side_by_side, "cache_gib", lambda *words: sizes.append(words[-1]) or 1)
    monkeypatch.setattr(side_by_side, "number_format", lambda _: [])
    monkeypatch.setattr(side_by_side, "max_model_len", lambda _: None)
    side_by_side.StepEngine("owner/name", arguments, largest=(1, 16), log=tmp_path / "log")
    assert sizes == [value_bytes]


def test_a_name_on_the_hub_is_compared_as_a_folder_is(
    halved: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the masks file predicts, and the size of its cache; also before it is downloaded."""
    asked = list[str]()

    def known(name: str) -> Path | None:
        asked.append(name)
        return {"owner/halved": halved, "owner/tiny": tiny}.get(name)

    def compare(
        settings: side_by_side.StepSettings, *, save: Callable[[dict[str, Any]], None], **_: Any
    ) -> dict[str, Any]:
        assert side_by_side.cache_gib("owner/tiny", 64, 1 << 20, 4) > 1
        assert side_by_side.cache_gib("owner/far", 64, 1 << 20, 4) == 1
        results: dict[str, Any] = {"verdicts": [{} for _ in settings.pruned]}
        save(results)
        return results

    for module in (verbs, side_by_side):
        monkeypatch.setattr(module, "known_folder", known)
    monkeypatch.setattr(verbs, "compare_steps", compare)
    results = verbs.bench_steps("owner/tiny", ["owner/halved", "owner/far"])
    assert results == {"verdicts": [{}, {}]} and {"owner/halved", "owner/far"} <= {*asked}


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


@pytest.mark.parametrize(
    ("kinds", "known"), [(("full", "sliding", "full"), True), (("linear", "linear", "full"), False)]
)
def test_the_cache_of_layers_without_attention_is_unknown(kinds: tuple[str, ...], known: bool, tmp_path: Path) -> None:
    """Their state does not grow with the context. An engine's memory is planned as if it did, which is enough."""
    config = CONFIG | {"layer_types": [f"{kind}_attention" for kind in kinds]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert describe_model(str(tmp_path)).kv_bytes_per_token == (2 * 2 * 16 * 3 if known else None)
    assert dense_kv_bytes(tmp_path, value_bytes=2) == 2 * 2 * 16 * 3
