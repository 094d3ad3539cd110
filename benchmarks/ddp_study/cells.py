"""The cells of a study, in `DIR/cells`: what is finished is kept, so an interruption loses one.

A cell is a row at a sparsity with a seed: `NAME.json` says what it came to or why it cannot be, `NAME.safetensors` are
its masks, which `ddp-vllm apply` takes.
"""

import dataclasses
import hashlib
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

from ddp_prune.devices import LEARNING_BYTES, fits_learning, forget_peak, load, make_accelerator, peak_bytes
from ddp_prune.export import layer_widths, read_masks, write_masks
from ddp_prune.gates import GatedModel, Masks
from ddp_prune.loss import perplexity
from ddp_prune.model import Source, companions, open_source, weight_files, weight_shapes
from ddp_prune.pipeline import routing, suited_pools
from ddp_prune.recipe import Recipe
from ddp_prune.run import Run
from ddp_prune.run_state import RunState, fingerprint
from ddp_prune.text import Blocks, check_vocabulary, counting, load_blocks, load_tokenizer
from ddp_prune.train import train
from ddp_prune.trainer import Trainer
from ddp_prune.weights import LearningWeights
from ddp_study.page import CELLS, STUDY_FILE
from ddp_study.scores import Score, Search, choose, unfit
from ddp_study.study import MASKS, Row, Study, read_test_blocks
from ddp_vllm.costs import prices
from ddp_vllm.errors import SettingError
from ddp_vllm.families import dense_layers
from ddp_vllm.output import locked, make_folder, write_text

DENSE = "dense"
LABEL = 0.01  # of the units by which masks may miss a sparsity, as the paper's do
LONGEST_NAME = 80  # characters
TOGETHER = ("seconds", "cpu_seconds", "tokens")  # of a second run and of what it goes on from
Facts = dict[str, Any]


def run_study(study: Study, output: Path, say: Callable[[str], None]) -> None:
    """Fill the cells of a study that are not there yet.

    Raises: SettingError if the folder holds cells of another model, text or recipe, or a sparsity does not suit the
        model; TextError if text is too short; and as training does.
    """
    source, tokenizer = open_source(study.recipe.model), load_tokenizer(study.recipe.model)
    shapes = weight_shapes(source)
    for sparsity in study.sparsities:
        suited_pools(dataclasses.replace(study.recipe, sparsity=sparsity, scope="global"), source, shapes)
    test = read_test_blocks(study.test, tokenizer, detokenise=study.detokenise, length=study.test_length)
    blocks = _read(study.recipe, tokenizer)
    first = study.sparsities[0], study.seeds[0]
    texts = [_read(study.recipe_of(row, *first), tokenizer) for row in study.rows if "data" in row.changes]
    for part in (blocks, dataclasses.replace(blocks, heldout=test), *texts):
        check_vocabulary(part, source.config["vocab_size"], study.recipe.model)
    make_folder(output / CELLS)
    with locked(output / ".lock", f"another process works on {output}; wait for it, or choose another folder"):
        facts = fingerprint([blocks.heldout, test], weight_files(source.folder), companions(source.folder))
        _note(study, facts, output)
        cells = Cells(study, output, source, tokenizer, test, make_accelerator(output, None))
        cells.dense(blocks)
        for seed, row in itertools.product(study.seeds, study.rows):
            for line in cells.fill(row, seed):
                say(line)


def _read(recipe: Recipe, tokenizer: Any) -> Blocks:
    return load_blocks(
        recipe.data, tokenizer, seq_len=recipe.seq_len, train_blocks=recipe.steps * recipe.batch_size,
        heldout_blocks=recipe.heldout_blocks, min_train_blocks=recipe.batch_size, seed=recipe.seed,
        text_column=recipe.text_column,
    )  # fmt: skip


def _note(study: Study, facts: Mapping[str, Any], output: Path) -> None:
    """Note whose a folder is and which rows its tables have, or refuse that of another study. Raises: SettingError."""
    path, asked = output / STUDY_FILE, json.loads(json.dumps(study.shared() | {"text and weights": facts}))
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else asked
    if other := [name for name in asked if found.get(name) != asked[name]]:
        raise SettingError(f"{output} holds a study with another {', '.join(other)}; choose another folder")
    tables: dict[str, list[str]] = found.setdefault("tables", {})
    names = [*tables.get(study.table, []), *(row.name for row in study.rows)]
    tables[study.table] = list(dict.fromkeys(names))
    write_text(json.dumps(found, indent=1), path)


