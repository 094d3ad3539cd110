"""The folder of a run: what a command finds there, from where it resumes to the bit, and what reaches the disk."""

import fcntl
import json
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import seams
import torch
from accelerate import Accelerator
from click.testing import Result
from commands import assert_refused, passed
from runs import assert_same_weights, edit_weights, prune, small_files
from seams import RunFolder, Trainer, die_at, jobs, resolve

from ddp_vllm.checkpoint import read_checkpoint
from ddp_vllm.errors import OutputError
from ddp_vllm.masks import MASKS_FILE

RECIPE = seams.Recipe(model="m", sparsity=0.5, steps=6)
TENSORS = {"z.mlp": torch.ones(4), "rate": torch.tensor(7, dtype=torch.bfloat16), "open": torch.tensor([True, False])}

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cache", "no_pictures")]


TEXT = "text [v2].jsonl"


@pytest.fixture
def work(tiny_model: Path, tiny_text: Path, tmp_path: Path) -> Path:
    """A folder with a model and a text."""
    shutil.copytree(tiny_model, tmp_path / "model")
    shutil.copyfile(tiny_text, tmp_path / TEXT)
    return tmp_path


def run_in(work: Path, *more: str) -> Result:
    return prune(work / "model", work / TEXT, work / "out", "--save-every", "2", *more)


def family_in(work: Path, *more: str, text: str = TEXT, sizes: str = "0.2,0.4", output: str = "out") -> Result:
    return prune(work / "model", work / text, work / output, "--steps", "12", *more, sparsity=sizes)


ALM = ["--controller", "alm", "--recipe", "alm.toml"]
KILLED = [  # options, the step before which the run is killed: in the search, at its end, and in the polish
    ([], 3), (["--train", "weights"], 5), pytest.param(["--train", "lora"], 5, marks=pytest.mark.nightly),
    ([*ALM, "--train", "weights"], 2), pytest.param([*ALM, "--train", "weights"], 5, marks=pytest.mark.nightly),
    (["--train", "weights", "--optimizer", "adamw-8bit", "--dtype", "bfloat16"], 3),  # rounded at random
]  # fmt: skip


