"""Several sizes from one search: nested, each as its recipe says, from every place where it was killed."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from latency_profiles import written
from runs import SMALL, assert_refused, prune, weights

from ddp_prune.export import read_masks
from ddp_prune.read_recipe import family, load_recipes
from ddp_prune.recipe import Recipe
from ddp_prune.trainer import Trainer
from ddp_vllm.checkpoint import read_checkpoint
from ddp_vllm.cli import main
from ddp_vllm.errors import SettingError
from ddp_vllm.masks import MASKS_FILE

pytestmark = pytest.mark.usefixtures("no_pictures")
SIZES = "0.2,0.4,0.6"
NAMES = ["sparsity-0.2", "sparsity-0.4", "sparsity-0.6"]


def test_the_steps_of_a_family_are_those_of_its_largest_cut_and_short_polishes() -> None:
    last = Recipe(model="m", sparsity=0.5, steps=1000, polish=0.35)
    sizes = [0.1, 0.2, 0.3, 0.4, 0.5]
    recipes = family(last, sizes)
    assert [recipe.search_steps for recipe in recipes] == [130, 260, 390, 520, 650]
    assert [recipe.after_steps for recipe in recipes] == [0, 130, 260, 390, 520]
    assert [recipe.after for recipe in recipes] == [0.0, *sizes[:-1]] and [each.size for each in recipes] == sizes
    assert sum(recipe.steps - recipe.after_steps for recipe in recipes) == 1.3 * last.steps
    two = family(last, [0.2, 0.5])
    assert [recipe.polish_steps for recipe in two] == [325, 325] and two[-1].search_steps == last.search_steps
    assert [recipe.polish_steps for recipe in family(Recipe(model="m", sparsity=0.5, polish=0.1), sizes[-2:])] == [
        100
    ] * 2
    with pytest.raises(SettingError, match=r"leaves none for sparsity 0\.1"):
        family(Recipe(model="m", sparsity=0.5, steps=3), sizes)
    assert len(load_recipes(None, {"model": "m", "sparsity": 0.2})) == 1
    speeds = load_recipes(None, {"model": "m", "speedup": [1.5, 1.1], "profile": "p"})
    assert [(each.speedup, each.budget) for each in speeds] == [(1.1, "latency"), (1.5, "latency")]


@pytest.mark.parametrize("learn", ["scales", "full"])
def test_sizes_are_nested_and_exact(learn: str, tiny_model: Path, tiny_text: Path, tmp_path: Path) -> None:
    """Several times as many steps as sizes; every folder is a checkpoint of its own."""
    options = ["--steps", "24", "--learn", learn]
    result = prune(tiny_model, tiny_text, tmp_path / "out", *options, sparsity=SIZES)
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == NAMES
    kept = []
    for name, share in zip(NAMES, (0.2, 0.4, 0.6), strict=True):
        provenance = read_checkpoint(tmp_path / "out" / name).provenance
        assert provenance["recipe"]["sparsity"] == share and provenance["recipe"]["learn"] == learn
        gates, _ = read_masks(tmp_path / "out" / name / MASKS_FILE)
        kept.append({kind: values > 0 for kind, values in gates.items()})
        for kind, support in kept[-1].items():
            assert int(support.sum()) == round((1 - share) * support.numel()), kind
    for larger, smaller in pairwise(kept):
        assert all((smaller[kind] <= larger[kind]).all() for kind in larger)
    again = prune(tiny_model, tiny_text, tmp_path / "out", *options, sparsity=SIZES)
    assert again.exit_code == 0 and again.output.count("was learned before") == 3, again.output


@pytest.mark.parametrize("learn", ["scales", "full"])
def test_a_family_goes_on_to_the_bit_wherever_it_was_killed(
    learn: str, tiny_model: Path, tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first search, in a polish, before the second size has saved, in the last."""
    options = ["--steps", "24", "--learn", learn, "--save-every", "2"]
    assert prune(tiny_model, tiny_text, tmp_path / "whole", *options, sparsity=SIZES).exit_code == 0
    step, calls = Trainer.step, [0]

    def die(self: Trainer, number: int) -> dict[str, float]:
        calls[0] += 1
        if calls[0] in (4, 9, 13, 24):
            raise KeyboardInterrupt
        return step(self, number)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", die)
        results = [prune(tiny_model, tiny_text, tmp_path / "out", *options, sparsity=SIZES) for _ in range(5)]
    assert [result.exit_code == 0 for result in results] == [False] * 4 + [True], [each.output for each in results]
    for name in NAMES:
        whole, resumed = weights(tmp_path / "whole" / name), weights(tmp_path / "out" / name)
        assert whole.keys() == resumed.keys() and all(torch.equal(whole[each], resumed[each]) for each in whole), name


def test_what_is_no_family_is_refused(tiny_model: Path, tiny_text: Path, tmp_path: Path) -> None:
    for more, sparsity, said in (
        (["--controller", "alm"], SIZES, "passes no sizes"),
        ([], "0.2,0.2", "numbers that differ"),
        ([], "0.2,1.5", "between 0 and 1"),
    ):
        assert_refused(prune(tiny_model, tiny_text, tmp_path / "out", *more, sparsity=sparsity), 2, said)
    result = prune(tiny_model, tiny_text, tmp_path / "out", sparsity="0.2,much")
    assert result.exit_code == 2 and "several by commas" in result.output


@pytest.fixture
def profile(tiny_model: Path, tmp_path: Path) -> Path:
    """Of a machine on which heads and channels of the tiny model cost as in `latency_profiles`."""
    return written(tmp_path, config=json.loads((tiny_model / "config.json").read_text()), multiple=16)


def test_speedups_are_a_family_too(profile: Path, tiny_model: Path, tiny_text: Path, tmp_path: Path) -> None:
    """Every size is predicted to be as fast as was asked for, and says so."""
    options = ["--speedup", "1.1,1.2", "--context", "256", "--profile", str(profile), "--other-machine"]
    arguments = ["prune", str(tiny_model), "--data", str(tiny_text), "-o", str(tmp_path / "out"), *SMALL, *options]
    result = CliRunner().invoke(main, [*arguments, "--steps", "20"])
    assert result.exit_code == 0, result.output
    for asked in (1.1, 1.2):
        checkpoint = read_checkpoint(tmp_path / "out" / f"speedup-{asked}")
        latency = checkpoint.provenance["latency"]
        assert asked <= latency["speedup"] < 1.05 * asked
        assert all(layer.intermediate_size % 16 == 0 for layer in checkpoint.layers)
        assert f"**predicted**: {latency['speedup']:.2f}" in (checkpoint.folder / "README.md").read_text()


def test_a_profile_of_another_machine_or_model_is_refused(
    profile: Path, tiny_model: Path, tiny_text: Path, tmp_path: Path
) -> None:
    options = ["--budget", "latency", "--profile", str(profile)]
    assert_refused(prune(tiny_model, tiny_text, tmp_path / "out", *options), 2, "machine with cpu a CPU")
    options = ["--budget", "latency", "--profile", str(written(tmp_path)), "--other-machine", "--context", "256"]
    assert_refused(prune(tiny_model, tiny_text, tmp_path / "out", *options), 2, "num_hidden_layers is 4, here it is 3")