@dataclass(frozen=True, eq=False)
class Cells:
    """The cells of one folder, and what fills them."""

    study: Study
    output: Path
    source: Source
    tokenizer: Any
    test: torch.Tensor
    accelerator: Accelerator

    @cached_property
    def gated(self) -> GatedModel:
        """The dense model with gates, loaded when a cell needs it."""
        head_unit, _ = suited_pools(self.study.recipe, self.source, weight_shapes(self.source))
        model = load(self.source, self.study.recipe, self.accelerator)
        return GatedModel(model, self.source.family, self.source.sizes, head_unit)

    def cell(self, name: str, *parts: object) -> Path:
        """Return the file of a cell; a row with a path in its name, or a long one, is called by the name's hash."""
        if "/" in name or name.endswith(MASKS) or len(name) > LONGEST_NAME:
            name = f"row-{hashlib.sha256(name.encode()).hexdigest()[:12]}"
        return self.output / CELLS / ("_".join(map(str, (name, *parts))) + ".json")

    def of(self, row: str, sparsity: float, seed: int) -> Path:
        """Return the file of a row's cell."""
        return self.cell(row, f"{sparsity:g}", seed)

    def write(self, path: Path, content: Mapping[str, Any]) -> None:
        write_text(json.dumps(content), path)

    def dense(self, blocks: Blocks) -> None:
        """Judge the dense model."""
        if not (path := self.cell(DENSE)).exists():
            self.write(path, {"method": DENSE, **self.judged(None, blocks.heldout)})

    def fill(self, row: Row, seed: int) -> Iterator[str]:
        """Fill the cells of a row with one seed, and yield a line each; a score is computed once for them."""
        scores: Masks = {}
        for sparsity in self.study.sparsities:
            path, name = self.of(row.name, sparsity, seed), f"{row.name} at {100 * sparsity:g} %, seed {seed}"
            if path.exists():
                yield f"{name}: measured before"
                continue
            gated, reason = self.gated, ""  # loaded before the clock runs
            try:
                recipe = self.study.recipe_of(row, sparsity, seed)
            except SettingError as error:  # what a row changes does not suit the study's recipe
                recipe, reason = self.study.recipe, str(error)
            heldout = _read(dataclasses.replace(self.study.recipe, seed=seed), self.tokenizer).heldout
            set_seed(seed)
            forget_peak(self.accelerator.device)
            began, cpu = time.perf_counter(), time.process_time()
            masks, found = ({}, {"reason": reason}) if reason else self.masks(row, recipe, scores)
            found |= {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - cpu}
            if masks:
                found["peak_bytes"] = peak_bytes(self.accelerator.device)
                made_by = {"model": recipe.model, "method": row.name, "sparsity": sparsity, "seed": seed}
                made_by |= {name: found.pop(name) for name in ("routing",) if name in found}
                write_masks(masks, path.with_suffix(MASKS), head_unit=gated.head_unit, provenance=made_by)
                found |= self.judged(masks, heldout) | what_is_left(masks, gated, self.source)
                yield f"{name}: perplexity {found['perplexity']:.2f}"
            else:
                found = {"reason": found["reason"]}
                yield f"{name}: {found['reason']}"
            if recipe.train == "weights":
                self.__dict__.pop("gated", None)  # its weights have learned
            if row.before:
                before = json.loads(self.of(row.before, sparsity, seed).read_text(encoding="utf-8"))
                found |= {each: found[each] + before[each] for each in TOGETHER if each in found and each in before}
            found |= {"source": row.method.source if row.method else row.before or row.name}
            found["is_search"] = not isinstance(row.method, Score)
            found["command"] = self.study.command(row, sparsity, seed, self.output)
            self.write(path, {"method": row.name, "sparsity": sparsity, "seed": seed, **found})

    def judged(self, masks: Masks | None, heldout: torch.Tensor) -> dict[str, float]:
        """Return the perplexity of gates on both texts."""
        texts = {"perplexity": self.test, "heldout": heldout}
        return {name: perplexity(self.gated, masks, text) for name, text in texts.items()}

    def masks(self, row: Row, recipe: Recipe, scores: Masks) -> tuple[Masks, Facts]:
        """Return the gates of a row and what is known of their making, or {} and the `reason` why there are none.

        `scores` are filled once.
        """
        if row.name.endswith(MASKS):
            return self.read(Path(row.name), recipe.sparsity)
        if reason := self.unfit(row, recipe):
            return {}, {"reason": reason}
        text = _read(recipe, self.tokenizer)
        if not isinstance(row.method, Score):
            return self.learn(row, recipe, text)
        read = text.train[: self.study.samples]
        if not scores:
            scores |= row.method.score(self.gated, read)
        scope = recipe.scope if "scope" in row.changes else row.method.scope
        ratio, whole = 1.0 - recipe.sparsity, recipe.whole_experts
        chosen = choose(scores, ratio, scope, whole_experts=whole, seed=recipe.seed)
        return chosen, {"tokens": read.numel(), "learns": 0}

    def read(self, path: Path, sparsity: float) -> tuple[Masks, Facts]:
        """Return the gates of a file as they are, or {} and the reason why they do not belong there."""
        masks = read_masks(path)[0]
        if {kind: tuple(each.shape) for kind, each in masks.items()} != self.gated.shapes:
            return {}, {"reason": "masks of another model"}
        return _labelled(masks, sparsity, {})

    def unfit(self, row: Row, recipe: Recipe) -> str:
        """Say why a row cannot be had of this model; empty if it can."""
        if row.before:
            before = json.loads(self.of(row.before, recipe.sparsity, recipe.seed).read_text(encoding="utf-8"))
            if "reason" in before:
                return str(before["reason"])
        if row.method and (reason := unfit(row.method, self.source.sizes)):
            return reason
        shapes = weight_shapes(self.source)
        try:
            suited_pools(recipe, self.source, shapes)
        except SettingError as error:
            return str(error)
        num_weights = sum(math.prod(shape) for shape in shapes.values())
        fits = recipe.train != "weights" or fits_learning(num_weights, self.accelerator, LEARNING_BYTES + 2)
        return "" if fits else "memory does not hold weights that learn and a second model to learn from"

    def learn(self, row: Row, recipe: Recipe, text: Blocks) -> tuple[Masks, Facts]:
        """Return the gates that a search or a second run ends with; interrupted, the same call goes on."""
        path, start = self.of(row.name, recipe.sparsity, recipe.seed), Masks()
        if row.before:
            start = read_masks(self.of(row.before, recipe.sparsity, recipe.seed).with_suffix(MASKS))[0]

        def go_on(*arguments: Any) -> Trainer:
            trainer = Trainer(*arguments)
            for kind, gates in start.items():
                gates = gates.to(self.accelerator.device)
                trainer.gates.support[kind], trainer.gates.z[kind] = gates > 0, torch.where(gates > 0, gates, 1.0)
            return trainer

        make = row.method.trainer if isinstance(row.method, Search) else go_on
        files = weight_files(self.source.folder), companions(self.source.folder)
        facts = fingerprint([text.train], *files, profile=recipe.profile if recipe.budget == "latency" else "")
        asked, weights, teacher = Run.alone(recipe, train=recipe.train), None, None
        run = RunState(path.with_suffix(""), recipe, resolved=asked.to_dict(), learned_from=facts)
        with run.locked():
            if recipe.train == "weights":
                teacher = load(self.source, recipe, self.accelerator) if recipe.distillation > 0 else None
                weights = LearningWeights(self.gated.model, self.accelerator)
            means = self.accelerator, run, lambda _metrics: None, weights, teacher
            scored = counting(text, recipe.learn_from, recipe.data, lambda _line: None)
            _, pools = suited_pools(recipe, self.source, weight_shapes(self.source))
            learned = train(self.gated, text.train, asked, pools, *means, make=make, scored=scored)
            took = [json.loads(line)["seconds"] for line in run.metrics.read_text(encoding="utf-8").splitlines()]
            if weights:
                weights.finish()
            run.remove()
        numbers = [*learned.gates.values(), *(weights.learning.values() if weights else ())]
        found: Facts = {"tokens": recipe.steps * recipe.batch_size * recipe.seq_len}
        found |= {
            "learns": sum(map(torch.numel, numbers)),
            "step_seconds": statistics.median(took),
            **routing(learned, self.source.sizes.routed_layers),
        }
        return _labelled(learned.gates, recipe.sparsity, found)


