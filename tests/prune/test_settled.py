"""What a run settles before its first step: training mode, learning rate, and the steps that fit into its minutes."""

import dataclasses
import math
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from click.testing import Result
from commands import invoke, passed
from runs import assert_same_weights, die_at

from ddp_prune import fit as fit_module
from ddp_prune import resolve
from ddp_prune.core import weights as trained_weights
from ddp_prune.core.rate import RATES, change, find_rate
from ddp_prune.core.trainer import Trainer
from ddp_prune.fit import MODES, Devices, held_bytes
from ddp_prune.models.source import open_source
from ddp_prune.pools import make_checked_pools
from ddp_prune.recipe import load_recipe
from ddp_prune.resolve import fit_minutes, resolve_training_mode
from ddp_prune.run import Run
from ddp_vllm.checkpoint import read_checkpoint
from ddp_vllm.errors import SettingError

pytestmark = pytest.mark.usefixtures("no_pictures")


def of(model: Path, text: Path) -> list[str]:
    """Return the arguments of a small run without steps and learning rate."""
    sizes = ["--seq-len", "16", "--batch-size", "2", "--heldout-blocks", "4"]
    return [str(model), "--sparsity", "0.4", "--data", str(text), *sizes]


def joined(result: Result) -> str:
    """Return what a command printed, without the breaks of lines."""
    return result.output.replace("\n", " ")


@pytest.mark.parametrize("mode", ["weights", pytest.param("lora", marks=pytest.mark.nightly)])
def test_the_rate_is_found_by_trials_which_leave_no_trace(
    mode: str, tiny_model: Path, tiny_text: Path, tmp_path: Path
) -> None:
    """A run at the rate that was found equals a run that was told the rate; a resumed run does not try again."""

    def run(name: str, *more: str) -> Result:
        options = ["--train", mode, "--steps", "28", "--save-every", "4", "-o", str(tmp_path / name)]
        return invoke("prune", *of(tiny_model, tiny_text), *options, *more)

    die_at(26, lambda: run("found"))
    result = run("found")
    assert "resuming after step 24" in result.output and "held-out loss" not in result.output
    found = read_checkpoint(tmp_path / "found").provenance["learning_rate"]
    assert found["highest"] in RATES[mode] and f"{found['highest']:g}" in found["trials"]
    passed(run("told", "--learning-rate", str(found["highest"])))
    assert_same_weights(tmp_path / "found", tmp_path / "told")


