"""Settings: defaults of the paper, limits, what overrides what; the options that make a recipe, and dry runs."""

import dataclasses
import itertools
import json
import re
from collections.abc import Callable
from functools import partial
from math import prod
from operator import mul
from pathlib import Path
from typing import Any

import pytest
from any_models import write_headers, write_model
from commands import assert_refused, edit_json, invoke, passed
from latency_profiles import written
from runs import prune
from seams import AlmSettings, Recipe, RecoveryRecipe, Run, load_recipe, load_recipes, open_source, plan, verbs

from ddp_vllm.checkpoint import read_config
from ddp_vllm.costs import numbers_read, table_note, whole_model
from ddp_vllm.dimensions import attended
from ddp_vllm.errors import SettingError
from ddp_vllm.families import pruned_config
from ddp_vllm.model_facts import dense_kv_bytes

pytestmark = pytest.mark.usefixtures("cache", "no_pictures")

GIVEN = {"model": "m", "sparsity": 0.2}
OUT_OF_RANGE: list[tuple[str, Any, str]] = [  # setting, value, the limit its message names
    ("sparsity", 0.0, "between 0 and 1"),
    ("sparsity", float("nan"), "finite"),
    ("steps", 0, "at least 1"),
    ("seq_len", 7, "at least 8"),
    ("distillation", -0.1, "at least 0"),
    ("seed", -1, "at least 0"),
    ("scope", "block", "global, layer, expert"),
    ("model", None, "must be a str"),
]
ALM_OUT_OF_RANGE: list[tuple[str, Any, str]] = [
    ("learning_rate", -1.0, "at least 0"),
    ("mu_end", 0.0, "0 < mu_end"),
    ("gate_floor", 0.1, "at most 0"),
]


@pytest.mark.parametrize(
    ("make", "name", "value", "limit"),
    [(partial(Recipe, **GIVEN), *case) for case in OUT_OF_RANGE] + [(AlmSettings, *case) for case in ALM_OUT_OF_RANGE],
)
def test_a_value_out_of_range_names_its_limit(make: Callable[..., Any], name: str, value: Any, limit: str) -> None:
    with pytest.raises(SettingError, match=re.escape(limit)) as caught:
        make(**{name: value})
    assert f"{name} is {value!r}" in str(caught.value) or f"{name} is {value}" in str(caught.value)


def test_values_at_the_limits_are_taken_and_search_and_polish_make_up_the_steps() -> None:
    recipe = Recipe(**GIVEN, batch_size=1, seq_len=8, distillation=0, seed=2**32 - 1, polish=0)
    assert type(recipe.polish) is float and type(recipe.distillation) is float  # 0 in TOML is an integer
    AlmSettings(warmup=0, mu_end=0.5, gate_floor=0, learning_rate=0)
    assert Recipe(speedup=1.25).budget == "latency"  # a recipe needs no model: `prune` takes it as an argument
    for steps, polish in itertools.product((1, 2, 3, 40, 1000), (0.0, 0.35, 0.99)):
        _, search, last = Run.alone(Recipe(**GIVEN, steps=steps, polish=polish)).steps
        assert 1 <= search <= last == steps


def test_the_papers_file_changes_what_the_authors_code_does_otherwise() -> None:
    """And nothing else, but for what is ours: the polish and weights that learn."""
    found = load_recipe(Path(__file__).parents[2] / "docs" / "paper.toml", GIVEN)
    alm = AlmSettings(warmup=0.1, mu_end=0.1, gate_floor=-0.1, raw_masks=True)
    assert found == Recipe(**GIVEN, controller="alm", polish=0.0, train="masks", alm=alm)
    paper = {"steps": 1000, "batch_size": 16, "seq_len": 2048, "distillation": 2.0, "scope": "global"}
    assert {name: getattr(found, name) for name in paper} == paper  # arXiv:2603.08065, section 3 and appendix
    assert (alm.learning_rate, alm.lambda_learning_rate, alm.lambda2_learning_rate) == (2e-2, 2e-2, 4e-1)


