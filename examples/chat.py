"""Ask a pruned model in vLLM; ddp-vllm must be installed in the same environment, which is all that
vLLM needs.

python examples/chat.py --model ./pruned --question "What are the three primary colours?"
"""

import argparse
from typing import Any

from vllm import LLM, SamplingParams


def main(model: str, question: str, max_tokens: int, **engine: Any) -> None:
    llm = LLM(model, **engine)
    (answer,) = llm.chat([{"role": "user", "content": question}], SamplingParams(temperature=0, max_tokens=max_tokens))
    print(answer.outputs[0].text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of the pruned model, which has a chat template")
    parser.add_argument("--question", default="What are the three primary colours?")
    parser.add_argument("--max-model-len", type=int, default=2048, help="context in tokens (default: %(default)s)")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.9, help="of memory (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=64, help="length of the answer (default: %(default)s)")
    main(**vars(parser.parse_args()))
