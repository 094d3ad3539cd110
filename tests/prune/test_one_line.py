"""What a dense model, a text or a name makes other libraries raise is one line, before anything is learned."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from runs import assert_refused, prune
from safetensors.numpy import load_file, save_file

from ddp_vllm.cli import main
from ddp_vllm.masks import MASKS_FILE

pytestmark = pytest.mark.usefixtures("cache")
ODD: dict[str, Any] = {  # fields of a config that no model has so
    "hidden_act": "nope",
    "rope_parameters": {"rope_type": "nope", "rope_theta": 1e4},
    "dtype": "float8_e4m3fn",
    "rms_norm_eps": "x",
    "num_hidden_layers": "3",
    "vocab_size": None,
    "max_position_embeddings": "many",
    "tie_word_embeddings": "x",
    "layer_types": 5,
    "sliding_window": "x",
    "model_type": ["llama"],
    "quantization_config": "none",
}


def _with(model: Path, folder: Path, **changes: Any) -> Path:
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("field", ODD)
@pytest.mark.parametrize("more", [[], ["--dry-run"]], ids=["prune", "plan"])
def test_fields_of_a_config_that_no_model_has(
    more: list[str], field: str, tiny_model: Path, tiny_text: Path, tmp_path: Path
) -> None:
    model = _with(tiny_model, tmp_path / "model", **{field: ODD[field]})
    assert_refused(prune(model, tiny_text, tmp_path / "out", *more), 3, str(model))
    assert not (tmp_path / "out").exists()


def test_an_index_of_mixed_types(tiny_model: Path, tiny_text: Path, tmp_path: Path) -> None:
    model = _with(tiny_model, tmp_path / "model")
    (model / "model.safetensors").rename(model / "model-1.safetensors")
    (model / "model.safetensors.index.json").write_text('{"weight_map": {"a": 1, "b": "model-1.safetensors"}}')
    assert_refused(prune(model, tiny_text, tmp_path / "out"), 3, "names 1, not a file")


def test_an_adapter_beside_the_weights(tiny_model: Path, tiny_text: Path, tmp_path: Path) -> None:
    """transformers would load it too."""
    model = _with(tiny_model, tmp_path / "model")
    (model / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"]}')
    assert_refused(prune(model, tiny_text, tmp_path / "out"), 3, str(model), "adapter")


@pytest.mark.parametrize("name", ["o" * 250, os.fsdecode(b"o\xff")], ids=["long", "bytes"])
def test_names_of_outputs(name: str, tiny_model: Path, tiny_text: Path, tmp_path: Path) -> None:
    assert_refused(prune(tiny_model, tiny_text, tmp_path / name), 5, "bytes of UTF-8")
    assert list(tmp_path.iterdir()) == []


def test_names_of_models_and_texts(tiny_model: Path, tiny_text: Path, tmp_path: Path) -> None:
    """They are written into the checkpoint."""
    model = shutil.copytree(tiny_model, tmp_path / os.fsdecode(b"m\xff"))
    text = shutil.copy(tiny_text, tmp_path / os.fsdecode(b"t\xff.jsonl"))
    assert_refused(prune(model, tiny_text, tmp_path / "out"), 2, "model is", "no UTF-8")
    assert_refused(prune(tiny_model, text, tmp_path / "out"), 2, "data is", "no UTF-8")


def test_texts_that_cannot_be_read(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "error.txt").symlink_to("/proc/self/mem")  # even root cannot read its beginning
    assert_refused(prune(tiny_model, tmp_path / "error.txt", tmp_path / "out"), 4, "error.txt cannot be read")
    os.mkfifo(tmp_path / "pipe.txt")
    assert_refused(prune(tiny_model, tmp_path / "pipe.txt", tmp_path / "out"), 4, "pipe.txt is not a file")


@pytest.mark.parametrize("recipe", [{"data": 5}, {"data": 5, "model": "m"}, {"context_length": "x"}, {"sparsity": []}])
def test_masks_of_an_odd_recipe(recipe: dict[str, Any], tiny_model: Path, pruned: Path, tmp_path: Path) -> None:
    masks = tmp_path / MASKS_FILE
    save_file(load_file(pruned / MASKS_FILE), masks, {"ddp": json.dumps({"recipe": recipe})})
    arguments = ["apply", str(tiny_model), "--masks", str(masks), "-o", str(tmp_path / "out")]
    result = CliRunner().invoke(main, arguments)
    if recipe.keys() <= {"data", "model"}:  # apply asks for neither
        assert result.exit_code == 0, result.output
    else:
        assert_refused(result, 7, "its provenance.recipe")


def test_a_flipped_bit_in_masks_is_found(tiny_model: Path, pruned: Path, tmp_path: Path) -> None:
    content = bytearray((pruned / MASKS_FILE).read_bytes())
    content[-1] ^= 1  # of the last mask
    (tmp_path / MASKS_FILE).write_bytes(content)
    arguments = ["apply", str(tiny_model), "--masks", str(tmp_path / MASKS_FILE), "-o", str(tmp_path / "out")]
    assert_refused(CliRunner().invoke(main, arguments), 7, "do not match their checksum")


def test_a_tensor_in_two_files_is_refused(tiny_model: Path, pruned: Path, tiny_text: Path, tmp_path: Path) -> None:
    """One program would take the first, another the second."""
    folder = Path(shutil.copytree(pruned, tmp_path / "pruned"))
    shutil.copy(folder / "model.safetensors", folder / "model-2.safetensors")
    assert_refused(CliRunner().invoke(main, ["inspect", str(folder)]), 7, "is in model-2.safetensors and model")


@pytest.mark.parametrize("field", ["hidden_act", "rope_parameters"])
def test_eval_of_a_dense_model_that_no_class_can_load(field: str, tiny_model: Path, tmp_path: Path) -> None:
    model = _with(tiny_model, tmp_path / "model", **{field: ODD[field]})
    rows = tmp_path / "piqa_val.jsonl"
    rows.write_text(json.dumps({"goal": "melt ice", "sol1": "the sun", "sol2": "down", "label": 0}) + "\n")
    arguments = ["eval", str(model), "--tasks", "piqa", "--data", str(rows), "-o", str(tmp_path / "out")]
    assert_refused(CliRunner().invoke(main, arguments), 3, str(model), "cannot be loaded by lm-eval's hf backend")


def test_a_tokenizer_that_makes_its_library_panic(tiny_model: Path, tiny_text: Path, tmp_path: Path) -> None:
    """A panic in Rust is no Exception in Python."""
    model = _with(tiny_model, tmp_path / "model")
    content = json.loads((model / "tokenizer.json").read_text())
    content["model"]["continuing_subword_prefix"] = "a" * 100_000
    (model / "tokenizer.json").write_text(json.dumps(content))
    assert_refused(prune(model, tiny_text, tmp_path / "out"), 3, "no tokenizer that loads")
