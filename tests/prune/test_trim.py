"""The verb trim: fewer tokens, a stock model, and nothing else that changes."""

import itertools
import json
import math
import os
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import assert_refused, edit_json, invoke, passed
from safetensors.torch import load_file, save_file
from seams import cut, leave_unquantized, open_source, trim_module, vocabulary_module
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    Ernie4_5_MoeConfig,
    Gemma3Config,
    GPTNeoConfig,
    HyperCLOVAXConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    PreTrainedTokenizerFast,
)

from ddp_vllm.api import read
from ddp_vllm.evaluations import bits_ratio, perplexity_ratio
from ddp_vllm.masks import MASKS_FILE, read_provenance
from ddp_vllm.pages.compare import choice, comparison_table
from ddp_vllm.pages.measurements import collect
from ddp_vllm.pages.report import write_report
from random_models import SENTENCES, train_tokenizer

CHINESE, EMOJI = "你好，世界", "naïve \U0001f469\u200d\U0001f680 é"
TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }} over lazy clouds<eos>{% endfor %}"


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with padded rows, whose special tokens follow the vocabulary."""
    folder = tmp_path_factory.mktemp("dense") / "model"
    tokenizer = train_tokenizer(SENTENCES, 512, eos_token="<eos>", bos_token="<bos>")
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=640, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False, max_position_embeddings=512,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=[tokenizer.eos_token_id], pad_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    path.write_text("".join(json.dumps({"text": sentence}) + "\n" for sentence in SENTENCES))
    return path


@pytest.fixture(scope="module")
def trimmed(dense: Path, text: Path) -> tuple[Path, str]:
    folder = dense.parent / "trimmed"
    command = ("trim", dense, "--tokens", 400, "--data", text, "-o", folder, "--no-proof")
    return folder, passed(invoke(*command)).stdout


def test_what_it_costs_is_stated(trimmed: tuple[Path, str], dense: Path, text: Path) -> None:
    """Bits per byte are those of transformers' own loss; an embedding that is no head is not read."""
    folder, printed = trimmed
    costs = read_provenance(folder / MASKS_FILE)["trimmed"]
    for model, number in zip((dense, folder), costs["read"], strict=True):
        weights = dict(AutoModelForCausalLM.from_pretrained(model).named_parameters())
        del weights["model.embed_tokens.weight"]
        assert number == sum(weight.numel() for weight in weights.values() if weight.dim() > 1)
    assert "numbers that a decode step reads" in printed
    tokenizers = [AutoTokenizer.from_pretrained(model) for model in (dense, folder)]
    (held_out,) = trim_module.read_texts(str(text), tokenizers[0], print).held_out.values()
    for model, tokenizer, stated in zip((dense, folder), tokenizers, costs["texts"]["text.jsonl"]["bits"], strict=True):
        loaded, nats = AutoModelForCausalLM.from_pretrained(model), 0.0
        for excerpt in held_out[: trim_module.READ]:
            ids = torch.tensor([[tokenizer.bos_token_id, *tokenizer(excerpt, add_special_tokens=False)["input_ids"]]])
            nats += loaded(ids, labels=ids).loss.item() * (ids.shape[1] - 1)
        num_bytes = sum(len(excerpt.encode()) for excerpt in held_out[: trim_module.READ])
        assert stated == pytest.approx(nats / math.log(2) / num_bytes, rel=1e-4)
    assert all(before < after for before, after in costs["words"].values()) and len(costs["words"]) <= 10
    assert all(f"{word} ({before} → {after})" in printed for word, (before, after) in costs["words"].items())


def edited(dense: Path, folder: Path, name: str, **changes: Any) -> Path:
    """Copy a model and change one of its files."""
    return edit_json(shutil.copytree(dense, folder) / name, **changes).parent


