"""Report, model card, `inspect` and `push` of a pruned checkpoint: its numbers, its pictures, nothing fetched."""

import dataclasses
import json
import math
import re
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock, create_autospec

import numpy as np
import pytest
from commands import assert_refused, invoke, passed, write_lines
from huggingface_hub import HfApi
from huggingface_hub.utils import filter_repo_objects
from matplotlib.figure import Figure
from safetensors.numpy import load_file, save_file
from written_folders import PageReader, write_masks, write_mixture, write_model, write_trained

from ddp_vllm.checkpoint import Checkpoint, read_checkpoint
from ddp_vllm.masks import Agreement, Quality, read_masks_file
from ddp_vllm.pages import pictures
from ddp_vllm.pages.card import model_card
from ddp_vllm.pages.summary import lead, units, verdict


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pruned folder called `a<b`, whose name must be escaped; see `write_trained`."""
    return write_trained(tmp_path_factory.mktemp("trained") / "a<b")


@pytest.fixture(scope="module")
def pruned(trained: Path) -> Path:
    """The trained folder, with its report."""
    result = passed(invoke("report", trained))
    assert result.stdout == f"written: {trained / 'report.html'}\n"
    return trained


def test_a_model_that_adapted_to_its_held_out_text_is_reported_as_such(trained: Path) -> None:
    """Perplexity 85 of the dense model and 55 of the pruned one is no sign of quality."""
    checkpoint = read_checkpoint(trained)
    for by, adapted in ({"dense": 85.0, "pruned": 55.0}, True), ({"dense": 55.0, "pruned": 85.0}, False):
        provenance = checkpoint.provenance | {"perplexity": checkpoint.provenance["perplexity"] | by}
        statements = dict(lead(dataclasses.replace(checkpoint, provenance=provenance)))
        assert ("reads this text better than the dense one" in statements.get("note", "")) == adapted


def test_the_page_holds_every_picture_and_loads_nothing(pruned: Path) -> None:
    text = (pruned / "report.html").read_text()
    page = PageReader(text)
    assert page.figures == ["heads", "widths", "curves"] and "url(#" in text
    assert all(source.startswith("data:") for source in page.loaded)
    assert "prefers-color-scheme: dark" in text and 'style="fill: #ffffff"' not in text.partition("</svg>")[0]
    assert "pruned: a<b" in page.text  # names are escaped
    for label in ("layer", "query head", "MLP channels", "target", "KL, nats"):
        assert label in page.text
    for drawing in re.findall("<svg.*?</svg>", text, re.DOTALL):
        assert drawing.count("<path") + drawing.count("<image") > 10  # not empty
        assert all(color[:2] == color[2:4] == color[4:] for color in re.findall("#([0-9a-f]{6})", drawing))  # greys


@pytest.mark.parametrize(("train", "trained_after"), [
    ("masks", "only the scales"), ("weights", "the scales and the weights"), ("lora", "the scales and the weights"),
])  # fmt: skip
def test_captions_hold_in_the_dark_and_for_every_training(train: str, trained_after: str, tmp_path: Path) -> None:
    """A dark page shows pictures inverted. Code in answers keeps its indentation."""
    folder = write_trained(tmp_path / "pruned")
    masks, provenance = read_masks_file(folder / "ddp_masks.safetensors")
    gates = {name.removesuffix(".gates"): values for name, values in masks.items()}
    write_masks(folder, gates, provenance | {"run": {"train": train}})
    passed(invoke("report", folder))
    text = (folder / "report.html").read_text()
    captions = re.findall("<figcaption>(.*?)</figcaption>", text, re.DOTALL)
    assert not re.search("(?i)white|black|dark", " ".join(captions)) and "Blank: removed" in captions[0]
    assert f"after it {trained_after} are trained" in captions[-1]
    assert "white-space: pre-wrap" in text


def test_a_bar_stands_at_the_number_of_its_layer() -> None:
    """Layers 0 and 2 have no MLP that is described, as in a mixture whose first layers are dense."""
    figure = Figure()
    pictures.draw_widths(figure, kept={1: 5, 3: 0}, dense=8)
    bars = [(bar.get_x() + bar.get_width() / 2, bar.get_height()) for bar in figure.axes[0].patches]
    assert bars == [(1, 5), (3, 0), (1, 8), (3, 8)]


def test_report_of_experts_shows_widths(tmp_path: Path) -> None:
    """Layers 0 and 2 have routed experts, layer 1 has none."""
    gates, chosen = np.zeros((2, 8, 24)), {"0": [58, 27, 55, 59, 23, 63, 59, 40], "2": [82, 31, 63, 29, 52, 47, 44, 0]}
    sizes = [[24, 12, 0, 7, 1, 20, 24, 8], [0, 3, 24, 24, 10, 11, 0, 24]]
    for layer, row in enumerate(sizes):
        for expert, width in enumerate(row):
            gates[layer, expert, :width] = 1.0
    out = write_mixture(tmp_path / "out", [sizes[0], None, sizes[1]])
    write_masks(out, {"experts": gates}, {"routing": {"chosen": chosen}})
    write_lines(out / "ddp_metrics.jsonl", [{"step": 1, "loss": 2.0, "experts_sparsity": 0.1}] * 3)
    passed(invoke("report", out))
    page = PageReader((out / "report.html").read_text())
    assert page.figures == ["experts", "curves"] and "Blank: layers without experts" in page.text
    text = passed(invoke("inspect", out)).stdout
    assert "experts of 8" in text and re.search("2 +│ +6 │ +96 │ +50%", text)
    assert "in layers 2 (1 of 8)" in text


def test_report_refuses_masks_of_other_widths_and_unwritable_places(pruned: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(pruned, tmp_path / "copy"))
    assert_refused(invoke("report", folder, "-o", folder / "config.json"), 5, "cannot be written")
    masks = load_file(folder / "ddp_masks.safetensors")
    masks["attn.gates"] = masks["attn.gates"][1:]
    save_file(masks, folder / "ddp_masks.safetensors", {"ddp": "{}"})
    assert_refused(invoke("report", folder), 7, "different checkpoints")
    shutil.copy(pruned / "ddp_masks.safetensors", folder)
    for line in ("{", '{"loss": 1}'):
        (folder / "ddp_metrics.jsonl").write_text(line)
        assert_refused(invoke("report", folder), 7, "cannot be read")


def test_inspect_shows_widths_totals_and_quality(trained: Path) -> None:
    text = passed(invoke("inspect", trained)).stdout
    widths = [("4", "8", "93"), ("4", r"6 \(1 2 2 1\)", "57"), ("–", "–", "23")]
    for index, (kv_heads, query_heads, channels) in enumerate(widths):
        assert re.search(rf"{index} +│ +{kv_heads} │ +{query_heads} │ +{channels} │", text), text
    for label, dense, left in units(read_checkpoint(trained)):
        assert re.search(rf"{label} +{left:,} of +{dense:,} +{100 * (1 - left / dense):.1f}% removed", text)
    assert re.search(r"held-out perplexity +dense \d+\.\d\d → pruned \d+\.\d\d \(256 tokens of a.jsonl\)", text)


def test_the_report_shows_the_three_models_side_by_side(trained: Path, tmp_path: Path) -> None:
    """Of a copy of the trained folder, after `recover`."""
    losses = {"dense": [2.0, 2.2], "pruned": [2.5, 2.9], "recovered": [2.3, 2.4]}
    quality: dict[str, Any] = {name: math.exp(sum(values) / 2) for name, values in losses.items()}
    quality |= {"tokens": 32, "block_losses": losses}
    recovery = {"recipe": {"train": "weights", "tokens": 960, "learning_rate": 2e-4}, "texts": ["/mine/chats.jsonl"]}
    recovery |= {"seconds": 61.0, "watched": {"/mine/b<ooks.jsonl": quality}, "prompts": ["Who?", "What?"]}
    recovery |= {"answers": {name: [f"{name} says <b>", f"{name}\nagain"] for name in losses}}
    folder = Path(shutil.copytree(trained, tmp_path / "recovered"))
    provenance = read_checkpoint(folder).provenance | {"perplexity": quality, "recovery": recovery}
    masks = folder / "ddp_masks.safetensors"
    save_file(load_file(masks), masks, {"ddp": json.dumps(provenance)})
    steps = [{"step": step, "loss": 3.0 / step, "ce": 2.0 / step, "kl": 0.5 / step} for step in range(1, 9)]
    write_lines(folder / "ddp_recovery.jsonl", steps)
    passed(invoke("report", folder))
    page = (folder / "report.html").read_text()
    answers = ("dense says &lt;b&gt;", "recovered\nagain")
    facts = ("recovered / dense", "Perplexity on b&lt;ooks.jsonl", "960 tokens", 'id="recovery"')
    assert not [text for text in (*answers, *facts) if text not in page]
    assert "/mine/" not in page.partition("<summary>")[0]
    assert page.index("dense says") < page.index("<h2>Size")  # answers come first


@pytest.mark.parametrize(("ratio", "top1", "meaning"), [
    (0.9, 0.15, "a large loss"),  # adapted to the text, and another model
    (1.0, 0.747, "a large loss"),  # and no 75%, which would be enough
    (0.9, 0.95, "no loss on this kind of text"),
    (1.15, None, "answers may change"),
    (1.3, 0.95, "a large loss"),
])  # fmt: skip
def test_the_verdict_is_the_worse_of_perplexity_and_agreement(ratio: float, top1: float | None, meaning: str) -> None:
    agreement = {} if top1 is None else {"pruned": Agreement(kl=0.1, top1=top1)}
    quality = Quality(dense=20.0, pruned=20.0 * ratio, tokens=1000, agreement=agreement)
    stated, _, words = verdict(quality).partition(": ")
    assert words.startswith(meaning) and f"{ratio:.3f} times" in stated
    assert top1 is None or f"{top1:.1%} top-1 agreement" in stated


@pytest.mark.parametrize(("model", "there", "named"), [
    ("models/llama", False, True), ("models/llama", True, False), ("./llama", False, False),
])  # fmt: skip
def test_a_folder_is_no_base_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, there: bool, named: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = write_model(tmp_path / "pruned", widths=[(1, 5), (2, 16)], origin=model)
    if there:
        Path(model).mkdir(parents=True)
    assert (f"base_model: {model}" in model_card(read_checkpoint(folder), "pruned")) == named


@pytest.mark.parametrize(
    ("widths", "units"),
    [((2, 5), "MLP channels"), ((1, 16), "attention heads"), ((1, 5), "attention heads and MLP channels")],
)
def test_the_card_names_what_was_removed(widths: tuple[int, int], units: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "pruned", widths=[widths, (2, 16)], origin="owner/dense")
    assert f": {units} whose learned masks closed" in model_card(read_checkpoint(folder), "pruned")


def test_the_card_names_each_text_once_and_no_folder(trained: Path) -> None:
    checkpoint = read_checkpoint(trained)
    quality = {"tokens": 1024, "dense": 2.0, "pruned": 3.0}
    texts = ["/mine/a.jsonl", "/mine/a.jsonl", "owner/b"]
    card = model_card(dataclasses.replace(checkpoint, provenance={"texts": texts, "perplexity": quality}), "pruned")
    assert "(1,024 tokens of a.jsonl, owner/b)" in card and "/mine" not in card
    assert "\nits dense model, pruned by ddp-vllm" in card and "base_model" not in card


def test_the_card_names_every_runtime_that_loads_the_folder(tmp_path: Path) -> None:
    """A llama goes everywhere; what is quantized not into llama.cpp, a Qwen3 neither, experts not into stock vLLM.

    What the export to llama.cpp refuses, a window or stretched positions, the card does not offer.
    """

    def named(checkpoint: Checkpoint, **changed: Any) -> list[bool]:
        card = model_card(dataclasses.replace(checkpoint, config={**checkpoint.config, **changed}), "p")
        return [command in card for command in (
            "vllm serve ./p\n", "vllm serve ./p --trust-remote-code --model-impl transformers\n",
            'from_pretrained("./p", trust_remote_code=True)', "ddp-vllm export ./p --outtype q8_0 -o p.gguf\n",
        )]  # fmt: skip

    llama = read_checkpoint(write_model(tmp_path / "llama", widths=[(1, 5), (2, 16)], origin="owner/llama"))
    assert named(llama) == [True, True, True, True]
    assert named(llama, quantization_config={"format": "int-quantized"}) == [True, True, True, False]
    assert named(llama, model_type="ddp_qwen3") == [True, True, True, False]
    window = {"model_type": "ddp_mistral", "sliding_window": 4096}
    assert named(llama, **window, max_position_embeddings=4096) == [True, True, True, True]
    assert named(llama, **window, max_position_embeddings=8192) == [True, True, True, False]
    assert named(llama, rope_parameters={"rope_type": "yarn", "factor": 4.0}) == [True, True, True, False]
    mixture = write_mixture(tmp_path / "experts", [[24, 3, 24, 24, 24, 24, 24, 24]])
    assert named(read_checkpoint(mixture)) == [True, False, True, False]


# files of a model that was published before
EARLIER = ["model-00001-of-00002.safetensors", "additional_chat_templates/old.jinja", "ddp_recovery.jsonl"]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """The hub's library, which takes only calls that it has, and answers without a network."""
    api: Mock = create_autospec(HfApi, instance=True)
    api.create_repo.return_value.repo_id = "me/tiny"
    api.upload_file.return_value = "https://hub/me/tiny/commit/1"
    api.list_repo_files.return_value = [*EARLIER, "LICENSE", "README.md", "picture.png", "draft/model.safetensors"]
    monkeypatch.setattr("huggingface_hub.HfApi", lambda **_: api)
    return api


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_model(tmp_path / "tiny", widths=[(1, 5), (2, 16)], origin="owner/tiny")


