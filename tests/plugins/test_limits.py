"""What vLLM is refused or warned of before it loads anything, in a process that plans for machines we do not have."""

import re
from pathlib import Path
from typing import Any

import pytest
from serving import Serve
from tiny_models import SIZES

from ddp_vllm.remote_code.configuration_ddp import DDPLlamaConfig

pytestmark = pytest.mark.vllm

HOPPER = 9
UNEVEN = [[3, 3], [2, 1], [3]]  # query heads of each KV head, layer by layer: two layers of two KV heads
EVEN = [[2, 2], [2, 1], [3]]  # the same after padding
FULL = [[3, 3, 3, 3]] * 3  # as in the dense model
LMCACHE = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}
SCHEME = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "attn_head", "dynamic": False}
PER_HEAD = {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}, "kv_cache_scheme": SCHEME}
V1, V2 = ({"capability": HOPPER, "environment": {"VLLM_USE_V2_MODEL_RUNNER": value}} for value in "01")
TWO = {"options": {"pipeline_parallel_size": 2}}
LATE = [[], [], [3, 1], [2]]  # no attention in the first half
CASES: dict[str, tuple[list[list[int]], dict[str, Any], dict[str, Any], str]] = {  # layers, config, case, refusal
    "V1, Hopper": (UNEVEN, {}, V1, r"layers of 2 KV heads have 4, 6 query heads, .* pass --attention-backend TRITON"),
    "V1, Hopper, other kernel": (UNEVEN, {}, V1 | {"options": {"attention_backend": "TRITON_ATTN"}}, ""),
    "V1, Hopper, even": (EVEN, {}, V1, ""),
    "V2, Hopper": (UNEVEN, {}, V2, ""),
    "LMCache": (UNEVEN, {}, {"options": {"kv_transfer_config": LMCACHE}},
                r"LMCacheConnectorV1 requires 4 KV heads in every layer, and this model has layers of 1, 2; serve it"),
    "LMCache, dense heads": (FULL, {}, {"options": {"kv_transfer_config": LMCACHE}}, ""),
    "scales per head": (UNEVEN, {"quantization_config": PER_HEAD}, {},
                        r"one scale per head, and layer 0 has 6 query heads and 2 KV heads, the dense model 12 and 4;"),
    "scales per dense head": (FULL, {"quantization_config": PER_HEAD}, {}, ""),
    # vLLM would divide by zero once the weights are loaded
    "one stage": (LATE, {}, TWO, r"pipeline stage 1 of 2 has layers 0…1, whose attention .* pass a lower --pipeline-"),
    "other stages": (LATE, {}, TWO | {"environment": {"VLLM_PP_LAYER_PARTITION": "3,1"}}, ""),
}  # fmt: skip


def write_config(folder: Path, layers: list[list[int]], **fields: Any) -> Path:
    entries = [{"query_heads_per_kv_head": heads, "intermediate_size": 32} for heads in layers]
    config = DDPLlamaConfig(**SIZES | fields, num_hidden_layers=len(layers), ddp_layers=entries)
    config.architectures = ["DDPLlamaForCausalLM"]
    config.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def planned(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("plans")
    cases = {}
    for name, (layers, fields, case, _) in CASES.items():
        folder = write_config(root / name, layers, **fields)
        cases[name] = case | {"folder": str(folder), "options": {"max_model_len": 256} | case.get("options", {})}
    return serve(cases, "plan")


@pytest.mark.parametrize("name", CASES)
def test_only_what_vllm_would_compute_wrongly_is_refused(name: str, planned: dict[str, Any]) -> None:
    refusal = CASES[name][-1]
    assert re.search(refusal, planned[name]["error"]) if refusal else "error" not in planned[name], planned[name]
