"""Tables of the paper on a model of the user's own: which rows are compared, and with what settings each learns.

All rows keep the same number of units of the same model, see the same text in the same order but where a row says
otherwise, and are judged on text that none of them learns on.
"""

import dataclasses
import itertools
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ddp_prune.recipe import Recipe
from ddp_prune.text import sources_of
from ddp_study import activation_scores, expert_scores, gradient_scores, scores, searches
from ddp_study.scores import Score, Search
from ddp_study.tables import TABLES
from ddp_vllm.errors import SettingError, TextError

TEST_BLOCKS, TEST_LENGTH = 16, 512
TEST_TOKENS = TEST_BLOCKS * TEST_LENGTH
MASKS = ".safetensors"  # a file of masks is a row too
CHANGES = ("data", "steps", "batch_size", "scope", "distillation", "polish", "train")  # settings that a row may have
OF_SCORES = ("data", "scope")  # those that a score heeds
METHODS: dict[str, Score | Search] = {
    **scores.METHODS, **activation_scores.METHODS, **gradient_scores.METHODS, **expert_scores.METHODS,
    **searches.METHODS,
}  # fmt: skip
BY_DEFAULT = [name for name in METHODS if not name.startswith(("experts-use", "taylor", "hard"))]
"""Those of the paper's tables 1 to 3."""
LATER = {"scales": "masks", "recovered": "weights"}  # what learns in a second run, by the word after a plus sign
SUPPORT_STAYS = 0.999  # polish of a second run: all of it


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of a table, taken apart; `ddp_study.tables` says how it is written."""

    name: str
    before: str = ""
    """The row from whose masks this one goes on, in a second run; empty: it is the first."""
    method: Score | Search | None = None
    """None: a file of masks, or a second run."""
    changes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Of the study's recipe. Steps that end with % are a share of its."""


def read_row(name: str) -> Row:
    """Take the name of a row apart. Raises: SettingError."""
    if name.endswith(MASKS) and Path(name).is_file():
        return Row(name=name)
    head, *words = name.split("+")
    later = max((place for place, word in enumerate(words) if word in LATER), default=None)
    if later is not None:
        before = read_row("+".join([head, *words[:later]]))
        if before.changes.get("train") == "weights":
            raise SettingError(
                f"method {name!r} goes on from weights that learned, which are not kept; leave out the end"
            )
        own = {"controller": "gradual", "polish": SUPPORT_STAYS, "train": LATER[words[later]]}
        return Row(name=name, before=before.name, changes=own | _changes(name, words[later + 1 :], CHANGES))
    if (method := METHODS.get(head)) is None:
        raise SettingError(
            f"method {head!r} is unknown; known are {', '.join(METHODS)} and a file of masks ({MASKS}), each alone or "
            f"with +{', +'.join(LATER)} or settings after it, such as +scope=layer"
        )
    own = dict(method.settings) if isinstance(method, Search) else {}
    heeded = CHANGES if isinstance(method, Search) else OF_SCORES
    return Row(name=name, method=method, changes=own | _changes(name, words, heeded))


