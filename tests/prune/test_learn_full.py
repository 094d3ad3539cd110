"""Joint training of masks and weights: better than scales alone, written as evaluated, resumed to the bit."""

import math
import weakref
from collections.abc import Callable
from functools import partial
from html import unescape
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from click.testing import CliRunner, Result
from runs import prune, weights
from transformers import AutoModelForCausalLM

from ddp_models import loading
from ddp_models.source import open_source
from ddp_prune import gates, train
from ddp_prune.rate import RATES, find_rate
from ddp_prune.recipe import load_recipe
from ddp_prune.run import MODES, Run
from ddp_prune.timing import fit_minutes
from ddp_prune.train import mode_bytes, resolve_training_mode
from ddp_prune.trainer import Trainer
from ddp_text.blocks import load_blocks
from ddp_text.tokens import load_tokenizer
from ddp_training import memory
from ddp_training.loss import losses
from ddp_vllm.checkpoint import read_checkpoint
from ddp_vllm.cli import main
from ddp_vllm.errors import SettingError
from ddp_vllm.masks import MASKS_FILE
from ddp_vllm.pages.report import write_report

pytestmark = pytest.mark.usefixtures("no_pictures")
FULL = ["--train", "weights", "--learning-rate", "2e-4", "--steps", "30"]


def heldout_of(folder: Path, text: Path) -> torch.Tensor:
    return load_blocks(
        str(text), load_tokenizer(str(folder)), seq_len=16, train_blocks=2, heldout_blocks=16, min_train_blocks=2,
        seed=0,
    ).heldout  # fmt: skip


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
    heldout = heldout_of(tmp_path / "full", tiny_text)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "full", trust_remote_code=True)
    judged = torch.tensor(full.provenance["perplexity"]["block_losses"]["pruned"])
    torch.testing.assert_close(torch.tensor(losses(plain, heldout)), judged, atol=5e-5, rtol=0)


def die_at(number: int, run: Callable[[], Result]) -> None:
    """Run a command that is interrupted before the step of this number."""
    step = Trainer.step

    def die(self: Trainer, at: int) -> dict[str, float]:
        if at == number:
            raise KeyboardInterrupt
        return step(self, at)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "step", die)
        assert run().exit_code == 130


