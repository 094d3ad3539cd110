"""The comparison of a vLLM wheel with what our code uses, on the installed vLLM packed as a wheel and then damaged."""

import re
import zipfile
from pathlib import Path

import pytest

from vllm_versions import Sources, differences

VERSIONED = {  # file of vLLM: what is replaced in it, and what the comparison then finds
    "v1/core/kv_cache_utils.py": (
        "def get_max_concurrency_for_kv_cache_config",
        "def get_max_concurrency",
        "vllm.v1.core.kv_cache_utils:get_max_concurrency_for_kv_cache_config was removed",
    ),
    "model_executor/layers/fused_moe/expert_map_manager.py": (
        "def is_local_expert(self, global_id: int)",
        "def is_local_expert(self, global_id: int, rank: int)",
        "vllm.model_executor.layers.fused_moe.expert_map_manager:ExpertMapManager.is_local_expert has a new parameter "
        "rank",
    ),
    "model_executor/layers/fused_moe/fused_moe_method_base.py": (
        "        shared_experts_input: torch.Tensor | None",
        "        shared_input: torch.Tensor | None",
        "vllm.model_executor.layers.fused_moe.fused_moe_method_base:FusedMoEMethodBase.apply has no parameter "
        "shared_experts_input any more",
    ),
}


@pytest.mark.nightly
@pytest.mark.vllm
def test_what_a_wheel_lacks_is_named_and_nothing_else(tmp_path: Path) -> None:
    installed = Sources().folder
    for name, damaged in (("same", False), ("damaged", True)):
        with zipfile.ZipFile(tmp_path / f"{name}.whl", "w") as wheel:
            for file in (installed / "vllm").rglob("*.py"):
                text, path = file.read_text(), str(file.relative_to(installed))
                if damaged and path[5:] in VERSIONED:
                    before, after, _ = VERSIONED[path[5:]]
                    assert before in text, path
                    text = re.sub(re.escape(before), after, text, count=1)
                wheel.writestr(path, text)
    assert differences(Sources(tmp_path / "same.whl")) == []
    found = differences(Sources(tmp_path / "damaged.whl"))
    assert {line for _, _, line in VERSIONED.values()} <= set(found)
