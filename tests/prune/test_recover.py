"""Recovery: the weights of a pruned model learn, are written as they were evaluated, and a run goes on to the bit."""

from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from runs import prune

from ddp_vllm.cli import main


def recover(pruned: Path, output: Path, *more: str) -> Result:
    return CliRunner().invoke(main, ["recover", str(pruned), "-o", str(output), *more])


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("method", ["full", "lora"])
def test_recover(method: str, tiny_model: Path, tiny_text: Path, tmp_path: Path) -> None:
    assert prune(tiny_model, tiny_text, tmp_path / "pruned").exit_code == 0
    result = recover(tmp_path / "pruned", tmp_path / "out", "--method", method, "--tokens", "3200")
    print(result.output)
    assert result.exit_code == 0, result.output + str(result.exception)
