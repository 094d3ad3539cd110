"""Run vLLM without ddp-vllm on pruned checkpoints, through its Transformers backend, and write down their answers.

Usage: stock_tiny.py JOBS.json RESULTS.json; a job holds the arguments of `serve`. Nothing of ddp-vllm can help here.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

for name in ("ddp_vllm", "ddp_prune", "ddp_plugins", "ddp_benchmarks"):
    sys.modules[name] = None  # type: ignore[assignment]  # an editable install would make them importable
os.environ["VLLM_PLUGINS"] = ""

from vllm import LLM, SamplingParams  # noqa: E402
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory  # noqa: E402
from vllm.transformers_utils import model_arch_config_convertor as convertors  # noqa: E402

OPTIONS: dict[str, Any] = {
    "model_impl": "transformers",
    "trust_remote_code": True,
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 192,
    "skip_tokenizer_init": True,
    "kv_cache_memory_bytes": 1 << 26,
    "num_gpu_blocks_override": 16,
}


def serve(
    folder: str,
    prompts: list[list[int]],
    num_tokens: int,
    options: dict[str, Any],
    asks_layers: bool = True,
) -> list[dict[str, Any]]:
    """Return the greedy tokens after each prompt and their log-probabilities.

    asks_layers: off, vLLM takes the heads of all layers for the dense model's, as old versions do.
    """
    kind = json.loads((Path(folder) / "config.json").read_text())["model_type"]
    answer = {} if asks_layers else {"get_per_layer_hf_configs": lambda self: None}
    base = convertors.ModelArchConfigConvertorBase
    convertors.MODEL_ARCH_CONFIG_CONVERTORS[kind] = type("Convertor", (base,), answer)
    engine = LLM(folder, **{**OPTIONS, **options})
    greedy = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, logprobs=0, detokenize=False)
    said = []
    for answered in engine.generate([{"prompt_token_ids": ids} for ids in prompts], greedy):
        first = answered.outputs[0]
        chosen = zip(first.token_ids, first.logprobs, strict=True)
        said.append({"tokens": list(first.token_ids), "logprobs": [each[token].logprob for token, each in chosen]})
    return said


def main() -> None:
    results: list[dict[str, Any]] = []
    for job in json.loads(Path(sys.argv[1]).read_text()):
        start = time.perf_counter()
        try:
            results.append({"outputs": serve(**job)})
        except Exception as error:  # the test looks at the message
            results.append({"error": f"{type(error).__name__}: {error}"})
        cleanup_dist_env_and_memory()
        print(f"{job['folder']}: {time.perf_counter() - start:.1f} s", flush=True)
    Path(sys.argv[2]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
