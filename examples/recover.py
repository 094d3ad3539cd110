"""Distill a pruned model from the dense one for some minutes, and print the recovered quality.

python examples/recover.py ./pruned ./recovered 10
"""

import sys

import ddp_vllm


def main(pruned: str, output: str, minutes: str) -> None:
    recovered = ddp_vllm.recover(pruned, output=output, minutes=float(minutes))
    quality = recovered.provenance["perplexity"]
    print(" → ".join(f"{model} {quality[model]:.1f}" for model in ("dense", "pruned", "recovered")))
    print(ddp_vllm.report(output))


if __name__ == "__main__":
    main(*sys.argv[1:])
