"""Prune a model to several sizes in one run, and choose the smallest one that is good enough.

    python examples/choose_a_size.py --model HuggingFaceTB/SmolLM2-135M-Instruct \\
        --data chats.jsonl --output ./sizes

All sizes share one search, which takes 1.3 times the steps of the smallest model alone. With
--budget speedup, --sizes are speedups such as 1.1,1.25,1.5; that requires vLLM on this machine,
which times the model first.

To see how it works on two CPU cores, pass --steps 60 --batch-size 1 --seq-len 1024.
"""

import argparse
from pathlib import Path
from typing import Any

import ddp_vllm


def main(
    model: str, data: str, output: Path, budget: str, sizes: list[float] | None, tolerance: float, min_agreement: float,
    **settings: Any,
) -> None:  # fmt: skip
    # 1. Prune to all sizes. Each is written to a folder of its own inside `output` as soon as it
    #    is trained. If this call is interrupted, the same call resumes it.
    wanted = {budget: sizes or ([0.1, 0.2, 0.3] if budget == "sparsity" else [1.1, 1.25, 1.5])}
    checkpoints = ddp_vllm.prune_sizes(model, output=output, data=data, verbose=True, **wanted, **settings)

    # 2. Compare them on held-out text. Its documents are chosen by a hash, so all sizes are
    #    evaluated on the same text, and no size was trained on it. A model that adapted to the kind of
    #    text may have a low perplexity and other answers, so it must agree with the dense model too.
    chosen = None
    for checkpoint in sorted(checkpoints, key=lambda each: each.num_parameters, reverse=True):
        quality = checkpoint.provenance["perplexity"]
        ratio = quality["pruned"] / quality["dense"]
        top1 = quality["agreement"]["pruned"]["top1"]
        print(
            f"{checkpoint.folder.name}: {checkpoint.num_parameters:,} parameters, perplexity × {ratio:.3f}, "
            f"top-1 agreement {top1:.1%}"
        )
        if ratio <= tolerance and top1 >= min_agreement:
            chosen = checkpoint

    # 3. Put everything on one page. Run `ddp-vllm bench sharegpt` and `ddp-vllm eval` for the sizes
    #    that you consider, then `ddp-vllm compare`: it finds their results in the folders.
    page = output.with_name(f"{output.name}.html")
    folders = [checkpoint.folder for checkpoint in checkpoints]
    ddp_vllm.compare(folders, output=page, tolerance=tolerance, min_agreement=min_agreement, overwrite=True)
    print(f"all sizes: {page}")

    # 4. Choose.
    if chosen is None:
        print(
            f"no size has at most {tolerance:g} × the dense perplexity and {min_agreement:.0%} top-1 agreement; "
            "train for longer, or remove less"
        )
    else:
        print(f"chosen: {chosen.folder}\nserve it: vllm serve {chosen.folder}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder or Hub name of the dense model")
    parser.add_argument("--data", required=True, help="text to train on, named as in ddp-vllm prune")
    parser.add_argument("--output", type=Path, required=True, help="folder to write one folder per size into")
    parser.add_argument("--budget", choices=("sparsity", "speedup"), default="sparsity")
    parser.add_argument(
        "--sizes",
        type=lambda text: [*map(float, text.split(","))],
        help="comma-separated (default: 0.1,0.2,0.3, or speedups 1.1,1.25,1.5)",
    )
    parser.add_argument(
        "--tolerance", type=float, default=1.05, help="accepted perplexity over the dense one (default: %(default)s)"
    )
    parser.add_argument(
        "--min-agreement", type=float, default=0.85, help="accepted top-1 agreement (default: %(default)s)"
    )
    for option in ("--steps", "--batch-size", "--seq-len"):
        parser.add_argument(option, type=int, default=argparse.SUPPRESS, help="as in ddp-vllm prune")
    try:
        main(**vars(parser.parse_args()))
    except ddp_vllm.DdpError as error:  # what a user can correct
        raise SystemExit(f"{parser.prog}: {error}") from None
