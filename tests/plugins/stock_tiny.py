"""Run vLLM without ddp-vllm on pruned checkpoints, through its Transformers backend, and write down their answers.

Usage: stock_tiny.py JOBS.json RESULTS.json; a job holds the arguments of `serve`. Nothing of ddp-vllm can help here.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

for name in ("ddp_vllm", "ddp_prune", "ddp_plugins", "ddp_benchmarks"):
    sys.modules[name] = None  # type: ignore[assignment]  # an editable install would make them importable
os.environ["VLLM_PLUGINS"] = ""

import serve_tiny  # noqa: E402
from vllm.transformers_utils import model_arch_config_convertor as convertors  # noqa: E402


def serve(folder: str, options: dict[str, Any], asks_layers: bool = True) -> dict[str, Any]:
    """asks_layers: off, vLLM takes the heads of all layers for the dense model's, as old versions do."""
    kind = json.loads((Path(folder) / "config.json").read_text())["model_type"]
    answer = {} if asks_layers else {"get_per_layer_hf_configs": lambda self: None}
    base = convertors.ModelArchConfigConvertorBase
    convertors.MODEL_ARCH_CONFIG_CONVERTORS[kind] = type("Convertor", (base,), answer)
    return serve_tiny.serve(folder, {"model_impl": "transformers", "trust_remote_code": True} | options)


if __name__ == "__main__":
    serve_tiny.run_jobs(json.loads(Path(sys.argv[1]).read_text()), serve)
