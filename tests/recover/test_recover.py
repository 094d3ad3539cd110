"""Recovery: the weights of a pruned model learn, are written as they were judged, and a run goes on to the bit."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from runs import assert_refused, prune, recover, weights
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from ddp_models.loading import load_model
from ddp_models.source import open_pruned, open_source
from ddp_recover.weight_trainer import WeightTrainer
from ddp_training.run_state import RunState
from ddp_vllm import output
from ddp_vllm.checkpoint import read_checkpoint
from ddp_vllm.cli import main
from ddp_vllm.pages import written

pytestmark = pytest.mark.usefixtures("no_pictures")


@pytest.mark.parametrize("method", ["full", "lora"])
def test_held_out_text_is_read_better_by_a_model_of_the_same_widths(method: str, pruned: Path, tmp_path: Path) -> None:
    result = recover(pruned, tmp_path / "out", "--method", method)
    assert result.exit_code == 0, result.output
    before, after = read_checkpoint(pruned), read_checkpoint(tmp_path / "out")
    assert after.layers == before.layers and after.shapes == before.shapes
    quality = after.provenance["perplexity"]
    assert quality["pruned"] == pytest.approx(before.provenance["perplexity"]["pruned"], rel=1e-4)
    assert quality["recovered"] < 0.9 * quality["pruned"]
    assert {path.name for path in pruned.glob("*.*")} <= {path.name for path in (tmp_path / "out").iterdir()}
    recovery = after.provenance["recovery"]
    assert len(recovery["prompts"]) == len(recovery["answers"]["recovered"]) == 10
    assert recovery["recipe"]["method"] == method and recovery["recipe"]["tokens"] == 960
    assert "low-rank" in (tmp_path / "out" / "README.md").read_text() or method == "full"
    assert "recovered" in result.output and not (tmp_path / "out.run").exists()


@pytest.mark.parametrize("method", ["full", "lora"])
def test_what_is_written_is_what_was_judged(method: str, pruned: Path, tiny_text: Path, tmp_path: Path) -> None:
    """Plain transformers reads the same perplexity from the written folder; nothing but embeddings stayed as it was."""
    assert recover(pruned, tmp_path / "out", "--method", method, "--dtype", "float32").exit_code == 0
    checkpoint = read_checkpoint(tmp_path / "out")
    from ddp_text.blocks import load_blocks
    from ddp_text.tokens import load_tokenizer
    from ddp_training.loss import losses

    assert checkpoint.provenance["recovery"]["recipe"]["data"] == tiny_text.name
    blocks = load_blocks(
        str(tiny_text), load_tokenizer(str(tmp_path / "out")), seq_len=16, train_blocks=2, heldout_blocks=16,
        min_train_blocks=2, seed=0,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True)
    judged = checkpoint.provenance["perplexity"]["block_losses"]["recovered"]
    torch.testing.assert_close(torch.tensor(losses(model, blocks.heldout)), torch.tensor(judged), atol=2e-5, rtol=0)
    before, after = weights(pruned), weights(tmp_path / "out")
    same = {name for name, tensor in before.items() if torch.equal(tensor, after[name])}
    norms = {name for name in before if "norm" in name} if method == "lora" else set()
    assert same == {"model.embed_tokens.weight"} | norms


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("steps", [3, 7])
def test_a_run_that_is_killed_goes_on_to_the_bit(
    method: str, steps: int, pruned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--method", method, "--save-every", "3"]
    assert recover(pruned, tmp_path / "whole", *options).exit_code == 0
    step = WeightTrainer.step

    def die(self: WeightTrainer, number: int) -> dict[str, float]:
        if number == steps:
            raise KeyboardInterrupt
        return step(self, number)

    with monkeypatch.context() as patch:
        patch.setattr(WeightTrainer, "step", die)
        assert recover(pruned, tmp_path / "out", *options).exit_code != 0
    less_memory = ["--activation-checkpointing", "on", "--save-every", "5"]  # as an error advises; same gradients
    result = recover(pruned, tmp_path / "out", "--method", method, *less_memory)
    assert f"resuming after step {steps // 3 * 3}" in result.output, result.output
    whole, resumed = weights(tmp_path / "whole"), weights(tmp_path / "out")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    lines = [json.loads(line)["step"] for line in (tmp_path / "out" / "ddp_recovery.jsonl").read_text().splitlines()]
    assert lines == list(range(1, 31))


def test_minutes_become_a_number_of_steps_that_a_resumed_run_keeps(
    pruned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock is asked once; who goes on later, on a machine of another speed, ends with the same weights."""
    seconds = iter([1.0, 50.0])
    monkeypatch.setattr(WeightTrainer, "seconds_a_step", lambda self: next(seconds))
    command = ["recover", str(pruned), "-o", str(tmp_path / "out"), "--minutes", "0.15", "--save-every", "2"]
    step = WeightTrainer.step

    def die(self: WeightTrainer, number: int) -> dict[str, float]:
        if number == 4:
            raise KeyboardInterrupt
        return step(self, number)

    with monkeypatch.context() as patch:
        patch.setattr(WeightTrainer, "step", die)
        assert CliRunner().invoke(main, command).exit_code != 0
    result = CliRunner().invoke(main, command)
    assert "resuming after step 4" in result.output, result.output
    assert read_checkpoint(tmp_path / "out").provenance["recovery"]["recipe"]["tokens"] == 9 * 32


