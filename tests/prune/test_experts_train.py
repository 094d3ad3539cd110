"""Learning gates on the channels of experts: exact, repeatable, resumable, better than chance, fair to idle experts."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import invoke, passed
from runs import BLOCKS, STEPS, Lab, assert_same, prune
from safetensors.torch import load_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from ddp_prune.core import trainer as trainer_module
from ddp_vllm.checkpoint import read_checkpoint
from ddp_vllm.masks import MASKS_FILE

LAYERS, EXPERTS, CHANNELS = 2, 8, 24  # with experts; a third layer, the middle one, is dense
NUM_UNITS = LAYERS * EXPERTS * CHANNELS
IDLE = (0, 7)  # layer and number of an expert that no token is ever sent to


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """A Qwen3-MoE with the tokenizer of the tiny Llama."""
    folder = tmp_path_factory.mktemp("moe")
    for file in tiny_model.glob("tokenizer*"):
        shutil.copy(file, folder)
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=320, hidden_size=64, intermediate_size=40, moe_intermediate_size=CHANNELS, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=EXPERTS, num_experts_per_tok=2,
        mlp_only_layers=[1], norm_topk_prob=True, eos_token_id=0, initializer_range=0.2,
    )  # fmt: skip
    dense = Qwen3MoeForCausalLM(config)
    router = dense.model.layers[0].mlp.gate.weight.data
    router[4], router[6], router[7] = -router[3], -router[5], 0.0  # of each pair one scores above 0: they are the two
    dense.save_pretrained(folder)
    return folder


@pytest.fixture
def lab(model: Path, tmp_path: Path) -> Lab:
    return Lab(model, tmp_path, "auto")


VARIANTS: list[dict[str, Any]] = [
    {}, {"scope": "layer"}, {"controller": "alm", "scope": "expert"},
]  # fmt: skip


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_counts_are_exact_and_a_run_repeats_to_the_bit(changes: dict[str, Any], lab: Lab) -> None:
    first, second = lab.run("first", **changes), lab.run("second", **changes)
    assert_same(first, second)
    gates = first.gates["experts"]
    assert gates.shape == (LAYERS, EXPERTS, CHANNELS) and set(first.gates) == {"experts"}
    assert int((gates > 0).sum()) == round(0.6 * NUM_UNITS)
    assert (gates[gates > 0] != 1).any()
    axes = {"layer": (1, 2), "expert": 2}.get(changes.get("scope", ""))
    if axes is not None:
        counts = (gates > 0).sum(axes)
        assert counts.max() - counts.min() <= 1
    assert first.routed["experts"].sum(1).tolist() == [STEPS * 4 * 16 * 2] * LAYERS


def test_learning_beats_chance(lab: Lab) -> None:
    """The same four sequences in every step, so that losses can be compared."""
    seen: list[dict[str, float]] = []
    learned = lab.run("out", seen.append, blocks=BLOCKS[:4], steps=120, sparsity=0.5, polish=0.5)
    support = learned.gates["experts"] > 0
    shuffled = support.flatten()[torch.randperm(support.numel(), generator=torch.Generator().manual_seed(1))]
    with torch.no_grad(), lab.gated.masks({"experts": shuffled.view_as(support).float()}):
        chance = float(lab.gated.model(BLOCKS[:4], labels=BLOCKS[:4]).loss)
    assert seen[-1]["ce"] < seen[60]["ce"] - 0.1 and seen[-1]["ce"] < chance - 0.5


def test_an_expert_that_never_fires_is_not_pruned_for_that(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    learned = lab.run("fair")
    assert learned.routed["experts"][IDLE] == 0 and int((learned.routed["experts"] == 0).sum()) == 1
    assert int((learned.gates["experts"][IDLE] > 0).sum()) > 0.7 * CHANNELS
    assert (learned.z["experts"][IDLE] > 0.5).all()
    monkeypatch.setattr(trainer_module, "neutral_where_idle", lambda saliency, _: saliency)
    assert not lab.run("unfair").gates["experts"][IDLE].any()  # without our rule it would be the first to go


@pytest.mark.usefixtures("cache", "no_pictures")
def test_prune_inspect_and_apply(model: Path, tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    result = passed(prune(model, tiny_text, tmp_path / "pruned", "--scope", "expert"))
    checkpoint = read_checkpoint(tmp_path / "pruned")
    sizes = [layer.expert_intermediate_sizes for layer in checkpoint.layers]
    assert sizes[1] is None and sum(map(sum, filter(None, sizes))) == round(0.6 * NUM_UNITS)
    counts = checkpoint.provenance["routing"]["chosen"]
    assert set(counts) == {"0", "2"} and counts["0"][7] == 0 and sum(counts["2"]) == 6 * 2 * 16 * 2
    assert "experts that no token of the text was sent to, in layers 0 (1 of 8)" in result.stdout
    card = (tmp_path / "pruned" / "README.md").read_text()
    assert "| expert channels | 384 | 230 |" in card and "in layers 0 (1 of 8)" in card
    assert f"| 2 | {sum(map(bool, sizes[2] or ()))}/8 |" in card
    masks = tmp_path / "pruned" / MASKS_FILE
    passed(invoke("apply", model, "--masks", masks, "-o", tmp_path / "again"))
    again, pruned = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("again", "pruned"))
    assert again == pruned
    assert {"experts.gates", "experts.z", "experts.saliency"} == load_file(masks).keys()
