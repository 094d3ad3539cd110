"""A tokenizer that omits the BOS token which the model needs: the warning of a run, and its remedy."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import passed
from runs import prune
from transformers import AutoModelForCausalLM

from ddp_prune.models.evaluation import bos_warning
from ddp_prune.text.tokens import load_tokenizer

BOS, VOCABULARY = 7, 320
pytestmark = pytest.mark.usefixtures("no_pictures")


@pytest.fixture(scope="module")
def leaning(tiny_model: Path, tiny_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model trained on text after BOS, and on random tokens without it."""
    folder = Path(shutil.copytree(tiny_model, tmp_path_factory.mktemp("bos") / "model"))
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), load_tokenizer(str(folder))
    text = torch.tensor(tokenizer(tiny_text.read_text(), verbose=False)["input_ids"])
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(80):
        blocks = torch.randint(1, VOCABULARY, (16, 16))
        for row in range(8):
            start = int(torch.randint(len(text) - 15, ()))
            blocks[row] = torch.cat([torch.tensor([BOS]), text[start : start + 15]])
        model(blocks, labels=blocks).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.config.bos_token_id = BOS
    model.save_pretrained(folder)
    return folder


def test_a_run_warns_of_a_missing_bos_and_its_remedy_works(leaning: Path, tiny_text: Path, tmp_path: Path) -> None:
    warned = passed(prune(leaning, tiny_text, tmp_path / "out"))
    found = re.search(
        r"warning: the tokenizer of .* omits BOS.* on held-out text is ([\d.]+) instead of ([\d.]+); (.*)",
        warned.output,
    )
    assert found and float(found[1]) < 0.9 * float(found[2])
    remedy = found[3].removeprefix("add it: ")
    mended = Path(shutil.copytree(leaning, tmp_path / "mended"))
    exec(f"import transformers; {remedy}".replace(str(leaning), str(mended)))  # the line that users are told
    assert load_tokenizer(str(mended))("fox")["input_ids"][0] == BOS
    silent = passed(prune(mended, tiny_text, tmp_path / "after"))
    assert "omits BOS" not in silent.output


def test_there_is_no_warning_for_a_model_that_needs_no_bos(
    tiny_model: Path, tokenizer: Any, load: Callable[..., Any], tiny_text: Path
) -> None:
    """Many configs name a BOS token that no text begins with, such as Qwen's."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    heldout = load(tiny_text).heldout
    for bos in (None, BOS, VOCABULARY):
        model.config.bos_token_id = bos
        assert bos_warning(model, "tiny", tokenizer, heldout) == ""
