"""`ddp-vllm study methods`: budgets that are equal and exact, cells that are measured once, pages and refusals."""

import csv
import json
import math
import shlex
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from runs import assert_refused

from ddp_prune import study
from ddp_prune.export import read_masks
from ddp_prune.methods import METHODS
from ddp_prune.methods.method import Score, choose, even_support
from ddp_prune.recipe import AlmSettings, Recipe
from ddp_prune.run_state import RunState
from ddp_vllm.cli import main

pytestmark = pytest.mark.usefixtures("cache")
LAYERS, EXPERTS, CHANNELS, KEPT = 3, 4, 10, 73
WORTH = torch.rand(LAYERS, EXPERTS, CHANNELS, generator=torch.Generator().manual_seed(0))
DENSE = [name for name, method in METHODS.items() if method.suits != "mixtures"]
EXPERT = [name for name, method in METHODS.items() if method.suits != "dense"]


@pytest.mark.parametrize(("scope", "parts"), [("global", 1), ("layer", LAYERS), ("expert", LAYERS * EXPERTS)])
def test_the_budget_is_exact_and_even_and_the_best_stay(scope: str, parts: int) -> None:
    support = even_support(WORTH, KEPT, scope)
    assert support.shape == WORTH.shape and int(support.sum()) == KEPT
    kept, worth = support.view(parts, -1), WORTH.view(parts, -1)
    counts = kept.sum(1)
    assert counts.max() - counts.min() <= 1
    for part in range(parts):
        assert worth[part][kept[part]].min() > worth[part][~kept[part]].max()


def test_each_module_type_has_a_budget_of_its_own() -> None:
    gates = choose({"attn": torch.rand(2, 6), "mlp": 100 + torch.rand(2, 50)}, 0.75, "layer")
    assert gates["attn"].sum(1).tolist() == [5, 4] and gates["mlp"].sum(1).tolist() == [38, 37]


@pytest.fixture
def test_text(tmp_path: Path) -> Path:
    path = tmp_path / "test.txt"
    path.write_text("The quick brown fox jumps over lazy clouds. " * 200)
    return path


def methods(model: Path, text: Path, test: Path, output: Path, *options: str) -> Result:
    small = ["--steps", "4", "--batch-size", "2", "--seq-len", "16", "--samples", "3"]
    arguments = ["study", "methods", str(model), "--data", str(text), "--test", str(test), "-o", str(output), *small]
    return CliRunner().invoke(main, [*arguments, *options])


