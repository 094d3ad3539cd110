"""Several sizes from one search: nested, each as its recipe says, from every place where it was killed."""

import json
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from commands import assert_refused, invoke, passed
from latency_profiles import written
from runs import SMALL, assert_same_weights, prune

from ddp_prune import jobs
from ddp_prune.core.trainer import Trainer
from ddp_prune.masks_file import read_masks
from ddp_prune.recipe import Recipe
from ddp_prune.run_folder import RunFolder
from ddp_vllm.checkpoint import read_checkpoint
from ddp_vllm.masks import MASKS_FILE

pytestmark = pytest.mark.usefixtures("no_pictures")
SIZES = "0.2,0.4,0.6"
RECIPE = Recipe(model="m", sparsity=0.5)
NAMES = ["sparsity-0.2", "sparsity-0.4", "sparsity-0.6"]


@pytest.mark.parametrize("train", ["masks", "weights"])
def test_sizes_are_nested_and_exact(train: str, tiny_model: Path, tiny_text: Path, tmp_path: Path) -> None:
    """Several times as many steps as sizes; every folder is a checkpoint of its own."""
    options = ["--steps", "12", "--train", train]
    passed(prune(tiny_model, tiny_text, tmp_path / "out", *options, sparsity=SIZES))
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == NAMES
    kept = []
    for name, share in zip(NAMES, (0.2, 0.4, 0.6), strict=True):
        provenance = read_checkpoint(tmp_path / "out" / name).provenance
        assert provenance["recipe"]["sparsity"] == share and provenance["run"]["train"] == train
        gates, _ = read_masks(tmp_path / "out" / name / MASKS_FILE)
        kept.append({kind: values > 0 for kind, values in gates.items()})
        for kind, support in kept[-1].items():
            assert int(support.sum()) == round((1 - share) * support.numel()), kind
    for larger, smaller in pairwise(kept):
        assert all((smaller[kind] <= larger[kind]).all() for kind in larger)
    assert_refused(prune(tiny_model, tiny_text, tmp_path / "out", *options, sparsity=SIZES), 5, NAMES[0], "exists")


