"""Ask a pruned model in vLLM; it requires ddp-vllm in the same environment.

python examples/chat.py ./pruned "What are the three primary colours?"
"""

import sys
from typing import Any

from vllm import LLM, SamplingParams


def main(model: str, question: str, **engine: Any) -> None:
    llm = LLM(model, **engine)
    (answer,) = llm.chat([{"role": "user", "content": question}], SamplingParams(temperature=0, max_tokens=64))
    print(answer.outputs[0].text)


if __name__ == "__main__":
    main(*sys.argv[1:])
