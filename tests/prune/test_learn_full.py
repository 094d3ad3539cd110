"""Weights that learn while gates close: better than scales alone, written as they were judged, resumed to the bit."""

import math
import weakref
from html import unescape
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from runs import prune
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from ddp_models import loading
from ddp_prune import gates
from ddp_prune.trainer import Trainer
from ddp_text.blocks import load_blocks
from ddp_text.tokens import load_tokenizer
from ddp_training import memory
from ddp_training.loss import losses
from ddp_training.weights import highest_rate
from ddp_vllm.checkpoint import read_checkpoint
from ddp_vllm.cli import main
from ddp_vllm.masks import MASKS_FILE
from ddp_vllm.pages.report import write_report

pytestmark = pytest.mark.usefixtures("no_pictures")
FULL = ["--train", "weights", "--steps", "30"]


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_what_is_written_is_what_was_judged_and_better_than_scales_alone(
    kind: str, tiny_model: Path, tiny_experts: Path, tiny_text: Path, tmp_path: Path
) -> None:
    """Also of stacked experts, whose weights have other names and shapes on disk."""
    model = tiny_model if kind == "dense" else tiny_experts
    assert prune(model, tiny_text, tmp_path / "scales", "--steps", "30").exit_code == 0
    result = prune(model, tiny_text, tmp_path / "full", *FULL)
    assert result.exit_code == 0, result.output
    scales, full = (read_checkpoint(tmp_path / name) for name in ("scales", "full"))
    assert full.provenance["perplexity"]["pruned"] < 0.9 * scales.provenance["perplexity"]["pruned"]
    assert full.provenance["perplexity"]["dense"] == scales.provenance["perplexity"]["dense"]
    assert "trained together with the masks" in (tmp_path / "full" / "README.md").read_text()
    blocks = load_blocks(
        str(tiny_text), load_tokenizer(str(tmp_path / "full")), seq_len=16, train_blocks=2, heldout_blocks=16,
        min_train_blocks=2, seed=0,
    )  # fmt: skip
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "full", trust_remote_code=True)
    judged = torch.tensor(full.provenance["perplexity"]["block_losses"]["pruned"])
    torch.testing.assert_close(torch.tensor(losses(plain, blocks.heldout)), judged, atol=5e-5, rtol=0)


@pytest.mark.parametrize("controller", ["gradual", "alm"])
def test_a_run_that_is_killed_goes_on_to_the_bit(
    controller: str, tiny_model: Path, tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = [*FULL, "--save-every", "4", "--controller", controller]
    assert prune(tiny_model, tiny_text, tmp_path / "whole", *options).exit_code == 0
    step = Trainer.step

    def die(self: Trainer, number: int) -> dict[str, float]:
        if number == 22:  # in the polish
            raise KeyboardInterrupt
        return step(self, number)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", die)
        assert prune(tiny_model, tiny_text, tmp_path / "out", *options).exit_code != 0
    result = prune(tiny_model, tiny_text, tmp_path / "out", *options)
    assert "resuming after step 20" in result.output, result.output
    whole, resumed = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "out"))
    assert whole.keys() == resumed.keys() and all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_micro_batches_make_the_same_step(tiny_model: Path, tiny_text: Path, tmp_path: Path) -> None:
    found: list[dict[str, Any]] = []
    for size in ("1", "2"):
        output = tmp_path / size
        options = ["--train", "weights", "--dtype", "float32", "--micro-batch-size", size]
        assert prune(tiny_model, tiny_text, output, *options).exit_code == 0
        found.append(load_file(output / "model.safetensors"))
    for name, tensor in found[0].items():
        torch.testing.assert_close(found[1][name], tensor, atol=2e-4, rtol=0)


