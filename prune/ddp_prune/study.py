"""Tables of methods on a model of the user's own, cell by cell; what is finished is kept in `DIR/cells`.

A cell is a method at a sparsity with a seed: `NAME.json` says what it came to or why it cannot be, `NAME.safetensors`
are its masks, which `ddp-vllm apply` takes. All methods keep the same number of units of the same model, see the same
text in the same order, and are judged on text that none of them learns on.
"""

import dataclasses
import hashlib
import itertools
import json
import math
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

from ddp_prune.devices import load, make_accelerator
from ddp_prune.export import layer_widths, read_masks, write_masks
from ddp_prune.gates import GatedModel, Masks
from ddp_prune.loss import perplexity
from ddp_prune.methods import BY_DEFAULT, METHODS
from ddp_prune.methods.method import Score, Search, choose, unfit
from ddp_prune.model import Source, companions, open_source, weight_files, weight_shapes
from ddp_prune.pipeline import suited_pools
from ddp_prune.recipe import Recipe
from ddp_prune.run_state import RunState, fingerprint
from ddp_prune.text import Blocks, check_vocabulary, load_blocks, load_tokenizer, sources_of
from ddp_prune.train import train
from ddp_prune.trainer import Trainer
from ddp_vllm.costs import prices
from ddp_vllm.errors import SettingError, TextError
from ddp_vllm.families import dense_layers
from ddp_vllm.output import locked, make_folder, write_text
from ddp_vllm.pages.study import CELLS, STUDY_FILE

TEST_BLOCKS, TEST_LENGTH = 16, 512
SCALES = "+scales"  # after the name of a score: the scales of what it keeps learn too
MASKS = ".safetensors"  # a file of masks is a method too
DENSE = "dense"
LABEL = 0.01  # of the units by which a masks file may miss a sparsity, as the paper's do


@dataclass(frozen=True, kw_only=True)
class Study:
    """What is compared, on what."""

    recipe: Recipe
    """Of every search; its sparsity and seed are those of the first cell."""
    test: Path
    """Text to judge by."""
    methods: Sequence[str] = tuple(BY_DEFAULT)
    sparsities: Sequence[float] = (0.2, 0.5)
    seeds: Sequence[int] = (0,)
    samples: int = 64
    """Sequences that scores are computed on."""
    recipe_file: Path | None = None
    """From which the recipe is."""
    polish: bool = False
    """Let the scales of what each score keeps learn too, in a row of its own."""
    detokenise: bool = False
    """Undo WikiText's spacing in the test text, as lm-eval does."""

    def __post_init__(self) -> None:
        """Check what does not depend on the model. Raises: SettingError."""
        for name in self.methods:
            plain = name.removesuffix(SCALES)
            if name.endswith(MASKS) and Path(name).is_file():
                continue
            if plain not in METHODS or (plain != name and isinstance(METHODS[plain], Search)):
                raise SettingError(
                    f"method {name!r} is unknown; known are {', '.join(METHODS)}, a score with {SCALES} after it, and "
                    f"a file of masks ({MASKS})"
                )
        if not (self.methods and self.sparsities and self.seeds and self.samples > 0):
            raise SettingError("methods, sparsities, seeds or samples are none; give at least one of each")
        for name, needed in {"budget": "units", "align": 1, "tp": 1, "shard": False}.items():
            if (given := getattr(self.recipe, name)) != needed:
                raise SettingError(f"{name} is {given!r}; methods are compared by equal units, with {needed!r}")
        if any(self.test.resolve() == Path(name).resolve() for name in sources_of(self.recipe.data)):
            raise SettingError(f"{self.test} is learned on; give another text to judge by")

    @property
    def names(self) -> list[str]:
        """Return the methods, each once, and beside each score the same with scales."""
        scores = {name for name in self.methods if isinstance(METHODS.get(name), Score)}
        found = ([name, name + SCALES] if self.polish and name in scores else [name] for name in self.methods)
        return list(dict.fromkeys(name for names in found for name in names))

    def recipe_of(self, sparsity: float, seed: int, **changes: Any) -> Recipe:
        """Return the recipe of one cell; a polish of the paper's recipe, which is none, is the paper's alone."""
        if self.recipe.controller == "alm":
            changes = {"polish": Recipe.polish} | changes
        return dataclasses.replace(
            self.recipe, **{"sparsity": sparsity, "seed": seed, "learn": "scales", "scope": "global", **changes}
        )

    def shared(self) -> dict[str, Any]:
        """Return the settings that all cells of a folder share."""
        recipe = {name: value for name, value in self.recipe.to_dict().items() if name not in ("sparsity", "seed")}
        return {**recipe, "test": str(self.test), "samples": self.samples, "detokenise": self.detokenise}


