"""What trim refuses, before text and weights are read."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import assert_refused, invoke
from edited_models import edited
from safetensors.torch import load_file, save_file
from seams import trim_module
from transformers import AutoModelForCausalLM, AutoTokenizer, GPTNeoConfig, HyperCLOVAXConfig

from random_models import SENTENCES

WORD_PIECE = {"type": "WordPiece", "vocab": {"a": 0, "?": 1}, "unk_token": "?", "max_input_chars_per_word": 9} | {
    "continuing_subword_prefix": "##"
}


def test_blank_text_is_no_text(dense: Path, tmp_path: Path) -> None:
    """Neither counted nor held out, as it would tell nothing of the cost."""
    (blank := tmp_path / "blank.jsonl").write_text((json.dumps({"text": " \n"}) + "\n") * 3)
    refused = invoke("trim", dense, "--tokens", 400, "--data", blank, "-o", tmp_path / "new")
    assert_refused(refused, 4, "blank.jsonl has no text")
    with blank.open("a") as file:
        file.writelines(json.dumps({"text": sentence}) + "\n" for sentence in SENTENCES[:2])
    texts = trim_module.read_texts(str(blank), AutoTokenizer.from_pretrained(dense), print)
    assert sorted([*texts.counted, *texts.held_out[str(blank)]]) == sorted(SENTENCES[:2])


def test_a_trimmed_or_pruned_model_is_refused(
    dense: Path, text: Path, trimmed: tuple[Path, str], tmp_path: Path
) -> None:
    """Pages state the cost of one trimming, so two would hide the first."""
    pruned = edited(dense, tmp_path / "pruned", "config.json", ddp_layers=[{}, {}])
    for folder, words in ((trimmed[0], ("trim model to as many tokens",)), (pruned, ("dense", "first"))):
        refused = invoke("trim", folder, "--tokens", 300, "--data", text, "-o", tmp_path / "new", "--no-proof")
        assert_refused(refused, 3, *words)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("tokenizer.json", {"model": WORD_PIECE}, ("WordPiece", "BPE and Unigram")),
        (
            "tokenizer.json",
            {"model": {name: WORD_PIECE[name] for name in WORD_PIECE if name != "type"}},
            ("WordPiece",),
        ),
        ("tokenizer.json", {"model": {}}, ("cannot be read",)),
        (
            "tokenizer.json",
            {"model": {"type": "Unigram", "unk_id": 0, "vocab": [["a", 0.0]]}, "pre_tokenizer": None},
            ("single bytes",),
        ),
        ("tokenizer.json", {"pre_tokenizer": {"type": "Whitespace"}}, ("single bytes",)),
        (  # byte fallback without the tokens that it falls back to
            "tokenizer.json",
            {
                "model": {"type": "BPE", "byte_fallback": True, "vocab": {"<0x00>": 0}, "merges": []},
                "pre_tokenizer": None,
            },
            ("single bytes",),
        ),
        (
            "tokenizer.json",
            {"model": {"type": "BPE", "dropout": 0.1, "vocab": {"a": 0}, "merges": []}},
            ("dropout 0.1",),
        ),
        ("generation_config.json", {"pad_token_id": "600"}, ("pad_token_id is 600", "no such token")),
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["a.B", None]}}, ("code of its own",)),
        ("config.json", {"pad_token_id": 600}, ("pad_token_id is 600", "no such token")),
        ("generation_config.json", {"forced_decoder_ids": [3]}, ("forced_decoder_ids is no list of pairs",)),
        ("preprocessor_config.json", {"image_token_id": [{"a": 600}]}, ("image_token_id is 600", "no such token")),
        ("config.json", {"vocab_size": 700}, ("lm_head.weight has shape [640, 32]", "700")),
        ("config.json", {"vocabulary_map": {"IMGIMGAZ": 300}}, ("vocabulary_map",)),
        ("config.json", {"ple_layer_ids": [1]}, ("ple_layer_ids",)),
        ("config.json", {"audio_config": {"vocab_offset": 500}}, ("vocab_offset",)),
        ("config.json", {"quantization_config": {"quant_method": "fp8"}}, ("quantized",)),
        ("config.json", {"ddp_widths": []}, ("ddp_widths is no object",)),
    ],
)
def test_refused(
    name: str, changes: dict[str, Any], words: tuple[str, ...], dense: Path, text: Path, tmp_path: Path
) -> None:
    """Before text and weights are read."""
    folder = edited(dense, tmp_path / "model", name, **changes)
    refused = invoke("trim", folder, "--tokens", 384, "--data", text, "-o", tmp_path / "new")
    assert_refused(refused, 3, *words)
    assert not refused.stdout


def test_an_output_head_that_is_unknown(dense: Path, text: Path, tmp_path: Path) -> None:
    """HyperCLOVAX multiplies its logits by what Granite divides them by; the stated bits per byte would be others."""
    stated = json.loads((dense / "config.json").read_text())
    folder = edited(dense, tmp_path / "model", "config.json")
    config = HyperCLOVAXConfig(**stated | {"model_type": "hyperclovax", "logits_scaling": 0.25})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    refused = invoke("trim", folder, "--tokens", 384, "--data", text, "-o", tmp_path / "new", "--no-proof")
    assert_refused(refused, 3, "HyperCLOVAXForCausalLM computes its logits")
    assert not refused.stdout


def small_gpt_neo(dense: Path, folder: Path) -> Path:
    """Write a model with 64 embeddings of positions and the tokenizer of `dense`."""
    stated = json.loads((shutil.copytree(dense, folder) / "config.json").read_text())
    ids = {name: stated[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    sizes = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global"], 2]]}
    config = GPTNeoConfig(vocab_size=640, max_position_embeddings=64, **sizes, **ids)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def test_a_table_of_tokens_of_another_name_is_refused(dense: Path, text: Path, tmp_path: Path) -> None:
    """Its rows would not be those of the tokens that stay."""
    folder = small_gpt_neo(dense, tmp_path / "model")
    weights = load_file(folder / "model.safetensors") | {"medusa.weight": torch.zeros(640, 4)}
    save_file(weights, folder / "model.safetensors")
    refused = invoke("trim", folder, "--tokens", 384, "--data", text, "-o", tmp_path / "new")
    assert_refused(refused, 3, "medusa.weight has 640 rows and vocab_size is 640")


def test_damaged_weights_are_refused(dense: Path, text: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(dense, tmp_path / "model")
    os.truncate(folder / "model.safetensors", 5000)
    result = invoke("trim", folder, "--tokens", 384, "--data", text, "-o", tmp_path / "new")
    assert_refused(result, 3, "model.safetensors is truncated")


@pytest.mark.parametrize("tokens", [100, 128, 640])
def test_too_few_or_too_many_tokens(tokens: int, dense: Path, text: Path, tmp_path: Path) -> None:
    result = invoke("trim", dense, "--tokens", tokens, "--data", text, "-o", tmp_path / "new")
    assert_refused(result, 2, "tokens", str(tokens))
