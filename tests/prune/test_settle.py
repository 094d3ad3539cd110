"""What a run settles before its first step: training mode, learning rate, steps that fit into minutes, and memory.

And estimates for GPUs that are not here, which describe the run that would follow.
"""

import dataclasses
import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import seams
import torch
from accelerate import Accelerator
from click.testing import Result
from commands import invoke, passed
from runs import assert_same_weights
from seams import MODES, Devices, Mode, die_at, load_recipe, open_source, resolve

import ddp_vllm
from ddp_vllm.checkpoint import read_checkpoint
from ddp_vllm.errors import SettingError

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_pictures")]
MASKS = Mode("masks", "")


def of(model: Path, text: Path) -> list[object]:
    """Return the arguments of a small run without steps and learning rate."""
    sizes = ["--seq-len", "16", "--batch-size", "2", "--heldout-blocks", "4"]
    return [model, "--sparsity", "0.4", "--data", text, *sizes]


@pytest.mark.parametrize("mode", ["weights", pytest.param("lora", marks=pytest.mark.nightly)])
def test_trials_find_the_rate_and_leave_no_trace(mode: str, tiny_model: Path, tiny_text: Path, tmp_path: Path) -> None:
    """A run at the rate that was found equals a run that was told the rate; a resumed run does not try again."""

    def run(name: str, *more: str) -> Result:
        options = ["--train", mode, "--steps", "28", "--save-every", "4", "-o", tmp_path / name]
        return invoke("prune", *of(tiny_model, tiny_text), *options, *more)

    killed = die_at(26, lambda: run("found"))
    assert "10 steps changed the dense model's held-out loss by " in killed.output
    result = passed(run("found"))
    assert "resuming after step 24" in result.output and "held-out loss" not in result.output
    found = read_checkpoint(tmp_path / "found").provenance["learning_rate"]
    assert found["highest"] in seams.RATES[mode] and f"{found['highest']:g}" in found["trials"]
    passed(run("told", "--learning-rate", str(found["highest"])))
    assert_same_weights(tmp_path / "found", tmp_path / "told")


@pytest.mark.parametrize(
    ("losses", "chosen", "num_trials"),
    [
        ([2.8, 2.79, 2.82, 3.5], 1.6e-4, 4),
        ([2.8, 2.9, 2.7, 2.7], 1e-5, 2),  # above the lowest so far, although below the dense model's
        ([3.1, 2.0, 2.0, 2.0], 2.5e-6, 1),
        ([2.8, 2.79, math.nan, 2.7], 4e-5, 3),
    ],
)
def test_the_highest_rate_below_a_harmful_one_is_taken(losses: list[float], chosen: float, num_trials: int) -> None:
    tried = dict(zip(seams.RATES["weights"][1:], losses, strict=True))
    rate, after = seams.find_rate(seams.RATES["weights"], 3.0, tried.__getitem__)
    assert rate == chosen and len(after) == num_trials
    changes = [seams.change(loss, 3.0) for loss in (2.999, 3.0, 3.2, 2.8, math.nan)]
    assert changes == ["+0.00", "+0.00", "+0.20", "-0.20", "no number"]


