"""How good are learned masks, next to one-shot ones, at the same exact budget?

    python benchmarks/mask_quality.py MODEL --data TEXT --test WIKITEXT --sparsity 0.2 --methods magnitude,fisher,ddp

Every method prunes the same numbers of units of the same model; learning methods see the same blocks of TEXT in the
same order for the same number of steps. Perplexity is on the first 16×512 tokens of the test text, which nothing may
learn on. `fisher+scales` keeps the units Fisher keeps and learns only their scales for the whole run: the control.
`hard-concrete` learns the stochastic gates of L0 regularisation (Eq. 8 and 9) under the paper's multipliers.
For mixtures of experts: `camera`, `heapr`, `uniform` (every expert equally wide, channels by activation energy) and
`whole-experts` (by frequency × mean weighted output); `ddp-layer` and `ddp-expert` hold the budget in each of them.
A masks file (…/ddp_masks.safetensors) is a method too: it is judged as it is.
The last line on stdout is JSON.
"""

import argparse
import dataclasses
import functools
import json
import math
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from ddp_prune.annealing import AnnealedTrainer
from ddp_prune.baselines import ExpertUse, magnitude, measure_experts, taylor_and_fisher
from ddp_prune.batches import Batches
from ddp_prune.costs import dense_layers, prices
from ddp_prune.export import layer_widths, read_masks, write_masks
from ddp_prune.families import choose_head_unit
from ddp_prune.gates import STRETCH_HIGH, STRETCH_LOW, GatedModel, Masks
from ddp_prune.perplexity import perplexity
from ddp_prune.recipe import Recipe
from ddp_prune.rounding import exact_support
from ddp_prune.run_state import RunState
from ddp_prune.source import Source, load_model, open_source
from ddp_prune.tokens import Blocks, load_blocks, load_tokenizer
from ddp_prune.train import train
from ddp_prune.trainer import Trainer
from ddp_vllm.checkpoint import MASKS_FILE

TEST_BLOCKS, TEST_LENGTH = 16, 512
TEMPERATURE = 2 / 3  # β of the hard concrete distribution
VARIANTS: dict[str, dict[str, Any]] = {  # learning methods -> what they change in the recipe
    "ddp": {},
    "feedback": {"controller": "feedback"},
    "ddp-layer": {"group": "layer"},
    "ddp-expert": {"group": "expert"},
    "ddp-no-polish": {"polish": 0.0},
    "ddp-no-distillation": {"distillation": 0.0},
    "paper-alm": {"controller": "alm", "polish": 0.0},
    "alm+polish": {"controller": "alm"},
}
EXPERT_SCORES: dict[str, tuple[str, Callable[[ExpertUse], torch.Tensor]]] = {  # where the budget holds, and the score
    "camera": ("layer", ExpertUse.camera),
    "heapr": ("global", ExpertUse.heapr),
    "uniform": ("expert", ExpertUse.channel_energy),
    "whole-experts": ("layer", ExpertUse.whole_experts),
}


class HardConcrete(AnnealedTrainer):
    """Stochastic gates (Eq. 8): sampled while learning, judged by the deterministic gate, of which the highest stay."""

    def __init__(self, gated: GatedModel, batches: Batches, recipe: Recipe, accelerator: Accelerator) -> None:
        super().__init__(gated, batches, recipe, accelerator)
        self.noise = torch.Generator().manual_seed(recipe.seed)
        for z in self.z.values():
            z.data.fill_(3.0)  # log α; open with probability 0.99

    def forward_masks(self) -> Masks:
        if self.polishing:
            return {kind: _stretch(torch.sigmoid(z.detach())) * self.support[kind] for kind, z in self.z.items()}
        return {kind: _stretch(torch.sigmoid((self._logistic(z) + z) / TEMPERATURE)) for kind, z in self.z.items()}

    def _logistic(self, z: torch.Tensor) -> torch.Tensor:
        return torch.rand(z.shape, generator=self.noise).clamp(1e-6, 1 - 1e-6).logit().to(z.device)

    def score(self, z: torch.Tensor, mu: float) -> torch.Tensor:
        """The probability that a gate is open (Eq. 9)."""
        return torch.sigmoid(z - TEMPERATURE * math.log(-STRETCH_LOW / STRETCH_HIGH))

    def _hold(self, progress: float, mu: float) -> None:
        """The multipliers alone hold the budget, and log α has no floor."""

    def round(self) -> None:
        for kind, z in self.z.items():
            self.searched_z[kind] = z.detach().clone()
            self.support[kind] = exact_support(z.detach(), round((1.0 - self.recipe.sparsity) * z.numel()))


def _stretch(gate: torch.Tensor) -> torch.Tensor:
    return (gate * (STRETCH_HIGH - STRETCH_LOW) + STRETCH_LOW).clamp(0.0, 1.0)


