"""Write a model as one file that stock llama.cpp runs.

python examples/gguf.py ./pruned pruned.gguf Q8_0
"""

import sys

import ddp_vllm


def main(folder: str, output: str, outtype: str) -> None:
    file = ddp_vllm.export(folder, output=output, outtype=outtype, verbose=True)
    print(f"llama-server -m {file}")


if __name__ == "__main__":
    main(*sys.argv[1:])