@pytest.mark.parametrize(("train", "num_sizes"), [("masks", 2), pytest.param("weights", 3, marks=pytest.mark.nightly)])
def test_a_family_that_saves_by_time_resumes_wherever_it_was_killed(
    train: str, num_sizes: int, tiny_model: Path, tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by default: in every polish, before and after every save, after every size is written, and at the end."""
    sizes, names = (0.2, 0.4, 0.6)[:num_sizes], NAMES[:num_sizes]

    def family(name: str) -> Result:
        options = ["--steps", "12", "--train", train]
        return prune(tiny_model, tiny_text, tmp_path / name, *options, sparsity=",".join(map(str, sizes)))

    passed(family("whole"))
    died: set[Any] = set()

    def die_once(where: Any) -> None:
        if where not in died:
            died.add(where)
            raise KeyboardInterrupt

    def step(self: Trainer, number: int) -> dict[str, float]:
        if number == self.run.steps.search + 1:
            die_once((self.recipe.sparsity, "polish"))
        return Trainer_step(self, number)

    def save(self: RunFolder, size: int, number: int, *state: Any, **ends: bool) -> None:
        die_once((size, number, "before"))
        RunFolder_save(self, size, number, *state, **ends)
        die_once((size, number, "after"))

    def write(*arguments: Any) -> Any:
        checkpoint = jobs_write(*arguments)
        die_once((str(arguments[-1]), "written"))
        return checkpoint

    def remove(self: RunFolder) -> None:
        _ = self.record["states"] and die_once((self.folder.name, "remove"))  # not after an error before any save
        RunFolder_remove(self)

    Trainer_step, jobs_write = Trainer.step, jobs._write
    RunFolder_save, RunFolder_remove = RunFolder.save, RunFolder.remove
    monkeypatch.setattr(Trainer, "step", step)
    monkeypatch.setattr(RunFolder, "save", save)
    monkeypatch.setattr(jobs, "_write", write)
    monkeypatch.setattr(RunFolder, "remove", remove)
    results = _until_done(lambda: family("out"))
    assert {place for place in died if place[-1] == "polish"} == {(size, "polish") for size in sizes}
    # the end of each search but the last, and the last step of each size
    assert len([place for place in died if len(place) == 3]) == 2 * (2 * num_sizes - 1)
    assert len([place for place in died if place[-1] == "written"]) == num_sizes
    assert len(died) == len(results) - 1 and not (tmp_path / "out.run").exists()
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == names
    for name in names:
        assert_same_weights(tmp_path / "whole" / name, tmp_path / "out" / name)


def _until_done(run: Callable[[], Result]) -> list[Result]:
    """Repeat a command while it is interrupted."""
    results = [run()]
    while results[-1].exit_code == 130:
        results.append(run())
    passed(results[-1])
    return results


def test_two_families_are_not_written_into_one_folder_at_once(
    tiny_model: Path, tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second meets the first while it writes a size that the second has not."""
    refused: list[Result] = []
    write = jobs._write

    def meet(*arguments: Any, **options: Any) -> Any:
        if not refused:
            refused.append(prune(tiny_model, tiny_text, tmp_path / "out", "--steps", "12", sparsity="0.3,0.5"))
        return write(*arguments, **options)

    monkeypatch.setattr(jobs, "_write", meet)
    passed(prune(tiny_model, tiny_text, tmp_path / "out", "--steps", "12", sparsity="0.2,0.4"))
    assert_refused(refused[0], 5, "another process works on", "wait for it")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == NAMES[:2]


@pytest.mark.parametrize(
    ("sizes", "more", "said"),
    [
        (SIZES, ["--controller", "alm"], "prunes to one size only"),
        ("0.2,0.2", [], "different numbers"),
    ],
)
def test_what_is_no_family_is_refused(
    sizes: str, more: list[str], said: str, tiny_model: Path, tiny_text: Path, tmp_path: Path
) -> None:
    result = prune(tiny_model, tiny_text, tmp_path / "out", *more, sparsity=sizes)
    assert result.exit_code == 2 and said in result.output


@pytest.fixture
def profile(tiny_model: Path, tmp_path: Path) -> Path:
    """Of a machine on which heads and channels of the tiny model cost as in `latency_profiles`."""
    return written(tmp_path, config=json.loads((tiny_model / "config.json").read_text()), multiple=16)


def test_speedups_are_a_family_too(profile: Path, tiny_model: Path, tiny_text: Path, tmp_path: Path) -> None:
    """Every size is predicted to be as fast as was asked for, and says so."""
    options = ["--speedup", "1.1,1.2", "--context-length", "256", "--profile", profile, "--other-machine"]
    options += [*SMALL, "--steps", "20"]
    passed(invoke("prune", tiny_model, "--data", tiny_text, "-o", tmp_path / "out", *options))
    for asked in (1.1, 1.2):
        checkpoint = read_checkpoint(tmp_path / "out" / f"speedup-{asked}")
        latency = checkpoint.provenance["latency"]
        assert asked <= latency["speedup"] < 1.05 * asked
        assert all(layer.intermediate_size % 16 == 0 for layer in checkpoint.layers)
        assert f"**predicted**: {latency['speedup']:.2f}" in (checkpoint.folder / "README.md").read_text()


def test_all_folders_of_a_family_are_checked_before_anything_is_trained(
    tiny_model: Path, tiny_text: Path, tmp_path: Path, write_texts: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A folder of others, before the text is read; one of the same recipe and other text, before a model is loaded."""

    def family(text: Path, *more: str) -> Result:
        return prune(tiny_model, text, tmp_path / "out", "--steps", "12", *more, sparsity="0.2,0.4")

    (tmp_path / "out" / NAMES[1] / "of others").mkdir(parents=True)
    with monkeypatch.context() as patch:
        patch.setattr(jobs, "read_text", None)
        for more in ([], ["--overwrite"]):
            assert_refused(family(tiny_text, *more), 5, NAMES[1], "did not write it; choose another folder")
    shutil.rmtree(tmp_path / "out" / NAMES[1])
    other = write_texts("other.jsonl", [" ".join(f"word {i * j}" for j in range(99)) for i in range(40)])
    passed(family(other))
    shutil.rmtree(tmp_path / "out" / NAMES[0])
    shutil.copy(tiny_text, other)
    with monkeypatch.context() as patch:
        patch.setattr(jobs, "_learn_size", None)
        assert_refused(family(other), 5, NAMES[1], "exists")
    assert [path.name for path in (tmp_path / "out").iterdir()] == [NAMES[1]]
