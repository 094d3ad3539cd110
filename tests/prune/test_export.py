"""The exported folder: whole, rounded once, with its tokenizer, and cut again from its masks."""

import base64
import json
import shutil
import subprocess
import sys
from math import prod
from pathlib import Path
from typing import Any

import pytest
import seams
import torch
import transformers
from any_models import write_model
from runs import edit_json, edit_weights, weights
from safetensors.torch import load_file
from seams import Source, cut, export_whole, load_tokenizer, logits, open_source, random_gates
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from ddp_vllm.errors import ModelError
from ddp_vllm.masks import MASKS_FILE
from ddp_vllm.model_facts import describe_model
from ddp_vllm.remote_code.widths import HEAD

TOKENS = torch.randint(1, 320, (2, 24), generator=torch.Generator().manual_seed(0))


def load(folder: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(scope="module")
def source(tiny_model: Path) -> Source:
    return open_source(str(tiny_model))


@pytest.fixture
def pruned(source: Source, tmp_path: Path) -> Path:
    """KV groups; layer 0 without attention, layer 1 without anything; with scores, as `prune` writes them."""
    gates = random_gates(source, "kv-group", kept=0.7)
    gates["attn"][:2], gates["mlp"][1] = 0.0, 0.0
    scores = {f"{kind}.{name}": gates[kind] + add for kind in gates for name, add in (("z", 1), ("saliency", 2))}
    seams.export(source, gates, tmp_path / "pruned", head_unit="kv-group", provenance={"texts": ["a"]}, scores=scores)
    return tmp_path / "pruned"


def test_a_head_that_is_tied_by_the_class_alone(tmp_path: Path) -> None:
    """As transformers 4 wrote config.json of Cohere 2. A copy is counted once, another head is refused."""
    folder = write_model("cohere2", tmp_path)
    number = describe_model(str(folder)).parameters
    edit_json(folder / "config.json", tie_word_embeddings=None)
    edit_weights(folder, lambda stored: stored.update({HEAD: stored["model.embed_tokens.weight"].clone()}))
    assert number == describe_model(str(folder)).parameters == sum(map(prod, open_source(str(folder)).shapes.values()))
    edit_weights(folder, lambda stored: stored[HEAD].neg_())
    with pytest.raises(ModelError, match=f"{HEAD} differs from model.embed_tokens.weight"):
        open_source(str(folder))


@pytest.mark.parametrize("num_gone", [1, 3])
def test_neither_the_kv_cache_nor_left_padding_changes_tokens(num_gone: int, source: Source, tmp_path: Path) -> None:
    """Layer 0 has no attention: the one whose KV cache counts the tokens."""
    gates = random_gates(source, "query-head", kept=0.7)
    gates["attn"][:num_gone] = 0.0
    cut(source, gates, tmp_path / "out", "query-head")
    model, settings = load(tmp_path / "out"), {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    padded = torch.cat([torch.zeros(2, 5, dtype=torch.int64), TOKENS], dim=1)
    mask = (padded != 0).long()
    cached = model.generate(TOKENS, attention_mask=mask[:, 5:], **settings)
    plain = model.generate(TOKENS, attention_mask=mask[:, 5:], use_cache=False, **settings)
    assert cached.shape == (2, 36) and torch.equal(cached, plain)
    assert torch.equal(model.generate(padded, attention_mask=mask, **settings)[:, 5:], cached)
    with torch.no_grad():  # by hand, where the model asks its cache for the positions
        first = model(TOKENS[:, :20], use_cache=True)
        second = model(TOKENS[:, 20:], past_key_values=first.past_key_values)
    whole = logits(model, TOKENS)
    torch.testing.assert_close(torch.cat([first.logits, second.logits], dim=1), whole, atol=1e-4, rtol=0)
    shifted = logits(model, padded, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp_min(0))[:, 5:]
    torch.testing.assert_close(shifted, whole, atol=1e-4, rtol=0)


def test_gates_are_folded_in_float32_and_rounded_once(tiny_model: Path, tmp_path: Path) -> None:
    LlamaForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16).save_pretrained(tmp_path / "dense")
    source = open_source(str(tmp_path / "dense"))
    gates = random_gates(source, "kv-group")
    cut(source, gates, tmp_path / "out", "kv-group")
    dense, pruned = weights(tmp_path / "dense"), weights(tmp_path / "out")
    assert {tensor.dtype for tensor in pruned.values()} == {torch.bfloat16}
    for layer in range(3):
        down, up = (f"model.layers.{layer}.mlp.{name}_proj.weight" for name in ("down", "up"))
        keep = gates["mlp"][layer] > 0
        assert torch.equal(pruned[down], (dense[down][:, keep].float() * gates["mlp"][layer][keep]).to(torch.bfloat16))
        assert torch.equal(pruned[up], dense[up][keep])


def test_the_folder_is_whole(pruned: Path, tiny_model: Path) -> None:
    assert {path.name for path in pruned.iterdir()} >= {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
        "README.md", MASKS_FILE, "widths.py", "configuration_ddp.py", "modeling_ddp.py",
    }  # fmt: skip
    dense, config = (json.loads((folder / "config.json").read_text()) for folder in (tiny_model, pruned))
    assert {key for key in config.keys() | dense.keys() if config.get(key) != dense.get(key)} == {
        "architectures", "model_type", "auto_map", "ddp_layers",
    }  # fmt: skip
    assert (config["model_type"], config["architectures"]) == ("ddp_llama", ["DDPLlamaForCausalLM"])
    assert config["ddp_layers"][1] == {"query_heads_per_kv_head": [], "intermediate_size": 0}
    for width in (7.5, 95):  # the last is a possible width, but not that of the weights
        layers = [*config["ddp_layers"][:2], config["ddp_layers"][2] | {"intermediate_size": width}]
        edit_json(pruned / "config.json", ddp_layers=layers)
        with pytest.raises(ValueError, match=rf"config.json.*{width}"):
            load(pruned)


@pytest.mark.parametrize("stored", ["one file", "shards", "shards without an index"])
def test_masks_alone_cut_the_same_checkpoint(
    stored: str, pruned: Path, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the scores that aligning needs. A model that is stored in shards is written in shards, if they are small."""
    dense = tiny_model
    if stored != "one file":
        monkeypatch.setattr(seams.model_files, "MAX_SHARD_BYTES", 30_000)
        dense = tmp_path / "dense"
        LlamaForCausalLM.from_pretrained(tiny_model).save_pretrained(dense, max_shard_size="50KB")
        assert len(list(dense.glob("*.safetensors"))) > 2
    if stored == "shards without an index":  # their names alone must do
        (dense / "model.safetensors.index.json").unlink()
    seams.apply_masks(str(dense), pruned / MASKS_FILE, again := tmp_path / "again", overwrite=False)
    (first, stated), (second, states) = (seams.read_masks(path / MASKS_FILE) for path in (pruned, again))
    assert all(torch.equal(first[kind], second[kind]) for kind in ("attn", "mlp")) and len(first) == len(second) == 2
    assert states.pop("file_id") != stated.pop("file_id") and states.pop("applied_weights")
    assert states == stated | {"applied_to": dense.name}
    scores, kept = (seams.read_scores(path / MASKS_FILE) for path in (pruned, again))
    assert len(kept) == 4 and all(torch.equal(kept[name], scores[name]) for name in kept)
    if stored == "one file":
        for name in ("model.safetensors", "config.json"):
            assert (again / name).read_bytes() == (pruned / name).read_bytes(), name
        return
    files = sorted(again.glob("model*.safetensors"))
    assert len(files) > 2 and files[0].name == f"model-00001-of-{len(files):05}.safetensors"
    index = json.loads((again / "model.safetensors.index.json").read_text())["weight_map"]
    whole = weights(pruned)
    assert index.keys() == whole.keys()
    for file in files:
        for name, tensor in load_file(file).items():
            assert index[name] == file.name and torch.equal(tensor, whole[name])
    assert torch.equal(logits(load(again), TOKENS), logits(load(pruned), TOKENS))


SHARD_BYTES = 20_000_000
MEASURE = """
import sys, threading, time
from pathlib import Path

from seams import export_whole, model_files, open_source

def own():  # bytes of this process's own memory; of the mapped files only pages in use are in memory, and can go
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("RssAnon"))

def watch():
    while not done.is_set():
        most[0] = max(most[0], own())
        time.sleep(0.001)

model_files.MAX_SHARD_BYTES = int(sys.argv[4])
export_whole(open_source(sys.argv[1]), Path(sys.argv[3] + "-tiny"))  # imports what it needs
began, done = own(), threading.Event()
most = [began]
watcher = threading.Thread(target=watch)
watcher.start()
export_whole(open_source(sys.argv[2]), Path(sys.argv[3]))
done.set()
watcher.join()
print(most[0] - began)
"""


@pytest.mark.nightly
def test_export_holds_a_shard_whatever_the_model(tiny_model: Path, tmp_path: Path) -> None:
    """Nothing is cut here, only folded, so all of the model passes through."""
    config = LlamaConfig(
        vocab_size=512, hidden_size=1024, intermediate_size=4096, num_hidden_layers=10, num_attention_heads=16,
        num_key_value_heads=4, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model = model.to_empty(device="cpu").to(torch.bfloat16)
    for parameter in model.parameters():
        parameter.data.fill_(0.01)
    model.save_pretrained(tmp_path / "dense", max_shard_size="50MB")
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    assert num_bytes > 300_000_000 and len(list((tmp_path / "dense").glob("*.safetensors"))) > 5
    arguments = [str(tiny_model), str(tmp_path / "dense"), str(tmp_path / "out"), str(SHARD_BYTES)]
    # large blocks return to the system when they are freed
    settings = {"PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    result = subprocess.run([sys.executable, "-c", MEASURE, *arguments], capture_output=True, text=True, env=settings)
    assert result.returncode == 0, result.stderr
    # a shard, and of the largest matrix: as read, folded in float32, and rounded
    most = 1.5 * SHARD_BYTES + (2 + 4 + 4 + 2) * 4096 * 1024
    assert SHARD_BYTES / 2 < int(result.stdout) < min(most, num_bytes / 3)
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 10


TEXT = "The quick  brown fox,\n number 12's  lazy dog."


def become(folder: Path, family: str) -> None:
    """Write a model of another family and the same sizes."""
    config = json.loads((folder / "config.json").read_text())
    sizes = {name: config[name] for name in config.keys() - {"model_type", "architectures"}}
    AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes)).save_pretrained(folder)


@pytest.mark.parametrize(("model_type", "stated"), [("llama", "LlamaTokenizerFast"), ("qwen2", "Qwen2Tokenizer")])
def test_a_folder_tokenizes_as_its_dense_model(
    model_type: str, stated: str, tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """transformers sets some stated classes aside for model types it knows; it does not know ours, about which
    it warns, and no user shall read that."""
    dense = Path(shutil.copytree(tiny_model, tmp_path / "dense"))
    become(dense, model_type)
    edit_json(dense / "tokenizer_config.json", tokenizer_class=stated)
    caplog.clear()
    transformers_logging.add_handler(caplog.handler)
    export_whole(open_source(str(dense)), tmp_path / "pruned")
    transformers_logging.remove_handler(caplog.handler)
    assert "instantiate a model of type" not in caplog.text
    expected = AutoTokenizer.from_pretrained(dense)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "pruned", trust_remote_code=True)
    assert type(tokenizer) is type(expected)
    assert tokenizer(TEXT)["input_ids"] == expected(TEXT)["input_ids"]
    assert tokenizer.eos_token_id == expected.eos_token_id == 0


@pytest.mark.parametrize(
    "name",
    ["deepseek-ai/DeepSeek-R1-Distill-Llama-8B", "stepfun-ai/step-3.7-flash", "allenai/dolma2-tokenizer", "me/tiny"],
)
def test_a_tokenizer_that_transformers_chooses_by_the_name_on_the_hub(
    name: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not believe the class that these models state, LlamaTokenizerFast, which loses blanks."""
    cached = tmp_path / "hub" / f"models--{name.replace('/', '--')}"
    dense = Path(shutil.copytree(tiny_model, cached / "snapshots" / "abc"))
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("abc")
    edit_json(dense / "tokenizer_config.json", tokenizer_class="LlamaTokenizerFast")
    for setting, value in (("HF_HUB_CACHE", str(tmp_path / "hub")), ("HF_HUB_OFFLINE", True)):
        monkeypatch.setattr(f"huggingface_hub.constants.{setting}", value)
    source = open_source(name)
    export_whole(source, tmp_path / "pruned")
    expected = AutoTokenizer.from_pretrained(name)(TEXT)["input_ids"]
    trained_on = load_tokenizer(source.tokenizer)(TEXT)["input_ids"]
    own = AutoTokenizer.from_pretrained(tmp_path / "pruned", trust_remote_code=True)(TEXT)["input_ids"]
    assert trained_on == own == expected
    by_class = AutoTokenizer.from_pretrained(dense)(TEXT)["input_ids"]
    assert (by_class == expected) == (name == "me/tiny")


@pytest.mark.parametrize("family", ["mistral", pytest.param("ministral", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("repaired", [True, False])
def test_a_tokenizer_that_transformers_repairs_by_model_type(
    family: str, repaired: bool, tiny_model: Path, tmp_path: Path
) -> None:
    """The pruned Mistral has a type of ours; another class keeps its own type, and its tokenizer untouched."""
    dense = Path(shutil.copytree(tiny_model, tmp_path / "dense"))
    become(dense, family)
    edit_json(dense / "config.json", transformers_version="4.50.0")  # whose files are repaired
    edit_json(dense / "tokenizer_config.json", fix_mistral_regex=repaired, tokenizer_class="PreTrainedTokenizerFast")
    model = json.loads((dense / "tokenizer.json").read_text())["model"]
    more = {f"<{number}>": number for number in range(len(model["vocab"]), 100_100)}  # smaller ones are never repaired
    edit_json(dense / "tokenizer.json", model=model | {"vocab": model["vocab"] | more})
    export_whole(open_source(str(dense)), tmp_path / "pruned")
    folders = [tmp_path / "dense", tmp_path / "pruned"]
    expected, own = (AutoTokenizer.from_pretrained(folder, trust_remote_code=True) for folder in folders)
    text = "HelloWorld isn't 12345 THEend\n\n x"
    assert own(text)["input_ids"] == expected(text)["input_ids"]
    as_stored = transformers.PreTrainedTokenizerFast.from_pretrained(tiny_model)(text)["input_ids"]
    assert (expected(text)["input_ids"] == as_stored) == (not repaired)


def tekken(path: Path) -> int:
    """Write a tokenizer in Mistral's own format, and return the size of its vocabulary."""
    words = [bytes([byte]) for byte in range(256)] + [b" t", b"he", b" q", b"ui", b"ck"]
    vocabulary = [
        {"rank": rank, "token_bytes": base64.b64encode(word).decode(), "token_str": word.decode("latin1")}
        for rank, word in enumerate(words)
    ]
    tools = ("[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]")
    names = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", *tools, "<pad>", "[PREFIX]", "[MIDDLE]", "[SUFFIX]"]
    special = [{"rank": rank, "token_str": name, "is_control": True} for rank, name in enumerate(names)]
    sizes = {"default_vocab_size": len(words) + len(names), "default_num_special_tokens": len(names)}
    config = {"pattern": r"[^\s]+|\s+", "num_vocab_tokens": len(words), **sizes, "version": "v3"}
    path.write_text(json.dumps({"config": config, "vocab": vocabulary, "special_tokens": special}))
    return len(words) + len(names)


def test_a_mistral_with_tekken_alone_keeps_its_tokens(tmp_path: Path) -> None:
    """transformers chooses the class by model type, and has none for ours."""
    pytest.importorskip("mistral_common")
    (tmp_path / "dense").mkdir()
    config = transformers.MistralConfig(
        vocab_size=tekken(tmp_path / "dense" / "tekken.json"), hidden_size=32, intermediate_size=40, head_dim=8,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, sliding_window=None,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "dense")
    export_whole(open_source(str(tmp_path / "dense")), tmp_path / "pruned")
    expected = AutoTokenizer.from_pretrained(tmp_path / "dense")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "pruned", trust_remote_code=True)
    assert type(tokenizer).__name__ == type(expected).__name__ == "MistralCommonBackend"
    ids = expected("the quick")["input_ids"]
    assert tokenizer("the quick")["input_ids"] == ids and ids[0] == 1