def test_timing_a_step_learns_nothing(pruned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timed = WeightTrainer.seconds_a_step
    monkeypatch.setattr(WeightTrainer, "seconds_a_step", lambda self: timed(self) and 60.0)
    arguments = ["recover", str(pruned), "-o", str(tmp_path / "timed"), "--minutes", "30"]
    assert CliRunner().invoke(main, arguments).exit_code == 0
    assert recover(pruned, tmp_path / "out").exit_code == 0
    timed_weights, others = weights(tmp_path / "timed"), weights(tmp_path / "out")
    assert all(torch.equal(timed_weights[name], others[name]) for name in others)


def test_experts_learn_at_the_widths_they_have(tiny_experts: Path, tiny_text: Path, tmp_path: Path) -> None:
    """Mixtral's names on disk are not those of transformers' modules."""
    assert prune(tiny_experts, tiny_text, tmp_path / "pruned").exit_code == 0
    for method in ("full", "lora"):
        result = recover(tmp_path / "pruned", tmp_path / method, "--method", method)
        assert result.exit_code == 0, result.output
        before, after = weights(tmp_path / "pruned"), weights(tmp_path / method)
        experts = [name for name in before if ".block_sparse_moe.experts." in name]
        assert len(experts) > 10 and not any(torch.equal(before[name], after[name]) for name in experts)
        quality = read_checkpoint(tmp_path / method).provenance["perplexity"]
        assert quality["recovered"] < quality["pruned"]


def test_prune_with_recover_is_prune_and_then_recover(
    pruned: Path, tiny_model: Path, tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in the recovery, the same command does not learn the masks again."""
    monkeypatch.setattr(WeightTrainer, "seconds_a_step", lambda self: 2.0)
    step = WeightTrainer.step

    def die(self: WeightTrainer, number: int) -> dict[str, float]:
        raise KeyboardInterrupt

    monkeypatch.setattr(WeightTrainer, "step", die)
    assert prune(tiny_model, tiny_text, tmp_path / "out", "--recover", "1").exit_code != 0
    assert "recovery" not in read_checkpoint(tmp_path / "out").provenance
    monkeypatch.setattr(WeightTrainer, "step", step)
    result = prune(tiny_model, tiny_text, tmp_path / "out", "--recover", "1")
    assert result.exit_code == 0 and "search" not in result.output and "recover 30/30" in result.output
    assert recover(pruned, tmp_path / "two").exit_code == 0
    one, two = weights(tmp_path / "out"), weights(tmp_path / "two")
    assert all(torch.equal(one[name], two[name]) for name in two)
    assert_refused(prune(tiny_model, tiny_text, tmp_path / "out", "--recover", "1"), 5, "exists")


class Killed(BaseException):
    """Nothing catches it, as nothing catches a kill."""


def _die(*_: Any) -> None:
    raise Killed


def _replacing(*, first: bool) -> Callable[..., None]:
    """Return what replaces a folder that exists and dies, `first` or afterwards."""
    replace = output._replace

    def die(folder: Path, temporary: Path, old: Path) -> None:
        is_last = folder.exists()
        if not (is_last and first):
            replace(folder, temporary, old)
        if is_last:
            raise Killed

    return die


def _rename_and_die(one: Path, two: Path) -> None:
    one.replace(two)
    if two.name == ".out.old":
        raise Killed


def _report(_checkpoint: Any, folder: Path) -> Path:
    return _die() if (folder / "ddp_recovery.jsonl").exists() else folder


def _remove(run: RunState) -> None:
    if not run.folder.exists():
        return
    os.replace(run.folder, run.deleted)
    for name in ("lock", "metrics.jsonl", "state.safetensors"):
        (run.deleted / name).unlink()
        if name == "metrics.jsonl" and (run.output / "ddp_recovery.jsonl").exists():
            raise Killed
    run.deleted.rmdir()


KILLS: dict[str, list[tuple[Any, str, Callable[..., Any]]]] = {
    "before": [(output, "_replace", _replacing(first=True))],
    "between": [(output, "_exchanged", lambda *_: False), (os, "rename", _rename_and_die)],
    "after": [(output, "_replace", _replacing(first=False))],
    "report": [(written, "write_report", _report)],
    "removal": [(RunState, "remove", _remove)],
}


@pytest.mark.parametrize("command", ["recover", "prune"])
@pytest.mark.parametrize("moment", KILLS)
def test_a_recovery_in_place_happens_once_whenever_it_was_killed(
    moment: str, command: str, pruned: Path, tiny_model: Path, tiny_text: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Before the model was replaced, between the two renames of a system that exchanges no folders, and after."""
    monkeypatch.setattr(WeightTrainer, "seconds_a_step", lambda self: 2.0)
    out = tmp_path / "out"
    if command == "recover":
        shutil.copytree(pruned, out)

    def run() -> Result:
        if command == "recover":
            return recover(out, out, "--overwrite")
        return prune(tiny_model, tiny_text, out, "--recover", "1")

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)  # a kill runs no finally
        for what in KILLS[moment]:
            patch.setattr(*what)
        run()
    result = run()
    assert result.exit_code == 0 and "search" not in result.output, result.output
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert recover(pruned, tmp_path / "once").exit_code == 0
    found, once = weights(out), weights(tmp_path / "once")
    assert all(torch.equal(found[name], once[name]) for name in once)


@pytest.mark.parametrize("moment", ["write_report", "remove"])
def test_a_command_that_was_killed_after_its_output_was_written_is_finished(
    moment: str, pruned: Path, tiny_model: Path, tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same command draws the report and deletes the run; afterwards the output exists."""
    commands = {
        "pruned": lambda: prune(tiny_model, tiny_text, tmp_path / "pruned"),
        "recovered": lambda: recover(pruned, tmp_path / "recovered"),
    }
    for name, command in commands.items():
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(RunState if moment == "remove" else written, moment, _die)
            command()
        assert (tmp_path / f"{name}.run" / "state.safetensors").exists()
        before = weights(tmp_path / name)
        other = prune(tiny_model, tiny_text, tmp_path / name, "--seed", "1")
        assert_refused(other, 5, "exists")  # another command is told so, and what the first one left stays
        result = command()
        assert result.exit_code == 0 and "/6 " not in result.output and "/30 " not in result.output, result.output
        assert not list(tmp_path.glob(f"{name}.run*"))
        assert all(torch.equal(weights(tmp_path / name)[each], tensor) for each, tensor in before.items())
        assert_refused(command(), 5, "exists")


def test_prune_gives_its_settings_of_memory_to_the_recovery(
    tiny_model: Path, tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WeightTrainer, "seconds_a_step", lambda self: 20.0)
    memory = {"micro_batch_size": 1, "activation_checkpointing": "on", "save_every": 3}
    options = [word for name, value in memory.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    assert prune(tiny_model, tiny_text, tmp_path / "out", "--recover", "1", *options).exit_code == 0
    recipe = read_checkpoint(tmp_path / "out").provenance["recovery"]["recipe"]
    assert {name: recipe[name] for name in memory} == memory


def test_text_of_another_kind_is_watched_and_what_gets_worse_is_said(
    pruned: Path, tmp_path: Path, write_texts: Callable[..., Path]
) -> None:
    """A model that has learned one text can be recovered once more, on another."""
    numbers = write_texts("numbers.jsonl", [" ".join(str(i * j) for i in range(40)) for j in range(60)])
    assert recover(pruned, tmp_path / "good", "--learning-rate", "5e-3").exit_code == 0
    learn_badly = ("--data", str(numbers), "--learning-rate", "0.03", "--warmup", "0")
    result = recover(tmp_path / "good", tmp_path / "out", *learn_badly)
    assert result.exit_code == 0, result.output
    (name,) = read_checkpoint(tmp_path / "out").provenance["recovery"]["watched"]
    assert re.search(f"worse than before recovery on .*/{name};", result.output)
    assert f"worse than before recovery on {numbers}" not in result.output


def test_what_is_watched_is_nothing_that_weights_learn_on(
    pruned: Path, tiny_text: Path, tmp_path: Path, write_texts: Callable[..., Path]
) -> None:
    """Held out alone and held out of a mixture are not the same blocks, so a part of the mixture is not watched."""
    numbers = write_texts("numbers.jsonl", [" ".join(str(i * j) for i in range(40)) for j in range(60)])
    result = recover(pruned, tmp_path / "out", "--data", f"{tiny_text},{numbers}")
    assert "no text of another kind is watched" in result.output
    again = os.path.relpath(tiny_text)
    assert_refused(recover(pruned, tmp_path / "again", "--watch", again), 2, "watch", "data trains on part of it")
    short = write_texts("short.jsonl", ["a fox"])
    assert_refused(recover(pruned, tmp_path / "again", "--watch", str(short)), 4, str(short), "more text")


def test_answers_are_the_likeliest_tokens_whatever_the_models_own_settings(pruned: Path, tmp_path: Path) -> None:
    folder = tmp_path / "pruned"
    shutil.copytree(pruned, folder)
    own = {"repetition_penalty": 5.0, "num_beams": 3, "do_sample": True, "eos_token_id": 0}
    (folder / "generation_config.json").write_text(json.dumps(own))
    assert recover(pruned, tmp_path / "plain").exit_code == 0 and recover(folder, tmp_path / "own").exit_code == 0
    plain, other = (read_checkpoint(tmp_path / name).provenance["recovery"]["answers"] for name in ("plain", "own"))
    assert plain == other and len(set(plain["dense"])) > 1


@pytest.mark.parametrize("stored", [torch.float16, torch.float32])
def test_a_rate_of_nearly_zero_leaves_weights_as_they_were_stored(
    stored: torch.dtype, tiny_model: Path, tiny_text: Path, tmp_path: Path
) -> None:
    """Though they are learned in bfloat16, which holds fewer digits."""
    shutil.copytree(tiny_model, tmp_path / "dense")
    LlamaForCausalLM.from_pretrained(tiny_model).to(stored).save_pretrained(tmp_path / "dense")
    assert prune(tmp_path / "dense", tiny_text, tmp_path / "pruned").exit_code == 0
    options = ["--method", "full", "--dtype", "bfloat16", "--learning-rate", "1e-12"]
    assert recover(tmp_path / "pruned", tmp_path / "out", *options).exit_code == 0
    before, after = weights(tmp_path / "pruned"), weights(tmp_path / "out")
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype == stored
        torch.testing.assert_close(after[name], tensor, atol=1e-7, rtol=1e-6 if stored == torch.float32 else 1e-3)


def test_a_student_is_loaded_with_the_widths_of_its_folder(pruned: Path, tiny_model: Path) -> None:
    dense, checkpoint = open_source(str(tiny_model)), read_checkpoint(pruned)
    model = load_model(open_pruned(checkpoint, dense), "auto")
    found = [layer.mlp.down_proj.in_features for layer in model.model.layers]
    assert found == [layer.intermediate_size for layer in checkpoint.layers] and os.path.exists(pruned)


def test_masks_of_a_recovered_model_cut_the_dense_one_as_if_nothing_had_learned(
    pruned: Path, tiny_model: Path, tmp_path: Path
) -> None:
    """And the result can be recovered from the model that the masks were applied to."""
    assert recover(pruned, tmp_path / "out").exit_code == 0
    shutil.copytree(tiny_model, tmp_path / "copy")
    masks = str(tmp_path / "out" / "ddp_masks.safetensors")
    command = ["apply", str(tmp_path / "copy"), "--masks", masks, "-o", str(tmp_path / "again")]
    assert CliRunner().invoke(main, command).exit_code == 0
    before, again = weights(pruned), weights(tmp_path / "again")
    assert all(torch.equal(before[name], again[name]) for name in before)
    assert not {"recovery", "perplexity"} & read_checkpoint(tmp_path / "again").provenance.keys()
    assert recover(tmp_path / "again", tmp_path / "recovered").exit_code == 0
    assert read_checkpoint(tmp_path / "recovered").provenance["recovery"]["recipe"]["teacher"] == "copy"


@pytest.mark.parametrize(("free", "method"), [(10**9, "full"), (10**6, "lora")])
def test_auto_learns_all_weights_where_memory_holds_the_optimizer(
    free: int, method: str, pruned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddp_training.memory.free_memory", lambda _: free)
    assert recover(pruned, tmp_path / "out").exit_code == 0
    assert read_checkpoint(tmp_path / "out").provenance["recovery"]["recipe"]["method"] == method
