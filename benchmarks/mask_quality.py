"""How good are learned masks, next to one-shot ones, at the same exact budget?

    python benchmarks/mask_quality.py MODEL --data TEXT --test WIKITEXT --sparsity 0.2 --methods magnitude,fisher,ddp

Every method prunes the same numbers of units of the same model; learning methods see the same blocks of TEXT in the
same order for the same number of steps. Perplexity is on the first 16×512 tokens of the test text, which nothing may
learn on. `fisher+scales` keeps the units Fisher keeps and learns only their scales for the whole run: the control.
`hard-concrete` learns the stochastic gates of L0 regularisation (Eq. 8 and 9) under the paper's multipliers. `depth`
drops whole layers, those of least influence first (ShortGPT).
For mixtures of experts: `camera`, `heapr`, `uniform` (every expert equally wide, channels by activation energy) and
`whole-experts` (by frequency × mean weighted output); `ddp-layer` and `ddp-expert` hold the budget in each of them.
A masks file (…/ddp_masks.safetensors) is a method too: it is judged as it is.
The last line on stdout is JSON.
"""

import dataclasses
import functools
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from baselines import ExpertUse, block_influence, magnitude, measure_experts, taylor_and_fisher
from ddp_prune.alm import STRETCH_HIGH, STRETCH_LOW, AlmTrainer
from ddp_prune.export import layer_widths, read_masks, write_masks
from ddp_prune.gates import GatedModel, Masks
from ddp_prune.loss import perplexity
from ddp_prune.model import Source, load_model, open_source
from ddp_prune.recipe import AlmSettings, Recipe
from ddp_prune.run_state import RunState
from ddp_prune.selection import exact_support
from ddp_prune.text import load_tokenizer
from ddp_prune.train import train
from ddp_prune.trainer import Batches, Trainer
from ddp_vllm.costs import prices
from ddp_vllm.families import dense_layers
from ddp_vllm.masks import MASKS_FILE
from study import gate, learning_parser, prepare_run, print_result, read_test_blocks, show_progress, take_steps

