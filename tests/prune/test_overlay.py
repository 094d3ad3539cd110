"""A tensor may have copies in several files: each reader takes the one of the file that the index names, or refuses."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from any_models import tiny_config, write_model
from commands import assert_refused, invoke, passed
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from ddp_vllm.checkpoint import read_checkpoint

INDEX = "model.safetensors.index.json"
SMALL = ("--sparsity", "0.3", "--steps", "3", "--batch-size", "2", "--seq-len", "16", "--train", "masks")
NAME = "model.layers.1.mlp.down_proj.weight"


def overlay(source: Path, folder: Path, file: str, names: tuple[str, ...] = (NAME,)) -> dict[str, torch.Tensor]:
    """Copy a model to `folder` in one shard with stale copies of some tensors, and `file` with those that count."""
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    for path in folder.glob("model*.safetensors*"):
        path.unlink()
    newer = {name: tensors[name] for name in names}
    save_file(tensors | {name: torch.full_like(tensor, 9.0) for name, tensor in newer.items()},
              folder / "model-00001-of-00002.safetensors", {"format": "pt"})  # fmt: skip
    save_file(newer, folder / file, {"format": "pt"})
    weight_map = {name: file if name in names else "model-00001-of-00002.safetensors" for name in tensors}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return tensors


def logits(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32)
    with torch.no_grad():
        result: torch.Tensor = model.eval()(torch.arange(5, 25)[None]).logits
    return result


def prune(model: Path, text: Path, output: Path) -> Any:
    return invoke("prune", model, "--data", text, *SMALL, "-o", output)


@pytest.mark.parametrize("file", ["model-00002-of-00002.safetensors", "overlay.safetensors"])
def test_every_reader_takes_the_copy_that_the_index_names(
    file: str, tiny_model: Path, tiny_text: Path, tmp_path: Path
) -> None:
    overlay(tiny_model, tmp_path / "dense", file)
    assert torch.equal(logits(tmp_path / "dense"), logits(tiny_model))  # as transformers does
    for name, model in (("a", tiny_model), ("b", tmp_path / "dense")):
        passed(prune(model, tiny_text, tmp_path / name))
    expected = load_file(tmp_path / "a" / "model.safetensors")
    written = load_file(tmp_path / "b" / "model.safetensors")
    assert expected.keys() == written.keys() and all(torch.equal(expected[name], written[name]) for name in expected)
    assert read_checkpoint(tmp_path / "dense", dense=True).shapes[NAME] == [
        *load_file(tmp_path / "dense" / file)[NAME].shape
    ]
    overlay(tmp_path / "a", tmp_path / "pruned", file)
    assert read_checkpoint(tmp_path / "pruned").num_parameters == read_checkpoint(tmp_path / "a").num_parameters
    assert torch.equal(logits(tmp_path / "pruned"), logits(tmp_path / "a"))


def test_a_copy_that_programs_read_later_is_refused(tiny_model: Path, tiny_text: Path, tmp_path: Path) -> None:
    """The index names the first of two files, but transformers and vLLM load the last copy."""
    overlay(tiny_model, tmp_path / "dense", "model-00000-of-00002.safetensors")
    assert not torch.equal(logits(tmp_path / "dense"), logits(tiny_model))
    for result in (
        prune(tmp_path / "dense", tiny_text, tmp_path / "out"),
        invoke("convert", tmp_path / "dense", "-o", tmp_path / "out"),
    ):
        assert_refused(result, 3, NAME, "which the index names", "programs read after it; remove the other copy")


@pytest.mark.parametrize("verb", ["prune", "convert", "export"])
def test_an_old_file_beside_the_shards_is_refused(verb: str, tiny_model: Path, tiny_text: Path, tmp_path: Path) -> None:
    """transformers takes the whole file, vLLM the index."""
    folder = tmp_path / "dense"
    overlay(tiny_model, folder, "model-00002-of-00002.safetensors")
    shutil.copyfile(tiny_model / "model.safetensors", folder / "model.safetensors")
    if verb == "prune":
        result = prune(folder, tiny_text, tmp_path / "out")
    else:
        result = invoke(verb, folder, "-o", tmp_path / "out")
    assert_refused(result, result.exit_code, "model.safetensors", "remove")
    assert result.exit_code in (3, 7) and not (tmp_path / "out").exists()


@pytest.mark.vllm
def test_vllm_serves_the_copy_that_the_index_names(
    serve: Callable[..., dict[str, Any]], tiny_model: Path, tiny_text: Path, tmp_path: Path
) -> None:
    """Of a class of ours, whose tensors are checked one by one, and of a stock class."""
    write_model("olmo2", tmp_path / "olmo2")
    AutoModelForCausalLM.from_config(tiny_config("LlamaConfig", head_dim=32)).save_pretrained(tmp_path / "llama")
    jobs = {}
    for family, model in (("ours", tmp_path / "llama"), ("stock", tmp_path / "olmo2")):
        for file in tiny_model.glob("tokenizer*"):
            shutil.copyfile(file, model / file.name)
        passed(prune(model, tiny_text, tmp_path / family))
        overlay(tmp_path / family, tmp_path / f"{family}-overlay", "model-00002-of-00002.safetensors")
        for name in (family, f"{family}-overlay"):
            jobs[name] = {"folder": str(tmp_path / name), "options": {}, "num_tokens": 4}
    results = serve(jobs)
    for family in ("ours", "stock"):
        assert not [result["error"] for result in results.values() if "error" in result]
        assert results[family]["outputs"] == results[f"{family}-overlay"]["outputs"]
