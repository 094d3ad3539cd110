"""`eval --text`: perplexity, KL divergence and top-1 agreement with the dense model on a user's own text."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from any_models import write_headers
from commands import assert_refused, edit_json, invoke, passed
from msgspec import convert

from ddp_prune.core.loss import OutputHead, agreement, perplexity_of
from ddp_prune.fidelity import open_model
from ddp_prune.models.evaluation import Evaluation, bits_of
from ddp_prune.models.loading import load_model
from ddp_prune.models.source import open_source
from ddp_prune.text.tokens import load_tokenizer
from ddp_vllm import api
from ddp_vllm.checkpoint import read_config
from ddp_vllm.evaluations import perplexity_ratio
from ddp_vllm.families import pruned_config
from ddp_vllm.masks import Quality
from ddp_vllm.pages.compare import comparison_table
from ddp_vllm.pages.measurements import collect

pytestmark = pytest.mark.usefixtures("no_pictures")


def test_agreement_is_that_of_all_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddp_prune.core.loss.CHUNK_BYTES", 4 * 50 * 16)  # 16 tokens at once
    chance = torch.Generator().manual_seed(0)
    ours, theirs = (torch.randn(37, 8, generator=chance) for _ in range(2))
    head = OutputHead(weight=torch.randn(50, 8, generator=chance), divisor=2.0, cap=3.0)
    other = OutputHead(weight=torch.randn(50, 8, generator=chance))
    p, t = (each.logits(hidden).double() for each, hidden in ((head, ours), (other, theirs)))
    wanted = F.kl_div(p.log_softmax(-1), t.log_softmax(-1), reduction="sum", log_target=True).item()
    divergence, alike = agreement(ours, head, theirs, other)
    assert divergence == pytest.approx(wanted, rel=1e-5)
    assert alike == int((p.argmax(-1) == t.argmax(-1)).sum())


@pytest.fixture
def folder(pruned: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pruned, tmp_path / "pruned"))


@pytest.fixture
def text(tiny_text: Path, tmp_path: Path) -> Path:
    path = tmp_path / "own.jsonl"
    path.write_text("".join(tiny_text.read_text().splitlines(keepends=True)[5:7]))
    return path


def test_text_of_ones_own(folder: Path, tiny_model: Path, tiny_text: Path, text: Path, tmp_path: Path) -> None:
    """Of conversations only the assistant's turns are evaluated, and `compare` shows the results."""
    near = api.inspect(folder)["perplexity"]["agreement"]["pruned"]
    assert 0 < near["kl"] < 10 and 0 <= near["top1"] < 1
    chats = tmp_path / "chats.jsonl"
    turns = [{"from": "human", "value": "melt ice"}, {"from": "gpt", "value": "the sun does that, the sun"}]
    chats.write_text((json.dumps({"conversations": turns}) + "\n") * 20)
    shutil.copy(text, comma := tmp_path / "a text, with a comma.jsonl")
    done = passed(invoke("eval", folder, "--max-length", "16", "--text", text, "--text", chats, "--text", comma))
    assert all(f"{path.name}: perplexity" in done.output for path in (text, comma)) and "nats" in done.output
    (file,) = (folder / "eval").glob("text_*.json")
    found = json.loads(file.read_text())["texts"]
    assert found[chats.name]["tokens"] <= found[text.name]["tokens"] and found[text.name]["sha256"]
    gated = ["eval", folder, "--max-length", "16", "--text", text, "-o", tmp_path / "gated", "--max-ratio"]
    missed = invoke(*gated, "0.01", "--json")
    assert missed.exit_code == 9 and json.loads(missed.stdout)["texts"].keys() == {text.name}
    assert "the dense model's, above --max-ratio 0.01 and top-1 agreement on" in missed.stderr
    assert "below --min-agreement 0.9; train for longer" in missed.stderr
    agreement = invoke(*gated, "1e9", "--min-agreement", "0.999")
    assert agreement.exit_code == 9 and "below --min-agreement 0.999; train for longer" in agreement.stderr
    assert "--max-ratio" not in agreement.stderr
    assert (met := passed(invoke(*gated, "1e9", "--quiet"))).output == "", met.output
    rows = {row[0]: row[-1] for row in comparison_table(collect([folder])).rows}
    assert "×" in rows[f"perplexity on {text.name}, × dense"]
    same = api.evaluate_text(tiny_model, tiny_text, against=str(tiny_model), output=tmp_path, max_length=16, tokens=320)
    near = same["texts"][tiny_text.name]["agreement"]["pruned"]
    assert near["top1"] == 1 and near["kl"] == pytest.approx(0, abs=1e-5)
    assert same["texts"][tiny_text.name]["tokens"] == 20 * 15  # the first of a block is not predicted


def test_tokens_of_a_page_are_those_that_are_predicted(folder: Path) -> None:
    """As those of `eval --text`: the perplexity of four blocks of 16 tokens is over 60."""
    quality = api.inspect(folder)["perplexity"]
    assert quality["tokens"] == sum(quality["block_tokens"]) == 4 * 15
    assert "(60 tokens of text.jsonl)" in (folder / "README.md").read_text()


