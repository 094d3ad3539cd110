"""Run real vLLM on one checkpoint and write down what it says; a process of its own keeps its state out of the tests.

Usage: chain_in_vllm.py REQUEST.json ANSWER.json; the request holds folder, dtype, prompts (token ids), tokens and top.
"""

import json
import sys
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams


def answer(folder: str, dtype: str, prompts: list[list[int]], tokens: int, top: int) -> list[dict[str, Any]]:
    """Return for each prompt its greedy tokens and, for each of them, the `top` raw logits by token id."""
    engine = LLM(
        folder, dtype=dtype, enforce_eager=True, max_model_len=256, trust_remote_code=True, max_logprobs=-1,
        logprobs_mode="raw_logits", gpu_memory_utilization=0.3, num_gpu_blocks_override=64,
    )  # fmt: skip
    greedy = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=top, detokenize=False)
    outputs = [
        request.outputs[0] for request in engine.generate([{"prompt_token_ids": ids} for ids in prompts], greedy)
    ]
    return [
        {
            "tokens": list(output.token_ids),
            "logits": [{str(token): value.logprob for token, value in step.items()} for step in output.logprobs or []],
        }
        for output in outputs
    ]


if __name__ == "__main__":
    request = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(json.dumps(answer(**request)))
