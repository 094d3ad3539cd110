"""Models, texts, outputs and masks that cannot be used: one line and an exit code each, and nothing left behind."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from runs import assert_refused, prune
from safetensors.torch import load_file, save_file

from ddp_models.source import open_source
from ddp_prune import train
from ddp_prune.export import export
from ddp_vllm.cli import main
from ddp_vllm.manifest import MANIFEST

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture(scope="module")
def pruned(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pruned checkpoint; nothing was learned."""
    source, folder = open_source(str(tiny_model)), tmp_path_factory.mktemp("pruned") / "pruned"
    gates = {"attn": torch.ones(3, 4), "mlp": torch.ones(3, 96)}
    gates["mlp"][:, 60:] = 0.0
    export(source, gates, folder, head_unit="kv-group", provenance={})
    return folder


def _copy(model: Path, folder: Path) -> Path:
    return Path(shutil.copytree(model, folder))


def _config(**changes: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps(config))

    return edit


def _no_tokenizer(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()


MODELS: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "unsupported family": (_config(model_type="gpt2"), ["'gpt2'", "supported: llama"]),
    "quantised": (_config(quantization_config={"quant_method": "awq"}), ["quantized"]),
    "tokenizer missing": (_no_tokenizer, ["no tokenizer", "tokenizer.json"]),
    "weights missing": (lambda folder: (folder / "model.safetensors").unlink(), [".safetensors"]),
    "index missing": (
        lambda folder: (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors"),
        ["model-00001-of-00002.safetensors", "neither model.safetensors nor model.safetensors.index.json"],
    ),
    "config broken": (lambda folder: (folder / "config.json").write_text("{"), ["config.json"]),
}


@pytest.mark.parametrize("case", MODELS)
def test_models_that_cannot_be_pruned(case: str, tiny_model: Path, tiny_text: Path, tmp_path: Path) -> None:
    edit, words = MODELS[case]
    model = _copy(tiny_model, tmp_path / "model")
    edit(model)
    assert_refused(prune(model, tiny_text, tmp_path / "out"), 3, str(model), *words)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_an_unknown_model_folder(tiny_text: Path, tmp_path: Path) -> None:
    for verb in (
        lambda: prune(tmp_path / "none", tiny_text, tmp_path / "out"),
        lambda: CliRunner().invoke(main, ["apply", str(tmp_path / "none"), "--masks", "m", "-o", str(tmp_path / "o")]),
    ):
        assert_refused(verb(), 3, str(tmp_path / "none"), "check the path")
    assert list(tmp_path.iterdir()) == []


TEXTS: dict[str, tuple[str, bytes | None, list[str]]] = {
    "empty": ("a.jsonl", b"", ["is empty"]),
    "binary": ("a.jsonl", b"\x00\xff\xfe{\x9d" * 50, ["cannot be read"]),
    "no parquet": ("a.parquet", b"PAR1 but no more", ["cannot be read"]),
    "too short": ("a.txt", b"a few words", ["tokens", "need", "--seq-len"]),
    "missing": ("a.jsonl", None, ["not a file"]),
    "no text column": ("a.jsonl", b'{"body": "x"}\n', ["body"]),
}


@pytest.mark.parametrize("case", TEXTS)
def test_texts_that_cannot_be_used(
    case: str, tiny_model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    name, content, words = TEXTS[case]
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert_refused(prune(tiny_model, tmp_path / name, tmp_path / "out"), 4, name, *words)
    assert [path.name for path in tmp_path.iterdir()] == [name] * (content is not None)
    assert capfd.readouterr().err == ""  # libraries add nothing to the one line


@pytest.mark.usefixtures("no_pictures")
def test_an_output_that_exists(pruned: Path, tiny_model: Path, tiny_text: Path, tmp_path: Path) -> None:
    output = _copy(pruned, tmp_path / "out")
    assert_refused(prune(tiny_model, tiny_text, output), 5, str(output), "--overwrite")
    masks = str(pruned / "ddp_masks.safetensors")
    result = CliRunner().invoke(main, ["apply", str(tiny_model), "--masks", masks, "-o", str(output)])
    assert_refused(result, 5, str(output), "--overwrite")
    (output / "old").write_text("")
    assert prune(tiny_model, tiny_text, output, "--overwrite").exit_code == 0
    assert not (output / "old").exists() and [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_output_that_is_no_model_or_cannot_be_written(tiny_model: Path, tiny_text: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    assert_refused(prune(tiny_model, tiny_text, tmp_path, "--overwrite"), 5, str(tmp_path), "leaves it alone")
    assert_refused(prune(tiny_model, tiny_text, tmp_path / "thesis.txt" / "out"), 5, "thesis.txt", "cannot be written")
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_the_dense_model_is_no_output(pruned: Path, tiny_model: Path, tiny_text: Path, tmp_path: Path) -> None:
    """Not even where ddp-vllm wrote it, as `fetch` does."""
    model = _copy(tiny_model, tmp_path / "model")
    (model / MANIFEST).touch()
    before = {path.name: path.read_bytes() for path in model.iterdir()}
    masks = str(pruned / "ddp_masks.safetensors")
    for output in (model, tmp_path / "." / "model"):
        assert_refused(prune(model, tiny_text, output, "--overwrite"), 5, "dense model", "choose another folder")
        arguments = ["apply", str(model), "--masks", masks, "-o", str(output), "--overwrite"]
        assert_refused(CliRunner().invoke(main, arguments), 5, "dense model")
    assert {path.name: path.read_bytes() for path in model.iterdir()} == before


def test_checkpoints_and_masks_that_contradict_themselves(pruned: Path, tiny_model: Path, tmp_path: Path) -> None:
    """Every way a checkpoint can be corrupted is in tests/test_checkpoint.py."""
    folder = _copy(pruned, tmp_path / "copy")
    config = json.loads((folder / "config.json").read_text())
    config["ddp_layers"][0]["intermediate_size"] = -3
    (folder / "config.json").write_text(json.dumps(config))
    assert_refused(CliRunner().invoke(main, ["inspect", str(folder)]), 7, "ddp_layers[0].intermediate_size is -3")
    assert_refused(CliRunner().invoke(main, ["inspect", str(tiny_model)]), 7, "not a pruned checkpoint")
    masks = str(folder / "model.safetensors")
    result = CliRunner().invoke(main, ["apply", str(tiny_model), "--masks", masks, "-o", str(tmp_path / "out")])
    assert_refused(result, 7, "no masks file")
    assert_refused(prune(folder, "a.jsonl", tmp_path / "out"), 3, "pruned already")
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]


def test_weights_that_are_not_numbers(tiny_model: Path, tiny_text: Path, tmp_path: Path) -> None:
    model = _copy(tiny_model, tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][0, 0] = float("nan")
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    assert_refused(prune(model, tiny_text, tmp_path / "out"), 3, "perplexity inf before pruning")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_tokenizer_of_another_model(tiny_model: Path, tiny_text: Path, tmp_path: Path) -> None:
    """Its numbers are no rows of the embedding: an IndexError, on a GPU an assertion in the device."""
    model = _copy(tiny_model, tmp_path / "model")
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": 320, "content": " lazy"})
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    result = prune(model, tiny_text, tmp_path / "out")
    assert_refused(result, 3, str(model), "token 320", "0 to 319", "belongs to the model")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("where", ["load", "Evaluation"])
def test_a_model_that_a_device_cannot_hold(
    where: str, tiny_model: Path, tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is made here: no GPU runs in these tests."""

    def run_out(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(train, where, run_out)
    assert_refused(prune(tiny_model, tiny_text, tmp_path / "out"), 6, str(tiny_model), "memory of a device", "--shard")
    assert list(tmp_path.iterdir()) == []


def test_an_index_that_points_outside_is_not_followed(tiny_model: Path, tiny_text: Path, tmp_path: Path) -> None:
    """Not even where the folder has a file of that name: masks would be learned on one, and the other cut."""
    model = _copy(tiny_model, tmp_path / "model")
    weights = (model / "model.safetensors").rename(model / "model-1.safetensors")
    (tmp_path / weights.name).write_bytes(weights.read_bytes())
    names = load_file(weights)
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, f"../{weights.name}")}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_refused(prune(model, tiny_text, tmp_path / "out"), 3, "'../model-1.safetensors', not a file of its folder")


def test_more_layers_than_the_config_states_are_refused(tiny_model: Path, tiny_text: Path, tmp_path: Path) -> None:
    """Before masks are learned."""
    model = _copy(tiny_model, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2, "layer_types": None}))
    assert_refused(prune(model, tiny_text, tmp_path / "out"), 3, "layers.2.", "config.json has 2 ")


def test_weights_in_eight_bits_are_refused(tiny_model: Path, tiny_text: Path, tmp_path: Path) -> None:
    """What was evaluated would not be what is exported."""
    model = _copy(tiny_model, tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    save_file(weights | {name: weights[name].to(torch.float8_e4m3fn)}, model / "model.safetensors")
    assert_refused(prune(model, tiny_text, tmp_path / "out"), 3, name, "F8_E4M3", "unquantized")


@pytest.mark.parametrize(("name", "value"), [("num_hidden_layers", 5 * 10**8), ("num_attention_heads", 2**31)])
def test_sizes_that_no_model_has_are_refused(name: str, value: int, tiny_model: Path, tmp_path: Path) -> None:
    model = _copy(tiny_model, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {name: value}))
    assert_refused(prune(model, tmp_path / "no text", tmp_path / "out"), 3, name, str(value), "10,000")