def _changes(name: str, words: Sequence[str], heeded: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    kinds = {field.name: field.type for field in dataclasses.fields(Recipe)}
    for setting, _, value in (word.partition("=") for word in words):
        if setting not in heeded or not value:
            raise SettingError(f"method {name!r} says {setting!r}; it may change {', '.join(heeded)}, as {heeded[0]}=…")
        kind: Any = kinds[setting]
        try:
            is_share = setting == "steps" and value.endswith("%")
            found[setting] = f"{float(value[:-1])}%" if is_share else kind(value)
        except ValueError:
            raise SettingError(f"method {name!r} says {setting}={value}; that must be a {kind.__name__}") from None
    return found


@dataclass(frozen=True, kw_only=True)
class Study:
    """What is compared, on what."""

    table: str = "methods"
    """One of `TABLES`."""
    recipe: Recipe
    """Of every search; its sparsity and seed are those of the first cell."""
    test: Path
    """Text to judge by."""
    methods: Sequence[str] = ()
    """Rows; none: those of the table."""
    other_data: Sequence[str] = ()
    """Further text to learn on, for each row in rows of their own."""
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
    test_length: int = TEST_LENGTH
    """Tokens of a window of the test text; 128 in the paper's perplexities."""

    def __post_init__(self) -> None:
        """Check what does not depend on the model. Raises: SettingError."""
        if not (self.sparsities and self.seeds and self.samples > 0):
            raise SettingError("sparsities, seeds or samples are none; give at least one of each")
        if not 8 <= self.test_length <= TEST_TOKENS:
            raise SettingError(f"test_length is {self.test_length}; it must be at least 8 and at most {TEST_TOKENS:,}")
        if self.table not in TABLES:
            raise SettingError(f"table is {self.table!r}; it must be one of {', '.join(TABLES)}")
        for data in self.other_data:
            if {",", "+"} & set(data):
                raise SettingError(f"data is given again as {data!r}; in a row of its own a text has no , or + in it")
        for name, needed in {"budget": "units", "align": 1, "tp": 1, "shard": False}.items():
            if (given := getattr(self.recipe, name)) != needed:
                raise SettingError(f"{name} is {given!r}; methods are compared by equal units, with {needed!r}")
        if self.table == "data" and not self.methods and not self.other_data:
            raise SettingError(f"data is {self.recipe.data} alone; give --data several times, once for each text")
        self._check_rows()

    def _check_rows(self) -> None:
        if self.recipe.whole_experts:  # a row that these do not suit is a cell with the reason
            dataclasses.replace(self, recipe=dataclasses.replace(self.recipe, whole_experts=False))
            return
        for row, sparsity, seed in itertools.product(self.rows, self.sparsities, self.seeds):
            data = self.recipe_of(row, sparsity, seed).data
            if any(self.test.resolve() == Path(name).resolve() for name in sources_of(data)):
                raise SettingError(f"{self.test} is learned on; give another text to judge by")

    @property
    def rows(self) -> list[Row]:
        """Return the rows, each once, those that others go on from before them."""
        names = [*(self.methods or TABLES[self.table].rows or BY_DEFAULT)]
        names += [f"{name}+data={data}" for data in self.other_data for name in names]
        found = dict.fromkeys(row for name in names for row in self._with_its_own(read_row(name)))
        return [read_row(name) for name in found]

    def _with_its_own(self, row: Row) -> Iterator[str]:
        """Yield a row's name, before it that from which it goes on, and after a score the same with scales."""
        if row.before:
            yield from self._with_its_own(read_row(row.before))
        yield row.name
        if self.polish and isinstance(row.method, Score):
            yield f"{row.name}+scales"

    def recipe_of(self, row: Row, sparsity: float, seed: int) -> Recipe:
        """Return the recipe of one cell; a polish of the paper's recipe, which is none, is the paper's alone."""
        changes = dict(row.changes)
        if self.recipe.controller == "alm":
            changes = {"polish": Recipe.polish} | changes
        if isinstance(share := changes.get("steps"), str):
            changes["steps"] = max(1, round(self.recipe.steps * float(share.rstrip("%")) / 100))
        fixed: Mapping[str, Any] = {"sparsity": sparsity, "seed": seed, "train": "masks", "scope": "global"}
        exact = dataclasses.replace(self.recipe.alm, raw_masks=False)
        return dataclasses.replace(self.recipe, **{**fixed, "alm": exact, **changes})

    def shared(self) -> dict[str, Any]:
        """Return the settings that all cells of a folder share."""
        recipe = {name: value for name, value in self.recipe.to_dict().items() if name not in ("sparsity", "seed")}
        del recipe["alm"]["raw_masks"]  # `recipe_of` lets none through
        own = {name: getattr(self, name) for name in ("samples", "detokenise", "test_length")}
        return {**recipe, "test": str(self.test), **own}

    def command(self, row: Row, sparsity: float, seed: int, output: Path) -> str:
        """Return the command that fills one cell again."""
        recipe = self.recipe
        words = ["ddp-vllm", "study", self.table, recipe.model, "--data", recipe.data, "--test", str(self.test)]
        words += ["--methods", row.name, "--sparsity", f"{sparsity:g}", "--seeds", str(seed)]
        words += ["--steps", str(recipe.steps), "--batch-size", str(recipe.batch_size)]
        words += ["--seq-len", str(recipe.seq_len), "--samples", str(self.samples)]
        words += ["--test-length", str(self.test_length), *["--detokenise"] * self.detokenise]
        words += [*(["--recipe", str(self.recipe_file)] if self.recipe_file else []), "-o", str(output)]
        return shlex.join(words)


def read_test_blocks(path: Path, tokenizer: Any, *, detokenise: bool, length: int = TEST_LENGTH) -> torch.Tensor:
    """Return the first TEST_TOKENS tokens of a text, int64 [num_blocks, length]; fewer blocks of a short text.

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
    num_blocks = min(TEST_TOKENS, len(ids)) // length
    if not num_blocks:
        raise TextError(f"{path} has {len(ids)} tokens; to judge by it takes {length:,}, better {TEST_TOKENS:,}")
    return torch.tensor(ids[: num_blocks * length]).view(num_blocks, length)
