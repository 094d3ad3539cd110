"""Quantize a pruned model to 8-bit integers; vLLM serves the result as before.

    python examples/quantise.py ./pruned ./small

It requires llm-compressor in an environment separate from vLLM's: pip install ".[prune,quantize]" in a clone.
"""

import sys
from pathlib import Path

import ddp_vllm


def main(pruned: str, output: str) -> None:
    small = ddp_vllm.quantize(pruned, "W8A8", output=output, verbose=True)
    before, after = (sum(file.stat().st_size for file in Path(at).glob("model*.safetensors")) for at in (pruned, small))
    print(f"{before / 1e6:,.0f} MB of weights → {after / 1e6:,.0f} MB")


if __name__ == "__main__":
    main(*sys.argv[1:])
