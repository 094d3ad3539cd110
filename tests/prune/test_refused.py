"""Models, texts, outputs, masks and options that cannot be used: one line and an exit code each, nothing left behind.

Every kind of bad text is in test_rows.py, every way to corrupt a checkpoint in tests/test_checkpoint.py, limits of
settings in test_recipe.py.
"""

import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from any_models import tiny_config, write_headers, write_model
from click.testing import Result
from commands import assert_refused, invoke, passed
from huggingface_hub.utils import filter_repo_objects
from runs import edit_json, edit_weights, prune, same_weights, weights
from safetensors.torch import load_file, save_file
from seams import (
    UpdatedWeights,
    check_head,
    cut,
    export_whole,
    find_structure,
    jobs,
    load_model,
    loading_options,
    logits,
    open_source,
    out_of_memory,
    random_gates,
    weight_files,
)
from transformers import AutoModelForCausalLM, LlamaForCausalLM, LlamaModel

from ddp_vllm.checkpoint import read_checkpoint
from ddp_vllm.errors import ModelError, TrainingError
from ddp_vllm.masks import MASKS_FILE

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cache", "no_pictures")]
Edit = Callable[[Path], Any]


@pytest.fixture(scope="module")
def pruned(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pruned checkpoint without training."""
    source, folder = open_source(str(tiny_model)), tmp_path_factory.mktemp("pruned") / "pruned"
    cut(source, random_gates(source, "kv-group"), folder, "kv-group")
    return folder


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def config(**changes: Any) -> Edit:
    """Return an edit of config.json; None removes a field."""

    def edit(folder: Path) -> None:
        values = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps({k: v for k, v in values.items() if v is not None}))

    return edit


def tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Edit:
    return lambda folder: edit_weights(folder, change)


def tokenizer(change: Callable[[dict[str, Any]], Any]) -> Edit:
    def edit(folder: Path) -> None:
        content = json.loads((folder / "tokenizer.json").read_text())
        change(content)
        (folder / "tokenizer.json").write_text(json.dumps(content))

    return edit


def replace_by_index(text: str) -> Edit:
    """Also with a file of the same name outside the folder."""

    def edit(folder: Path) -> None:
        file = (folder / "model.safetensors").rename(folder / "model-1.safetensors")
        (folder.parent / file.name).write_bytes(file.read_bytes())
        (folder / "model.safetensors.index.json").write_text(text)

    return edit


UP = "model.layers.1.mlp.up_proj.weight"
BROKEN: dict[str, tuple[Edit, list[str]]] = {  # an edit of the tiny model, words of the line
    "nothing recognized": (config(model_type="gpt2"), ["no MLP", "GPT2LMHeadModel", "mlp (GPT2MLP)", "attn ("]),
    "unknown to transformers": (config(model_type="newlm"), ["newlm", "update transformers"]),
    "no model type": (config(model_type=None), ["config.json", "model_type"]),
    "no language model": (config(model_type="clip"), ["no language model", "'clip'"]),
    "pruned already": (config(model_type="ddp_llama"), ["pruned already", "its dense model"]),
    "quantized": (config(quantization_config={"quant_method": "gptq"}), ["quantized", "unquantized"]),
    "too many layers": (config(num_hidden_layers=5 * 10**8), ["num_hidden_layers", str(5 * 10**8), "10,000"]),
    "fewer layers than there are": (
        config(num_hidden_layers=2, layer_types=None), ["layers.2.", "config.json has 2 "]
    ),
    "odd activation": (config(hidden_act="nope"), []),
    "layer types of no list": (config(layer_types=5), []),
    "no safetensors": (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), [".safetensors"]),
    "shard missing": (replace_by_index('{"weight_map": {"a": "model-2.safetensors"}}'), ["model-2.safetensors"]),
    "index outside the folder": (  # masks would be learned on one file, and the other cut
        replace_by_index('{"weight_map": {"model.norm.weight": "../model-1.safetensors"}}'),
        ["'../model-1.safetensors', not a file of its folder"],
    ),
    "a decoder saved alone": (
        lambda f: LlamaModel.from_pretrained(f).save_pretrained(f),
        ["'embed_tokens.weight'", "not model.layers.…", "AutoModelForCausalLM", "save_pretrained"],
    ),
    "a missing projection": (tensors(lambda w: w.pop(UP)), ["layer 1", "mlp.up_proj", "again"]),
    "rows fewer than the heads of the config": (
        tensors(lambda w: w.update({"model.layers.2.self_attn.k_proj.weight": torch.ones(24, 64)})),
        ["model.layers.2.self_attn.k_proj.weight", "[24, 64]", "require 32 along axis 0"],
    ),
    "tokenizer missing": (
        lambda folder: [file.unlink() for file in folder.glob("tokenizer*")], ["no tokenizer", "tokenizer.json"]
    ),
    "a tokenizer that makes its library panic": (  # a panic in Rust is no Exception in Python
        tokenizer(lambda content: content["model"].update(continuing_subword_prefix="a" * 100_000)),
        ["no tokenizer that loads"],
    ),
    "a tokenizer of another model": (
        tokenizer(lambda c: c["added_tokens"].append({**c["added_tokens"][0], "id": 320, "content": " lazy"})),
        ["token 320", "0 to 319", "belongs to"],
    ),
    "a tokenizer without EOS": (lambda f: edit_json(f / "tokenizer_config.json", eos_token=None), ["no EOS"]),
    "an adapter": (  # transformers would load it too
        lambda folder: edit_json(folder / "adapter_config.json", peft_type="LORA", r=4, target_modules=["q_proj"]),
        ["adapter"],
    ),
    "weights in eight bits": (  # the evaluated model would not be the exported one
        tensors(lambda w: w.update({UP: w[UP].to(torch.float8_e4m3fn)})), [UP, "F8_E4M3", "unquantized"]
    ),
    "weights that are not numbers": (tensors(lambda w: w[UP][0].fill_(torch.nan)), ["perplexity inf before pruning"]),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_models_that_cannot_be_pruned(case: str, model: Path, tiny_text: Path, tmp_path: Path) -> None:
    edit, words = BROKEN[case]
    edit(model)
    before = {path.name for path in tmp_path.iterdir()}
    assert_refused(prune(model, tiny_text, tmp_path / "out"), 3, str(model), *words)
    assert {path.name for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("name", ["./nowhere", "a/b/c", ""])
def test_an_unknown_folder(name: str, tiny_text: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match="folder"):
        open_source(name)


ANY: dict[str, tuple[str, list[str], int, tuple[str, ...]]] = {  # model, options, code, words
    "experts with biases": ("gpt_oss", [], 3, ("gpt_oss cannot be pruned: its experts have biases",)),
    "attention": ("olmo2", ["--prune", "attention,mlp"], 2, ("attention of olmo2 cannot be pruned", "choose from mlp")),
    "an unknown part": ("olmo2", ["--prune", "heads"], 2, ("'heads'", "attention, mlp, experts")),
    "a speedup": ("olmo2", ["--speedup", "1.2"], 2, ("give a sparsity",)),
    "the KV cache": ("olmo2", ["--budget", "kv-bytes"], 2, ("does not depend on what is pruned here",)),
    "whole experts": (
        "glm4_moe", ["--whole-experts"], 2, ("--whole-experts removes rows of the router", "glm4_moe", "leave it out")
    ),
    "too few experts for a token": (
        "mixtral", ["--whole-experts", "--sparsity", "0.8"], 2, ("1 of 8 experts", "keep 3 to 7", "each token to 3")
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ANY)
def test_what_cannot_be_done_with_a_model(
    case: str, dense: Callable[[str], Path], tiny_text: Path, tmp_path: Path
) -> None:
    name, options, code, words = ANY[case]
    size = [] if {"--speedup", "--sparsity"} & {*options} else ["--sparsity", "0.3"]
    command = ["prune", dense(name), *size, "--data", tiny_text, "-o", tmp_path / "out", "--seq-len", "16", *options]
    result = invoke(*command)
    assert result.exit_code == code and all(word in result.stderr for word in words), result.stderr
    assert result.stderr.splitlines()[-1].startswith("ddp-vllm: ")


UNKNOWN = {  # config -> why none of its parts can be pruned
    "T5Gemma2Config": "T5Gemma2ForConditionalGeneration is an encoder-decoder",
    "Blip2Config": "Blip2ForConditionalGeneration is an encoder-decoder",
    "ZambaConfig": "MLPs that several layers share are left as they are",
    "GraniteMoeHybridConfig": "experts of different widths require one tensor per expert; prune another model",
}
LEFT_ALONE = {  # config -> the layers whose MLPs are pruned, and what is left as it is
    "Ernie4_5_VLMoeConfig": ([0], ["routed experts, whose form is not known", "shared experts"]),  # two expert lists
    "BambaConfig": ([*range(32)], []),  # Mamba's tensors are no experts
    "RecurrentGemmaConfig": ([*range(26)], []),  # nor are those of a linear recurrence
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_architectures_that_are_refused_by_their_headers(name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=UNKNOWN[name]):
        open_source(str(write_headers(name, tmp_path)))


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_shared_experts_are_left_alone_and_dense_layers_are_pruned(name: str, tmp_path: Path) -> None:
    structure: Any = open_source(str(write_headers(name, tmp_path))).structure
    layers, rest = LEFT_ALONE[name]
    assert [index for index, row in enumerate(structure.widths.layers) if row.intermediate_size] == layers
    assert list(structure.left_alone[1 : 1 + len(rest)]) == rest
    assert any("expert" in line for line in structure.left_alone) == bool(rest)


def test_an_mlp_of_another_form_is_left_alone(dense: Callable[[str], Path], tmp_path: Path) -> None:
    """A folder states one form for all layers, so layers of another width stay as they are."""
    settings = {"head_dim": 32, "vocab_size_per_layer_input": 320, "hidden_size_per_layer_input": 16}
    shared = {"num_kv_shared_layers": 1, "layer_types": ["sliding_attention", "full_attention", "full_attention"]}
    tiny_config("Gemma4TextConfig", **settings, **shared, use_double_wide_mlp=True).save_pretrained(tmp_path)
    shapes = {name: list(tensor.shape) for name, tensor in weights(dense("gemma4_text")).items()}
    found = find_structure(tmp_path, shapes)
    assert [layer.intermediate_size for layer in found.widths.layers] == [96, 96, 0]
    assert found.widths.block_json("mlp") == {
        "inputs": ["mlp.gate_proj", "mlp.up_proj"], "output": "mlp.down_proj", "intermediate_size": 96
    }  # fmt: skip
    assert "layers 2, where no MLP or experts of that form were recognized" in found.left_alone


def test_models_without_a_row_are_checked_by_their_headers(dense: Callable[[str], Path], tmp_path: Path) -> None:
    """Experts of another width than stated, a missing tensor, eight bits, and a folder that is pruned already."""
    folder = Path(shutil.copytree(dense("qwen3_moe"), tmp_path / "dense"))
    edit_weights(folder, lambda weights: weights.pop("model.layers.2.mlp.experts.3.down_proj.weight"))
    with pytest.raises(ModelError, match=r"layer 2 lacks the tensors of mlp\.experts\.3\.down_proj"):
        open_source(str(folder))
    edit_json(folder / "config.json", moe_intermediate_size=32)
    with pytest.raises(ModelError, match=r"shape \[64, 64\].*require 32 along axis"):
        open_source(str(folder))
    eight = Path(shutil.copytree(dense("olmo2"), tmp_path / "eight"))
    edit_weights(eight, lambda weights: weights.update({UP: weights[UP].to(torch.float8_e4m3fn)}))
    with pytest.raises(ModelError, match=r"is F8_E4M3, but only .* prune the unquantized checkpoint"):
        open_source(str(eight))
    pruned = export_whole(open_source(str(dense("olmo2"))), tmp_path / "pruned")
    with pytest.raises(ModelError, match="pruned already"):
        open_source(str(pruned))


def test_an_output_head_that_is_unknown(dense: Callable[[str], Path]) -> None:
    """Cohere scales its logits; a scale that the loss does not know would train on another loss."""
    source = open_source(str(dense("cohere2")))
    model: Any = load_model(source, "float32")
    check_head(source, model)
    model.config.logit_scale, model.logit_scale = 1.0, 0.5
    with pytest.raises(ModelError, match="Cohere2ForCausalLM computes its logits"):
        check_head(source, model)


def test_a_trained_weight_that_is_not_written() -> None:
    """If transformers and the publisher named a weight differently, its dense values would be written."""
    updated = UpdatedWeights({"a.weight": torch.ones(2), "b.weight": torch.ones(2)}, {}, torch.float32)
    assert torch.equal(updated("a.weight", torch.zeros(2)), torch.ones(2))
    assert torch.equal(updated("c.weight", torch.zeros(2)), torch.zeros(2))
    with pytest.raises(TrainingError, match=r"b\.weight was trained but is not on disk"):
        updated.check_complete()


def test_auto_learns_in_the_stored_format_but_for_float16(tiny_model: Path, tmp_path: Path) -> None:
    """Also where the config does not say. What is exported keeps the stored format."""
    for stored in (torch.float16, torch.bfloat16):
        folder = tmp_path / str(stored)
        LlamaForCausalLM.from_pretrained(tiny_model, dtype=stored).save_pretrained(folder)
        pruned = export_whole(open_source(str(folder)), folder / "pruned")
        assert {tensor.dtype for tensor in weights(pruned).values()} == {stored}
        assert json.loads((pruned / "config.json").read_text())["dtype"] == str(stored).split(".")[1]
        for edit in (lambda _: None, config(dtype=None)):
            edit(folder)
            for dtype, used in (("auto", torch.bfloat16), ("float16", torch.float16)):
                model = load_model(open_source(str(folder)), dtype)
                assert {parameter.dtype for parameter in model.parameters()} == {used}


def test_devices_without_bfloat16_train_in_float32(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    LlamaForCausalLM.from_pretrained(tiny_model, dtype=torch.float16).save_pretrained(tmp_path)
    source = open_source(str(tmp_path))
    for gpu, architecture, flags, wanted in (
        (True, "x86_64", "avx2 avx512_bf16", torch.bfloat16),
        (True, "x86_64", "avx2 amx_bf16", torch.bfloat16),
        (True, "aarch64", "asimd", torch.bfloat16),
        (False, "x86_64", "avx2 avx512f", torch.float32),
    ):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation, answer=gpu: answer)
        monkeypatch.setattr("ddp_vllm.machine.platform.machine", lambda name=architecture: name)
        monkeypatch.setattr("ddp_vllm.machine.Path.read_text", lambda path, text=flags: text)
        for dtype, used in (("auto", wanted), ("bfloat16", torch.bfloat16)):
            for device in ("cuda", "cpu"):
                assert loading_options(source, dtype, torch.device(device))["dtype"] == used
        assert loading_options(source, "auto", None)["dtype"] == torch.bfloat16


def test_a_model_is_loaded_where_it_computes(tiny_model: Path) -> None:
    """The device without memory stands for a GPU: nothing of the model is left on the CPU."""
    source = open_source(str(tiny_model))
    model = load_model(source, "auto", torch.device("meta"))
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert not model.training and not any(parameter.requires_grad for parameter in model.parameters())


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


@pytest.mark.parametrize("where", ["load_trained", "Evaluation"])
def test_a_model_that_a_device_cannot_hold(
    where: str, tiny_model: Path, tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, where, out_of_memory)
    assert_refused(prune(tiny_model, tiny_text, tmp_path / "out"), 6, str(tiny_model), "memory of a device", "--shard")
    assert list(tmp_path.iterdir()) == []


def test_texts_that_cannot_be_used(
    tiny_model: Path, tmp_path: Path, write_texts: Callable[..., Path], capfd: pytest.CaptureFixture[str]
) -> None:
    """Even root cannot read the beginning of /proc/self/mem."""
    (tmp_path / "binary.jsonl").write_bytes(b"\x00\xff\xfe{\x9d" * 50)
    (tmp_path / "error.txt").symlink_to("/proc/self/mem")
    os.mkfifo(tmp_path / "pipe.txt")
    refused = {"binary.jsonl": "cannot be read", "error.txt": "cannot be read", "pipe.txt": "is not a file"}
    for name, words in refused.items():
        assert_refused(prune(tiny_model, tmp_path / name, tmp_path / "out"), 4, name, words)
    assert {path.name for path in tmp_path.iterdir()} == refused.keys()
    assert capfd.readouterr().err == ""  # libraries add nothing to the one line
    rows = [f"the fox number {i} jumps over {i * i} clouds and rests" for i in range(60)]
    text, part = write_texts("rows.jsonl", rows), write_texts("part.jsonl", rows[:30])
    result = prune(tiny_model, text, tmp_path / "out", "--watch", part, "--steps", "60")
    assert_refused(result, 4, f"{text} trains on", f"held out of {part}", "--watch")


def apply(model: Path, masks: Path, output: Path, *more: str) -> Result:
    return invoke("apply", model, "--masks", masks, "-o", output, *more)


def test_names_of_models_texts_and_outputs(tiny_model: Path, tiny_text: Path, tmp_path: Path) -> None:
    """The first two are written into the checkpoint."""
    for name in ("o" * 250, os.fsdecode(b"o\xff")):
        assert_refused(prune(tiny_model, tiny_text, tmp_path / name), 5, "bytes of UTF-8")
    assert list(tmp_path.iterdir()) == []
    model = Path(shutil.copytree(tiny_model, tmp_path / os.fsdecode(b"m\xff")))
    text = shutil.copy(tiny_text, tmp_path / os.fsdecode(b"t\xff.jsonl"))
    assert_refused(prune(model, tiny_text, tmp_path / "out"), 2, "model is", "not UTF-8")
    assert_refused(prune(tiny_model, text, tmp_path / "out"), 2, "data is", "not UTF-8")


def test_outputs_that_exist_or_cannot_be_written(pruned: Path, model: Path, tiny_text: Path, tmp_path: Path) -> None:
    """The dense model is no output, not even where ddp-vllm wrote it, as `quantize` does."""
    output, thesis = Path(shutil.copytree(pruned, tmp_path / "out")), tmp_path / "thesis.txt"
    thesis.write_text("years of work")
    (model / MASKS_FILE).touch()
    before = {path.name: path.read_bytes() for path in model.iterdir()}
    for folder in (model, tmp_path / "." / "model"):
        assert_refused(prune(model, tiny_text, folder, "--overwrite"), 5, "this command reads", "choose another folder")
        assert_refused(apply(model, pruned / MASKS_FILE, folder, "--overwrite"), 5, "this command reads")
    assert {path.name: path.read_bytes() for path in model.iterdir()} == before
    (model / MASKS_FILE).unlink()
    assert_refused(prune(model, tiny_text, output), 5, str(output), "--overwrite")
    assert_refused(apply(model, pruned / MASKS_FILE, output), 5, str(output), "--overwrite")
    assert_refused(prune(model, tiny_text, tmp_path, "--overwrite"), 5, str(tmp_path))
    assert_refused(prune(model, tiny_text, thesis / "out"), 5, "thesis.txt", "cannot be written")
    (output / "old").write_text("")
    passed(prune(model, tiny_text, output, "--overwrite"))
    assert not (output / "old").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"model", "out", "thesis.txt"}
    assert thesis.read_text() == "years of work"


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


INDEX, DOWN = "model.safetensors.index.json", "model.layers.1.mlp.down_proj.weight"


def overlay(source: Path, folder: Path, file: str) -> None:
    """Copy a model to `folder` in one shard with a stale copy of a tensor, and `file` with the copy that counts."""
    shutil.copytree(source, folder)
    every = load_file(folder / "model.safetensors")
    for path in folder.glob("model*.safetensors*"):
        path.unlink()
    first = "model-00001-of-00002.safetensors"
    save_file(every | {DOWN: torch.full_like(every[DOWN], 9.0)}, folder / first, {"format": "pt"})
    save_file({DOWN: every[DOWN]}, folder / file, {"format": "pt"})
    weight_map = dict.fromkeys(every, first) | {DOWN: file}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def logits_of(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32)
    return logits(model.eval(), torch.arange(5, 25)[None])


def test_every_reader_takes_the_copy_that_the_index_names(tiny_model: Path, tiny_text: Path, tmp_path: Path) -> None:
    overlay(tiny_model, tmp_path / "dense", "overlay.safetensors")
    assert torch.equal(logits_of(tmp_path / "dense"), logits_of(tiny_model))  # as transformers does
    for name, model in (("a", tiny_model), ("b", tmp_path / "dense")):
        passed(prune(model, tiny_text, tmp_path / name))
    assert same_weights(tmp_path / "a", tmp_path / "b")
    overlay(tmp_path / "a", tmp_path / "pruned", "overlay.safetensors")
    assert read_checkpoint(tmp_path / "pruned").num_parameters == read_checkpoint(tmp_path / "a").num_parameters
    assert torch.equal(logits_of(tmp_path / "pruned"), logits_of(tmp_path / "a"))


@pytest.mark.parametrize("verb", ["prune", "convert", "export"])
def test_copies_that_programs_read_differently_are_refused(
    verb: str, tiny_model: Path, tiny_text: Path, tmp_path: Path
) -> None:
    """A copy that is read after the one that the index names, and a whole file, which transformers prefers to the index
    that vLLM reads. Files of Mistral's format are no such copies."""

    def refused(folder: Path, *words: str) -> None:
        run = partial(prune, folder, tiny_text) if verb == "prune" else partial(invoke, verb, folder, "-o")
        result = run(tmp_path / "out")
        assert_refused(result, result.exit_code, *words)
        assert result.exit_code in (3, 7) and not (tmp_path / "out").exists()

    if verb != "export":
        overlay(tiny_model, tmp_path / "later", "model-00000-of-00002.safetensors")
        assert not torch.equal(logits_of(tmp_path / "later"), logits_of(tiny_model))
        refused(tmp_path / "later", DOWN, "which the index names", "programs read after it; remove the other copy")
    overlay(tiny_model, tmp_path / "both", "model-00002-of-00002.safetensors")
    shutil.copyfile(tiny_model / "model.safetensors", tmp_path / "both" / "model.safetensors")
    refused(tmp_path / "both", "model.safetensors", "remove")
    stray = Path(shutil.copytree(tiny_model, tmp_path / "stray"))
    shutil.copyfile(stray / "model.safetensors", stray / "model_00001-of-00001.safetensors")
    if verb == "prune":
        refused(stray, "model.safetensors", "remove the wrong one")
        (stray / "model_00001-of-00001.safetensors").rename(stray / "consolidated.safetensors")
        assert weight_files(open_source(str(stray)).folder) == [stray / "model.safetensors"]


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