def test_minutes_become_steps_that_a_resumed_run_keeps(
    tiny_model: Path, tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine whose clock tells 0.05 seconds per step; a resumed run does not look at it again."""
    monkeypatch.setattr(resolve, "seconds_a_step", lambda *_: 0.05)
    options = [*of(tiny_model, tiny_text), "--train", "masks", "--minutes", "0.05", "--save-every", "1"]
    run = partial(invoke, "prune", *options, "-o", tmp_path / "out")
    die_at(4, run)
    monkeypatch.setattr(resolve, "seconds_a_step", lambda *_: 9.0)
    result = run()
    assert "resuming after step 4" in result.output, result.output
    recipe = read_checkpoint(tmp_path / "out").provenance["recipe"]
    line = f"0.05 minutes: {recipe['steps']:,} steps of {recipe['batch_size']} × {recipe['seq_len']} tokens"
    assert recipe["steps"] == 60 and line in result.output.replace("\n", " ")
    anew = run("--overwrite")  # nothing is resumed
    assert anew.exit_code == 2 and "minutes is 0.05, enough for 0 steps" in anew.output
    both = run("--overwrite", "--steps", "9")
    assert both.exit_code == 2 and "--steps and --minutes are given" in both.output


@pytest.mark.parametrize(
    ("minutes", "train", "batch", "devices", "shape"),
    [
        (60.0, "masks", 16, 1, (439, 4, 2048)),
        (5.0, "masks", 16, 1, (585, 2, 256)),
        (5.0, "weights", 16, 1, (242, 1, 1024)),
        (0.4, "masks", 16, 1, (46, 2, 256)),
        (0.7, "weights", 16, 1, (22, 2, 256)),
        (0.15, "masks", 16, 1, None),
        (60.0, "masks", 16, 8, (878, 16, 2048)),
        (5.0, "masks", 16, 8, (585, 8, 512)),
        (30.0, "masks", 12, 3, (439, 6, 2048)),
    ],
    ids=[
        "an hour", "minutes", "minutes for weights", "few steps", "a demonstration", "too few", "devices",
        "few minutes for devices", "three devices",
    ],
)  # fmt: skip
def test_tokens_per_step_follow_from_the_time(
    minutes: float, train: str, batch: int, devices: int, shape: tuple[int, int, int] | None
) -> None:
    """On machines that train 1,000 tokens per second and device; every device gets equally many sequences."""
    settings = {"model": "m", "sparsity": 0.2, "minutes": minutes, "batch_size": batch}
    run = Run.alone(load_recipe(None, settings), train=train)
    measure = lambda run: -(-run.recipe.batch_size // devices) * run.recipe.seq_len / 1000.0  # noqa: E731
    if shape:
        assert fit_minutes(run, 1, measure, devices) == shape
    else:
        with pytest.raises(SettingError, match=r"enough for 17 steps of 2 × 256 tokens where 20 are needed; give at"):
            fit_minutes(run, 1, measure)


@pytest.mark.parametrize(
    ("losses", "chosen", "num_trials"),
    [
        ([2.8, 2.79, 2.82, 3.5], 1.6e-4, 4),
        ([2.8, 2.9, 2.7, 2.7], 1e-5, 2),  # above the lowest so far, although below the dense model's
        ([3.1, 2.0, 2.0, 2.0], 2.5e-6, 1),
        ([2.9, 2.9, 2.9, 2.9], 6.4e-4, 4),
        ([2.8, 2.79, math.nan, 2.7], 4e-5, 3),
        ([math.nan, 2.0, 2.0, 2.0], 2.5e-6, 1),
    ],
)
def test_the_highest_rate_below_a_harmful_one_is_taken(losses: list[float], chosen: float, num_trials: int) -> None:
    tried = dict(zip(RATES["weights"][1:], losses, strict=True))
    found = find_rate(RATES["weights"], 3.0, tried.__getitem__)
    assert found.rate == chosen and len(found.losses) == num_trials
    assert f"learning rate {chosen:g}: 10 steps changed the dense model's held-out loss by " in str(found)


def test_a_change_that_rounds_to_nothing_is_none() -> None:
    assert [change(loss, 3.0) for loss in (2.999, 3.0, 3.2, 2.8, math.nan)] == [
        *("+0.00", "+0.00", "+0.20", "-0.20", "no number")
    ]


@pytest.mark.parametrize(
    ("free", "options", "chosen", "said"),
    [
        (10.0, [], ("weights", "adamw"), []),
        (0.8, [], ("weights", "adamw-8bit"), ["masks and weights with adamw requires"]),
        (0.4, [], ("lora", "adamw"), ["masks and weights with adamw-8bit requires"]),
        (0.1, [], ("masks", ""), ["masks and low-rank additions requires"]),
        (0.8, ["--train", "weights", "--optimizer", "adamw"], None, ["adamw-8bit requires", "masks only requires"]),
        (
            0.3,
            ["--train", "weights"],
            None,
            ["adamw-8bit requires", "are free; what fits: masks and low-rank"],
        ),
        (0.8, ["--dtype", "float16", "--train", "weights"], None, ["what fits: masks and low-rank"]),
    ],
    ids=[
        "everything fits",
        "8 bytes fit",
        "low-rank additions fit",
        "only masks fit",
        "the requested mode does not fit",
        "no joint training",
        "no joint training in float16",
    ],
)
def test_the_mode_is_the_first_that_memory_holds(
    free: float, options: list[str], chosen: tuple[str, str] | None, said: list[str], tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    source = open_source(str(tiny_model))
    settings = {options[i][2:]: options[i + 1] for i in range(0, len(options), 2)}
    recipe = load_recipe(None, {"model": str(tiny_model), "sparsity": 0.4, "dtype": "bfloat16", **settings})
    lines, accelerator = list[str](), Accelerator(cpu=True)
    needed = held_bytes(source, MODES[0], 2, 1, teacher=True)
    # the adapters of a tiny model are larger than the model
    monkeypatch.setattr(resolve, "held_bytes", partial(fit_module.held_bytes, rank=1))
    devices = Devices(1, "cpu", free * needed, 1)
    monkeypatch.setattr(trained_weights, "_own_obstacle", lambda _: "")
    choose = partial(resolve_training_mode, recipe, source, {}, devices, accelerator, lines.append)
    if chosen:
        assert choose() == chosen
    else:
        with pytest.raises(SettingError) as raised:
            choose()
        lines.append(str(raised.value))
    assert all(text in lines[-1] for text in said), lines
    monkeypatch.setattr(trained_weights, "_own_obstacle", lambda _: "no compiler")
    if chosen == ("weights", "adamw-8bit"):
        assert choose() == ("lora", "adamw") and lines[-1].endswith("no compiler")
        for refused in (dataclasses.replace(recipe, train="weights", optimizer="adamw-8bit"), recipe):
            with pytest.raises(SettingError, match="no compiler"):  # asked for, or resumed
                resumed = {"train": "weights", "optimizer": "adamw-8bit"}
                resolve_training_mode(refused, source, resumed, devices, accelerator, lines.append)


@pytest.mark.nightly
def test_a_missing_compiler_is_found_before_anything_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchao compiles its step; warnings of torch are no errors of this test."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    accelerator = Accelerator(cpu=True)
    for compiler in ("/nonexistent", "g++"):
        trained_weights._own_obstacle.cache_clear()
        torch._dynamo.reset()
        monkeypatch.setattr(torch._inductor.config.cpp, "cxx", (compiler,))
        obstacle = trained_weights.obstacle_to_8_bits(accelerator)
        assert ("install a C++ compiler" in obstacle and compiler in obstacle) if "/" in compiler else not obstacle
    trained_weights._own_obstacle.cache_clear()


def test_what_happens_once_a_step_is_counted_once(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine that takes a second for a sequence, and five for an optimizer step."""
    recipe = load_recipe(None, {
        "model": str(tiny_model), "sparsity": 0.4, "batch_size": 16, "seq_len": 16, "micro_batch_size": 2,
    })  # fmt: skip
    source, now = open_source(str(tiny_model)), [0.0]

    def step(self: Trainer, number: int) -> dict[str, float]:
        now[0] += 5.0 + sum(len(batch.numbers) for batch in self.batches.step(number))
        assert self.recipe.batch_size == self.batches.size
        return {}

    monkeypatch.setattr(Trainer, "step", step)
    monkeypatch.setattr(resolve, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    accelerator = Accelerator(cpu=True)
    head_unit, pools = make_checked_pools(recipe, source, source.shapes)
    for batch in (16, 2, 1):
        run = Run.alone(dataclasses.replace(recipe, batch_size=batch, micro_batch_size=min(batch, 2)), train="masks")
        assert resolve.seconds_a_step(run, source, head_unit, pools, accelerator) == 5.0 + batch


def test_weights_that_were_harmed_are_reported_on_each_text(tiny_model: Path, tiny_text: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("Rain fell on the harbour while the boats waited. " * 200, encoding="utf-8")

    def run(name: str, rate: str) -> Result:
        options = ["--train", "weights", "--steps", "12", "--learning-rate", rate, "--watch", str(other)]
        return invoke("prune", *of(tiny_model, tiny_text), *options, "-o", tmp_path / name)

    harmed, sound = run("harmed", "0.3"), run("sound", "1e-5")
    assert harmed.exit_code == sound.exit_code == 0, (harmed.output, sound.output)
    assert re.search(f"perplexity on held-out text of {other}: dense [0-9.]+ → pruned [0-9.]+", joined(sound))
    assert f"on {other} training the weights did harm" in joined(harmed)
    assert "did harm" not in sound.output
    assert read_checkpoint(tmp_path / "sound").provenance["watched"]["other.txt"]["agreement"]["pruned"]["kl"] >= 0
