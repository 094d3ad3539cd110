"""Tokenizers of all kinds write the same text with fewer tokens."""

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import edit_json, invoke, passed
from edited_models import CHINESE, EMOJI, edited
from seams import trim_module, vocabulary_module
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    PreTrainedTokenizerFast,
)

from ddp_vllm.masks import MASKS_FILE, read_provenance
from random_models import SENTENCES

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
