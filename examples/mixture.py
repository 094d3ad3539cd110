"""Prune a mixture of experts, and show how many experts and channels each layer keeps.

    accelerate launch --num_processes 8 examples/mixture.py --shard \\
        --model Qwen/Qwen3-30B-A3B --data chats.jsonl --output ./smaller

By default every expert gets its own width, which vLLM serves through the plugin of ddp-vllm. With
--whole-experts every layer loses equally many experts, and every program that runs the dense model
runs the result.

To see how it works on two CPU cores, take a small mixture and pass --steps 40 --batch-size 1
--seq-len 1024.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import ddp_vllm


def main(model: str, data: str, output: Path, sparsity: float, **settings: Any) -> None:
    # 1. Prune. Router, shared experts and attention do not change; rarely used experts lose more
    #    than others. With several processes each one makes this call, and the first writes the
    #    folder.
    pruned = ddp_vllm.prune(model, output=output, data=data, sparsity=sparsity, verbose=True, **settings)
    if os.environ.get("RANK", "0") != "0":
        return

    # 2. Look at the result. Width 0 is a removed expert.
    for number, layer in enumerate(pruned.layers):
        widths = layer.expert_intermediate_sizes
        if widths:
            kept = [width for width in widths if width]
            smallest, largest = min(kept, default=0), max(kept, default=0)
            print(f"layer {number}: {len(kept)} of {len(widths)} experts, {smallest} to {largest} channels")
    quality = pruned.provenance["perplexity"]
    print(f"perplexity on held-out text: dense {quality['dense']:.2f}, pruned {quality['pruned']:.2f}")
    print(f"serve it: vllm serve {output}\nis it faster? ddp-vllm bench sharegpt --dense {model} --pruned {output}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder or Hub name of the dense mixture of experts")
    parser.add_argument("--data", required=True, help="text to train on, named as in ddp-vllm prune")
    parser.add_argument("--output", type=Path, required=True, help="folder to write the pruned model to")
    parser.add_argument("--sparsity", type=float, default=0.25, help="fraction to remove (default: %(default)s)")
    for option in ("--whole-experts", "--shard"):
        parser.add_argument(option, action="store_true", default=argparse.SUPPRESS, help="as in ddp-vllm prune")
    for option in ("--steps", "--batch-size", "--seq-len"):
        parser.add_argument(option, type=int, default=argparse.SUPPRESS, help="as in ddp-vllm prune")
    try:
        main(**vars(parser.parse_args()))
    except ddp_vllm.DdpError as error:  # what a user can correct
        raise SystemExit(f"{parser.prog}: {error}") from None
