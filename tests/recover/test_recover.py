"""Recovery: the weights of a pruned model are trained, written as evaluated, and a killed run resumes to the bit."""

import json
import os
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import assert_refused, invoke, passed
from runs import assert_same_weights, die_at, recover, weights
from transformers import AutoModelForCausalLM

from ddp_prune.core.loss import losses
from ddp_prune.recover import WeightTrainer
from ddp_prune.run_folder import RunFolder
from ddp_prune.text.blocks import load_blocks
from ddp_prune.text.tokens import load_tokenizer
from ddp_vllm.checkpoint import read_checkpoint
from ddp_vllm.pages import written

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_pictures")]


@pytest.fixture(scope="module")
def recovered(pruned: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pruned model after thirty steps."""
    folder = tmp_path_factory.mktemp("recovered") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(written, "write_report", lambda *_: None)
        patch.setattr("ddp_prune.models.evaluation.SAMPLE_TOKENS", 3)
        passed(recover(pruned, folder))
    return folder


@pytest.mark.parametrize("method", ["weights", "lora"])
def test_the_written_model_is_the_evaluated_one_and_better(
    method: str, pruned: Path, tiny_text: Path, tmp_path: Path
) -> None:
    """Plain transformers finds the stated perplexity; every weight but the embedding has moved."""
    result = passed(recover(pruned, tmp_path / "out", "--train", method, "--dtype", "float32"))
    assert "recovered" in result.output
    named = {"weights": "weights with adamw", "lora": "low-rank additions"}[method]
    assert f"training mode: {named} requires " in result.output
    before, after = read_checkpoint(pruned), read_checkpoint(tmp_path / "out")
    assert after.layers == before.layers and after.shapes == before.shapes
    quality, recovery = after.provenance["perplexity"], after.provenance["recovery"]
    assert quality["pruned"] == pytest.approx(before.provenance["perplexity"]["pruned"], rel=1e-4)
    assert quality["recovered"] < 0.9 * quality["pruned"]
    assert {path.name for path in pruned.glob("*.*")} <= {path.name for path in (tmp_path / "out").iterdir()}
    assert len(recovery["prompts"]) == len(recovery["answers"]["recovered"]) == 10
    stated = {"train": method, "tokens": 960, "data": tiny_text.name}
    assert {name: recovery["recipe"][name] for name in stated} == stated
    assert "low-rank" in (tmp_path / "out" / "README.md").read_text() or method == "weights"
    blocks = load_blocks(
        str(tiny_text), load_tokenizer(str(tmp_path / "out")), seq_len=16, train_blocks=2, heldout_blocks=16,
        min_train_blocks=2, seed=0,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True)
    evaluated = torch.tensor(quality["block_losses"]["recovered"])
    torch.testing.assert_close(torch.tensor(losses(model, blocks.heldout)), evaluated, atol=2e-5, rtol=0)
    old, new = weights(pruned), weights(tmp_path / "out")
    norms = {name for name in old if "norm" in name} if method == "lora" else set()
    assert {name for name in old if torch.equal(old[name], new[name])} == {"model.embed_tokens.weight"} | norms


@pytest.mark.parametrize(("method", "steps"), [("weights", 7), ("lora", 3)])
def test_a_killed_run_resumes_to_the_bit(method: str, steps: int, pruned: Path, tmp_path: Path) -> None:
    options = ["--train", method, "--save-every", "3"]
    passed(recover(pruned, tmp_path / "whole", *options))
    die_at(steps, lambda: recover(pruned, tmp_path / "out", *options), WeightTrainer)
    less_memory = ["--activation-checkpointing", "on", "--save-every", "5"]  # as an error advises; same gradients
    result = recover(pruned, tmp_path / "out", "--train", method, *less_memory)
    assert f"resuming after step {steps // 3 * 3}" in result.output, result.output
    assert_same_weights(tmp_path / "whole", tmp_path / "out")
    lines = [json.loads(line)["step"] for line in (tmp_path / "out" / "ddp_recovery.jsonl").read_text().splitlines()]
    assert lines == list(range(1, 31))


def test_minutes_become_a_number_of_steps_that_a_resumed_run_keeps(
    pruned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step is timed once: a run that resumes on a machine of another speed ends with the same weights."""
    seconds, timed = iter([1.0, 50.0]), WeightTrainer.seconds_a_step
    monkeypatch.setattr(WeightTrainer, "seconds_a_step", lambda self: timed(self) and next(seconds))
    run = partial(invoke, "recover", pruned, "-o", tmp_path / "out", "--minutes", "0.15", "--save-every", "2")
    die_at(4, run, WeightTrainer)
    result = run()
    assert "resuming after step 4" in result.output, result.output
    assert read_checkpoint(tmp_path / "out").provenance["recovery"]["recipe"]["tokens"] == 9 * 32
    passed(recover(pruned, tmp_path / "untimed", "--tokens", "288"))
    assert_same_weights(tmp_path / "out", tmp_path / "untimed")  # timing a step trained nothing


class Killed(BaseException):
    """Nothing catches it, as nothing catches a kill."""


def _die(*_: Any) -> None:
    raise Killed


def _rename_and_die(one: Path, two: Path) -> None:
    one.replace(two)
    if two.name == ".out.old":
        raise Killed


def _remove_half(run: RunFolder) -> None:
    run.metrics.unlink()
    raise Killed


KILLS: dict[str, list[tuple[Any, str, Callable[..., Any]]]] = {
    "between": [(os, "rename", _rename_and_die)],
    "removal": [(RunFolder, "remove", _remove_half)],
}


@pytest.mark.parametrize("moment", KILLS)
def test_a_recovery_over_an_older_output_loses_nothing_whenever_it_was_killed(
    moment: str, pruned: Path, recovered: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`tests/nightly/kills.py` kills at every other moment."""
    monkeypatch.setattr(WeightTrainer, "seconds_a_step", lambda self: 2.0)
    out = Path(shutil.copytree(pruned, tmp_path / "out"))
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)  # a kill runs no finally
        for change in KILLS[moment]:
            patch.setattr(*change)
        recover(pruned, out, "--overwrite")
    passed(recover(pruned, out, "--overwrite"))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert_same_weights(out, recovered)


def test_a_command_that_was_killed_before_it_deleted_its_run_resumes_after_the_last_step(
    pruned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same command writes the output again and deletes the run; afterwards the output exists."""
    run = partial(recover, pruned, tmp_path / "out")
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(RunFolder, "remove", _die)
        run()
    assert (tmp_path / "out.run" / "run.json").exists()
    before = weights(tmp_path / "out")
    assert_refused(run("--seed", "1"), 5, "seed 0 instead of 1")  # another command leaves the output and the run
    result = passed(run())
    assert "was written before" in result.output and "search 1/" not in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert all(torch.equal(weights(tmp_path / "out")[name], tensor) for name, tensor in before.items())
    assert_refused(run(), 5, "exists")


def test_an_output_that_appears_during_the_training_is_not_replaced(
    pruned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another command wrote it, and this one was started without --overwrite; its run is kept."""
    step = WeightTrainer.step

    def meet(self: Any, number: int) -> Any:
        if not (tmp_path / "out").exists():
            shutil.copytree(pruned, tmp_path / "out")
            (tmp_path / "out" / "mark").touch()
        return step(self, number)

    monkeypatch.setattr(WeightTrainer, "step", meet)
    assert_refused(recover(pruned, tmp_path / "out", "--tokens", "64"), 5, "exists")
    assert (tmp_path / "out" / "mark").exists() and (tmp_path / "out.run" / "run.json").exists()


def test_text_of_another_kind_is_watched_and_a_loss_on_it_is_reported(
    pruned: Path, recovered: Path, tiny_text: Path, tmp_path: Path, write_texts: Callable[..., Path]
) -> None:
    """A recovered model is recovered once more, on another text; text that is trained on is not watched."""
    numbers = write_texts("numbers.jsonl", [" ".join(str(i * j) for i in range(40)) for j in range(60)])
    passed(recover(pruned, tmp_path / "good", "--learning-rate", "5e-3"))
    badly = ("--learning-rate", "0.03", "--warmup", "0")
    result = passed(recover(tmp_path / "good", tmp_path / "out", "--data", str(numbers), *badly))
    (name,) = read_checkpoint(tmp_path / "out").provenance["recovery"]["watched"]
    assert re.search(f"worse than before recovery on .*/{name};", result.output)
    assert f"worse than before recovery on {numbers}" not in result.output
    result = recover(recovered, tmp_path / "both", "--data", f"{tiny_text},{numbers}", "--tokens", "64")
    assert "no other text is evaluated" in result.output
    again, short = os.path.relpath(tiny_text), write_texts("short.jsonl", ["a fox"])
    assert_refused(recover(recovered, tmp_path / "no", "--watch", again), 2, "watch", "data trains on part of it")
    assert_refused(recover(recovered, tmp_path / "no", "--watch", str(short)), 4, str(short), "more text")
    rows = [f"the fox number {i} jumps over {i * i} clouds and rests" for i in range(60)]
    text, part = write_texts("rows.jsonl", rows), write_texts("part.jsonl", rows[:30])
    result = recover(recovered, tmp_path / "no", "--data", str(text), "--watch", str(part))
    assert_refused(result, 4, f"{text} trains on", f"held out of {part}", "--watch")


def test_masks_of_a_recovered_model_cut_the_dense_one_as_before_recovery(
    pruned: Path, recovered: Path, tiny_model: Path, tmp_path: Path
) -> None:
    """And the result can be recovered from the model that the masks were applied to."""
    shutil.copytree(tiny_model, tmp_path / "copy")
    masks = recovered / "ddp_masks.safetensors"
    passed(invoke("apply", tmp_path / "copy", "--masks", masks, "-o", tmp_path / "again"))
    assert_same_weights(pruned, tmp_path / "again")
    assert not {"recovery", "perplexity"} & read_checkpoint(tmp_path / "again").provenance.keys()
    passed(recover(tmp_path / "again", tmp_path / "recovered", "--tokens", "64"))
    assert read_checkpoint(tmp_path / "recovered").provenance["recovery"]["recipe"]["teacher"] == "copy"
