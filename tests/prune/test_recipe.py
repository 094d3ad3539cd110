"""Defaults of the paper, limits of every setting, and what overrides what."""

import dataclasses
import itertools
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ddp_prune.recipe import AlmSettings, Recipe, load_recipe
from ddp_prune.run import Run
from ddp_vllm.errors import SettingError

GIVEN = {"model": "m", "sparsity": 0.2}
PAPER = {  # arXiv:2603.08065, section 3 and appendix
    "steps": 1000, "batch_size": 16, "seq_len": 2048, "distillation": 2.0, "scope": "global",
}  # fmt: skip
PAPER_ALM = {
    "learning_rate": 2e-2, "lambda_learning_rate": 2e-2, "lambda2_learning_rate": 4e-1, "mu_start": 0.5, "mu_end": 0.05,
}  # fmt: skip
OUT_OF_RANGE: list[tuple[str, Any, str]] = [  # setting, value, the limit its message names
    ("sparsity", 0.0, "between 0 and 1"),
    ("sparsity", 20, "between 0 and 1"),
    ("sparsity", float("nan"), "finite"),
    ("sparsity", "0.2", "must be a float"),
    ("steps", 0, "at least 1"),
    ("steps", 10.0, "must be a int"),
    ("batch_size", 0, "at least 1"),
    ("save_every", -1, "at least 0"),
    ("seq_len", 7, "at least 8"),
    ("distillation", -0.1, "at least 0"),
    ("polish", 1.0, "below 1"),
    ("seed", -1, "at least 0"),
    ("seed", 2**32, "below 2^32"),
    ("head_unit", "head", "auto, kv-group, query-head"),
    ("scope", "block", "global, layer, expert"),
    ("budget", "pid", "units, params, flops, kv-bytes"),
    ("controller", "pid", "gradual, alm"),
    ("alm", 0.1, "must be a AlmSettings"),
    ("attention_sparsity", 1.0, "below 1"),
    ("target", 5.5e9, "give one"),
    ("tp", 0, "at least 1"),
    ("context_length", 0, "at least 1"),
    ("dtype", "int8", "auto, float32, bfloat16, float16"),
    ("model", None, "must be a str"),
]
ALM_OUT_OF_RANGE: list[tuple[str, Any, str]] = [
    ("learning_rate", -1.0, "at least 0"),
    ("learning_rate", float("inf"), "finite"),
    ("warmup", 1.0, "below 1"),
    ("mu_end", 0.0, "0 < mu_end"),
    ("mu_end", 0.6, "mu_end ≤ mu_start"),
    ("gate_floor", 0.1, "at most 0"),
]


def test_defaults_are_the_papers() -> None:
    recipe = Recipe(**GIVEN)
    assert {name: getattr(recipe, name) for name in PAPER} == PAPER
    assert recipe.data.startswith("HuggingFaceFW/fineweb-edu")
    assert {name: getattr(recipe.alm, name) for name in PAPER_ALM} == PAPER_ALM


@pytest.mark.parametrize(
    ("make", "name", "value", "limit"),
    [(partial(Recipe, **GIVEN), *case) for case in OUT_OF_RANGE] + [(AlmSettings, *case) for case in ALM_OUT_OF_RANGE],
)
def test_a_value_out_of_range_is_refused_with_its_limit(
    make: Callable[..., Any], name: str, value: Any, limit: str
) -> None:
    with pytest.raises(SettingError) as caught:
        make(**{name: value})
    message = str(caught.value)
    assert f"{name} is {value!r}" in message or f"{name} is {value}" in message
    assert limit in message


def test_values_at_the_limits_are_taken() -> None:
    limits = {"steps": 1, "batch_size": 1, "seq_len": 8, "polish": 0, "distillation": 0}
    recipe = Recipe(**GIVEN | limits | {"seed": 2**32 - 1})
    assert type(recipe.polish) is float and type(recipe.distillation) is float  # 0 in TOML is an integer
    assert Run.alone(recipe).steps == (0, 1, 1)
    settings = AlmSettings(warmup=0, mu_end=0.5, gate_floor=0, learning_rate=0)
    assert type(settings.warmup) is float


