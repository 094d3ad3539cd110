"""Computes the cells of a study in `DIR/cells`; finished cells are kept, so an interruption loses
one.

A cell is a row at a sparsity with a seed. `NAME.json` has its results or the reason why there are
none, and `NAME.safetensors` its masks, for `ddp-vllm apply`.
"""

import dataclasses
import hashlib
import itertools
import json
import math
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

from ddp_prune.core.gates import GatedModel, Masks
from ddp_prune.core.learn import Trainer, learn
from ddp_prune.core.loop import Training
from ddp_prune.core.loss import perplexity_of
from ddp_prune.core.schedule import Unsaved
from ddp_prune.core.weights import TrainedWeights
from ddp_prune.devices import free_memory, make_accelerator
from ddp_prune.export import layer_widths, read_masks, write_masks
from ddp_prune.fit import TRAINING_SHARE, Mode, held_bytes
from ddp_prune.models.evaluation import losses_of
from ddp_prune.models.loading import load, load_teacher
from ddp_prune.models.source import Source, open_source
from ddp_prune.pools import head_unit_of, make_checked_pools
from ddp_prune.recipe import Recipe
from ddp_prune.run import Run
from ddp_prune.run_folder import inputs_of
from ddp_prune.text.blocks import Blocks, check_vocabulary, load_blocks, select_loss_mask
from ddp_prune.text.tokens import load_tokenizer
from ddp_vllm.costs import prices
from ddp_vllm.dimensions import MIXTURES
from ddp_vllm.errors import Printer, SettingError
from ddp_vllm.families import FAMILIES
from ddp_vllm.output import locked, make_folder, write_text
from findings import CELLS, STUDY_FILE
from memory import peak_bytes, reset_peak
from rows import MASKS, Row, Study, read_test_blocks
from scores import Score, Search, choose, unfit

DENSE = "dense"
OPTIMIZER = "adamw"  # of trained weights
# share of the units by which a file's masks, such as the paper's, may deviate from a sparsity
TOLERANCE = 0.01
LONGEST_NAME = 80  # characters
TOGETHER = ("seconds", "cpu_seconds", "tokens")  # added over a second run and the row it continues
Facts = dict[str, Any]


def run_study(study: Study, output: Path, print_line: Printer) -> None:
    """Compute the missing cells of a study.

    Raises: SettingError if the folder has cells of another model, text or recipe, or the model does
        not support a sparsity; TextError if a text is too short; and as training does.
    """
    source, tokenizer = open_source(study.recipe.model), load_tokenizer(study.recipe.model)
    if source.config["model_type"] not in {*FAMILIES, *MIXTURES}:
        raise SettingError(
            f"study compares methods on the families of `{', '.join((*FAMILIES, *MIXTURES))}`, not of "
            f"{source.config['model_type']}; choose another model"
        )
    shapes = source.shapes
    for sparsity in study.sparsities:
        make_checked_pools(dataclasses.replace(study.recipe, sparsity=sparsity, scope="global"), source, shapes)
    test = read_test_blocks(study.test, tokenizer, detokenize=study.detokenize, length=study.test_length)
    blocks = _read(study.recipe, tokenizer)
    first = study.sparsities[0], study.seeds[0]
    others = [_read(study.recipe_of(row, *first), tokenizer) for row in study.rows if "data" in row.changes]
    for part in (blocks, dataclasses.replace(blocks, heldout=test), *others):
        check_vocabulary(part, source.config["vocab_size"], study.recipe.model)
    make_folder(output / CELLS)
    with locked(output / ".lock", f"another process uses {output}; wait for it, or choose another folder"):
        texts = {"heldout": blocks.heldout, "test": test}
        facts = inputs_of(texts, [source.folder])
        _record(study, facts, output)
        cells = Cells(study, output, source, tokenizer, test, make_accelerator(output, None))
        cells.dense(blocks)
        for seed, row in itertools.product(study.seeds, study.rows):
            for line in cells.fill(row, seed):
                print_line(line)


def _read(recipe: Recipe, tokenizer: Any) -> Blocks:
    return load_blocks(
        recipe.data, tokenizer, seq_len=recipe.seq_len, train_blocks=recipe.steps * recipe.batch_size,
        heldout_blocks=recipe.heldout_blocks, min_train_blocks=recipe.batch_size, seed=recipe.seed,
        text_column=recipe.text_column,
    )  # fmt: skip


def _record(study: Study, facts: Mapping[str, Any], output: Path) -> None:
    """Record settings and rows of the study, or refuse a folder of another study.
    Raises: SettingError."""
    path, settings = output / STUDY_FILE, json.loads(json.dumps(study.shared() | {"text and weights": facts}))
    saved = json.loads(path.read_text(encoding="utf-8")) if path.exists() else settings
    if other := [name for name in settings if saved.get(name) != settings[name]]:
        raise SettingError(f"{output} has a study with another {', '.join(other)}; choose another folder")
    tables: dict[str, list[str]] = saved.setdefault("tables", {})
    names = [*tables.get(study.table, []), *(row.name for row in study.rows)]
    tables[study.table] = list(dict.fromkeys(names))
    write_text(json.dumps(saved, indent=1), path)