@pytest.mark.parametrize(("more", "step"), KILLED, ids=str)
@torch.compiler.set_stance("force_eager")  # to compile the step in 8 bits takes half a minute
def test_a_killed_run_resumes_to_the_bit(
    more: list[str], step: int, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the same command; an output alone is refused."""
    monkeypatch.chdir(work)
    (work / "alm.toml").write_text("[alm]\nlearning_rate = 0.1\n")
    saved = step // 2 * 2
    passed(run_in(work, *more))
    assert_refused(run_in(work, *more), 5, "out exists", "--overwrite")
    (work / "out").rename(work / "anew")
    die_at(step, lambda: run_in(work, *more))
    left = [path.name for path in (work / "out.run").iterdir()]
    assert {"run.json", f"state-0-{saved}"} <= {*left} and any(name.startswith("metrics-") for name in left)
    result = passed(run_in(work, *more))
    assert f"\nresuming after step {saved}\n" in result.stdout and "search 1/6" not in result.stdout
    assert "[v2]" in result.stdout  # the text's name as it is
    assert_same_weights(work / "out", work / "anew")
    assert not (work / "out.run").exists()


@pytest.mark.parametrize(("controller", "share", "chosen"), [("gradual", 0.7, "weights"), ("alm", 0.7, "masks")])
def test_weights_are_trained_where_memory_holds_it_and_a_resumed_run_keeps_its_choice(
    controller: str, share: float, chosen: str, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolve, "TRAINING_SHARE", share)
    die_at(3, lambda: run_in(work, "--train", "auto", "--controller", controller))
    monkeypatch.setattr(resolve, "TRAINING_SHARE", 0.7 - share)
    result = passed(run_in(work, "--train", "auto", "--controller", controller))
    assert "resuming after step 2" in result.output
    assert read_checkpoint(work / "out").provenance["run"]["train"] == chosen


def test_an_interrupted_overwrite_resumes_without_being_told_again(work: Path) -> None:
    """But the permission holds for its command: the run is not discarded later without it."""
    text = (work / TEXT).read_text()
    passed(run_in(work))
    (work / "out" / "mark").touch()
    die_at(4, lambda: run_in(work, "--overwrite", "--seed", "1"))
    assert (work / "out" / "mark").exists()  # until the new one is there
    (work / TEXT).write_text(text.replace("fox", "cat"))
    assert_refused(run_in(work, "--seed", "1"), 5, "the text changed since the run", "--overwrite")
    (work / TEXT).write_text(text)
    assert "resuming after step 4" in passed(run_in(work, "--seed", "1")).stdout
    assert not (work / "out" / "mark").exists() and not (work / "out.run").exists()


def test_a_run_of_another_recipe_or_of_other_inputs_is_refused_and_given_up_by_overwrite(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another recipe before torch is asked. A mistake in the new command, or one that shows when the model is loaded,
    costs nothing of the old run."""
    die_at(4, lambda: run_in(work))
    with monkeypatch.context() as patch:
        patch.setattr(jobs, "prune", None)
        assert_refused(run_in(work, "--seed", "1"), 5, "seed 0 instead of 1", "--overwrite")
        assert_refused(run_in(work, "--sparsity", "0.2,0.4"), 5, "1 sizes instead of 2", "--overwrite")
    text = (work / TEXT).read_text()
    (work / TEXT).write_text(text.replace("fox", "cat"))
    assert_refused(run_in(work), 5, "the text changed since", "--overwrite")
    (work / TEXT).write_text("Too short.")
    wrong = [run_in(work, "--overwrite")]
    (work / TEXT).write_text(text)
    wrong.append(run_in(work, "--overwrite", "--seq-len", "4096"))
    with monkeypatch.context() as patch:
        patch.setattr(resolve, "load", seams.out_of_memory)
        wrong.append(run_in(work, "--overwrite", "--seed", "7"))
    assert [result.exit_code for result in wrong] == [4, 2, 6], [result.output for result in wrong]
    die_at(1, lambda: run_in(work, "--overwrite", "--seed", "1"))  # before its first save
    assert "resuming after step 4" in die_at(5, lambda: run_in(work)).output
    (metrics,) = (work / "out.run").glob("metrics-*.jsonl")
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == [1, 2, 3, 4, 5]
    edit_weights(work / "model", lambda weights: weights["model.layers.1.mlp.up_proj.weight"].mul_(1.5))
    assert_refused(run_in(work), 5, "the weights changed since", "--overwrite")
    assert (work / "out.run" / "state-0-4").exists()
    result = passed(run_in(work, "--overwrite"))
    assert "resuming" not in result.stdout and not (work / "out.run").exists()


def test_a_run_that_was_committed_is_removed(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed between the rename of the output and the deletion of the run."""
    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "remove", Mock(side_effect=KeyboardInterrupt))
        assert run_in(work).exit_code == 130
    written = (work / "out" / "model.safetensors").stat().st_mtime_ns
    assert "out was written before" in passed(run_in(work)).stdout
    assert (work / "out" / "model.safetensors").stat().st_mtime_ns == written and not (work / "out.run").exists()
    # killed after the deletion: nothing says any more whose output it is
    for left in ([], ["lock"]):
        (work / "out.run").mkdir()
        for name in left:
            (work / "out.run" / name).touch()
        assert_refused(run_in(work), 5, "out exists", "--overwrite")
        assert not (work / "out.run").exists()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunFolder]:
    """A run that has saved step 3."""
    run = RunFolder(tmp_path / "out", Accelerator(cpu=True))
    with run.open([RECIPE], overwrite=False):
        run.begin({"train": "masks", "optimizer": ""}, {"text": "a"}, shared_by=1)
        run.save(3, dict(TENSORS), {"loss": [1.0, 0.5]})
        yield run


def test_a_state_is_read_as_it_was_written_and_the_latest_and_the_end_of_the_search_are_kept(run: RunFolder) -> None:
    """Of a size family: the next size starts from the end of the search."""
    filled = torch.zeros(4)
    saved = run.resume(lambda name: filled if name == "z.mlp" else None)
    assert saved and saved.step == 3 and saved.extra == {"loss": [1.0, 0.5]}
    assert saved.tensors["z.mlp"] is filled and saved.tensors.keys() == TENSORS.keys()
    assert all(torch.equal(saved.tensors[name], value) for name, value in TENSORS.items())
    assert saved.tensors["rate"].dtype == torch.bfloat16
    assert (run.folder.stat().st_mode | (run.folder / "run.json").stat().st_mode) & 0o077 == 0  # its owner's alone
    run.search = 4
    for step in (4, 5, 6):
        run.save(step, {"z.mlp": torch.full((2,), float(step))}, {})
    assert sorted(path.name for path in run.folder.glob("state-*")) == ["state-0-4", "state-0-6"]
    run.size = 1
    saved = run.resume(lambda _: None)
    assert saved and saved.step == 4 and saved.tensors["z.mlp"].tolist() == [4.0, 4.0]
    run.size = 2
    with pytest.raises(OutputError, match="previous size's search is not in"):
        run.resume(lambda _: None)


@pytest.mark.parametrize("place", [30, -1, None])
def test_a_flipped_bit_or_a_missing_end_of_a_state_is_found(place: int | None, run: RunFolder) -> None:
    (path,) = (run.folder / "state-0-3").iterdir()
    content = bytearray(path.read_bytes())
    if place is None:
        del content[100:]
    else:
        content[place] ^= 1
    path.write_bytes(content)
    with pytest.raises(OutputError, match=r"is damaged \(state-0-3\)"):
        run.resume(lambda _: None)
    path.unlink()
    with pytest.raises(OutputError, match="is damaged"):
        run.resume(lambda _: None)


def test_a_folder_that_no_run_wrote_stays(work: Path) -> None:
    """Nor is a link followed: what is appended to or truncated must not lie elsewhere."""
    run, thesis = work / "out.run", work / "out.run" / "thesis.txt"
    run.mkdir()
    thesis.write_text("years of work")
    assert_refused(run_in(work), 5, str(run), "thesis.txt", "move it away")
    thesis = thesis.rename(work / "thesis.txt")
    for name in ("metrics.jsonl", "lock", "run.json", "state-0-3"):
        (run / name).symlink_to(thesis)
        assert_refused(run_in(work), 5, "is damaged" if name == "run.json" else f"{name}, which is a link")
        (run / name).unlink()
    run.rmdir()
    run.symlink_to(work)
    assert_refused(run_in(work), 5, "which is a link")
    run.unlink()
    run.write_text("a file")
    assert run_in(work).exit_code == 5 and run.read_text() == "a file" and thesis.read_text() == "years of work"


def test_one_process_works_on_a_run_and_what_a_killed_one_left_is_no_hindrance(work: Path) -> None:
    """A process that was killed leaves its lock, one on a full disk half a state."""
    (work / "out.run" / "state-0-2").mkdir(parents=True)
    for name in ("lock", ".run.json.12345678.tmp", "metrics.jsonl", "state-0-2/half"):
        (work / "out.run" / name).write_text("left behind")
    with open(work / "out.run" / "lock") as lock:  # locks are of open files, so this one counts as another process's
        fcntl.flock(lock, fcntl.LOCK_EX)
        result = run_in(work)
    assert_refused(result, 5, f"another process works on {work / 'out.run'}", "wait for it")
    assert "search" not in result.stdout and not (work / "out").exists()
    passed(run_in(work))
    assert sorted(path.name for path in work.iterdir()) == ["model", "out", "text [v2].jsonl"]


def test_a_full_disk_is_one_line_and_keeps_the_last_state(run: RunFolder) -> None:
    large = {"z.mlp": torch.ones(10**6)}
    for write in (lambda: run.save(6, large, {}), lambda: run.log({"note" * 10**5: 1.0})):
        with small_files(100_000), pytest.raises(OutputError, match=r"^[^\n]*make room[^\n]*$") as caught:
            write()
        assert str(run.folder) in str(caught.value)
    again = RunFolder(run.output, run.accelerator)
    again.record = seams.find_record(run.output, [RECIPE], overwrite=False)
    saved = again.resume(lambda _: None)
    assert saved and saved.step == 3


def test_metrics_of_a_run_that_resumes_end_with_its_state(run: RunFolder) -> None:
    """Also on a full disk; the last line was cut off with the process."""
    for step in (1, 2, 3, 4, 5):
        run.log({"step": step, "x" * 100: 0.0})
    with open(run.metrics, "a") as file:
        file.write('{"step": 6, "no')
    with small_files(150):
        run.resume(lambda _: None)
    assert [json.loads(line)["step"] for line in run.metrics.read_text().splitlines()] == [1, 2, 3]
    for damaged in ("[]", '{"steps": 2}', '{"step": "2"}', "\x00"):
        run.metrics.write_text(f'{{"step": 1}}\n{damaged}\n{{"step": 2}}\n')
        run.resume(lambda _: None)
        assert run.metrics.read_text() == '{"step": 1}\n'


NAMES = ["sparsity-0.2", "sparsity-0.4", "sparsity-0.6"]


def test_sizes_that_differ_in_the_seventh_digit_have_folders_of_their_own(tmp_path: Path) -> None:
    recipes = [seams.Recipe(model="m", sparsity=size) for size in (0.2, 0.3000001, 0.3000002)]
    names = [folder.name for folder in jobs.folders_of(recipes, tmp_path)]
    assert names == ["sparsity-0.2", "sparsity-0.3000001", "sparsity-0.3000002"]


@pytest.mark.parametrize("train", ["masks", pytest.param("weights", marks=pytest.mark.nightly)])
def test_sizes_of_a_family_are_nested_and_exact(train: str, work: Path) -> None:
    """Several times as many steps as sizes; every folder is a checkpoint of its own."""
    run = partial(family_in, work, "--train", train, sizes="0.2,0.4,0.6")
    passed(run())
    assert sorted(path.name for path in (work / "out").iterdir()) == NAMES
    kept = []
    for name, share in zip(NAMES, (0.2, 0.4, 0.6), strict=True):
        provenance = read_checkpoint(work / "out" / name).provenance
        assert provenance["recipe"]["sparsity"] == share and provenance["run"]["train"] == train
        gates, _ = seams.read_masks(work / "out" / name / MASKS_FILE)
        kept.append({kind: values > 0 for kind, values in gates.items()})
        for kind, support in kept[-1].items():
            assert int(support.sum()) == round((1 - share) * support.numel()), kind
    for larger, smaller in pairwise(kept):
        assert all((smaller[kind] <= larger[kind]).all() for kind in larger)
    assert_refused(run(), 5, NAMES[0], "exists")


def test_a_killed_family_resumes_to_the_bit(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It saves by time, as by default, and is killed at the first step of the search and in the polish of each size."""
    passed(family_in(work, output="anew"))
    (work / "other.txt").write_text(" ".join(f"rain fell on town {number}." for number in range(900)))
    step, killed = Trainer.step, set[tuple[float, bool]]()

    def die_once(self: Trainer, number: int) -> dict[str, float]:
        place = round(1 - self.pools[0].keep_ratio, 1), number > self.schedule.steps.search
        if place not in killed:
            killed.add(place)
            raise KeyboardInterrupt
        return step(self, number)

    monkeypatch.setattr(Trainer, "step", die_once)
    codes = [family_in(work).exit_code for _ in range(4)]
    last = passed(family_in(work, "--watch", work / "other.txt"))
    assert codes == [130] * 4 and not (work / "out.run").exists()
    assert "sparsity-0.2 was written before; eval --text reads what --watch names now" in " ".join(last.stdout.split())
    for name in NAMES[:2]:
        assert_same_weights(work / "anew" / name, work / "out" / name)


def test_all_folders_of_a_family_are_checked_before_anything_is_trained(
    work: Path, write_texts: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of others, before the text is read; one of the same recipe and other text, before a model is loaded.
    And two families are not written into one folder at once."""
    output = work / "out"
    (output / NAMES[1] / "of others").mkdir(parents=True)
    with monkeypatch.context() as patch:
        patch.setattr(jobs, "read_text", None)
        for more in ([], ["--overwrite"]):
            assert_refused(family_in(work, *more), 5, NAMES[1], "did not write it; choose another folder")
    shutil.rmtree(output / NAMES[1])
    other = write_texts("other.jsonl", [" ".join(f"word {i * j}" for j in range(99)) for i in range(40)])
    met: list[Result] = []
    write = jobs._write

    def meet(*arguments: Any, **options: Any) -> Any:  # while the first writes a size that the second has not
        if not met:
            met.append(family_in(work, text=other.name, sizes="0.3,0.5"))
        return write(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(jobs, "_write", meet)
        passed(family_in(work, text=other.name))
    assert_refused(met[0], 5, "another process works on", "wait for it")
    shutil.rmtree(output / NAMES[0])
    shutil.copy(work / TEXT, other)
    with monkeypatch.context() as patch:
        patch.setattr(jobs, "_learn_size", None)
        assert_refused(family_in(work, text=other.name), 5, NAMES[1], "exists")
    assert [path.name for path in output.iterdir()] == [NAMES[1]]


def test_a_family_is_overwritten_from_other_text_at_once(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the sizes that the interrupted command had written."""
    step = Trainer.step

    def die_in_second(self: Trainer, number: int) -> dict[str, float]:
        if self.schedule.steps.first:
            raise KeyboardInterrupt
        return step(self, number)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", die_in_second)
        assert family_in(work).exit_code == 130
    before = read_checkpoint(work / "out" / NAMES[0]).provenance["run_id"]
    (work / TEXT).write_text("".join((work / TEXT).read_text().splitlines(keepends=True)[:-1]))
    assert_refused(family_in(work), 5, "the text changed since the run")
    passed(family_in(work, "--overwrite"))
    ids = {read_checkpoint(work / "out" / name).provenance["run_id"] for name in NAMES[:2]}
    assert len(ids) == 1 and before not in ids