def test_what_arrives_is_whole_and_says_how_to_load_it(tiny: Path, hub: Mock) -> None:
    (tiny / "eval" / "deep").mkdir(parents=True)
    local = ["eval/deep/results.json", "sharegpt-offline.json", "bench.json", "steps.json", "machine.json"]
    local += ["page.html", "notes.txt", ".env", "run.py", "eval/config.json", "events.out.tfevents.1", "train.jsonl"]
    (tiny / "additional_chat_templates").mkdir()
    sent = ["tokenizer.json", "LICENSE", "report.html", "ddp_metrics.jsonl", "preprocessor_config.json", "vocab.txt"]
    sent += ["additional_chat_templates/rag.jinja", "chat_template.jinja", "modeling_ddp.py"]
    for name in (*local, *sent):
        (tiny / name).write_text("{}")
    done = passed(invoke("push", tiny, "me/tiny", "--private", "--license", "apache-2.0", "--revision", "new"))
    assert done.stdout == "published: https://hub/me/tiny/commit/1\n"
    hub.create_repo.assert_called_once_with("me/tiny", private=True, exist_ok=True)
    hub.create_branch.assert_called_once_with("me/tiny", branch="new", exist_ok=True)
    folder, card = hub.upload_folder.call_args.kwargs, hub.upload_file.call_args.kwargs
    assert folder["folder_path"] == str(tiny) and folder["repo_id"] == card["repo_id"] == "me/tiny"
    assert folder["revision"] == card["revision"] == "new" and card["path_in_repo"] == "README.md"
    here = {str(path.relative_to(tiny)) for path in tiny.rglob("*") if path.is_file()}
    assert {*filter_repo_objects(here, allow_patterns=folder["allow_patterns"])} == here - {"README.md", *local}
    assert {*sent, "config.json", "model.safetensors"} <= here
    there = {*hub.list_repo_files.return_value}
    assert {*filter_repo_objects(there, allow_patterns=folder["delete_patterns"])} == {*EARLIER}
    text = card["path_or_fileobj"].decode()
    assert "vllm serve me/tiny\n" in text and "license: apache-2.0" in text and "base_model: owner/tiny" in text


def test_what_cannot_be_published_is_one_line(tiny: Path, hub: Mock) -> None:
    hub.upload_file.side_effect = RuntimeError("401\nInvalid username or password.")
    assert_refused(invoke("push", tiny, "me/tiny"), 5, "me/tiny was not published (RuntimeError: 401 Invalid user")
    hub.create_branch.assert_not_called()
    hub.reset_mock()
    (tiny / "config.json").write_text("{}")
    assert_refused(invoke("push", tiny, "me/tiny"), 7, "is not a pruned checkpoint")
    hub.create_repo.assert_not_called()