@dataclass(frozen=True, eq=False)
class Cells:
    """Computes the cells of one folder."""

    study: Study
    output: Path
    source: Source
    tokenizer: Any
    test: torch.Tensor
    accelerator: Accelerator

    @cached_property
    def gated(self) -> GatedModel:
        """The dense model with gates, loaded for the first cell that is missing."""
        head_unit = head_unit_of(self.study.recipe, self.source)
        model = load(self.source, self.study.recipe, self.accelerator)
        return GatedModel(model, self.source.widths, self.source.sizes, head_unit)

    def cell(self, name: str, *parts: object) -> Path:
        """Return the file of a cell; a hash replaces names of rows that are long or contain a
        path."""
        if "/" in name or name.endswith(MASKS) or len(name) > LONGEST_NAME:
            name = f"row-{hashlib.sha256(name.encode()).hexdigest()[:12]}"
        return self.output / CELLS / ("_".join(map(str, (name, *parts))) + ".json")

    def of(self, row: str, sparsity: float, seed: int) -> Path:
        """Return the file of a row's cell."""
        return self.cell(row, f"{sparsity:g}", seed)

    def dense(self, blocks: Blocks) -> None:
        """Evaluate the dense model."""
        if not (path := self.cell(DENSE)).exists():
            write_text(json.dumps({"method": DENSE, **self.evaluate(None, blocks.heldout)}), path)

    def fill(self, row: Row, seed: int) -> Iterator[str]:
        """Compute a row's cells of one seed and yield one line per cell; a score is computed once
        for all of them."""
        scores: Masks = {}
        for sparsity in self.study.sparsities:
            path, name = self.of(row.name, sparsity, seed), f"{row.name} at {100 * sparsity:g} %, seed {seed}"
            if path.exists():
                yield f"{name}: measured before"
                continue
            gated, reason = self.gated, ""  # loaded before the time is measured
            try:
                recipe = self.study.recipe_of(row, sparsity, seed)
            except SettingError as error:  # the row's changes contradict the study's recipe
                recipe, reason = self.study.recipe, str(error)
            heldout = _read(dataclasses.replace(self.study.recipe, seed=seed), self.tokenizer).heldout
            set_seed(seed)
            reset_peak(self.accelerator.device)
            began, cpu = time.perf_counter(), time.process_time()
            masks, facts = ({}, {"reason": reason}) if reason else self.masks(row, recipe, scores)
            facts |= {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - cpu}
            if masks:
                facts["peak_bytes"] = peak_bytes(self.accelerator.device)
                made_by = {"model": recipe.model, "method": row.name, "sparsity": sparsity, "seed": seed}
                made_by |= {name: facts.pop(name) for name in ("routing",) if name in facts}
                write_masks(masks, path.with_suffix(MASKS), head_unit=gated.head_unit, provenance=made_by)
                facts |= self.evaluate(masks, heldout) | kept_shares(masks, gated, self.source)
                yield f"{name}: perplexity {facts['perplexity']:.2f}"
            else:
                facts = {"reason": facts["reason"]}
                yield f"{name}: {facts['reason']}"
            if recipe.train == "weights":
                self.__dict__.pop("gated", None)  # its weights were trained
            if row.first:
                first = json.loads(self.of(row.first, sparsity, seed).read_text(encoding="utf-8"))
                facts |= {key: facts[key] + first[key] for key in TOGETHER if key in facts and key in first}
            facts |= {"source": row.method.source if row.method else row.first or row.name}
            facts["is_search"] = not isinstance(row.method, Score)
            write_text(json.dumps({"method": row.name, "sparsity": sparsity, "seed": seed, **facts}), path)

    def evaluate(self, masks: Masks | None, heldout: torch.Tensor) -> dict[str, float]:
        """Return the perplexity with these gates on the test text and the held-out text."""
        texts = {"perplexity": self.test, "heldout": heldout}
        device = self.accelerator.device
        with self.gated.masks(masks and {kind: mask.to(device) for kind, mask in masks.items()}):
            return {name: perplexity_of(losses_of(self.gated.model, text)[0]) for name, text in texts.items()}

    def masks(self, row: Row, recipe: Recipe, scores: Masks) -> tuple[Masks, Facts]:
        """Return the gates of a row and their metrics, or {} and the `reason` why there are none.

        scores: empty for the first sparsity, then the scores, which all sparsities share.
        """
        if row.name.endswith(MASKS):
            return self.read(Path(row.name), recipe.sparsity)
        if reason := self.unfit(row, recipe):
            return {}, {"reason": reason}
        text = _read(recipe, self.tokenizer)
        if not isinstance(row.method, Score):
            return self.train(row, recipe, text)
        blocks = text.train[: self.study.samples]
        if not scores:
            scores |= row.method.score(self.gated, blocks)
        scope = recipe.scope if "scope" in row.changes else row.method.scope
        ratio, only_whole = 1.0 - recipe.sparsity, recipe.whole_experts
        chosen = choose(scores, ratio, scope, whole_experts=only_whole, seed=recipe.seed)
        return chosen, {"tokens": blocks.numel(), "learns": 0}

    def read(self, path: Path, sparsity: float) -> tuple[Masks, Facts]:
        """Return the gates of a file, or {} and the reason why the file does not fit the cell."""
        masks = read_masks(path)[0]
        if {kind: tuple(mask.shape) for kind, mask in masks.items()} != self.gated.shapes:
            return {}, {"reason": "masks of another model"}
        return _of_sparsity(masks, sparsity, {})

    def unfit(self, row: Row, recipe: Recipe) -> str:
        """Return why a row cannot be computed for this model; empty if it can."""
        if row.first:
            first = json.loads(self.of(row.first, recipe.sparsity, recipe.seed).read_text(encoding="utf-8"))
            if "reason" in first:
                return str(first["reason"])
        if row.method and (reason := unfit(row.method, self.source.sizes)):
            return reason
        shapes = self.source.shapes
        try:
            make_checked_pools(recipe, self.source, shapes)
        except SettingError as error:
            return str(error)
        if recipe.train != "weights":
            return ""
        model: Any = self.gated.model
        needed = held_bytes(recipe, self.source, Mode("weights", OPTIMIZER), model.dtype.itemsize, 1)
        enough = needed <= TRAINING_SHARE * free_memory(self.accelerator)
        return "" if enough else "not enough memory for trained weights and the dense model"

    def train(self, row: Row, recipe: Recipe, text: Blocks) -> tuple[Masks, Facts]:
        """Return the final gates of a search or a second run."""
        start = Masks()
        if row.first:
            start = read_masks(self.of(row.first, recipe.sparsity, recipe.seed).with_suffix(MASKS))[0]

        def second_run(*arguments: Any) -> Trainer:
            trainer = Trainer(*arguments)
            for kind, gates in start.items():
                gates = gates.to(self.accelerator.device)
                trainer.gates.support[kind], trainer.gates.z[kind] = gates > 0, torch.where(gates > 0, gates, 1.0)
            return trainer

        make = row.method.trainer if isinstance(row.method, Search) else second_run
        training = None
        resolved_run = Run.alone(recipe, train=recipe.train, optimizer=OPTIMIZER if recipe.train == "weights" else "")
        if recipe.train == "weights":
            weights = TrainedWeights(self.gated.model, self.accelerator, optimizer=OPTIMIZER)
            teacher = load_teacher(self.source, recipe, self.accelerator, self.gated.model)
            training = Training(weights, teacher=teacher if recipe.distillation > 0 else None)
        seconds = list[float]()
        means = self.accelerator, Unsaved(), lambda metrics: seconds.append(metrics["seconds"]), training
        loss_mask = select_loss_mask(text, recipe.learn_from, recipe.data, lambda _line: None)
        pools = make_checked_pools(recipe, self.source, self.source.shapes)
        learned = learn(self.gated, text.train, resolved_run.schedule, pools, *means, make=make, loss_mask=loss_mask)
        if training:
            training.weights.finish()
        numbers = [*learned.gates.values(), *(training.weights.trained.values() if training else ())]
        result: Facts = {"tokens": recipe.steps * recipe.batch_size * recipe.seq_len}
        result |= {
            "learns": sum(map(torch.numel, numbers)),
            "step_seconds": statistics.median(seconds),
            **learned.routing(self.source.sizes.routed_layers),
        }
        return _of_sparsity(learned.gates, recipe.sparsity, result)


