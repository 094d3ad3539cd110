"""`ddp-vllm study`: budgets that are equal and exact, cells that are measured once, pages and refusals."""

import csv
import json
import math
import shlex
from functools import partial
from pathlib import Path

import pytest
import torch
from click.testing import Result
from commands import assert_refused, invoke, passed

from ddp_prune.core.saved import Unsaved
from ddp_prune.masks_file import read_masks
from ddp_study.scores import Score, even_support
from ddp_study.study import METHODS

pytestmark = pytest.mark.usefixtures("cache")
LAYERS, EXPERTS, CHANNELS, KEPT = 3, 4, 10, 73
WORTH = torch.rand(LAYERS, EXPERTS, CHANNELS, generator=torch.Generator().manual_seed(0))
DENSE = [name for name, method in METHODS.items() if method.suits != "mixtures"]
EXPERT = ["ours", "paper", *(name for name, method in METHODS.items() if method.suits == "mixtures")]


@pytest.mark.parametrize(("scope", "parts"), [("global", 1), ("layer", LAYERS), ("expert", LAYERS * EXPERTS)])
def test_the_budget_is_exact_and_even_and_the_best_stay(scope: str, parts: int) -> None:
    support = even_support(WORTH, KEPT, scope, torch.Generator().manual_seed(0))
    assert support.shape == WORTH.shape and int(support.sum()) == KEPT
    kept, worth = support.view(parts, -1), WORTH.view(parts, -1)
    counts = kept.sum(1)
    assert counts.max() - counts.min() <= 1
    for part in range(parts):
        assert worth[part][kept[part]].min() > worth[part][~kept[part]].max()


@pytest.fixture
def test_text(tmp_path: Path) -> Path:
    path = tmp_path / "test.txt"
    path.write_text("The quick brown fox jumps over lazy clouds. " * 200)
    return path


def run_table(table: str, model: Path, text: Path, test: Path, output: Path, *options: str) -> Result:
    small = ["--steps", "4", "--batch-size", "2", "--seq-len", "16", "--samples", "3"]
    arguments = ["study", table, str(model), "--data", str(text), "--test", str(test), "-o", str(output), *small]
    return invoke(*arguments, *options)


methods = partial(run_table, "methods")


def cells(folder: Path) -> dict[str, dict[str, float]]:
    return {path.stem: json.loads(path.read_text()) for path in (folder / "cells").glob("*.json")}


@pytest.mark.parametrize("kind", ["dense", pytest.param("experts", marks=pytest.mark.nightly)])
def test_every_method_keeps_the_same_number(
    kind: str, tiny_model: Path, tiny_experts: Path, tiny_text: Path, test_text: Path, tmp_path: Path
) -> None:
    """Learned or scored; what cannot be says why."""
    model, names = (tiny_model, DENSE) if kind == "dense" else (tiny_experts, EXPERT)
    other = "camera" if kind == "dense" else "wanda-sp"
    listed = ",".join([*names, other])
    passed(methods(model, tiny_text, test_text, tmp_path / "out", "--sparsity", "0.4", "--methods", listed))
    found = cells(tmp_path / "out")
    expected = {"attn": 7, "mlp": 173} if kind == "dense" else {"experts": 192}
    for name in names:
        masks = read_masks(tmp_path / "out" / "cells" / f"{name}_0.4_0.safetensors")[0]
        assert {each: int((gates > 0).sum()) for each, gates in masks.items()} == expected, name
        assert math.isfinite(found[f"{name}_0.4_0"]["perplexity"]), name
        ones = all(set(gates.unique().tolist()) <= {0.0, 1.0} for gates in masks.values())
        assert ones == isinstance(METHODS[name], Score) or name.startswith("hard-concrete"), name
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
    """And the weights that a row trained are not those of the next row."""
    out, options = tmp_path / "out", ("--sparsity", "0.4", "--methods", "magnitude,random,ours+train=weights,fisher")

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Unsaved, "save", stop)
        assert methods(tiny_model, tiny_text, test_text, out, *options).exit_code == 130
    before = cells(out)
    assert set(before) == {"dense", "magnitude_0.4_0", "random_0.4_0"}
    result = passed(methods(tiny_model, tiny_text, test_text, out, *options))
    assert result.output.count("measured before") == 2 and cells(out).items() >= before.items()
    assert (out / "methods.md").read_text().count("random") and not list((out / "cells").glob("*.run"))
    alone = tmp_path / "alone"
    passed(methods(tiny_model, tiny_text, test_text, alone, "--sparsity", "0.4", "--methods", "fisher"))
    assert cells(alone)["fisher_0.4_0"]["perplexity"] == cells(out)["fisher_0.4_0"]["perplexity"]


