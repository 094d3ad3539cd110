"""Let vLLM plan for pruned models up to where it would load weights, and write down what it and the plugin said.

Nothing is loaded, so a GPU can be pretended: `capability` is what the plugin is told of it.
Usage: plan_tiny.py CASES.json RESULTS.json; a case holds the arguments of `plan`.
"""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import vllm.config.vllm
from serve_tiny import skip_inspection
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from ddp_plugins import limits
from ddp_vllm.remote_code.widths import head_dim, parse_layers

try:
    from vllm.v1.core.kv_cache_planning import get_kv_cache_configs  # since vLLM 0.33
except ImportError:
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs

CACHE_BYTES = 1 << 30
BLOCK = 16  # tokens


def plan(
    folder: str, options: dict[str, Any], capability: int | None = None, runner: str = "", held: bool = False
) -> dict[str, Any]:
    """Return vLLM's error or the plugin's warnings, and with `held` how many sequences of full length memory holds.

    capability: first number of a GPU's compute capability; None: this machine. runner: VLLM_USE_V2_MODEL_RUNNER.
    """
    warnings: list[str] = []
    limits.logger = SimpleNamespace(warning_once=lambda text, *values: warnings.append(text % values))
    if capability:
        gpu = SimpleNamespace(major=capability, minor=0)
        limits.current_platform = SimpleNamespace(is_cuda=lambda: True, get_device_capability=lambda: gpu)
    os.environ.pop("VLLM_USE_V2_MODEL_RUNNER", None)
    os.environ.update({"VLLM_USE_V2_MODEL_RUNNER": runner} if runner else {})
    vllm.config.vllm.HAS_TRITON = True  # as on a GPU, or V2 is refused
    engine = EngineArgs(folder, skip_tokenizer_init=True, enforce_eager=True, dtype="bfloat16", **options)
    try:
        config = engine.create_engine_config()
    except Exception as error:  # the test looks at the message
        return {"error": " ".join(str(error).split())}
    return {"warnings": warnings, "held": num_held(config) if held else None}


def num_held(config: Any) -> float:
    fields = limits.plain_config(config.model_config.hf_config)
    specs = {}
    for index, (kind, layer) in enumerate(zip(fields["layer_types"], parse_layers(fields), strict=True)):
        sizes = {"num_kv_heads": layer.num_kv_heads, "head_size": head_dim(fields), "dtype": torch.bfloat16}
        if kind == "sliding_attention":
            specs[f"layers.{index}"] = SlidingWindowSpec(BLOCK, sliding_window=fields["sliding_window"], **sizes)
        else:
            specs[f"layers.{index}"] = FullAttentionSpec(BLOCK, **sizes)
    config.cache_config.kv_cache_layout = "LBNHC"  # what FlashAttention asks for, and vLLM notes in a worker
    plans = get_kv_cache_configs(config, [specs], [CACHE_BYTES])
    return float(get_max_concurrency_for_kv_cache_config(config, plans[0]))


def main() -> None:
    skip_inspection()
    real = limits.current_platform
    results = []
    for case in json.loads(Path(sys.argv[1]).read_text()):
        limits.current_platform = real
        results.append(plan(**case))
    Path(sys.argv[2]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
