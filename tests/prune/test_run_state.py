"""The folder of a run: when it resumes, which files it leaves alone, who may write there, and what reaches the disk."""

import fcntl
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from commands import assert_refused, passed
from runs import die_at, edit_weights, prune, small_files
from safetensors.torch import save_file

from ddp_prune.recipe import Recipe
from ddp_training import fingerprint as fingerprint_module
from ddp_training import run_state
from ddp_training.run_state import RunState, check_run_folders
from ddp_vllm.errors import OutputError

RECIPE = Recipe(model="m", sparsity=0.5, steps=6)


pytestmark = pytest.mark.usefixtures("cache", "no_pictures")


@pytest.fixture
def work(tiny_model: Path, tiny_text: Path, tmp_path: Path) -> Path:
    """A folder with a model and a text."""
    shutil.copytree(tiny_model, tmp_path / "model")
    shutil.copyfile(tiny_text, tmp_path / "text [v2].jsonl")
    return tmp_path


def _prune(work: Path) -> Result:
    return prune(work / "model", work / "text [v2].jsonl", work / "out", "--save-every", "2")


@pytest.mark.parametrize("changed", ["text", "weights"])
def test_other_text_or_weights_start_anew(changed: str, work: Path) -> None:
    die_at(4, lambda: _prune(work))
    assert sorted(path.name for path in (work / "out.run").iterdir()) == ["metrics.jsonl", "state.safetensors"]
    saved = (work / "out.run" / "state.safetensors").read_bytes()
    if changed == "text":
        text = work / "text [v2].jsonl"
        text.write_text(text.read_text().replace("fox", "cat"))
    else:
        edit_weights(work / "model", lambda weights: weights["model.layers.1.mlp.up_proj.weight"].mul_(1.5))
    result = passed(_prune(work))
    assert f"another run was put aside in {work / 'out.run.old'}\n" in result.stdout
    assert "search 1/6" in result.stdout and "resuming after" not in result.stdout
    assert not (work / "out.run").exists() and (work / "out.run.old" / "state.safetensors").read_bytes() == saved
    if changed == "weights":
        return
    anew = {name: (work / "out" / name).read_bytes() for name in ("model.safetensors", "ddp_masks.safetensors")}
    shutil.rmtree(work / "out")
    shutil.rmtree(work / "out.run.old")
    die_at(4, lambda: _prune(work))
    result = _prune(work)  # the same command resumes, and has nothing of the older run
    assert "\nresuming after step 4\n" in result.stdout and "search 1/6" not in result.stdout
    assert "[v2]" in result.stdout  # the text's name as it is
    assert {name: (work / "out" / name).read_bytes() for name in anew} == anew
    assert not list(work.glob("out.run*"))


def test_a_fingerprint_is_of_text_weights_config_and_tokenizer(tmp_path: Path) -> None:
    config, tokenizer, weights = (tmp_path / name for name in ("config.json", "tokenizer.json", "model.safetensors"))
    for file in (config, tokenizer):
        file.write_text("{}")
    tensors = {"large": torch.zeros(2**20), "small": torch.zeros(3), "empty": torch.zeros(0)}
    save_file(tensors, weights)
    text = torch.arange(6).view(2, 3)

    def fingerprint(text: torch.Tensor) -> dict[str, Any]:
        return fingerprint_module.fingerprint([text], [weights], [config, tokenizer])

    first = fingerprint(text)
    assert fingerprint(text.clone()) == first == json.loads(json.dumps(first))
    for other in (text.view(3, 2), text + 1, torch.arange(8).view(2, 4)[:, 1:]):  # at last rows with a gap
        assert fingerprint(other)["text"] != first["text"]
    os.utime(weights, ns=(0, 0))
    assert fingerprint(text) == first  # the same weights, downloaded again
    for name in ("large", "small"):
        save_file(tensors | {name: tensors[name] + 1e-6}, weights)
        assert fingerprint(text)["weights"] != first["weights"]
    save_file({"other": tensors["large"], "small": tensors["small"], "empty": tensors["empty"]}, weights)
    assert fingerprint(text)["weights"] != first["weights"]
    for file, what in ((config, "config"), (tokenizer, "tokenizer")):
        file.write_text("{ }")
        assert fingerprint(text)[what] != first[what]


def _saved(folder: Path, **changes: Any) -> RunState:
    """Return a run that has saved step 3."""
    run = RunState(folder / "out", RECIPE, **changes)
    run.start()
    run.save(3, {"z.mlp": torch.ones(4), "step": torch.tensor(7, dtype=torch.bfloat16), "none": torch.ones(0, 3)}, {})
    assert run.load() is not None
    return run