def _of_sparsity(masks: Masks, sparsity: float, facts: Facts) -> tuple[Masks, Facts]:
    """Return gates and their metrics, or {} and the reason if they have another sparsity."""
    counts = [(int((mask > 0).sum()), mask.numel()) for mask in masks.values()]
    if any(abs(kept - round((1.0 - sparsity) * units)) > TOLERANCE * units for kept, units in counts):
        return {}, {"reason": f"removes {' and '.join(f'{1 - kept / units:.0%}' for kept, units in counts)}"}
    return masks, facts


def kept_shares(gates: Masks, gated: GatedModel, source: Source) -> dict[str, float]:
    """Return the kept shares of the prunable parameters and of the KV cache per token."""
    if "experts" in gates:  # all channels cost the same, and there is no KV cache to prune
        return {"params left": float((gates["experts"] > 0).float().mean())}
    kept, dense = layer_widths(gates, source.sizes, source.widths), source.widths.dense_layers
    shares = {}
    for budget in ("params", "kv-bytes"):
        layers = list(zip(prices(budget, source.config, source.shapes, 0), kept, dense, strict=True))
        all_units = math.fsum(p.of(d) for p, _, d in layers)
        shares[f"{budget} left"] = math.fsum(p.of(k) for p, k, _ in layers) / all_units
    return shares