def cells(folder: Path) -> dict[str, dict[str, float]]:
    return {path.stem: json.loads(path.read_text()) for path in (folder / "cells").glob("*.json")}


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_every_method_keeps_the_same_number(
    kind: str, tiny_model: Path, tiny_experts: Path, tiny_text: Path, test_text: Path, tmp_path: Path
) -> None:
    """Learned or scored; what cannot be says why."""
    model, names = (tiny_model, DENSE) if kind == "dense" else (tiny_experts, EXPERT)
    other = "camera" if kind == "dense" else "wanda-sp"
    listed = ",".join([*names, other])
    result = methods(model, tiny_text, test_text, tmp_path / "out", "--sparsity", "0.4", "--methods", listed)
    assert result.exit_code == 0, (result.output, result.exception)
    found = cells(tmp_path / "out")
    expected = {"attn": 7, "mlp": 173} if kind == "dense" else {"experts": 192}
    for name in names:
        masks = read_masks(tmp_path / "out" / "cells" / f"{name}_0.4_0.safetensors")[0]
        assert {each: int((gates > 0).sum()) for each, gates in masks.items()} == expected, name
        assert math.isfinite(found[f"{name}_0.4_0"]["perplexity"]), name
        ones = all(set(gates.unique().tolist()) <= {0.0, 1.0} for gates in masks.values())
        assert ones == isinstance(METHODS[name], Score) or name == "hard-concrete", name
    assert set(found[f"{other}_0.4_0"]) == {"method", "sparsity", "seed", "reason", "source", "is_search", "command"}
    page = (tmp_path / "out" / "methods.html").read_text()
    assert str(found[f"{other}_0.4_0"]["reason"]).partition(";")[0] in page and "<svg" in page
    assert "The paper: learned masks" in page and f"paper {found['paper_0.4_0']['perplexity']:.2f}, " in page
    with open(tmp_path / "out" / "methods.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["method"] for row in rows} >= {"dense", *names, other}


def test_a_cell_is_measured_once_and_an_interruption_loses_one(
    tiny_model: Path, tiny_text: Path, test_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, options = tmp_path / "out", ("--sparsity", "0.4,0.6", "--methods", "magnitude,random,ours")
    save = RunState.save

    def stop(self: RunState, step: int, *rest: object) -> None:
        save(self, step, *rest)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RunState, "save", stop)
        assert methods(tiny_model, tiny_text, test_text, out, *options).exit_code == 130
    before = cells(out)
    assert set(before) == {"dense", "magnitude_0.4_0", "magnitude_0.6_0", "random_0.4_0", "random_0.6_0"}
    result = methods(tiny_model, tiny_text, test_text, out, *options)
    assert result.exit_code == 0, result.output
    assert result.output.count("measured before") == 4 and cells(out).items() >= before.items()
    assert (out / "methods.md").read_text().count("random") and not list((out / "cells").glob("*.run"))
    whole = methods(tiny_model, tiny_text, test_text, tmp_path / "whole", *options)
    assert whole.exit_code == 0
    for name, cell in cells(tmp_path / "whole").items():
        assert cells(out)[name]["perplexity"] == cell["perplexity"]


def test_seeds_are_shown_with_their_spread(tiny_model: Path, tiny_text: Path, test_text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = methods(
        tiny_model, tiny_text, test_text, out, "--sparsity", "0.4", "--methods", "random", "--seeds", "0,1"
    )
    assert result.exit_code == 0, result.output
    values = [cells(out)[f"random_0.4_{seed}"]["perplexity"] for seed in (0, 1)]
    assert values[0] != values[1]
    shown = f"{sum(values) / 2:,.2f} ({min(values):,.2f} to {max(values):,.2f})"
    assert shown in (out / "methods.md").read_text() and "not measured" in (out / "methods.md").read_text()


def test_scales_of_a_score_learn_and_its_support_stays(
    tiny_model: Path, tiny_text: Path, test_text: Path, tmp_path: Path
) -> None:
    """In rows beside the scores, by a flag or a name; evenly chosen ones stay even."""
    options = ("--sparsity", "0.4", "--methods", "wanda-sp,ours", "--polish")
    result = methods(tiny_model, tiny_text, test_text, tmp_path / "out", *options)
    assert result.exit_code == 0, (result.output, result.exception)
    files = {path.stem: read_masks(path)[0] for path in (tmp_path / "out" / "cells").glob("*.safetensors")}
    assert set(files) == {"wanda-sp_0.4_0", "wanda-sp+scales_0.4_0", "ours_0.4_0"}
    for kind, gates in files["wanda-sp+scales_0.4_0"].items():
        assert torch.equal(gates > 0, files["wanda-sp_0.4_0"][kind] > 0) and gates.unique().numel() > 2


def test_a_masks_file_is_a_method(tiny_model: Path, tiny_text: Path, test_text: Path, tmp_path: Path) -> None:
    """Judged as it is, in the column of its sparsity."""
    options = ("--sparsity", "0.4,0.6", "--methods")
    assert methods(tiny_model, tiny_text, test_text, tmp_path / "one", *options, "wanda-sp").exit_code == 0
    masks = tmp_path / "one" / "cells" / "wanda-sp_0.4_0.safetensors"
    result = methods(tiny_model, tiny_text, test_text, tmp_path / "two", *options, str(masks))
    assert result.exit_code == 0, (result.output, result.exception)
    judged = {(cell["method"], cell.get("sparsity")): cell for cell in cells(tmp_path / "two").values()}
    expected = cells(tmp_path / "one")["wanda-sp_0.4_0"]["perplexity"]
    assert judged[str(masks), 0.4]["perplexity"] == expected  # type: ignore[index]
    assert "removes 42% and 40%" in str(judged[str(masks), 0.6]["reason"])  # type: ignore[index]


REFUSED: dict[str, tuple[list[str], int, list[str]]] = {  # options, exit code, words
    "unknown method": (["--methods", "magic"], 2, ["'magic'", "wanda-sp", "+scales"]),
    "scales of a search": (["--methods", "ours+scales"], 2, ["'ours+scales'"]),
    "missing masks": (["--methods", "none.safetensors"], 2, ["'none.safetensors'"]),
    "no number": (["--seeds", "one"], 2, ["seeds is 'one'"]),
    "no sparsity": (["--sparsity", "0"], 2, ["sparsity is 0"]),
    "nothing is kept": (["--sparsity", "0.4,0.99"], 2, ["keeps 0 of 12 attn units"]),
    "short text": (["--test", "short.txt"], 4, ["short.txt has", "tokens", "512"]),
    "no text": (["--test", "none.txt"], 4, ["none.txt cannot be read"]),
    "another budget": (["--recipe", "params.toml"], 2, ["budget is 'params'"]),
    "uneven numbers": (["--recipe", "align.toml"], 2, ["align is 32"]),
    "judged by what it learns on": (["--data", "test.txt"], 2, ["test.txt is learned on"]),
    "no seed": (["--seeds", "0,-1"], 2, ["seed is -1"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input(
    case: str, tiny_model: Path, tiny_text: Path, test_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, code, words = REFUSED[case]
    monkeypatch.chdir(tmp_path)
    Path("short.txt").write_text("too short")
    Path("params.toml").write_text('budget = "params"')
    Path("align.toml").write_text("align = 32")
    assert_refused(methods(tiny_model, tiny_text, test_text, tmp_path / "out", *options), code, *words)
    assert not (tmp_path / "out").exists()


def test_a_folder_holds_one_study(tiny_model: Path, tiny_text: Path, test_text: Path, tmp_path: Path) -> None:
    out, options = tmp_path / "out", ("--sparsity", "0.4", "--methods", "random")
    assert methods(tiny_model, tiny_text, test_text, out, *options).exit_code == 0
    again = methods(tiny_model, tiny_text, test_text, out, *options, "--steps", "5")
    assert_refused(again, 2, "holds a study with another steps")
    test_text.write_text("Another text, as long as the first one was. " * 200)
    assert_refused(methods(tiny_model, tiny_text, test_text, out, *options), 2, "another text and weights")


def test_a_command_of_a_row_fills_that_cell(tiny_model: Path, tiny_text: Path, test_text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert methods(tiny_model, tiny_text, test_text, out, "--sparsity", "0.4", "--methods", "fisher").exit_code == 0
    before = cells(out)["fisher_0.4_0"]
    (out / "cells" / "fisher_0.4_0.json").unlink()
    assert CliRunner().invoke(main, shlex.split(str(before["command"]))[1:]).exit_code == 0
    assert cells(out)["fisher_0.4_0"]["perplexity"] == before["perplexity"]


def test_the_papers_recipe_is_not_that_of_our_search(tmp_path: Path) -> None:
    alm = AlmSettings(warmup=0.1)
    base = Recipe(model="m", sparsity=0.2, controller="alm", polish=0.0, alm=alm)
    asked = study.Study(recipe=base, test=tmp_path)
    recipes = {name: asked.recipe_of(0.3, 1, **METHODS[name].settings) for name in ("paper", "ours", "paper-polished")}  # type: ignore[union-attr]
    assert all(each.alm == alm and (each.sparsity, each.seed) == (0.3, 1) for each in recipes.values())
    found = {name: (each.controller, each.polish) for name, each in recipes.items()}
    assert found == {"paper": ("alm", 0.0), "ours": ("gradual", 0.35), "paper-polished": ("alm", 0.35)}


def test_the_default_methods_are_all_that_a_reader_expects() -> None:
    assert {"paper", "ours", "lorap", "slimllm", "heapr", "camera"} <= set(study.BY_DEFAULT) <= set(METHODS)
