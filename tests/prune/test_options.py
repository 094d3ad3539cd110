"""The options of prune and apply: which there are, that a recipe's fields make them, and what they refuse."""

import json
import re
from pathlib import Path

import pytest
from commands import assert_refused, invoke, passed
from latency_profiles import written
from runs import prune
from seams import Recipe, load_recipes, open_source, plan, verbs

from ddp_vllm.costs import table_note
from ddp_vllm.errors import SettingError

pytestmark = pytest.mark.usefixtures("cache", "no_pictures")


def test_options_reach_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They override those of the file; options that are not given override nothing."""
    seen: list[Recipe] = []

    def keep(*arguments: object) -> list[Recipe]:
        seen.extend(load_recipes(*arguments))  # type: ignore[arg-type]
        raise SettingError("enough")

    monkeypatch.setattr(verbs, "load_recipes", keep)
    (tmp_path / "r.toml").write_text('tp = 4\nsteps = 7\nheldout_blocks = 3\ncontroller = "alm"\n[alm]\nmu_end = 0.1\n')
    more = ["--scope", "layer", "--polish", "0", "--shard", "--align", "128", "--recipe", str(tmp_path / "r.toml")]
    assert_refused(prune("m", "t", tmp_path / "out", *more), 2, "enough")
    settings = {"model": "m", "data": "t", "scope": "layer", "polish": 0.0, "shard": True, "align": 128, "tp": 4}
    settings |= {"heldout_blocks": 3, "steps": 6, "budget": "units"}
    assert {name: getattr(seen[0], name) for name in settings} == settings and seen[0].alm.mu_end == 0.1
    for budget, amount in ((), "70K"), (("--budget", "flops"), "1.5G"), (("--budget", "kv-bytes"), "3e3"):
        assert_refused(prune("m", "t", tmp_path / "out", "--target", amount, *budget, "--sparsity", "0"), 2, "enough")
    assert [(recipe.budget, recipe.target) for recipe in seen[1:]] == [
        ("params", 70_000.0), ("flops", 1.5e9), ("kv-bytes", 3000.0),
    ]  # fmt: skip


SETTINGS: dict[str, tuple[list[str], list[str]]] = {  # options, words of the refusal; limits: test_recipe, test_pools
    "two sizes": (["--target", "70K"], ["--sparsity and --target are given"]),
    "sequences too long": (["--seq-len", "2049"], ["--seq-len is 2049", "takes 2,048", "lower --seq-len"]),
    "a budget in every expert": (["--scope", "expert"], ["scope is 'expert'", "not a mixture of experts"]),
    "whole experts of a dense model": (["--whole-experts"], ["not a mixture of experts", "no whole experts"]),
    "shards in one process": (["--shard"], ["there is one", "accelerate launch"]),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_settings_that_cannot_be_met(case: str, tiny_model: Path, tiny_text: Path, tmp_path: Path) -> None:
    options, words = SETTINGS[case]
    assert_refused(prune(tiny_model, tiny_text, tmp_path / "out", *options), 2, *words)
    assert list(tmp_path.iterdir()) == []


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
    shapes = dict(open_source(str(tiny_model)).shapes)
    assert table_note(shapes) and not table_note(shapes | {"model.layers.0.mlp.up_proj.weight": [4096, 64]})


def test_a_dry_run_measures_a_step(tiny_model: Path, tmp_path: Path) -> None:
    options = ["--sparsity", "0.1,0.3", "--batch-size", "2", "--seq-len", "64"]
    text = dry_run(tiny_model, tmp_path, *options)
    needs = r"memory: about .* for the model and its teacher, .* are free\ntext: 975 steps of 2 × 64 tokens, 124,800 "
    assert re.search(needs, text), text
    needs = r"^time: about [\d.]+ \w+: 1,300 steps of [\d.]+ \w+ and trials of .* as \d+, measured"
    assert re.search(needs, text, re.MULTILINE), text