def run_study(study: Study, output: Path, say: Callable[[str], None]) -> None:
    """Fill the cells of a study that are not there yet.

    Raises: SettingError if the folder holds cells of another model, text or recipe, or a sparsity does not suit the
        model; TextError if text is too short; and as training does.
    """
    source, tokenizer = open_source(study.recipe.model), load_tokenizer(study.recipe.model)
    shapes = weight_shapes(source)
    for sparsity, seed in itertools.product(study.sparsities, study.seeds):
        suited_pools(study.recipe_of(sparsity, seed), source, shapes)
    test = read_test_blocks(study.test, tokenizer, detokenise=study.detokenise)
    blocks = _blocks(study, tokenizer, study.seeds[0])
    for part in (blocks, dataclasses.replace(blocks, heldout=test)):
        check_vocabulary(part, source.config["vocab_size"], study.recipe.model)
    make_folder(output / CELLS)
    with locked(output / ".lock", f"another process works on {output}; wait for it, or choose another folder"):
        facts = fingerprint([blocks.heldout, test], weight_files(source.folder), companions(source.folder))
        _check_same(study.shared() | {"text and weights": facts}, output)
        cells = Cells(study, output, source, test, make_accelerator(output, None))
        cells.dense(blocks)
        for seed in study.seeds:
            blocks = _blocks(study, tokenizer, seed)
            for name in study.names:
                for line in cells.fill(name, seed, blocks):
                    say(line)


def _blocks(study: Study, tokenizer: Any, seed: int) -> Blocks:
    recipe = study.recipe
    return load_blocks(
        recipe.data, tokenizer, seq_len=recipe.seq_len, train_blocks=recipe.steps * recipe.batch_size,
        heldout_blocks=recipe.heldout_blocks, min_train_blocks=recipe.batch_size, seed=seed,
    )  # fmt: skip


