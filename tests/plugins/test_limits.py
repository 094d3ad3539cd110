"""What vLLM is refused or warned of before it loads anything, in a process that plans for machines we do not have."""

import re
from pathlib import Path
from typing import Any

import pytest
from serving import Serve

from ddp_vllm.remote_code import configuration_ddp

pytestmark = pytest.mark.vllm

HOPPER, BLACKWELL = 9, 10
UNEVEN = [[3, 3], [2, 1], [3]]  # query heads of each KV head, layer by layer: two layers of two KV heads
EVEN = [[2, 2], [2, 1], [3]]  # the same after padding
FULL = [[3, 3, 3, 3]] * 3  # as in the dense model
LMCACHE = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}
SEVERAL = {
    "kv_connector": "MultiConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"connectors": [{"kv_connector": "OffloadingConnector"}, LMCACHE]},
}
SCHEME = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "attn_head", "dynamic": False}
PER_HEAD = {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}, "kv_cache_scheme": SCHEME}
V1 = {"capability": HOPPER, "runner": "0"}
MIXED = [[2] * 4, [2] * 4, [2] * 3, [2] * 3, [2] * 3, [2] * 4]  # 3 does not divide 4
DIVIDING = [[2] * 4, [2] * 2, [2], [2] * 4, [2] * 2, [2] * 4]


def write_config(folder: Path, family: str, layers: list[list[int]], **fields: Any) -> Path:
    sizes = {"vocab_size": 128, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": len(layers)}
    sizes |= {"num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 32, "max_position_embeddings": 256}
    entries = [{"query_heads_per_kv_head": heads, "intermediate_size": 32} for heads in layers]
    config = getattr(configuration_ddp, f"DDP{family}Config")(**(sizes | fields), ddp_layers=entries)
    config.architectures = [f"DDP{family}ForCausalLM"]
    config.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def planned(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("plans")
    folders = {
        name: write_config(root / name, "Llama", layers)
        for name, layers in (("uneven", UNEVEN), ("even", EVEN), ("full", FULL))
    }
    kinds = ["sliding_attention"] * 3 + ["full_attention"] + ["sliding_attention", "full_attention"]
    gemma = {"layer_types": kinds, "sliding_window": 64}
    for name, layers in (("mixed", MIXED), ("dividing", DIVIDING)):
        folders[name] = write_config(root / name, "Gemma3", layers, **gemma)

    def case(name: str, capability: int | None = None, runner: str = "", **options: Any) -> dict[str, Any]:
        machine = {"capability": capability, "runner": runner}
        return {"folder": str(folders[name]), "options": {"max_model_len": 256} | options, **machine}

    folders["scales per head"] = write_config(root / "scales", "Llama", UNEVEN, quantization_config=PER_HEAD)
    folders["scales per dense head"] = write_config(root / "dense", "Llama", FULL, quantization_config=PER_HEAD)
    folders["one stage"] = write_config(root / "stage", "Llama", [[], [], [3, 1], [2]])
    folders["nothing"] = write_config(root / "nothing", "Llama", [[], []])
    two = {"pipeline_parallel_size": 2}
    cases = {
        "scales per head": case("scales per head"),
        "scales per dense head": case("scales per dense head"),
        "one stage": case("one stage", **two),
        "other stages": case("one stage", **two) | {"partition": "3,1"},
        "no attention in two stages": case("nothing", **two),
        "V1, Hopper": case("uneven", **V1),
        "V1, Hopper, other kernel": case("uneven", attention_backend="TRITON_ATTN", **V1),
        "V1, Hopper, FlashAttention 2": case("uneven", attention_config={"flash_attn_version": 2}, **V1),
        "V1, Hopper, even": case("even", **V1),
        "V2, Hopper": case("uneven", HOPPER, "1"),
        "V1, Blackwell": case("uneven", BLACKWELL, "0"),
        "V1, Hopper, windows": case("mixed", **V1),
        "LMCache": case("uneven", kv_transfer_config=LMCACHE),
        "LMCache among several": case("uneven", kv_transfer_config=SEVERAL),
        "LMCache, dense heads": case("full", kv_transfer_config=LMCACHE),
        "windows": case("mixed"),
        "windows, flag": case("mixed", disable_hybrid_kv_cache_manager=True),
        "dividing": case("dividing"),
    }
    return serve(cases, "plan_tiny.py")


def test_flash_attention_3_planned_for_other_query_heads_is_refused(planned: dict[str, Any]) -> None:
    message = r"layers of 2 KV heads have 4, 6 query heads, .* pass --attention-backend TRITON_ATTN, or omit"
    assert re.search(message, planned["V1, Hopper"]["error"]), planned


@pytest.mark.parametrize("name", [
    "V1, Hopper, other kernel", "V1, Hopper, FlashAttention 2", "V1, Hopper, even", "V1, Hopper, windows",
    "V2, Hopper", "V1, Blackwell", "LMCache, dense heads",
])  # fmt: skip
def test_what_is_planned_rightly_is_not_refused(name: str, planned: dict[str, Any]) -> None:
    assert "error" not in planned[name], planned[name]


@pytest.mark.parametrize("name", ["LMCache", "LMCache among several"])
def test_lmcache_is_refused_for_other_kv_heads_than_the_dense_models(name: str, planned: dict[str, Any]) -> None:
    message = r"LMCacheConnectorV1 requires 4 KV heads in every layer, and this model has layers of 1, 2; serve it"
    assert re.search(message, planned[name]["error"]), planned[name]


def test_scales_per_head_are_refused_where_heads_are_missing(planned: dict[str, Any]) -> None:
    message = r"one scale per head, and layer 0 has 6 query heads and 2 KV heads, the dense model 12 and 4; quantize"
    assert re.search(message, planned["scales per head"]["error"]), planned
    assert "error" not in planned["scales per dense head"], planned


def test_a_pipeline_stage_without_a_kv_cache_is_refused(planned: dict[str, Any]) -> None:
    """vLLM would divide by zero once the weights are loaded."""
    message = r"pipeline stage 1 of 2 has layers 0…1, whose attention .* pass a lower --pipeline-parallel-size, or"
    assert re.search(message, planned["one stage"]["error"]), planned
    assert "error" not in planned["other stages"], planned
    assert "pipeline stage 1 of 2 has layers 0…0" in planned["no attention in two stages"]["error"], planned
