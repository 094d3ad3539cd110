"""Defines a study: tables of the paper for the user's own model, their rows, and the settings of
each row.

All rows keep the same number of units of the same model. They use the same text in the same order
unless a row changes it, and are evaluated on text that no row trains on.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import activation_scores
import expert_scores
import gradient_scores
import scores
import searches
from ddp_prune.recipe import Recipe
from ddp_prune.text.rows import sources_of
from ddp_vllm.errors import SettingError, TextError
from scores import Score, Search
from tables import TABLES

TEST_BLOCKS, TEST_LENGTH = 16, 512
TEST_TOKENS = TEST_BLOCKS * TEST_LENGTH
MASKS = ".safetensors"  # suffix of a row that is a file of masks
# settings a row may change
CHANGES = ("data", "steps", "batch_size", "scope", "distillation", "polish", "train")
OF_SCORES = ("data", "scope")  # settings that a score uses
METHODS: dict[str, Score | Search] = {
    **scores.METHODS, **activation_scores.METHODS, **gradient_scores.METHODS, **expert_scores.METHODS,
    **searches.METHODS,
}  # fmt: skip
BY_DEFAULT = [name for name in METHODS if not name.startswith(("experts-use", "taylor", "hard"))]
"""The methods of the paper's tables 1 to 3."""
# word after a plus sign -> `train` of a second run
SECOND_RUNS = {"scales": "masks", "recovered": "weights"}
FIXED_SUPPORT = 0.999  # polish share of a second run: all its steps


