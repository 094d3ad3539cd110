"""Run real vLLM on checkpoints, one engine after the other in this process, and write down what each did.

A process of its own: vLLM's warnings, global state and compiled functions stay out of the test process.
Usage: serve_tiny.py JOBS.json RESULTS.json; a job is {"folder": …, "options": {…}}.
"""

import gc
import json
import sys
from pathlib import Path
from typing import Any

from tiny_models import NUM_NEW_TOKENS, PROMPTS
from vllm import LLM, SamplingParams
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory


def serve(folder: str, options: dict[str, Any]) -> dict[str, Any]:
    defaults = {"dtype": "float32", "enforce_eager": True, "max_model_len": 192, "skip_tokenizer_init": True}
    engine = LLM(folder, **{**defaults, **options})
    greedy = SamplingParams(temperature=0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True, logprobs=0, detokenize=False)
    answers = [answer.outputs[0] for answer in engine.generate([{"prompt_token_ids": ids} for ids in PROMPTS], greedy)]
    return {
        "attention_layers": sorted(engine.llm_engine.vllm_config.compilation_config.static_forward_context),
        "outputs": [
            {
                "tokens": list(answer.token_ids),
                "logprobs": [
                    chosen[token].logprob for token, chosen in zip(answer.token_ids, answer.logprobs, strict=True)
                ],
            }
            for answer in answers
        ],
    }


def main() -> None:
    results = []
    for job in json.loads(Path(sys.argv[1]).read_text()):
        try:
            results.append(serve(**job))
        except Exception as error:  # the test looks at the message
            results.append({"error": f"{type(error).__name__}: {error}"})
        gc.collect()
        cleanup_dist_env_and_memory()
    Path(sys.argv[2]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
