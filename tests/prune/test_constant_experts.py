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
from any_models import ALONE, stack_experts
from commands import assert_refused, invoke, passed
from runs import heldout_of, prune, recover, weights
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from ddp_models.loading import load_model
from ddp_models.source import open_source
from ddp_prune.export import export
from ddp_prune.gates import GatedModel
from ddp_prune.masks_file import read_masks, read_scores
from ddp_training.loss import losses
from ddp_vllm.checkpoint import read_checkpoint
from ddp_vllm.errors import CheckpointError
from ddp_vllm.masks import MASKS_FILE
from ddp_vllm.pages.metrics import gather
from ddp_vllm.pages.summary import removed_parameters

TOKENS = torch.arange(5, 37)[None]


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
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, config=AutoConfig.from_pretrained(folder, trust_remote_code=True), trust_remote_code=True
    )
    computed = losses(model.eval(), heldout_of(dense(name), tiny_text))
    stated = checkpoint.provenance["perplexity"]["block_losses"]["pruned"]
    torch.testing.assert_close(torch.tensor(computed), torch.tensor(stated), atol=1e-5, rtol=0)
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


@pytest.mark.usefixtures("no_pictures")
def test_apply_recover_and_eval(
    dense: Callable[[str], Path], made: Callable[..., Path], tiny_text: Path, tmp_path: Path
) -> None:
    """Masks alone give the same folder; recovery trains the kept experts; the constants are evaluated too."""
    folder = made("mixtral")
    passed(invoke("apply", dense("mixtral"), "--masks", folder / MASKS_FILE, "-o", tmp_path / "again"))
    first, second = weights(folder), weights(tmp_path / "again")
    assert first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)
    passed(recover(folder, tmp_path / "recovered", "--tokens", "64", "--batch-size", "1", "--seq-len", "16"))
    recovered = read_checkpoint(tmp_path / "recovered")
    assert recovered.has_constants and recovered.layers == read_checkpoint(folder).layers
    assert any(not torch.equal(first[key], value) for key, value in weights(tmp_path / "recovered").items())
    card = (folder / "README.md").read_text()
    assert "vLLM 0.33 or newer without ddp-vllm" in card and "constant vectors now (MoNE" in card
    checkpoint = read_checkpoint(folder)
    gather(checkpoint)
    constants = sum(value.numel() for key, value in first.items() if key.endswith(".approx_value"))
    num_dense = sum(value.numel() for value in weights(dense("mixtral")).values())
    assert checkpoint.num_parameters + removed_parameters(checkpoint) == num_dense + constants
    assert_refused(invoke("quantize", folder, "--scheme", "FP8_DYNAMIC", "-o", tmp_path / "q"), 2, "unquantized only")


REFUSED: dict[str, tuple[str, list[str], tuple[str, ...]]] = {  # model, options, words
    "too few": (
        "mixtral",
        ["--sparsity", "0.9"],
        ("2 of 24 experts would be kept; keep 3 to 23, at least one per layer",),
    ),
    "both": ("mixtral", ["--whole-experts"], ("give one",)),
    "single channels": ("mixtral", ["--scope", "expert"], ("with --constant-experts it must be 'global'",)),
    "no mixture": ("olmo2", [], ("is not a mixture of experts",)),
    "leaving the router": ("glm4_moe", ["--whole-experts"], ("give one",)),
    "MLPs too": ("glm4_moe", ["--prune", "mlp,experts"], ("experts alone", "leave --prune out")),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str, dense: Callable[[str], Path], tiny_text: Path, tmp_path: Path) -> None:
    name, options, words = REFUSED[case]
    result = prune(dense(name), tiny_text, tmp_path / "out", "--constant-experts", *options)
    assert_refused(result, 2, *words)


def test_masks_without_means_are_refused(
    dense: Callable[[str], Path], made: Callable[..., Path], tmp_path: Path
) -> None:
    source, gates = open_source(str(dense("mixtral"))), read_masks(made("mixtral") / MASKS_FILE)[0]
    for scores, words in (({}, "lack the mean"), ({"means": {"experts": gates["experts"][:1]}}, "lack the mean")):
        with pytest.raises(CheckpointError, match=words):
            export(source, gates, tmp_path / "out", head_unit="constant expert", provenance={}, scores=scores)
    gates["experts"][0, :, 0] = 0.0
    with pytest.raises(CheckpointError, match="do not keep whole experts, at least one per layer"):
        export(source, gates, tmp_path / "out", head_unit="constant expert", provenance={})


def test_equally_many_of_each_layer(dense: Callable[[str], Path], tiny_text: Path, tmp_path: Path) -> None:
    """Experts that are stacked on disk are written one by one; of the parameters the constants are a part."""
    folder = shutil.copytree(dense("qwen3_5_moe"), tmp_path / "dense")
    stack_experts(folder)
    more = ["--scope", "layer", "--budget", "params", "--sparsity", "0.4"]
    passed(prune(folder, tiny_text, tmp_path / "pruned", "--constant-experts", *more))
    rows = [layer.expert_intermediate_sizes for layer in read_checkpoint(tmp_path / "pruned").layers]
    assert len({sum(map(bool, row or ())) for row in rows}) == 1
    config = json.loads((tmp_path / "pruned" / "config.json").read_text())
    assert len(config["approximate_experts"]) == len(rows) and "approximate_experts" not in config["text_config"]