def test_lists_in_a_file_are_those_of_the_options(tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text('sparsity = [0.3, 0.2]\ndata = ["a.jsonl", "b.jsonl:3"]\n')
    recipes = load_recipes(tmp_path / "r.toml", {"model": "m"})
    assert [(recipe.sparsity, recipe.data) for recipe in recipes] == [
        (size, "a.jsonl,b.jsonl:3") for size in (0.2, 0.3)
    ]


IDLE: list[tuple[Any, dict[str, Any], str]] = [  # a setting without effect, and what it requires
    (Recipe, {"learning_rate": 1e-4, "train": "masks"}, "train is 'masks'; leave it out, or choose auto or lora or"),
    (Recipe, {"optimizer": "adamw", "train": "masks"}, "train is 'masks'"),
    (Recipe, {"phase": "prefill"}, "budget is 'units'; leave it out, or choose latency"),
    (Recipe, {"profile": "p.json"}, "budget is 'units'"),
    (Recipe, {"other_machine": True, "budget": "latency"}, "profile is missing; leave it out, or pass a profile"),
    (RecoveryRecipe, {"rank": 8, "train": "weights"}, "train is 'weights'; leave it out, or choose auto or lora"),
]


@pytest.mark.parametrize(("make", "changes", "words"), IDLE)
def test_a_setting_without_effect_is_refused(make: Any, changes: dict[str, Any], words: str) -> None:
    """Its default is no request, and `auto` may take the mode in which it has an effect."""
    known = GIVEN if make is Recipe else {"model": "m", "teacher": "t"}
    (name, value), *others = changes.items()
    with pytest.raises(SettingError, match=re.escape(f"{name} has no effect where {words}")):
        make(**known, **changes)
    make(**known, **dict(others))
    if others and others[0][0] == "train":
        assert make(**known, **{name: value}).without_effect(**dict(others)) == {name: getattr(make, name)}


def test_a_saved_recipe_loads_back(tmp_path: Path) -> None:
    values: dict[str, Any] = {**GIVEN, "steps": 7, "controller": "alm", "alm": AlmSettings(mu_end=0.1)}
    recipe = Recipe(**values, learning_rate=1e-4)
    settings = recipe.to_dict()
    table = settings.pop("alm")
    lines = [f"{name} = {json.dumps(value)}\n" for name, value in settings.items()]
    lines += ["[alm]\n", *(f"{name} = {json.dumps(value)}\n" for name, value in table.items())]
    (tmp_path / "r.toml").write_text("".join(lines))
    assert load_recipe(tmp_path / "r.toml", {}) == recipe
    assert settings.keys() | {"alm", "minutes"} == {field.name for field in dataclasses.fields(Recipe)}
    for each in (recipe, Recipe(**values)):
        assert load_recipe(None, json.loads(json.dumps(each.to_dict()))) == each  # as a checkpoint has it


WRONG: list[tuple[str, dict[str, Any], list[str]]] = [  # the file, what is passed, words of the refusal
    ("sparsity = \n", {}, ["cannot be read", "TOML"]),
    ("sparsity = 0.2\n", {}, ["model is missing"]),
    ('model = "m"\nsparsity = 0.2\n[alm]\nmu = 0.1\n', {}, ["[alm]", "'mu'", "unknown", "mu_start"]),
    ('model = "m"\nsparsity = 0.2\n[alm]\nwarmup = 0.1\n', {}, ["[alm] of", 'r.toml is for controller = "alm"']),
    ('model = "m"\nsparsity = 0.3\nsteps = 5\nminutes = 5.0\n', {}, ["steps and minutes are given; give one"]),
    ('model = "m"\n', {"sparsity": 0.2, "speedup": 1.25}, ["sparsity and speedup are given; give one"]),
    ('model = "m"\n', {"budget": "units", "speedup": 1.25}, ["'units', but a speedup is a budget in latency;"]),
    ('model = "m"\n', {"budget": "units", "target": "5B"}, ["'units', but a target is", "in params or flops or"]),
    ('model = "m"\nbudget = "latency"\n', {"target": "5B"}, ["budget is 'latency', but a target is"]),
]


@pytest.mark.parametrize(("text", "passed", "words"), WRONG)
def test_a_wrong_file_is_refused(text: str, passed: dict[str, Any], words: list[str], tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text(text)
    with pytest.raises(SettingError) as caught:
        load_recipe(tmp_path / "r.toml", {"model": None, **passed})
    assert all(word in str(caught.value) for word in words), caught.value


PASSED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [  # the file, what is passed, what the recipe then has
    ("sparsity = 0.3\nminutes = 5.0\n", {"steps": 100}, {"steps": 100, "minutes": None}),
    ("sparsity = 0.3\n", {"speedup": 1.25}, {"sparsity": 0.0, "speedup": 1.25, "budget": "latency"}),
    ('sparsity = 0.3\nbudget = "params"\n', {"target": "5.5B"}, {"sparsity": 0.0, "target": 5.5e9}),
]


@pytest.mark.parametrize("as_recipe", [False, True])
@pytest.mark.parametrize(("text", "passed", "expected"), PASSED)
def test_what_is_passed_replaces_its_alternatives(
    text: str, passed: dict[str, Any], expected: dict[str, Any], as_recipe: bool, tmp_path: Path
) -> None:
    (tmp_path / "r.toml").write_text(text)
    base = load_recipe(tmp_path / "r.toml", {"model": "m"}).changed() if as_recipe else tmp_path / "r.toml"
    found = load_recipe(base, {**passed, "model": "m"})
    assert {name: getattr(found, name) for name in expected} == expected


@pytest.mark.parametrize("make", [Recipe, RecoveryRecipe])
def test_text_that_is_trained_on_is_not_watched(make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By any of its names."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text("")
    (tmp_path / "link.jsonl").symlink_to("a.jsonl")
    known = GIVEN if make is Recipe else {"model": "m", "teacher": "t"}
    for data, watch in (
        ("a.jsonl,b/c", "b/c"),
        ("a.jsonl:3,b/c", str(tmp_path / "a.jsonl")),
        ("b/c, link.jsonl", "d/e,./a.jsonl"),
        ("b/c:small", "b/c:small:train"),
        ("b/c", "b/c::train"),
    ):
        with pytest.raises(SettingError, match=r"watch is .*, but data trains on part of it"):
            make(**known, data=data, watch=watch)
    make(**known, data="a.jsonl,b/c:small", watch="b/c:large,b/c:small:test")
    with pytest.raises(SettingError, match="watch has d/e:3, but is read once"):
        make(**known, data="b/c:3", watch="b/f,d/e:3")


VALUES: dict[str, tuple[Any, ...]] = {  # another value of each setting, and of those that settle others several
    "budget": ("params", "flops", "kv-bytes", "latency"), "sparsity": (0.4,), "target": (5e9,), "speedup": (1.5,),
    "alm": (AlmSettings(learning_rate=0.1),), "controller": ("alm",), "scope": ("layer",), "head_unit": ("query-head",),
    "train": ("masks", "lora"), "optimizer": ("adamw",), "steps": (7,), "minutes": (3.0,), "batch_size": (2,),
    "seq_len": (64,), "align": (8,), "tp": (2,), "polish": (0.0, 0.5), "prune": ("mlp",), "learning_rate": (1e-4,),
    "whole_experts": (True,), "phase": ("prefill",), "concurrency": (4,), "context_length": (512,), "watch": ("b.txt",),
    "data": ("a.txt",), "seed": (1,), "dtype": ("float32",), "shard": (True,), "profile": ("p.json",),
}  # fmt: skip


def test_what_differs_from_the_defaults_is_the_whole_recipe() -> None:
    """Whatever a Python caller gave is not lost: every field, and every pair of fields."""
    known = {field.name for field in dataclasses.fields(Recipe)}
    single = [(name, value) for name in VALUES.keys() & known for value in VALUES[name]]
    made = 0
    for size in ({"sparsity": 0.2}, {"target": 5e9}, {"speedup": 1.25}):
        for pairs in itertools.chain([()], itertools.combinations(single, 1), itertools.combinations(single, 2)):
            try:
                recipe = Recipe(model="m", **size | dict(pairs))
            except SettingError:
                continue
            made += 1
            assert Recipe(**recipe.changed()) == recipe, pairs
            is_file = recipe.controller == "alm" or recipe.alm == AlmSettings()  # else a recipe file is refused
            if is_file and not {"steps", "minutes"} <= recipe.changed().keys():
                assert load_recipe(recipe.changed(), {}) == recipe, pairs
    assert made > 500


def test_options_reach_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They override those of the file; options that are not given override nothing."""
    seen: list[Recipe] = []

    def keep(*arguments: object) -> list[Recipe]:
        seen.extend(load_recipes(*arguments))  # type: ignore[arg-type]
        raise SettingError("enough")

    monkeypatch.setattr(verbs, "load_recipes", keep)
    (tmp_path / "r.toml").write_text('tp = 4\nsteps = 7\nsave_every = 3\ncontroller = "alm"\n[alm]\nmu_end = 0.1\n')
    more = ["--scope", "layer", "--polish", "0", "--shard", "--align", "128", "--recipe", str(tmp_path / "r.toml")]
    assert_refused(prune("m", "t", tmp_path / "out", *more), 2, "enough")
    settings = {"model": "m", "data": "t", "scope": "layer", "polish": 0.0, "shard": True, "align": 128, "tp": 4}
    settings |= {"save_every": 3, "steps": 6, "budget": "units"}
    assert {name: getattr(seen[0], name) for name in settings} == settings and seen[0].alm.mu_end == 0.1
    for budget, amount in ((), "70K"), (("--budget", "flops"), "1.5G"), (("--budget", "kv-bytes"), "3e3"):
        assert_refused(prune("m", "t", tmp_path / "out", "--target", amount, *budget, "--sparsity", "0"), 2, "enough")
    assert [(recipe.budget, recipe.target) for recipe in seen[1:]] == [
        ("params", 70_000.0), ("flops", 1.5e9), ("kv-bytes", 3000.0),
    ]  # fmt: skip


MEASURED = ["--profile", "PROFILE", "--other-machine", "--context-length", "1024"]
PREFILL = [*MEASURED, "--phase", "prefill", "--concurrency", "1"]
DRY: dict[str, tuple[list[str], str]] = {  # options, what must be said; the model has 113,088 parameters
    "units": (["--sparsity", "30%"], r"31.2% of the prunable parameters = 25.5% of the model: 113.1K → 84.29K; "
              r"to remove 30% of the model: --target 79.16K"),
    "parameters": (["--target", "79.16K"], r"= 30.0% of the model: 113.1K → 79.16K$"),
    "KV cache": (["--budget", "kv-bytes", "--sparsity", "0.5"], r"= 50.0% of the model: 384 → 192 per token"),
    "MLPs only": (["--sparsity", "30%", "--prune", "mlp"],
                  r"^budget: keep 202 of 288 mlp units \(70.1%\)\nremoved: 29.9% .* = 14.6% of the model"),
    # 7 KV heads and 15 blocks of channels: less is kept than the budget allows
    "whole blocks": (["--sparsity", "50%", "--tp", "2", "--align", "8"],
                     r"^budget: keep at most 6 of 12 attn units \(50.0%\), attn in blocks of 2\n"
                     r"budget: keep at most 144 of 288 mlp units .*\n"
                     r"removed: at least 50.0% .* of the model: 113.1K → at most [\d.]+K"),
    # blocks of 32 channels
    "FLOPs in whole blocks": (["--budget", "flops", "--sparsity", "0.3", "--align", "32", "--context-length", "512"],
                              r"removed: at least 30.0% .* = 28.0% of the model: 618,496 → at most 445,235 per token"),
    "KV cache in whole heads": (["--budget", "kv-bytes", "--sparsity", "0.3"],  # of 32 bytes: 8 are kept
                                r"removed: at least 30.2% .* of the model: 384 → at most 268 per token"),
    "several sizes": (["--sparsity", "10%,0.2", "--sparsity", "0.3"],
                      r"^sparsity 0.1:\n(.*\n)*sparsity 0.2:\n(.*\n)*sparsity 0.3:$"),
    "a speed": (["--speedup", "1.2", *MEASURED], r"^budget: keep at most [\d,]+ of [\d,]+ µs per step of attn, mlp"),
    "a share of the time": (["--budget", "latency", "--sparsity", "0.2", *PREFILL],
                            r"^budget: keep at most .* µs per step of attn, mlp \(80.0%\)"),
}  # fmt: skip


def dry_run(model: Path, folder: Path, *options: str) -> str:
    """Run `prune --dry-run`, which writes nothing, and return what it prints."""
    profile = written(folder, json.loads((model / "config.json").read_text()), 1)
    (folder / "r.toml").write_text("[alm]\nwarmup = 0.1\n")
    before = sorted(folder.iterdir())
    given = {"PROFILE": str(profile), "RECIPE": str(folder / "r.toml")}
    arguments = ["prune", str(model), "--dry-run", "-o", str(folder / "out"), "--data", "no text"]
    result = passed(invoke(*arguments, *(given.get(option, option) for option in options)))
    assert sorted(folder.iterdir()) == before
    return result.stdout


@pytest.fixture
def short_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then a dry run measures no step, which takes a second."""
    monkeypatch.setattr(plan, "USABLE", 0.0)


@pytest.mark.usefixtures("short_of_memory")
@pytest.mark.parametrize("case", DRY)
def test_a_dry_run_prints_what_would_be_removed_and_writes_nothing(case: str, tiny_model: Path, tmp_path: Path) -> None:
    options, expected = DRY[case]
    text = dry_run(tiny_model, tmp_path, "--context-length", "2048", *options)
    assert re.search(expected, text, re.MULTILINE) and "\ntime: not measured, because memory is short" in text, text


@pytest.mark.parametrize("card", ["h100", "H100-80GB", "2xH100", "h100-80gb"])
def test_memory_and_time_on_cards_depend_on_no_profile(card: str, tiny_model: Path, tmp_path: Path) -> None:
    """Nor on how the card is written, if one alone begins so."""
    text = dry_run(tiny_model, tmp_path, "--speedup", "1.2", "--on", card)
    assert "the removed units depend on measured time, and this model was not profiled" in text
    assert re.search(r"masks and weights with adamw on .*: fits, .*; about [\d.]+ seconds for", text), text
    assert "e-0" not in text
    for wrong in ("a100-40gb", "h", "0xh100", "xh100"):  # of which there are several, or none
        result = invoke("prune", tiny_model, "--dry-run", "--sparsity", "0.2", "--on", wrong)
        assert_refused(result, 2, f"--on is '{wrong}'; give a card", "h100-80gb")


@pytest.mark.usefixtures("short_of_memory")
def test_a_large_table_of_tokens_is_named(tiny_model: Path, tmp_path: Path) -> None:
    """Of the tied table of a tiny model, 320 × 64; not of the same model with 32 times the channels."""
    assert "ddp-vllm trim, before pruning" in dry_run(tiny_model, tmp_path, "--sparsity", "0.4")
    source = open_source(str(tiny_model))
    shapes = dict(source.shapes)
    assert table_note(source.config, shapes)
    wider = shapes | {"model.layers.0.mlp.up_proj.weight": [4096, 64]}
    assert not table_note(source.config, wider)


def test_a_step_reads_the_experts_that_its_tokens_choose(tiny_experts: Path, tmp_path: Path) -> None:
    """Whether or not experts are pruned; of fewer whole experts a token still reads as many."""
    source = open_source(str(tiny_experts))
    experts, rest = 2 * 5 * 3 * 64 * 32, 320 * 64 + 2 * (2 * 64 * 64 + 2 * 64 * 32 + 5 * 64)
    for batch in (1, 3):
        expected = rest + experts * (1 - 0.6**batch), 320 * 64
        assert numbers_read(source.config, source.shapes, batch=batch) == pytest.approx(expected)
    assert whole_model("flops", source.config, source.widths.dense_layers, source.shapes, 0) == pytest.approx(
        2 * (rest + experts * 0.4)
    )
    options = ["--whole-experts", "--sparsity", "0.4", "--on", "h100-80gb", "--concurrency"]
    assert "at most 1.00× as fast with 1 sequences" in dry_run(tiny_experts, tmp_path, *options, "1")
    assert "at most 1.00× as fast" not in dry_run(tiny_experts, tmp_path, *options, "8")


def test_a_step_reads_the_cache_of_windows_and_of_text_alone(tmp_path: Path) -> None:
    """Gemma-3 with pictures: 5 of 6 layers attend to a window; FLOPs count a tied head by any name."""
    folder = write_headers("Gemma3Config", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    text = config["text_config"]
    assert dense_kv_bytes(folder, value_bytes=2) == 4 * text["num_hidden_layers"] * text["num_key_value_heads"] * 256
    keys = attended(config, 32768)
    assert {*keys} == {text["sliding_window"], 32768} and keys.count(32768) == text["num_hidden_layers"] // 6
    gemma = open_source(str(write_headers("Gemma4TextConfig", tmp_path / "gemma4")))
    model = gemma.config, gemma.widths.dense_layers, gemma.shapes
    more, less = (whole_model("flops", *model, context) for context in (8193, 8192))
    full, heads = gemma.config["layer_types"].count("full_attention"), gemma.config["num_attention_heads"]
    assert more - less == 2 * full * heads * 2 * 512  # numbers of a head, twice as many as in layers with windows
    assert dense_kv_bytes(gemma.folder, value_bytes=2) == 4 * 4 * (512 * full + 256 * (len(model[1]) - full))
    edit_json(gemma.folder / "config.json", num_kv_shared_layers=6)  # a step reads what they share once per layer
    (gemma.folder / "tokenizer.json").write_text("{}")
    options = ["--sparsity", "0.2", "--on", "h100-80gb", "--context-length", "131072", "--concurrency", "1"]
    printed = passed(
        invoke("prune", gemma.folder, "--dry-run", "-o", tmp_path / "out", "--data", "none", *options)
    ).stdout
    stated = re.search(r"instead of ([\d.]+) GB", printed)
    keys = attended(gemma.config, 131072)
    cache = 16 * sum(map(mul, (512 if number == 131072 else 256 for number in keys), keys))
    assert stated and float(stated[1]) * 1e9 == pytest.approx(2 * numbers_read(*model[::2])[0] + cache, rel=0.01)
    falcon = open_source(str(write_headers("FalconConfig", tmp_path / "falcon")))
    assert whole_model("flops", falcon.config, falcon.widths.dense_layers, falcon.shapes, 0) > 2 * 65024 * 4544


def test_the_flops_of_experts_whose_number_the_config_leaves_to_its_class(tmp_path: Path) -> None:
    """The pages read the config of the pruned folder, the dry run that of transformers' class."""
    folder = write_model("glm4_moe", tmp_path)
    edit_json(folder / "config.json", num_experts_per_tok=None)  # 8 of its 8 experts, by default
    source = open_source(str(folder))
    written, layers = pruned_config(read_config(folder), source.widths), source.widths.layers
    of_pages, planned = (whole_model("flops", config, layers, source.shapes, 0) for config in (written, source.config))
    weights = [prod(shape) for name, shape in source.shapes.items() if len(shape) > 1 and "embed_tokens" not in name]
    assert of_pages == planned == 2 * sum(weights)


def test_a_dry_run_measures_a_step(tiny_model: Path, tmp_path: Path) -> None:
    options = ["--sparsity", "0.1,0.3", "--batch-size", "2", "--seq-len", "64"]
    text = dry_run(tiny_model, tmp_path, *options)
    needs = r"memory: about .* for the model and its teacher, .* are free\ntext: 975 steps of 2 × 64 tokens, 124,800 "
    assert re.search(needs, text), text
    needs = r"^time: about [\d.]+ \w+: 1,300 steps of [\d.]+ \w+ and trials of .* as \d+, measured"
    assert re.search(needs, text, re.MULTILINE), text
