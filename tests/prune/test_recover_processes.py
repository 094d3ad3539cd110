"""Recovery in two processes, weights whole and cut, is that of one."""

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from runs import prune
from safetensors.torch import load_file
from two_processes import command_line, launch

from ddp_vllm.checkpoint import read_checkpoint
from ddp_vllm.cli import main

pytestmark = pytest.mark.usefixtures("no_pictures")  # in this process, not in the two


@pytest.mark.parametrize(
    ("method", "ways"), [("full", {"two": [], "cut": ["--shard"]}), ("lora", {"cut": ["--shard"]})]
)
def test_two_processes_recover_what_one_does(
    method: str, ways: dict[str, list[str]], tiny_model: Path, tiny_text: Path, tmp_path: Path
) -> None:
    assert prune(tiny_model, tiny_text, tmp_path / "pruned").exit_code == 0
    command = ["recover", str(tmp_path / "pruned"), "--method", method, "--tokens", "320", "-o"]
    assert CliRunner().invoke(main, [*command, str(tmp_path / "one")]).exit_code == 0
    for name, more in ways.items():
        (first, out, err), (second, silence, _) = launch(tmp_path, command_line, *command, str(tmp_path / name), *more)
        assert first == second == 0, err
        assert "recover 10/10" in out and silence == ""
    before = load_file(tmp_path / "pruned" / "model.safetensors")
    one = load_file(tmp_path / "one" / "model.safetensors")
    for name in ways:
        other = load_file(tmp_path / name / "model.safetensors")
        for each, tensor in one.items():
            # Adam's first steps make a sign of the smallest gradient, and sums over processes round differently
            torch.testing.assert_close(
                other[each], tensor, atol=1e-4, rtol=0, msg=lambda text, at=(name, each): f"{at}: {text}"
            )
        moved = max(float((one[each] - before[each]).abs().max()) for each in one)
        assert moved > 1e-3
        losses = [read_checkpoint(tmp_path / each).provenance["perplexity"]["recovered"] for each in ("one", name)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-3)