def test_the_result_is_a_stock_model_with_fewer_rows(dense: Path, trimmed: tuple[Path, str]) -> None:
    folder, printed = trimmed
    config = json.loads((folder / "config.json").read_text())
    assert config["vocab_size"] == 384 and config["model_type"] == "llama" and "auto_map" not in config
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == 384 == len(model.lm_head.weight) == len(model.model.embed_tokens.weight)
    generation = json.loads((folder / "generation_config.json").read_text())
    assert [tokenizer.eos_token_id] == config["eos_token_id"] == generation["eos_token_id"]
    assert config["bos_token_id"] == generation["bos_token_id"] == tokenizer.bos_token_id
    assert "514 → 384" in printed and "becomes longer" in printed
    costs = read_provenance(folder / MASKS_FILE)["trimmed"]["texts"]["text.jsonl"]
    shown = f"{costs['bits'][0]:.4f} → {costs['bits'][1]:.4f}"
    for page in ("README.md", "report.html"):
        assert "514 → 384 of model" in (content := (folder / page).read_text()) and shown in content, page


def test_text_of_kept_tokens_has_the_same_tokens_and_logits(dense: Path, trimmed: tuple[Path, str]) -> None:
    before, after = (AutoTokenizer.from_pretrained(folder) for folder in (dense, trimmed[0]))
    names = after.get_vocab()
    equal = [text for text in SENTENCES if set(before.tokenize(text)) <= names.keys()]
    assert equal and all(before.tokenize(text) == after.tokenize(text) for text in equal)
    old = before(equal[0], return_tensors="pt").input_ids
    new = after(equal[0], return_tensors="pt").input_ids
    kept = [before.get_vocab()[name] for name in sorted(names, key=names.__getitem__)]
    logits = [
        AutoModelForCausalLM.from_pretrained(folder)(ids).logits for folder, ids in ((dense, old), (trimmed[0], new))
    ]
    torch.testing.assert_close(logits[0][..., kept], logits[1], atol=1e-6, rtol=0)


