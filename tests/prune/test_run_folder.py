"""The folder of a run: the five cases of what a command finds, who may write there, and what reaches the disk."""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from accelerate import Accelerator
from click.testing import Result
from commands import assert_refused, passed
from runs import assert_same_weights, die_at, edit_json, edit_weights, prune, small_files
from safetensors.torch import save_file

from ddp_prune import jobs
from ddp_prune.recipe import Recipe
from ddp_prune.run_folder import RunFolder, check_run_folder, find_record, inputs_of
from ddp_vllm.errors import OutputError

RECIPE = Recipe(model="m", sparsity=0.5, steps=6)
TENSORS = {"z.mlp": torch.ones(4), "rate": torch.tensor(7, dtype=torch.bfloat16), "open": torch.tensor([True, False])}

pytestmark = pytest.mark.usefixtures("cache", "no_pictures")


@pytest.fixture
def work(tiny_model: Path, tiny_text: Path, tmp_path: Path) -> Path:
    """A folder with a model and a text."""
    shutil.copytree(tiny_model, tmp_path / "model")
    shutil.copyfile(tiny_text, tmp_path / "text [v2].jsonl")
    return tmp_path


def _prune(work: Path, *more: str) -> Result:
    return prune(work / "model", work / "text [v2].jsonl", work / "out", "--save-every", "2", *more)


def test_a_run_of_the_same_command_resumes_and_an_output_alone_is_refused(work: Path) -> None:
    passed(_prune(work))
    assert_refused(_prune(work), 5, "out exists", "--overwrite")
    (work / "out").rename(work / "anew")
    die_at(4, lambda: _prune(work))
    assert sorted(path.name for path in (work / "out.run").iterdir()) == ["metrics.jsonl", "run.json", "state-0-4"]
    result = passed(_prune(work))
    assert "\nresuming after step 4\n" in result.stdout and "search 1/6" not in result.stdout
    assert "[v2]" in result.stdout  # the text's name as it is
    assert_same_weights(work / "out", work / "anew")
    assert not (work / "out.run").exists()


