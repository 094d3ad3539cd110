"""Models, texts, outputs and masks that cannot be used: one line and an exit code each, and nothing left behind.

What `open_source` refuses is in test_model.py, every kind of bad text in test_documents.py, and every way to corrupt a
checkpoint in tests/test_checkpoint.py.
"""

import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from commands import assert_refused, invoke, passed
from runs import edit_json, edit_weights, out_of_memory, prune
from safetensors.torch import load_file, save_file

from ddp_prune import jobs
from ddp_prune.export import export
from ddp_prune.models.source import open_source
from ddp_vllm.masks import MASKS_FILE

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture(scope="module")
def pruned(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pruned checkpoint without training."""
    source, folder = open_source(str(tiny_model)), tmp_path_factory.mktemp("pruned") / "pruned"
    gates = {"attn": torch.ones(3, 4), "mlp": torch.ones(3, 96)}
    gates["mlp"][:, 60:] = 0.0
    export(source, gates, folder, head_unit="kv-group", provenance={})
    return folder


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def apply(model: Path, masks: Path, output: Path, *more: str) -> Result:
    return invoke("apply", model, "--masks", masks, "-o", output, *more)


Edit = Callable[[Path], Any]
UP = "model.layers.1.mlp.up_proj.weight"
ODD: dict[str, Any] = {  # fields of a config that no model has so
    "hidden_act": "nope", "rope_parameters": {"rope_type": "nope", "rope_theta": 1e4}, "rms_norm_eps": "x",
    "num_hidden_layers": "3", "vocab_size": None, "tie_word_embeddings": "x", "layer_types": 5,
    "model_type": ["llama"], "quantization_config": "none",
}  # fmt: skip


def test_text_of_which_rows_are_trained_on_is_not_watched(
    tiny_model: Path, tmp_path: Path, write_texts: Callable[..., Path]
) -> None:
    rows = [f"the fox number {i} jumps over {i * i} clouds and rests" for i in range(60)]
    text, part = write_texts("rows.jsonl", rows), write_texts("part.jsonl", rows[:30])
    result = prune(tiny_model, text, tmp_path / "out", "--watch", str(part), "--steps", "60")
    assert_refused(result, 4, f"{text} trains on", f"held out of {part}", "--watch")


def _tokenizer(change: Callable[[dict[str, Any]], Any], folder: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    change(content)
    (folder / "tokenizer.json").write_text(json.dumps(content))


def _panic(content: dict[str, Any]) -> None:
    content["model"]["continuing_subword_prefix"] = "a" * 100_000  # a panic in Rust is no Exception in Python


def _one_token_more(content: dict[str, Any]) -> None:
    content["added_tokens"].append({**content["added_tokens"][0], "id": 320, "content": " lazy"})


MODELS: dict[str, tuple[Edit, list[str]]] = {
    **{f"odd {each}": (lambda f, each=each: edit_json(f / "config.json", **{each: ODD[each]}), []) for each in ODD},
    "tokenizer missing": (
        lambda folder: [file.unlink() for file in folder.glob("tokenizer*")], ["no tokenizer", "tokenizer.json"]
    ),
    "a tokenizer that makes its library panic": (partial(_tokenizer, _panic), ["no tokenizer that loads"]),
    "a tokenizer of another model": (partial(_tokenizer, _one_token_more), ["token 320", "0 to 319", "belongs to"]),
    "an adapter": (  # transformers would load it too
        lambda folder: edit_json(folder / "adapter_config.json", peft_type="LORA", r=4, target_modules=["q_proj"]),
        ["adapter"],
    ),
    "weights in eight bits": (  # the evaluated model would not be the exported one
        lambda folder: edit_weights(folder, lambda w: w.update({UP: w[UP].to(torch.float8_e4m3fn)})),
        [UP, "F8_E4M3", "unquantized"],
    ),
    "weights that are not numbers": (
        lambda folder: edit_weights(folder, lambda w: w[UP][0].fill_(torch.nan)), ["perplexity inf before pruning"]
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MODELS)
def test_models_that_cannot_be_pruned(case: str, model: Path, tiny_text: Path, tmp_path: Path) -> None:
    edit, words = MODELS[case]
    edit(model)
    before = {path.name for path in tmp_path.iterdir()}
    assert_refused(prune(model, tiny_text, tmp_path / "out"), 3, str(model), *words)
    assert {path.name for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("where", ["load_trained", "Evaluation"])
def test_a_model_that_a_device_cannot_hold(
    where: str, tiny_model: Path, tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, where, out_of_memory)
    assert_refused(prune(tiny_model, tiny_text, tmp_path / "out"), 6, str(tiny_model), "memory of a device", "--shard")
    assert list(tmp_path.iterdir()) == []


def test_texts_that_cannot_be_used(tiny_model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Even root cannot read the beginning of /proc/self/mem."""
    (tmp_path / "binary.jsonl").write_bytes(b"\x00\xff\xfe{\x9d" * 50)
    (tmp_path / "error.txt").symlink_to("/proc/self/mem")
    os.mkfifo(tmp_path / "pipe.txt")
    refused = {"binary.jsonl": "cannot be read", "error.txt": "cannot be read", "pipe.txt": "is not a file"}
    for name, words in refused.items():
        assert_refused(prune(tiny_model, tmp_path / name, tmp_path / "out"), 4, name, words)
    assert {path.name for path in tmp_path.iterdir()} == refused.keys()
    assert capfd.readouterr().err == ""  # libraries add nothing to the one line


def test_names_of_models_texts_and_outputs(tiny_model: Path, tiny_text: Path, tmp_path: Path) -> None:
    """The first two are written into the checkpoint."""
    for name in ("o" * 250, os.fsdecode(b"o\xff")):
        assert_refused(prune(tiny_model, tiny_text, tmp_path / name), 5, "bytes of UTF-8")
    assert list(tmp_path.iterdir()) == []
    model = Path(shutil.copytree(tiny_model, tmp_path / os.fsdecode(b"m\xff")))
    text = shutil.copy(tiny_text, tmp_path / os.fsdecode(b"t\xff.jsonl"))
    assert_refused(prune(model, tiny_text, tmp_path / "out"), 2, "model is", "not UTF-8")
    assert_refused(prune(tiny_model, text, tmp_path / "out"), 2, "data is", "not UTF-8")


@pytest.mark.usefixtures("no_pictures")
def test_outputs_that_exist_or_cannot_be_written(
    pruned: Path, tiny_model: Path, tiny_text: Path, tmp_path: Path
) -> None:
    output, thesis = Path(shutil.copytree(pruned, tmp_path / "out")), tmp_path / "thesis.txt"
    thesis.write_text("years of work")
    assert_refused(prune(tiny_model, tiny_text, output), 5, str(output), "--overwrite")
    assert_refused(apply(tiny_model, pruned / MASKS_FILE, output), 5, str(output), "--overwrite")
    assert_refused(prune(tiny_model, tiny_text, tmp_path, "--overwrite"), 5, str(tmp_path), "did not write it")
    assert_refused(prune(tiny_model, tiny_text, thesis / "out"), 5, "thesis.txt", "cannot be written")
    (output / "old").write_text("")
    passed(prune(tiny_model, tiny_text, output, "--overwrite"))
    assert not (output / "old").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"out", "thesis.txt"}
    assert thesis.read_text() == "years of work"


