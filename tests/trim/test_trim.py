"""The verb trim: fewer tokens, a stock model, and what that costs."""

import json
import math
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import assert_refused, invoke, passed
from edited_models import EMOJI
from seams import cut, leave_unquantized, open_source, trim_module
from transformers import AutoModelForCausalLM, AutoTokenizer

from ddp_vllm.api import read
from ddp_vllm.evaluations import bits_ratio, perplexity_ratio
from ddp_vllm.masks import MASKS_FILE, read_provenance
from ddp_vllm.pages.compare import choice, comparison_table
from ddp_vllm.pages.measurements import collect
from ddp_vllm.pages.report import write_report
from random_models import SENTENCES


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

    trimmed_document = trim_module.trimmed_document

    def without_a_merge(*arguments: Any) -> Any:
        document = trimmed_document(*arguments)
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
    stated_ratio, low, high = perplexity_ratio(bits)
    assert stated_ratio == pytest.approx(perplexity) and low < stated_ratio < high
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