def test_what_is_closed_need_not_be_computed(
    tiny_model: Path, tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradients of narrow copies arrive at the weights they were cut from."""
    monkeypatch.setattr(gates, "CHANNEL_BLOCK", 4)
    options = ["--train", "weights", "--dtype", "float32", "--steps", "12", "--head-unit", "query-head"]
    assert prune(tiny_model, tiny_text, tmp_path / "narrow", *options).exit_code == 0
    monkeypatch.setattr("ddp_prune.trainer.narrow_layers", lambda *_: None)
    assert prune(tiny_model, tiny_text, tmp_path / "whole", *options).exit_code == 0
    narrow, whole = (load_file(tmp_path / name / "model.safetensors") for name in ("narrow", "whole"))
    for name, tensor in whole.items():
        torch.testing.assert_close(narrow[name], tensor, atol=2e-4, rtol=0)


@pytest.mark.parametrize(
    ("controller", "share", "chosen"), [("gradual", 0.7, "weights"), ("gradual", 0.0, "masks"), ("alm", 0.7, "masks")]
)
def test_weights_learn_where_memory_holds_it(
    controller: str, share: float, chosen: str, tiny_model: Path, tiny_text: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(memory, "TRAINING_SHARE", share)
    options = ["--train", "auto", "--controller", controller]
    assert prune(tiny_model, tiny_text, tmp_path / "out", *options).exit_code == 0
    assert read_checkpoint(tmp_path / "out").provenance["run"]["train"] == chosen


def test_a_run_keeps_what_it_chose(
    tiny_model: Path, tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that is short later changes nothing."""
    options, step = ["--train", "auto", "--save-every", "2"], Trainer.step

    def die(self: Trainer, number: int) -> dict[str, float]:
        if number == 3:
            raise KeyboardInterrupt
        return step(self, number)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", die)
        prune(tiny_model, tiny_text, tmp_path / "out", *options)
    monkeypatch.setattr(memory, "TRAINING_SHARE", 0.0)
    result = prune(tiny_model, tiny_text, tmp_path / "out", *options)
    assert "resuming after step 2" in result.output and "masks and weights are trained" in result.output, result.output


@pytest.mark.parametrize(
    ("options", "alive"),
    [(["--distillation", "2"], [0, 1, 0, 1] * 2), (["--distillation", "0"], [0, 0, 0, 1, 0, 1])],
    ids=["distilled", "not distilled"],
)
def test_the_models_of_a_size_are_freed_before_the_next(
    options: list[str], alive: list[int], tiny_model: Path, tiny_text: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """How many models are in memory when one is loaded: to prune, a teacher if it has something to say; to recover."""
    load_model, models, found = loading.load_model, list[weakref.ref[Any]](), []

    def load(*arguments: Any) -> Any:
        found.append(sum(each() is not None for each in models))
        model = load_model(*arguments)
        models.append(weakref.ref(model))
        return model

    monkeypatch.setattr(loading, "load_model", load)
    options = ["--train", "weights", "--recover", "0.001", *options]
    result = prune(tiny_model, tiny_text, tmp_path / "out", *options, sparsity="0.2,0.4")
    assert result.exit_code == 0, result.output
    assert found == alive


def test_a_wide_model_learns_more_slowly() -> None:
    """What SmolLM2 learns best by ruins Qwen2.5-0.5B (log 122); low-rank additions were not seen to."""
    assert [highest_rate("full", width) for width in (576, 896, 4096)] == [2e-4, 4e-5, 4e-5]
    assert highest_rate("lora", 896) == highest_rate("lora", 576)


def test_masks_of_joint_training_are_applied_without_what_weights_learned(
    tiny_model: Path, tiny_text: Path, tmp_path: Path
) -> None:
    """The folder then has the dense model's weights, is worse than the pruned one, and terminal and pages say so."""
    assert prune(tiny_model, tiny_text, tmp_path / "full", *FULL).exit_code == 0
    masks = tmp_path / "full" / MASKS_FILE
    result = CliRunner().invoke(main, ["apply", str(tiny_model), "--masks", str(masks), "-o", str(tmp_path / "again")])
    assert result.exit_code == 0, result.output
    (warning,) = (line for line in result.stderr.splitlines() if line.startswith("warning: "))
    assert "weights were trained together with these masks" in warning and "ddp-vllm recover" in warning
    blocks = load_blocks(
        str(tiny_text), load_tokenizer(str(tmp_path / "full")), seq_len=16, train_blocks=2, heldout_blocks=16,
        min_train_blocks=2, seed=0,
    )  # fmt: skip
    pruned, applied = (
        fmean(losses(AutoModelForCausalLM.from_pretrained(tmp_path / name, trust_remote_code=True), blocks.heldout))
        for name in ("full", "again")
    )
    assert applied > pruned + 0.1
    checkpoint = read_checkpoint(tmp_path / "again")
    write_report(checkpoint, tmp_path / "again")
    card, page = (unescape((tmp_path / "again" / name).read_text()) for name in ("README.md", "report.html"))
    for text in (card, page):
        assert "the dense model's, although the masks were learned while weights were trained" in text
        assert "trained together with the masks" not in text
    stated = read_checkpoint(tmp_path / "full").provenance["perplexity"]
    assert stated["pruned"] == pytest.approx(math.exp(pruned), rel=1e-3)
    assert "perplexity" not in checkpoint.provenance and f"{stated['pruned']:.2f}" not in card + page


def test_masks_of_frozen_weights_are_applied_without_a_warning(pruned: Path, tiny_model: Path, tmp_path: Path) -> None:
    """What the pruned folder was measured at is not said of the new one."""
    arguments = ["apply", str(tiny_model), "--masks", str(pruned / MASKS_FILE), "-o", str(tmp_path / "again")]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0 and result.stderr == ""
    card = (tmp_path / "again" / "README.md").read_text()
    assert "frozen while the masks were learned" in card and "ddp-vllm eval --text FILE" in card
    assert "perplexity" in read_checkpoint(pruned).provenance
    assert "perplexity" not in read_checkpoint(tmp_path / "again").provenance