def test_minutes_become_steps_that_a_resumed_run_keeps(
    tiny_model: Path, tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine whose clock tells 0.1 seconds per step; a resumed run does not look at it again."""
    monkeypatch.setattr(resolve, "seconds_a_step", lambda *_: 0.1)
    options = [*of(tiny_model, tiny_text), "--train", "masks", "--minutes", "0.05", "--save-every", "1"]
    run = partial(invoke, "prune", *options, "-o", tmp_path / "out")
    die_at(4, run)
    monkeypatch.setattr(resolve, "seconds_a_step", lambda *_: 9.0)
    result = run()
    assert "resuming after step 4" in result.output, result.output
    recipe = read_checkpoint(tmp_path / "out").provenance["recipe"]
    line = f"0.05 minutes: {recipe['steps']:,} steps of {recipe['batch_size']} × {recipe['seq_len']} tokens"
    assert recipe["steps"] == 30 and "minutes" not in recipe and line in result.output.replace("\n", " ")
    anew = run("--overwrite")  # nothing is resumed
    assert anew.exit_code == 2 and "minutes is 0.05, enough for 0 steps" in anew.output
    both = run("--overwrite", "--steps", "9")
    assert both.exit_code == 2 and "--steps and --minutes are given" in both.output


@pytest.mark.parametrize(
    ("minutes", "train", "batch", "devices", "shape"),
    [
        (60.0, "masks", 16, 1, (439, 4, 2048)),
        (5.0, "weights", 16, 1, (242, 1, 1024)),
        (0.4, "masks", 16, 1, (46, 2, 256)),
        (5.0, "masks", 16, 8, (585, 8, 512)),
    ],
)
def test_tokens_per_step_follow_from_the_time(
    minutes: float, train: str, batch: int, devices: int, shape: tuple[int, int, int]
) -> None:
    """On machines that train 1,000 tokens per second and device; every device gets equally many sequences."""
    settings = {"model": "m", "sparsity": 0.2, "minutes": minutes, "batch_size": batch}
    measure = lambda recipe: -(-recipe.batch_size // devices) * recipe.seq_len / 1000.0  # noqa: E731
    mode = Mode(train, "adamw" * (train != "masks"))
    assert seams.fit_minutes(load_recipe(None, settings), mode, measure, devices)[:3] == shape
    if devices == 1:
        short = load_recipe(None, settings | {"minutes": 0.15, "train": "masks"})
        with pytest.raises(SettingError, match=r"enough for 17 steps of 2 × 256 tokens where 20 are needed; give at"):
            seams.choose_in_minutes(short, MASKS, lambda _: measure, print)


# minutes, the mode that the user names; the mode that is taken, steps and tokens of a sequence; words of the line
IN_MINUTES: dict[str, tuple[float, str, tuple[str, int, int] | None, str]] = {
    "all weights": (
        60.0, "auto", ("weights", 436, 2048), r"60 minutes: 436 steps of .*, masks and weights with adamw$"),
    "weights in shorter sequences": (
        1.8, "auto", ("weights", 29, 256), "29 steps of 2 × 256 tokens, masks and weights with adamw$"),
    "additions": (
        0.8, "auto", ("lora", 45, 256), "masks and low-rank additions; masks and weights .* requires --minutes 2"),
    "masks alone": (
        0.3, "auto", ("masks", 70, 256),
        "masks only; masks and weights with adamw requires --minutes 2; masks and low-rank additions requires --mi"),
    "masks that cannot": (
        0.05, "auto", None,
        r"is 0\.05, enough for 11 steps .* where 20 are needed; give at least 1 for masks only; masks and weights"),
    "a mode that the user named": (
        0.8, "weights", None, "0 steps .* give at least 2 for masks and weights with adamw, or leave out --train"),
}  # fmt: skip


@pytest.mark.parametrize("case", IN_MINUTES)
def test_minutes_choose_the_best_mode_that_fits(case: str) -> None:
    """With a step of weights, additions and masks that takes so many seconds on top of 0.4 ms per token; weights and
    additions need trials too."""
    minutes, train, chosen, words = IN_MINUTES[case]
    extra, opened, lines = {"weights": 1.0, "lora": 0.25, "masks": 0.05}, list[str](), list[str]()
    recipe = load_recipe(None, {"model": "m", "sparsity": 0.2, "minutes": minutes, "train": train})

    def open_mode(mode: Mode) -> Callable[[seams.Recipe], float]:
        opened.append(mode.train)
        return lambda recipe: extra[mode.train] + 4e-4 * recipe.batch_size * recipe.seq_len

    if chosen is None:
        with pytest.raises(SettingError, match=words):
            seams.choose_in_minutes(recipe, MODES[0], open_mode, lines.append)
        return
    mode, shape = seams.choose_in_minutes(recipe, MODES[0], open_mode, lines.append)
    assert (mode.train, shape.steps, shape.seq_len) == chosen and re.search(words, lines[1]), (lines, shape)
    assert lines[0] == "timing steps on random tokens"
    assert opened == ["weights", "lora", "masks"][: ["weights", "lora", "masks"].index(mode.train) + 1]


def test_a_dry_run_looks_at_memory_before_it_times(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And prints that it is timing before it does."""
    options = ["--sparsity", "0.4", "--minutes", "0.2", "--dry-run", "-o", tmp_path / "out", "--seq-len", "16"]
    with monkeypatch.context() as patch:
        patch.setattr(seams.plan, "USABLE", 0.0)
        patch.setattr(resolve, "load", lambda *_: pytest.fail("nothing is loaded to be timed"))
        short = passed(invoke("prune", tiny_model, *options, "--train", "masks"))
    assert "timing" not in short.output and "time: not measured, because memory is short" in short.output
    printed = list[str]()
    monkeypatch.setattr(resolve, "seconds_a_step", lambda *_: printed.append("timed") or 0.05)
    settings = {"model": str(tiny_model), "sparsity": 0.4, "minutes": 0.2, "train": "masks", "seq_len": 16}
    plan = seams.plan.plan([load_recipe(None, settings)], tmp_path / "out", print_line=printed.append)
    assert printed[1] == "timing steps on random tokens" and set(printed[2:]) == {"timed"}
    assert any("0.2 minutes: 240 steps" in line for line in plan.lines)


@pytest.mark.parametrize(
    ("seconds", "mean", "num_steps"),
    [
        ([11.4, 8.6, 6.4, 6.6, 6.6], 6.5, 4),  # measured on two AVX2 cores, where the second was taken for the time
        ([3.0, 2.9, 1.0, 1.0, 1.0], 2.95, 2),
        ([9.0, 7.0, 5.0, 4.0, 3.0], 3.5, 5),
    ],
)
def test_a_step_is_timed_until_two_agree(
    seconds: list[float], mean: float, num_steps: int, tiny_model: Path, monkeypatch: Any
) -> None:
    clock, steps, model = [0.0], list[int](), seams.load_model(open_source(str(tiny_model)), "float32")

    class Slow(seams.Learner):
        def step(self, step: int) -> dict[str, float]:
            clock[0] += seconds[step] * (1.0 if self.batches.size == 2 else 1.5)
            steps.append(step)
            return {}

    def timed(batch_size: int) -> float:
        def make(blocks: torch.Tensor, schedule: Any) -> seams.Learner:
            return Slow(model, seams.Batches(blocks, schedule, accelerator), schedule, None)

        schedule = seams.Schedule(steps=seams.Steps(0, 1, 2), batch_size=batch_size, num_sequences=2)
        return seams.loop_module.seconds_a_step([model], make, schedule, 16, accelerator)

    accelerator = Accelerator(cpu=True)
    monkeypatch.setattr(seams.loop_module.time, "perf_counter", lambda: clock[0])
    assert timed(2) == pytest.approx(mean) and len(steps) == num_steps
    # a batch of four micro-batches, of which each takes half of the first step
    assert timed(8) == pytest.approx(mean * 2.5)


@pytest.mark.parametrize(("mode", "num_loaded"), [("weights", 2), pytest.param("lora", 1, marks=pytest.mark.nightly)])
def test_a_model_is_loaded_once_to_be_timed_and_trained(
    mode: str, num_loaded: int, tiny_model: Path, tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Model and teacher; the result is that of the same steps without minutes, and of the stored recipe."""
    loaded, load, timed = list[object](), resolve.load, resolve.seconds_a_step
    monkeypatch.setattr(resolve, "seconds_a_step", lambda *given: timed(*given) and 0.3)  # on a machine that slow
    monkeypatch.setattr(resolve, "load", lambda *given: loaded.append(given) or load(*given))
    monkeypatch.setattr(seams.loading_module, "load", lambda *given: loaded.append(given) or load(*given))
    options = [*of(tiny_model, tiny_text), "--learning-rate", "1e-3", "--minutes", "0.2", "--train", mode]
    result = passed(invoke("prune", *options, "-o", tmp_path / "out"))
    assert len(loaded) == num_loaded and "timing steps on random tokens" in result.output
    stored = read_checkpoint(tmp_path / "out").provenance["recipe"]
    assert "minutes" not in stored and stored["train"] == mode
    recipe = load_recipe(stored, {"data": str(tiny_text)})  # a checkpoint has the bare name
    again = ddp_vllm.prune(tiny_model, recipe=recipe, output=tmp_path / "again")
    assert_same_weights(tmp_path / "out", again.folder)
    for given in ("0", "-1"):
        refused = invoke("prune", *options[:-4], "--minutes", given, "-o", tmp_path / "no")
        assert refused.exit_code == 2 and f"minutes is {given}; give at least 1" in refused.output


CHOICES: dict[str, tuple[float, dict[str, str], tuple[str, str] | None, str]] = {  # free, settings, mode, last line
    "everything fits": (10.0, {}, ("weights", "adamw"), ""),
    "8 bits fit": (0.8, {}, ("weights", "adamw-8bit"), "masks and weights with adamw requires"),
    "only masks fit": (0.1, {}, ("masks", ""), "masks and low-rank additions requires"),
    "what was asked for does not fit": (
        0.8, {"train": "weights", "optimizer": "adamw"}, None, "adamw-8bit requires.*masks only requires"),
    "no joint training fits": (
        0.3, {"train": "weights"}, None, "adamw-8bit requires.*are free; what fits: masks and low-rank"),
}  # fmt: skip


@pytest.mark.parametrize("case", CHOICES)
def test_the_mode_is_the_first_that_memory_holds(case: str, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free, settings, chosen, words = CHOICES[case]
    source, lines = open_source(str(tiny_model)), list[str]()
    recipe = load_recipe(None, {"model": str(tiny_model), "sparsity": 0.4, "dtype": "bfloat16", **settings})
    needed = seams.held_bytes(recipe, source, MODES[0], 2, 1)
    # the adapters of a tiny model are larger than the model
    monkeypatch.setattr(seams.fit_module, "RANK", 1)
    monkeypatch.setattr(seams.weights_module, "_own_obstacle", lambda _: "")
    devices, accelerator = Devices(1, "cpu", free * needed, 1), Accelerator(cpu=True)
    settle = partial(seams.resolve_training_mode, devices=devices, accelerator=accelerator, print_line=lines.append)
    if chosen:
        assert settle(recipe, source, {}) == chosen and re.search(words, "".join(lines[-1:]))
    else:
        with pytest.raises(SettingError, match=words):
            settle(recipe, source, {})
    monkeypatch.setattr(seams.weights_module, "_own_obstacle", lambda _: "no compiler")
    if chosen == ("weights", "adamw-8bit"):
        assert settle(recipe, source, {}) == ("lora", "adamw") and lines[-1].endswith("no compiler")
        for refused in (dataclasses.replace(recipe, train="weights", optimizer="adamw-8bit"), recipe):
            with pytest.raises(SettingError, match="no compiler"):  # asked for, or resumed
                settle(refused, source, {"train": "weights", "optimizer": "adamw-8bit"})


@pytest.mark.parametrize(("limit", "free"), [("max", 1000), ("700", 500), (None, 1000)])
def test_memory_in_a_container(limit: str | None, free: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also outside of one, and where host and device share it, as accelerate answers on a Mac."""
    if limit:
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        (tmp_path / "memory.current").write_text("300\n")
        (tmp_path / "memory.stat").write_text("anon 200\ninactive_file 100\n")
    monkeypatch.setattr(seams.devices, "CONTROL_GROUP", tmp_path)
    for answer in ({"cpu": 1000}, {"mps": 1000}, {0: 5, "cpu": 1000}):
        monkeypatch.setattr(seams.devices, "get_max_memory", lambda answer=answer: answer)
        assert seams.free_memory(Accelerator(cpu=True)) == free


class Estimate(NamedTuple):
    fit: seams.Fit
    tokens: float
    seconds: float


def on(
    model: Path, cards: str = "h100-80gb", sizes: tuple[float, ...] = (0.2,), **settings: Any
) -> dict[Mode, Estimate]:
    """Return the estimate of each mode."""
    recipes = [seams.Recipe(model=str(model), sparsity=sparsity, **settings) for sparsity in sizes]
    estimates = seams.estimate(recipes, open_source(str(model)), Devices.of_cards(cards))
    return {estimate[0].mode: Estimate(*estimate) for estimate in estimates}


def test_small_models_are_bound_by_launches(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SmolLM2's 30 layers took a second for a step of four passes on an H100, whatever was computed in them."""

    def seconds() -> list[float]:
        return [on(tiny_model, dtype=dtype)[MASKS].seconds for dtype in ("auto", "float32", "bfloat16", "float16")]

    layers, passes = 3, 1000 * 16 / 16
    assert seconds() == [pytest.approx(passes * layers * 8.4e-3)] * 4
    monkeypatch.setattr(seams.fit_module, "LAUNCH_SECONDS", 0.0)
    computed = seconds()
    assert computed[0] == computed[1] == pytest.approx(989 / 67 * computed[2]) and computed[2] == computed[3]


@pytest.mark.parametrize("concurrency", [1, 64])
def test_the_bound_of_a_decode_step_follows_from_its_bytes(
    concurrency: int, tiny_model: Path, tiny_experts: Path
) -> None:
    """Half of every layer goes. A tied or untied head is read, embeddings are not; of experts those that are chosen."""
    for folder in (tiny_model, tiny_experts):
        source = open_source(str(folder))
        sizes, config = source.sizes, source.config
        head = 2 * config["vocab_size"] * sizes.hidden_size
        attention = 2 * 2 * sizes.hidden_size * sizes.head_dim * (sizes.num_query_heads + sizes.num_kv_heads)
        layer, width = attention, sizes.intermediate_size
        if sizes.num_experts:
            chosen = 1 - (1 - config["num_experts_per_tok"] / sizes.num_experts) ** concurrency
            layer += 2 * sizes.hidden_size * sizes.num_experts  # the router
            width = sizes.expert_intermediate_size * sizes.num_experts * chosen
        prunable = 2 * 3 * sizes.hidden_size * width + (0 if sizes.num_experts else attention)
        cache = 4 * sizes.num_kv_heads * sizes.head_dim * concurrency * 128
        dense = head + sizes.num_layers * (layer + 2 * 3 * sizes.hidden_size * width + cache)
        pruned = dense - 0.5 * sizes.num_layers * (prunable + (0 if sizes.num_experts else cache))
        lines = seams.plan.plan(
            [seams.Recipe(model=str(folder), sparsity=0.5, concurrency=concurrency, context_length=128)],
            Path("none"), on="h100-80gb",
        ).lines  # fmt: skip
        (bound,) = (float(found[1]) for line in lines if (found := re.search(r"at most ([\d.]+)×", line)))
        assert bound == pytest.approx(dense / pruned, abs=0.006)


def test_an_estimate_follows_the_options(tiny_model: Path) -> None:
    """The tiny model is stored in float32; up to 32,768 tokens are in flight on a GPU unless options say otherwise."""
    found = on(tiny_model)
    assert found[MASKS].fit.num_sequences == 16 and found[MASKS].tokens == 1000 * 16 * 2048
    assert found[MODES[0]].tokens > found[MASKS].tokens  # with trials of the learning rate
    assert on(tiny_model, dtype="bfloat16")[MASKS].fit.peak < found[MASKS].fit.peak
    assert on(tiny_model, sizes=(0.1, 0.2))[MASKS].tokens == pytest.approx(1.3 * found[MASKS].tokens, rel=0.01)
    for settings, num_sequences in (
        ({"batch_size": 1, "seq_len": 256}, 1), ({"seq_len": 8192}, 4), ({"micro_batch_size": 2}, 2),
        ({"micro_batch_size": 999, "batch_size": 2}, 2),  # a device has no more
    ):  # fmt: skip
        assert on(tiny_model, **settings)[MASKS].fit.num_sequences == num_sequences
    off, again = (on(tiny_model, activation_checkpointing=setting)[MASKS].fit for setting in ("off", "on"))
    assert off.num_sequences == again.num_sequences == 4
    assert off.peak > again.peak and not found[MASKS].fit.checkpointed  # memory holds the activations
    assert list(on(tiny_model, train="lora")) == [MODES[2]]
    assert list(on(tiny_model, optimizer="adamw-8bit", train="weights")) == [MODES[1]]
    hour = on(tiny_model, minutes=60)[MASKS]
    assert hour.seconds == 3600 and hour.tokens != found[MASKS].tokens
    assert seams.choose([row.fit for row in found.values()]).mode == MODES[0]
    with pytest.raises(SettingError, match="batch_size is 2, which 4 processes"):
        on(tiny_model, "4xh100-80gb", batch_size=2)
