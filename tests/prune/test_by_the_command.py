"""What the commands write, with values: families, number formats, provenance, recovery's options."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import passed
from family_cases import CASES, SIZES
from runs import die_at, heldout_of, prune, recover, weights
from transformers import AutoModelForCausalLM

from ddp_prune.masks_file import read_masks
from ddp_prune.models.evaluation import Evaluation
from ddp_prune.recover import WeightTrainer
from ddp_prune.text.tokens import load_tokenizer
from ddp_vllm.checkpoint import read_checkpoint
from ddp_vllm.families import register_pruned
from ddp_vllm.masks import MASKS_FILE

pytestmark = pytest.mark.usefixtures("cache", "no_pictures")


def dense(name: str, tiny_model: Path, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Write a random model of a family with the tiny tokenizer; biases and norms away from 0 and 1."""
    torch.manual_seed(0)
    config = type(CASES[name])(**CASES[name].to_dict() | {"vocab_size": 320, "max_position_embeddings": 256})
    model: Any = AutoModelForCausalLM.from_config(config)
    for key, value in model.named_parameters():
        if key.endswith("bias") or "norm" in key:
            torch.nn.init.normal_(value, mean=float(value.detach().mean()), std=0.3)
    model.to(dtype).save_pretrained(folder)
    for file in tiny_model.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


def perplexity(folder: Path, text: Path, name: str) -> float:
    """Evaluate a written folder anew, as transformers loads it."""
    checkpoint = read_checkpoint(folder)
    register_pruned(checkpoint.config)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    evaluation = Evaluation({"text": heldout_of(folder, text)}, load_tokenizer(str(folder)))
    evaluation.evaluate(name, model)
    return float(evaluation.perplexity("text")[name])


@pytest.mark.parametrize(
    ("name", "dtype", "train"),
    [
        ("phi3", torch.float32, "masks"),
        ("gemma2", torch.float32, "masks"),
        ("granite", torch.bfloat16, "weights"),  # with every bias; joint training rounds masters into bfloat16
        ("qwen2", torch.bfloat16, "masks"),
    ],
)
def test_the_written_model_is_the_evaluated_one(
    name: str, dtype: torch.dtype, train: str, tiny_model: Path, tiny_text: Path, tmp_path: Path
) -> None:
    model = dense(name, tiny_model, tmp_path / "dense", dtype)
    passed(prune(model, tiny_text, tmp_path / "out", "--train", train, "--dtype", str(dtype).removeprefix("torch.")))
    checkpoint = read_checkpoint(tmp_path / "out")
    stated = checkpoint.provenance["perplexity"]
    again = {stage: perplexity(folder, tiny_text, stage) for stage, folder in
             (("dense", model), ("pruned", tmp_path / "out")) if stage == "pruned"}  # fmt: skip
    close = 1e-5 if dtype == torch.float32 else 0.02
    assert again["pruned"] == pytest.approx(stated["pruned"], rel=close)
    gates, _ = read_masks(tmp_path / "out" / MASKS_FILE)
    heads = sum(len(layer.query_heads_per_kv_head) for layer in checkpoint.layers)
    assert int((gates["attn"] > 0).sum()) == heads == round(0.6 * SIZES["num_hidden_layers"] * 4)
    assert sum(layer.intermediate_size for layer in checkpoint.layers) == round(0.6 * 4 * 72)


def test_provenance_states_what_the_pages_read(
    tiny_model: Path, tiny_experts: Path, tiny_text: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other.txt"
    other.write_text("Rain fell on the harbour while the boats waited. " * 200)
    passed(prune(tiny_model, tiny_text, tmp_path / "dense", "--watch", str(other)))
    stated = read_checkpoint(tmp_path / "dense").provenance
    assert stated["targets"] == pytest.approx({"attn": 0.4, "mlp": 0.4}, abs=0.02)
    assert set(stated["rounding"]) == {"attn", "mlp"} and list(stated["watched"]) == ["other.txt"]
    assert set(stated["rounding"]["mlp"]) == {"raw_sparsity", "revived", "dropped"}
    assert stated["search_steps"] == 4 and stated["texts"] == [tiny_text.name] and len(stated["run_id"]) == 16
    passed(prune(tiny_experts, tiny_text, tmp_path / "experts"))
    chosen = read_checkpoint(tmp_path / "experts").provenance["routing"]["chosen"]
    # 6 steps of 2 sequences of 16 tokens, two experts each
    assert list(chosen) == ["0", "1"] and all(sum(counts) == 6 * 2 * 16 * 2 for counts in chosen.values())


@pytest.mark.parametrize(
    ("more", "changes"),
    [
        (["--distillation", "0"], True),
        (["--warmup", "0.9"], True),
        (["--learn-from", "all"], False),  # the same: the text has no assistant
    ],
)
def test_options_of_recover_change_what_is_trained(
    more: list[str], changes: bool, tiny_model: Path, tiny_text: Path, tmp_path: Path
) -> None:
    passed(prune(tiny_model, tiny_text, tmp_path / "pruned"))
    passed(recover(tmp_path / "pruned", tmp_path / "plain", "--train", "weights"))
    passed(recover(tmp_path / "pruned", tmp_path / "other", "--train", "weights", *more))
    first, second = weights(tmp_path / "plain"), weights(tmp_path / "other")
    assert any(not torch.equal(first[name], second[name]) for name in first) is changes


@pytest.mark.parametrize("stop", [2, 5])
def test_the_papers_search_with_trained_weights_resumes_to_the_bit(
    stop: int, tiny_model: Path, tiny_text: Path, tmp_path: Path
) -> None:
    """Killed in the search and in the polish."""
    recipe = tmp_path / "alm.toml"
    recipe.write_text("[alm]\nlearning_rate = 0.1\n")

    def run(name: str) -> Any:
        options = ("--controller", "alm", "--recipe", str(recipe), "--train", "weights", "--save-every", "1")
        return prune(tiny_model, tiny_text, tmp_path / name, *options)

    passed(run("anew"))
    die_at(stop, lambda: run("out"))
    assert f"resuming after step {stop}" in passed(run("out")).output
    first, second = weights(tmp_path / "anew"), weights(tmp_path / "out")
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_recovery_by_low_rank_resumes_to_the_bit(tiny_model: Path, tiny_text: Path, tmp_path: Path) -> None:
    passed(prune(tiny_model, tiny_text, tmp_path / "pruned"))

    def run(name: str) -> Any:
        return recover(tmp_path / "pruned", tmp_path / name, "--train", "lora", "--save-every", "1", "--tokens", "192")

    passed(run("anew"))
    die_at(3, lambda: run("out"), WeightTrainer)
    assert "resuming after step 3" in passed(run("out")).output
    first, second = weights(tmp_path / "anew"), weights(tmp_path / "out")
    assert all(torch.equal(first[name], second[name]) for name in first)
