"""How good are masks of a real model after the paper's number of tokens? The product prunes, in the
time that is left.

    python train.py MODEL TOKENS.xz FOLDER --out R.json [--recipe docs/paper.toml] [--set
    NAME=VALUE]

A step is timed first; the run takes the steps that fit, at most --steps, at the recipe's batch. The
text has no file on the machine: its tokens are put into the product's cache. The masks file is
copied next to --out.
"""

import argparse
import json
import lzma
import os
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import ddp_vllm
from ddp_prune.core.rate import trial_steps
from ddp_prune.devices import make_accelerator
from ddp_prune.fit import allowed_modes
from ddp_prune.models.source import open_source
from ddp_prune.pools import make_checked_pools
from ddp_prune.recipe import Recipe, load_recipe
from ddp_prune.resolve import seconds_a_step
from ddp_prune.run import Run
from ddp_prune.text import blocks as product
from ddp_prune.text.tokens import Tokens, load_tokenizer
from ddp_vllm.cache import cache_folder
from lease import DRY, ENDS, Results

TEXT = "lease-text"
FINISHING = 12  # seconds for evaluation, samples and export


def fill_cache(model: str, tokens: Path, recipe: Recipe, steps: int) -> int:
    """Write the blocks of a run to the product's token cache; return how many blocks there are to
    train on."""
    stream = np.frombuffer(lzma.decompress(tokens.read_bytes()), np.uint16).astype(np.int32)
    blocks = stream[: len(stream) // recipe.seq_len * recipe.seq_len].reshape(-1, recipe.seq_len)
    wanted, heldout = steps * recipe.batch_size, recipe.heldout_blocks
    ids = blocks[: heldout + wanted]
    sizes = (recipe.seq_len, wanted, heldout, recipe.batch_size, recipe.seed, recipe.text_column)
    key = product._key(TEXT, load_tokenizer(model), *sizes)
    product.save_blocks(
        cache_folder() / "tokens" / f"{key}.tokens", Tokens(ids, np.ones(ids.shape, bool), np.empty((2, 0), np.uint64))
    )
    return len(ids) - heldout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("tokens", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=3 if DRY else 1000)
    parser.add_argument("--recipe", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    args = parser.parse_args()
    os.environ.setdefault("DDP_VLLM_CACHE", str(args.folder.parent / "cache"))
    settings: dict[str, Any] = {"sparsity": 0.35, "data": TEXT}
    if DRY:
        settings |= {"seq_len": 64, "batch_size": 2, "heldout_blocks": 2}
    for pair in args.set:
        name, _, value = pair.partition("=")
        settings[name] = json.loads(value) if value[:1].isdigit() else value
    recipe = load_recipe(args.recipe, {**settings, "model": args.model})
    accelerator, source, mode = make_accelerator(args.folder, None), open_source(args.model), allowed_modes(recipe)[0]
    unit, pools = make_checked_pools(recipe, source, source.shapes)
    run = Run.alone(recipe, **mode._asdict())
    seconds = seconds_a_step(run, source, unit, pools, accelerator)
    left = ENDS - time.time() - FINISHING
    steps = args.steps if DRY else max(20, int(min(args.steps, left / seconds / 1.05 - trial_steps(run))))
    num_blocks = fill_cache(args.model, args.tokens, recipe, steps)
    results = Results(args.out, train=str(mode), steps=steps, settings=settings)
    results.save(seconds_a_step=seconds, passes_over_text=steps * recipe.batch_size / num_blocks)
    if not DRY:
        torch.cuda.reset_peak_memory_stats()
    try:
        with results.row(case="prune") as row:
            checkpoint = ddp_vllm.prune(
                args.model,
                output=args.folder,
                recipe=args.recipe,
                overwrite=True,
                verbose=True,
                steps=steps,
                **settings,
            )
            provenance = checkpoint.provenance
            row |= {name: provenance.get(name) for name in ("perplexity", "rounding", "learning_rate")}
            row["peak_gib"] = 0 if DRY else torch.cuda.max_memory_allocated() / 2**30
            shutil.copy(args.folder / "ddp_masks.safetensors", args.out.with_suffix(".masks.safetensors"))
    finally:  # also of a run that was interrupted
        for file in (
            args.folder / "ddp_metrics.jsonl",
            args.folder.with_name(f"{args.folder.name}.run") / "metrics.jsonl",
        ):
            if file.exists():
                rows = [json.loads(line) for line in file.read_text().splitlines() if line.strip()]
                results["metrics"] = rows[:: max(1, len(rows) // 100)] + rows[-1:]
        results.finish()


if __name__ == "__main__":
    main()