def main() -> None:
    parser = make_parser(__doc__, steps=250)
    parser.add_argument("--samples", type=int, default=64, help="Blocks that one-shot scores are calibrated on.")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--head-unit", default="auto", help="auto, kv-group or query-head")
    parser.add_argument("--methods", default="magnitude,taylor,fisher,fisher+scales,ddp")
    parser.add_argument("--set", action="append", default=[], help="name=value of the recipe, for learning methods")
    parser.add_argument("--save", type=Path, help="Folder for masks files, which `ddp-vllm apply` takes.")
    arguments = parser.parse_args()
    source = open_source(arguments.model)
    tokenizer = load_tokenizer(arguments.model)
    head_unit = choose_head_unit(arguments.head_unit, source.sizes)
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    gated = GatedModel(load_model(source, "auto", accelerator.device), source.family, source.sizes, head_unit)
    test = read_test_blocks(arguments.test, tokenizer, detokenise=arguments.detokenise)
    rows: dict[str, list[dict[str, float]]] = {}
    dense = perplexity(gated, None, test)
    print(f"dense {dense:.2f}", flush=True)
    settings = {name: json.loads(value) for name, _, value in (item.partition("=") for item in arguments.set)}
    known = {*VARIANTS, "random", "magnitude", "taylor", "fisher", "fisher+scales", "hard-concrete", *EXPERT_SCORES}
    if unknown := {method for method in arguments.methods.split(",") if not method.endswith(MASKS_FILE)} - known:
        parser.error(f"unknown method {min(unknown)}; known: {', '.join(sorted(known))}")
    if "experts" not in gated.shapes and {*EXPERT_SCORES, "ddp-expert"} & set(arguments.methods.split(",")):
        parser.error(f"{', '.join(EXPERT_SCORES)} and ddp-expert are for mixtures of experts")
    for seed in range(arguments.seeds):
        recipe, blocks = prepare_run(arguments, tokenizer, seed, **settings)
        for method in arguments.methods.split(","):
            began, cpu = time.perf_counter(), time.process_time()
            gates, extra = run(method, gated, recipe, blocks.train, arguments.samples, accelerator)
            row = {"perplexity": perplexity(gated, gates, test), "seconds": time.perf_counter() - began}
            row["cpu_seconds"] = time.process_time() - cpu
            row["heldout"] = perplexity(gated, gates, blocks.heldout)
            row |= extra | what_is_left(gates, gated, source)
            rows.setdefault(method, []).append(row)
            print(f"seed {seed} {method:20s} {json.dumps(row)}", flush=True)
            if arguments.save and not method.endswith(MASKS_FILE):
                folder = arguments.save / f"{method}-{arguments.sparsity}-{seed}"
                folder.mkdir(parents=True, exist_ok=True)
                made_by = {"model": arguments.model, "method": method, "seed": seed}
                write_masks(gates, folder / MASKS_FILE, head_unit=head_unit, provenance=made_by)
    print(json.dumps(report(arguments, dense, rows)))


def what_is_left(gates: Masks, gated: GatedModel, source: Source) -> dict[str, float]:
    """Return which shares of the prunable parameters and of the KV cache a token the gates leave."""
    if "experts" in gates:  # all of them cost the same, and there is no KV cache to prune
        return {"params left": float((gates["experts"] > 0).float().mean())}
    names = [name for name, _ in gated.model.named_parameters()]
    kept, dense = layer_widths(gates, source, gated.head_unit), dense_layers(source.config)
    found = {}
    for budget in ("params", "kv-bytes"):
        layers = list(zip(prices(budget, source.config, names, 0), kept, dense, strict=True))
        found[f"{budget} left"] = sum(p.of(k) for p, k, _ in layers) / sum(p.of(d) for p, _, d in layers)
    return found


