"""Whole experts that constant vectors replace (MoNE): evaluated = masked = exported = read by transformers."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from any_models import write_model
from commands import passed
from runs import heldout_of, prune
from safetensors.torch import load_file

from ddp_models.loading import load_model
from ddp_models.source import open_source
from ddp_prune.gates import GatedModel
from ddp_prune.masks_file import read_masks, read_scores
from ddp_training.loss import losses
from ddp_vllm.checkpoint import read_checkpoint
from ddp_vllm.masks import MASKS_FILE

TOKENS = torch.arange(5, 37)[None]
ALONE = """
import sys
for name in ("ddp_vllm", "ddp_prune", "ddp_plugins"):
    sys.modules[name] = None  # an editable install would make them importable
import torch
from transformers import AutoModelForCausalLM
folder, saved = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32).eval()
tokens = torch.arange(5, 37)[None]
with torch.no_grad():
    logits = model(tokens).logits
    model.save_pretrained(saved)
    again = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32).eval()  # registered for this process
    assert torch.equal(again(tokens).logits, logits)
torch.save({"class": type(model).__module__, "logits": logits}, saved + "/logits.pt")
"""


@pytest.fixture(scope="module")
def dense(tiny_model: Path, tiny_experts: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that makes the dense folder of a model, once."""
    made = {"mixtral": tiny_experts}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = write_model(name, tmp_path_factory.mktemp(name))
            for file in tiny_model.glob("tokenizer*"):
                shutil.copy(file, made[name])
        return made[name]

    return make


@pytest.fixture(scope="module")
def made(
    dense: Callable[[str], Path], tiny_text: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """Return a function that prunes a model by the command, once."""
    folders: dict[str, Path] = {}

    def make(name: str, train: str = "masks") -> Path:
        if (case := f"{name}-{train}") not in folders:
            folders[case] = tmp_path_factory.mktemp("made") / case
            result = passed(prune(dense(name), tiny_text, folders[case], "--constant-experts", "--train", train))
            assert "whole experts" in result.stdout
        return folders[case]

    return make


def alone(folder: Path, work: Path) -> dict[str, Any]:
    """Return what transformers computes without our package."""
    environment = {"HF_MODULES_CACHE": str(work / "modules"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", ALONE, folder, work / "saved"]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return torch.load(work / "saved" / "logits.pt")


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("train", ["masks", "weights"])
@pytest.mark.parametrize("name", ["mixtral", "glm4_moe", pytest.param("minimax_m2", marks=pytest.mark.nightly)])
def test_evaluated_equals_exported(
    name: str, train: str, dense: Callable[[str], Path], made: Callable[..., Path], tiny_text: Path, tmp_path: Path
) -> None:
    folder = made(name, train)
    checkpoint, source = read_checkpoint(folder), open_source(str(dense(name)))
    rows = [row for layer in checkpoint.layers if (row := layer.expert_intermediate_sizes)]
    num_kept = [sum(map(bool, row)) for row in rows]
    assert sum(num_kept) == int(0.6 * len(rows) * len(rows[0])) and min(num_kept) >= 1
    config, stock = (json.loads((place / "config.json").read_text()) for place in (folder, dense(name)))
    assert set(config) - set(stock) == {"auto_map", "approximate_experts", "ddp_widths"}
    assert {key: config[key] for key in stock} == stock
    from transformers import AutoConfig, AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, config=AutoConfig.from_pretrained(folder, trust_remote_code=True), trust_remote_code=True
    )
    found = losses(model.eval(), heldout_of(dense(name), tiny_text))
    stated = checkpoint.provenance["perplexity"]["block_losses"]["pruned"]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(stated), atol=1e-5, rtol=0)
    result = alone(folder, tmp_path)
    assert result["class"].startswith("transformers.models.")
    with torch.no_grad():
        torch.testing.assert_close(result["logits"], model(TOKENS).logits, atol=1e-5, rtol=0)
    before, after = load_file(folder / "model.safetensors"), load_file(tmp_path / "saved" / "model.safetensors")
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    constants = [key for key in before if key.endswith(".approx_value")]
    assert len(constants) == len(rows) * len(rows[0]) - sum(num_kept) and any(before[key].any() for key in constants)
    if train == "masks":
        gates, gated = (
            read_masks(folder / MASKS_FILE)[0],
            GatedModel(load_model(source, "float32"), source.family, source.sizes, "constant expert"),
        )
        gated.means = read_scores(folder / MASKS_FILE)["means"]["experts"]
        with gated.masks(gates), torch.no_grad():
            torch.testing.assert_close(gated.model(TOKENS).logits, result["logits"], atol=1e-5, rtol=0)
        gated.means = None
        with gated.masks(gates), torch.no_grad():
            assert (gated.model(TOKENS).logits - result["logits"]).abs().max() > 1e-3