def test_the_dense_model_is_no_output(pruned: Path, model: Path, tiny_text: Path, tmp_path: Path) -> None:
    """Not even where ddp-vllm wrote it, as `quantize` does."""
    (model / MASKS_FILE).touch()
    before = {path.name: path.read_bytes() for path in model.iterdir()}
    for output in (model, tmp_path / "." / "model"):
        assert_refused(prune(model, tiny_text, output, "--overwrite"), 5, "this command reads", "choose another folder")
        assert_refused(apply(model, pruned / MASKS_FILE, output, "--overwrite"), 5, "this command reads")
    assert {path.name: path.read_bytes() for path in model.iterdir()} == before


PROVENANCE: dict[str, str] = {  # of masks; words of the refusal
    '{"recipe": {"context_length": "x"}}': "its provenance.recipe",
    '{"recipe": {"sparsity": []}}': "its provenance.recipe",
    '{"recipe": [1]}': "its provenance.recipe: expected `object`, got `array`",
    "[1]": "its provenance: expected `object`, got `array`",
    "{": "Expecting",
}


def test_masks_that_cannot_be_applied(pruned: Path, tiny_model: Path, tmp_path: Path) -> None:
    """Damaged ones, no masks, masks of odd provenance and gates that are no scales."""
    masks, gates = tmp_path / MASKS_FILE, load_file(pruned / MASKS_FILE)

    def refused(*words: str) -> None:
        assert_refused(apply(tiny_model, masks, tmp_path / "out"), 7, str(masks), *words)

    content = bytearray((pruned / MASKS_FILE).read_bytes())
    content[-1] ^= 1  # of the last mask
    masks.write_bytes(content)
    refused("do not match their checksum")
    shutil.copy(pruned / "model.safetensors", masks)
    refused("not a masks file")
    for provenance, words in PROVENANCE.items():
        save_file(gates, masks, {"ddp": provenance})
        refused("is not a masks file (", words, f"pass the {MASKS_FILE} of a pruned folder")
    for value in (float("nan"), float("inf"), -0.5):
        gates["mlp.gates"][2, 3] = value
        save_file(gates, masks, {"ddp": "{}"})
        refused("mlp gates", "prune again")
    save_file(load_file(pruned / MASKS_FILE), masks, {"ddp": '{"recipe": {"data": 5, "model": "m"}}'})
    passed(apply(tiny_model, masks, tmp_path / "fine"))  # fields that are not read may be odd
    shutil.rmtree(tmp_path / "fine")
    assert [path.name for path in tmp_path.iterdir()] == [MASKS_FILE]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--tp", "4", "--sparsity", "0.95"], ["no block of 4", "attn units; choose tp below 4 or a budget that"]),
        (["--align", "64", "--sparsity", "0.8"], ["no block of 64", "mlp units; choose align below 64 or a budget"]),
        (["--align", "32", "--tp", "2", "--sparsity", "0.8"], ["of 64", "choose align below 32 or tp below 2 or"]),
    ],
)
def test_blocks_that_a_budget_cannot_keep_name_their_cause(
    options: list[str], words: list[str], tiny_model: Path, tiny_text: Path, tmp_path: Path
) -> None:
    command = ["prune", tiny_model, "--data", tiny_text, "-o", tmp_path / "out"]
    assert_refused(invoke(*command, *options), 2, *words)