def make_parser(description: str | None, *, steps: int) -> argparse.ArgumentParser:
    """Return the options of a script that learns masks and judges them on a test text."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--data", required=True)
    parser.add_argument("--test", required=True, type=Path)
    parser.add_argument("--detokenise", action="store_true", help="Undo WikiText's spacing, as lm-eval does.")
    parser.add_argument("--sparsity", type=float, default=0.2)
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--seq-len", type=int, default=256)
    return parser


def prepare_run(arguments: argparse.Namespace, tokenizer: Any, seed: int, **settings: Any) -> tuple[Recipe, Blocks]:
    """Return the recipe of one run, and the blocks it learns on."""
    recipe = Recipe(
        model=arguments.model, sparsity=arguments.sparsity, data=arguments.data, steps=arguments.steps,
        batch_size=arguments.batch_size, seq_len=arguments.seq_len, seed=seed, **settings,
    )  # fmt: skip
    blocks = load_blocks(
        recipe.data, tokenizer, seq_len=recipe.seq_len, train_blocks=recipe.steps * recipe.batch_size,
        heldout_blocks=recipe.heldout_blocks, min_train_blocks=recipe.batch_size, seed=recipe.seed,
    )  # fmt: skip
    return recipe, blocks


def read_test_blocks(path: Path, tokenizer: Any, *, detokenise: bool) -> torch.Tensor:
    """Return the first tokens of a text, int64 [TEST_BLOCKS, TEST_LENGTH]."""
    text = path.read_text(encoding="utf-8")
    if detokenise:
        from lm_eval.tasks.wikitext.preprocess_wikitext import wikitext_detokenizer

        text = wikitext_detokenizer({"page": text})
    ids = tokenizer(text, verbose=False)["input_ids"]
    return torch.tensor(ids[: TEST_BLOCKS * TEST_LENGTH]).view(TEST_BLOCKS, TEST_LENGTH)


def run(
    method: str,
    gated: GatedModel,
    recipe: Recipe,
    train_blocks: torch.Tensor,
    samples: int,
    accelerator: Accelerator,
) -> tuple[Masks, dict[str, float]]:
    """Return the gates a method ends with, and what is worth saying of them."""
    kept = {kind: round((1.0 - recipe.sparsity) * math.prod(shape)) for kind, shape in gated.shapes.items()}
    if method.endswith(MASKS_FILE):
        return read_masks(Path(method))[0], {}
    if method in VARIANTS:
        recipe = dataclasses.replace(recipe, **VARIANTS[method])
        with tempfile.TemporaryDirectory() as folder:
            state = RunState(Path(folder) / method, recipe)
            learned = train(gated, train_blocks, recipe, accelerator, state, _progress(recipe))
        raw = {f"raw_{kind}": change["raw_sparsity"] for kind, change in learned.rounding.items()}
        return learned.gates, raw
    if method in EXPERT_SCORES:
        group, score = EXPERT_SCORES[method]
        worth = score(_measure_once(gated, train_blocks, samples))
        return {"experts": even_support(worth, kept["experts"], group).float().cpu()}, {}
    if method == "hard-concrete":
        recipe = dataclasses.replace(recipe, controller="alm", polish=0.0, learning_rate=3 * recipe.learning_rate)
        return _learn(HardConcrete, gated, recipe, train_blocks, accelerator), {}
    if method == "magnitude":
        scores = magnitude(gated)
    elif method == "random":
        generator = torch.Generator().manual_seed(recipe.seed)
        scores = {kind: torch.rand(shape, generator=generator) for kind, shape in gated.shapes.items()}
    else:
        first, second = taylor_and_fisher(gated, train_blocks[:samples].split(1))
        scores = first if method == "taylor" else second
    supports = {kind: exact_support(score, kept[kind]) for kind, score in scores.items()}
    if method == "fisher+scales":
        supports = {kind: support.to(accelerator.device) for kind, support in supports.items()}
        recipe = dataclasses.replace(recipe, polish=0.999)
        return _learn(Trainer, gated, recipe, train_blocks, accelerator, supports), {}
    return {kind: support.float().cpu() for kind, support in supports.items()}, {}


def _learn(
    kind: type[Trainer],
    gated: GatedModel,
    recipe: Recipe,
    train_blocks: torch.Tensor,
    accelerator: Accelerator,
    support: Masks | None = None,
) -> Masks:
    """Return the gates that a trainer ends with; a given support stays."""
    trainer = kind(gated, Batches(train_blocks, recipe, accelerator), recipe, accelerator)
    trainer.support |= support or {}
    for step in range(recipe.steps):
        _progress(recipe)(trainer.step(step))
    return trainer.learned().gates


@functools.lru_cache(maxsize=1)
def _measure_once(gated: GatedModel, train_blocks: torch.Tensor, samples: int) -> ExpertUse:
    """Return the statistics that four methods share."""
    return measure_experts(gated, train_blocks[:samples].split(1))


def even_support(worth_LEC: torch.Tensor, kept: int, group: str) -> torch.Tensor:
    """Return the bool mask of the `kept` channels of highest worth, evenly spread over layers or experts."""
    rows = {"global": worth_LEC.reshape(1, -1), "layer": worth_LEC.flatten(1), "expert": worth_LEC.flatten(0, 1)}[group]
    counts = [kept // len(rows) + (index < kept % len(rows)) for index in range(len(rows))]
    chosen = [exact_support(row, count) for row, count in zip(rows, counts, strict=True)]
    return torch.stack(chosen).view_as(worth_LEC)


def _progress(recipe: Recipe) -> Any:
    def report_step(metrics: dict[str, float]) -> None:
        step = int(metrics["step"])
        if step % max(1, recipe.steps // 10) == 0:
            text = " ".join(f"{name} {value:.4g}" for name, value in metrics.items())
            print(f"  {text}", file=sys.stderr, flush=True)

    return report_step


def report(arguments: argparse.Namespace, dense: float, rows: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Return the machine-readable result."""
    summary = {
        method: {
            "median": statistics.median(row["perplexity"] for row in results),
            "all": [round(row["perplexity"], 2) for row in results],
        }
        for method, results in rows.items()
    }
    return {
        "question": __doc__.split("\n")[0] if __doc__ else "",
        "settings": {name: str(value) for name, value in vars(arguments).items()},
        "machine": {
            "cpu": platform.processor() or platform.machine(),
            "threads": torch.get_num_threads(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        },
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "dense": dense,
        "perplexity": summary,
        "runs": rows,
    }


if __name__ == "__main__":
    main()