def test_search_and_polish_make_up_the_steps() -> None:
    for steps, polish in itertools.product((1, 2, 3, 40, 1000), (0.0, 0.35, 0.99)):
        _, search, last = Run.alone(Recipe(**GIVEN | {"steps": steps, "polish": polish})).steps
        assert 1 <= search <= last == steps


def test_toml_is_overridden_by_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "recipe.toml"
    file.write_text('model = "a"\nsparsity = 0.5\nsteps = 30\npolish = 0\nhead_unit = "query-head"\n')
    recipe = load_recipe(file, {"model": "b", "steps": 7, "sparsity": None, "seed": None})
    expected = {"model": "b", "sparsity": 0.5, "steps": 7, "polish": 0.0, "head_unit": "query-head", "seed": 0}
    assert {name: getattr(recipe, name) for name in expected} == expected


def test_settings_of_the_papers_search_ask_for_it(tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text('model = "m"\nsparsity = 0.2\n[alm]\nwarmup = 0.1\n')
    with pytest.raises(SettingError, match=r'\[alm\] of .*r.toml is for controller = "alm"'):
        load_recipe(tmp_path / "r.toml", {})
    assert load_recipe(tmp_path / "r.toml", {"controller": "alm"}).alm.warmup == 0.1


def test_the_papers_file_changes_what_the_authors_code_does_otherwise() -> None:
    """And nothing else, but for what is ours: the polish and weights that learn."""
    found = load_recipe(Path(__file__).parents[2] / "docs" / "paper.toml", GIVEN)
    alm = AlmSettings(warmup=0.1, mu_end=0.1, gate_floor=-0.1, raw_masks=True)
    assert found == Recipe(model="m", sparsity=0.2, controller="alm", polish=0.0, train="masks", alm=alm)


def test_a_saved_recipe_loads_back(tmp_path: Path) -> None:
    values: dict[str, Any] = {**GIVEN, "steps": 7, "controller": "alm", "alm": AlmSettings(mu_end=0.1)}
    recipe = Recipe(**values, attention_sparsity=0.0)
    settings = recipe.to_dict()
    table = settings.pop("alm")
    lines = [f"{name} = {json.dumps(value)}\n" for name, value in settings.items()]
    lines += ["[alm]\n", *(f"{name} = {json.dumps(value)}\n" for name, value in table.items())]
    (tmp_path / "r.toml").write_text("".join(lines))
    assert load_recipe(tmp_path / "r.toml", {}) == recipe
    assert settings.keys() | {"alm"} == {field.name for field in dataclasses.fields(Recipe)}
    for each in (recipe, Recipe(**values)):
        assert load_recipe(None, json.loads(json.dumps(each.to_dict()))) == each  # as a checkpoint has it


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('model = "m"\nsparsity = 0.2\nstpes = 3\n', ["'stpes'", "unknown", "steps"]),
        ("sparsity = \n", ["cannot be read", "TOML"]),
        (f"sparsity = {'[' * 100_000}\n", ["cannot be read", "recursion", "TOML"]),
        (f"steps = {'9' * 5000}\n", ["cannot be read", "TOML"]),
        ("sparsity = 0.2\n", ["model is missing"]),
        ('model = "m"\n', ["sparsity is missing", "--target-params"]),
        ("learning_rate = 0.1\n", ["'learning_rate'", "unknown"]),  # it stands in [alm]
        ('model = "m"\nsparsity = 0.2\n[alm]\nmu = 0.1\n', ["[alm]", "'mu'", "unknown", "mu_start"]),
        ('model = "m"\nsparsity = 0.2\nalm = 0.1\n', ["alm is 0.1", "a table, [alm]"]),
    ],
)
def test_a_wrong_file_is_refused(text: str, words: list[str], tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(text)
    with pytest.raises(SettingError) as caught:
        load_recipe(tmp_path / "recipe.toml", {"model": None})
    assert all(word in str(caught.value) for word in words), caught.value


def test_an_unreadable_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "none.toml", tmp_path, tmp_path / "binary.toml"):
        with pytest.raises(SettingError, match="cannot be read"):
            load_recipe(path, GIVEN)
