"""A model that cannot be pruned is refused before anything is loaded, with the reason and the remedy."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from runs import edit_weights, export_whole, weights
from safetensors.torch import save_file
from transformers import LlamaForCausalLM, LlamaModel

from ddp_prune.models.loading import load_model, loading_options
from ddp_prune.models.source import open_source, weight_files
from ddp_vllm.errors import ModelError

REFUSED: dict[str, tuple[dict[str, Any], list[str]]] = {  # changes of the config, what the line must say
    "nothing recognized": ({"model_type": "gpt2"}, ["no MLP", "GPT2LMHeadModel", "mlp (GPT2MLP)", "attn ("]),
    "unknown to transformers": ({"model_type": "newlm"}, ["newlm", "update transformers"]),
    "no family": ({"model_type": None}, ["config.json", "model_type"]),
    "no language model": ({"model_type": "clip"}, ["no language model", "'clip'"]),
    "pruned already": ({"model_type": "ddp_llama"}, ["pruned already", "its dense model"]),
    "quantized": ({"quantization_config": {"quant_method": "gptq"}}, ["quantized", "unquantized"]),
    "no width": ({"intermediate_size": None}, ["intermediate_size", "None"]),
    "too many layers": ({"num_hidden_layers": 5 * 10**8}, ["num_hidden_layers", str(5 * 10**8), "10,000"]),
    "fewer layers than there are": ({"num_hidden_layers": 2, "layer_types": None}, ["layers.2.", "config.json has 2 "]),
}


@pytest.fixture
def folder(tiny_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def _edit(folder: Path, changes: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def test_auto_learns_in_the_stored_format_but_for_float16(tiny_model: Path, tmp_path: Path) -> None:
    """Also where the config does not say. What is exported keeps the stored format."""
    for stored, used in ((torch.float16, torch.bfloat16), (torch.bfloat16, torch.bfloat16)):
        folder = tmp_path / str(stored)
        LlamaForCausalLM.from_pretrained(tiny_model, dtype=stored).save_pretrained(folder)
        source = open_source(str(folder))
        assert {parameter.dtype for parameter in load_model(source, "auto").parameters()} == {used}
        cut = weights(export_whole(source, folder / "pruned"))
        assert {tensor.dtype for tensor in cut.values()} == {stored}
        assert json.loads((folder / "pruned" / "config.json").read_text())["dtype"] == str(stored).split(".")[1]
        _edit(folder, {"dtype": None})
        source = open_source(str(folder))
        assert {parameter.dtype for parameter in load_model(source, "auto").parameters()} == {used}
        assert {parameter.dtype for parameter in load_model(source, "float16").parameters()} == {torch.float16}


def test_devices_without_bfloat16_train_in_float32(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    LlamaForCausalLM.from_pretrained(tiny_model, dtype=torch.float16).save_pretrained(tmp_path)
    source = open_source(str(tmp_path))

    def chosen(dtype: str, device: str) -> torch.dtype:
        return loading_options(source, dtype, torch.device(device))["dtype"]

    for gpu, architecture, flags, wanted in (
        (True, "x86_64", "avx2 avx512_bf16", torch.bfloat16),
        (True, "x86_64", "avx2 amx_bf16", torch.bfloat16),
        (True, "aarch64", "asimd", torch.bfloat16),
        (False, "x86_64", "avx2 avx512f", torch.float32),
    ):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation, answer=gpu: answer)
        monkeypatch.setattr("ddp_vllm.machine.platform.machine", lambda name=architecture: name)
        monkeypatch.setattr("ddp_vllm.machine.Path.read_text", lambda path, text=flags: text)
        assert chosen("auto", "cuda") == chosen("auto", "cpu") == wanted
        assert chosen("bfloat16", "cuda") == chosen("bfloat16", "cpu") == torch.bfloat16
        assert loading_options(source, "auto", None)["dtype"] == torch.bfloat16


def test_a_model_is_loaded_where_it_computes(tiny_model: Path) -> None:
    """The device without memory stands for a GPU: nothing of the model is left on the CPU."""
    source = open_source(str(tiny_model))
    model = load_model(source, "auto", torch.device("meta"))
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert not model.training and not any(parameter.requires_grad for parameter in model.parameters())
    there, plain = load_model(source, "auto", torch.device("cpu")).state_dict(), load_model(source, "auto").state_dict()
    assert there.keys() == plain.keys() and all(torch.equal(there[name], plain[name]) for name in plain)


def _weights(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    return lambda folder: edit_weights(folder, change)


MLP = "model.layers.1.mlp.{}_proj.weight"


def test_what_is_downloaded_is_what_is_read(monkeypatch: pytest.MonkeyPatch, tiny_model: Path) -> None:
    """Mistral's and Llama's repositories hold their weights twice."""
    listed = [
        "config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "tokenizer.json",
        "additional_chat_templates/tool_use.jinja",
        "model.safetensors.index.json", "consolidated.safetensors", "consolidated-00001-of-00002.safetensors",
        "consolidated.safetensors.index.json", "original/consolidated.00.pth", "original/tokenizer.model",
        "original/model.safetensors", "modeling_x.py", "tokenizer.model",
    ]  # fmt: skip
    fetched: list[str] = []

    def download(name: str, **patterns: Any) -> str:
        fetched.extend(filter_repo_objects(listed, **patterns))
        return str(tiny_model)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    open_source("owner/name")
    assert fetched == [*listed[:6], "tokenizer.model"]


@pytest.mark.parametrize("beside", ["the shards of an index", "a stray file"])
def test_weights_that_programs_read_from_different_files_are_refused(beside: str, folder: Path) -> None:
    """transformers prefers model.safetensors; vLLM reads the files of an index, or without one all files."""
    other = {name: 2 * tensor for name, tensor in weights(folder).items()}
    save_file(other, folder / "model_00001-of-00001.safetensors", {"format": "pt"})
    if beside == "the shards of an index":
        index = {"metadata": {}, "weight_map": dict.fromkeys(other, "model_00001-of-00001.safetensors")}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"model.safetensors.* remove the wrong one"):
        open_source(str(folder))
    (folder / "model_00001-of-00001.safetensors").rename(folder / "consolidated.safetensors")  # of Mistral's format
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    assert weight_files(open_source(str(folder)).folder) == [folder / "model.safetensors"]


def _replace_by_index(folder: Path, text: str) -> None:
    """Also with a file of the same name outside the folder."""
    weights = (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    (folder.parent / weights.name).write_bytes(weights.read_bytes())
    (folder / "model.safetensors.index.json").write_text(text)


BROKEN: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    **{case: (partial(_edit, changes=changes), words) for case, (changes, words) in REFUSED.items()},
    "no safetensors": (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), [".safetensors"]),
    "no config": (lambda f: (f / "config.json").unlink(), ["config.json is missing"]),
    "shard missing": (
        lambda f: _replace_by_index(f, '{"weight_map": {"a": "model-2.safetensors"}}'),
        ["model-2.safetensors"],
    ),
    "index outside the folder": (  # masks would be learned on one file, and the other cut
        lambda f: _replace_by_index(f, '{"weight_map": {"model.norm.weight": "../model-1.safetensors"}}'),
        ["'../model-1.safetensors', not a file of its folder"],
    ),
    "a decoder saved alone": (
        lambda f: LlamaModel.from_pretrained(f).save_pretrained(f),
        ["'embed_tokens.weight'", "not model.layers.…", "AutoModelForCausalLM", "save_pretrained"],
    ),
    "a missing projection": (_weights(lambda w: w.pop(MLP.format("up"))), ["layer 1", "mlp.up_proj", "again"]),
    "rows fewer than the heads of the config": (
        _weights(lambda w: w.update({"model.layers.2.self_attn.k_proj.weight": torch.ones(24, 64)})),
        ["model.layers.2.self_attn.k_proj.weight", "[24, 64]", "require 32 along axis 0"],
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_model_that_cannot_be_pruned(case: str, folder: Path) -> None:
    breaks, words = BROKEN[case]
    breaks(folder)
    _refused(str(folder), words)


@pytest.mark.parametrize("model", ["./nowhere", "a/b/c", ""])
def test_an_unknown_folder(model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    _refused(model, [model, "folder"])


def _refused(model: str, words: list[str]) -> None:
    with pytest.raises(ModelError) as caught:
        open_source(model)
    message = str(caught.value)
    assert all(word in message for word in words) and "\n" not in message, message
