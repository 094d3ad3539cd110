"""Write a model as one file that stock llama.cpp runs.

    python examples/export_gguf.py --model ./pruned --output pruned.gguf --outtype q8_0

The model is a folder of ddp-vllm or a dense one. docs/guides/llama-cpp.md lists which families
llama.cpp runs.
"""

import argparse

import ddp_vllm


def main(model: str, output: str, outtype: str) -> None:
    file = ddp_vllm.export(model, output=output, outtype=outtype, verbose=True)
    print(f"llama-server -m {file}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of the model")
    parser.add_argument("--output", required=True, help="file to write")
    parser.add_argument("--outtype", default="q8_0", help="number format, as in ddp-vllm export (default: %(default)s)")
    main(**vars(parser.parse_args()))