@dataclass(frozen=True, kw_only=True)
class Row:
    """A parsed row of a table; `tables.py` defines the syntax of its name."""

    name: str
    first: str = ""
    """The row whose masks a second run continues with; empty for other rows."""
    method: Score | Search | None = None
    """None: a file of masks, or a second run."""
    changes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Changes to the study's recipe. Steps that end with % are a share of the recipe's."""


def read_row(name: str) -> Row:
    """Parse the name of a row. Raises: SettingError."""
    if name.endswith(MASKS) and Path(name).is_file():
        return Row(name=name)
    head, *words = name.split("+")
    last = max((index for index, word in enumerate(words) if word in SECOND_RUNS), default=None)
    if last is not None:
        first = read_row("+".join([head, *words[:last]]))
        if first.changes.get("train") == "weights":
            raise SettingError(f"method {name!r} continues trained weights, which are not saved; omit +{words[last]}")
        fixed = {"controller": "gradual", "polish": FIXED_SUPPORT, "train": SECOND_RUNS[words[last]]}
        return Row(name=name, first=first.name, changes=fixed | _changes(name, words[last + 1 :], CHANGES))
    if (method := METHODS.get(head)) is None:
        raise SettingError(
            f"method {head!r} is unknown; choose {', '.join(METHODS)} or a file of masks ({MASKS}), alone or "
            f"with +{', +'.join(SECOND_RUNS)} or settings such as +scope=layer"
        )
    fixed = dict(method.settings) if isinstance(method, Search) else {}
    allowed = CHANGES if isinstance(method, Search) else OF_SCORES
    return Row(name=name, method=method, changes=fixed | _changes(name, words, allowed))


def _changes(name: str, words: Sequence[str], allowed: Sequence[str]) -> dict[str, Any]:
    """Return the settings that the words after a method's plus signs change.
    Raises: SettingError."""
    changes: dict[str, Any] = {}
    kinds = {field.name: field.type for field in dataclasses.fields(Recipe)}
    for setting, _, value in (word.partition("=") for word in words):
        if setting not in allowed or not value:
            raise SettingError(f"method {name!r} has {setting!r}; it may set {', '.join(allowed)}, as {allowed[0]}=…")
        if (setting, value) == ("train", "lora"):
            raise SettingError(f"method {name!r} has train=lora; a study trains masks or weights")
        kind: Any = kinds[setting]
        try:
            is_share = setting == "steps" and value.endswith("%")
            changes[setting] = f"{float(value[:-1])}%" if is_share else kind(value)
        except ValueError:
            raise SettingError(f"method {name!r} has {setting}={value}; it must be of type {kind.__name__}") from None
    return changes


@dataclass(frozen=True, kw_only=True)
class Study:
    """The rows, texts and settings of a comparison."""

    table: str = "methods"
    """One of `TABLES`."""
    recipe: Recipe
    """Recipe of every search, with the sparsity and seed of the first cell."""
    test: Path
    """Text file to evaluate on."""
    methods: Sequence[str] = ()
    """Rows; empty: the rows of the table."""
    sparsities: Sequence[float] = (0.2, 0.5)
    seeds: Sequence[int] = (0,)
    samples: int = 64
    """Sequences to compute scores on."""
    detokenize: bool = False
    """Undo WikiText's spacing in the test text, as lm-eval does."""
    test_length: int = TEST_LENGTH
    """Tokens per window of the test text; 128 in the paper."""

    def __post_init__(self) -> None:
        """Check the settings that do not depend on the model. Raises: SettingError."""
        if not (self.sparsities and self.seeds and self.samples > 0):
            raise SettingError("sparsities, seeds or samples are empty; pass at least one of each")
        if not 8 <= self.test_length <= TEST_TOKENS:
            raise SettingError(f"test_length is {self.test_length}; it must be at least 8 and at most {TEST_TOKENS:,}")
        if self.table not in TABLES:
            raise SettingError(f"table is {self.table!r}; it must be one of {', '.join(TABLES)}")
        for name, required in {"budget": "units", "align": 1, "tp": 1, "shard": False}.items():
            if (value := getattr(self.recipe, name)) != required:
                raise SettingError(f"{name} is {value!r}; a study compares equal numbers of units: set {required!r}")
        self._check_rows()

    def _check_rows(self) -> None:
        # a row without support for them becomes a cell with the reason
        if self.recipe.whole_experts:
            dataclasses.replace(self, recipe=dataclasses.replace(self.recipe, whole_experts=False))
            return
        for row, sparsity, seed in itertools.product(self.rows, self.sparsities, self.seeds):
            data = self.recipe_of(row, sparsity, seed).data
            if any(self.test.resolve() == Path(name).resolve() for name in sources_of(data)):
                raise SettingError(f"{self.test} is training text; pass another text with --test")

    @property
    def rows(self) -> list[Row]:
        """Return each row once, a first run before its second run."""
        names = dict.fromkeys(self.methods or TABLES[self.table].rows or BY_DEFAULT)
        return [read_row(name) for name in dict.fromkeys(itertools.chain(*map(_with_first, names)))]

    def recipe_of(self, row: Row, sparsity: float, seed: int) -> Recipe:
        """Return the recipe of one cell; a recipe for the paper's search sets `polish` for that
        search only."""
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
        del recipe["alm"]["raw_masks"]  # `recipe_of` never sets it
        evaluation = {name: getattr(self, name) for name in ("samples", "detokenize", "test_length")}
        return {**recipe, "test": str(self.test), **evaluation}


def _with_first(name: str) -> Iterator[str]:
    """Yield the names of a second run's first run and of the row itself."""
    if first := read_row(name).first:
        yield from _with_first(first)
    yield name


def read_test_blocks(path: Path, tokenizer: Any, *, detokenize: bool, length: int = TEST_LENGTH) -> torch.Tensor:
    """Return the first TEST_TOKENS tokens of a text, int64 [num_blocks, length]; fewer blocks if
    the text is shorter.

    Raises: TextError if the text cannot be read or is shorter than one block.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TextError(f"{path} cannot be read ({error}); pass a text file") from error
    if detokenize:
        from lm_eval.tasks.wikitext.preprocess_wikitext import wikitext_detokenizer

        text = wikitext_detokenizer({"page": text})
    ids = tokenizer(text, verbose=False)["input_ids"]
    num_blocks = min(TEST_TOKENS, len(ids)) // length
    if not num_blocks:
        raise TextError(f"{path} has {len(ids)} tokens; a test text requires {length:,}, better {TEST_TOKENS:,}")
    return torch.tensor(ids[: num_blocks * length]).view(num_blocks, length)