def test_a_run_of_another_recipe_or_version_is_put_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that lacks a setting or a fingerprint; how often it saves decides nothing."""
    said: list[str] = []
    _saved(tmp_path)
    assert RunState(tmp_path / "out", replace(RECIPE, save_every=7)).load() is not None
    assert RunState(tmp_path / "out", replace(RECIPE, sparsity=0.3)).load() is None
    fewer = {name: value for name, value in RECIPE.to_dict().items() if name != "align"}
    with monkeypatch.context() as patch:
        patch.setattr(Recipe, "to_dict", lambda _: fewer)
        _saved(tmp_path)
    assert RunState(tmp_path / "out", RECIPE).load() is None
    _saved(tmp_path)
    other = RunState(tmp_path / "out", RECIPE, fingerprint={"text": "", "weights": []}, print_line=said.append)
    assert other.load() is None
    other.start()
    assert said == [
        f"text, weights changed since the run in {tmp_path / 'out.run'} was saved: starting anew",
        f"another run was put aside in {tmp_path / 'out.run.old'}",
    ]
    assert [path.name for path in (tmp_path / "out.run.old").iterdir()] == ["state.safetensors"]
    _saved(tmp_path)
    monkeypatch.setattr(run_state, "STATE_FORMAT", run_state.STATE_FORMAT + 1)
    assert RunState(tmp_path / "out", RECIPE).load() is None


@pytest.mark.parametrize("place", [30, -1, None])
def test_a_flipped_bit_or_a_missing_end_of_a_saved_run_is_found(place: int | None, tmp_path: Path) -> None:
    said: list[str] = []
    run = _saved(tmp_path, print_line=said.append)
    content = bytearray(run.state.read_bytes())
    if place is None:
        del content[100:]
    else:
        content[place] ^= 1
    run.state.write_bytes(content)
    assert run.load() is None and "is damaged" in said[-1]


def test_links_where_a_run_would_be_kept_are_refused(tmp_path: Path) -> None:
    """What is appended to or truncated must not lie elsewhere."""
    (tmp_path / "thesis.txt").write_text("years of work")
    (tmp_path / "out.run").mkdir()
    for name in ("metrics.jsonl", "lock", "state.safetensors"):
        (tmp_path / "out.run" / name).symlink_to(tmp_path / "thesis.txt")
        with pytest.raises(OutputError, match=f"{name}, which is a link"):
            check_run_folders(tmp_path / "out")
        (tmp_path / "out.run" / name).unlink()
    (tmp_path / "out.run").rmdir()
    (tmp_path / "out.run").symlink_to(tmp_path)
    with pytest.raises(OutputError, match="which is a link"):
        check_run_folders(tmp_path / "out")


def test_a_run_is_its_owners_alone(tmp_path: Path) -> None:
    run = _saved(tmp_path)
    assert (run.folder.stat().st_mode & 0o777, run.state.stat().st_mode & 0o777) == (0o700, 0o600)


@pytest.mark.parametrize("folder", ["out.run", "out.run.old"])
def test_a_folder_that_no_run_wrote_stays(folder: str, work: Path) -> None:
    (work / folder).mkdir()
    for name in ("metrics.jsonl", "thesis.txt"):
        (work / folder / name).write_text("years of work")
    assert_refused(_prune(work), 5, str(work / folder), "thesis.txt", "move it away")
    assert (work / folder / "thesis.txt").read_text() == "years of work"
    shutil.rmtree(work / folder)
    (work / folder).write_text("a file")
    assert _prune(work).exit_code == 5 and (work / folder).read_text() == "a file"


def test_one_process_works_on_a_run_and_what_a_killed_one_left_is_no_hindrance(work: Path) -> None:
    """A process that was killed leaves its lock, one on a full disk half a state."""
    (work / "out.run").mkdir()
    for name in ("lock", ".state.safetensors.123.tmp", "metrics.jsonl"):
        (work / "out.run" / name).write_text("left behind")
    with open(work / "out.run" / "lock") as lock:  # locks are of open files, so this one counts as another process's
        fcntl.flock(lock, fcntl.LOCK_EX)
        result = _prune(work)
    assert_refused(result, 5, f"another process works on {work / 'out.run'}")
    assert "search" not in result.stdout and not (work / "out").exists()
    result = passed(_prune(work))
    assert "put aside" not in result.stdout
    assert sorted(path.name for path in work.iterdir()) == ["model", "out", "text [v2].jsonl"]


def test_a_full_disk_is_one_line_and_keeps_the_last_state(tmp_path: Path) -> None:
    run = _saved(tmp_path)
    for write in (lambda: run.save(6, {"z.mlp": torch.ones(10**6)}, {}), lambda: run.log({"note" * 10**5: 1.0})):
        with small_files(100_000), pytest.raises(OutputError) as caught:
            write()
        message = str(caught.value)
        assert str(tmp_path / "out.run") in message and "make room" in message and "\n" not in message
    loaded = RunState(tmp_path / "out", RECIPE).load()
    assert loaded is not None and loaded[0] == 3


def test_metrics_of_a_run_that_resumes_end_with_its_state(tmp_path: Path) -> None:
    """Also on a full disk; the last line was cut off with the process."""
    run = RunState(tmp_path / "out", RECIPE)
    run.start()
    for step in (1, 2, 3):
        run.log({"step": step, "x" * 100: 0.0})
    run.save(2, {"z.mlp": torch.ones(2)}, {})
    with open(run.metrics, "a") as file:
        file.write('{"step": 4, "no')
    with small_files(150):
        assert RunState(tmp_path / "out", RECIPE).load() is not None
    run.log({"step": 3})
    assert [json.loads(line)["step"] for line in run.metrics.read_text().splitlines()] == [1, 2, 3]
    for damaged in ("[]", '{"steps": 2}', '{"step": "2"}', "\x00"):
        run.metrics.write_text(f'{{"step": 1}}\n{damaged}\n{{"step": 2}}\n')
        assert RunState(tmp_path / "out", RECIPE).load() is not None
        assert run.metrics.read_text() == '{"step": 1}\n'
