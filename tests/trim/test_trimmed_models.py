"""Configs and weights of all kinds of models with fewer tokens."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from commands import assert_refused, edit_json, invoke, passed
from edited_models import edited
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    Ernie4_5_MoeConfig,
    Gemma3Config,
)

from ddp_vllm.masks import MASKS_FILE, read_provenance

GENERATION, PROCESSOR = "generation_config.json", "preprocessor_config.json"

UNPRUNED: dict[str, dict[str, Any]] = {  # with 64 positions
    "gpt2": {"n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4},  # no linear layers
    "opt": {"max_position_embeddings": 64, "ffn_dim": 48, "word_embed_proj_dim": 16, "do_layer_norm_before": False},
    "mpt": {"max_seq_len": 64, "d_model": 32, "n_layers": 2, "n_heads": 4},  # its MLPs add the residual
    "granitemoe": {  # stacked experts
        "max_position_embeddings": 64,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": True,
    },
}


@pytest.mark.parametrize("kind", UNPRUNED)
def test_a_model_in_which_nothing_can_be_pruned(
    proving_here: None, kind: str, dense: Path, text: Path, tmp_path: Path
) -> None:
    stated = json.loads((shutil.copytree(dense, tmp_path / "model") / "config.json").read_text())
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    names = [*(sizes if "max_position_embeddings" in UNPRUNED[kind] else sizes[:1]), *(n for n in stated if "_id" in n)]
    config = AutoConfig.for_model(kind, **{name: stated[name] for name in names} | UNPRUNED[kind])
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path / "model")
    passed(invoke("trim", tmp_path / "model", "--tokens", 400, "--data", text, "-o", tmp_path / "new"))
    provenance = read_provenance(tmp_path / "new" / MASKS_FILE)
    assert provenance["proof"]["logits"] < 1e-5
    weights = {name: weight for name, weight in model.named_parameters() if weight.dim() > 1}
    matrices = [weight for name, weight in weights.items() if "wpe" not in name and "pos" not in name]
    read = sum(weight.numel() / (2 if weight.dim() == 3 else 1) for weight in matrices)  # of four experts, two
    assert provenance["trimmed"]["read"][0] == read
    words = ("eval", tmp_path / "new", "--text", text, "--tokens", 128, "--max-length")
    assert "× [" in passed(invoke(*words, 64)).stdout
    assert_refused(invoke(*words, 65), 2, "max-length", "takes 64")
    assert_refused(invoke("prune", tmp_path / "new", "--sparsity", 0.2, "--dry-run"), 3)


def test_an_embedding_that_is_stored_as_the_head_too_is_written_once(dense: Path, text: Path, tmp_path: Path) -> None:
    folder = edited(dense, tmp_path / "model", "config.json", tie_word_embeddings=True)
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}, folder / "model.safetensors")
    passed(invoke("trim", folder, "--tokens", 384, "--data", text, "-o", tmp_path / "new", "--no-proof"))
    assert load_file(tmp_path / "new" / "model.safetensors").keys() == weights.keys() - {"lm_head.weight"}
    assert_refused(invoke("inspect", tmp_path / "new"), 7, "new is trimmed, not pruned", "report.html")


def test_ids_in_settings_are_renumbered(dense: Path, text: Path, tmp_path: Path) -> None:
    """And neither positions, biases nor sizes."""
    before, folder = AutoTokenizer.from_pretrained(dense), shutil.copytree(dense, tmp_path / "model")

    def settings(one: int, other: int) -> list[tuple[str, str, Any]]:
        return [
            (GENERATION, "sequence_bias", [[[one, other], 5], [[one], -2.5]]),
            ("processor_config.json", "sequence_bias", {f"[{one}, {other}]": 5, str(one): 2}),
            (GENERATION, "forced_decoder_ids", [[1, one], [2, None]]),
            (GENERATION, "force_words_ids", [[[one, other], [one]]]),
            (GENERATION, "bad_words_ids", [[one], [other, one]]),
            (GENERATION, "begin_suppress_tokens", [one, -1]),
            (GENERATION, "no_repeat_ngram_size", 3),
            (PROCESSOR, "image_token_id", {"tile": one, "row": [other]}),
            (PROCESSOR, "kinds", [{"boi_token_index": one}]),
            ("processor_config.json", "image_processor", {"im_start_id": other}),
            ("config.json", "audio", {"video_token_ids": [one]}),
            ("config.json", "stop_token_ids", [[one], [other, one]]),
        ]

    for name, setting, value in settings(505, 480):
        edit_json(folder / name, **{setting: value})
    passed(invoke("trim", folder, "--tokens", 400, "--data", text, "-o", tmp_path / "new", "--no-proof"))
    after = AutoTokenizer.from_pretrained(tmp_path / "new")
    new = after.convert_tokens_to_ids(before.convert_ids_to_tokens([505, 480]))
    assert new != [505, 480]
    for name, setting, value in settings(*new):
        assert json.loads((tmp_path / "new" / name).read_text())[setting] == value, (name, setting)


def test_a_file_of_settings_that_is_a_list(dense: Path, text: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(dense, tmp_path / "model")
    (folder / "stages_config.json").write_text(
        '[{"eos_token_id": 512}, {"eos_token_id": 512.0}, {"eos_token_id": ["512", "<eos>"]}]'
    )
    passed(invoke("trim", folder, "--tokens", 400, "--data", text, "-o", tmp_path / "new", "--no-proof"))
    assert json.loads((tmp_path / "new" / "stages_config.json").read_text()) == [
        {"eos_token_id": 382},
        {"eos_token_id": 382},
        {"eos_token_id": [382, "<eos>"]},
    ]


def test_a_number_of_tokens_that_the_config_leaves_to_its_class(dense: Path, text: Path, tmp_path: Path) -> None:
    """As the published configs of Gemma 3 with images."""
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    language = small | {"num_key_value_heads": 1, "head_dim": 8}
    vision = small | {"image_size": 28, "patch_size": 14}
    folder = shutil.copytree(dense, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(dense)
    config = Gemma3Config(
        text_config=language, vision_config=vision, mm_tokens_per_image=1, image_token_index=tokenizer.eos_token_id,
        boi_token_index=tokenizer.eos_token_id, eoi_token_index=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id, bos_token_id=tokenizer.bos_token_id, pad_token_id=None,
    )  # fmt: skip
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    stated = json.loads((folder / "config.json").read_text())["text_config"]
    del stated["vocab_size"]
    edit_json(folder / "config.json", text_config=stated)
    passed(invoke("trim", folder, "--tokens", 400, "--data", text, "-o", tmp_path / "new", "--no-proof"))
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "new")
    assert model.config.text_config.vocab_size == 384 == len(model.get_input_embeddings().weight)
    layers = model.get_decoder().layers.parameters()  # the tower of images is not read
    read = 384 * 16 + sum(weight.numel() for weight in layers if weight.dim() > 1)
    assert read_provenance(tmp_path / "new" / MASKS_FILE)["trimmed"]["read"][1] == read


def test_a_decode_step_reads_the_chosen_experts(dense: Path, text: Path, tmp_path: Path) -> None:
    """Of a mixture whose config names their number in its own way."""
    folder = shutil.copytree(dense, tmp_path / "model")
    stated = json.loads((dense / "config.json").read_text())
    experts = {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16, "moe_layer_start_index": 0}
    config = Ernie4_5_MoeConfig(**stated | {"model_type": "ernie4_5_moe"} | experts)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    passed(invoke("trim", folder, "--tokens", 400, "--data", text, "-o", tmp_path / "new", "--no-proof"))
    weights = {name: weight.numel() for name, weight in model.model.layers.named_parameters() if weight.dim() > 1}
    chosen = sum(number / 2 for name, number in weights.items() if "mlp.experts." in name)
    assert chosen == 2 * 2 * 3 * 16 * 32  # of each layer's four experts, two
    read = sum(number for name, number in weights.items() if "mlp.experts." not in name) + chosen
    stated_read = read_provenance(tmp_path / "new" / MASKS_FILE)["trimmed"]["read"]
    assert stated_read == [read + 640 * 32, read + 384 * 32]


def test_ids_that_the_config_leaves_to_its_class_are_written(dense: Path, text: Path, tmp_path: Path) -> None:
    """Else the Llama class, whose BOS is 1, would mean another token; a default that is no token stays out."""
    model = json.loads((dense / "tokenizer.json").read_text())["model"]
    turned = model | {"vocab": {token: 511 - number for token, number in model["vocab"].items()}}
    folder = edited(dense, tmp_path / "model", "tokenizer.json", model=turned)
    stated = json.loads((dense / "config.json").read_text())
    edit_json(folder / "config.json", bos_token_id=None, eos_token_id=None, pad_token_id=None)
    (folder / "generation_config.json").unlink()
    passed(invoke("trim", folder, "--tokens", 384, "--data", text, "-o", tmp_path / "new", "--no-proof"))
    before, after = (AutoTokenizer.from_pretrained(one) for one in (folder, tmp_path / "new"))
    config = json.loads((tmp_path / "new" / "config.json").read_text())
    new = after.convert_tokens_to_ids(before.convert_ids_to_tokens([1, 2]))
    assert None not in new and new != [1, 2] and [config["bos_token_id"], config["eos_token_id"]] == new
    assert "pad_token_id" not in config and config.keys() == stated.keys() - {"pad_token_id"}
