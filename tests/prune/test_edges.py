"""Outputs without a name, devices, trackers, speakers, sizes and lengths at the edge of what commands take."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import seams
import torch
from commands import assert_refused, invoke, passed
from runs import SMALL, edit_json, edit_weights, prune
from seams import die_at

from ddp_vllm.errors import TrainingError
from ddp_vllm.masks import MASKS_FILE

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_pictures")]


@pytest.mark.parametrize("output", ["", ".", "/", "..", "x/.."])
def test_an_output_without_a_name_is_refused(
    output: str, pruned: Path, tiny_model: Path, tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an unset variable gives it."""
    monkeypatch.chdir(tmp_path)
    commands: dict[str, list[Any]] = {
        "prune": ["prune", tiny_model, "--sparsity", "0.4", "--data", tiny_text, *SMALL],
        "recover": ["recover", pruned, "--tokens", "64"],
        "apply": ["apply", tiny_model, "--masks", pruned / MASKS_FILE],
        "convert": ["convert", tiny_model],
    }
    for words in commands.values():
        code, line = (5, "has no name of its own") if output else (2, "--output is empty")
        assert_refused(invoke(*words, "-o", output), code, line)


@pytest.mark.parametrize("device", ["xpu", "npu", "hpu"])
def test_a_device_that_is_not_supported_is_refused(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = SimpleNamespace(type=device)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: named)
    with pytest.raises(TrainingError, match=f"torch computes on {device}, which ddp-vllm does not support"):
        seams.devices.make_accelerator(tmp_path / "out", None)


def test_a_tracker_is_closed_after_ctrl_c(
    tiny_model: Path, tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = list[bool]()
    monkeypatch.setattr(seams.jobs, "finish_run", lambda _: closed.append(True))
    die_at(3, lambda: prune(tiny_model, tiny_text, tmp_path / "out"))
    assert closed == [True]


def test_sizes_that_differ_in_the_seventh_digit_have_folders_of_their_own(tmp_path: Path) -> None:
    recipes = [seams.Recipe(model="m", sparsity=size) for size in (0.2, 0.3000001, 0.3000002)]
    names = [folder.name for folder in seams.jobs.folders_of(recipes, tmp_path)]
    assert names == ["sparsity-0.2", "sparsity-0.3000001", "sparsity-0.3000002"]


@pytest.mark.parametrize(
    ("speaker", "role"),
    [("assistant_1", "assistant"), ("human_0", "user"), ("User2", "user"), ("gpt-4o", "assistant"), ("bot_12", "")],
)
def test_an_ordinal_of_a_speaker_is_set_aside(speaker: str, role: str, tokenizer: Any) -> None:
    notes = seams.Notes()
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    turns = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    turns.insert(2 if role == "user" else 1, {"role": speaker, "content": "said"})
    text = seams.document({"messages": turns}, tokenizer, notes).text
    assert f"<{role or 'assistant'}>" in text and (not role or not any("unknown" in note for note in notes.counts))
    if role:
        assert f"<{role}>said" in text


def test_masks_of_another_model_are_applied_with_a_warning(
    pruned: Path, tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    words = ["--masks", pruned / MASKS_FILE, "-o"]
    passed(invoke("apply", tiny_model, *words, tmp_path / "same"))
    assert "was made for other weights" not in caplog.text
    other = Path(shutil.copytree(tiny_model, tmp_path / "other"))
    edit_weights(other, lambda weights: weights["model.norm.weight"].mul_(2))
    passed(invoke("apply", other, *words, tmp_path / "out"))
    assert "was made for other weights" in caplog.text


def test_text_is_not_evaluated_beyond_the_positions_of_a_model(
    pruned: Path, tiny_model: Path, tiny_text: Path, tmp_path: Path
) -> None:
    """By default too, as `prune` refuses it."""
    folders = [Path(shutil.copytree(folder, tmp_path / name)) for folder, name in ((pruned, "p"), (tiny_model, "d"))]
    for folder in folders:
        edit_json(folder / "config.json", max_position_embeddings=512)
    words = ["eval", folders[0], "--against", folders[1], "--text", tiny_text, "-o", tmp_path / "out"]
    assert_refused(invoke(*words), 2, "--max-length is 2048, but", "takes 512; lower --max-length")
    assert_refused(invoke(*words, "--max-length", "513"), 2, "--max-length is 513")