def test_scales_of_a_score_are_trained_and_a_masks_file_is_a_method(
    tiny_model: Path, tiny_text: Path, test_text: Path, tmp_path: Path
) -> None:
    """The support of the score stays. A masks file is evaluated as it is, in the column of its sparsity."""
    options = ("--sparsity", "0.4", "--methods", "wanda-sp,ours", "--polish")
    passed(methods(tiny_model, tiny_text, test_text, tmp_path / "one", *options))
    files = {path.stem: path for path in (tmp_path / "one" / "cells").glob("*.safetensors")}
    assert set(files) == {"wanda-sp_0.4_0", "wanda-sp+scales_0.4_0", "ours_0.4_0"}
    support, scales = (read_masks(files[f"{name}_0.4_0"])[0] for name in ("wanda-sp", "wanda-sp+scales"))
    for kind, gates in scales.items():
        assert torch.equal(gates > 0, support[kind] > 0) and gates.unique().numel() > 2
    masks = str(files["wanda-sp_0.4_0"])
    options = ("--sparsity", "0.4,0.6", "--methods", masks)
    passed(methods(tiny_model, tiny_text, test_text, tmp_path / "two", *options))
    found = {(cell["method"], cell.get("sparsity")): cell for cell in cells(tmp_path / "two").values()}
    assert found[masks, 0.4]["perplexity"] == cells(tmp_path / "one")["wanda-sp_0.4_0"]["perplexity"]  # type: ignore[index]
    assert "removes 42% and 40%" in str(found[masks, 0.6]["reason"])  # type: ignore[index]


@pytest.mark.nightly
def test_seeds_have_a_spread_a_command_fills_its_cell_and_a_folder_holds_one_study(
    tiny_model: Path, tiny_text: Path, test_text: Path, tmp_path: Path
) -> None:
    out, options = tmp_path / "out", ("--sparsity", "0.4", "--methods", "random,fisher+scope=layer", "--seeds", "0,1")
    passed(methods(tiny_model, tiny_text, test_text, out, *options))
    values = [cells(out)[f"random_0.4_{seed}"]["perplexity"] for seed in (0, 1)]
    assert values[0] != values[1]
    page = (out / "methods.md").read_text()
    assert f"{sum(values) / 2:,.2f} ({min(values):,.2f} to {max(values):,.2f})" in page and "not measured" in page
    before = cells(out)["fisher+scope=layer_0.4_1"]
    (out / "cells" / "fisher+scope=layer_0.4_1.json").unlink()
    passed(invoke(*shlex.split(str(before["command"]))[1:]))
    assert cells(out)["fisher+scope=layer_0.4_1"]["perplexity"] == before["perplexity"]
    again = methods(tiny_model, tiny_text, test_text, out, *options, "--steps", "5")
    assert_refused(again, 2, "has a study with another steps")
    test_text.write_text("Another text, as long as the first one was. " * 200)
    assert_refused(methods(tiny_model, tiny_text, test_text, out, *options), 2, "another text and weights")


REFUSED: dict[str, tuple[list[str], int, list[str]]] = {  # options, exit code, words
    "unknown method": (["--methods", "magic"], 2, ["'magic'", "wanda-sp", "+scales"]),
    "setting of a score": (["--methods", "fisher+steps=5"], 2, ["'steps'", "data, scope"]),
    "weights that are not kept": (["--methods", "lorap+recovered+scales"], 2, ["which are not saved"]),
    "learns on the test text": (["--methods", "ours+data=test.txt"], 2, ["test.txt is training text"]),
    "nothing is kept": (["--sparsity", "0.4,0.99"], 2, ["keeps 0 of 12 attn units"]),
    "short text": (["--test", "short.txt"], 4, ["short.txt has", "tokens", "512"]),
    "another budget": (["--recipe", "params.toml"], 2, ["budget is 'params'"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_studied_is_refused(
    case: str, tiny_model: Path, tiny_text: Path, test_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, code, words = REFUSED[case]
    monkeypatch.chdir(tmp_path)
    Path("short.txt").write_text("too short")
    Path("params.toml").write_text('budget = "params"')
    assert_refused(methods(tiny_model, tiny_text, test_text, tmp_path / "out", *options), code, *words)
    assert not (tmp_path / "out").exists()


ROWS = {"relaxations": 0, "recovery": 2, "cost": 0, "tokens": 0}  # rows that a dense model cannot have, of all