def test_a_killed_run_of_the_papers_search_resumes_to_the_bit(
    tiny_model: Path, tiny_text: Path, tmp_path: Path
) -> None:
    """The default search is killed in test_family.py."""
    options = [*FULL, "--save-every", "4", "--controller", "alm"]

    def run(name: str) -> Result:
        return prune(tiny_model, tiny_text, tmp_path / name, *options)

    assert run("whole").exit_code == 0
    die_at(22, lambda: run("out"))  # in the polish
    result = run("out")
    assert "resuming after step 20" in result.output, result.output
    whole, resumed = weights(tmp_path / "whole"), weights(tmp_path / "out")
    assert whole.keys() == resumed.keys() and all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_neither_micro_batches_nor_closed_units_that_are_not_computed_change_a_step(
    tiny_model: Path, tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradients of narrow copies arrive at the weights they were cut from."""
    monkeypatch.setattr(gates, "CHANNEL_BLOCK", 4)
    options = [*FULL, "--dtype", "float32", "--steps", "12", "--head-unit", "query-head"]

    def trained(name: str, *more: str) -> dict[str, Any]:
        assert prune(tiny_model, tiny_text, tmp_path / name, *options, *more).exit_code == 0
        return weights(tmp_path / name)

    narrow, cut = trained("narrow"), trained("cut", "--micro-batch-size", "1")
    monkeypatch.setattr("ddp_prune.trainer.narrow_layers", lambda *_: None)
    for name, tensor in trained("whole").items():
        torch.testing.assert_close(narrow[name], tensor, atol=2e-4, rtol=0)
        torch.testing.assert_close(cut[name], tensor, atol=2e-4, rtol=0)


@pytest.mark.parametrize(
    ("controller", "share", "chosen"), [("gradual", 0.7, "weights"), ("gradual", 1e-9, "masks"), ("alm", 0.7, "masks")]
)
def test_weights_are_trained_where_memory_holds_it_and_a_resumed_run_keeps_its_choice(
    controller: str, share: float, chosen: str, tiny_model: Path, tiny_text: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def run() -> Result:
        options = ["--train", "auto", "--controller", controller, "--learning-rate", "1e-4", "--save-every", "2"]
        return prune(tiny_model, tiny_text, tmp_path / "out", *options)

    monkeypatch.setattr(memory, "TRAINING_SHARE", share)
    die_at(3, run)
    monkeypatch.setattr(memory, "TRAINING_SHARE", 0.7 - share)
    result = run()
    assert result.exit_code == 0 and "resuming after step 2" in result.output, result.output
    assert read_checkpoint(tmp_path / "out").provenance["run"]["train"] == chosen


@pytest.mark.parametrize(
    ("options", "alive"),
    [
        (["--distillation", "2"], [0, 1, 0, 1] * 2),
        pytest.param(["--distillation", "0"], [0, 0, 0, 1, 0, 1], marks=pytest.mark.nightly),
    ],
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
    options = [*FULL, "--steps", "8", "--recover", "0.001", *options]
    result = prune(tiny_model, tiny_text, tmp_path / "out", *options, sparsity="0.2,0.4")
    assert result.exit_code == 0, result.output
    assert found == alive


def test_the_rate_is_found_by_trials_which_leave_no_trace(tiny_model: Path, tiny_text: Path, tmp_path: Path) -> None:
    """A run at the rate that was found equals a run that was told the rate; a resumed run does not try again."""
    options = ["--train", "weights", "--steps", "28", "--save-every", "4"]
    run = partial(prune, tiny_model, tiny_text, tmp_path / "found", *options)
    die_at(26, run)  # a trial has 20 steps
    result = run()
    assert "resuming after step 24" in result.output and "held-out KL" not in result.output
    found = read_checkpoint(tmp_path / "found").provenance["learning_rate"]
    assert found["highest"] in RATES and f"{found['highest']:g}" == min(found["trials"], key=found["trials"].get)
    told = ["--learning-rate", str(found["highest"])]
    assert prune(tiny_model, tiny_text, tmp_path / "told", *options, *told).exit_code == 0
    one, other = weights(tmp_path / "found"), weights(tmp_path / "told")
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_minutes_become_steps_that_a_resumed_run_keeps(tiny_model: Path, tiny_text: Path, tmp_path: Path) -> None:
    options = [str(tiny_model), "--sparsity", "0.4", "--data", str(tiny_text), "--seq-len", "16", "--batch-size", "2"]
    options += ["--minutes", "0.05", "--train", "masks", "--save-every", "1", "-o", str(tmp_path / "out")]
    run = partial(CliRunner().invoke, main, ["prune", *options])
    die_at(4, run)
    result = run()
    assert "resuming after step 4" in result.output, result.output
    recipe = read_checkpoint(tmp_path / "out").provenance["recipe"]
    line = f"0.05 minutes: {recipe['steps']:,} steps of {recipe['batch_size']} × {recipe['seq_len']} tokens"
    assert recipe["steps"] >= 50 and line in result.output.replace("\n", " ")
    both = CliRunner().invoke(main, ["prune", *options, "--overwrite", "--steps", "9"])
    assert both.exit_code == 2 and "steps and minutes are given" in both.output


@pytest.mark.parametrize(
    ("minutes", "shape"),
    [(1000.0, (1831, 16, 2048)), (60.0, (439, 4, 2048)), (5.0, (585, 2, 256)), (0.2, None)],
    ids=["much time", "an hour", "minutes", "too few"],
)
def test_tokens_per_step_follow_from_the_time(minutes: float, shape: tuple[int, int, int] | None) -> None:
    """On a machine that trains 1,000 tokens per second."""
    run = Run.alone(load_recipe(None, {"model": "m", "sparsity": 0.2, "minutes": minutes}))
    measure = lambda run: run.recipe.batch_size * run.recipe.seq_len / 1000.0  # noqa: E731
    if shape:
        assert fit_minutes(run, 1, measure) == shape
    else:
        with pytest.raises(SettingError, match=r"enough for 23 steps of 2 × 256 tokens where 50 are needed; give at"):
            fit_minutes(run, 1, measure)


def test_trials_go_downhill_and_stop_where_it_rises() -> None:
    valley = {rate: abs(number - 2) for number, rate in enumerate(RATES)}
    assert find_rate(valley.__getitem__).rate == RATES[2]
    lowest = find_rate({rate: -1.0 / rate for rate in RATES}.__getitem__)
    assert lowest.rate == RATES[0] and set(lowest.divergences) == set(RATES[:3])


@pytest.mark.parametrize(
    ("free", "options", "chosen", "said"),
    [
        (10.0, [], ("weights", "adamw"), []),
        (0.8, [], ("weights", "adamw-8bit"), ["masks and weights with adamw requires"]),
        (0.3, [], ("masks", ""), ["masks and weights with adamw-8bit requires"]),
        (
            0.8,
            ["--train", "weights", "--optimizer", "adamw"],
            None,
            ["masks and weights with adamw-8bit requires", "masks only requires"],
        ),
        (0.3, ["--train", "weights", "--optimizer", "adamw-8bit"], None, ["are free; what fits: masks only requires"]),
    ],
    ids=["everything fits", "8 bytes fit", "only masks fit", "not what was asked for", "no joint training"],
)
def test_the_mode_is_the_first_that_memory_holds(
    free: float, options: list[str], chosen: tuple[str, str] | None, said: list[str], tiny_model: Path,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    source = open_source(str(tiny_model))
    settings = {options[i][2:]: options[i + 1] for i in range(0, len(options), 2)}
    recipe = load_recipe(None, {"model": str(tiny_model), "sparsity": 0.4, **settings})
    needed = mode_bytes(recipe, source, MODES[0], 1)
    monkeypatch.setattr(train, "free_memory", lambda _: free * needed)
    monkeypatch.setattr(memory, "free_memory", lambda _: free * needed)
    lines, accelerator = list[str](), Accelerator(cpu=True)
    resolve = partial(resolve_training_mode, recipe, source, tmp_path / "out", accelerator, lines.append)
    if chosen:
        assert resolve() == chosen
    else:
        with pytest.raises(SettingError) as raised:
            resolve()
        lines.append(str(raised.value))
    assert all(text in lines[-1] for text in said), lines


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
        assert "the dense model's, although the masks were learned while weights were trained" in text
        assert "trained together with the masks" not in text
    stated = read_checkpoint(tmp_path / "full").provenance["perplexity"]
    assert stated["pruned"] == pytest.approx(math.exp(pruned), rel=1e-3)
    assert "perplexity" not in checkpoint.provenance and f"{stated['pruned']:.2f}" not in card + page
