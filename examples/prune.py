"""Prune a model and print the cost in perplexity.

    python examples/prune.py HuggingFaceTB/SmolLM2-135M-Instruct ./pruned docs/short_run.toml talks.jsonl

The recipe holds the settings of the run; with the defaults it takes days on a CPU. Text is a
.txt, .jsonl, .json or .parquet file.
"""

import sys

import ddp_vllm


def main(model: str, output: str, recipe: str, data: str) -> None:
    pruned = ddp_vllm.prune(model, output=output, recipe=recipe, sparsity=0.2, data=data, verbose=True)
    quality = pruned.provenance["perplexity"]
    print(f"{pruned.num_parameters:,} parameters, perplexity {quality['dense']:.1f} → {quality['pruned']:.1f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