def test_an_interrupted_overwrite_resumes_without_being_told_again(work: Path) -> None:
    passed(_prune(work))
    (work / "out" / "mark").touch()
    die_at(4, lambda: _prune(work, "--overwrite", "--seed", "1"))
    assert (work / "out" / "mark").exists()  # until the new one is there
    assert "resuming after step 4" in passed(_prune(work, "--seed", "1")).stdout
    assert not (work / "out" / "mark").exists()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--seed", "1"], "seed 0 instead of 1"),
        (["--sparsity", "0.3"], "sparsity 0.4 instead of 0.3"),
        (["--train", "lora"], "train 'masks' instead of 'lora'"),
        (["--sparsity", "0.2,0.4"], "1 sizes instead of 2"),
    ],
)
def test_a_run_of_another_recipe_is_refused_before_torch_is_asked_and_given_up_by_overwrite(
    more: list[str], words: str, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    die_at(4, lambda: _prune(work))
    with monkeypatch.context() as patch:
        patch.setattr(jobs, "prune", None)
        assert_refused(_prune(work, *more), 5, "out.run holds an interrupted run", words, "--overwrite")
    result = passed(_prune(work, *more, "--overwrite"))
    assert "resuming" not in result.stdout and not (work / "out.run").exists()


@pytest.mark.parametrize("changed", ["text", "weights", "tokenizer"])
def test_a_run_on_other_inputs_is_refused_and_given_up_by_overwrite(changed: str, work: Path) -> None:
    die_at(4, lambda: _prune(work))
    if changed == "text":
        text = work / "text [v2].jsonl"
        text.write_text(text.read_text().replace("fox", "cat"))
    elif changed == "weights":
        edit_weights(work / "model", lambda weights: weights["model.layers.1.mlp.up_proj.weight"].mul_(1.5))
    else:
        edit_json(work / "model" / "tokenizer_config.json", chat_template="{{ messages }}")
    assert_refused(_prune(work), 5, f"the {changed} changed since", "restore it", "--overwrite")
    assert (work / "out.run" / "state-0-4").exists()
    result = passed(_prune(work, "--overwrite"))
    assert "resuming" not in result.stdout and "search 1/6" in result.stdout
    assert len((work / "out" / "ddp_metrics.jsonl").read_text().splitlines()) == 6


def test_a_run_that_was_committed_is_removed(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed between the rename of the output and the deletion of the run."""
    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "remove", Mock(side_effect=KeyboardInterrupt))
        assert _prune(work).exit_code == 130
    written = (work / "out" / "model.safetensors").stat().st_mtime_ns
    assert "out was written before" in passed(_prune(work)).stdout
    assert (work / "out" / "model.safetensors").stat().st_mtime_ns == written and not (work / "out.run").exists()


def test_inputs_are_text_weights_config_and_tokenizer(tmp_path: Path) -> None:
    config, tokenizer, weights = (tmp_path / name for name in ("config.json", "tokenizer.json", "model.safetensors"))
    for file in (config, tokenizer):
        file.write_text("{}")
    tensors = {"large": torch.zeros(2**20), "small": torch.zeros(3), "empty": torch.zeros(0)}
    save_file(tensors, weights)
    text = torch.arange(6).view(2, 3)

    def inputs(text: torch.Tensor) -> dict[str, Any]:
        return inputs_of({"train": text}, [weights], [config, tokenizer])

    first = inputs(text)
    assert inputs(text.clone()) == first == json.loads(json.dumps(first))
    for other in (text.view(3, 2), text + 1, torch.arange(8).view(2, 4)[:, 1:]):  # at last rows with a gap
        assert inputs(other)["text"] != first["text"]
    os.utime(weights, ns=(0, 0))
    assert inputs(text) == first  # the same weights, downloaded again
    for name in ("large", "small"):
        save_file(tensors | {name: tensors[name] + 1e-6}, weights)
        assert inputs(text)["weights"] != first["weights"]
    save_file({"other": tensors["large"], "small": tensors["small"], "empty": tensors["empty"]}, weights)
    assert inputs(text)["weights"] != first["weights"]
    for file, what in ((config, "config"), (tokenizer, "tokenizer")):
        file.write_text("{ }")
        assert inputs(text)[what] != first[what]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunFolder]:
    """A run that has saved step 3."""
    run = RunFolder(tmp_path / "out", Accelerator(cpu=True))
    with run.open([RECIPE], overwrite=False):
        run.begin({"train": "masks", "optimizer": ""}, {"text": "a"}, shared_by=1)
        run.save(0, 3, dict(TENSORS), {"loss": [1.0, 0.5]}, ends_search=False)
        yield run


def test_a_state_is_read_as_it_was_written(run: RunFolder) -> None:
    filled = torch.zeros(4)
    saved = run.start_size(0, lambda name: filled if name == "z.mlp" else None)
    assert saved and saved.step == 3 and saved.extra == {"loss": [1.0, 0.5]}
    assert saved.tensors["z.mlp"] is filled and saved.tensors.keys() == TENSORS.keys()
    assert all(torch.equal(saved.tensors[name], value) for name, value in TENSORS.items())
    assert saved.tensors["rate"].dtype == torch.bfloat16
    assert (run.folder.stat().st_mode | (run.folder / "run.json").stat().st_mode) & 0o077 == 0  # its owner's alone


def test_the_latest_state_and_the_end_of_the_search_are_kept(run: RunFolder) -> None:
    """Of a size family: the next size starts from the end of the search."""
    for step, ends_search in ((4, True), (5, False), (6, False)):
        run.save(0, step, {"z.mlp": torch.full((2,), float(step))}, {}, ends_search=ends_search)
    assert sorted(path.name for path in run.folder.glob("state-*")) == ["state-0-4", "state-0-6"]
    saved = run.start_size(1, lambda _: None)
    assert saved and saved.step == 4 and saved.tensors["z.mlp"].tolist() == [4.0, 4.0]
    with pytest.raises(OutputError, match="previous size's search is not in"):
        run.start_size(2, lambda _: None)


def test_how_a_run_saves_decides_nothing_and_another_version_is_no_run(run: RunFolder) -> None:
    output = run.output
    for same in (RECIPE, replace(RECIPE, save_every=7), replace(RECIPE, train="masks"), replace(RECIPE, shard=True)):
        assert find_record(output, [same], overwrite=False)
    assert find_record(output, [replace(RECIPE, sparsity=0.3)], overwrite=True) == {}
    stored = json.loads((run.folder / "run.json").read_text())
    for damaged in (
        "[]",
        "{",
        '{"record": {}}',
        "",
        json.dumps(stored | {"record": stored["record"] | {"latest": ""}}),
    ):
        (run.folder / "run.json").write_text(damaged)
        with pytest.raises(OutputError, match="damaged"):
            find_record(output, [RECIPE], overwrite=False)
        assert find_record(output, [RECIPE], overwrite=True) == {}


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
        run.start_size(0, lambda _: None)
    path.unlink()
    with pytest.raises(OutputError, match="is damaged"):
        run.start_size(0, lambda _: None)


def test_8_bit_moments_belong_to_a_number_of_processes(run: RunFolder) -> None:
    run.begin({"train": "weights", "optimizer": "adamw"}, {"text": "a"}, shared_by=2)
    run.begin({"train": "weights", "optimizer": "adamw-8bit"}, {"text": "a"}, shared_by=2)
    with pytest.raises(OutputError, match="among 2 processes, not 3; start as many"):
        run.begin({"train": "weights", "optimizer": "adamw-8bit"}, {"text": "a"}, shared_by=3)


def test_links_where_a_run_would_be_kept_are_refused(tmp_path: Path) -> None:
    """What is appended to or truncated must not lie elsewhere."""
    (tmp_path / "thesis.txt").write_text("years of work")
    (tmp_path / "out.run").mkdir()
    for name in ("metrics.jsonl", "lock", "run.json", "state-0-3"):
        (tmp_path / "out.run" / name).symlink_to(tmp_path / "thesis.txt")
        with pytest.raises(OutputError, match=f"{name}, which is a link"):
            check_run_folder(tmp_path / "out")
        (tmp_path / "out.run" / name).unlink()
    (tmp_path / "out.run").rmdir()
    (tmp_path / "out.run").symlink_to(tmp_path)
    with pytest.raises(OutputError, match="which is a link"):
        check_run_folder(tmp_path / "out")


def test_a_folder_that_no_run_wrote_stays(work: Path) -> None:
    (work / "out.run").mkdir()
    for name in ("metrics.jsonl", "thesis.txt"):
        (work / "out.run" / name).write_text("years of work")
    assert_refused(_prune(work), 5, str(work / "out.run"), "thesis.txt", "move it away")
    assert (work / "out.run" / "thesis.txt").read_text() == "years of work"
    shutil.rmtree(work / "out.run")
    (work / "out.run").write_text("a file")
    assert _prune(work).exit_code == 5 and (work / "out.run").read_text() == "a file"


def test_one_process_works_on_a_run_and_what_a_killed_one_left_is_no_hindrance(work: Path) -> None:
    """A process that was killed leaves its lock, one on a full disk half a state."""
    (work / "out.run" / "state-0-2").mkdir(parents=True)
    for name in ("lock", ".run.json.12345678.tmp", "metrics.jsonl", "state-0-2/half"):
        (work / "out.run" / name).write_text("left behind")
    with open(work / "out.run" / "lock") as lock:  # locks are of open files, so this one counts as another process's
        fcntl.flock(lock, fcntl.LOCK_EX)
        result = _prune(work)
    assert_refused(result, 5, f"another process works on {work / 'out.run'}")
    assert "search" not in result.stdout and not (work / "out").exists()
    passed(_prune(work))
    assert sorted(path.name for path in work.iterdir()) == ["model", "out", "text [v2].jsonl"]


def test_a_full_disk_is_one_line_and_keeps_the_last_state(run: RunFolder) -> None:
    large = {"z.mlp": torch.ones(10**6)}
    for write in (lambda: run.save(0, 6, large, {}, ends_search=False), lambda: run.log({"note" * 10**5: 1.0})):
        with small_files(100_000), pytest.raises(OutputError) as caught:
            write()
        message = str(caught.value)
        assert str(run.folder) in message and "make room" in message and "\n" not in message
    again = RunFolder(run.output, run.accelerator)
    again.record = find_record(run.output, [RECIPE], overwrite=False)
    saved = again.start_size(0, lambda _: None)
    assert saved and saved.step == 3


def test_metrics_of_a_run_that_resumes_end_with_its_state(run: RunFolder) -> None:
    """Also on a full disk; the last line was cut off with the process."""
    for step in (1, 2, 3, 4, 5):
        run.log({"step": step, "x" * 100: 0.0})
    with open(run.metrics, "a") as file:
        file.write('{"step": 6, "no')
    with small_files(150):
        run.start_size(0, lambda _: None)
    assert [json.loads(line)["step"] for line in run.metrics.read_text().splitlines()] == [1, 2, 3]
    for damaged in ("[]", '{"steps": 2}', '{"step": "2"}', "\x00"):
        run.metrics.write_text(f'{{"step": 1}}\n{damaged}\n{{"step": 2}}\n')
        run.start_size(0, lambda _: None)
        assert run.metrics.read_text() == '{"step": 1}\n'