TEMPERATURE = 2 / 3  # β of the hard concrete distribution
VARIANTS: dict[str, dict[str, Any]] = {  # learning methods -> what they change in the recipe
    "ddp": {},
    "ddp-layer": {"scope": "layer"},
    "ddp-expert": {"scope": "expert"},
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


class HardConcrete(AlmTrainer):
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

    def bound(self) -> None:
        """Do nothing: log α has no floor."""

    def round(self) -> None:
        for kind, z in self.z.items():
            self.searched_z[kind] = z.detach().clone()
            self.support[kind] = exact_support(z.detach(), round((1.0 - self.recipe.sparsity) * z.numel()))


def _stretch(gate: torch.Tensor) -> torch.Tensor:
    return (gate * (STRETCH_HIGH - STRETCH_LOW) + STRETCH_LOW).clamp(0.0, 1.0)


def main() -> None:
    parser = learning_parser(__doc__, steps=250)
    parser.add_argument("--samples", type=int, default=64, help="Blocks that one-shot scores are calibrated on.")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--head-unit", default="auto", help="auto, kv-group or query-head")
    parser.add_argument("--methods", default="magnitude,taylor,fisher,fisher+scales,ddp")
    parser.add_argument("--set", action="append", default=[], help="[alm.]name=value of the recipe, where one learns")
    parser.add_argument("--save", type=Path, help="Folder for masks files, which `ddp-vllm apply` takes.")
    arguments = parser.parse_args()
    methods = arguments.methods.split(",")
    known = {
        *VARIANTS,
        "random",
        "magnitude",
        "depth",
        "taylor",
        "fisher",
        "fisher+scales",
        "hard-concrete",
        *EXPERT_SCORES,
    }
    if unknown := {method for method in methods if not method.endswith(MASKS_FILE)} - known:
        parser.error(f"unknown method {min(unknown)}; known: {', '.join(sorted(known))}")
    source, tokenizer = open_source(arguments.model), load_tokenizer(arguments.model)
    if not source.sizes.num_experts and {*EXPERT_SCORES, "ddp-expert"} & set(methods):
        parser.error(f"{', '.join(EXPERT_SCORES)} and ddp-expert are for mixtures of experts")
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    gated = gate(load_model(source, "auto", accelerator.device), source, arguments.head_unit)
    test = read_test_blocks(arguments, tokenizer)
    dense = perplexity(gated, None, test)
    print(f"dense {dense:.2f}", flush=True)
    runs: dict[str, list[dict[str, float]]] = {method: [] for method in methods}
    for seed in range(arguments.seeds):
        recipe, blocks = prepare_run(arguments, tokenizer, seed, **read_settings(arguments.set))
        trial = Trial(
            gated=gated, recipe=recipe, blocks=blocks.train, samples=arguments.samples, accelerator=accelerator
        )
        for method in methods:
            began, cpu = time.perf_counter(), time.process_time()
            gates, extra = run(method, trial)
            found = {"perplexity": perplexity(gated, gates, test), "seconds": time.perf_counter() - began}
            found["cpu_seconds"] = time.process_time() - cpu
            found["heldout"] = perplexity(gated, gates, blocks.heldout)
            runs[method].append(found | extra | what_is_left(gates, gated, source))
            print(f"seed {seed} {method:20s} {json.dumps(runs[method][-1])}", flush=True)
            if arguments.save and not method.endswith(MASKS_FILE):
                folder = arguments.save / f"{method}-{arguments.sparsity}-{seed}"
                folder.mkdir(parents=True, exist_ok=True)
                made_by = {"model": arguments.model, "method": method, "seed": seed}
                write_masks(gates, folder / MASKS_FILE, head_unit=gated.head_unit, provenance=made_by)
    values = {method: [round(found["perplexity"], 2) for found in results] for method, results in runs.items()}
    summary = {method: {"median": statistics.median(each), "all": each} for method, each in values.items()}
    print_result(__doc__, arguments, dense=dense, perplexity=summary, runs=runs)


def read_settings(items: list[str]) -> dict[str, Any]:
    """Read `name=value` of the recipe, and `alm.name=value` of the paper's search in it."""
    values = {name: json.loads(value) for name, _, value in (item.partition("=") for item in items)}
    alm = {name: values.pop(name) for name in list(values) if name.startswith("alm.")}
    return values | {"alm": AlmSettings(**{name.removeprefix("alm."): value for name, value in alm.items()})}


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


@dataclass(frozen=True, kw_only=True, eq=False)
class Trial:
    """What every method is given: the same model, the same text, the same budget."""

    gated: GatedModel
    recipe: Recipe
    blocks: torch.Tensor
    """Text to learn on, int64 [num_blocks, seq_len]."""
    samples: int
    """Blocks that one-shot scores are calibrated on."""
    accelerator: Accelerator

    def learn(self, kind: type[Trainer], recipe: Recipe, support: Masks | None = None) -> Masks:
        """Return the gates that a trainer ends with; a given support stays."""
        trainer = kind(self.gated, Batches(self.blocks, recipe, self.accelerator), recipe, self.accelerator)
        trainer.support |= support or {}
        take_steps(trainer, 0, recipe.steps)
        return trainer.learned().gates

    def scores(self, method: str) -> Masks:
        """Return what a one-shot method ranks the units of each module type by."""
        if method == "magnitude":
            return magnitude(self.gated)
        if method == "depth":
            return block_influence(self.gated, self.blocks[: self.samples].split(1))
        if method == "random":
            generator = torch.Generator().manual_seed(self.recipe.seed)
            return {kind: torch.rand(shape, generator=generator) for kind, shape in self.gated.shapes.items()}
        first, second = taylor_and_fisher(self.gated, self.blocks[: self.samples].split(1))
        return first if method == "taylor" else second


def run(method: str, trial: Trial) -> tuple[Masks, dict[str, float]]:
    """Return the gates a method ends with, and what is worth saying of them."""
    recipe, shapes = trial.recipe, trial.gated.shapes
    kept = {kind: round((1.0 - recipe.sparsity) * math.prod(shape)) for kind, shape in shapes.items()}
    if method.endswith(MASKS_FILE):
        return read_masks(Path(method))[0], {}
    if method in VARIANTS:
        recipe = dataclasses.replace(recipe, **VARIANTS[method])
        show = functools.partial(show_progress, num_steps=recipe.steps)
        with tempfile.TemporaryDirectory() as folder:
            state = RunState(Path(folder) / method, recipe)
            learned = train(trial.gated, trial.blocks, recipe, trial.accelerator, state, show)
        return learned.gates, {f"raw_{kind}": change["raw_sparsity"] for kind, change in learned.rounding.items()}
    if method in EXPERT_SCORES:
        scope, score = EXPERT_SCORES[method]
        support = even_support(score(_measure_once(trial)), kept["experts"], scope)
        return {"experts": support.float().cpu()}, {}
    if method == "hard-concrete":
        faster = dataclasses.replace(recipe.alm, learning_rate=3 * recipe.alm.learning_rate)
        recipe = dataclasses.replace(recipe, controller="alm", polish=0.0, alm=faster)
        return trial.learn(HardConcrete, recipe), {}
    scores = trial.scores(method)
    supports = {kind: exact_support(score, kept[kind]) for kind, score in scores.items()}
    if method == "fisher+scales":
        supports = {kind: support.to(trial.accelerator.device) for kind, support in supports.items()}
        return trial.learn(Trainer, dataclasses.replace(recipe, polish=0.999), supports), {}
    return {kind: support.float().cpu() for kind, support in supports.items()}, {}


@functools.lru_cache(maxsize=1)
def _measure_once(trial: Trial) -> ExpertUse:
    """Return the statistics that four methods share."""
    return measure_experts(trial.gated, trial.blocks[: trial.samples].split(1))


def even_support(worth_LEC: torch.Tensor, kept: int, scope: str) -> torch.Tensor:
    """Return the bool mask of the `kept` channels of highest worth, evenly spread over layers or experts."""
    parts = {"global": worth_LEC.reshape(1, -1), "layer": worth_LEC.flatten(1), "expert": worth_LEC.flatten(0, 1)}[
        scope
    ]
    counts = [kept // len(parts) + (index < kept % len(parts)) for index in range(len(parts))]
    chosen = [exact_support(part, count) for part, count in zip(parts, counts, strict=True)]
    return torch.stack(chosen).view_as(worth_LEC)


if __name__ == "__main__":
    main()
