"""Recovery in two processes, weights whole and cut, is that of one."""

from pathlib import Path

import pytest
import torch
from commands import invoke, passed
from runs import SMALL, die_at, prune
from safetensors.torch import load_file
from two_processes import command_line, launch, stopped_command_line

from ddp_vllm.checkpoint import read_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_pictures")]  # in this process, not in the two


def assert_close(two: Path, one: Path) -> None:
    """Adam's first steps make a sign of the smallest gradient, and sums over processes round differently."""
    expected, found = (load_file(folder / "model.safetensors") for folder in (one, two))
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=5e-4, rtol=0, msg=lambda text, at=name: f"{at}: {text}")


@pytest.mark.parametrize("verb", ["prune", pytest.param("recover", marks=pytest.mark.nightly)])
def test_two_processes_train_as_one_does(verb: str, tiny_model: Path, tiny_text: Path, tmp_path: Path) -> None:
    command = ["prune", str(tiny_model), *SMALL, "--train", "weights", "--sparsity", "0.4"]
    if verb == "recover":
        passed(prune(tiny_model, tiny_text, tmp_path / "pruned"))
        command = ["recover", str(tmp_path / "pruned"), "--teacher", str(tiny_model), "--train", "lora"]
        command += ["--tokens", "320", "--learning-rate", "1e-3"]
    command += ["--data", str(tiny_text), "-o"]
    passed(invoke(*command, tmp_path / "one"))
    more = ["--shard", *["--no-proof"] * (verb == "prune")]  # at night: it takes as long as the training
    (first, _, err), (second, _, _) = launch(tmp_path, command_line, *command, str(tmp_path / "two"), *more)
    assert first == second == 0, err
    assert_close(tmp_path / "two", tmp_path / "one")
    if verb == "prune":
        return
    # the weights are shared, so only the written folder has them whole
    proof = read_checkpoint(tmp_path / "two").provenance["proof"]
    assert proof["tokens"] > 100 and proof["logits"] < 1e-4 and not proof["fault"]


@pytest.mark.nightly
@pytest.mark.parametrize("optimizer", ["adamw", "adamw-8bit", "lora"])
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 2)], ids=str)
def test_a_run_resumes_on_another_number_of_processes(
    optimizer: str, before: int, after: int, tiny_model: Path, tiny_text: Path, tmp_path: Path
) -> None:
    train = ["--train", "lora"] if optimizer == "lora" else ["--train", "weights", "--optimizer", optimizer]
    options = ["--no-proof", "--steps", "6", "--batch-size", "4", "--seq-len", "16", "--save-every", "1"]
    options += ["--learning-rate", "2e-4"]
    command = ["prune", str(tiny_model), "--data", str(tiny_text), "--sparsity", "0.4", *options, *train, "-o"]

    def run(name: str, processes: int, stop: int = -1) -> str:
        """Run in one process as in two: with the same state of torch."""
        if processes == 2:
            (code, out, err), _ = launch(
                tmp_path, stopped_command_line, stop, *command, str(tmp_path / name), "--shard"
            )
            assert code == (130 if stop >= 0 else 0), err
            return out
        with torch.compiler.set_stance("force_eager"):
            again = lambda: invoke(*command, tmp_path / name)  # noqa: E731
            return (die_at(stop, again) if stop >= 0 else passed(again())).output

    run("one", 1)
    run("out", before, stop=3)
    if optimizer == "adamw-8bit" and before != after:  # a scale is shared by 256 numbers of a process
        with pytest.raises(AssertionError, match=f"8-bit moments among {before} processes, not {after}; start as many"):
            run("out", after)
        return
    assert "resuming after step 3" in run("out", after)
    assert_close(tmp_path / "out", tmp_path / "one")
