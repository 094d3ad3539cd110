"""Mixtures with dense layers or shared experts: what is trained is written, with every kind of trained weights."""

import shutil
from pathlib import Path

import pytest
import torch
from any_models import write_model
from commands import passed
from runs import heldout_of, prune, recover, weights
from transformers import AutoModelForCausalLM

from ddp_prune.core.loss import losses
from ddp_vllm.checkpoint import read_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cache", "no_pictures")]
LORA = {"prune": ["--train", "lora"], "recover": ["--train", "lora"]}
IN_8_BITS = {
    "prune": ["--train", "weights", "--optimizer", "adamw-8bit"],
    "recover": ["--train", "weights", "--optimizer", "adamw-8bit"],
}
WHOLE = ["--whole-experts"]  # a stock folder, which transformers' own classes read


def assert_written_as_evaluated(folder: Path, text: Path, stage: str) -> None:
    stated = read_checkpoint(folder).provenance["perplexity"]["block_losses"][stage]
    plain = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    found = torch.tensor(losses(plain, heldout_of(folder, text)))
    torch.testing.assert_close(found, torch.tensor(stated), atol=2e-4, rtol=0)


@pytest.mark.parametrize(
    ("family", "options", "more"),
    [
        pytest.param("qwen3_moe", LORA, [], id="qwen3_moe-lora"),  # its middle layer is dense
        pytest.param("deepseek_v2", LORA, WHOLE, id="deepseek_v2-lora-whole"),  # a dense layer and shared experts
        *(
            pytest.param(family, options, more, id=f"{family}-{name}{'-whole' * bool(more)}", marks=pytest.mark.nightly)
            for family, options, name, more in [
                ("qwen3_moe", IN_8_BITS, "8bit", WHOLE),
                ("qwen2_moe", IN_8_BITS, "8bit", []),
                ("deepseek", LORA, "lora", []),
                ("mixtral", LORA, "lora", WHOLE),
            ]
        ),
    ],
)
def test_what_was_trained_is_written(
    family: str, options: dict[str, list[str]], more: list[str], tiny_model: Path, tiny_text: Path, tmp_path: Path
) -> None:
    write_model(family, tmp_path / "dense")
    for file in tiny_model.glob("tokenizer*"):
        shutil.copy(file, tmp_path / "dense")
    with torch.compiler.set_stance("force_eager"):
        rate = ["--learning-rate", "5e-3"]
        passed(prune(tmp_path / "dense", tiny_text, tmp_path / "pruned", *options["prune"], *more, *rate))
        assert_written_as_evaluated(tmp_path / "pruned", tiny_text, "pruned")
        passed(recover(tmp_path / "pruned", tmp_path / "out", *options["recover"], "--tokens", "96", *rate))
    assert_written_as_evaluated(tmp_path / "out", tiny_text, "recovered")
    before, after = weights(tmp_path / "pruned"), weights(tmp_path / "out")
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert any("self_attn" in name for name in moved)
    routed = ("mlp.experts.", "block_sparse_moe.experts.")
    assert moved.issuperset(
        name for name in before if name.endswith("_proj.weight") and not any(map(name.count, routed))
    )
