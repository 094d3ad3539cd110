"""Models, texts, outputs, masks and options that cannot be used: one line and an exit code each, nothing left behind.

Every kind of bad text is in test_rows.py, every way to corrupt a checkpoint in tests/test_checkpoint.py, limits of
settings in test_recipe.py.
"""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import seams
import torch
from any_models import write_headers
from click.testing import Result
from commands import assert_refused, invoke, passed
from huggingface_hub.utils import filter_repo_objects
from runs import SMALL, Edit, config, edit_json, edit_weights, prune, tensors, weights, without
from safetensors.torch import load_file, save_file
from seams import check_head, load_model, open_source
from transformers import AutoModelForCausalLM, HyperCLOVAXConfig, LlamaForCausalLM

from ddp_vllm.errors import ModelError, TrainingError
from ddp_vllm.masks import MASKS_FILE

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cache", "no_pictures")]


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def tokenizer(change: Callable[[dict[str, Any]], Any]) -> Edit:
    return lambda folder: edit_json(folder / "tokenizer.json", change)


def index_outside(folder: Path) -> None:
    file = (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    (folder.parent / file.name).write_bytes(file.read_bytes())
    edit_json(folder / INDEX, weight_map={"model.norm.weight": "../model-1.safetensors"})


INDEX, UP, DOWN = "model.safetensors.index.json", *(f"model.layers.1.mlp.{name}_proj.weight" for name in ("up", "down"))
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
BROKEN: dict[str, tuple[Edit, list[str]]] = {  # an edit of the tiny model, words of the line
    "nothing recognized": (config(model_type="gpt2"), ["no MLP", "GPT2LMHeadModel", "mlp (GPT2MLP)", "attn ("]),
    "unknown to transformers": (config(model_type="newlm"), ["newlm", "update transformers"]),
    "pruned already": (config(model_type="ddp_llama"), ["pruned already", "its dense model"]),
    "quantized": (config(quantization_config={"quant_method": "gptq"}), ["quantized", "unquantized"]),
    "too many layers": (config(num_hidden_layers=5 * 10**8), ["num_hidden_layers", str(5 * 10**8), "10,000"]),
    "fewer layers than there are": (
        config(num_hidden_layers=2, layer_types=None), ["layers.2.", "config.json has 2 "]
    ),
    "no safetensors": (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), [".safetensors"]),
    "index outside the folder": (  # masks would be learned on one file, and the other cut
        index_outside, ["'../model-1.safetensors', not a file of its folder"],
    ),
    "an adapter that transformers would add": (
        lambda folder: edit_json(folder / "adapter_config.json", peft_type="LORA"), ["LoRA adapter", "merge it into"]
    ),
    "weights that transformers would read instead": (
        config(transformers_weights="other.safetensors"), ["transformers_weights 'other.safe", "save_pretrained"]
    ),
    "a head that is not the embedding it is tied to": (  # the library uses it, and it would be dropped
        tensors(lambda w: w.update({HEAD: w[EMBEDDING].flip(0).contiguous()})),
        ["tie_word_embeddings", f"{HEAD} differs from {EMBEDDING}", "otherwise remove"],
    ),
    "a head that is missing": (config(tie_word_embeddings=False), [f"tensor {HEAD} is missing", "again"]),
    "a missing projection": (without(UP), ["layer 1", "mlp.up_proj", "again"]),
    "rows fewer than the heads of the config": (
        tensors(lambda w: w.update({"model.layers.2.self_attn.k_proj.weight": torch.ones(24, 64)})),
        ["model.layers.2.self_attn.k_proj.weight", "[24, 64]", "require 32 along axis 0"],
    ),
    "tokenizer missing": (
        lambda folder: [file.unlink() for file in folder.glob("tokenizer*")], ["no tokenizer", "tokenizer.json"]
    ),
    "a tokenizer that makes its library panic": (  # a panic in Rust is no Exception in Python
        tokenizer(lambda content: content["model"].update(continuing_subword_prefix="a" * 100_000)),
        ["the tokenizer of", "cannot be read"],
    ),
    "a tokenizer of another model": (
        tokenizer(lambda c: c["added_tokens"].append({**c["added_tokens"][0], "id": 320, "content": " lazy"})),
        ["token 320", "0 to 319", "belongs to"],
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


UNMET: dict[str, tuple[str, list[str], tuple[str, ...]]] = {  # model, "" for the tiny one, options, words
    "two sizes": ("", ["--target", "70K"], ("--sparsity and --target are given",)),
    "sequences too long": ("", ["--seq-len", "2049"], ("--seq-len is 2049", "takes 2,048", "lower --seq-len")),
    "a budget in every expert": ("", ["--scope", "expert"], ("scope is 'expert'", "not a mixture of experts")),
    "whole experts of a dense model": ("", ["--whole-experts"], ("not a mixture of experts", "no whole experts")),
    "whole experts and channels of MLPs": (
        "deepseek_v3", ["--whole-experts", "--prune", "mlp,experts"], ("removes experts alone", "--prune experts")
    ),
    "heads of experts": (
        "deepseek_v3", ["--head-unit", "query-head"], ("--head-unit has no effect where no attention is pruned",)
    ),
    "heads of whole experts": (
        "mixtral", ["--whole-experts", "--head-unit", "kv-group"], ("--head-unit has no effect",)
    ),
    "blocks of heads": (
        "", ["--prune", "attention", "--align", "8"], ("--align has no effect where no experts or mlp is pruned",)
    ),
    "shards in one process": ("", ["--shard"], ("there is one", "accelerate launch")),
    "attention": ("olmo2", ["--prune", "attention,mlp"], ("attention of olmo2 cannot be pruned", "choose from mlp")),
    "whole experts": ("glm4_moe", ["--whole-experts"], ("removes rows of the router", "glm4_moe", "leave it out")),
    "too few experts for a token": (
        "mixtral", ["--whole-experts", "--sparsity", "0.8"], ("1 of 8 experts", "keep 3 to 7", "each token to 3")
    ),
    "sizes of the same experts": (
        "mixtral", ["--whole-experts", "--sparsity", "0.2,0.23", "--steps", "60"],
        ("0.2 and 0.23", "keep 6 of 8 whole experts"),
    ),
    "sizes of the same units": (
        "", ["--budget", "units", "--sparsity", "0.2,0.203", "--steps", "300"], ("0.2 and 0.203", "leave one")
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", UNMET)
def test_settings_that_cannot_be_met(
    case: str, dense: Callable[[str], Path], tiny_model: Path, tiny_text: Path, tmp_path: Path
) -> None:
    name, options, words = UNMET[case]
    model = dense(name) if name else tiny_model
    assert_refused(prune(model, tiny_text, tmp_path / "out", *options), 2, *words)
    assert list(tmp_path.iterdir()) == []


def test_a_head_that_is_missing_in_a_stock_class_is_found_before_the_text_is_read(
    dense: Callable[[str], Path], tmp_path: Path
) -> None:
    """It would be found when the weights are loaded, after a profile of the machine."""
    folder = Path(shutil.copytree(dense("olmo2"), tmp_path / "model"))
    without(HEAD)(folder)
    assert_refused(prune(folder, "missing.txt", tmp_path / "out"), 3, f"tensor {HEAD} is missing (1 in all)")


UNKNOWN = {  # config -> why none of its parts can be pruned
    "T5Gemma2Config": "T5Gemma2ForConditionalGeneration is an encoder-decoder",
    "ZambaConfig": "MLPs that several layers share are left as they are",
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_architectures_that_are_refused_by_their_headers(name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=UNKNOWN[name]):
        open_source(str(write_headers(name, tmp_path)))


@pytest.mark.parametrize("verb", ["apply", "recover", "recover from", "inspect", "eval", "convert"])
def test_no_verb_reads_a_model_to_which_transformers_adds_an_adapter(
    verb: str, pruned: Path, tiny_model: Path, tiny_text: Path, tmp_path: Path
) -> None:
    """In the dense folder, or in the pruned one, where a training of the user may have left it."""
    is_dense = verb in ("apply", "recover from", "convert")
    folder = Path(shutil.copytree(tiny_model if is_dense else pruned, tmp_path / "model"))
    edit_json(folder / "adapter_config.json", peft_type="LORA")
    words = {
        "apply": ("apply", folder, "--masks", pruned / MASKS_FILE, "-o", tmp_path / "out"),
        "recover": ("recover", folder, "--teacher", tiny_model, "--tokens", "64", "-o", tmp_path / "out"),
        "recover from": ("recover", pruned, "--teacher", folder, "--tokens", "64", "-o", tmp_path / "out"),
        "inspect": ("inspect", folder),
        "eval": ("eval", folder, "--against", tiny_model, "--text", tiny_text, "-o", tmp_path / "out"),
        "convert": ("convert", folder, "-o", tmp_path / "out"),
    }[verb]
    result = invoke(*words)
    assert_refused(result, result.exit_code, "LoRA adapter; merge it into its model")
    assert result.exit_code in (3, 7) and not (tmp_path / "out").exists()


def test_an_output_head_that_is_unknown(dense: Callable[[str], Path]) -> None:
    """Cohere scales its logits; a scale that the loss does not know would train on another loss."""
    source = open_source(str(dense("cohere2")))
    model: Any = load_model(source, "float32")
    check_head(source, model)
    model.config.logit_scale, model.logit_scale = 1.0, 0.5
    with pytest.raises(ModelError, match="Cohere2ForCausalLM computes its logits"):
        check_head(source, model)


def test_an_output_head_that_is_unknown_is_not_measured_either(model: Path, tiny_text: Path, tmp_path: Path) -> None:
    """HyperCLOVAX multiplies its logits by what Granite divides them by."""
    sizes = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    scaled = HyperCLOVAXConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, logits_scaling=0.25)
    AutoModelForCausalLM.from_config(scaled).save_pretrained(model)
    for words in (
        ("eval", model, "--against", model, "--text", tiny_text, "--max-length", 16),
        ("prune", model, "--sparsity", 0.3, "--data", tiny_text, "--steps", 2, "--seq-len", 16, "--batch-size", 2),
    ):
        assert_refused(invoke(*words, "-o", tmp_path / words[0]), 3, "HyperCLOVAXForCausalLM computes its logits")


def test_a_trained_weight_that_is_not_written() -> None:
    """If transformers and the publisher named a weight differently, its dense values would be written."""
    updated = seams.UpdatedWeights({"a.weight": torch.ones(2), "b.weight": torch.ones(2)}, {}, torch.float32)
    assert torch.equal(updated("a.weight", torch.zeros(2)), torch.ones(2))
    assert torch.equal(updated("c.weight", torch.zeros(2)), torch.zeros(2))
    with pytest.raises(TrainingError, match=r"b\.weight was trained but is not on disk"):
        updated.check_complete()


def test_auto_learns_in_the_stored_format_but_for_float16(tiny_model: Path, tmp_path: Path) -> None:
    """Also where the config does not say. What is exported keeps the stored format."""
    for stored in (torch.float16, torch.bfloat16):
        folder = tmp_path / str(stored)
        LlamaForCausalLM.from_pretrained(tiny_model, dtype=stored).save_pretrained(folder)
        pruned = seams.export_whole(open_source(str(folder)), folder / "pruned")
        assert {tensor.dtype for tensor in weights(pruned).values()} == {stored}
        assert json.loads((pruned / "config.json").read_text())["dtype"] == str(stored).split(".")[1]
        for edit in (lambda _: None, config(dtype=None)):
            edit(folder)
            for dtype, used in (("auto", torch.bfloat16), ("float16", torch.float16)):
                model = load_model(open_source(str(folder)), dtype)
                assert {parameter.dtype for parameter in model.parameters()} == {used}


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
    monkeypatch.setattr(seams.jobs, where, seams.out_of_memory)
    assert_refused(prune(tiny_model, tiny_text, tmp_path / "out"), 6, str(tiny_model), "memory of a device", "--shard")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("device", ["xpu", "npu", "hpu"])
def test_a_device_that_is_not_supported(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: SimpleNamespace(type=device))
    with pytest.raises(TrainingError, match=f"torch computes on {device}, which ddp-vllm does not support"):
        seams.devices.make_accelerator(tmp_path / "out", None)


def apply(model: Path, masks: Path, output: Path, *more: str) -> Result:
    return invoke("apply", model, "--masks", masks, "-o", output, *more)


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


@pytest.mark.parametrize("output", ["", ".", "/", "..", "x/.."])
def test_an_output_without_a_name(
    output: str, pruned: Path, tiny_model: Path, tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an unset variable gives it."""
    monkeypatch.chdir(tmp_path)
    code, words = (5, "has no name of its own") if output else (2, "--output is empty")
    for command in (
        ("prune", tiny_model, "--sparsity", "0.4", "--data", tiny_text, *SMALL),
        ("recover", pruned, "--teacher", tiny_model, "--tokens", "64"),
        ("apply", tiny_model, "--masks", pruned / MASKS_FILE),
        ("convert", tiny_model),
    ):
        assert_refused(invoke(*command, "-o", output), code, words)


PROVENANCE: dict[str, str] = {  # of masks; words of the refusal
    '{"recipe": {"context_length": "x"}}': "its provenance.recipe",
    '{"recipe": [1]}': "its provenance.recipe: expected `object`, got `array`",
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


def test_masks_of_another_model_are_applied_with_a_warning(
    pruned: Path, model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    passed(apply(model, pruned / MASKS_FILE, tmp_path / "same"))
    assert "was made for other weights" not in caplog.text
    edit_weights(model, lambda weights: weights["model.norm.weight"].mul_(2))
    passed(apply(model, pruned / MASKS_FILE, tmp_path / "out"))
    assert "was made for other weights" in caplog.text


@pytest.mark.parametrize("verb", ["prune", "convert", "export"])
def test_a_tensor_in_two_files_is_refused(verb: str, tiny_model: Path, tiny_text: Path, tmp_path: Path) -> None:
    """Programs load different copies, as of a whole file beside shards. Files of Mistral's format are no copies."""

    def refused(folder: Path, *words: str) -> None:
        run = partial(prune, folder, tiny_text) if verb == "prune" else partial(invoke, verb, folder, "-o")
        result = run(tmp_path / "out")
        assert_refused(result, result.exit_code, *words)
        assert result.exit_code in (3, 7) and not (tmp_path / "out").exists()

    folder, shards = tmp_path / "twice", [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    shutil.copytree(tiny_model, folder)
    every = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / shards[0])
    save_file({DOWN: every[DOWN]}, folder / shards[1], {"format": "pt"})
    edit_json(folder / INDEX, weight_map=dict.fromkeys(every, shards[0]) | {DOWN: shards[1]})
    refused(folder, DOWN, shards[1])
    (folder / shards[1]).unlink()
    edit_json(folder / INDEX, weight_map=dict.fromkeys(every, shards[0]))
    shutil.copyfile(tiny_model / "model.safetensors", folder / "model.safetensors")
    refused(folder, "model.safetensors", "remove")
    stray = Path(shutil.copytree(tiny_model, tmp_path / "stray"))
    shutil.copyfile(stray / "model.safetensors", stray / "model_00001-of-00001.safetensors")
    refused(stray, "model.safetensors and model_00001-of-00001.safetensors; remove one")
    (stray / "model_00001-of-00001.safetensors").rename(stray / "consolidated.safetensors")
    assert seams.weight_files(open_source(str(stray)).folder) == [stray / "model.safetensors"]