def test_the_written_folder_is_proved(
    proving_here: None, dense: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stock model, which a fresh process reads as this one does: three of them start for each of these commands."""
    command = ("trim", dense, "--tokens", 400, "--data", text, "-o")
    assert "tokens the same" in passed(invoke(*command, tmp_path / "new")).stdout
    proof = read_provenance(tmp_path / "new" / MASKS_FILE)["proof"]
    assert proof["logits"] < 1e-6 and proof["tokens"] > 500

    whole = trim_module.trimmed_document

    def without_a_merge(*arguments: Any) -> Any:
        document = whole(*arguments)
        document["model"]["merges"].pop(0)
        return document

    monkeypatch.setattr(trim_module, "trimmed_document", without_a_merge)
    assert_refused(invoke(*command, tmp_path / "bad"), 7, "other tokens")


def test_a_trimmed_model_compares_with_the_dense_one_by_bits_per_byte(
    trimmed: tuple[Path, str], dense: Path, text: Path, tmp_path: Path
) -> None:
    """A model that was pruned from the trimmed one states what trimming cost, and compares with both."""
    source = open_source(str(trimmed[0]))
    gates = {"attn": torch.tensor([[1.0, 0.0], [1.0, 1.0]]), "mlp": torch.ones(2, 48)}
    half = cut(source, gates, tmp_path / "half", "kv-group").folder
    assert "trimmed from 514 to 384" in (half / "README.md").read_text()
    assert json.loads(passed(invoke("inspect", half, "--json")).stdout)["trimmed"]["tokens"] == [514, 384]
    assert "trimmed: held-out text of text.jsonl" in write_report(read(half), tmp_path / "report.html").read_text()

    words = ("eval", half, "--against", dense, "--text", text, "--max-length", 64, "--tokens", 64, "--dtype", "float32")
    printed = passed(invoke(*words)).stdout
    assert "KL and top-1 agreement are not defined" in printed and "perplexity per token of the dense model" in printed
    (file,) = (half / "eval").glob("text_*.json")
    bits = json.loads(file.read_text())["bits"]["text.jsonl"]
    ratio = bits["bits_per_byte"]["pruned"] / bits["bits_per_byte"]["dense"]
    assert bits_ratio(bits)[0] == pytest.approx(ratio) and bits_ratio(bits)[1] < ratio < bits_ratio(bits)[2]
    assert bits["tokens_per_byte"]["dense"] < bits["tokens_per_byte"]["pruned"]
    assert "× [" in passed(invoke("eval", trimmed[0], *words[4:], "-o", tmp_path / "trimmed")).stdout  # it names MODEL
    # the same limit as for models whose tokens are the same: of all nats, per token of the dense model
    nats = {who: math.log(2.0) * sum(bits["excerpt_bits"][who]) for who in ("dense", "pruned")}
    tokens = bits["tokens_per_byte"]["dense"] * sum(bits["excerpt_bytes"])
    perplexity = math.exp((nats["pruned"] - nats["dense"]) / tokens)
    found, low, high = perplexity_ratio(bits)
    assert found == pytest.approx(perplexity) and low < found < high
    missed = invoke(*words, "--max-ratio", perplexity - 0.001, "-o", tmp_path / "new")
    assert_refused(missed, 9, "perplexity on text.jsonl", "above --max-ratio")

    comparison = collect([half], dense=str(dense))
    rows = {row[0]: row[1:] for row in comparison_table(comparison).rows}
    assert rows["bits per byte of text.jsonl, × dense"][0] == "1"
    stated = [f"{bits['tokens_per_byte'][who]:.4f}" for who in ("dense", "pruned")]
    assert rows["tokens per byte of text.jsonl"] == stated
    assert rows["perplexity on text.jsonl, × dense"][1].startswith(f"{perplexity:.2f}×")
    assert not any("held-out" in name or "KL" in name for name in rows)
    assert "is compared by bits per byte" in " ".join(comparison.notes)
    assert [choice(comparison, limit)[0] for limit in (perplexity + 0.001, perplexity - 0.001)] == [
        comparison.pruned[0],
        None,
    ]
    assert not any("bits" in row[0] for row in comparison_table(collect([half], dense=str(trimmed[0]))).rows)
    both = collect([trimmed[0], half], dense=str(dense))  # the trimmed model itself has a column, too
    assert [model.name for model in both.models] == ["model (dense)", "trimmed", "half"] and both.pruned[
        0
    ].heldout is None
    assert collect([trimmed[0]]).dense == both.dense
    assert f"; ddp-vllm eval {trimmed[0]} --against {dense} --text FILE does that" in " ".join(both.notes)


WORD_PIECE = {"type": "WordPiece", "vocab": {"a": 0, "?": 1}, "unk_token": "?", "max_input_chars_per_word": 9} | {
    "continuing_subword_prefix": "##"
}


def small_gpt_neo(dense: Path, folder: Path) -> Path:
    """Write a model with 64 embeddings of positions and the tokenizer of `dense`."""
    stated = json.loads((shutil.copytree(dense, folder) / "config.json").read_text())
    ids = {name: stated[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    sizes = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global"], 2]]}
    config = GPTNeoConfig(vocab_size=640, max_position_embeddings=64, **sizes, **ids)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


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


PAD = {"content": "<pad>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("tokenizer_config.json", {"added_tokens_decoder": {"514": PAD}}),
        ("tokenizer_config.json", {"pad_token": "<pad>"}),
        ("added_tokens.json", {"<pad>": 514}),
    ],
)
def test_a_token_that_transformers_adds_from_another_file_stays(
    name: str, changes: dict[str, Any], dense: Path, text: Path, tmp_path: Path
) -> None:
    """As the padding token of many fine-tunes of Llama."""
    folder = edited(dense, tmp_path / "model", name, **changes)
    passed(invoke("trim", folder, "--tokens", 400, "--data", text, "-o", tmp_path / "new", "--no-proof"))
    before, after = (
        AutoTokenizer.from_pretrained(one).convert_tokens_to_ids("<pad>") for one in (folder, tmp_path / "new")
    )
    rows = [AutoModelForCausalLM.from_pretrained(one).model.embed_tokens.weight for one in (folder, tmp_path / "new")]
    assert (before, after, len(rows[1])) == (514, 383, 384) and torch.equal(rows[0][before], rows[1][after])


def test_a_word_that_is_an_added_token_too(proving_here: None, dense: Path, text: Path, tmp_path: Path) -> None:
    """Merges make it as well, here alone, so the tokens on the way to it stay."""
    document = json.loads((dense / "tokenizer.json").read_text())
    word = {"id": document["model"]["vocab"]["Ġ798"], "content": "Ġ798", "special": False}
    folder = edited(dense, tmp_path / "model", "tokenizer.json", added_tokens=[*document["added_tokens"], PAD | word])
    (other := tmp_path / "other.txt").write_text("abc " * 50)
    passed(invoke("trim", folder, "--tokens", 384, "--data", other, "-o", tmp_path / "new"))
    assert AutoTokenizer.from_pretrained(tmp_path / "new").tokenize("x 798") == ["x", "Ġ798"]


def test_the_vocabulary_of_an_older_file(dense: Path, text: Path, trimmed: tuple[Path, str], tmp_path: Path) -> None:
    """It states no type, and its merges are strings."""
    model = json.loads((dense / "tokenizer.json").read_text())["model"]
    older = {"vocab": model["vocab"], "merges": [*map(" ".join, model["merges"])]}
    folder = edited(dense, tmp_path / "model", "tokenizer.json", model=older)
    passed(invoke("trim", folder, "--tokens", 400, "--data", text, "-o", tmp_path / "new", "--no-proof"))
    assert (tmp_path / "new" / "tokenizer.json").read_text() == (trimmed[0] / "tokenizer.json").read_text()


def test_padding_and_truncation_stay(proving_here: None, dense: Path, text: Path, tmp_path: Path) -> None:
    """Of the file and of programs that read it alone. Neither decides which tokens the proof compares."""
    truncation = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
    padding = {"strategy": {"Fixed": 10}, "direction": "Left", "pad_id": 512, "pad_type_id": 0, "pad_token": "<eos>"}
    padding["pad_to_multiple_of"] = None
    folder = edited(dense, tmp_path / "model", "tokenizer.json", truncation=truncation, padding=padding)
    passed(invoke("trim", folder, "--tokens", 400, "--data", text, "-o", tmp_path / "new"))
    assert read_provenance(tmp_path / "new" / MASKS_FILE)["proof"]["tokens"] > 500
    stored = json.loads((tmp_path / "new" / "tokenizer.json").read_text())
    assert (stored["truncation"], stored["padding"]) == (truncation, padding | {"pad_id": 382})
    encoded = [Tokenizer.from_file(str(one / "tokenizer.json")).encode("the") for one in (folder, tmp_path / "new")]
    assert encoded[0].tokens == encoded[1].tokens and encoded[1].ids[:5] == [382] * 5
    long = Tokenizer.from_file(str(tmp_path / "new" / "tokenizer.json")).encode(SENTENCES[0])
    assert (len(long.ids), sum(long.attention_mask)) == (10, 8)
    assert AutoTokenizer.from_pretrained(tmp_path / "new").pad_token == "<eos>"


def test_a_tokenizer_that_transformers_chooses_by_the_name_on_the_hub(
    proving_here: None, dense: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not believe the class that these models state, which loses blanks. The cost names the model, not the
    hash of its snapshot."""
    name = "deepseek-ai/DeepSeek-R1-Distill-Llama-8B"
    cached = tmp_path / "hub" / f"models--{name.replace('/', '--')}"
    (cached / "snapshots").mkdir(parents=True)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("abc")
    edited(dense, cached / "snapshots" / "abc", "tokenizer_config.json", tokenizer_class="LlamaTokenizerFast")
    for setting, value in (("HF_HUB_CACHE", str(tmp_path / "hub")), ("HF_HUB_OFFLINE", True)):
        monkeypatch.setattr(f"huggingface_hub.constants.{setting}", value)
    passed(invoke("trim", name, "--tokens", 400, "--data", text, "-o", tmp_path / "new"))
    before, after = (AutoTokenizer.from_pretrained(one) for one in (name, tmp_path / "new"))
    equal = [one for one in SENTENCES if set(before.tokenize(one)) <= after.get_vocab().keys()]
    assert equal and all(before.tokenize(one) == after.tokenize(one) for one in equal)
    assert after.decode(after(CHINESE + " b c").input_ids) == CHINESE + " b c"
    assert read_provenance(tmp_path / "new" / MASKS_FILE)["trimmed"]["name"] == name


def test_a_tokenizer_that_transformers_repairs_only_if_it_is_large(dense: Path, text: Path, tmp_path: Path) -> None:
    """Above 100,000 tokens; the trimmed one stays repaired below."""
    document = json.loads((dense / "tokenizer.json").read_text())
    more = {f"<{number}>": number for number in range(512, 100_512)}
    added = [token | {"id": token["id"] + 100_000} for token in document["added_tokens"]]
    vocabulary = document["model"] | {"vocab": document["model"]["vocab"] | more}
    folder = edited(dense, tmp_path / "model", "tokenizer.json", model=vocabulary, added_tokens=added)
    edit_json(folder / "tokenizer_config.json", fix_mistral_regex=True, tokenizer_class="PreTrainedTokenizerFast")
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "mistral", "vocab_size": 100_608}
    config |= {"bos_token_id": 100_513, "eos_token_id": 100_512, "pad_token_id": None, "architectures": None}
    torch.manual_seed(0)
    (folder / "generation_config.json").unlink()
    AutoModelForCausalLM.from_config(MistralConfig(**config)).save_pretrained(folder)
    edit_json(folder / "config.json", transformers_version="4.50.0")  # whose files are repaired
    passed(invoke("trim", folder, "--tokens", 1024, "--data", text, "-o", tmp_path / "new", "--no-proof"))
    before, after = (AutoTokenizer.from_pretrained(one) for one in (folder, tmp_path / "new"))
    odd = "HelloWorld isn't 12345 THEend"
    assert len(after) == 1024 and before.tokenize(odd) == after.tokenize(odd)
    assert before.tokenize(odd) != AutoTokenizer.from_pretrained(dense).tokenize(odd)