def _labelled(masks: Masks, sparsity: float, found: Facts) -> tuple[Masks, Facts]:
    """Return gates and what is known of them, or {} and the reason where they are not of this sparsity."""
    counts = [(int((each > 0).sum()), each.numel()) for each in masks.values()]
    if any(abs(kept - round((1.0 - sparsity) * units)) > LABEL * units for kept, units in counts):
        return {}, {"reason": f"removes {' and '.join(f'{1 - kept / units:.0%}' for kept, units in counts)}"}
    return masks, found


def what_is_left(gates: Masks, gated: GatedModel, source: Source) -> dict[str, float]:
    """Return which shares of the prunable parameters and of the KV cache a token the gates leave."""
    if "experts" in gates:  # all of them cost the same, and there is no KV cache to prune
        return {"params left": float((gates["experts"] > 0).float().mean())}
    names = [name for name, _ in gated.model.named_parameters()]
    kept, dense = layer_widths(gates, source, gated.head_unit), dense_layers(source.config)
    found = {}
    for budget in ("params", "kv-bytes"):
        layers = list(zip(prices(budget, source.config, names, 0), kept, dense, strict=True))
        whole = math.fsum(p.of(d) for p, _, d in layers)
        found[f"{budget} left"] = math.fsum(p.of(k) for p, k, _ in layers) / whole
    return found
