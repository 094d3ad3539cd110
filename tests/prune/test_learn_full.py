"""Joint training of masks and weights: better than scales alone, written as evaluated, resumed to the bit."""

import math
from html import unescape
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from click.testing import Result
from commands import invoke, passed
from runs import die_at, heldout_of, prune, weights
from transformers import AutoModelForCausalLM

from ddp_prune import resolve
from ddp_prune.core import gates
from ddp_prune.core.loss import losses
from ddp_vllm.checkpoint import read_checkpoint
from ddp_vllm.masks import MASKS_FILE
from ddp_vllm.pages.report import write_report

pytestmark = pytest.mark.usefixtures("no_pictures")


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_what_is_written_is_what_was_judged_and_better_than_scales_alone(
    kind: str, tiny_model: Path, tiny_experts: Path, tiny_text: Path, tmp_path: Path
) -> None:
    """Also of stacked experts, whose weights have other names and shapes on disk."""
    model, perplexities = tiny_model if kind == "dense" else tiny_experts, []
    for train in ("masks", "weights", "lora"):
        passed(prune(model, tiny_text, tmp_path / train, "--steps", "30", "--train", train))
        perplexities.append(stated := read_checkpoint(tmp_path / train).provenance["perplexity"])
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / train, trust_remote_code=True)
        found = torch.tensor(losses(plain, heldout_of(tmp_path / train, tiny_text)))
        torch.testing.assert_close(found, torch.tensor(stated["block_losses"]["pruned"]), atol=5e-5, rtol=0)
    masks, full, lora = perplexities
    assert full["pruned"] < 0.9 * masks["pruned"] and lora["pruned"] < masks["pruned"]
    assert masks["dense"] == full["dense"] == lora["dense"]
    assert "trained together with the masks" in (tmp_path / "weights" / "README.md").read_text()
    assert "plus low-rank additions, which" in (tmp_path / "lora" / "README.md").read_text()


def test_neither_micro_batches_nor_closed_units_that_are_not_computed_change_a_step(
    tiny_model: Path, tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradients of narrow copies arrive at the weights they were cut from."""
    monkeypatch.setattr(gates, "CHANNEL_BLOCK", 4)
    options = ["--train", "weights", "--dtype", "float32", "--steps", "12", "--head-unit", "query-head"]

    def trained(name: str, *more: str) -> dict[str, Any]:
        passed(prune(tiny_model, tiny_text, tmp_path / name, *options, *more))
        return weights(tmp_path / name)

    narrow, cut = trained("narrow"), trained("cut", "--micro-batch-size", "1")
    monkeypatch.setattr("ddp_prune.core.trainer.narrow_layers", lambda *_: None)
    for name, tensor in trained("whole").items():
        torch.testing.assert_close(narrow[name], tensor, atol=2e-4, rtol=0)
        torch.testing.assert_close(cut[name], tensor, atol=2e-4, rtol=0)


@pytest.mark.parametrize(
    ("controller", "share", "chosen"), [("gradual", 0.7, "weights"), ("gradual", 0.0, "masks"), ("alm", 0.7, "masks")]
)
def test_weights_are_trained_where_memory_holds_it_and_a_resumed_run_keeps_its_choice(
    controller: str, share: float, chosen: str, tiny_model: Path, tiny_text: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def run() -> Result:
        options = ["--train", "auto", "--controller", controller, "--save-every", "2"]
        return prune(tiny_model, tiny_text, tmp_path / "out", *options)

    monkeypatch.setattr(resolve, "TRAINING_SHARE", share)
    die_at(3, run)
    monkeypatch.setattr(resolve, "TRAINING_SHARE", 0.7 - share)
    result = passed(run())
    assert "resuming after step 2" in result.output
    assert read_checkpoint(tmp_path / "out").provenance["run"]["train"] == chosen


def test_masks_of_joint_training_are_applied_without_what_weights_learned(
    tiny_model: Path, tiny_text: Path, tmp_path: Path
) -> None:
    """The folder then has the dense model's weights, is worse than the pruned one, and terminal and pages say so."""
    options = ["--train", "weights", "--steps", "30"]
    passed(prune(tiny_model, tiny_text, tmp_path / "full", *options))
    masks = tmp_path / "full" / MASKS_FILE
    result = passed(invoke("apply", tiny_model, "--masks", masks, "-o", tmp_path / "again"))
    (warning,) = (line for line in result.stderr.splitlines() if line.startswith("warning: "))
    assert "weights were trained together with these masks" in warning and "ddp-vllm recover" in warning
    heldout = heldout_of(tmp_path / "full", tiny_text)
    pruned, applied = (
        fmean(losses(AutoModelForCausalLM.from_pretrained(tmp_path / name, trust_remote_code=True), heldout))
        for name in ("full", "again")
    )
    assert applied > pruned + 0.1
    checkpoint = read_checkpoint(tmp_path / "again")
    write_report(checkpoint, tmp_path / "again")
    card, page = (unescape((tmp_path / "again" / name).read_text()) for name in ("README.md", "report.html"))
    for text in (card, page):
        assert "those of the dense model, although the masks were learned together with trained weights" in text
        assert "trained together with the masks" not in text
    stated = read_checkpoint(tmp_path / "full").provenance["perplexity"]
    assert stated["pruned"] == pytest.approx(math.exp(pruned), rel=1e-3)
    assert "perplexity" not in checkpoint.provenance and f"{stated['pruned']:.2f}" not in card + page
