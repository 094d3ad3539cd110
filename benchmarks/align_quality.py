"""What does `--align` cost in perplexity, and can masks be aligned after they were learned?

    python benchmarks/align_quality.py MODEL --data TEXT --test WIKITEXT --detokenise --steps 60 --align 1,64,128

One search; its end is rounded at every alignment and each support is polished on the same text in the same order.
`N after` aligns what was learned without alignment as `apply --align` does, with no polish after. Ratios are to
align 1, with the standard error of the blocks' differences. The last line on stdout is JSON.
"""

import dataclasses
import json
import math
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from ddp_prune.batches import Batches
from ddp_prune.families import choose_head_unit
from ddp_prune.gates import GatedModel, Masks
from ddp_prune.perplexity import block_losses
from ddp_prune.recipe import Recipe
from ddp_prune.rounding import realign
from ddp_prune.source import load_model, open_source
from ddp_prune.tokens import load_tokenizer
from ddp_prune.trainer import Trainer
from mask_quality import make_parser, prepare_run, read_test_blocks


def main() -> None:
    parser = make_parser(__doc__, steps=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--align", default="64,128", help="alignments, measured after none")
    parser.add_argument("--state", type=Path, help="Keep the search's end here, and start from it if it is there.")
    arguments = parser.parse_args()
    source, tokenizer = open_source(arguments.model), load_tokenizer(arguments.model)
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    model = load_model(source, "auto", accelerator.device)
    gated = GatedModel(model, source.family, source.sizes, choose_head_unit("auto", source.sizes))
    recipe, blocks = prepare_run(arguments, tokenizer, arguments.seed)
    test = read_test_blocks(arguments.test, tokenizer, detokenise=arguments.detokenise)
    tests = {"test": test, "heldout": blocks.heldout}

    def trainer(align: int) -> Trainer:
        aligned = dataclasses.replace(recipe, align=align)
        return Trainer(gated, Batches(blocks.train, aligned, accelerator), aligned, accelerator)

    state = _search(trainer(1), recipe, arguments.state)
    results: dict[str, Any] = {"dense": {name: block_losses(gated, None, test) for name, test in tests.items()}}
    plain: Masks = {}
    saliency: Masks = {}
    for align in dict.fromkeys([1, *map(int, arguments.align.split(","))]):
        run = trainer(align)
        run.restore({name: value.clone() for name, value in state.items()}, {})  # a run moves its state in place
        _steps(run, recipe.search_steps, recipe.steps)
        learned = run.learned()
        candidates = {f"{align}": learned.gates}
        if align == 1:
            plain, saliency = learned.gates, learned.saliency
        else:
            candidates[f"{align} after"] = plain | {"mlp": realign(plain["mlp"], saliency["mlp"], align)}
        for label, gates in candidates.items():
            alive = gates["mlp"] > 0
            results[label] = {name: block_losses(gated, gates, test) for name, test in tests.items()}
            results[label] |= {"widths": alive.sum(1).tolist(), "moved": int((alive & (plain["mlp"] <= 0)).sum())}
            print(_sentence(label, results), flush=True)
    print(json.dumps({
        "question": (__doc__ or "").split("\n")[0],
        "settings": {name: str(value) for name, value in vars(arguments).items()},
        "machine": {"cpu": platform.processor() or platform.machine(), "threads": torch.get_num_threads()},
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "results": results,
    }))  # fmt: skip


def _search(trainer: Trainer, recipe: Recipe, kept: Path | None) -> dict[str, torch.Tensor]:
    """Return the state at the end of the search, before rounding."""
    if kept and kept.exists():
        state: dict[str, torch.Tensor] = torch.load(kept)
        return state
    _steps(trainer, 0, recipe.search_steps)
    state = trainer.state()
    if kept:
        torch.save(state, kept)
    return state


def _steps(trainer: Trainer, first: int, end: int) -> None:
    began = time.perf_counter()
    for step in range(first, end):
        metrics = trainer.step(step)
        if (step + 1) % 10 == 0:
            print(f"  step {step + 1} loss {metrics['loss']:.3f} {time.perf_counter() - began:.0f} s", file=sys.stderr)


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