def test_masks_of_a_trimmed_model_state_nothing_of_another_one(
    trimmed: tuple[Path, str], dense: Path, tmp_path: Path
) -> None:
    source = open_source(str(trimmed[0]))
    gates = {"attn": torch.tensor([[1.0, 0.0], [1.0, 1.0]]), "mlp": torch.ones(2, 48)}
    masks = cut(source, gates, tmp_path / "half", "kv-group").folder / MASKS_FILE
    for model, states in ((dense, False), (trimmed[0], True)):
        passed(invoke("apply", model, "--masks", masks, "-o", tmp_path / "new", "--overwrite", "--no-proof"))
        assert ("trimmed" in read_provenance(tmp_path / "new" / MASKS_FILE)) == states, model
        assert ("trimmed from 514" in (tmp_path / "new" / "README.md").read_text()) == states, model


def test_a_quantized_trimmed_model_states_what_trimming_cost(
    trimmed: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says so of its pages when it is inspected, and `compare` finds the dense model by its masks file."""
    leave_unquantized(monkeypatch)
    passed(invoke("quantize", trimmed[0], "--scheme", "W8A8", "-o", tmp_path / "int8"))
    assert_refused(invoke("inspect", tmp_path / "int8"), 7, "README.md and report.html state what that cost")
    stated, before = (read_provenance(folder / MASKS_FILE) for folder in (tmp_path / "int8", trimmed[0]))
    assert {name: stated[name] for name in ("trimmed", "applied_to")} == {
        name: before[name] for name in ("trimmed", "applied_to")
    }
    for page in ("README.md", "report.html"):
        text = (tmp_path / "int8" / page).read_text()
        assert "bits per byte" in text and "measured before quantization" in text


def test_blank_text_is_no_text(dense: Path, tmp_path: Path) -> None:
    """Neither counted nor held out, as it would tell nothing of the cost."""
    (blank := tmp_path / "blank.jsonl").write_text((json.dumps({"text": " \n"}) + "\n") * 3)
    refused = invoke("trim", dense, "--tokens", 400, "--data", blank, "-o", tmp_path / "new")
    assert_refused(refused, 4, "blank.jsonl has no text")
    with blank.open("a") as file:
        file.writelines(json.dumps({"text": sentence}) + "\n" for sentence in SENTENCES[:2])
    texts = trim_module.read_texts(str(blank), AutoTokenizer.from_pretrained(dense), print)
    assert sorted([*texts.counted, *texts.held_out[str(blank)]]) == sorted(SENTENCES[:2])


def test_excerpts_give_as_much_context_as_blocks(
    trimmed: tuple[Path, str], dense: Path, text: Path, tmp_path: Path
) -> None:
    """A pruned model loses less in short contexts, so short excerpts would flatter it."""
    book = tmp_path / "book.txt"
    book.write_text(" ".join(json.loads(line)["text"] for line in text.read_text().splitlines()))
    words = ("eval", trimmed[0], "--against", dense, "--text", book, "--max-length", 32, "--tokens", 320)
    passed(invoke(*words, "-o", tmp_path / "out"))
    (file,) = (tmp_path / "out").glob("text_*.json")
    bits = json.loads(file.read_text())["bits"]["book.txt"]
    num_bytes = sum(bits["excerpt_bytes"])
    num_tokens = bits["tokens_per_byte"]["dense"] * num_bytes
    assert num_bytes / len(bits["excerpt_bytes"]) == pytest.approx(4 * 32, rel=0.1)
    assert 8 * 16 < num_tokens < 2 * 320


def test_a_source_of_one_excerpt_has_no_cost(dense: Path, text: Path, tmp_path: Path) -> None:
    (short := tmp_path / "short.txt").write_text("The quick brown fox")
    words = ("trim", dense, "--tokens", 400, "--data", f"{text},{short}", "-o", tmp_path / "new", "--no-proof")
    assert f"every excerpt of {short} is counted, so its cost is not measured" in passed(invoke(*words)).stdout
    assert [*read_provenance(tmp_path / "new" / MASKS_FILE)["trimmed"]["texts"]] == ["text.jsonl"]


def test_the_search_for_counted_text_takes_a_byte_per_letter() -> None:
    """A string with one emoji takes four, which are 400 MB of the 100 million characters."""
    letters = "".join(map(chr, range(97, 123))) * 1000
    counted, held_out = [letters] * 40 + [EMOJI], {"a": [letters[5:], "new", f"z{EMOJI}"]}
    tracemalloc.start()
    trim_module.drop_counted(held_out, counted)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert held_out == {"a": ["new"]} and most < 2 * 40 * len(letters)


def test_kept_text_is_not_held_out(dense: Path, text: Path, tmp_path: Path) -> None:
    """It would cost nothing. Here all but one of the held-out excerpts are in a kept file of another form."""
    held_out, *rest = trim_module.read_texts(str(text), AutoTokenizer.from_pretrained(dense), print).held_out[str(text)]
    (keep := tmp_path / "keep.txt").write_text("\n".join(rest))
    words = ("trim", dense, "--tokens", 400, "--data", text, "--keep", keep, "-o", tmp_path / "new", "--no-proof")
    passed(invoke(*words))
    stated = read_provenance(tmp_path / "new" / MASKS_FILE)["trimmed"]["texts"]["text.jsonl"]["tokens"]
    tokenizers = (AutoTokenizer.from_pretrained(one) for one in (dense, tmp_path / "new"))
    assert stated == [len(tokenizer.tokenize(held_out)) / len(held_out) for tokenizer in tokenizers]
    shutil.copy(text, again := tmp_path / "keep.jsonl")
    printed = passed(invoke(*words[:7], again, *words[8:], "--overwrite")).stdout
    assert f"every excerpt of {text} is counted, so its cost is not measured" in printed


@pytest.mark.parametrize("content", [CHINESE, EMOJI, "\0\t\r\n  ", "zzqx"])
def test_any_text_is_written_and_read(content: str, trimmed: tuple[Path, str]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(trimmed[0])
    assert tokenizer.decode(tokenizer(content).input_ids) == content


def test_what_the_chat_template_writes_and_a_kept_text_stay(dense: Path, text: Path, tmp_path: Path) -> None:
    before = AutoTokenizer.from_pretrained(dense)
    other, rare = tmp_path / "other.txt", "abc " * 50
    other.write_text(rare)
    keep = tmp_path / "keep.txt"
    keep.write_text("The quick brown fox")
    passed(
        invoke("trim", dense, "--tokens", 384, "--data", other, "--keep", keep, "-o", tmp_path / "new", "--no-proof")
    )
    after = AutoTokenizer.from_pretrained(tmp_path / "new")
    for stays in (" over lazy clouds", "The quick brown fox"):
        assert before.tokenize(stays) == after.tokenize(stays)


@pytest.mark.parametrize("form", ["a list in tokenizer_config.json", "a folder"])
def test_named_chat_templates_without_a_default(form: str, dense: Path, tmp_path: Path) -> None:
    """What each of them writes stays, joined by a filter too; one that fails without tools is no fault."""
    sources = {
        "rag": "{{ ['lazy', 'clouds'] | join(' over ') }}{{ messages[0].content }}",
        "tools": "{{ tools | length }}",
    }
    folder = shutil.copytree(dense, tmp_path / "model")
    (folder / "chat_template.jinja").unlink()
    if form == "a folder":
        (folder / "additional_chat_templates").mkdir()
        for name, source in sources.items():
            (folder / "additional_chat_templates" / f"{name}.jinja").write_text(source)
    else:
        listed = [{"name": name, "template": source} for name, source in sources.items()]
        edit_json(folder / "tokenizer_config.json", chat_template=listed)
    (other := tmp_path / "other.txt").write_text("abc " * 50)
    passed(invoke("trim", folder, "--tokens", 384, "--data", other, "-o", tmp_path / "new", "--no-proof"))
    before, after = (AutoTokenizer.from_pretrained(one) for one in (folder, tmp_path / "new"))
    assert after.chat_template == sources
    assert before.tokenize("lazy over clouds.") == after.tokenize("lazy over clouds.")


def test_a_trimmed_or_pruned_model_is_refused(
    dense: Path, text: Path, trimmed: tuple[Path, str], tmp_path: Path
) -> None:
    """Pages state the cost of one trimming, so two would hide the first."""
    pruned = edited(dense, tmp_path / "pruned", "config.json", ddp_layers=[{}, {}])
    for folder, words in ((trimmed[0], ("trim model to as many tokens",)), (pruned, ("dense", "first"))):
        refused = invoke("trim", folder, "--tokens", 300, "--data", text, "-o", tmp_path / "new", "--no-proof")
        assert_refused(refused, 3, *words)


def test_an_embedding_that_is_stored_as_the_head_too_is_written_once(dense: Path, text: Path, tmp_path: Path) -> None:
    folder = edited(dense, tmp_path / "model", "config.json", tie_word_embeddings=True)
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}, folder / "model.safetensors")
    passed(invoke("trim", folder, "--tokens", 384, "--data", text, "-o", tmp_path / "new", "--no-proof"))
    assert load_file(tmp_path / "new" / "model.safetensors").keys() == weights.keys() - {"lm_head.weight"}
    assert_refused(invoke("inspect", tmp_path / "new"), 7, "new is trimmed, not pruned", "report.html")


GENERATION, PROCESSOR = "generation_config.json", "preprocessor_config.json"


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


def test_unigram_is_filtered(proving_here: None, text: Path, tmp_path: Path) -> None:
    """As llm-jp: a piece that is removed is written by shorter ones, and what has none by its bytes."""
    words = " ".join(SENTENCES).split()
    trainer = trainers.UnigramTrainer(vocab_size=300, special_tokens=["<unk>", "<s>", "</s>"], unk_token="<unk>")
    trained = Tokenizer(models.Unigram())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator([*SENTENCES, CHINESE, *map("".join, itertools.pairwise(words))], trainer)
    document = json.loads(trained.to_str())
    model = document["model"]
    pieces = model["vocab"]
    model["vocab"] = [*pieces[:3], *([f"<0x{byte:02X}>", 0.0] for byte in range(256)), *pieces[3:]]
    model["byte_fallback"] = True
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    document["decoder"] = json.loads(decoders.Sequence(steps).__getstate__())
    document["post_processor"] = json.loads(
        processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)]).__getstate__()
    )
    before = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(document)), unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    config = LlamaConfig(
        vocab_size=len(before), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "dense")
    before.save_pretrained(tmp_path / "dense")
    command = ("trim", tmp_path / "dense", "--tokens", 384, "--data", text, "-o", tmp_path / "new")
    assert "tokens the same" in passed(invoke(*command)).stdout
    after = AutoTokenizer.from_pretrained(tmp_path / "new")
    small = json.loads((tmp_path / "new" / "tokenizer.json").read_text())["model"]
    assert len(after) == 384 < len(before) and small["unk_id"] == 0
    lowest = min(score for _, score in model["vocab"])
    assert min(score for _, score in small["vocab"]) == lowest
    removed = before.get_vocab().keys() - after.get_vocab().keys()
    assert "你" in removed and before.tokenize(CHINESE) != after.tokenize(CHINESE)
    for content in (CHINESE, EMOJI, SENTENCES[0]):
        assert after.decode(after(content)["input_ids"], skip_special_tokens=True) == content
    assert after.tokenize(SENTENCES[0]) == before.tokenize(SENTENCES[0])


def test_byte_fallback_writes_removed_characters_as_bytes() -> None:
    """As Llama-2 and Gemma: a removed character becomes its bytes, and the post-processor's ids follow."""
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=["<s>", *(f"<0x{b:02X}>" for b in range(256))])
    dense = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True))
    dense.normalizer = normalizers.Replace(" ", "▁")
    dense.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    dense.train_from_iterator([*SENTENCES, CHINESE], trainer)
    dense.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    document = json.loads(dense.to_str())
    document["added_tokens"] = document["added_tokens"][:1]  # the trainer made the bytes special too
    dense = Tokenizer.from_str(json.dumps(document))
    ids = vocabulary_module.ids_of(document)
    required = {number for token, number in ids.items() if token.startswith("<")}
    order = dense.encode(SENTENCES[0], add_special_tokens=False).ids
    kept = vocabulary_module.choose(document, required, [order], 384, len(ids))
    new_ids = {old: new for new, old in enumerate(kept)}
    small = Tokenizer.from_str(json.dumps(trim_module.trimmed_document(document, new_ids)))
    assert small.get_vocab_size() == 384 and ids["你"] not in new_ids
    assert small.encode(SENTENCES[0]).ids == [new_ids[old] for old in dense.encode(SENTENCES[0]).ids]
    assert small.decode(small.encode(CHINESE).ids) == CHINESE == dense.decode(dense.encode(CHINESE).ids)