def read_test_blocks(path: Path, tokenizer: Any, *, detokenise: bool) -> torch.Tensor:
    """Return the first tokens of a text, int64 [TEST_BLOCKS, TEST_LENGTH]; fewer blocks of a short text.

    Raises: TextError if it cannot be read or has no block.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TextError(f"{path} cannot be read ({error}); give a text file to judge by") from error
    if detokenise:
        from lm_eval.tasks.wikitext.preprocess_wikitext import wikitext_detokenizer

        text = wikitext_detokenizer({"page": text})
    ids = tokenizer(text, verbose=False)["input_ids"]
    num_blocks = min(TEST_BLOCKS, len(ids) // TEST_LENGTH)
    if not num_blocks:
        raise TextError(f"{path} has {len(ids)} tokens; to judge by it takes {TEST_LENGTH:,}, better 16 times as many")
    return torch.tensor(ids[: num_blocks * TEST_LENGTH]).view(num_blocks, TEST_LENGTH)


def _check_same(shared: Mapping[str, Any], output: Path) -> None:
    """Refuse a folder of another study, or note whose it is. Raises: SettingError."""
    path, asked = output / STUDY_FILE, json.loads(json.dumps(shared))
    if not path.exists():
        write_text(json.dumps(asked, indent=1), path)
    found = json.loads(path.read_text(encoding="utf-8"))
    if other := [name for name in asked if found.get(name) != asked[name]]:
        raise SettingError(f"{output} holds a study with another {', '.join(other)}; choose another folder")


@dataclass(frozen=True, eq=False)
class Cells:
    """The cells of one folder, and what fills them."""

    study: Study
    output: Path
    source: Source
    test: torch.Tensor
    accelerator: Accelerator

    @cached_property
    def gated(self) -> GatedModel:
        """The dense model with gates, loaded when a cell needs it."""
        head_unit, _ = suited_pools(self.study.recipe, self.source, weight_shapes(self.source))
        model = load(self.source, self.study.recipe, self.accelerator)
        return GatedModel(model, self.source.family, self.source.sizes, head_unit)

    def cell(self, name: str, *parts: object) -> Path:
        """Return the file of a cell; a masks file is called by its path's hash, which is never too long."""
        if name.endswith(MASKS):
            name = f"masks-{hashlib.sha256(name.encode()).hexdigest()[:12]}"
        return self.output / CELLS / ("_".join(map(str, (name, *parts))) + ".json")

    def write(self, path: Path, content: Mapping[str, Any]) -> None:
        write_text(json.dumps(content), path)

    def dense(self, blocks: Blocks) -> None:
        """Judge the dense model."""
        if not (path := self.cell(DENSE)).exists():
            self.write(path, {"method": DENSE, **self.judged(None, blocks)})

    def fill(self, name: str, seed: int, blocks: Blocks) -> Iterator[str]:
        """Fill the cells of a method with one seed, and yield a line each; a score is computed once for them."""
        scores: Masks = {}
        for sparsity in self.study.sparsities:
            path = self.cell(name, f"{sparsity:g}", seed)
            if path.exists():
                yield f"{name} at {100 * sparsity:g} %, seed {seed}: measured before"
                continue
            set_seed(seed)
            began, cpu = time.perf_counter(), time.process_time()
            masks, reason = self.masks(name, sparsity, seed, blocks, scores)
            found: dict[str, Any] = {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - cpu}
            if masks:
                made_by = {"model": self.study.recipe.model, "method": name, "sparsity": sparsity, "seed": seed}
                write_masks(masks, path.with_suffix(MASKS), head_unit=self.gated.head_unit, provenance=made_by)
                found |= self.judged(masks, blocks) | what_is_left(masks, self.gated, self.source)
                yield f"{name} at {100 * sparsity:g} %, seed {seed}: perplexity {found['perplexity']:.2f}"
            else:
                found = {"reason": reason}
                yield f"{name} at {100 * sparsity:g} %: {reason}"
            method = METHODS.get(name.removesuffix(SCALES))
            found |= {"source": method.source if method else name, "is_search": isinstance(method, Search)}
            found["command"] = command(self.study, name, sparsity, seed, self.output)
            self.write(path, {"method": name, "sparsity": sparsity, "seed": seed, **found})

    def judged(self, masks: Masks | None, blocks: Blocks) -> dict[str, float]:
        """Return the perplexity of gates on both texts."""
        texts = {"perplexity": self.test, "heldout": blocks.heldout}
        return {name: perplexity(self.gated, masks, text) for name, text in texts.items()}

    def masks(self, name: str, sparsity: float, seed: int, blocks: Blocks, scores: Masks) -> tuple[Masks, str]:
        """Return the gates of a method, or {} and the reason why there are none; `scores` are filled once."""
        if name.endswith(MASKS):
            return self.read(Path(name), sparsity)
        method, keep_ratio = METHODS[name.removesuffix(SCALES)], 1.0 - sparsity
        if reason := unfit(method, self.source.sizes):
            return {}, reason
        if isinstance(method, Search):
            try:
                recipe = self.study.recipe_of(sparsity, seed, **method.settings)
            except SettingError as error:  # of whole experts
                return {}, str(error)
            return self.learn(name, recipe, blocks, method.trainer), ""
        if not scores:
            scores |= method.score(self.gated, blocks.train[: self.study.samples])
        chosen = choose(scores, keep_ratio, method.scope, whole_experts=self.study.recipe.whole_experts)
        if not name.endswith(SCALES):
            return chosen, ""

        def make(*arguments: Any) -> Trainer:
            trainer = Trainer(*arguments)
            for kind, kept in chosen.items():
                trainer.support[kind] = kept.bool().to(self.accelerator.device)
            return trainer

        recipe = self.study.recipe_of(sparsity, seed, controller="gradual", polish=0.999)
        return self.learn(name, recipe, blocks, make), ""

    def read(self, path: Path, sparsity: float) -> tuple[Masks, str]:
        """Return the gates of a file as they are, or {} and the reason why they do not belong there."""
        masks = read_masks(path)[0]
        if {kind: tuple(each.shape) for kind, each in masks.items()} != self.gated.shapes:
            return {}, "masks of another model"
        counts = [(int((each > 0).sum()), each.numel()) for each in masks.values()]
        if any(abs(kept - round((1.0 - sparsity) * units)) > LABEL * units for kept, units in counts):
            return {}, f"removes {' and '.join(f'{1 - kept / units:.0%}' for kept, units in counts)}"
        return masks, ""

    def learn(self, name: str, recipe: Recipe, blocks: Blocks, make: Callable[..., Trainer] | None) -> Masks:
        """Return the gates that a search ends with; interrupted, the same call goes on."""
        place = self.cell(name, f"{recipe.sparsity:g}", recipe.seed).with_suffix("")
        facts = fingerprint([blocks.train], weight_files(self.source.folder), companions(self.source.folder))
        run = RunState(place, recipe, learned_from=facts)
        with run.locked():
            learned = train(self.gated, blocks.train, recipe, self.accelerator, run, lambda _metrics: None, make=make)
            run.remove()
        return learned.gates


def command(study: Study, name: str, sparsity: float, seed: int, output: Path) -> str:
    """Return the command that fills one cell again."""
    recipe = study.recipe
    words = ["ddp-vllm", "study", "methods", recipe.model, "--data", recipe.data, "--test", str(study.test)]
    words += ["--methods", name, "--sparsity", f"{sparsity:g}", "--seeds", str(seed), "--steps", str(recipe.steps)]
    words += ["--batch-size", str(recipe.batch_size), "--seq-len", str(recipe.seq_len)]
    words += ["--samples", str(study.samples), *(["--detokenise"] if study.detokenise else [])]
    words += [*(["--recipe", str(study.recipe_file)] if study.recipe_file else []), "-o", str(output)]
    return shlex.join(words)


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
