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

import vllm.config.vllm
from serve_tiny import skip_inspection
from vllm.engine.arg_utils import EngineArgs

from ddp_plugins import limits


def plan(
    folder: str, options: dict[str, Any], capability: int | None = None, runner: str = "", partition: str = ""
) -> dict[str, Any]:
    """Return vLLM's error or the plugin's warnings.

    capability: first number of a GPU's compute capability; None: this machine. runner: VLLM_USE_V2_MODEL_RUNNER.
    partition: VLLM_PP_LAYER_PARTITION.
    """
    warnings: list[str] = []
    limits.logger = SimpleNamespace(warning_once=lambda text, *values: warnings.append(text % values))
    if capability:
        gpu = SimpleNamespace(major=capability, minor=0)
        limits.current_platform = SimpleNamespace(is_cuda=lambda: True, get_device_capability=lambda: gpu)
    for name, value in (("VLLM_USE_V2_MODEL_RUNNER", runner), ("VLLM_PP_LAYER_PARTITION", partition)):
        os.environ.pop(name, None)
        os.environ.update({name: value} if value else {})
    vllm.config.vllm.HAS_TRITON = True  # as on a GPU, or V2 is refused
    engine = EngineArgs(folder, skip_tokenizer_init=True, enforce_eager=True, dtype="bfloat16", **options)
    try:
        engine.create_engine_config()
    except Exception as error:  # the test looks at the message
        return {"error": " ".join(str(error).split())}
    return {"warnings": warnings}


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
