"""What does `--align` cost in perplexity, and can masks be aligned after they were learned?

    python benchmarks/lab/align_quality.py MODEL --data TEXT --test WIKITEXT --detokenize --steps 60 --align 1,64,128

One search; its end is rounded at every alignment and each support is polished on the same text in the same order.
`N after` aligns what was learned without alignment as `apply --align` does, with no polish after. Ratios are to
align 1, with the standard error of the blocks' differences. The last line on stdout is JSON.
"""

import dataclasses
import math
import statistics
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from ddp_models.loading import load_model
from ddp_models.source import open_source
from ddp_prune.budget import suited_pools
from ddp_prune.gates import Masks, block_losses
from ddp_prune.run import Run
from ddp_prune.selection import realign
from ddp_prune.trainer import Trainer
from ddp_study.study import read_test_blocks
from ddp_text.tokens import load_tokenizer
from ddp_training.batches import Batches
from study import gate, learning_parser, prepare_run, print_result, take_steps


def main() -> None:
    parser = learning_parser(__doc__, steps=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--align", default="64,128", help="alignments, measured after none")
    parser.add_argument("--state", type=Path, help="Keep the search's end here, and start from it if it is there.")
    arguments = parser.parse_args()
    source, tokenizer = open_source(arguments.model), load_tokenizer(arguments.model)
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    gated = gate(load_model(source, "auto", accelerator.device), source)
    recipe, blocks = prepare_run(arguments, tokenizer, arguments.seed)
    tests = {
        "test": read_test_blocks(arguments.test, tokenizer, detokenize=arguments.detokenize),
        "heldout": blocks.heldout,
    }

    def trainer(align: int) -> Trainer:
        aligned = dataclasses.replace(recipe, align=align)
        _, pools = suited_pools(aligned, source, source.shapes)
        return Trainer(gated, Batches(blocks.train, aligned, accelerator), Run.alone(aligned), pools, accelerator)

    def losses(gates: Masks | None) -> dict[str, Any]:
        return {name: block_losses(gated, gates, test) for name, test in tests.items()}

    state = _search(trainer(1), arguments.state)
    results: dict[str, Any] = {"dense": losses(None)}
    plain: Masks = {}
    saliency: Masks = {}
    for align in dict.fromkeys([1, *map(int, arguments.align.split(","))]):
        run = trainer(align)
        run.restore(0, state, {})
        take_steps(run, run.run.steps.search, recipe.steps)
        learned = run.learned()
        candidates = {f"{align}": learned.gates}
        if align == 1:
            plain, saliency = learned.gates, learned.saliency
        else:
            candidates[f"{align} after"] = plain | {"mlp": realign(plain["mlp"], saliency["mlp"], align)}
        for label, gates in candidates.items():
            alive = gates["mlp"] > 0
            moved = int((alive & (plain["mlp"] <= 0)).sum())
            results[label] = losses(gates) | {"widths": alive.sum(1).tolist(), "moved": moved}
            print(_sentence(label, results), flush=True)
    print_result(__doc__, arguments, seed=arguments.seed, results=results)


def _search(trainer: Trainer, kept: Path | None) -> dict[str, torch.Tensor]:
    """Return the state at the end of the search, before rounding."""
    if kept and kept.exists():
        state: dict[str, torch.Tensor] = torch.load(kept)
        return state
    take_steps(trainer, 0, trainer.run.steps.search)
    state = trainer.state()
    if kept:
        torch.save(state, kept)
    return state


def _sentence(label: str, results: dict[str, Any]) -> str:
    parts = [f"align {label:10s} moved {results[label]['moved']:5d}"]
    for name in ("test", "heldout"):
        losses, dense = results[label][name], results["dense"][name]
        differences = [a - b for a, b in zip(losses, results["1"][name], strict=True)]
        ratio, error = math.exp(statistics.fmean(differences)), statistics.stdev(differences) / math.sqrt(len(losses))
        parts.append(f"{name} {math.exp(statistics.fmean(losses)):.2f} (dense {math.exp(statistics.fmean(dense)):.2f})")
        parts.append(f"{ratio:.4f} ± {ratio * error:.4f} × align 1")
    return ", ".join(parts)


if __name__ == "__main__":
    main()