def test_perplexity_over_masked_text_is_that_of_its_tokens(tiny_model: Path) -> None:
    """Two blocks have a single token with loss, another all of its own: the sum of losses is over the sum of tokens."""
    model = load_model(open_source(str(tiny_model)), "float32")
    blocks = torch.randint(1, 320, (3, 64), generator=torch.Generator().manual_seed(1))
    loss_mask = torch.ones_like(blocks, dtype=torch.bool)
    loss_mask[0] = loss_mask[1] = False
    loss_mask[0, 5] = loss_mask[1, 20] = True
    evaluation = Evaluation({"a": blocks}, None, {"a": loss_mask})
    evaluation.evaluate_texts("dense", model)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(1.5)
    evaluation.evaluate_texts("pruned", model)
    with torch.no_grad():
        logits = model(blocks).logits[:, :-1]
    each = F.cross_entropy(logits.flatten(0, 1), blocks[:, 1:].flatten(), reduction="none")[loss_mask[:, 1:].flatten()]
    quality = evaluation.perplexity("a")
    assert quality["tokens"] == len(each) == sum(quality["block_tokens"]) == 65 and math.isfinite(quality["dense"])
    assert evaluation.losses["a"]["pruned"][:2] == pytest.approx(each[:2].tolist(), rel=1e-4)
    assert quality["pruned"] == pytest.approx(each.mean().exp().item(), rel=1e-4)
    assert perplexity_of([1e4]) == perplexity_of([math.nan]) == math.inf  # of a broken model
    ratio = perplexity_ratio(convert(quality, Quality))
    assert ratio and ratio[0] == pytest.approx(quality["pruned"] / quality["dense"], rel=1e-6)


def test_a_text_that_is_longer_than_the_context_is_read_in_parts(tiny_model: Path) -> None:
    """A trimmed tokenizer makes up to four tokens of a character."""
    model, tokenizer = load_model(open_source(str(tiny_model)), "float32"), load_tokenizer(str(tiny_model))
    text = "the sun melts ice 你好，世界 " * 20
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    first = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    model.config.max_position_embeddings = longest = 100
    assert len(ids) > longest
    for max_length, width in ((16, 16), (None, longest)):
        parts = [torch.tensor([[first, *ids[start : start + width - 1]]]) for start in range(0, len(ids), width - 1)]
        nats = sum(model(part, labels=part).loss.item() * (part.shape[1] - 1) for part in parts)
        (bits,), num_tokens = bits_of(model, tokenizer, [text], max_length)
        assert bits == pytest.approx(nats / math.log(2), rel=1e-4) and num_tokens == len(ids)


def test_text_is_not_evaluated_beyond_the_positions_of_a_model(
    folder: Path, tiny_model: Path, tiny_text: Path, tmp_path: Path
) -> None:
    """By default too, as `prune` refuses it."""
    edit_json(folder / "config.json", max_position_embeddings=512)
    words = ["eval", folder, "--against", tiny_model, "--text", tiny_text, "-o", tmp_path / "out"]
    assert_refused(invoke(*words), 2, "--max-length is 2048, but", "takes 512; lower --max-length")
    assert_refused(invoke(*words, "--max-length", "513"), 2, "--max-length is 513")


def test_sizes_that_the_config_leaves_to_its_class(tmp_path: Path) -> None:
    """As the published configs of Gemma 3 with images: its pruned folder was made from it."""
    folder = write_headers("Gemma3Config", tmp_path / "dense")
    stated = ("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "sliding_window")
    text = json.loads((folder / "config.json").read_text())["text_config"]
    edit_json(folder / "config.json", text_config={key: text[key] for key in stated})
    dense, pruned = open_source(str(folder)), tmp_path / "pruned"
    pruned.mkdir()
    (pruned / "model.safetensors").hardlink_to(folder / "model.safetensors")
    edit_json(pruned / "config.json", **pruned_config(read_config(folder), dense.widths))
    assert open_model(str(pruned), dense).shapes == dense.shapes


def test_what_is_not_compared(folder: Path, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = tmp_path / "short.txt"
    short.write_text("a word")
    twin, own = tmp_path / "elsewhere" / short.name, [folder, "--text", short]
    for words, reason in (
        (own, "give more text, or lower --max-length"),
        ([tiny_model, "--text", short], "pass that model with --against"),
        ([*own, "--text", twin], "two texts are called short.txt"),
        ([folder, "--text", f"{short}:3"], f"{short}:3, but is read once"),
    ):
        refused = invoke("eval", *words)
        assert_refused(refused, refused.exit_code, reason)
        assert refused.exit_code and not (folder / "eval").exists() and not (tiny_model / "eval").exists()
    other, config = tmp_path / "other", json.loads((tiny_model / "config.json").read_text())
    shutil.copytree(tiny_model, other)
    (other / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "awq"}}))
    refused = invoke("eval", other, "--against", tiny_model, "--text", short)
    assert_refused(refused, 3, "is quantized (awq); supported is compressed-tensors")
    monkeypatch.setenv("DDP_VLLM_CACHE", str(tmp_path / "cache"))  # as on another machine
    assert_refused(invoke("eval", *own), 2, "which is not on this machine; pass it with --against")
