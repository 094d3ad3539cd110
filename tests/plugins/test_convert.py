"""Models that other tools pruned: converted, they say what the tool's own forward pass says, in every runtime."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from foreign_folders import FOLDERS
from tiny_models import PROMPTS, generate, load_model

from ddp_vllm.cli import main


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(main, [*map(str, words)])


def passed(*words: str | Path) -> str:
    result = run(*words)
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


@pytest.fixture(scope="session")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path, Any]]:
    """Return a function that gives a tool's folder, what convert makes of it, and the model as the tool has it."""
    root, made = tmp_path_factory.mktemp("converted"), dict[str, tuple[Path, Path, Any]]()

    def get(tool: str) -> tuple[Path, Path, Any]:
        if tool == "Torch-Pruning":
            pytest.importorskip("torch_pruning", reason="not installed; requirements/cpu.txt names it")
        if tool not in made:
            model = FOLDERS[tool](root / tool)
            passed("convert", root / tool, "-o", root / f"{tool}-converted")
            made[tool] = root / tool, root / f"{tool}-converted", model
        return made[tool]

    return get


@pytest.mark.parametrize("tool", FOLDERS)
def test_greedy_tokens_are_those_of_the_tools_own_forward_pass(tool: str, converted: Any) -> None:
    _, folder, model = converted(tool)
    ours = load_model(folder)
    for prompt in PROMPTS:
        ids, said = torch.tensor([prompt]), generate(ours, prompt)
        torch.testing.assert_close(ours(ids).logits, model(ids).logits, atol=1e-4, rtol=1e-4)
        for step, token in enumerate(said["tokens"]):  # some tools' models have no cache that counts right
            before = torch.tensor([prompt + said["tokens"][:step]])
            assert model(before).logits[0, -1].argmax().item() == token
